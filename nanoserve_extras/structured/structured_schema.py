"""A JSON schema as it is compiled: closed objects, no idle keywords, no pattern without a key.

Without `additionalProperties` JSON Schema allows any other key, and a small model may write such
keys for ever. As in vLLM, an object that lists its keys is then closed, that is, has no other keys,
wherever it is: in `$defs`, behind a `$ref`, as an alternative of `anyOf`. An object may also be
composed of parts: by `allOf`, or with `$ref` or `anyOf` beside its keys. If each part were closed,
it would forbid the keys of the others. So such an object is not changed, with a warning.

    {"properties": {"a": A}, "patternProperties": {"^a$": P}}         as it was asked for
    {"properties": {"a": {"allOf": [A, P]}}, "additionalProperties": false}        as it is compiled

The compiler takes listed keys out of a pattern. If nothing is left of all patterns, it still allows
the comma in front of a further key, and then no key at all: the text could never end.

The compiler refuses a schema with a keyword that it lacks, even if the keyword has no effect: zod
writes `"propertyNames": {"type": "string"}`, others `"uniqueItems": false`. These are removed, as
are keywords with the value null, and formats that the compiler does not know. By JSON Schema
2020-12 (section 7.2.1) a format is an annotation.

Invariant: a value that matches the compiled schema is valid by the schema that was asked for.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

# Schemas by their names. Definitions are the first ones here, so `_everything` gives them last.
NAMED = ("$defs", "definitions", "properties", "patternProperties")
HELD = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")
PARTS = ("allOf", "anyOf", "oneOf")  # schemas of the same value
LISTS = {"properties", "patternProperties", "additionalProperties", "required"}  # some keys
SPEAKS = (LISTS - {"required"}) | {*PARTS, "$ref"}
# With one of these beside it, other schemas say which keys and items of a value are evaluated.
APPLIED = {*PARTS, "$ref", "$dynamicRef", "$recursiveRef", "if", "then", "else", "not",
           "dependentSchemas", "dependencies", "contains"}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
               "$comment"}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
Find = Callable[[object], dict | None]  # see `_find`
OPEN = ("structured_outputs: objects that are put together from parts (allOf, or $ref or anyOf "
        "beside properties, or a $ref other than #/...) may have other keys than are listed: "
        "say additionalProperties")


def tidy(schema: object, closes: bool, is_dead: Callable[[list[str], list[str]], bool],
         refusal: Callable[[dict], str]) -> object:
    """The schema as it is compiled; it is changed in place. closes: whether objects are closed.
    is_dead: whether patterns have no key of their own, given an object's keys and its patterns.
    refusal: the compiler's words for a schema, "" for none. Raises `ValueError`."""
    pass_over(schema, refusal)
    found, find = list(_everything(schema)), partial(_find, schema)
    if closes:
        _close(found, find)
    for one in found:
        keys, patterns = _named(one, "properties"), _named(one, "patternProperties")
        is_closed = one.get("additionalProperties") is False
        if is_closed and keys and patterns and is_dead(list(keys), list(patterns)):
            del one["patternProperties"]
            for key in keys:
                keys[key] = {"allOf": [keys[key], *(value for pattern, value in patterns.items()
                                                    if _matches(pattern, key, refusal))]}
    return schema


def _matches(pattern: str, key: str, refusal: Callable[[dict], str]) -> bool:
    """Whether a pattern matches a key. The compiler is asked, because Python's `re` would search
    for `(a?){40}a{40}` for ever."""
    why = refusal(dict(type="string", enum=[key], pattern=pattern))
    if why and not why.startswith("Unsatisfiable"):
        raise ValueError(why)
    return not why


# ------------------------------------------------------------ keywords without effect


def pass_over(schema: object, refusal: Callable[[dict], str]) -> None:
    """Remove keywords without effect from a schema, in place. refusal: returns the compiler's error
    for a schema, or ""."""
    for one in _everything(schema):
        for names in map(partial(_named, one), NAMED):
            names.update({name: {} for name, value in names.items() if value is None})
        for key in [key for key, value in one.items() if value is None and key != "const"]:
            del one[key]
        # A list, before the first is taken out: minContains is read by the rule of `contains`.
        for key in [key for key, is_idle in IDLE.items() if key in one and is_idle(one)]:
            del one[key]
        _list_names(one)
        for key in ("format", "$schema"):
            if isinstance(one.get(key), str) and refusal({"type": "string", key: one[key]}):
                del one[key]
        for key in COUNTS:  # JSON Schema's whole numbers may have a point: 2.0
            if isinstance(value := one.get(key), float) and value.is_integer():
                one[key] = int(value)
        if APPLIED.isdisjoint(one):  # what is evaluated is what is listed here
            for wider, plain in (("unevaluatedProperties", "additionalProperties"),
                                 ("unevaluatedItems", "items")):
                if wider in one:
                    one.setdefault(plain, one.pop(wider))


def _list_names(one: dict) -> None:
    """Keys that must be some of a list are listed: zod's z.record(z.enum(...), ...)."""
    names = one.get("propertyNames")
    if not isinstance(names, dict) or not isinstance(names.get("enum"), list) or (
            "patternProperties" in one or not ANNOTATIONS | {"type", "enum"} >= names.keys()):
        return
    known, others = _named(one, "properties"), one.get("additionalProperties", {})
    allowed = [name for name in _texts(names["enum"]) if name in known or others is not False]
    del one["propertyNames"]
    one["properties"] = {name: known.get(name, others) for name in allowed}
    one["additionalProperties"] = False


def _is_any(schema: object) -> bool:
    """Whether a schema obviously matches all values."""
    return schema is True or isinstance(schema, dict) and ANNOTATIONS.issuperset(schema)


def _is_text(schema: object) -> bool:
    """Whether a schema obviously matches all keys."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        schema = {key: value for key, value in schema.items() if key != "type"}
    return _is_any(schema)


def _has_all(one: dict, keyword: str) -> bool:
    """Whether keys that bring others bring only those that are required anyway."""
    return isinstance(one[keyword], dict) and all(
        set(_texts(keys)) <= set(_texts(one.get("required"))) if isinstance(keys, list) else
        _is_any(keys) for keys in one[keyword].values())


def _counts_none(one: dict) -> bool:
    """Whether no item has to be like `contains`, or any item is."""
    if "contains" not in one:
        return True
    most = 0 if not _is_any(one["contains"]) else one.get("minItems", 0)
    return "maxContains" not in one and one.get("minContains", 1) <= most


# For each keyword that the compiler lacks: whether it has no effect in a schema.
IDLE: dict[str, Callable[[dict], bool]] = {
    "propertyNames": lambda one: _is_text(one["propertyNames"]),
    "uniqueItems": lambda one: one["uniqueItems"] is False or one.get("maxItems", 2) in (0, 1),
    "unevaluatedProperties": lambda one: _is_any(one["unevaluatedProperties"]),
    "unevaluatedItems": lambda one: _is_any(one["unevaluatedItems"]),
    "dependentRequired": lambda one: _has_all(one, "dependentRequired"),
    "dependentSchemas": lambda one: _has_all(one, "dependentSchemas"),
    "dependencies": lambda one: _has_all(one, "dependencies"),
    "if": lambda one: _is_any(one.get("then", True)) and _is_any(one.get("else", True)),
    "then": lambda one: "if" not in one or _is_any(one["then"]),
    "else": lambda one: "if" not in one or _is_any(one["else"]),
    "not": lambda one: one["not"] is False,
    "contains": _counts_none, "minContains": _counts_none, "maxContains": _counts_none}


# ------------------------------------------------- definitions, parts, closed objects


def with_definitions(schema: dict) -> None:
    """Move all targets of references to definitions, in place, so that each part can be compiled
    with the definitions alone. zod writes `"$ref": "#/properties/billing"`."""
    names: dict[str, str] = {}
    defs, ahead, seen = {}, [schema], set()
    while ahead:
        for one in _everything(ahead.pop()):
            ref = one.get("$ref")
            if id(one) in seen or (target := _find(schema, ref)) is None:
                continue
            seen.add(id(one))
            if ref not in names:
                last = re.sub(r"\W", "_", ref.rpartition("/")[2])
                name = names[ref] = last if last not in defs else f"{last}_{len(defs)}"
                defs[name] = target if target is not schema else {**schema}
                ahead.append(target)
            one["$ref"] = f"#/$defs/{names[ref]}"
    for one in [*_everything(schema), *chain.from_iterable(map(_everything, defs.values()))]:
        for key in ("$defs", "definitions"):
            one.pop(key, None)
    schema["$defs"] = defs


def loosened(schema: dict, refusal: Callable[[dict], str]) -> Iterator[tuple[str, str]]:
    """Remove unsupported keywords from a schema, in place: from the inside out the keyword without
    which the rest can be compiled. So a string with a wrong `pattern` becomes any string. Yields
    the name of the part that had it, if any, and why. refusal: the compiler's error, or ""."""
    pass_over(schema, refusal)
    if not refusal(schema):
        return
    found = list(_everything(schema))
    names = {id(value): name for one in found for key in NAMED
             for name, value in _named(one, key).items()}
    shared = {"$defs": schema.get("$defs", {})}
    for one in reversed(found):  # definitions before those who refer to them
        if why := refusal(shared | one):
            # Its type is removed last: reading the value relies on it.
            kept = ({key: one[key] for key in one if key != wrong}
                    for wrong in sorted(one, key="type".__eq__))
            rest = next((rest for rest in kept if not refusal(shared | rest)), {})
            one.clear()
            one.update(rest)
            yield names.get(id(one), ""), why


def _close(found: list[dict], find: Find) -> None:
    """Forbid keys that an object doesn't list, unless it is put together, or a part of one."""
    def pieces(schema: dict) -> list[dict]:
        return [*(one for key in PARTS for one in _dicts(schema.get(key))),
                *_dicts(find(schema.get("$ref")))]

    parts, ahead = set(), [one for one in found if _num_lists(one) > 1]
    is_lost = any("$ref" in one and find(one["$ref"]) is None for one in found)
    if ahead or is_lost:
        warnings.warn(OPEN, stacklevel=2)
    if is_lost:  # it may lead to any of them
        return
    while ahead:
        one = ahead.pop()
        if id(one) not in parts:
            parts.add(id(one))
            ahead += pieces(one)
    for one in found:
        keys, patterns = _named(one, "properties"), _named(one, "patternProperties")
        if id(one) not in parts and "additionalProperties" not in one and (
                patterns or keys and keys.keys() >= {*_texts(one.get("required"))}):
            one["additionalProperties"] = False


def _num_lists(schema: dict) -> int:
    """From how many places an object's keys come: its own, parts, alternatives, a definition. An
    alternative may ask for some of its own: "a or b must be there"."""
    own = {*_named(schema, "properties")}

    def adds(one: dict) -> bool:
        return not SPEAKS.isdisjoint(one) or not own >= {*_texts(one.get("required"))}

    return (not LISTS.isdisjoint(schema)) + ("$ref" in schema) + sum(
        map(adds, _dicts(schema.get("allOf")))) + sum(
        any(map(adds, _dicts(schema.get(key)))) for key in ("anyOf", "oneOf"))


def _find(root: object, ref: object) -> dict | None:
    """What stands at "#/$defs/name". None for other references."""
    if not isinstance(ref, str) or not re.fullmatch(r"#(/[^%]*)?", ref):
        return None
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal():
            root = dict(enumerate(root)).get(int(name))
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root if isinstance(root, dict) else None


def _named(schema: dict, key: str) -> dict:
    """The schemas that a keyword gives by name. Where its value is no object there are none here,
    and the compiler will raise an error."""
    return found if isinstance(found := schema.get(key), dict) else {}


def _texts(value: object) -> list[str]:
    """Those of a list; what else is in it, or no list, the compiler refuses."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _dicts(value: object) -> list[dict]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _everything(schema: object) -> Iterator[dict]:
    """The schema and all in it; a property may have any name, that of a keyword, too."""
    places = _dicts(schema)
    while places:
        yield (place := places.pop())
        for value in (*(list(_named(place, key).values()) for key in NAMED),
                      *map(place.get, (*HELD, *PARTS))):
            places += _dicts(value)
