"""Threads, signal handlers and the garbage collector may all come while a step runs."""

import threading
import time

import pytest
from small_engine import assert_serves, greedy, make, run, tokens

from nanoserve import LLM, SamplingParams


def test_threads_may_share_an_engine(llm, expected):
    """They take turns step by step, and everybody gets their own results. Without turns the books
    of the scheduler were changed by two steps at once."""
    wanted = {n: [[n] * (5 + 9 * n), [7, n, 7]] for n in range(4)}
    texts = {n: [expected(prompt, 12) for prompt in prompts] for n, prompts in wanted.items()}
    got, errors = {}, []

    def work(n: int) -> None:
        try:
            for _ in range(3):
                got[n] = tokens(run(llm, wanted[n], greedy(12)))
                assert got[n] == texts[n]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and got == texts
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def test_shutdown_from_another_thread_waits_for_the_step(qwen3):
    """It pulled the scheduler away under a step: an AttributeError, and with several ranks two
    threads in their collectives at once."""
    llm, errors = LLM(qwen3, num_gpu_blocks_override=64), []

    def work() -> None:
        try:
            run(llm, [[1, 2, 3]] * 20, SamplingParams(max_tokens=190, ignore_eos=True))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not llm.requests:
        time.sleep(0.001)
    llm.shutdown()
    thread.join(60)
    assert len(errors) == 1 and "shut down" in errors[0]


@pytest.mark.parametrize("method", ["_schedule_decodes", "schedule", "update"])
def test_a_stream_that_is_closed_in_the_middle_of_a_step(llm, expected, monkeypatch, method):
    """The garbage collector may do that at any line, in the thread that steps: the lock let it in,
    and aborting took a row away from a step that was being made. It waits for the step's end now;
    so does an abort by a signal's handler."""
    iterator = llm.stream(["a", "b", [7] * 40], greedy(20))
    next(iterator)
    llm.add_request("its handler's", "world", greedy(20))
    inner, called = getattr(llm.scheduler, method), []

    def closes(*args):
        result = inner(*args)
        if not called:
            called.append(len(llm.requests))
            iterator.close()
            llm.abort_request("its handler's")
            assert len(llm.requests) == called[0], "not in the middle of the step"
        return result

    monkeypatch.setattr(llm.scheduler, method, closes)
    assert tokens(run(llm, ["Hello"], greedy(12))) == [expected("Hello", 12)]
    assert called and not llm.requests
    llm.scheduler.check()
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    *_, output = llm.step()
    assert output.request_id == "its handler's" and output.aborted
    assert_serves(llm, expected)


def test_a_handler_that_steps_in_the_middle_of_a_step_is_refused(llm, expected, monkeypatch):
    """Its step changed what the other one was counting: texts were wrong, and nobody noticed."""
    schedule, refused = llm.scheduler.schedule, []

    def interrupted():
        step = schedule()
        if not refused:
            with pytest.raises(RuntimeError, match="in the middle of a step") as error:
                llm.step()
            refused.append(error)
        return step

    monkeypatch.setattr(llm.scheduler, "schedule", interrupted)
    assert tokens(run(llm, ["Hello"], greedy(12))) == [expected("Hello", 12)] and refused
    assert_serves(llm, expected)


def test_shutting_down_in_the_middle_of_a_step(qwen3, monkeypatch):
    """As the handler of SIGTERM does it: the step ends, and then the engine does."""
    with make(qwen3) as llm:
        update = llm.scheduler.update

        def ends(*args):
            llm.shutdown()
            assert llm.runner is not None
            return update(*args)

        monkeypatch.setattr(llm.scheduler, "update", ends)
        with pytest.raises(RuntimeError, match="shut down"):
            run(llm, "Hello", greedy(8))
        assert llm.runner is None
