"""What /metrics says: vLLM's names, and sums that agree with what each request was told.

Oracles: prometheus_client's own parser; `RequestOutput.metrics` of the same requests.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from small_engine import make  # noqa: E402

from nanoserve import SamplingParams  # noqa: E402
from nanoserve_extras.server import prometheus  # noqa: E402
from nanoserve_extras.server.prometheus import MEANING  # noqa: E402

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
# What the dashboard in vLLM's examples asks for.
VLLMS = """
    e2e_request_latency_seconds_bucket inter_token_latency_seconds_bucket
    time_to_first_token_seconds_bucket prompt_tokens_total generation_tokens_total
    num_requests_running num_requests_waiting kv_cache_usage_perc request_success_total
    request_queue_time_seconds_sum request_prefill_time_seconds_sum
    request_decode_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket"""


def read(engine) -> dict[str, float]:
    """Every sample by its name, and by its label that is none of the engine's, if it has one."""
    found = {}
    for family in text_string_to_metric_families(prometheus.text({"known as": engine})):
        assert family.type in ("counter", "gauge", "histogram") and family.documentation
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "known as" and sample.labels["engine"] == "0"
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


@pytest.fixture(scope="module")
def counted(qwen3):
    """An engine that has served some requests; its numbers, and what the requests were told."""
    with make(qwen3, num_gpu_blocks_override=6, max_num_seqs=3, kv_offload_bytes=2 ** 20) as llm:
        params = [SamplingParams(seed=i, n=1 + i % 2, max_tokens=10 + 5 * i, ignore_eos=True)
                  for i in range(6)]
        outputs = llm.generate(["a shared beginning, and then " + "xyz"[i % 3] for i in range(6)],
                               params, use_tqdm=False)
        llm.add_request("gone", "Hello", SamplingParams())
        llm.abort_request("gone")
        yield read(llm), outputs


def test_sums_agree_with_what_the_requests_were_told(counted):
    numbers, outputs = counted
    told = [output.metrics for output in outputs]
    sums = {
        "time_to_first_token_seconds": [m.first_token_latency for m in told],
        "request_queue_time_seconds": [m.scheduled_ts - m.queued_ts for m in told],
        "request_decode_time_seconds": [m.last_token_ts - m.first_token_ts for m in told],
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
    others = ("spec_decode", "state_snapshot")  # of engines that have drafts, or states
    for name in (name for name in MEANING if not name.startswith(others)):
        assert any(number.startswith(f"vllm:{name}") for number in numbers), name


def test_every_metric_of_our_dashboard_and_of_vllms_is_exposed(counted):
    numbers, _ = counted
    names = {number.split()[0] for number in numbers}
    expressions = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    used = set(re.findall(r"vllm:\w+", " ".join(expressions)))
    vllms = {f"vllm:{name}" for name in VLLMS.split()}
    assert len(expressions) > 12 and used | vllms <= names, (used | vllms) - names
    assert all(expression.count("(") == expression.count(")") for expression in expressions)


def test_two_engines_share_no_numbers_and_an_ended_one_still_answers(qwen3):
    with make(qwen3) as one, make(qwen3) as other:
        one.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert read(one)["vllm:generation_tokens_total"] == 3
        assert read(other)["vllm:generation_tokens_total"] == 0
        assert read(other)["vllm:request_params_n_count"] == 0
    assert read(one)["vllm:request_params_n_count"] == 1
    assert read(one)["vllm:generation_tokens_total"] == 3


def test_what_drafts_brought_is_told_by_position(qwen3):
    with make(qwen3, speculative_config=dict(method="ngram", num_speculative_tokens=2)) as llm:
        llm.generate([[5, 6, 7] * 5], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        numbers, [vector] = read(llm), [
            one for one in llm.get_metrics() if one.name.endswith("per_pos")]
    assert numbers["vllm:spec_decode_num_drafts_total"] > 0
    assert [numbers[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in (0, 1)] == (
        vector.values)


def test_any_name_of_a_model_can_be_read_again(qwen3):
    with make(qwen3) as llm:
        for name in ('say "x"', "back\\slash", "two\nlines"):
            text = prometheus.text({name: llm})
            [family, *_] = text_string_to_metric_families(text)
            assert family.samples[0].labels["model_name"] == name
            assert "\nvllm:generation_tokens_total{" in text  # the parser adds "_total" itself


def test_a_scrape_waits_for_no_step(qwen3):
    """While this thread has the engine's turn another one reads the numbers."""
    with make(qwen3) as llm, ThreadPoolExecutor(1) as pool:
        with llm.turns:
            assert pool.submit(prometheus.text, {"known as": llm}).result(20)
