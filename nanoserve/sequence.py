"""The nouns: what a request asks for, what the engine keeps and plans, what the caller gets back.

**A sequence is a list of tokens and one number, `num_computed_tokens`: how many of them have their
KV in the cache.** A step gives some sequences a share of the token budget to close the gap. Chunked
prefill, a prefix hit, preemption and decoding are all that one subtraction, so there is no phase,
no status and no `is_prefill` here.

The glossary. These words mean one thing each, everywhere:

    num_tokens           tokens of a sequence: prompt, output, and samples still on the device
    num_prompt_tokens    how many of them came with the request
    num_computed_tokens  how many have their KV in the cache, confirmed by a finished step
    num_inflight_tokens  how many more a launched, unfinished step is computing
    num_unknown_tokens   samples of launched steps whose value the host has not seen yet
    num_cached_tokens    how many prompt tokens a prefix hit provided (statistics only)
    num_prompt_logprobs    how many leading prompt positions are to give a prompt logprob
    num_new_tokens       how many tokens a step computes for a sequence
    block_size           tokens a KV block holds
    block_table          the ids of a sequence's KV blocks, in order of position
    slot                 a place for one token's KV: block id * block_size + offset in the block
    slot_mapping         the slot of every token of a step
    query_len            num_new_tokens of a row of the batch
    seq_len              tokens a row attends to: everything before the step plus query_len
    cu_seqlens_q         running sum of the query lengths, with a leading 0
    row                  a running sequence's line in the persistent block-table matrix

Invariant: one owner per fact. The scheduler changes a sequence's progress and the block manager its
blocks; everybody else only reads. Nothing here knows torch, a tokenizer, or a model.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
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
        bound = f"above {low}" if above else f"at least {low}"
        if high != math.inf:
            bound = f"in {'(' if above else '['}{low}, {high}]"
        raise ValueError(f"{name} must be {'a whole number ' if whole else ''}{bound}, "
                         f"got {value!r}")

    def _check_stopping(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop={self.stop!r}: a stop string must be a non-empty str")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} with detokenize=False: stop strings are found in "
                             "the text, leave detokenize=True or use stop_token_ids")
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
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
            or not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS):
        raise ValueError(f"logit_bias has a value of {value!r}: it must be a number in "
                         f"[-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]; to rule a token in or out use "
                         "allowed_token_ids or bad_words")
    return float(value)


@dataclass(eq=False, slots=True)
class Sequence:
    """One line of tokens on its way through the engine. Compared and hashed by identity."""

    request_id: str
    token_ids: list[int]  # prompt, then the output whose value is known
    params: SamplingParams
    arrival: int = 0  # order of arrival; breaks ties of priority
    priority: int = 0  # lower is served first
    index: int = 0  # which of the request's n samples
    seed: int = 0  # 64 bits; with the position it fixes the random number of each token
    stop_ids: frozenset[int] = frozenset()  # EOS and stop tokens that end it
    eos_ids: frozenset[int] = frozenset()  # those of them that are EOS: no stop_reason
    late_ids: frozenset[int] = frozenset()  # what may not come before params.min_tokens
    bad_word_ids: list[list[int]] = field(default_factory=list)  # tokens that may not come together
    max_num_tokens: int = 0  # prompt plus output never grow beyond this
    num_prompt_tokens: int = field(init=False)
    num_prompt_logprobs: int = field(init=False)
    needs_output_tokens: bool = field(init=False)  # the host must see one to draw the next
    has_controls: bool = field(init=False)  # the sampler must look closer at it

    # Progress: changed by the scheduler alone.
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_unknown_tokens: int = 0
    num_cached_tokens: int | None = None  # None: never scheduled
    num_preemptions: int = 0
    row: int = -1  # -1: not running
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None

    # Memory: changed by the block manager alone.
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # chained hashes of its full blocks
    num_released_blocks: int = 0  # leading blocks given back: no window reaches them any more
    num_committed_blocks: int = 0  # leading blocks already offered to the prefix cache
    cache_entry: object = None  # the cache's entry for the last committed block

    sampler_state: object = None  # changed by the sampler alone: what it counts for penalties

    def __post_init__(self):
        params = self.params
        self.num_prompt_tokens = len(self.token_ids)
        # One of the samples is enough; and what follows the last position is not the prompt's.
        scores = params.prompt_logprobs is not None and self.index == 0
        self.num_prompt_logprobs = self.num_prompt_tokens - 1 if scores else 0
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.needs_output_tokens = penalties != (1, 0, 0) or any(
            len(word) > 1 for word in self.bad_word_ids)
        self.has_controls = bool(
            self.needs_output_tokens or self.bad_word_ids or params.logit_bias
            or params.allowed_token_ids or params.min_tokens or params.logprobs is not None)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The gap. Example: 20 tokens, 16 computed, a step in flight on 3 of them: 1 is left."""
        return self.num_tokens - self.num_computed_tokens - self.num_inflight_tokens

    @property
    def needs_all_positions(self) -> bool:
        """Whether every token must really be computed, and none come from the prefix cache, which
        keeps no logits (until an output token is known: by then the prompt has its logprobs)."""
        return self.num_prompt_logprobs > 0 and len(self.token_ids) == self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    @property
    def name(self) -> str:
        """For traces and messages: "7", or "7.2" for the third of several samples."""
        return self.request_id if self.params.n == 1 else f"{self.request_id}.{self.index}"


@dataclass(eq=False)
class Step:
    """One step's plan. `print(step)` shows it; an empty step is legal."""

    index: int
    num_new_tokens: dict[Sequence, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # position of each row's first new token
    sampling: list[Sequence] = field(default_factory=list)  # rows that close their gap: one token
    prompt_logprob_positions: dict[Sequence, range] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before it runs
    pending_keys: list[bytes] = field(default_factory=list)  # full blocks it will have computed

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens.values())

    def __str__(self) -> str:
        """A line like `step 3: 9 tokens | A 17 ↦ | B 0..8 | preempted C`."""
        parts = [f"step {self.index}: {self.num_tokens} tokens"]
        sampling = set(self.sampling)
        for (seq, n), start in zip(self.num_new_tokens.items(), self.starts, strict=True):
            span = f"{start}" if n == 1 else f"{start}..{start + n}"
            parts.append(f"{seq.name} {span}{' ↦' if seq in sampling else ''}")
        if self.preempted:
            parts.append("preempted " + " ".join(seq.name for seq in self.preempted))
        return " | ".join(parts)


# ------------------------------------------------------------ what comes out


@dataclass
class Logprob:
    """One token's log-probability and its rank among all tokens (1: the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's n samples."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop string or token; None for EOS

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request as its caller sees it, in the middle (streaming) or at the end."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: object = None
    num_cached_tokens: int | None = None
