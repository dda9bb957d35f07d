"""What a request asks for: `SamplingParams`, in vLLM's words, checked field by field.

Two dozen ways to choose the next token and to stop. They are plain numbers and lists; what becomes
of them is told elsewhere: `controls.py` and `sampler.py` turn logits into tokens with them, the
scheduler ends a sequence by them, the detokenizer looks for stop strings.

    logits ─ allowed tokens, bad words, ─ penalties ─ temperature ─ min_p ─ top_k ─ top_p ─ draw
             min_tokens, logit_bias

Invariant: a value that can't be honoured raises a `ValueError` that names the field, the value and
the remedy. A control that is accepted and ignored would be a lie.

Not known here: the model. What only its vocabulary or its tokenizer can tell (is there a token
300,000? how is this bad word spelt?) is checked in frontend/request.py, when the request is made.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real

MIN_TEMPERATURE = 0.01  # below it logits / temperature overflows half precision
MAX_SAMPLES = 16384  # vLLM's bound: each is a sequence that is made at once
MAX_LOGIT_BIAS = 100  # OpenAI's bound, and vLLM's
# Far beyond any use, and such that a logit times it, or divided by it, is a float32.
REPETITION_PENALTIES = (1e-6, 1e6)


class RequestOutputKind(Enum):
    """What each output of a running request carries (vLLM's names)."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


@dataclass(kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop; names, defaults and meaning are vLLM's.

    Raises `ValueError` naming the field and its value for whatever can't be honoured: a control
    that is accepted and ignored is a lie. What only the model knows (its vocabulary, its tokenizer)
    is checked when the request is made.
    """

    n: int = 1  # samples of one prompt
    presence_penalty: float = 0.0  # taken off every token that is in the output
    frequency_penalty: float = 0.0  # taken off a token as often as it is in the output
    repetition_penalty: float = 1.0  # divides the logits of the prompt's tokens and the output's
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # only the likeliest tokens that together have this probability
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # none less likely than the likeliest times this
    seed: int | None = None  # None: made of the engine's and the order of arrival
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the model's maximum length
    min_tokens: int = 0  # no EOS, stop token or stop string before so many
    logprobs: int | None = None  # of each token, and of so many of the likeliest
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None  # added to the logits
    allowed_token_ids: list[int] | None = None  # no others
    bad_words: list[str] | None = None  # not in the output, with or without a space in front

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Iterable):
                raise ValueError(f"{name}={value!r} must be a list")
            setattr(self, name, [] if value is None else list(value))
        if self.seed == -1:  # vLLM's other spelling of None
            self.seed = None
        for name in ("ignore_eos", "detokenize", "skip_special_tokens",
                     "include_stop_str_in_output"):
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_numbers()
        self._check_stopping()
        self._check_constraints()
        if 0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature={self.temperature} is raised to {MIN_TEMPERATURE}: smaller "
                          "values overflow; use 0 for greedy", stacklevel=3)
            self.temperature = MIN_TEMPERATURE

    def _check_numbers(self) -> None:
        self._check_number("n", 1, MAX_SAMPLES, whole=True)
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_number("repetition_penalty", *REPETITION_PENALTIES)
        self._check_number("temperature", 0, 2)
        self._check_number("top_p", 0, 1, above=True)
        self._check_number("top_k", -1, whole=True)
        self._check_number("min_p", 0, 1)
        self._check_number("min_tokens", 0, whole=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_number(name, 0, whole=True)
        if self.max_tokens is not None:
            self._check_number("max_tokens", 1, whole=True)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens="
                                 f"{self.max_tokens}: lower the first or raise the second")
        if self.seed is not None:
            self._check_number("seed", -math.inf, whole=True)
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n={self.n} with temperature=0: greedy samples would all be equal, "
                             "use n=1 or a temperature above 0")

    def _check_number(self, name: str, low: float, high: float = math.inf, *,
                      above: bool = False, whole: bool = False) -> None:
        """`low <= value <= high` (`low <` when `above`); NaN fails every comparison. A number of
        numpy's becomes Python's."""
        value, kind = getattr(self, name), Integral if whole else Real
        right_kind = isinstance(value, kind) and not isinstance(value, bool)
        if right_kind and (low < value if above else low <= value) and value <= high:
            setattr(self, name, int(value) if isinstance(value, Integral) else float(value))
            return
        if low == -math.inf:
            raise ValueError(f"{name} must be a whole number or None, got {value!r}")
        bound = f"above {low}" if above else f"{'of ' if whole else ''}at least {low}"
        if high != math.inf:
            bound = f"in {'(' if above else '['}{low}, {high}]"
        raise ValueError(f"{name} must be {'a whole number ' if whole else ''}{bound}, "
                         f"got {value!r}")

    def _check_stopping(self) -> None:
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop={self.stop!r}: a stop string must be a non-empty str")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} with detokenize=False: stop strings are found in "
                             "the text, leave detokenize=True or use stop_token_ids")
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids or ())
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")

    def _check_constraints(self) -> None:
        words, allowed = self.bad_words, self.allowed_token_ids
        if words is not None:
            if isinstance(words, str) or not isinstance(words, Iterable):
                raise ValueError(f"bad_words={words!r} must be a list of words")
            self.bad_words = list(words)
        for word in self.bad_words or []:
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words={self.bad_words!r}: a bad word must not be empty")
        if allowed is not None:
            if isinstance(allowed, (str, dict)) or not isinstance(allowed, Iterable):
                raise ValueError(f"allowed_token_ids={allowed!r} must be a list of token ids")
            self.allowed_token_ids = _token_ids("allowed_token_ids", allowed)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] leaves nothing to generate: name the tokens "
                                 "that are allowed, or use None for all")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias={self.logit_bias!r} must be a dict of numbers by "
                                 "token id")
            # JSON knows only str keys: as in vLLM's server, "5" is token 5.
            given = self.logit_bias
            self.logit_bias = {int(key) if isinstance(key, str) and key.isdecimal() else key: bias
                               for key, bias in given.items()}
            ids = _token_ids("logit_bias", self.logit_bias)
            if len(set(ids)) < len(given):
                raise ValueError(f"logit_bias={str(given):.80} names a token twice")
            self.logit_bias = dict(zip(ids, map(_bias, self.logit_bias.values()), strict=True))


def _token_ids(name: str, values: Iterable) -> list[int]:
    values = list(values)
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}={str(values):.80}: {value!r} is no token id, which is a "
                             "whole number of at least 0")
    return [int(value) for value in values]


def _bias(value: object) -> float:
    """A bias beyond the bound is refused and not clamped in silence, as vLLM's server does."""
    if (isinstance(value, bool) or not isinstance(value, Real)
            or not -MAX_LOGIT_BIAS <= float(value) <= MAX_LOGIT_BIAS):
        raise ValueError(f"logit_bias has a value of {value!r}: it must be a number in "
                         f"[-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]; to rule a token in or out use "
                         "allowed_token_ids or bad_words")
    return float(value)
