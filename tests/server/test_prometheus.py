"""What /metrics says: vLLM's names, and sums that agree with what each request was told.

Oracles: prometheus_client's own parser; `RequestOutput.metrics` of the same requests; arithmetic by
hand, on a clock that is set by hand.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from helpers import sequence
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from small_engine import make  # noqa: E402

from nanoserve import SamplingParams  # noqa: E402
from nanoserve.frontend.outputs import RequestStateStats
from nanoserve.server import prometheus  # noqa: E402
from nanoserve.server.prometheus import (  # noqa: E402
    MEANING,
    Collector,
    Distribution,
    RequestHistograms,
    one_two_five,
)

DASHBOARD = json.loads((Path(prometheus.__file__).parent / "grafana.json").read_text())


def read(collector: Collector) -> dict[str, float]:
    """Every sample by its name, and by its label that is none of the engine's, if it has one."""
    found = {}
    for family in text_string_to_metric_families(collector.text().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "known as" and sample.labels["engine"] == "0"
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


@pytest.fixture(scope="module")
def counted(qwen3):
    """An engine that has served some requests; its numbers, and what the requests were told."""
    with make(qwen3, num_gpu_blocks_override=6, max_num_seqs=3, kv_offload_bytes=2 ** 20) as llm:
        collector = Collector(llm, "known as")
        params = [SamplingParams(seed=i, n=1 + i % 2, max_tokens=10 + 5 * i, ignore_eos=True)
                  for i in range(6)]
        outputs = llm.generate(["a shared beginning, and then " + "xyz"[i % 3] for i in range(6)],
                               params, use_tqdm=False)
        llm.add_request("gone", "Hello", SamplingParams())
        llm.abort_request("gone")
        yield read(collector), outputs


def test_sums_agree_with_what_the_requests_were_told(counted):
    numbers, outputs = counted
    told = [output.metrics for output in outputs]
    sums = {
        "time_to_first_token_seconds": [m.first_token_latency for m in told],
        "request_queue_time_seconds": [m.scheduled_ts - m.queued_ts for m in told],
        "request_prefill_time_seconds": [m.first_token_ts - m.scheduled_ts for m in told],
        "request_decode_time_seconds": [m.last_token_ts - m.first_token_ts for m in told],
        "request_inference_time_seconds": [m.last_token_ts - m.scheduled_ts for m in told],
        "request_prompt_tokens": [m.num_prompt_tokens for m in told],
        "request_generation_tokens": [m.num_generation_tokens for m in told],
        "request_params_max_tokens": [10, 15, 20, 25, 30, 35],
        "request_params_n": [1, 2] * 3}
    for name, values in sums.items():
        assert numbers[f"vllm:{name}_sum"] == pytest.approx(sum(values)), name
        assert numbers[f"vllm:{name}_count"] == len(values) == numbers[f"vllm:{name}_bucket +Inf"]
    assert numbers["vllm:generation_tokens_total"] == sum(m.num_generation_tokens for m in told)
    assert numbers["vllm:prompt_tokens_total"] == sum(m.num_prompt_tokens for m in told)
    assert numbers["vllm:num_preemptions_total"] == sum(m.num_preemptions for m in told) > 0
    assert numbers["vllm:request_success_total length"] == 9
    assert numbers["vllm:request_success_total abort"] == 1
    assert numbers["vllm:prefix_cache_hits_total"] > 0
    # Between n tokens of a sample there are n - 1 times.
    assert numbers["vllm:inter_token_latency_seconds_count"] == sum(
        m.num_generation_tokens - m.num_samples for m in told)
    assert numbers["vllm:num_requests_running"] == numbers["vllm:kv_cache_usage_perc"] == 0


def test_every_name_is_explained_and_no_counter_is_a_total_twice(counted):
    numbers, _ = counted
    assert not [name for name in numbers if "_total_total" in name]
    for name in MEANING:
        assert any(number.startswith(f"vllm:{name}") for number in numbers), name


def test_every_metric_of_the_dashboard_is_exposed(counted):
    numbers, _ = counted
    names = {number.split()[0] for number in numbers}
    expressions = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    used = set(re.findall(r"vllm:\w+", " ".join(expressions)))
    assert len(expressions) > 12 and used <= names, used - names
    assert {"vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"} <= used
    assert all(expression.count("(") == expression.count(")") for expression in expressions)


def test_vllms_dashboard_finds_its_names(counted):
    """The metrics that the dashboard in vLLM's examples asks for."""
    numbers, _ = counted
    names = {number.split()[0] for number in numbers}
    for name in ("e2e_request_latency_seconds_bucket", "inter_token_latency_seconds_bucket",
                 "time_to_first_token_seconds_bucket", "prompt_tokens_total",
                 "generation_tokens_total", "num_requests_running", "num_requests_waiting",
                 "kv_cache_usage_perc", "request_success_total", "request_queue_time_seconds_sum",
                 "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
                 "request_prompt_tokens_bucket", "request_generation_tokens_bucket"):
        assert f"vllm:{name}" in names


def test_two_engines_share_no_numbers_and_an_ended_one_still_answers(qwen3):
    with make(qwen3) as one, make(qwen3) as other:
        first, second = Collector(one, "known as"), Collector(other, "known as")
        one.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert read(first)["vllm:generation_tokens_total"] == 3
        assert read(second)["vllm:generation_tokens_total"] == 0
        assert read(second)["vllm:request_params_n_count"] == 0
    numbers = read(first)
    assert numbers["vllm:request_params_n_count"] == 1
    assert "vllm:generation_tokens_total" not in numbers


def test_a_scrape_waits_for_no_step(qwen3):
    """While this thread has the engine's turn another one reads the numbers."""
    from concurrent.futures import ThreadPoolExecutor

    with make(qwen3) as llm, ThreadPoolExecutor(1) as pool:
        collector = Collector(llm, "known as")
        with llm.turns:
            assert pool.submit(collector.text).result(20)


def test_buckets_count_what_is_at_most_so_large():
    assert one_two_five(30) == (1, 2, 5, 10, 20) and one_two_five(100)[-1] == 100
    distribution = Distribution((1, 5))
    for value in (0.5, 1, 1.1, 5, 7):
        distribution.observe(value)
    assert distribution.cumulative() == [("1.0", 2), ("5.0", 4), ("+Inf", 5)]
    assert distribution.sum == 14.6


def test_times_on_a_clock_that_is_set_by_hand():
    """A sample gets tokens at 10, 12 and 15; the last step brings three, which share its time."""
    times = iter([10.0, 12.0, 15.0])
    observer = RequestHistograms(64, clock=lambda: next(times))
    seq = sequence("0", [1, 2], SamplingParams(max_tokens=9), 0)
    stats = RequestStateStats(queued_ts=1.0, scheduled_ts=4.0, first_token_ts=10.0,
                              last_token_ts=15.0, first_token_latency=9.5)
    observer.added([seq], stats, None)
    for tokens in ([7], [7], [7, 7, 7]):
        seq.token_ids += tokens
        observer.updated(None, {seq: tokens})
    observer.ended([seq])
    observer.ended([seq])
    sums = {name: (sum(d.counts), d.sum) for name, d in observer.distributions.items()}
    assert sums["inter_token_latency_seconds"] == (4, 5.0)
    assert sums["request_queue_time_seconds"] == (1, 3.0)
    assert sums["request_prefill_time_seconds"] == (1, 6.0)
    assert sums["request_decode_time_seconds"] == (1, 5.0)
    assert sums["e2e_request_latency_seconds"] == (1, 14.5)
    assert sums["request_time_per_output_token_seconds"] == (1, 1.25)
    assert not observer.open and not observer.last_token
