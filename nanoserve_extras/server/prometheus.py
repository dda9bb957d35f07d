"""The engine's metrics in Prometheus' text format, for `/metrics`.

    engine ─► EngineMetrics: `LLM.get_metrics()`, read when Prometheus asks ─► text

    # HELP vllm:request_success_total Sequences that ended, by reason.
    # TYPE vllm:request_success_total counter
    vllm:request_success_total{model_name="storyteller",engine="0",finished_reason="stop"} 3

A dashboard that was made for vLLM shows these metrics, because names, labels and the limits of the
buckets are the same. The text format (version 0.0.4) has a line for each number; a counter's name
ends with "_total", and a histogram's buckets are cumulative.

Invariants: a scrape takes no lock and waits for no step, and two engines share no numbers. The
library prometheus_client is not used: it counts by itself, and these numbers are counted already.
"""

from nanoserve.engine import LLMEngine
from nanoserve_extras.base.metrics import Counter, Gauge, Metric, Vector

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
    "state_snapshot_tokens": "Tokens whose recurrent state came from a snapshot.",
    "state_snapshot_saved": "Snapshots of recurrent states that were taken.",
    "state_snapshot_evicted": "Of these, those that gave way to others.",
    "state_snapshot_usage_perc": "Share of the snapshots in use; 1 is all of them.",
    "spec_decode_num_drafts": "Times that tokens were guessed for a sequence.",
    "spec_decode_num_draft_tokens": "Tokens guessed.",
    "spec_decode_num_accepted_tokens": "Tokens guessed that were right.",
    "spec_decode_num_accepted_tokens_per_pos": "Of these, those at each place of a guess.",
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


def text(engines: dict[str, LLMEngine]) -> str:
    """All metrics as text. engines: by the model's name for clients, which is their label."""
    lines: dict[str, list[str]] = {}  # lines by metric, each group after its two comments
    for model, engine in engines.items():
        for number in numbers_of(engine):
            name, kind = number.name, type(number).__name__.lower()
            if isinstance(number, (Counter, Vector)):
                name, kind = f"{name}_total", "counter"
            meaning = MEANING.get(number.name.removeprefix("vllm:"), "")
            those = lines.setdefault(name, [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"])
            labels = number.labels | {"model_name": model, "engine": "0"}
            those += [f"{name}{more}{{{_labels(labels | own)}}} {value}"
                      for more, own, value in samples(number)]
    return "\n".join(line for those in lines.values() for line in those) + "\n"


def numbers_of(engine: LLMEngine) -> list[Metric]:
    """An engine's metrics. Those that it counted itself are there even if it is dead."""
    try:
        return engine.get_metrics()
    except RuntimeError:
        return engine.metrics.read(engine.scheduler)


def samples(number: Metric) -> list[tuple[str, dict, float]]:
    """For each line of a metric: the suffix of its name, its further labels, and its value."""
    if isinstance(number, (Counter, Gauge)):
        return [("", {}, number.value)]
    if isinstance(number, Vector):
        return [("", {"position": i}, value) for i, value in enumerate(number.values)]
    return [*(("_bucket", {"le": limit}, count) for limit, count in number.buckets.items()),
            ("_sum", {}, number.sum), ("_count", {}, number.count)]


def _labels(labels: dict) -> str:
    def quoted(value) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items())
