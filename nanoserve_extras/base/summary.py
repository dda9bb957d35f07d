"""A summary of many requests in one line: `generate(summarize=True)`, and the simulation's figures.

The words of the field:

    TTFT         time to first token: from the request's arrival until its first token is known
    TPOT         time per output token: (last token - first token) / (output tokens - 1); with
                 n > 1 the tokens are a sample's on average, because the samples run side by side
    hit rate     prompt tokens found in the prefix cache / prompt tokens looked up
    p99          the value that 99 of 100 requests stay below (nearest rank: the 99th of 100)

metrics.py measures the times that are summed up here.
"""

from math import ceil

from nanoserve_extras.base.request import RequestStateStats


def summary(metrics: list[RequestStateStats], seconds: float) -> str:
    """One line about finished requests and the `seconds` that they took together.

    Requests without a token (aborted) have no TTFT, those with one token no time per output token.
    """
    ttft = sorted(m.first_token_latency for m in metrics if m.first_token_ts)
    spans = [(m.last_token_ts - m.first_token_ts, m.num_generation_tokens / m.num_samples - 1)
             for m in metrics if m.num_generation_tokens > m.num_samples]
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    num_cached = sum(m.num_cached_tokens for m in metrics)
    num_out = sum(m.num_generation_tokens for m in metrics)
    parts = [f"{many(len(metrics), 'request')} in {seconds:.2f} s"]
    if ttft:
        parts.append(f"TTFT mean {duration(sum(ttft) / len(ttft))}, "
                     f"p99 {duration(percentile(ttft, 99))}")
    if spans:
        mean = sum(span / count for span, count in spans) / len(spans)
        parts.append(f"{duration(mean)} per output token")
    parts.append(f"{num_out / max(seconds, 1e-9):,.0f} output tok/s")
    parts.append(f"prefix hits {num_cached / max(num_prompt, 1):.0%} of {num_prompt:,} prompt "
                 "tokens")
    parts.append(many(sum(m.num_preemptions for m in metrics), "preemption"))
    return " | ".join(parts)


def percentile(ordered: list[float], percent: int) -> float:
    """By nearest rank. Example: the 99th percentile of 100 values is the 99th, of 10 the 10th."""
    return ordered[ceil(percent * len(ordered) / 100) - 1]


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def many(count: int, noun: str) -> str:
    """ "1 block", "2 blocks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
