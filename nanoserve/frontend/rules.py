"""How a user's value is checked: every field of a record has a *rule*.

A rule is a text that says what the value must be, and a function that returns the value to keep.

    value ──rule──► kept: "half" is "float16", one stop string a list of one, numpy's 5 an int 5
              └───► ValueError: the field, what it must be, the value

Invariant: every single value is checked by `check_fields`, and a field without a rule can't exist.
Checks of two fields together follow in the record's `__post_init__`.

Not known here: which fields there are (config.py). Road not taken: a validation library, which
would be a package more, with errors in its own words.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """must: in words; keep: gives the value as it is kept, or raises `ValueError`."""

    must: str
    keep: Callable[[Any], Any]


def option(default: Any, rule: Rule) -> Any:
    """A field of a record, with its rule. A default of `MISSING` makes it a required one."""
    return field(default=default, metadata={"rule": rule})


def check_fields(record: Any) -> None:
    """Each field by its rule; `None` passes where it is the default. Raises `ValueError`."""
    for one in fields(record):
        assert "rule" in one.metadata, f"{one.name} has no rule: make it with option(default, rule)"
        rule, value = one.metadata["rule"], getattr(record, one.name)
        if value is None and one.default is None:
            continue
        try:
            kept = rule.keep(value)
        except ValueError as error:  # of what is wrong: the value, or a part of it
            given, wrong = f"{value!r:.100}", f"{error!s:.100}"
            raise ValueError(f"{one.name} must be {rule.must}, got "
                             f"{wrong if wrong == given else f'{wrong} in {given}'}") from None
        object.__setattr__(record, one.name, kept)  # an `EngineConfig` is frozen


def only_if(is_right: bool, value: Any) -> Any:
    """Returns `value`; raises `ValueError` with its repr unless `is_right`."""
    if not is_right:
        raise ValueError(repr(value))
    return value


def choice(*values: Any) -> Rule:
    return Rule(f"one of {', '.join(map(str, values))}",
                lambda value: only_if(value in values, value))


def instance(kind: type | tuple[type, ...], what: str) -> Rule:
    return Rule(what, lambda value: only_if(isinstance(value, kind), value))


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False,
           whole: bool = False) -> Rule:
    """low <= value <= high (low < value if `above`). NaN and True are refused."""
    bound = "" if low == -math.inf else f" of at least {low}"
    if high != math.inf:
        bound = f" in {'(' if above else '['}{low}, {high}]"

    def keep(value):
        is_one = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        only_if(is_one and (low < value if above else low <= value) and value <= high, value)
        return int(value) if isinstance(value, Integral) else float(value)

    return Rule(("a whole number" if whole else "a number") + bound, keep)


def list_of(one: Rule, what: str, least: int = 0) -> Rule:
    """Any collection but a str or a dict, with members that pass rule `one`; kept as a new list."""
    def keep(values):
        only_if(isinstance(values, Iterable) and not isinstance(values, (str, dict)), values)
        kept = [one.keep(value) for value in values]
        return only_if(len(kept) >= least, kept)

    return Rule(what, keep)
