"""A checked request: from its start as sequences to the outputs that its caller gets.

    prompt, SamplingParams ──inputs.py──► Request ──start──► Sequence × n ──► the engine
                                             │                                    │
    RequestOutput ◄──────── output ──────────┴─────── add_tokens ◄────────────────┘

A request knows what its caller asked for, and how much of the result the caller has been told. Its
sequences are what the scheduler sees; they share nothing but the prompt.

Invariant: nothing here touches the engine's state. What depends on the order of arrival (ties of
priority, the seed of a request that names none) is settled in `start`, when the request is
submitted; until then it may be thrown away.

Prompts are checked and tokenised in inputs.py. vLLM V1 has an output processor beside the request,
with a second table of requests; but what has been told to a caller is a fact about one request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, Protocol

import xxhash

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.detokenizer import Detokenizer, StopStrings, Tokenizer
from nanoserve.sequence import CacheEntry, CoreRequest, Sequence

# ---------------------------------------------------------------------- outputs
# What the caller gets back: `RequestOutput`, its samples, their logprobs, and its times.
#
#     RequestOutput ─┬─ prompt, prompt_token_ids, prompt_logprobs, finished
#                    ├─ outputs: a CompletionOutput for each of the n samples
#                    │    └─ text, token_ids, logprobs: one {token id: Logprob} a token
#                    └─ metrics: RequestStateStats, of all samples together
#
# The names and fields are vLLM's, so that a script which reads them needs no change. An output is a
# record of one moment: it is handed over and never written to again, so a caller may keep it while
# the request goes on. request.py makes them, and decides when.

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
class RequestStateStats:
    """When things happened to a request, and how much of it there was: `RequestOutput.metrics`.

    The names are vLLM V1's, of its class of this name; the last four are ours. `arrival_time` is
    a wall clock's (`time.time`), the `_ts` are `time.monotonic`'s: 0.0 means "not yet". With n > 1
    a time is the first sample's to get there (`last_token_ts`: the last's); counts are of all.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0  # the request was checked
    queued_ts: float = 0.0  # the scheduler got it
    scheduled_ts: float = 0.0  # a step had its first tokens
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival to the first token: TTFT
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_samples: int = 1

    def snapshot(self, sequences: list[Sequence]) -> "RequestStateStats":
        """As of now: a copy, because an output that was handed over changes no more."""
        return replace(
            self, num_prompt_tokens=sequences[0].num_prompt_tokens,
            num_generation_tokens=sum(len(s.token_ids) - s.num_prompt_tokens for s in sequences),
            num_cached_tokens=sequences[0].num_cached_tokens or 0,
            num_preemptions=sum(s.num_preemptions for s in sequences), num_samples=len(sequences))


@dataclass
class RequestOutput:
    """A request as its caller sees it, in the middle (streaming) or at the end."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None

    @property
    def aborted(self) -> bool:
        return any(sample.finish_reason == "abort" for sample in self.outputs)


# ---------------------------------------------------------------------- logprobs
# The logprobs of one request's tokens, in the form in which its caller gets them.
#
# For each token a step gives its id, logprob and rank, and those of the likeliest tokens at that
# position. Here these become vLLM's `dict[token_id, Logprob]`, one for each token, the token itself
# first. A request that wants 2 gets 2, even if its batch has looked up more:
#
#     chosen 7    likeliest 3 7 9 (of which it wants 2)    ->    {7: rank 2, 3: rank 1}
#     chosen 9    likeliest 3 7 9                          ->    {9: rank 3, 3: rank 1, 7: rank 2}
#
# In a prompt, position i gives the logprob of token i + 1; the first token has no logprob, hence
# the `None` in front.
#
# Invariant: there is one dict for each token, even after an error. So a dict is stored first, and
# the texts of its tokens are added afterwards, because a tokenizer may fail.

Entry = tuple[int, float, int]  # token id, logprob, rank


class LogprobHistory:
    """All logprobs of one request. tokenizer: None leaves the tokens' texts out."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None):
        self.params = params
        self.tokenizer = tokenizer
        self.samples: list[list[dict[int, Logprob]]] = [[] for _ in range(params.n)]
        self.cumulative = [0.0] * params.n  # the sum over a sample's tokens
        self.prompt: list[dict[int, Logprob] | None] = [None]
        self.undecoded: list[dict[int, Logprob]] = []
        self.texts: dict[int, str] = {}  # by token: the likely ones come again and again

    def add(self, index: int, entries: list[Entry]) -> None:
        """One more token of a sample. entries: the token, then the likeliest."""
        self.samples[index].append(self._as_dict(entries, self.params.logprobs))
        self.cumulative[index] += entries[0][1]

    def add_prompt(self, positions: range, entries: list[list[Entry]]) -> None:
        """Entries of the prompt positions of a step. After a preemption positions are computed
        again: those already known are skipped. Raises `FloatingPointError` at one that is NaN."""
        for position, one in zip(positions, entries, strict=True):
            if isnan(one[0][1]):
                raise FloatingPointError(f"the logits of prompt position {position}")
            if position + 1 == len(self.prompt):
                self.prompt.append(self._as_dict(one, self.params.prompt_logprobs))

    def decode(self) -> None:
        """Add to all new dicts the texts of their tokens, each token decoded alone."""
        for logprobs in self.undecoded:
            for token_id, logprob in logprobs.items():
                if token_id not in self.texts:
                    self.texts[token_id] = self.tokenizer.decode(
                        [token_id], clean_up_tokenization_spaces=False)
                logprob.decoded_token = self.texts[token_id]
        self.undecoded.clear()

    def _as_dict(self, entries: list[Entry], num_top: int) -> dict[int, Logprob]:
        logprobs = {token_id: Logprob(value, rank)
                    for token_id, value, rank in entries[:num_top + 1]}
        if self.tokenizer is not None:
            self.undecoded.append(logprobs)
        return logprobs


# What a request may ask for that an extra does, and the remedy where none does.
HANDED_ON = {"lora_request": "make the engine with enable_lora=True",
             "structured_outputs": "this engine has no extra for grammars, leave it out",
             "thinking_token_budget": "this engine has no extra for thoughts, leave it out"}


class Inbox(Protocol):
    """Where a request's outputs go: a list, or anything else with `append`."""

    def append(self, output: RequestOutput, /) -> None: ...


@dataclass(eq=False)
class Request:
    """A checked request: its sequences, one a sample, and how much its caller has got."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    max_num_tokens: int  # prompt and output
    eos_ids: frozenset[int]  # tokens that end a sequence; empty with ignore_eos
    late_ids: frozenset[int]  # tokens not allowed before `min_tokens`
    bad_word_ids: list[list[int]]
    tokenizer: Tokenizer | None  # None: no text is made
    lora_request: object = None  # the adapter that it names
    adapter_id: int = 0  # the number of this adapter, 0 for none
    root: CacheEntry | None = None  # parent of its first block
    contents: dict[int, bytes] = field(default_factory=dict)  # by block: see CoreRequest
    make_stops: Callable[[SamplingParams], StopStrings] = StopStrings  # one for each sample's text
    made: dict[object, Any] = field(default_factory=dict)  # by extra: what it has made of this
    sequences: list[Sequence] = field(default_factory=list)
    detokenizers: list[Detokenizer] = field(default_factory=list)  # empty: no text is made
    num_read: list[int] = field(default_factory=list)  # tokens a sample's detokenizer has seen
    told: list[tuple[int, int]] = field(default_factory=list)  # (characters, tokens) sent, a sample
    history: LogprobHistory = field(init=False)
    num_told_of_prompt: int = 0  # prompt logprobs that a DELTA has carried
    stats: RequestStateStats = field(
        default_factory=lambda: RequestStateStats(arrival_time=time.time()))
    inbox: Inbox | None = None  # step()'s, or one stream's

    def check_taken(self, taken: set[str]) -> None:
        """Raises `ValueError` for what only an extra can do, if this engine has none that does it.
        taken: see `Extra.takes`."""
        for name, remedy in HANDED_ON.items():
            value = getattr(self, name, None) or getattr(self.params, name, None)
            if value is not None and name not in taken:
                raise ValueError(f"{name}={value!r:.80}: {remedy}")

    def chain_from(self, root: CacheEntry, adapter_id: int) -> None:
        """Have its blocks begin at `root`, so that only requests with the same root find them."""
        self.root, self.adapter_id = root, adapter_id

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        """Make the sequences, one a sample. From here on they are independent; the prefix cache
        finds out by itself that they share a prompt.

        Each one's seed is a hash of the request's seed, or else of the engine's and the arrival, so
        that a script that is run twice writes the same text twice.
        """
        params, ids = self.params, self.prompt_token_ids
        core = CoreRequest(
            self.request_id, params, arrival, self.priority, self.stats.arrival_time,
            self.max_num_tokens, stop_ids=self.eos_ids | frozenset(params.stop_token_ids),
            eos_ids=self.eos_ids, late_ids=self.late_ids, bad_word_ids=self.bad_word_ids,
            adapter_id=self.adapter_id, root=self.root,
            contents=self.contents)
        seed = f"{engine_seed} {arrival}" if params.seed is None else params.seed
        for index in range(params.n):
            # Only the first sample scores the prompt, whose last position predicts an output token.
            scores = params.prompt_logprobs is not None and index == 0
            self.sequences.append(Sequence(
                core, list(ids), index, xxhash.xxh3_64_intdigest(f"{seed} {index}".encode()),
                num_prompt_logprobs=len(ids) - 1 if scores else 0))
            if params.detokenize and self.tokenizer is not None:
                self.detokenizers.append(
                    Detokenizer(self.tokenizer, params, ids, self.make_stops(params)))
        self.num_read = [len(ids)] * params.n
        self.told = [(0, 0)] * params.n
        self.history = LogprobHistory(params, self.tokenizer if params.detokenize else None)
        return self.sequences

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def add_tokens(self, seq: Sequence, logprobs: list[list[tuple]] | None = None) -> bool:
        """Turn the new tokens of `seq` into text. Returns whether a stop string has ended the text:
        then it ends after `num_read` tokens, even if the step brought more.

        logprobs: each new token's, where they are wanted. They are kept before any text is made, so
        that there are as many logprobs as tokens even when a tokenizer fails.
        """
        index = seq.index
        for i, token_id in enumerate(seq.token_ids[self.num_read[index]:]):
            self.num_read[index] += 1
            if logprobs is not None:
                self.history.add(index, logprobs[i])
            if not self.detokenizers:
                continue
            self.history.decode()
            ended = seq.finish_reason if self.num_read[index] == len(seq.token_ids) else None
            # The token that ended it, EOS say, is no text, unless the caller wants to see it.
            hidden = (ended is not None and token_id in seq.request.stop_ids
                      and not self.params.include_stop_str_in_output)
            detokenizer = self.detokenizers[index]
            if not hidden:
                detokenizer.add(token_id)
            if ended is not None:
                detokenizer.flush()
            if detokenizer.is_over:
                return True
        return False

    def flush(self) -> None:
        """The request ends early, by an abort: text that was held back comes out as it is."""
        self.history.decode()  # also if its prompt is cut short
        for detokenizer in self.detokenizers:
            detokenizer.flush()

    def output(self) -> RequestOutput:
        """What the caller gets now: all of it, or what is new since the last output (DELTA).

        While a sample runs only its `visible_text` is shown, which never shrinks; so a DELTA is the
        text behind the characters that were sent before.
        """
        params, completions = self.params, []
        for seq in self.sequences:
            text, told = "", (0, 0)  # characters and tokens that were sent before
            if self.detokenizers:
                detokenizer = self.detokenizers[seq.index]
                done = seq.finish_reason is not None
                text = detokenizer.text if done else detokenizer.visible_text
            if params.output_kind is RequestOutputKind.DELTA:
                num_output = len(seq.token_ids) - seq.num_prompt_tokens
                told, self.told[seq.index] = self.told[seq.index], (len(text), num_output)
            token_ids = seq.token_ids[seq.num_prompt_tokens + told[1]:]
            completion = CompletionOutput(seq.index, text[told[0]:], token_ids,
                                          finish_reason=seq.finish_reason,
                                          stop_reason=seq.stop_reason)
            if params.logprobs is not None:
                completion.logprobs = self.history.samples[seq.index][told[1]:]
                completion.cumulative_logprob = self.history.cumulative[seq.index]
                assert len(completion.logprobs) == len(token_ids), (
                    f"sequence {seq.name} has {len(completion.logprobs)} logprobs for "
                    f"{len(token_ids)} tokens")
            completions.append(completion)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self._prompt_logprobs(),
            completions, self.finished, self.stats.snapshot(self.sequences),
            self.sequences[0].num_cached_tokens)

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As many as there are: all, but for a request that was aborted in its prompt."""
        if self.params.prompt_logprobs is None:
            return None
        start, prompt = self.num_told_of_prompt, self.history.prompt
        if self.params.output_kind is RequestOutputKind.DELTA:
            self.num_told_of_prompt = len(prompt)
        return prompt[start:]
