"""What is asked of an engine, and what is made of its answers' times; without torch.

Oracles: nano-vllm's own lines for the community workload, and sums done by hand.
"""

import random

import pytest

from benchmarks import workloads
from benchmarks.workloads import SMALL

pytestmark = pytest.mark.floor


def test_the_community_workload_is_nano_vllms_number_by_number():
    random.seed(0)  # what follows is copied from its bench.py
    prompt_token_ids = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))]
                        for _ in range(256)]
    max_tokens = [random.randint(100, 1024) for _ in range(256)]
    requests = workloads.generate(workloads.LARGE["batch"], 151_936)
    assert [request.prompt for request in requests] == prompt_token_ids
    assert [request.max_tokens for request in requests] == max_tokens
    assert sum(map(len, prompt_token_ids)) == 142_827 and sum(max_tokens) == 133_966


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workloads_have_the_shape_they_say(name):
    shape = SMALL[name]
    requests = workloads.generate(shape, 300)
    assert requests == workloads.generate(shape, 300)
    assert requests != workloads.generate(shape, 300, seed=1)
    assert len(requests) == shape.num_prompts
    assert all(0 <= token < 300 for request in requests for token in request.prompt)
    assert all(shape.output_len[0] <= r.max_tokens <= shape.output_len[1] for r in requests)
    long = requests[3::4] if shape.long_every else []
    assert all(len(request.prompt) == shape.long_len for request in long)
    usual = [request for request in requests if request not in long]
    low, high = (shape.shared_len + length for length in shape.input_len)
    assert all(low <= len(request.prompt) <= high for request in usual)
    assert len({tuple(request.prompt[:shape.shared_len]) for request in usual}) == 1
    assert len({tuple(request.prompt) for request in requests}) == len(requests)
    if shape.period:
        assert all(r.prompt[shape.period:] == r.prompt[:-shape.period] for r in requests)


def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("seconds,prompt,output,shared\n1.5,20,4,16\n0.25,18,3,16\n")
    requests = workloads.replay(path, 300)
    assert [(r.arrival, len(r.prompt), r.max_tokens) for r in requests] == [
        (0.25, 18, 3), (1.5, 20, 4)]
    assert requests[0].prompt[:16] == requests[1].prompt[:16]


def test_spread_and_summary_by_hand():
    assert workloads.spread([]) is None
    values = [float(i) for i in range(1, 101)]
    random.Random(0).shuffle(values)
    assert workloads.spread(values) == dict(mean=50.5, p50=50, p90=90, p99=99)
    assert workloads.spread([3.0]) == dict(mean=3, p50=3, p90=3, p99=3)
    summary = workloads.summarize(4.0, 30, [[1.0, 1.5, 3.0], [2.0]])
    assert summary["inter_token"] == dict(mean=1.0, p50=0.5, p90=1.5, p99=1.5)
    assert summary["ttft"]["mean"] == 1.5 and summary["end_to_end"]["p99"] == 3.0
    assert (summary["num_output_tokens"], summary["requests_s"]) == (4, 0.5)
    assert (summary["output_tok_s"], summary["total_tok_s"]) == (1.0, 8.5)
    assert summary["decode_tok_s"] == 1.0  # two tokens behind a first one, in 2.0 seconds
    ends_only = workloads.summarize(4.0, 30, [[1.0, 3.0], [2.0, 2.0]], num_tokens=[3, 1])
    assert ends_only.pop("inter_token") is None
    assert ends_only == {k: v for k, v in summary.items() if k != "inter_token"}
    assert workloads.summarize(1.0, 3, [])["ttft"] is None
