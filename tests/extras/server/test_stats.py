"""The line that a server writes every ten seconds: its numbers, and when there is none."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve_extras.server import stats  # noqa: E402
from nanoserve_extras.server.async_llm import AsyncLLM  # noqa: E402

PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def test_a_line_has_the_numbers_of_the_time_between_two_readings():
    """32 prompt tokens twice, in blocks of 16: the second prompt finds one of its two blocks."""
    with LLM(dtype="float32", num_gpu_blocks_override=32) as llm:
        before = stats.read(llm)
        assert stats.line(before, stats.read(llm), 10) is None
        prompt = list(range(100, 132))
        for _ in range(2):
            llm.generate([prompt], PARAMS, use_tqdm=False)
        done = stats.read(llm)
        assert stats.line(before, done, 4) == (
            "0 running, 0 waiting | 16 tokens/s in, 10 out | KV cache 0% | prefix cache 25%")
        assert stats.line(done, stats.read(llm), 4) is None
        for name in ("one", "two"):
            llm.add_request(name, prompt, PARAMS)
        llm.step()
        assert stats.line(done, stats.read(llm), 4).startswith("2 running, 0 waiting | ")


def test_a_server_says_it_while_there_is_work_and_ends_with_the_engine():
    said: list[str] = []

    async def run() -> None:
        async with AsyncLLM(LLM(dtype="float32", num_gpu_blocks_override=32)) as engine:
            reporting = asyncio.create_task(stats.report(engine, said.append, 0.01))
            await asyncio.sleep(0.1)
            assert not said
            async for _ in engine.generate("Once upon a time", PARAMS):
                pass
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reporting, 10)

    asyncio.run(run())
    assert said and "tokens/s in" in said[0]
