"""A line every ten seconds while there is work: how many requests, how fast, how full.

    nanoserve: 3 running, 5 waiting | 120 tokens/s in, 85 out | KV cache 12% | prefix cache 45%

Two readings of the engine's own numbers (`LLM.get_metrics`) make a line. Nothing is counted for it,
and an idle server says nothing.
"""

import asyncio
from collections.abc import Callable

from nanoserve.llm import LLM
from nanoserve_extras.server.async_llm import AsyncLLM, EngineDeadError

SECONDS = 10.0


def read(llm: LLM) -> dict[str, float]:
    """The numbers by name, histograms apart."""
    return {one.name.removeprefix("vllm:"): one.value for one in llm.get_metrics()
            if hasattr(one, "value") and not one.labels.get("finished_reason")}


def line(before: dict[str, float], now: dict[str, float], seconds: float) -> str | None:
    """None where nothing has happened in between."""
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
    """Until it is cancelled, or the engine is dead."""
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
