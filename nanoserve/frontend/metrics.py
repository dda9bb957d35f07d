"""What the engine did, in numbers: counters, a snapshot in vLLM's names, and one line to read.

A request's own times and counts are in its `RequestOutput.metrics` (frontend/outputs.py). They are
set here, and summed up over all requests. The words of the field:

    TTFT         time to first token: from the request's arrival until its first token is known
    TPOT         time per output token: (last token - first token) / (output tokens - 1); with
                 n > 1 the tokens are a sample's on average, because the samples run side by side
    hit rate     prompt tokens found in the prefix cache / prompt tokens looked up
    p99          the value that 99 of 100 requests stay below (nearest rank: the 99th of 100)

                 arrival ──► queued ──► scheduled ──────────► first token ──► ... ──► last token
                    │                                             │                       │
                    └──────────────────── TTFT ───────────────────┘───── TPOT each ───────┘

Invariant: metrics observe. The engine tells them, like any observer, what was `added`, `scheduled`,
`updated` and `ended`; no decision depends on their counts, so they change no token. Their cost a
step grows with the number of sequences that get a token.

Not known here: files, servers, torch. A snapshot is made when it is asked for (`LLM.get_metrics`):
gauges are read off the scheduler then, and are never kept. Road not taken: a metrics library with a
global registry, as vLLM has; two engines in one process would share their numbers.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from tqdm import tqdm

from nanoserve.frontend.outputs import RequestOutput, RequestStateStats
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

# Upper limits of the buckets in which steps are counted by their number of tokens: vLLM's.
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Observer(Protocol):
    """An object that is told what happens: `engine.observers.append(mine)`. It changes nothing but
    what is its own.

    A request's life is `added`, then `scheduled` and `updated` once a step, then `ended` for each
    of its samples. With overlap a step that was in flight when a sequence ended is still `updated`
    afterwards, without that sequence in `grown`. This one prints how full the steps are:

        class Fullness:
            def added(self, sequences, stats, prompt): pass
            def scheduled(self, step): print(step.index, step.num_tokens)
            def updated(self, step, grown): pass
            def ended(self, sequences): pass
    """

    def added(self, sequences: list[Sequence], stats: RequestStateStats,
              prompt: str | None) -> None: ...

    def scheduled(self, step: Step) -> None: ...

    def updated(self, step: Step, grown: dict[Sequence, list[int]]) -> None: ...

    def ended(self, sequences: list[Sequence]) -> None: ...


@dataclass
class Counter:
    """A number that only grows. `name` and `labels` as in Prometheus."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass
class Gauge:
    """A number as it is now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass
class Histogram:
    """Observations by size: `buckets["64"]` counts those of at most 64, and "+Inf" all of them."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector:
    """Counters that belong together."""

    name: str
    labels: dict[str, str]
    values: list[int]


Metric = Counter | Gauge | Histogram | Vector


class EngineMetrics:
    """The engine's counters. prefix_caching: whether prompts are looked up at all. clock: seconds
    that never go back; wall: seconds since 1970."""

    def __init__(self, prefix_caching: bool, clock: Callable[[], float] = time.monotonic,
                 wall: Callable[[], float] = time.time):
        self.prefix_caching, self.clock, self.wall = prefix_caching, clock, wall
        self.stats: dict[Sequence, RequestStateStats] = {}  # of all that have not ended
        self.num_steps = 0
        self.step_sizes = [0] * (len(STEP_BUCKETS) + 1)  # the last: larger than all of them
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self.num_queries = self.num_hits = 0  # tokens looked up in the prefix cache, and found
        self.num_preemptions = 0
        self.num_finished = dict.fromkeys(("stop", "length", "abort"), 0)

    def added(self, sequences: list[Sequence], stats: RequestStateStats,
              prompt: str | None) -> None:
        """A request was queued."""
        stats.queued_ts = self.clock()
        self.stats.update(dict.fromkeys(sequences, stats))

    def scheduled(self, step: Step) -> None:
        """A step was planned.

        A look-up after a preemption is not counted: the sequence looks for blocks that it has
        filled itself. (vLLM counts such look-ups separately.)
        """
        self.num_steps += bool(step.num_new_tokens)
        self.num_preemptions += len(step.preempted)
        for seq in step.admitted:
            if seq.num_preemptions == 0:
                if self.prefix_caching and not seq.needs_all_positions:
                    self.num_queries += seq.num_prompt_tokens
                    self.num_hits += (seq.num_cached_tokens or 0) - step.num_loaded.get(seq, 0)
                request = self.stats[seq]
                request.scheduled_ts = request.scheduled_ts or self.clock()

    def updated(self, step: Step, grown: dict[Sequence, list[int]]) -> None:
        """A step has finished. grown: the new tokens of each sequence, none where it was pooled; a
        stop string may still remove the last ones.

        A step's size is vLLM's: its new tokens, first ones included, and the whole prompts that
        they follow, however many steps computed them. A chunk alone makes no observation.
        """
        now, stats = self.clock(), self.stats
        before = self.num_prompt_tokens + self.num_generation_tokens
        self.num_generation_tokens += sum(map(len, grown.values()))
        for seq in grown:
            request = stats[seq]
            request.last_token_ts = now
            if not request.first_token_ts:
                request.first_token_ts = now
                request.first_token_latency = self.wall() - request.arrival_time
                self.num_prompt_tokens += seq.num_prompt_tokens
        if grown:
            size = self.num_prompt_tokens + self.num_generation_tokens - before
            self.step_sizes[bisect_left(STEP_BUCKETS, size)] += 1

    def ended(self, sequences: list[Sequence]) -> None:
        """These sequences have a `finish_reason`. A second call is harmless."""
        for seq in sequences:
            if self.stats.pop(seq, None) is not None:
                assert seq.finish_reason is not None, f"sequence {seq.name} has not ended"
                self.num_finished[seq.finish_reason] += 1

    def read(self, scheduler: Scheduler, model: str) -> list[Metric]:
        """A snapshot, in the names and types of vLLM's `LLM.get_metrics()`.

        "vllm:kv_cache_usage_perc" is a number from 0 to 1, in spite of its name; cached blocks that
        nobody uses count as free. Samples are counted, not requests: n=2 is two.
        """
        labels = {"model_name": model, "engine": "0"}
        blocks, name = scheduler.blocks, "vllm:{}".format
        gauges = dict(num_requests_running=len(scheduler.running),
                      num_requests_waiting=len(scheduler.waiting),
                      kv_cache_usage_perc=1 - blocks.num_free_blocks / blocks.num_blocks)
        counters = dict(prefix_cache_queries=self.num_queries, prefix_cache_hits=self.num_hits,
                        num_preemptions=self.num_preemptions, prompt_tokens=self.num_prompt_tokens,
                        generation_tokens=self.num_generation_tokens)
        running, buckets = 0, {}
        for limit, count in zip((*STEP_BUCKETS, "+Inf"), self.step_sizes, strict=True):
            buckets[str(limit)] = running = running + count
        return [*(Gauge(name(key), labels, float(value)) for key, value in gauges.items()),
                *(Counter(name(key), labels, value) for key, value in counters.items()),
                *(Counter(name("request_success"), labels | {"finished_reason": reason}, count)
                  for reason, count in self.num_finished.items()),
                Histogram(name("iteration_tokens_total"), labels, running, float(
                    self.num_prompt_tokens + self.num_generation_tokens), buckets)]


# ------------------------------------------------------------ for a reader


def summary(metrics: list[RequestStateStats], seconds: float) -> str:
    """One line over finished requests and the `seconds` they took together.

    Requests without a token (aborted) have no TTFT, those with one token no time per output token.
    """
    ttft = sorted(m.first_token_latency for m in metrics if m.first_token_ts)
    spans = [(m.last_token_ts - m.first_token_ts, m.num_generation_tokens / m.num_samples - 1)
             for m in metrics if m.num_generation_tokens > m.num_samples]
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    num_cached = sum(m.num_cached_tokens for m in metrics)
    num_out = sum(m.num_generation_tokens for m in metrics)
    parts = [f"{_count(len(metrics), 'request')} in {seconds:.2f} s"]
    if ttft:
        parts.append(f"TTFT mean {_time(sum(ttft) / len(ttft))}, p99 {_time(percentile(ttft, 99))}")
    if spans:
        mean = sum(span / count for span, count in spans) / len(spans)
        parts.append(f"{_time(mean)} per output token")
    parts.append(f"{num_out / max(seconds, 1e-9):,.0f} output tok/s")
    parts.append(f"prefix hits {num_cached / max(num_prompt, 1):.0%} of {num_prompt:,} prompt "
                 "tokens")
    parts.append(_count(sum(m.num_preemptions for m in metrics), "preemption"))
    return " | ".join(parts)


def percentile(ordered: list[float], percent: int) -> float:
    """By nearest rank. Example: the 99th percentile of 100 values is the 99th, of 10 the 10th."""
    return ordered[ceil(percent * len(ordered) / 100) - 1]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def say(*lines: str) -> None:
    """Print lines on standard error. If a progress bar is drawn there, tqdm clears it and draws it
    again below the lines."""
    for line in lines:
        tqdm.write(f"nanoserve: {line}", file=sys.stderr)


def prompts_bar(num_requests: int, use_tqdm: bool | Callable) -> tqdm:
    """The progress bar of `generate` and `encode`. use_tqdm: whether to show a bar, or (as in vLLM)
    a function that makes one. Where standard error is no terminal, none is shown."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    wanted = bool(use_tqdm) and num_requests > 0
    return make(total=num_requests, desc="Processed prompts", unit="prompt", dynamic_ncols=True,
                disable=None if wanted else True)


class Progress:
    """The bar of `generate`: prompts done, prompt and output tokens per second.

    summarize: at the end, print the line of `summary`.
    """

    def __init__(self, num_requests: int, use_tqdm: bool | Callable, summarize: bool):
        self.summarize = summarize
        self.metrics: list[RequestStateStats] = []
        self.bar = prompts_bar(num_requests, use_tqdm)
        self.start = time.perf_counter()
        self.num_prompt_tokens = self.num_output_tokens = 0

    def finished(self, output: RequestOutput) -> None:
        self.metrics.append(output.metrics or RequestStateStats())
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        seconds = max(time.perf_counter() - self.start, 1e-9)
        self.bar.set_postfix_str(f"input: {self.num_prompt_tokens / seconds:.1f} tok/s, "
                                 f"output: {self.num_output_tokens / seconds:.1f} tok/s", False)
        self.bar.update()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, error: type | None, *exc_info) -> None:
        self.bar.close()
        if self.summarize and error is None:
            say(summary(self.metrics, time.perf_counter() - self.start))
