"""The engine's numbers for Prometheus: read at scrape time, in vLLM's names and buckets.

    engine ─► EngineMetrics     counters, gauges: `LLM.get_metrics()`, read at scrape time ─┐
           └► RequestHistograms how long requests waited, prefilled, decoded: an observer  ─┴► text

    arrival ─► queued ─► scheduled ─► first token ─► ... ─► last token
                  └ queue ──┴─ prefill ────┴──── decode ────────┘      inference = prefill + decode
       └────────── time to first token ────┘
       └────────── end to end ──────────────────────────────────┘

A dashboard that was made for vLLM shows these numbers, because names, labels and the limits of the
buckets are its own (public documentation of vLLM V1's metrics).

Invariants: two engines in one process never share numbers, because nothing is registered globally;
each `/metrics` has a registry of its own, with one `Collector` that reads one engine. A scrape
takes no lock and waits for no step. A request is counted when the last of its samples has ended,
and only if it got a token: one that was aborted before its first token has no such times.

Known limit: between two tokens that one step brought (drafts that were right) no time passes; the
step's time is divided among them. Not known here: HTTP. Road not taken: the library's own
histograms, which lock for each observation and live in a global registry unless told otherwise.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from nanoserve.engine import LLMEngine
from nanoserve.frontend.metrics import Counter, Gauge
from nanoserve.frontend.outputs import RequestStateStats
from nanoserve.sequence import Sequence, Step

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
               10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                  10.0, 20.0, 40.0, 80.0)
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
           240.0, 480.0, 960.0, 1920.0, 7680.0)
SAMPLES = (1, 2, 5, 10, 20)

# What each number is, for the lines that begin with # HELP.
MEANING = {
    "num_requests_running": "Sequences in the running batch.",
    "num_requests_waiting": "Sequences that wait for their first step, or again.",
    "kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens looked up in the store behind the KV cache.",
    "external_prefix_cache_hits": "Prompt tokens whose KV came from that store.",
    "kv_store_saved_blocks": "Blocks that were saved in the store.",
    "kv_store_loaded_blocks": "Blocks that were loaded from the store.",
    "kv_store_lost_blocks": "Blocks for which the store had no room in host memory.",
    "num_preemptions": "Sequences that lost their blocks and are computed again.",
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "generation_tokens": "Tokens generated.",
    "request_success": "Sequences that ended, by reason.",
    "iteration_tokens_total": "Tokens a step.",
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "From one token of a sequence to the next.",
    "request_time_per_output_token_seconds": "A request's mean time between two tokens.",
    "e2e_request_latency_seconds": "From a request's arrival to its last token.",
    "request_queue_time_seconds": "From a request's submission to its first step.",
    "request_inference_time_seconds": "From a request's first step to its last token.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens that a request's samples have together.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
}


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`. Example: 30 gives 1, 2, 5, 10, 20."""
    steps = (digit * 10 ** power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


class Distribution:
    """Observations, counted by size. limits: of the buckets, ascending; the last is open."""

    def __init__(self, limits: tuple[float, ...]):
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.limits, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """As Prometheus wants it: for each limit, how many observations are at most that."""
        total, found = 0, []
        for limit, count in zip((*map(float, self.limits), "+Inf"), self.counts, strict=True):
            total += count
            found.append((str(limit), total))
        return found


class RequestHistograms:
    """An observer of one engine. clock: that of `EngineMetrics`, which sets a request's times."""

    def __init__(self, max_model_len: int, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        lengths = one_two_five(max_model_len)
        self.distributions = {name: Distribution(limits) for names, limits in (
            (("time_to_first_token_seconds",), FIRST_TOKEN),
            (("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
             BETWEEN_TOKENS),
            (("e2e_request_latency_seconds", "request_queue_time_seconds",
              "request_inference_time_seconds", "request_prefill_time_seconds",
              "request_decode_time_seconds"), REQUEST),
            (("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
             lengths),
            (("request_params_n",), SAMPLES)) for name in names}
        self.open: dict[Sequence, tuple[RequestStateStats, list[Sequence]]] = {}
        self.last_token: dict[Sequence, float] = {}

    def added(self, sequences: list[Sequence], stats: RequestStateStats,
              prompt: str | None) -> None:
        self.open.update(dict.fromkeys(sequences, (stats, sequences)))

    def scheduled(self, step: Step) -> None:
        pass

    def updated(self, step: Step, grown: dict[Sequence, list[int]]) -> None:
        now = self.clock()
        for seq, tokens in grown.items():
            if not tokens:  # it was pooled
                continue
            if seq in self.last_token:
                self._observe("inter_token_latency_seconds",
                              (now - self.last_token[seq]) / len(tokens), len(tokens))
            self.last_token[seq] = now

    def ended(self, sequences: list[Sequence]) -> None:
        """Sequences have ended. A second call is harmless."""
        for seq in sequences:
            self.last_token.pop(seq, None)
            stats, siblings = self.open.pop(seq, (None, []))
            if stats is not None and not any(sibling in self.open for sibling in siblings):
                if stats.first_token_ts:
                    self._count(stats.snapshot(siblings), siblings[0])

    def _count(self, stats: RequestStateStats, seq: Sequence) -> None:
        """A request has ended. Its arrival is on another clock than the rest, so what lies before
        the first token comes from `first_token_latency`."""
        decode = stats.last_token_ts - stats.first_token_ts
        self._observe("time_to_first_token_seconds", stats.first_token_latency)
        self._observe("e2e_request_latency_seconds", stats.first_token_latency + decode)
        self._observe("request_queue_time_seconds", stats.scheduled_ts - stats.queued_ts)
        self._observe("request_inference_time_seconds", stats.last_token_ts - stats.scheduled_ts)
        self._observe("request_prefill_time_seconds", stats.first_token_ts - stats.scheduled_ts)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_prompt_tokens", stats.num_prompt_tokens)
        self._observe("request_generation_tokens", stats.num_generation_tokens)
        self._observe("request_params_n", stats.num_samples)
        if seq.request.params.max_tokens is not None:
            self._observe("request_params_max_tokens", seq.request.params.max_tokens)
        if stats.num_generation_tokens > stats.num_samples:
            per_sample = stats.num_generation_tokens / stats.num_samples
            self._observe("request_time_per_output_token_seconds", decode / (per_sample - 1))

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.distributions[name].observe(value, times)


class Collector:
    """Reads one engine. model: the name that the numbers carry, as clients know it."""

    def __init__(self, engine: LLMEngine, model: str):
        self.engine = engine
        self.labels = {"model_name": model, "engine": "0"}
        self.requests = RequestHistograms(engine.config.max_model_len)
        engine.observers.append(self.requests)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Empty: so the registry does not read the engine when this collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The library calls this at scrape time. A dead engine still gives its histograms."""
        try:
            numbers = self.engine.get_metrics()
        except RuntimeError:
            numbers = []
        families: dict[str, Metric] = {}
        for number in numbers:
            if number.name not in families:
                families[number.name] = self._family(number)
            values = self._values({**number.labels, **self.labels}.values())
            if isinstance(number, (Counter, Gauge)):
                families[number.name].add_metric(values, number.value)
            else:
                families[number.name].add_metric(
                    values, [(_limit(key), n) for key, n in number.buckets.items()], number.sum)
        yield from families.values()
        for name, distribution in self.requests.distributions.items():
            yield self._histogram(name, distribution)

    def _family(self, number) -> Metric:
        kind = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily}.get(
            type(number), HistogramMetricFamily)
        meaning = MEANING.get(number.name.removeprefix("vllm:"), "")
        return kind(number.name, meaning, labels=list({**number.labels, **self.labels}))

    def _values(self, labels: Iterable[str]) -> list[str]:
        return [str(value) for value in labels]

    def _histogram(self, name: str, distribution: Distribution) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", MEANING[name], labels=list(self.labels))
        family.add_metric(list(self.labels.values()), distribution.cumulative(), distribution.sum)
        return family


def _limit(key: str) -> str:
    """Prometheus writes limits as floats: "64" is "64.0"."""
    return key if key == "+Inf" else str(float(key))
