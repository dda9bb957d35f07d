"""Threads, signal handlers and the garbage collector may all come while a step runs."""

import signal
import sys
import threading
import time
from collections import deque

import pytest
from small_engine import assert_serves, greedy, make, run, tokens

from nanoserve import LLM, SamplingParams
from nanoserve.parallel import interrupts
from nanoserve.parallel.interrupts import Turns


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
    assert errors == ["this engine was shut down: make a new LLM"]


@pytest.mark.parametrize("method", ["_schedule_running", "schedule", "update"])
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


def test_a_handler_that_comes_while_its_thread_waits():
    """It met its own thread at a lock that wasn't reentrant: both waited for ever. Now it only
    leaves an order, which the thread that has the turn carries out."""
    turns, ran, held = Turns(), [], threading.Event()

    def holds() -> None:
        with turns:
            held.set()
            time.sleep(0.3)

    previous = signal.signal(signal.SIGALRM, lambda *_: turns.order(lambda: ran.append("handler")))
    thread = threading.Thread(target=holds)
    try:
        thread.start()
        assert held.wait(60)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with turns:
            ran.append("waits")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        thread.join(60)
    assert sorted(ran) == ["handler", "waits"]


def test_ctrl_c_does_not_lose_an_order():
    """It may come behind every call, so between taking one off the queue and calling it, too."""
    turns, ran = Turns(), []

    class Interrupted(deque):
        def popleft(self):
            signal.raise_signal(signal.SIGINT)
            return super().popleft()

    turns.orders = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        with turns:
            for name in "ab":
                turns.order(lambda name=name: ran.append(name))
    assert ran == ["a", "b"] and not turns.depth
    with turns:
        pass  # it can still be taken
    thread = threading.Thread(target=turns.__enter__)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the lock stayed with the thread that was interrupted"


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


def test_ctrl_c_at_any_line_leaves_turns_that_can_be_taken():
    """Behind a turn's last line, before that of `__exit__`, it left a turn that nobody could end:
    aborts and `shutdown` waited for ever. Here it comes once at each line of interrupts.py."""
    def interrupt_at(number: int) -> bool:
        """Whether there are so many lines."""
        turns, ran, count = Turns(), [], 0

        def trace(frame, event, _):
            nonlocal count
            if frame.f_code.co_filename != interrupts.__file__:
                return None
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGINT)
            return trace

        def work():
            with turns:
                turns.order(lambda: ran.append("order"))
                with turns, turns.interruptible():
                    ran.append("turn")

        interrupted = False
        try:
            sys.settrace(trace)
            work()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert interrupted == (count >= number), "it was lost"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not turns.is_within()
        other = threading.Thread(target=lambda: turns.__enter__() or turns.__exit__())
        other.start()
        other.join(60)
        assert not other.is_alive() and not turns.orders
        assert ran in ([], ["order"], ["turn", "order"])
        return interrupted

    number = 1
    while interrupt_at(number):
        number += 1
    assert number > 50


def test_a_turn_leaves_the_handler_that_it_finds():
    """Also one that can't be called, after a turn that found another one."""
    turns, heard = Turns(), []
    previous = signal.getsignal(signal.SIGINT)
    try:
        for handler in (lambda *_: heard.append(len(heard)), signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with turns:
                signal.raise_signal(signal.SIGINT)
                assert heard == [0] * (handler is signal.SIG_IGN)
                with turns.interruptible():
                    assert heard == [0]
            assert signal.getsignal(signal.SIGINT) is handler and heard == [0]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_order_fails_for_itself(capsys):
    """Whose turn it is has nothing to do with it; and it is carried out once, at the very end."""
    turns, ran = Turns(), []
    with turns:
        with turns:
            turns.order(lambda: ran.append(1))
            turns.order(lambda: 1 / 0)
            turns.order(lambda: ran.append(2))
        assert not ran
    assert ran == [1, 2] and "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # in nobody's turn
        turns.order(lambda: 1 / 0)


def test_the_errors_of_orders_that_are_done_together_are_all_told(capsys):
    """The error of whichever was first was raised for another's work, and the rest were lost."""
    turns = Turns()
    turns.orders.append(lambda: 1 / 0)  # of a thread that has not come to it yet
    with pytest.raises(KeyError):
        turns.order(lambda: {}["mine"])
    assert "ZeroDivisionError" in capsys.readouterr().err
    turns.orders.append(lambda: 1 / 0)
    turns.order(lambda: None)  # which did not fail
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_order_that_ends_the_script_does_not_end_the_orders():
    """SystemExit and its like go through; whoever catches it can still give orders."""
    turns, ran = Turns(), []
    with pytest.raises(SystemExit):
        turns.order(lambda: exec("raise SystemExit"))
    turns.order(lambda: ran.append(1))
    assert ran == [1] and not turns.is_within()


def test_an_order_of_an_order_is_carried_out_after_it():
    turns, ran = Turns(), []
    turns.order(lambda: (turns.order(lambda: ran.append("inner")), ran.append("outer")))
    assert ran == ["outer", "inner"]


def test_nobody_waits_for_ever_while_another_thread_steps():
    """A plain lock was taken again by the thread that had just given it back, up to a thousand
    times: whoever wanted to shut down, abort or add a request waited until all was generated."""
    turns, num_steps, done = Turns(), 0, False

    def steps() -> None:
        nonlocal num_steps
        while not done and num_steps < 2000:
            with turns, turns:  # like `step` in `generate`: once more inside is free
                num_steps += 1
                time.sleep(0.001)

    thread = threading.Thread(target=steps)
    thread.start()
    for _ in range(50):
        with turns:
            pass
    done = True
    thread.join(60)
    assert num_steps < 1000, "each of the 50 should have waited for a step or two"
