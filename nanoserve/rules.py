"""How a user's value is checked: every field of a record has a *rule*.

A rule is a text that says what the value must be, and a function that returns the value to keep.

    value ──rule──► kept: "half" as "float16", numpy's 5 as the int 5, a tuple as a list
              └───► ValueError: the field, what it must be, the value

Invariant: every single value is checked by `check_fields`, and a field without a rule can't exist.
What depends on two fields is checked after that, in the record's `__post_init__`.

Road not taken: a validation library, which is one more package and words its errors by itself.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self

DTYPES = ("auto", "float32", "float16", "bfloat16")


class Rule(NamedTuple):
    """must: what the value must be, in words. keep: returns the value to keep, or raises
    `ValueError` with the wrong value or part."""

    must: str
    keep: Callable[[Any], Any]


def option(default: Any, rule: Rule, part_of: str | None = None, *, control: bool = False) -> Any:
    """A field of a record, with its rule. default: `MISSING` makes the field required. part_of:
    another field, without which this one has no effect; then this one must keep its default.
    control: whether the field changes logits when it has another value than its default."""
    return field(default=default, metadata={"rule": rule, "part_of": part_of, "control": control})


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record whose fields are checked when it is made: those of the engine, or of an extra."""

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """A record of these options. For an unknown name raises `TypeError`, with all names."""
        names = [one.name for one in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            raise TypeError(f"there is no option {unknown[0]}: there are {names}")
        return cls(**options)


def check_fields(record: Any) -> None:
    """Check each field by its rule, and keep what the rule returns. `None` passes if it is the
    default. Raises `ValueError`."""
    for one in fields(record):
        assert "rule" in one.metadata, f"{one.name} has no rule: make it with option(default, rule)"
        rule, value = one.metadata["rule"], getattr(record, one.name)
        if value is None and one.default is None:
            continue
        kept = checked(one.name, rule, value)
        object.__setattr__(record, one.name, kept)  # setattr refuses: an `EngineConfig` is frozen
        whole = one.metadata["part_of"]
        if whole is not None and kept != one.default and not getattr(record, whole):
            raise ValueError(f"{one.name}={kept!r} has no effect without {whole}: set it, or leave "
                             f"{one.name} out")


def checked(name: str, rule: Rule, value: Any) -> Any:
    """The value to keep. Raises `ValueError`, which names the field and the wrong value or part."""
    try:
        return rule.keep(value)
    except (ValueError, RuntimeError) as error:
        given, wrong = f"{value!r:.100}", f"{error!s:.100}"  # `wrong` may be a part of `given`
        got = wrong if wrong == given else f"{wrong} in {given}"
        raise ValueError(f"{name} must be {rule.must}, got {got}") from None


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
    """low <= value <= high (low < value if `above`). NaN, infinities and True are refused."""
    bound = "" if low == -math.inf else f" of at least {low}"
    if high != math.inf:
        bound = f" in {'(' if above else '['}{low}, {high}]"

    def keep(value):
        is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        only_if(is_number, value)
        is_above_low = low < value if above else low <= value
        only_if(is_above_low and value <= high and abs(value) < math.inf, value)
        return int(value) if isinstance(value, Integral) else float(value)

    return Rule(("a whole number" if whole else "a number") + bound, keep)


def list_of(one: Rule, what: str, least: int = 0) -> Rule:
    """Any collection but a str or a dict, with members that pass rule `one`; kept as a new list."""
    def keep(values):
        only_if(isinstance(values, Iterable) and not isinstance(values, (str, dict)), values)
        kept = [one.keep(value) for value in values]
        return only_if(len(kept) >= least, kept)

    return Rule(what, keep)


def numbers_by_id(low: float, high: float, remedy: str) -> Rule:
    """A dict: token id -> number. JSON has only str keys: as in vLLM's server, "5" is token 5. A
    number beyond the bounds is refused (vLLM's server clamps it without a message)."""
    def keep(numbers):
        only_if(isinstance(numbers, dict), numbers)
        kept = {}
        for key, value in numbers.items():
            is_text = isinstance(key, str) and key.isdecimal()
            token_id = TOKEN_ID.keep(int(key) if is_text else key)
            only_if(token_id not in kept, key)  # 5 and "5" are the same token
            kept[token_id] = float(number(low, high).keep(value))
        return kept

    return Rule(f"a dict of token ids and numbers in [{low}, {high}], none twice ({remedy})", keep)


def keep_dtype(dtype: Any) -> str:
    """One spelling of a dtype: torch.float32 and vLLM's "half" are accepted, too."""
    name = str(dtype).removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    only_if(name in DTYPES, dtype)
    return name


# Rules that several fields share, or that have a meaning of their own.
FLAG, COUNT, WHOLE = choice(True, False), number(1, whole=True), number(whole=True)
TOKEN_ID = SIZE = number(0, whole=True)
SHARE = number(0, 1, above=True)
COUNT_OR_NONE = Rule(f"{COUNT.must}, or None for no limit",
                     lambda count: None if count is None else COUNT.keep(count))
COUNT_OR_ALL = number(-1, whole=True)  # -1: all of the vocabulary

DTYPE = Rule(f"one of {', '.join(DTYPES)}", keep_dtype)
TEXT = Rule("a text", lambda text: only_if(isinstance(text, str) and bool(text), text))
WORD = Rule("a word", lambda word: only_if(isinstance(word, str) and bool(word.strip()), word))
MODEL = Rule("the name of a folder, a hub id or a GGUF file", TEXT.keep)
FOLDER = instance((str, Path), MODEL.must)
TEXTS = list_of(TEXT, "non-empty texts in a list")
WORDS = list_of(WORD, "a list of words, none of them empty")
TOKEN_IDS = list_of(TOKEN_ID, "a list of token ids, whole numbers of at least 0")
ONE_TOKEN_ID = list_of(TOKEN_ID, "a list of at least one token id (None allows all)", 1)

# Rules of one field each.
LOAD_FORMAT = Rule("one of auto, safetensors, pt, dummy (a GGUF file is named as the model)",
                   choice("auto", "safetensors", "pt", "dummy").keep)
OVERRIDES = instance(dict, "a dict laid over config.json")
DEVICE = Rule('auto, cpu, cuda or a GPU by its number ("cuda:1")', lambda name: only_if(
    isinstance(name, str) and bool(re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name)), name))
KV_DTYPE = Rule("auto or int8 (there is no fp8: int8 serves all devices)",
                choice("auto", "int8").keep)
ANYTHING = Rule("", lambda value: value)  # the extra that reads the field checks it
PENALTY = number(-2, 2)
FACTOR = number(1e-6, 1e6)  # beyond any use; a logit times or divided by it fits in float32
FUNCTIONS = list_of(Rule("a function", lambda function: only_if(callable(function), function)),
                    "a list of functions f(token_ids, logits) -> logits")
BIASES = numbers_by_id(-100, 100,  # OpenAI's bounds, and vLLM's
                       "allowed_token_ids and bad_words rule tokens in or out")
