"""How a user's value is checked: the type of a record's field names a *rule*.

A rule is a text that says what the value must be, and a function that returns the value to keep.

    block_size: Count = 16              Count = Annotated[int, number(1, whole=True)]
    revision: Text | None = None        None passes, too

    value ──rule──► kept: "half" as "float16", numpy's 5 as the int 5, a tuple as a list
              └───► ValueError: the field, what it must be, the value

Invariant: every single value is checked by `check_fields`, and a field without a rule can't exist.
What depends on two fields is checked after that, in the record's `__post_init__`.

Road not taken: a validation library, which is one more package and words its errors by itself.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, Self, get_args


class Rule(NamedTuple):
    """must: what the value must be, in words. keep: returns the value to keep, or raises
    `ValueError` with the wrong value or part."""

    must: str
    keep: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record whose fields are checked when it is made: those of the engine, or of an extra."""

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """A record of these options. For an unknown name raises `TypeError`, with all names."""
        names = [one.name for one in fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(f"there is no option {name}: there are {names}")
        return cls(**options)


def check_fields(record: Any) -> None:
    """Check each field by its rule, and keep what the rule returns. Raises `ValueError`."""
    kind: Any = type(record)
    for name, rule, may_be_none in rules_of(kind):
        value = getattr(record, name)
        if value is None and may_be_none:
            continue
        kept = checked(name, rule, value)
        object.__setattr__(record, name, kept)  # setattr refuses: an `EngineConfig` is frozen


@cache
def rules_of(record_class: Any) -> list[tuple[str, Rule, bool]]:
    """The name of each field, its rule, and whether `None` passes."""
    return [(one.name, rule_of(one.type), type(None) in get_args(one.type))
            for one in fields(record_class)]


def rule_of(kind: Any) -> Rule:
    """The rule in a field's type: `Count` and `Count | None` have the same."""
    for part in (kind, *get_args(kind)):
        for rule in getattr(part, "__metadata__", ()):  # present in an `Annotated`
            return rule
    raise AssertionError(f"{kind} has no rule: a field's type is Annotated[type, rule]")


def checked(name: str, rule: Rule, value: Any) -> Any:
    """The value to keep. Raises `ValueError`, which names the field and the wrong value or part."""
    try:
        return rule.keep(value)
    except (ValueError, RuntimeError, OverflowError) as error:
        given, wrong = f"{value!r:.100}", f"{error!s:.100}"  # `wrong` may be a part of `given`
        got = wrong if wrong == given else f"{wrong} in {given}"
        raise ValueError(f"{name} must be {rule.must}, got {got}") from None


def only_if(is_right: bool, value: Any) -> Any:
    """Returns `value`; raises `ValueError` with its repr unless `is_right`."""
    if not is_right:
        raise ValueError(repr(value))
    return value


# ------------------------------------------------------------------ kinds of rules


def choice(*values: Any) -> Rule:
    return Rule(f"one of {', '.join(map(str, values))}",
                lambda value: only_if(value in values, value))


def instance(kind: type | tuple[type, ...], what: str) -> Rule:
    return Rule(what, lambda value: only_if(isinstance(value, kind), value))


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False,
           whole: bool = False) -> Rule:
    """low <= value <= high (low < value if `above`). NaN, infinities and True are refused."""
    bound = "" if low == -math.inf else f" of at least {low}"
    if high != math.inf:
        bound = f" in {'(' if above else '['}{low}, {high}]"

    def keep(value):
        kind = Integral if whole else Real
        only_if(isinstance(value, kind) and not isinstance(value, bool), value)
        only_if(low <= value <= high and abs(value) < math.inf, value)
        only_if(not above or value > low, value)
        return int(value) if isinstance(value, Integral) else float(value)

    return Rule(("a whole number" if whole else "a number") + bound, keep)


def list_of(keep_one: Callable[[Any], Any], what: str, least: int = 0) -> Rule:
    """Any collection but a str or a dict, kept as a new list; no array or tensor of one number
    without a dimension. keep_one: keeps a member."""
    def keep(values):
        is_one = isinstance(values, (str, dict)) or getattr(values, "shape", None) == ()
        only_if(isinstance(values, Iterable) and not is_one, values)
        kept = [keep_one(value) for value in values]
        return only_if(len(kept) >= least, kept)

    return Rule(what, keep)


# ------------------------------------------------------------------ types with a rule


def keep_text(text: Any) -> str:
    return only_if(isinstance(text, str) and bool(text), text)


Flag = Annotated[bool, choice(True, False)]
Whole = Annotated[int, number(whole=True)]
Size = Annotated[int, number(0, whole=True)]
Count = Annotated[int, number(1, whole=True)]
CountOrAll = Annotated[int, number(-1, whole=True)]  # -1: all of the vocabulary
Share = Annotated[float, number(0, 1, above=True)]
Text = Annotated[str, Rule("a text", keep_text)]
Anything = Annotated[Any, Rule("", lambda value: value)]  # the extra that reads the field checks it
