"""A JSON schema as it is compiled: objects are closed, and no pattern is left without a key.

Where a schema doesn't say `additionalProperties`, JSON Schema allows any other key, and a small
model writes such keys for ever. As in vLLM, an object that lists its keys has no others then.

    {"properties": {"a": A}, "patternProperties": {"^a$": P}}         as it was asked for
    {"properties": {"a": {"allOf": [A, P]}}, "additionalProperties": false}        as it is compiled

The compiler takes listed keys out of a pattern. If nothing is left of all patterns, it still allows
the comma in front of a further key, and then no key at all: the text could never end.

An object may be put together from *parts*: by `allOf`, or with `$ref` or `anyOf` beside its keys.
Each part, closed by itself, would forbid the keys of the others. So they stay open, and a *lid*
lists the keys of all: JSON Schema's `unevaluatedProperties: false`, which the compiler doesn't
know. A definition may be an object by itself, too: as a part it has an open twin.

    {"properties": {"a": A}, "$ref": "#/$defs/d"}                            where d lists the key b
    {"properties": {"a": A}, "$ref": its twin, "allOf": [the lid, of {"a": {}, "b": {}}]}

Each alternative gets a lid of its own, unless the alternatives stand behind a reference.

Invariant: what matches a schema as it is compiled is valid by the one that was asked for. The parts
are not merged, as their types and limits may differ.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy

Speakers = list[dict]  # schemas that say something of one object's keys

NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by their names
HELD = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")
EITHER = ("anyOf", "oneOf")
SPEAKS = {"properties", "patternProperties", "required", "additionalProperties"}  # of keys
MOST_KEYS = 100_000  # that are listed for all lids: a schema that needs more stays open
MOST_PATTERNS = 16  # for one value: each takes the compiler twice as long, and 20 take a second


def tidy(schema: object, closes: bool, is_dead: Callable[[list[str], list[str]], bool]) -> object:
    """The schema as it is compiled; it is changed in place. closes: whether objects are closed.
    is_dead: whether patterns have no key of their own, given an object's keys and its patterns.
    Raises `ValueError` for more patterns of one value than can be compiled in time."""
    if isinstance(schema, dict):
        finder = Closer(schema)
        if (most := max(map(finder.num_patterns, _everything(schema)))) > MOST_PATTERNS:
            raise ValueError(f"allOf puts {most} patterns together, and {MOST_PATTERNS} are the "
                             "most: write them as one pattern")
    if closes and isinstance(schema, dict):
        schema = Closer(schema).close_all()
    for one in list(_everything(schema)):
        keys, patterns = _named(one, "properties"), _named(one, "patternProperties")
        is_closed = one.get("additionalProperties") is False
        if is_closed and keys and patterns and is_dead(list(keys), list(patterns)):
            del one["patternProperties"]
            for key in keys:
                keys[key] = {"allOf": [keys[key], *(
                    value for pattern, value in patterns.items() if re.search(pattern, key))]}
    return schema


class Closer:
    """Closes the objects of one schema."""

    def __init__(self, root: dict):
        self.root, self.original = root, deepcopy(root)
        self.places = [root]  # schemas that describe a value by themselves
        self.twins: dict[str, str] = {}  # references to definitions, and to what takes their place
        self.patterns: dict[str, int] = {}  # of definitions, by reference
        self.num_keys = 0

    def close_all(self) -> dict:
        """The schema, closed; or as it was, if a reference leads elsewhere or it is too large."""
        refs = [one["$ref"] for one in _everything(self.root) if "$ref" in one]
        if any(self._find(ref) is None for ref in refs):
            return self.original
        try:
            while self.places:
                schema = self.places.pop()
                self.places += _inside(schema)
                self._close(schema, [])
        except OverflowError:
            return self.original
        return self.root

    def num_patterns(self, schema: dict) -> int:
        """How many patterns a value must match, those of definitions included."""
        return sum(("pattern" in part) + self._num_referred(part.get("$ref"))
                   for part in _parts(schema))

    def _num_referred(self, ref: object) -> int:
        if (found := self._find(ref)) is None:
            return 0
        if ref not in self.patterns:
            self.patterns[ref] = 0  # until it is known: a definition may refer to itself
            self.patterns[ref] = self.num_patterns(found)
        return self.patterns[ref]

    def _count(self, number: int) -> None:
        """Raises `OverflowError` above the limit: a client's schema must not take for ever."""
        self.num_keys += number
        if self.num_keys > MOST_KEYS:
            raise OverflowError

    def _close(self, schema: dict, beside: list[Speakers]) -> None:
        """Forbid what neither the parts of this schema list nor those beside it."""
        parts = list(_parts(schema))
        here = [*beside, *([part] for part in parts if SPEAKS & part.keys()), *filter(None, (
            self._speakers(self._find(part["$ref"])) for part in parts if "$ref" in part))]
        either = [_dicts(part.get(key)) for part in parts for key in EITHER]
        theirs = [self._speakers({"anyOf": some}) for some in either]
        if any(theirs):
            self._open(parts)
            for some, own in zip(either, theirs, strict=True):
                self._count(len(theirs))
                around = here + [one for one in theirs if one and one is not own]
                for alternative in some:
                    self._close(alternative, around)
        elif beside or len(here) > 1:
            self._open(parts)
            if lid := self._lid(here):
                schema["allOf"] = [*schema.get("allOf", ()), lid]
        elif self._lid(here):  # one part speaks, here or in a definition, which is closed there
            for part in parts:
                if SPEAKS & part.keys():
                    part["additionalProperties"] = False

    def _speakers(self, schema: dict, seen: frozenset = frozenset()) -> Speakers:
        """Those of its parts, alternatives and definitions that speak of keys."""
        found = []
        for part in _parts(schema, EITHER):
            self._count(1 + len(_named(part, "properties")))
            if SPEAKS & part.keys():
                found.append(part)
            if "$ref" in part and part["$ref"] not in seen:
                found += self._speakers(self._find(part["$ref"]), seen | {part["$ref"]})
        return found

    def _lid(self, here: list[Speakers]) -> dict | None:
        """None where nothing is listed, or not all that must be there, or where a part has
        `additionalProperties`, and so speaks of all keys."""
        parts = [part for speakers in here for part in speakers]
        keys, patterns = ({key: {} for part in parts for key in _named(part, name)}
                          for name in ("properties", "patternProperties"))
        required = {key for part in parts for key in part.get("required", ())}
        self._count(len(parts) + len(keys))
        if any("additionalProperties" in part for part in parts) or not (
                patterns or keys and keys.keys() >= required):
            return None
        return dict(properties=keys, patternProperties=patterns, additionalProperties=False)

    def _open(self, parts: list[dict]) -> None:
        """Let the parts refer to twins that stay open."""
        for part in parts:
            if "$ref" in part:
                part["$ref"] = self._twin(part["$ref"])

    def _twin(self, ref: str) -> str:
        if ref not in self.twins and ref not in self.twins.values():
            name = f"nanoserve-open-{len(self.twins)}"
            self.twins[ref] = f"#/$defs/{name}"
            twin = self.root.setdefault("$defs", {})[name] = deepcopy(self._find(ref))
            self.places += _inside(twin)
            self._open(list(_parts(twin, EITHER)))
        return self.twins.get(ref, ref)

    def _find(self, ref: object) -> dict | None:
        """What stands at "#/$defs/name", as it was asked for. None for other references."""
        found: object = self.original
        if not isinstance(ref, str) or not re.fullmatch(r"#(/[^%]*)?", ref):
            return None
        for name in ref.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal():
                found = dict(enumerate(found)).get(int(name))
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None


def _named(schema: dict, key: str) -> dict:
    """The schemas that a keyword gives by name. Where its value is no object there are none here,
    and the compiler will raise an error."""
    return found if isinstance(found := schema.get(key), dict) else {}


def _dicts(value: object) -> list[dict]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _parts(schema: dict, more: tuple[str, ...] = ()) -> Iterator[dict]:
    """The schema and those in its `allOf`: what they say holds for one value."""
    yield schema
    for key in ("allOf", *more):
        for part in _dicts(schema.get(key)):
            yield from _parts(part, more)


def _inside(schema: dict) -> list[dict]:
    """The schemas that its parts have for other values: of keys, of items, and definitions."""
    return [one for part in _parts(schema, EITHER) for value in (
        *(list(_named(part, key).values()) for key in NAMED), *map(part.get, HELD))
        for one in _dicts(value)]


def _everything(schema: object) -> Iterator[dict]:
    """The schema and all in it; a property may have any name, that of a keyword, too."""
    places = _dicts(schema)
    while places:
        place = places.pop()
        places += _inside(place)
        yield from _parts(place, EITHER)
