"""What the caller gets back: `RequestOutput`, its samples, their logprobs, and its times.

    RequestOutput ─┬─ prompt, prompt_token_ids, prompt_logprobs, finished
                   ├─ outputs: a CompletionOutput for each of the n samples
                   │    └─ text, token_ids, logprobs: one {token id: Logprob} a token
                   └─ metrics: RequestStateStats, of all samples together

The names and fields are vLLM's, so that a script which reads them needs no change. An output is a
record of one moment: it is handed over and never written to again, so a caller may keep it while
the request goes on. frontend/request.py makes them, and decides when.
"""

from dataclasses import dataclass, replace

from nanoserve.sequence import Sequence


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
