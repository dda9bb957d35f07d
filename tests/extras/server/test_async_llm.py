"""The asynchronous engine: the same tokens as offline, and nobody is kept waiting or forgotten.

Oracle: `LLM.generate` of the same engine, which other tests hold to transformers; behind every test
the engine is idle, all blocks are free and the audit passes.
"""

import asyncio
import gc
import random
import sys
import threading
import time
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from clean_process import run as run_alone
from small_engine import assert_idle, greedy, ids_of, make, run

from nanoserve import EngineArgs, RequestOutputKind, SamplingParams
from nanoserve_extras.layer_plan.layer_plan import LayerPlan
from nanoserve_extras.server.async_llm import (
    MAX_FAILURES,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    merged,
)

PROMPTS = ["Hello", "Once upon a time", "x", "The quick brown fox jumps"]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def shared(request, qwen3):
    llm = make(qwen3, async_scheduling=request.param, max_num_batched_tokens=48)
    llm.check_every_step = True
    engine = AsyncLLM(llm)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared):
    yield shared
    wait_for_rest(shared)


def wait_for_rest(engine: AsyncLLM) -> None:
    """Orders are carried out by another thread: when all are, the engine must be idle."""
    asyncio.run(asyncio.wait_for(_between_steps(engine), 20))
    assert not engine.inboxes
    assert_idle(engine.llm)


async def _between_steps(engine: AsyncLLM) -> None:
    while await engine.between_steps(engine.llm.has_unfinished_requests):
        await asyncio.sleep(0.001)


async def last_of(engine: AsyncLLM, *args, **kinds):
    return [output async for output in engine.generate(*args, **kinds)][-1]


def test_tokens_are_those_of_generate(engine):
    """Seeds and several samples included, all side by side."""
    params = [greedy(), SamplingParams(n=3, seed=5, max_tokens=6), SamplingParams(seed=1),
              SamplingParams(seed=2, temperature=2.0, max_tokens=9, logprobs=2)]
    expected = run(engine.llm, PROMPTS, params)

    async def all_of_them():
        return await asyncio.gather(*(last_of(engine, *one)
                                      for one in zip(PROMPTS, params, strict=True)))
    for found, offline in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert found.finished
        assert [s.token_ids for s in found.outputs] == [s.token_ids for s in offline.outputs]
        assert [s.text for s in found.outputs] == [s.text for s in offline.outputs]


def test_a_slow_reader_gets_one_merged_output(engine):
    """Nothing is read until the request has ended: what then comes is one output with all of it."""
    params = SamplingParams(n=2, seed=3, max_tokens=20, logprobs=1, prompt_logprobs=1,
                            output_kind=RequestOutputKind.DELTA)
    [offline] = run(engine.llm, ["Hello"], SamplingParams(n=2, seed=3, max_tokens=20, logprobs=1,
                                                          prompt_logprobs=1))

    async def late():
        request = await engine.prepare("Hello", params)
        async with aclosing(engine.outputs([request])) as outputs:
            seen = [await anext(outputs)]
            while engine.llm.has_unfinished_requests():
                await asyncio.sleep(0.001)
            return seen + [output async for output in outputs]
    first, second = asyncio.run(late())
    both = merged(first, second)
    assert [s.text for s in both.outputs] == [s.text for s in offline.outputs]
    assert [s.token_ids for s in both.outputs] == [s.token_ids for s in offline.outputs]
    assert [s.logprobs for s in both.outputs] == [s.logprobs for s in offline.outputs]
    assert both.prompt_logprobs == offline.prompt_logprobs


def test_the_event_loop_never_waits_for_a_step(engine, monkeypatch):
    """While a step is stopped for as long as we like, requests come and go on the loop."""
    entered, go_on = threading.Event(), threading.Event()
    launch = engine.llm.runner.launch

    def slow(step):
        entered.set()
        assert go_on.wait(20)
        return launch(step)
    monkeypatch.setattr(engine.llm.runner, "launch", slow)

    async def busy():
        running = asyncio.create_task(last_of(engine, "Hello", greedy()))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(last_of(engine, "x", greedy(), f"id {i}")) for i in range(3)]
        await asyncio.sleep(0.05)
        others[0].cancel()
        await engine.abort("id 1")
        with suppress(asyncio.CancelledError):
            await others[0]
        assert not any(task.done() for task in (running, *others[1:]))
        go_on.set()
        return await asyncio.gather(running, *others[1:])
    first, aborted, third = asyncio.run(busy())
    assert first.outputs[0].finish_reason == third.outputs[0].finish_reason == "length"
    assert aborted.aborted


def test_a_prompt_is_tokenised_off_the_event_loop(engine, monkeypatch):
    names = []
    make_request = engine.llm.make_request
    monkeypatch.setattr(engine.llm, "make_request", lambda *args: (
        names.append(threading.current_thread().name), make_request(*args))[1])
    asyncio.run(last_of(engine, "Hello", greedy()))
    assert names[0].startswith("nanoserve-tokenize")


@pytest.mark.parametrize("how", ["close", "forget", "fail"])
def test_whoever_leaves_aborts(engine, how):
    """Who is cancelled does, too: see the 200 streams."""
    async def leave():
        outputs = engine.generate("Hello", greedy(40))
        await anext(outputs)
        if how == "close":
            await outputs.aclose()
        elif how == "forget":
            del outputs
            gc.collect()
        else:
            with pytest.raises(ZeroDivisionError):
                async with aclosing(outputs):
                    raise ZeroDivisionError
        await asyncio.wait_for(_between_steps(engine), 20)
    asyncio.run(leave())


def test_a_prompt_that_is_refused_costs_nothing(engine):
    with pytest.raises(ValueError, match="the prompt is empty"):
        asyncio.run(last_of(engine, ""))
    with pytest.raises(ValueError, match="sampling_params must be"):
        asyncio.run(last_of(engine, "Hello", "greedy"))


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(engine):
    async def twice():
        outputs = engine.generate("Hello", greedy(50), "same")
        first = await anext(outputs)
        with pytest.raises(ValueError, match="in use"):
            await last_of(engine, "x", greedy(), "same")
        return [first] + [output async for output in outputs]
    assert len(asyncio.run(twice())[-1].outputs[0].token_ids) == 50


def test_abort_ends_a_generator_with_what_there_is(engine):
    async def aborted():
        seen = []
        async for output in engine.generate("Hello", greedy(50), "mine"):
            seen.append(output)
            await engine.abort("mine")
            await engine.abort("nobody's")
        return seen
    last = asyncio.run(aborted())[-1]
    assert last.aborted and 1 <= len(last.outputs[0].token_ids) < 50


def test_other_threads_may_generate_at_the_same_time(engine):
    """Their steps move our requests on, and ours theirs."""
    expected = [out.outputs[0].token_ids for out in run(engine.llm, PROMPTS, greedy(20))]

    async def ours():
        theirs = asyncio.to_thread(run, engine.llm, PROMPTS, greedy(20))
        return await asyncio.gather(theirs, *(last_of(engine, p, greedy(20)) for p in PROMPTS))
    theirs, *mine = asyncio.run(ours())
    assert [out.outputs[0].token_ids for out in theirs] == expected
    assert [out.outputs[0].token_ids for out in mine] == expected


def test_200_streams_with_aborts_at_random_points(engine):
    """Every way to leave, at any moment; those that stay get the tokens they get alone."""
    rng = random.Random(1)
    expected = {p: out.outputs[0].token_ids for p, out in zip(
        PROMPTS, run(engine.llm, PROMPTS, greedy(10)), strict=True)}

    async def one(i: int) -> int:
        prompt, patience = rng.choice(PROMPTS), rng.choice([0, 1, 3, 99])
        outputs = engine.generate(prompt, greedy(10), str(i))
        async with aclosing(outputs):
            async for output in outputs:
                patience -= 1
                if output.finished and not output.aborted:
                    assert output.outputs[0].token_ids == expected[prompt]
                    return 1
                if patience < 0 and rng.random() < 0.5:
                    await engine.abort(str(i))
                elif patience < 0:
                    return 0
        return 0

    async def all_of_them() -> list:
        tasks = [asyncio.create_task(one(i)) for i in range(200)]
        while any(not task.done() for task in tasks):
            await asyncio.sleep(0.02)
            rng.choice(tasks).cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)
    results = asyncio.run(all_of_them())
    assert sum(result == 1 for result in results if isinstance(result, int)) > 20
    strange = [r for r in results if not isinstance(r, (int, asyncio.CancelledError))]
    assert not strange


# ------------------------------------------------------------------- failures


def break_steps(monkeypatch, llm, times: int) -> None:
    """So many steps fail, and then they work again."""
    launch, left = llm.runner.launch, [times]

    def broken(step):
        if left[0]:
            left[0] -= 1
            raise FloatingPointError("a step went wrong")
        return launch(step)
    monkeypatch.setattr(llm.runner, "launch", broken)


def test_a_failed_step_reaches_everybody_and_the_engine_goes_on(engine, monkeypatch, capsys):
    break_steps(monkeypatch, engine.llm, 1)

    async def several():
        return await asyncio.gather(*(last_of(engine, p, greedy()) for p in PROMPTS),
                                    return_exceptions=True)
    errors = asyncio.run(several())
    assert any(isinstance(error, EngineGenerateError) for error in errors)
    for error in errors:  # who came behind the failed step is served
        assert not isinstance(error, Exception) or (
            isinstance(error.__cause__, FloatingPointError) and "went wrong" in str(error))
    assert "FloatingPointError" in capsys.readouterr().err
    engine.check_health()
    assert asyncio.run(last_of(engine, "Hello", greedy())).finished


def test_an_engine_whose_steps_keep_failing_is_dead_and_says_so(qwen3, monkeypatch):
    with make(qwen3) as llm:
        engine = AsyncLLM(llm)
        break_steps(monkeypatch, llm, MAX_FAILURES)

        async def until_it_is_dead():
            for _ in range(MAX_FAILURES):
                with pytest.raises(EngineGenerateError, match="went wrong"):
                    await last_of(engine, "Hello", greedy())
            with pytest.raises(EngineDeadError, match="went wrong"):
                await last_of(engine, "Hello", greedy())
            with pytest.raises(EngineDeadError):
                await engine.between_steps(print)
            await engine.abort("anything")
        asyncio.run(until_it_is_dead())
        with pytest.raises(EngineDeadError, match="went wrong"):
            engine.check_health()
        assert_idle(llm)
        engine.shutdown()
        engine.shutdown()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only there a process counts its threads so")
def test_one_thread_alone_has_others_that_compute_with_it():
    """The one that made the engine, and computed with another one, has none any more."""
    run_alone("""
import asyncio, os, threading, torch
from nanoserve import LLM, SamplingParams
from nanoserve_extras.server.async_llm import AsyncLLM
def helpers():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
async def stream(llm):
    async with AsyncLLM(llm) as engine:
        async for output in engine.generate("x" * 300, SamplingParams(max_tokens=4)):
            assert helpers() == before, (helpers(), before)
torch.set_num_threads(2)
llm = LLM(dtype="float32", num_gpu_blocks_override=64)
llm.generate(["x" * 300] * 2, SamplingParams(max_tokens=4))
before = helpers()
asyncio.run(stream(llm))
""")


def test_shutdown_ends_what_runs(qwen3):
    async def shut_down():
        async with AsyncLLM(make(qwen3)) as engine:
            waiting = asyncio.create_task(last_of(engine, "Hello", greedy(50)))
            while not engine.llm.requests:
                await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.check_health()
    asyncio.run(shut_down())


def test_a_loop_that_is_gone_costs_the_engine_nothing(engine):
    """A loop that ends with a request open: its outputs have nowhere to go."""
    loop = asyncio.new_event_loop()
    outputs = engine.generate(ids_of("Hello"), greedy(30))
    loop.run_until_complete(anext(outputs))
    loop.close()
    time.sleep(0.01)
    assert len(asyncio.run(last_of(engine, "Hello", greedy())).outputs[0].token_ids) == 8
    with pytest.raises(StopIteration):  # closing it needs no loop
        outputs.aclose().send(None)


def test_an_idle_engine_gathers_prompts_before_it_reads_layers(qwen3):
    """With layers on disk the first waits `max_wait` for others. Full steps begin at once, also
    with an hour to wait, and whoever comes while one runs does not wait."""
    llm = make(qwen3, layer_plan={"disk": 2}, max_wait=0.4)
    expected = [one.outputs[0].token_ids for one in run(llm, PROMPTS, greedy(20))]
    engine, steps, plan = AsyncLLM(llm), [], llm.extra(LayerPlan)
    llm.hooks.launching.append(lambda step: steps.append(len(step.admitted)))

    def wait_for_others(seconds: float) -> None:
        plan.options = replace(plan.options, max_wait=seconds)

    async def some(count: int, apart: float = 0.0) -> list:
        async def one(i):
            await asyncio.sleep(i * apart)
            return await last_of(engine, PROMPTS[i], greedy(20))
        outputs = await asyncio.wait_for(asyncio.gather(*map(one, range(count))), 60)
        assert [out.outputs[0].token_ids for out in outputs] == expected[:count]
        found = steps[:]
        steps.clear()
        return found

    began = time.monotonic()
    first, *others = asyncio.run(some(3, apart=0.1))
    assert first == 3 and not any(others) and time.monotonic() - began > 0.4
    wait_for_others(3600)
    assert asyncio.run(some(4))[0] == 4  # max_num_seqs
    wait_for_others(0)
    llm.hooks.launching.append(lambda step: (wait_for_others(3600), time.sleep(0.05)))
    first, *others = asyncio.run(some(2, apart=0.5))
    assert first == sum(others) == 1
    engine.shutdown()


@pytest.mark.parametrize(("name", "remedy"), [
    ("pause_generation", "between_steps"), ("is_running", "check_health"),
    ("sleep", r"await engine.between_steps\(engine.llm.sleep\)"),
    ("get_tokenizer", r"engine.llm.get_tokenizer is the LLM's"), ("genrate", "generate")])
def test_vllms_names_that_are_missing_here_name_what_to_do(engine, name, remedy):
    with pytest.raises(AttributeError, match=rf"^AsyncLLM.{name} is not .*{remedy}|"
                                             rf"^AsyncLLM has no {name}.*{remedy}"):
        getattr(engine, name)
    assert not hasattr(engine, "_anything")


def test_vllms_ways_to_make_one(qwen3):
    with pytest.raises(ValueError, match=r"AsyncLLM\(\): vllm_config=.*from_engine_args"):
        AsyncLLM(vllm_config=5, executor_class=6, log_stats=True)
    with pytest.raises(ValueError, match=r"from_engine_args\(\): stat_loggers=.*get_metrics"):
        AsyncLLM.from_engine_args(EngineArgs(model=str(qwen3)), usage_context=1, stat_loggers=[5])
