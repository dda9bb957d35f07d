"""Metrics of an engine: counters and histograms, and a snapshot under vLLM's names.

A request's own times and counts are in its `RequestOutput.metrics` (request.py). They are
set here, and counted over all requests:

    arrival ─► queued ─► scheduled ─► first token ─► ... ─► last token
                  └ queue ──┴─ prefill ────┴──── decode ────────┘      inference = prefill + decode
       └────────────── TTFT ───────────────┘
       └────────── end to end ──────────────────────────────────┘

Invariant: metrics only observe. They are an extra with the hooks `added`, `scheduled`, `updated`
and `ended`; no decision depends on their counts, so they change no token. Their cost per step grows
with the number of sequences that get a token. A request enters the histograms when the last of its
samples has ended, and only if it got a token: a request that was aborted earlier has no times.

Known limit: several tokens of one step (accepted drafts) arrive at the same time; the step's time
is divided among them.

A snapshot is made on request (`LLM.get_metrics`): gauges are read from the scheduler at that time,
and are not stored. With a metrics library that has a global registry, as vLLM uses it, two engines
in one process would share their numbers.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nanoserve.hooks import Extra
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.request import RequestStateStats

# Upper limits of the buckets: vLLM's (public documentation of vLLM V1's metrics).
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                  10.0, 20.0, 40.0, 80.0)
OF_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
SAMPLES = (1, 2, 5, 10, 20)
HISTOGRAMS = {
    "iteration_tokens_total": STEP_TOKENS, "time_to_first_token_seconds": TO_FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN_TOKENS,
    "request_time_per_output_token_seconds": BETWEEN_TOKENS,
    "e2e_request_latency_seconds": OF_REQUEST, "request_queue_time_seconds": OF_REQUEST,
    "request_inference_time_seconds": OF_REQUEST, "request_prefill_time_seconds": OF_REQUEST,
    "request_decode_time_seconds": OF_REQUEST, "request_params_n": SAMPLES,
    # The limits of these are 1, 2, 5, 10, 20, 50 ... up to `max_model_len`.
    "request_prompt_tokens": (), "request_generation_tokens": (), "request_params_max_tokens": ()}


@dataclass
class Metric:
    """An entry of `get_metrics`, in one of vLLM's classes. `name` and `labels` are as in
    Prometheus; the labels that all of an engine's metrics have are added there."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations by size: `buckets["64.0"]` counts those of at most 64, "+Inf" all of them."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """Counters that belong together."""

    values: list[int]


class Distribution:
    """Observations, counted by size. limits: of the buckets, ascending; the last is open."""

    def __init__(self, limits: tuple[float, ...]):
        self.limits, self.counts, self.sum = limits, [0] * (len(limits) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += times
        self.sum += value * times

    def read(self, name: str) -> Histogram:
        names = (*(str(float(limit)) for limit in self.limits), "+Inf")
        buckets = dict(zip(names, accumulate(self.counts), strict=True))
        return Histogram(name, {}, buckets["+Inf"], self.sum, buckets)


class EngineMetrics(Extra):
    """The engine's counters. clock: seconds that never go back; wall: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.monotonic,
                 wall: Callable[[], float] = time.time):
        self.clock, self.wall = clock, wall
        # For each sequence that has not ended: its request's times, and all of its samples.
        self.open: dict[Sequence, tuple[RequestStateStats, list[Sequence]]] = {}
        # When a sequence got its last token. Those in `latest` got it in the last step, at
        # `latest_at`.
        self.last_token: dict[Sequence, float] = {}
        self.latest, self.latest_at = dict[Sequence, list[int]](), 0.0
        self.num_steps = 0
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self.num_queries = self.num_hits = 0  # tokens looked up in the prefix cache, and found
        self.num_preemptions = 0
        self.num_drafts = self.num_draft_tokens = 0
        self.num_accepted: list[int] = []  # by their place in a draft; empty without drafts
        self.num_finished = dict.fromkeys(("stop", "length", "abort"), 0)
        self.histograms: dict[str, Distribution] = {}

    def attach(self, engine: Any) -> None:
        """Read from the engine whether prompts are looked up, the largest number of drafts of a
        row, and the longest request."""
        self.prefix_caching = engine.config.enable_prefix_caching
        self.num_accepted = [0] * (engine.scheduler.most_drafts or 0)
        lengths = one_two_five(engine.config.max_model_len)
        self.histograms = {name: Distribution(limits or lengths)
                           for name, limits in HISTOGRAMS.items()}

    def added(self, request: Any) -> None:
        """A `Request` was queued."""
        request.stats.queued_ts = self.clock()
        self.open.update(dict.fromkeys(request.sequences, (request.stats, request.sequences)))

    def scheduled(self, step: Step) -> None:
        """A step was planned.

        A look-up after a preemption is not counted: the sequence finds blocks that it has filled
        itself. (vLLM counts such look-ups separately.)
        """
        self.num_steps += bool(step.num_new_tokens)
        self.num_preemptions += len(step.preempted)
        for seq in step.admitted:
            if seq.num_preemptions == 0:
                if self.prefix_caching and not seq.needs_all_positions:
                    self.num_queries += seq.num_prompt_tokens
                    self.num_hits += (seq.num_cached_tokens or 0) - step.num_loaded.get(seq, 0)
                request, _ = self.open[seq]
                request.scheduled_ts = request.scheduled_ts or self.clock()

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        """A step has finished. accepted: the new tokens of each sequence, none if it was pooled; a
        stop string may still remove the last ones.

        A step's size is defined as in vLLM: its new tokens, first tokens included, and for each
        first token the whole prompt, however many steps computed it. A step that only computes a
        chunk of a prompt is not observed.
        """
        now, open_ = self.clock(), self.open
        num_new, before = sum(map(len, accepted.values())), self.num_prompt_tokens
        self.num_generation_tokens += num_new
        for seq in accepted:
            request, _ = open_[seq]
            request.last_token_ts = now
            if not request.first_token_ts:
                request.first_token_ts = now
                request.first_token_latency = self.wall() - request.arrival_time
                self.num_prompt_tokens += seq.num_prompt_tokens
        if accepted:
            self.histograms["iteration_tokens_total"].observe(
                num_new + self.num_prompt_tokens - before)
        self._observe_waits(accepted, num_new, now)
        for seq, drafts in step.drafts.items():
            if seq in accepted and seq not in step.forced:
                self._count_drafts(open_[seq][0], len(drafts), step.num_right(seq))

    def _count_drafts(self, stats: RequestStateStats, num_drafts: int, num_right: int) -> None:
        """Count drafts, whichever drafter made them, a user's own included."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_right
        for place in range(num_right):
            self.num_accepted[place] += 1

    def _observe_waits(self, accepted: dict[Sequence, list[int]], num_new: int, now: float) -> None:
        """Observe the times between tokens; sequences that waited equally long are observed
        together. Mostly these are the sequences of the last step, and comparing two sets is faster
        than a loop."""
        waits = {self.latest_at: (len(accepted), num_new)}
        if accepted.keys() != self.latest.keys():
            self.last_token.update((seq, self.latest_at) for seq in self.latest if seq in self.open)
            waits = {}
            for seq, tokens in accepted.items():
                if seq in self.last_token:
                    count, num_new = waits.get(self.last_token[seq], (0, 0))
                    waits[self.last_token[seq]] = count + 1, num_new + len(tokens)
        for since, (count, num_new) in waits.items():
            if num_new:  # none where they were pooled
                self.histograms["inter_token_latency_seconds"].observe(
                    (now - since) * count / num_new, num_new)
        self.latest, self.latest_at = accepted, now

    def ended(self, sequences: list[Sequence]) -> None:
        """These sequences have a `finish_reason`. A second call is harmless."""
        for seq in sequences:
            if seq in self.open:
                assert seq.finish_reason is not None, f"sequence {seq.name} has not ended"
                self.num_finished[seq.finish_reason] += 1
                stats, siblings = self.open.pop(seq)
                self.last_token.pop(seq, None)
                if stats.first_token_ts and not any(map(self.open.__contains__, siblings)):
                    self._count(stats.snapshot(siblings), siblings[0])

    def _count(self, stats: RequestStateStats, seq: Sequence) -> None:
        """A request has ended. Its arrival is on another clock than its other times, so the time
        until its first token is taken from `first_token_latency`."""
        decode = stats.last_token_ts - stats.first_token_ts
        found = dict(
            time_to_first_token_seconds=stats.first_token_latency,
            e2e_request_latency_seconds=stats.first_token_latency + decode,
            request_queue_time_seconds=stats.scheduled_ts - stats.queued_ts,
            request_inference_time_seconds=stats.last_token_ts - stats.scheduled_ts,
            request_prefill_time_seconds=stats.first_token_ts - stats.scheduled_ts,
            request_decode_time_seconds=decode, request_prompt_tokens=stats.num_prompt_tokens,
            request_generation_tokens=stats.num_generation_tokens,
            request_params_n=stats.num_samples)
        if (most := seq.request.params.max_tokens) is not None:
            found["request_params_max_tokens"] = most
        if stats.num_generation_tokens > stats.num_samples:
            per_sample = stats.num_generation_tokens / stats.num_samples
            found["request_time_per_output_token_seconds"] = decode / (per_sample - 1)
        for name, value in found.items():
            self.histograms[name].observe(value)

    def read(self, scheduler: Scheduler) -> list[Metric]:
        """A snapshot, with the names and types of vLLM's `LLM.get_metrics()`.

        "vllm:kv_cache_usage_perc" is a number from 0 to 1, in spite of its name; cached blocks that
        nobody uses count as free. Samples are counted, not requests: n=2 is two.
        """
        blocks, name = scheduler.blocks, "vllm:{}".format
        gauges = dict(num_requests_running=len(scheduler.running),
                      num_requests_waiting=len(scheduler.waiting),
                      kv_cache_usage_perc=1 - blocks.num_free_blocks / blocks.num_blocks)
        counters = dict(prefix_cache_queries=self.num_queries, prefix_cache_hits=self.num_hits,
                        num_preemptions=self.num_preemptions, prompt_tokens=self.num_prompt_tokens,
                        generation_tokens=self.num_generation_tokens)
        drafts = dict(num_drafts=self.num_drafts, num_draft_tokens=self.num_draft_tokens,
                      num_accepted_tokens=sum(self.num_accepted)) if self.num_accepted else {}
        vectors = dict(num_accepted_tokens_per_pos=self.num_accepted[:]) if drafts else {}
        return [*(Gauge(name(key), {}, float(value)) for key, value in gauges.items()),
                *(Counter(name(key), {}, value) for key, value in counters.items()),
                *(Counter(name("request_success"), {"finished_reason": reason}, count)
                  for reason, count in self.num_finished.items()),
                *(one.read(name(key)) for key, one in self.histograms.items()),
                *(Counter(name(f"spec_decode_{key}"), {}, n) for key, n in drafts.items()),
                *(Vector(name(f"spec_decode_{key}"), {}, n) for key, n in vectors.items())]


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`. Example: 30 gives 1, 2, 5, 10, 20."""
    steps = (digit * 10 ** power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)
