"""Fixtures of tests with ranks in processes, for the conftest.py of their folders."""

import signal
from contextlib import ExitStack

import pytest


@pytest.fixture
def expected(references):
    from process_tools import MAX_TOKENS, PROMPT

    return lambda prompt=PROMPT, n=MAX_TOKENS: references("qwen3", prompt, n)[0]


@pytest.fixture
def start(qwen3):
    """Engines of two ranks (or more), shut down when the test is over, whatever became of them."""
    from process_tools import SMALL

    from nanoserve import LLM

    with ExitStack() as stack:
        yield lambda folder=qwen3, **options: stack.enter_context(
            LLM(folder, **SMALL | dict(tensor_parallel_size=2) | options))


@pytest.fixture
def spawned(monkeypatch):
    """The process ids of all children started from now on, also of engines that never came up."""
    from nanoserve import parallel

    pids, spawn = [], parallel._spawn

    def spy(boot):
        child = spawn(boot)
        pids.append(child.pid)
        return child

    monkeypatch.setattr(parallel, "_spawn", spy)
    return pids


@pytest.fixture
def leave_nobody():
    """Whatever has become of a test: all that is left of its scripts ends with it."""
    from process_tools import Script

    yield
    while Script.started:
        try:
            Script.started.pop().signal_all(signal.SIGKILL)
        except ProcessLookupError:
            pass
