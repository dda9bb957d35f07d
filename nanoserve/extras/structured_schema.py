"""A JSON schema as it is compiled: objects are closed, and no pattern is left without a key.

Where a schema doesn't say `additionalProperties`, JSON Schema allows any other key, and a small
model writes such keys for ever. As in vLLM, an object that lists its keys has no others then. The
road not taken is to do so with every schema: where objects are put together from parts (`allOf`, or
properties beside `anyOf` or `$ref`), each part would forbid the keys of the others.

    {"properties": {"a": A}, "patternProperties": {"^a$": P}}         as it was asked for
    {"properties": {"a": {"allOf": [A, P]}}, "additionalProperties": false}        as it is compiled

The compiler takes listed keys out of a pattern. If nothing is left of all patterns, it still allows
the comma in front of a further key, and then no key at all: the text could never end.
"""

import re
from collections.abc import Callable, Iterator

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
HOLD = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "allOf",
        "anyOf", "oneOf", "if", "then", "else", "not")


def tidy(schema: object, closes: bool, is_dead: Callable[[list[str], list[str]], bool]) -> object:
    """Changes the schema in place. closes: whether objects are closed. is_dead: whether patterns
    have no key of their own, given an object's keys and its patterns."""
    found = list(_subschemas(schema))
    closes = closes and all(_num_parts(one) < 2 for one in found)
    for one in found:
        keys, patterns = one.get("properties") or {}, one.get("patternProperties") or {}
        if not isinstance(keys, dict) or not isinstance(patterns, dict):
            continue  # no schema: the compiler will say so
        lists = patterns or keys and keys.keys() >= set(one.get("required", ()))
        if closes and lists and "unevaluatedProperties" not in one:
            one.setdefault("additionalProperties", False)
        is_closed = one.get("additionalProperties") is False
        if is_closed and keys and patterns and is_dead(list(keys), list(patterns)):
            del one["patternProperties"]
            for key in keys:
                keys[key] = {"allOf": [keys[key], *(
                    value for pattern, value in patterns.items() if re.search(pattern, key))]}
    return schema


def _num_parts(schema: dict) -> int:
    """How many schemas describe one object. {"properties": ..., "anyOf": [...]} are two."""
    return len(schema.get("allOf", ())) + sum(
        key in schema for key in ("anyOf", "oneOf", "if", "$ref", "dependentSchemas")) + any(
        key in schema for key in ("properties", "patternProperties", "required"))


def _subschemas(schema: object) -> Iterator[dict]:
    """The schema and all in it; a property may have any name, that of a keyword, too."""
    if isinstance(schema, list):
        for one in schema:
            yield from _subschemas(one)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in HOLD or key in BY_NAME and isinstance(value, dict):
                yield from _subschemas(list(value.values()) if key in BY_NAME else value)
