"""Metrics against what really happened: counted from the steps themselves."""

import time
from types import SimpleNamespace

import pytest
from helpers import sequence

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.hooks import Extra
from nanoserve.sequence import Step
from nanoserve_extras.base.metrics import (
    STEP_TOKENS,
    Counter,
    EngineMetrics,
    Gauge,
    Histogram,
)
from nanoserve_extras.base.request import RequestStateStats

GREEDY = dict(temperature=0, ignore_eos=True)


class Steps(Extra):
    """An extra of its own: what the steps say, in plain lists."""

    def __init__(self, llm: LLM):
        self.sizes, self.preempted, self.admitted, self.accepted = [], [], [], []
        llm.add(self)

    def scheduled(self, step) -> None:
        self.preempted += [seq.name for seq in step.preempted]
        self.admitted += [(seq.name, seq.num_prompt_tokens, start) for seq, start in zip(
            step.num_new_tokens, step.starts, strict=True) if seq in step.admitted]

    def updated(self, step, accepted) -> None:
        firsts = {seq.request.request_id: seq.num_prompt_tokens for seq in accepted
                  if seq.request.request_id not in self.accepted}
        self.accepted += [seq.request.request_id for seq in accepted]
        if accepted:  # as vLLM's IterationStats: whole prompts, with their first tokens
            self.sizes.append(len(accepted) + sum(firsts.values()))


def values(llm: LLM) -> dict:
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:") + metric.labels.get("finished_reason", "")
        assert metric.name.startswith("vllm:") and name not in found
        assert metric.labels.items() >= dict(model_name=llm.config.model, engine="0").items()
        found[name] = metric if isinstance(metric, Histogram) else metric.value
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engines_numbers_are_the_steps(qwen3, overlap):
    """Prefix hits, preemptions (which are no second query), n samples, and a stop token."""
    with LLM(qwen3, block_size=4, num_gpu_blocks_override=14, max_model_len=48,
             max_num_batched_tokens=11, async_scheduling=overlap) as llm:
        steps = Steps(llm)
        common = list(range(8))
        prompts = [common + [50 + i] * (i + 1) for i in range(4)] + [[7, 8, 9]]
        first = llm.generate(prompts[4], SamplingParams(**GREEDY, max_tokens=8), use_tqdm=False)
        stop = first[0].outputs[0].token_ids[2]
        params = [SamplingParams(**GREEDY, max_tokens=20) for _ in range(4)] + [
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])]
        outs = first + llm.generate(prompts, params, use_tqdm=False)
        outs += llm.generate(common + [3], SamplingParams(n=2, seed=1, max_tokens=5,
                                                          ignore_eos=True), use_tqdm=False)
        found = values(llm)
    firsts = {}
    for name, num_prompt, start in steps.admitted:  # only the first time counts
        firsts.setdefault(name, (num_prompt, start))
    assert len(steps.admitted) > len(firsts) and steps.preempted
    assert found["prefix_cache_queries"] == sum(n for n, _ in firsts.values())
    assert found["prefix_cache_hits"] == sum(start for _, start in firsts.values()) > 0
    assert found["num_preemptions"] == len(steps.preempted)
    assert found["generation_tokens"] == len(steps.accepted) == sum(
        len(sample.token_ids) for out in outs for sample in out.outputs)
    assert found["prompt_tokens"] == sum(len(out.prompt_token_ids) for out in outs)
    assert (found["request_successstop"], found["request_successlength"],
            found["request_successabort"]) == (1, 7, 0)
    assert found["request_params_n"].buckets["1.0"] == len(outs) - 1  # one has two samples
    assert found["request_params_n"].count == len(outs)
    sizes = found["iteration_tokens_total"]
    assert (sizes.count, sizes.sum) == (len(steps.sizes), sum(steps.sizes))
    assert sizes.buckets == {str(float(limit)): sum(size <= limit for size in steps.sizes)
                             for limit in STEP_TOKENS} | {"+Inf": len(steps.sizes)}
    for out in outs:
        m, names = out.metrics, {out.request_id, f"{out.request_id}.0", f"{out.request_id}.1"}
        assert m.num_prompt_tokens == len(out.prompt_token_ids)
        assert m.num_generation_tokens == sum(len(s.token_ids) for s in out.outputs)
        assert m.num_generation_tokens == steps.accepted.count(out.request_id)
        assert m.num_preemptions == sum(name in names for name in steps.preempted)
        assert m.num_cached_tokens == out.num_cached_tokens
        assert 0 < m.queued_ts <= m.scheduled_ts < m.first_token_ts < m.last_token_ts
    assert sum(out.metrics.num_preemptions for out in outs) == len(steps.preempted)


def test_gauges_are_of_this_moment(qwen3):
    """Three requests of 8 tokens, two rows: 2 run with 2 blocks of 4 each, then 3 in 16."""
    with LLM(qwen3, block_size=4, num_gpu_blocks_override=16, max_num_seqs=2) as llm:
        def gauges():
            return [m.value for m in llm.get_metrics() if isinstance(m, Gauge)]

        assert gauges() == [0, 0, 0]
        for i in range(3):
            llm.add_request(str(i), [i] * 8, SamplingParams(**GREEDY, max_tokens=9))
        assert gauges() == [0, 3, 0]
        llm.step()
        assert gauges() == [2, 1, 4 / 16]
        llm.step()  # the ninth token: a third block
        assert gauges() == [2, 1, 6 / 16]
        llm.abort_request(["0", "1", "2", "1"])
        assert gauges() == [0, 0, 0]
        aborted = [m for m in llm.get_metrics() if m.labels.get("finished_reason") == "abort"]
        assert [m.value for m in aborted] == [3] and isinstance(aborted[0], Counter)


def test_what_is_not_looked_up_is_no_query(qwen3):
    with LLM(qwen3, enable_prefix_caching=False) as llm:
        llm.generate([[1] * 40, [1] * 40], SamplingParams(max_tokens=2), use_tqdm=False)
        assert values(llm)["prefix_cache_queries"] == 0
    with LLM(qwen3) as llm:
        llm.generate([1] * 40, SamplingParams(max_tokens=2, prompt_logprobs=1), use_tqdm=False)
        assert values(llm)["prefix_cache_queries"] == 0


def test_streamed_metrics_grow_and_do_not_change_afterwards(qwen3):
    before = time.time()
    with LLM(qwen3) as llm:
        outs = list(llm.stream([1, 2, 3], SamplingParams(**GREEDY, max_tokens=5)))
    counts = [out.metrics.num_generation_tokens for out in outs]
    assert counts == [1, 2, 3, 4, 5]
    stamps = [out.metrics.last_token_ts for out in outs]
    assert stamps == sorted(set(stamps)) and len({out.metrics.first_token_ts for out in outs}) == 1
    m = outs[-1].metrics
    assert before <= m.arrival_time <= time.time()
    assert 0 < m.first_token_latency <= time.time() - before
    # Two clocks, but the same span: from (nearly) the arrival to the first token.
    assert m.first_token_latency >= m.first_token_ts - m.queued_ts


def test_a_request_without_a_token_has_no_times(qwen3):
    with LLM(qwen3, max_num_seqs=1) as llm:
        llm.add_request("a", [1, 2], SamplingParams(**GREEDY, max_tokens=4))
        llm.add_request("b", [1, 2], SamplingParams(**GREEDY, max_tokens=4))
        llm.step()
        llm.abort_request("b")
        [out] = [out for out in llm.step() if out.request_id == "b"]
        assert values(llm)["request_params_n"].count == 0
    m = out.metrics
    assert (m.scheduled_ts, m.first_token_ts, m.first_token_latency) == (0, 0, 0)
    assert m.queued_ts > 0 and (m.num_generation_tokens, m.num_cached_tokens) == (0, 0)


def test_a_second_sample_does_not_move_the_request(qwen3):
    """It waits a step for the first one's blocks and hits them: the request began before that."""
    with LLM(qwen3, block_size=4) as llm:
        [out] = llm.generate([1] * 9, SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True),
                             use_tqdm=False)
    assert out.metrics.scheduled_ts < out.metrics.first_token_ts


def counted(max_model_len: int, **clocks) -> EngineMetrics:
    """Those of an engine that is none."""
    metrics = EngineMetrics(**clocks)
    metrics.attach(SimpleNamespace(config=EngineConfig(model="none", max_model_len=max_model_len),
                                   scheduler=SimpleNamespace(most_drafts=None)))
    return metrics


def test_times_on_a_clock_that_is_set_by_hand():
    """Queued at 1, begun at 4, tokens at 10, 12 and 15; the last step brings three, which share its
    time. It arrived half a second before it was queued."""
    times = iter([1.0, 4.0, 10.0, 12.0, 15.0])
    metrics = counted(50, clock=lambda: next(times), wall=lambda: 109.5)
    seq = sequence("0", [1, 2], SamplingParams(max_tokens=9), 0)
    metrics.added(SimpleNamespace(sequences=[seq], stats=RequestStateStats(arrival_time=100.0)))
    metrics.scheduled(SimpleNamespace(num_new_tokens={seq: 2}, preempted=[], admitted=[seq],
                                      num_loaded={}))
    for tokens in ([7], [7], [7, 7, 7]):
        seq.token_ids += tokens
        metrics.updated(Step(0), {seq: tokens})
    seq.finish_reason = "length"
    metrics.ended([seq])
    metrics.ended([seq])
    sums = {name: (sum(d.counts), d.sum) for name, d in metrics.histograms.items()}
    assert sums["inter_token_latency_seconds"] == (4, 5.0)
    assert sums["time_to_first_token_seconds"] == (1, 9.5)
    assert sums["request_queue_time_seconds"] == (1, 3.0)
    assert sums["request_prefill_time_seconds"] == (1, 6.0)
    assert sums["request_decode_time_seconds"] == (1, 5.0)
    assert sums["request_inference_time_seconds"] == (1, 11.0)
    assert sums["e2e_request_latency_seconds"] == (1, 14.5)
    assert sums["request_time_per_output_token_seconds"] == (1, 1.25)
    assert sums["iteration_tokens_total"] == (3, 7)
    assert not metrics.open and not metrics.last_token
    assert metrics.histograms["request_prompt_tokens"].limits == (1, 2, 5, 10, 20, 50)


def test_a_sequence_that_pauses_has_waited_since_its_own_last_token():
    """By hand: one gets a token at 1, 2, 3 and 4, the other at 1 and 4."""
    times = iter([0.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    metrics = counted(64, clock=lambda: next(times), wall=lambda: 0.0)
    one, other = (sequence(name, [1], SamplingParams(max_tokens=9), 0) for name in "ab")
    for seq in (one, other):
        metrics.added(SimpleNamespace(sequences=[seq], stats=RequestStateStats()))
    for accepted in ([one, other], [one], [one], [one, other]):
        metrics.updated(Step(0), {seq: [7] for seq in accepted})
    waits = metrics.histograms["inter_token_latency_seconds"].read("")
    assert (waits.count, waits.sum) == (4, 1 + 1 + 1 + 3)
    assert (waits.buckets["1.0"], waits.buckets["2.5"], waits.buckets["5.0"]) == (3, 3, 4)
