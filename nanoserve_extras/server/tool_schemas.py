"""Properties of a tool's JSON schema: the types of its arguments, and the keys of an object.

References may point anywhere in the schema. A schema may refer to itself, and comes from clients,
so each traversal has a bound.
"""

from itertools import islice
from typing import Any

MAX_FORMS = 64  # combinations that are tried
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object", type(None): "null"}


def kinds_of(schema: Any, root: dict) -> set[str]:
    """The types that a schema allows. Empty: any type, or the schema doesn't say."""
    kinds, ahead, seen = set[str](), [schema], set[int]()
    while ahead:
        one = resolve(ahead.pop(), root)
        given, values = one.get("type"), one.get("enum", [one["const"]] if "const" in one else [])
        found = {kind for kind in KINDS.values() if kind == given or (
            isinstance(given, list) and kind in given)}
        if not found and isinstance(values, list):
            found = {KINDS.get(type(value), "") for value in values}
        parts = one.get("anyOf", one.get("oneOf", one.get("allOf")))
        if not found and not (isinstance(parts, list) and parts):
            return set()
        if not found and id(one) not in seen:  # a definition may be referred to a thousand times
            ahead += parts
        seen.add(id(one))
        kinds |= found
    return kinds


def forms_of(schema: Any, root: dict, depth: int = 8) -> list[dict]:
    """The combinations of an object's $ref, allOf, anyOf and oneOf, up to MAX_FORMS, each as a
    schema without these keywords. Raises `ValueError` if there is none, and other errors for an
    invalid schema."""
    parts = [[one] for one in schema.get("allOf", ())]
    parts += [[resolve(schema, root)]] if "$ref" in schema else []
    parts += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    found = [{key: schema[key] for key in schema if key not in {"$ref", "allOf", "anyOf", "oneOf"}}]
    for choices in parts:
        others = list(islice((form for one in choices if depth and "object" in (
            kinds_of(one, root) or ("object",)) for form in forms_of(one, root, depth - 1)),
            MAX_FORMS))
        if not others:
            raise ValueError("no object can be put together from its parts, or they are too deep")
        found = [_joined(one, other) for one in found for other in others][:MAX_FORMS]
    return found


def _joined(one: dict, other: dict) -> dict:
    """Join two parts of an object's schema. A key in both gets both schemas."""
    keys = {**one.get("properties", {})}
    for key, value in other.get("properties", {}).items():
        mine = keys.get(key, {})
        fits = all(mine.get(word, said) == said for word, said in value.items())
        keys[key] = mine | value if fits else {"allOf": [mine, value]}
    return one | other | dict(properties=keys, required=[
        *one.get("required", ()), *other.get("required", ())])


def resolve(schema: Any, root: dict) -> dict:
    """The schema that a reference points to; a schema without a reference is returned as it is."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(name := schema.get("$ref"), str):
            return schema
        schema = root
        for key in name.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}
