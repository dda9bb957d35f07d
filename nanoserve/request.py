"""A checked request: it starts the sequences, and makes the outputs that its caller gets.

    prompt, SamplingParams ──inputs.py──► Request ──start──► Sequence × n ──► the engine
                                             │                                    │
    RequestOutput ◄──────── output ──────────┴─────── add_tokens ◄────────────────┘

A request knows what its caller asked for, and how much of the result the caller has got. Its
sequences are what the scheduler sees; they share no state that changes.

Invariants: nothing here touches the engine's state. What depends on the order of arrival (the order
among equal priorities, the seed if the caller gave none) is settled in `start`, when the request is
submitted; before that, a request may be thrown away. An output is a record of one moment: it is
never written to after it is handed over, so a caller may keep it while the request goes on.

Names and fields of outputs are vLLM's, so that a script which reads them needs no change. Road not
taken: an output processor with a second table of requests, as in vLLM V1. How much a caller has got
is a fact about one request, so it stands here.
"""

from dataclasses import dataclass, field, replace
from math import isnan
from typing import Protocol

import xxhash

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.detokenizer import Detokenizer, Tokenizer
from nanoserve.sequence import CoreRequest, Sequence

# ---------------------------------------------------------------------- outputs


@dataclass
class Logprob:
    """One token's log-probability and its rank among all tokens (1: the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's n samples. logprobs: a dict for each of its tokens, by token id, with the
    token itself and the likeliest ones."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"; None: unfinished
    stop_reason: int | str | None = None  # the stop string or token; None for EOS

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request as its caller sees it, in the middle (streaming) or at the end."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    metrics: object = None  # the request's times, if an extra keeps them
    num_cached_tokens: int | None = None

    @property
    def aborted(self) -> bool:
        return any(sample.finish_reason == "abort" for sample in self.outputs)


class Inbox(Protocol):
    """Where a request's outputs go: a list, or anything else with `append`."""

    def append(self, output: RequestOutput, /) -> None: ...


# ---------------------------------------------------------------------- logprobs

Entry = tuple[int, float, int]  # token id, logprob, rank


class LogprobHistory:
    """All logprobs of one request, a dict for each token: the token itself, then the likeliest.

    A request with logprobs=2 gets the 2 likeliest, even if its batch has looked up 3:

        sampled 7    likeliest 3 7 9    kept {7: rank 2, 3: rank 1}
        sampled 9    likeliest 3 7 9    kept {9: rank 3, 3: rank 1, 7: rank 2}

    In a prompt, position i gives the logprob of token i + 1, so the first token has none.

    Invariant: there is one dict for each token, even after an error: it is stored first, and the
    texts of its tokens are added afterwards, because a tokenizer may fail. tokenizer: None leaves
    the texts out.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None):
        self.params = params
        self.tokenizer = tokenizer
        self.samples: list[list[dict[int, Logprob]]] = [[] for _ in range(params.n)]
        self.cumulative = [0.0] * params.n  # the sum over a sample's tokens
        self.prompt: list[dict[int, Logprob] | None] = [None]
        self.texts: dict[int, str] = {}  # token id -> its text: likely tokens come again and again

    def add(self, index: int, entries: list[Entry]) -> None:
        """One more token of a sample. entries: the token, then the likeliest."""
        self.cumulative[index] += entries[0][1]
        self._keep(self.samples[index], entries, self.params.logprobs)

    def add_prompt(self, positions: range, entries: list[list[Entry]]) -> None:
        """The entries of a step's prompt positions. Positions that were scored before a preemption
        are skipped. Raises `FloatingPointError` if an entry is NaN."""
        for position, one in zip(positions, entries, strict=True):
            if isnan(one[0][1]):
                raise FloatingPointError(f"the logits of prompt position {position}")
            if position + 1 == len(self.prompt):
                self._keep(self.prompt, one, self.params.prompt_logprobs)

    def _keep(self, kept: list, entries: list[Entry], num_top: int) -> None:
        """Each token is decoded alone."""
        logprobs = {token_id: Logprob(value, rank)
                    for token_id, value, rank in entries[:num_top + 1]}
        kept.append(logprobs)
        if self.tokenizer is None:
            return
        for token_id, logprob in logprobs.items():
            if token_id not in self.texts:
                self.texts[token_id] = self.tokenizer.decode(
                    [token_id], clean_up_tokenization_spaces=False)
            logprob.decoded_token = self.texts[token_id]


# ---------------------------------------------------------------------- the request


@dataclass(eq=False)
class Request:
    """A checked request, its sequences (one for each sample), and how much its caller has got."""

    request_id: str  # "": the engine chooses one
    core: CoreRequest  # the engine's part of it
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]
    tokenizer: Tokenizer | None  # None: no text is made

    # Filled by `start`. Each list has one entry for each sample.
    sequences: list[Sequence] = field(default_factory=list)
    detokenizers: list[Detokenizer] = field(default_factory=list)  # empty: no text is made
    num_read: list[int] = field(default_factory=list)  # tokens read so far, prompt included
    # What earlier outputs contained: characters and tokens of a sample, logprobs of the prompt.
    # These stay 0 unless `output_kind` is DELTA.
    told: list[tuple[int, int]] = field(default_factory=list)
    num_told_of_prompt: int = 0
    history: LogprobHistory = field(init=False)
    inbox: Inbox | None = None

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        """Make the sequences, one for each sample. From here on they are independent; they share
        the blocks of their prompt through the prefix cache.

        The seed of a sequence is a hash of the sample's index and of the request's seed, or without
        one of the engine's seed and the arrival. So a script that runs twice gets the same text.
        """
        params, ids = self.params, self.prompt_token_ids
        self.core = replace(self.core, request_id=self.request_id, arrival=arrival)
        seed = f"{engine_seed} {arrival}" if params.seed is None else params.seed
        for index in range(params.n):
            sequence_seed = xxhash.xxh3_64_intdigest(f"{seed} {index}".encode())
            self.sequences.append(Sequence(self.core, list(ids), index, sequence_seed))
        if params.prompt_logprobs is not None:
            # Only the first sample scores the prompt, whose last position predicts an output token.
            self.sequences[0].num_prompt_logprobs = len(ids) - 1
        tokenizer = self.tokenizer if params.detokenize else None
        if tokenizer is not None:
            self.detokenizers = [self.make_detokenizer() for _ in range(params.n)]
        self.num_read = [len(ids)] * params.n
        self.told = [(0, 0)] * params.n
        self.history = LogprobHistory(params, tokenizer)
        return self.sequences

    def make_detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, self.params, self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def add_tokens(self, seq: Sequence, logprobs: list[list[Entry]] | None = None) -> bool:
        """Turn the new tokens of `seq` into text. Returns whether a stop string has ended the text.
        Then the sequence ends after `num_read` tokens, even if the step brought more.

        logprobs: the entries of each new token, if the request wants them. They are kept before any
        text is made: even if the tokenizer fails there are as many logprobs as tokens.
        """
        index = seq.index
        for i, token_id in enumerate(seq.token_ids[self.num_read[index]:]):
            self.num_read[index] += 1
            if logprobs is not None:
                self.history.add(index, logprobs[i])
            if not self.detokenizers:
                continue
            detokenizer = self.detokenizers[index]
            has_ended = (seq.finish_reason is not None
                         and self.num_read[index] == len(seq.token_ids))
            # The token that ended the sequence, EOS say, gives no text unless the caller wants it.
            is_hidden = (has_ended and token_id in seq.request.stop_ids
                         and not self.params.include_stop_str_in_output)
            if not is_hidden:
                detokenizer.add(token_id)
            if has_ended:
                detokenizer.flush()
            if detokenizer.is_over:
                return True
        return False

    def flush(self) -> None:
        """End the text of an aborted request: text that was held back is kept as it is."""
        for detokenizer in self.detokenizers:
            detokenizer.flush()

    def keep_to_the_end(self) -> None:
        """Have only one output, when the request has finished."""
        self.params.output_kind = RequestOutputKind.FINAL_ONLY

    @property
    def is_streamed(self) -> bool:
        """Whether outputs are handed over before the request has finished."""
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    def output(self) -> RequestOutput:
        """What the caller gets now: all of it, or what is new since the last output (DELTA)."""
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self._prompt_logprobs(),
            [self._completion(seq) for seq in self.sequences], self.finished,
            num_cached_tokens=self.sequences[0].num_cached_tokens)

    def _completion(self, seq: Sequence) -> CompletionOutput:
        """A sample as it is now. While it runs, only its `visible_text` is shown, which never
        shrinks. So a DELTA is the text after the characters of earlier outputs."""
        text, index = "", seq.index
        if self.detokenizers:
            detokenizer = self.detokenizers[index]
            text = detokenizer.visible_text if seq.finish_reason is None else detokenizer.text
        num_chars, num_tokens = self.told[index]  # zeros unless DELTA
        if self.params.output_kind is RequestOutputKind.DELTA:
            self.told[index] = len(text), len(seq.token_ids) - seq.num_prompt_tokens
        completion = CompletionOutput(
            index, text[num_chars:], seq.token_ids[seq.num_prompt_tokens + num_tokens:],
            finish_reason=seq.finish_reason, stop_reason=seq.stop_reason)
        if self.params.logprobs is not None:
            completion.logprobs = self.history.samples[index][num_tokens:]
            completion.cumulative_logprob = self.history.cumulative[index]
            assert len(completion.logprobs) == len(completion.token_ids), (
                f"sequence {seq.name} has {len(completion.logprobs)} logprobs for "
                f"{len(completion.token_ids)} tokens")
        return completion

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """All that the prompt has (DELTA: the new ones). After an abort some may be missing."""
        if self.params.prompt_logprobs is None:
            return None
        start, prompt = self.num_told_of_prompt, self.history.prompt
        if self.params.output_kind is RequestOutputKind.DELTA:
            self.num_told_of_prompt = len(prompt)
        return prompt[start:]
