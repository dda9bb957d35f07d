"""A line every ten seconds while there is work: requests, tokens per second, use of the cache.

    nanoserve: 3 running, 5 waiting | 120 tokens/s in, 85 out | KV cache 12% | prefix cache 45%

A line is the difference of two readings of the engine's metrics (`LLM.get_metrics`). Nothing is
counted for it, and an idle server prints nothing.
"""

import asyncio
from collections.abc import Callable

from nanoserve.llm import LLM
from nanoserve_extras.server.async_llm import AsyncLLM, EngineDeadError

SECONDS = 10.0


def read(llm: LLM) -> dict[str, float]:
    """The engine's metrics by name, without histograms."""
    return {one.name.removeprefix("vllm:"): one.value for one in llm.get_metrics()
            if hasattr(one, "value") and not one.labels.get("finished_reason")}


def line(before: dict[str, float], now: dict[str, float], seconds: float) -> str | None:
    """The line for the time between two readings; None if nothing has happened."""
    new = {name: now[name] - before[name] for name in now}
    running, waiting = now["num_requests_running"], now["num_requests_waiting"]
    if not (running or waiting or new["generation_tokens"] or new["prompt_tokens"]):
        return None
    text = (f"{running:.0f} running, {waiting:.0f} waiting | "
            f"{new['prompt_tokens'] / seconds:,.0f} tokens/s in, "
            f"{new['generation_tokens'] / seconds:,.0f} out | "
            f"KV cache {now['kv_cache_usage_perc']:.0%}")
    if new["prefix_cache_queries"]:
        text += f" | prefix cache {new['prefix_cache_hits'] / new['prefix_cache_queries']:.0%}"
    return text


async def report(engine: AsyncLLM, tell: Callable[[str], None], seconds: float = SECONDS) -> None:
    """Print lines until this task is cancelled, or the engine is dead."""
    try:
        before = await engine.between_steps(lambda: read(engine.llm))
        while True:
            await asyncio.sleep(seconds)
            now = await engine.between_steps(lambda: read(engine.llm))
            if (text := line(before, now, seconds)) is not None:
                tell(text)
            before = now
    except EngineDeadError:
        return
