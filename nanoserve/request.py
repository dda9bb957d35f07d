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


class LogprobMaker:
    """Makes a dict of logprobs by token id: of a token itself first, then of the likeliest.

    A request with logprobs=2 gets the 2 likeliest, even if its batch has looked up 3:

        sampled 7    likeliest 3 7 9    made {7: rank 2, 3: rank 1}
        sampled 9    likeliest 3 7 9    made {9: rank 3, 3: rank 1, 7: rank 2}

    tokenizer: None leaves out the texts of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}  # token id -> its text: likely tokens come again and again

    def make(self, entries: list[Entry], num_top: int) -> dict[int, Logprob]:
        """entries: of the token, then of the likeliest."""
        return {token_id: Logprob(value, rank, self.text_of(token_id))
                for token_id, value, rank in entries[:num_top + 1]}

    def text_of(self, token_id: int) -> str | None:
        """The text of a token alone."""
        if self.tokenizer is None:
            return None
        if token_id not in self.texts:
            self.texts[token_id] = self.tokenizer.decode(
                [token_id], clean_up_tokenization_spaces=False)
        return self.texts[token_id]


# ---------------------------------------------------------------------- the request


@dataclass(eq=False)
class Sample:
    """One of a request's n samples: its sequence, and how much of it was read and handed over."""

    seq: Sequence
    detokenizer: Detokenizer | None  # None: no text is made
    num_read: int  # tokens that were read so far, prompt included
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # if the request wants them
    cumulative_logprob: float = 0.0
    # What earlier outputs contained. These stay 0 unless `output_kind` is DELTA.
    num_told_chars: int = 0
    num_told_tokens: int = 0

    def read(self, token_id: int) -> bool:
        """Turn the next token into text. Returns whether the text has ended."""
        self.num_read += 1
        if self.detokenizer is None:
            return False
        seq = self.seq
        has_ended = seq.finish_reason is not None and self.num_read == len(seq.token_ids)
        # The token that ended the sequence, EOS say, gives no text unless the caller wants it.
        shows_end = seq.request.params.include_stop_str_in_output
        if shows_end or not has_ended or token_id not in seq.request.stop_ids:
            self.detokenizer.add(token_id)
        if has_ended:
            self.detokenizer.flush()
        return self.detokenizer.is_over

    def completion(self) -> CompletionOutput:
        """The sample as it is now. While it runs, only its `visible_text` is shown, which never
        shrinks. So a DELTA is the text after the characters of earlier outputs."""
        seq, params, text = self.seq, self.seq.request.params, ""
        if self.detokenizer is not None:
            is_running = seq.finish_reason is None
            text = self.detokenizer.visible_text if is_running else self.detokenizer.text
        num_chars, num_tokens = self.num_told_chars, self.num_told_tokens
        if params.output_kind is RequestOutputKind.DELTA:
            self.num_told_chars = len(text)
            self.num_told_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        completion = CompletionOutput(
            seq.index, text[num_chars:], seq.token_ids[seq.num_prompt_tokens + num_tokens:],
            finish_reason=seq.finish_reason, stop_reason=seq.stop_reason)
        if params.logprobs is not None:
            completion.logprobs = self.logprobs[num_tokens:]
            completion.cumulative_logprob = self.cumulative_logprob
            assert len(completion.logprobs) == len(completion.token_ids), (
                f"sequence {seq.name} has {len(completion.logprobs)} logprobs for "
                f"{len(completion.token_ids)} tokens")
        return completion


@dataclass(eq=False)
class Request:
    """A checked request, its samples, and how much its caller has got."""

    request_id: str  # "": the engine chooses one
    core: CoreRequest  # the engine's part of it
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]
    tokenizer: Tokenizer | None  # None: no text is made
    inbox: Inbox | None = None

    samples: list[Sample] = field(default_factory=list)  # filled by `start`
    # For each token of the prompt, if the request wants them. Position i gives that of token i + 1,
    # so the first token has none.
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    num_told_of_prompt: int = 0  # how many of them earlier outputs contained; 0 unless DELTA

    def __post_init__(self):
        self.logprob_maker = LogprobMaker(self.tokenizer)

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
            own_seed = xxhash.xxh3_64_intdigest(f"{seed} {index}".encode())
            seq = Sequence(self.core, list(ids), index, own_seed)
            detokenizer = None if self.tokenizer is None else self.make_detokenizer()
            self.samples.append(Sample(seq, detokenizer, len(ids)))
        if params.prompt_logprobs is not None:
            # Only the first sample scores the prompt, whose last position predicts an output token.
            self.samples[0].seq.num_prompt_logprobs = len(ids) - 1
        return self.sequences

    def make_detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, self.params, self.prompt_token_ids)

    @property
    def sequences(self) -> list[Sequence]:
        return [sample.seq for sample in self.samples]

    @property
    def finished(self) -> bool:
        return all(sample.seq.finish_reason is not None for sample in self.samples)

    def add_tokens(self, seq: Sequence, logprobs: list[list[Entry]] | None = None) -> bool:
        """Turn the new tokens of `seq` into text. Returns whether a stop string has ended the text.
        Then the sequence ends after its sample's `num_read` tokens, even if the step brought more.

        logprobs: the entries of each new token, if the request wants them. They are kept before the
        token counts as read: even if the tokenizer fails there are as many logprobs as tokens.
        """
        sample = self.samples[seq.index]
        for i, token_id in enumerate(seq.token_ids[sample.num_read:]):
            if logprobs is not None:
                made = self.logprob_maker.make(logprobs[i], self.params.logprobs)
                sample.logprobs.append(made)
                sample.cumulative_logprob += made[token_id].logprob
            if sample.read(token_id):
                return True
        return False

    def add_prompt_logprobs(self, positions: range, entries: list[list[Entry]]) -> None:
        """The entries of a step's prompt positions. Positions that were scored before a preemption
        are skipped. Raises `FloatingPointError` if an entry is NaN."""
        for position, one in zip(positions, entries, strict=True):
            if isnan(one[0][1]):
                raise FloatingPointError(f"the logits of prompt position {position}")
            if position + 1 == len(self.prompt_logprobs):
                self.prompt_logprobs.append(
                    self.logprob_maker.make(one, self.params.prompt_logprobs))

    def flush(self) -> None:
        """End the text of an aborted request: text that was held back is kept as it is."""
        for sample in self.samples:
            if sample.detokenizer is not None:
                sample.detokenizer.flush()

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
            self.request_id, self.prompt, self.prompt_token_ids, self._new_prompt_logprobs(),
            [sample.completion() for sample in self.samples], self.finished,
            num_cached_tokens=self.samples[0].seq.num_cached_tokens)

    def _new_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """All that the prompt has (DELTA: the new ones). After an abort some may be missing."""
        if self.params.prompt_logprobs is None:
            return None
        start = self.num_told_of_prompt
        if self.params.output_kind is RequestOutputKind.DELTA:
            self.num_told_of_prompt = len(self.prompt_logprobs)
        return self.prompt_logprobs[start:]
