"""A JSON schema as it is compiled: objects are closed, and no pattern is left without a key.

Where a schema doesn't say `additionalProperties`, JSON Schema allows any other key, and a small
model writes such keys for ever. As in vLLM, an object that lists its keys has no others then.

    {"properties": {"a": A}, "patternProperties": {"^a$": P}}         as it was asked for
    {"properties": {"a": {"allOf": [A, P]}}, "additionalProperties": false}        as it is compiled

The compiler takes listed keys out of a pattern. If nothing is left of all patterns, it still allows
the comma in front of a further key, and then no key at all: the text could never end.

An object may be put together from *parts*: by `allOf`, or with `$ref` or `anyOf` beside its keys.
Each part, closed by itself, would forbid the keys of the others. So they stay open, and a *lid*
lists the keys of all. This is what JSON Schema's `unevaluatedProperties: false` means, which the
compiler doesn't know. A definition may be an object by itself, too: as a part it has an open twin.

    {"properties": {"a": A}, "$ref": "#/$defs/d"}                            where d lists the key b
    {"properties": {"a": A}, "$ref": its twin, "allOf": [
        {"properties": {"a": {}, "b": {}}, "additionalProperties": false}]}                  the lid

Of alternatives each gets its own lid, unless they stand behind a reference.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by their names
HELD = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")
EITHER = ("anyOf", "oneOf")
MOST_KEYS = 100_000  # that are listed for all lids: a schema that needs more stays open


def tidy(schema: object, closes: bool, is_dead: Callable[[list[str], list[str]], bool]) -> object:
    """The schema as it is compiled; it is changed in place. closes: whether objects are closed.
    is_dead: whether patterns have no key of their own, given an object's keys and its patterns."""
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


@dataclass
class Listed:
    """What some parts say of an object's keys."""

    num_parts: int = 0  # that say anything
    keys: dict[str, dict] = field(default_factory=dict)  # in order; the values are {}
    patterns: dict[str, dict] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    is_open: bool = False  # one has `additionalProperties`, and so speaks of all keys

    def __or__(self, other: "Listed") -> "Listed":
        return Listed(self.num_parts + other.num_parts, self.keys | other.keys,
                      self.patterns | other.patterns, self.required | other.required,
                      self.is_open or other.is_open)

    def lid(self) -> dict | None:
        """None where nothing is listed, or not all that must be there."""
        if self.is_open or not (self.patterns or self.keys and self.keys.keys() >= self.required):
            return None
        return {"properties": self.keys, "patternProperties": self.patterns,
                "additionalProperties": False}


class Closer:
    """Closes the objects of one schema."""

    def __init__(self, root: dict):
        self.root, self.original = root, deepcopy(root)
        self.places = [root]  # schemas that describe a value by themselves
        self.twins: dict[str, str] = {}  # references to definitions, and to what takes their place
        self.num_keys = 0

    def close_all(self) -> dict:
        """The schema, closed; or as it was, if a reference leads elsewhere or it is too large."""
        refs = [one["$ref"] for one in _everything(self.root) if "$ref" in one]
        if any(self._find(ref) is None for ref in refs):
            return self.original
        while self.places and self.num_keys <= MOST_KEYS:
            schema = self.places.pop()
            self.places += _inside(schema)
            self._close(schema, Listed())
        return self.original if self.num_keys > MOST_KEYS else self.root

    def _close(self, schema: dict, beside: Listed) -> None:
        """Forbid what neither the parts of this schema list nor those beside it."""
        here, parts = beside | self._list(schema, False), list(_parts(schema))
        either = [_dicts(part.get(key)) for part in parts for key in EITHER if key in part]
        theirs = [self._list({"anyOf": some}, True) for some in either]
        if any(one.num_parts for one in theirs):
            self._open(parts)
            for some, own in zip(either, theirs, strict=True):
                if self.num_keys > MOST_KEYS:
                    return
                around = reduce(or_, (one for one in theirs if one is not own), here)
                self.num_keys += len(around.keys) * (len(some) + len(theirs))
                for alternative in some:
                    self._close(alternative, around)
        elif here.num_parts > 1 or beside.num_parts:
            self._open(parts)
            if lid := here.lid():
                schema["allOf"] = [*schema.get("allOf", ()), lid]
        elif here.lid():  # of one part, which is here, or a definition
            for part in parts:
                if "properties" in part or "patternProperties" in part:
                    part["additionalProperties"] = False

    def _list(self, schema: dict, everywhere: bool, seen: frozenset = frozenset()) -> Listed:
        """What the parts of a schema list. everywhere: those of alternatives, too."""
        required = schema.get("required")
        found = Listed(0, dict.fromkeys(_named(schema, "properties"), {}),
                       dict.fromkeys(_named(schema, "patternProperties"), {}),
                       set(required) if isinstance(required, list) else set(),
                       "additionalProperties" in schema)
        found.num_parts = int(found != Listed())
        self.num_keys += 1 + len(found.keys)
        if self.num_keys > MOST_KEYS:
            return found
        if "$ref" in schema and (ref := schema["$ref"]) not in seen:
            there = self._list(self._find(ref), True, seen | {ref})
            found |= replace(there, num_parts=min(there.num_parts, 1))  # it is closed by itself
        for key in ("allOf", *EITHER) if everywhere else ("allOf",):
            for part in _dicts(schema.get(key)):
                found |= self._list(part, everywhere, seen)
        return found

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
    """The schemas that a keyword gives by name. What is no schema is none here: the compiler will
    say so."""
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
