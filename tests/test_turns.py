"""Turns of threads: who waits, what Ctrl-C may do to them, and what is done between two of them."""

import signal
import sys
import threading
import time
from collections import deque

import pytest

from nanoserve import turns as signals
from nanoserve import turns as turns_file
from nanoserve.turns import Turns, ctrl_c_held

pytestmark = pytest.mark.floor


def test_a_handler_that_comes_while_its_thread_waits():
    """It met its own thread at a lock that wasn't reentrant: both waited for ever. Now its work is
    posted, and the thread that has the turn does it. A turn of its own left Ctrl-C without effect
    for good."""
    turns, ran, held = Turns(), [], threading.Event()

    def handler(*_) -> None:
        turns.post(lambda: ran.append("handler"))
        with turns:
            ran.append("its turn")

    def holds() -> None:
        with turns:
            held.set()
            time.sleep(0.3)

    previous = signal.signal(signal.SIGALRM, handler)
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
    assert sorted(ran) == ["handler", "its turn", "waits"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_does_not_lose_posted_work():
    """It may come behind every call, so between taking one off the queue and calling it, too."""
    turns, ran = Turns(), []

    class Interrupted(deque):
        def popleft(self):
            signal.raise_signal(signal.SIGINT)
            return super().popleft()

    turns.posted = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        with turns:
            for name in "ab":
                turns.post(lambda name=name: ran.append(name))
    assert ran == ["a", "b"] and not turns.holds
    with turns:
        pass  # it can still be taken
    thread = threading.Thread(target=turns.__enter__)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the lock stayed with the thread that was interrupted"


def test_ctrl_c_at_any_line_leaves_turns_that_can_be_taken():
    """Behind a turn's last line, before that of `__exit__`, it left a turn that nobody could end:
    aborts and `shutdown` waited for ever. Here it comes once at each line of both files. And where
    the handler of another signal had taken a turn just before, while its thread waited for one, the
    doorway stayed shut: that handler's turn had ended the hold."""
    def interrupt_at(number: int, alarm: int = 0) -> bool:
        """Whether there are so many lines. alarm: where the other signal comes."""
        turns, ran, count = Turns(), [], 0

        def trace(frame, event, _):
            nonlocal count
            if frame.f_code.co_filename not in (signals.__file__, turns_file.__file__):
                return None
            count += 1
            if count in (number, alarm):
                signal.raise_signal(signal.SIGINT if count == number else signal.SIGALRM)
            return trace

        def handler(*_) -> None:
            with turns, turns.interruptible():
                pass

        def work():
            with turns:
                turns.post(lambda: ran.append("posted"))
                with turns, turns.interruptible():
                    ran.append("turn")

        interrupted, previous = False, signal.signal(signal.SIGALRM, handler)
        try:
            sys.settrace(trace)
            work()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGALRM, previous)
        assert interrupted == (count >= number), "it was lost"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not turns.is_within()
        other = threading.Thread(target=lambda: turns.__enter__() or turns.__exit__())
        other.start()
        other.join(60)
        assert not other.is_alive() and not turns.posted
        assert ran in ([], ["posted"], ["turn", "posted"])
        return interrupted

    number = 1
    while interrupt_at(number):
        number += 1
    assert number > 50
    for alarm in range(1, number):
        for behind in range(1, 60, 3):
            interrupt_at(alarm + behind, alarm)


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


def test_ctrl_c_goes_through_where_a_turn_is_interruptible_unless_an_inner_hold_has_it():
    turns, done = Turns(), []
    with pytest.raises(KeyboardInterrupt):
        with turns, turns.interruptible():
            with ctrl_c_held():
                signal.raise_signal(signal.SIGINT)
                done.append("held")
            done.append("never")
    with turns:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            with turns.interruptible():  # one that was noted comes before the block begins
                done.append("never")
    assert done == ["held"]


def test_posted_work_fails_for_itself(capsys):
    """Whose turn it is has nothing to do with it; and it is done once, at the very end."""
    turns, ran = Turns(), []
    with turns:
        with turns:
            turns.post(lambda: ran.append(1))
            turns.post(lambda: 1 / 0)
            turns.post(lambda: ran.append(2))
        assert not ran
    assert ran == [1, 2] and "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # in nobody's turn
        turns.post(lambda: 1 / 0)


def test_the_errors_of_work_that_is_done_together_are_all_told(capsys):
    """The error of whichever was first was raised for another's work, and the rest were lost."""
    turns = Turns()
    turns.posted.append(lambda: 1 / 0)  # of a thread that has not come to it yet
    with pytest.raises(KeyError):
        turns.post(lambda: {}["mine"])
    assert "ZeroDivisionError" in capsys.readouterr().err
    turns.posted.append(lambda: 1 / 0)
    turns.post(lambda: None)  # which did not fail
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_posted_work_that_ends_the_script_does_not_end_the_posting():
    """SystemExit and its like go through; whoever catches it can still post."""
    turns, ran = Turns(), []
    with pytest.raises(SystemExit):
        turns.post(lambda: exec("raise SystemExit"))
    turns.post(lambda: ran.append(1))
    assert ran == [1] and not turns.is_within()


def test_work_that_work_posts_is_done_after_it():
    turns, ran = Turns(), []
    turns.post(lambda: (turns.post(lambda: ran.append("inner")), ran.append("outer")))
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
