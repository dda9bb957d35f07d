"""Ctrl-C is held back: who gets it, and when. The oracle is the order of what was heard."""

import signal
import threading

import pytest

from nanoserve.turns import ctrl_c_held

pytestmark = pytest.mark.floor


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_raised_when_the_outermost_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_held():
            with ctrl_c_held() as noted:
                press_ctrl_c()
                done.append(len(noted))
            done.append("inner")
    assert done == [1, "inner"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_does_not_lose_ctrl_c():
    with pytest.raises(KeyboardInterrupt) as interrupted:
        with ctrl_c_held():
            press_ctrl_c()
            raise ValueError
    assert isinstance(interrupted.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hold_nothing():
    """Signals reach only the main thread, and only it may set handlers."""
    seen = []

    def work() -> None:
        with ctrl_c_held() as noted:
            seen.append((noted, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [([], signal.default_int_handler)]
