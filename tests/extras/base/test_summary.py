"""The line that sums up a run, worked out by hand."""

import pytest

from nanoserve_extras.base.request import RequestStateStats
from nanoserve_extras.base.summary import percentile, summary

pytestmark = pytest.mark.floor


def stats(ttft, tokens, tpot=0.0, **counts) -> RequestStateStats:
    """Of a request that has ended; times are in seconds."""
    return RequestStateStats(
        first_token_ts=1.0 if tokens else 0.0, first_token_latency=ttft,
        last_token_ts=1.0 + tpot * (tokens - 1), num_generation_tokens=tokens, **counts)


def test_the_summary_by_hand():
    """TTFT 100 and 300 ms; 10 and 30 ms per token, whatever their lengths; 12 tokens in 2 s; the
    one without a token counts as a request, and its prompt as looked up."""
    line = summary([stats(0.1, 3, 0.010, num_prompt_tokens=100, num_cached_tokens=64),
                    stats(0.3, 9, 0.030, num_prompt_tokens=1000, num_preemptions=2),
                    stats(0.0, 0, num_prompt_tokens=180)], 2.0)
    assert line == ("3 requests in 2.00 s | TTFT mean 200.0 ms, p99 300.0 ms | 20.0 ms per output "
                    "token | 6 output tok/s | prefix hits 5% of 1,280 prompt tokens | "
                    "2 preemptions")
    assert summary([], 0.0).startswith("0 requests in 0.00 s | 0 output tok/s")


def test_samples_run_side_by_side():
    """By hand: two samples of 5 tokens, 10 ms apart, take 40 ms: 10 ms per token, not 40 / 9."""
    m = stats(0.1, 5, 0.010)
    m.num_generation_tokens, m.num_samples = 10, 2
    assert " | 10.0 ms per output token | " in summary([m], 1.0)
    m.num_generation_tokens = 2
    assert "per output token" not in summary([m], 1.0)


@pytest.mark.parametrize("count, rank", [(1, 1), (10, 10), (99, 99), (100, 99), (101, 100),
                                         (200, 198)])
def test_percentiles_by_nearest_rank(count, rank):
    """The smallest value that 99% of all values do not exceed."""
    ordered = [float(i) for i in range(1, count + 1)]
    assert percentile(ordered, 99) == rank == next(
        x for x in ordered if sum(y <= x for y in ordered) >= 0.99 * count)
