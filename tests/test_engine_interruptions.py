"""What goes wrong in the middle: Ctrl-C, errors in a step, tokenizers that fail."""

import signal

import pytest
from small_engine import (
    TOKENIZER,
    assert_idle,
    assert_serves,
    drain,
    drain_through,
    greedy,
    make,
    run,
    tokens,
)
from tqdm import tqdm

from nanoserve import LLM
from nanoserve.detokenizer import Detokenizer

# -------------------------------------------------------------- what goes wrong

PLACES = {  # where the signal or error comes: an object of the engine, and its method
    "launch": lambda llm: (llm.runner, "launch"),
    "schedule": lambda llm: (llm.scheduler, "schedule"),
    "update": lambda llm: (llm.scheduler, "update"),
    "finish": lambda llm: (llm.scheduler, "finish"),
    "fetch": lambda llm: (llm.runner, "fetch"),
    "add": lambda llm: (llm.scheduler, "add"),
    "progress": lambda llm: (tqdm, "update"),
}


def disturb(monkeypatch, llm: LLM, place: str, call: int, trouble, after: bool) -> None:
    """Make trouble at the given call of a method, before or after it has done its work."""
    target, name = PLACES[place](llm)
    method, count = getattr(target, name), 0

    def disturbed(*args, **kinds):
        nonlocal count
        count += 1
        if count == call and not after:
            trouble()
        result = method(*args, **kinds)
        if count == call and after:
            trouble()
        return result
    monkeypatch.setattr(target, name, disturbed)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_generate(llm, expected, monkeypatch, place, call, after):
    """Requests are aborted, blocks come back, and the engine says the same as before. A request
    that was added by hand is none of `generate`'s business, and goes on to its end."""
    if place == "add":
        call += 1  # the first is the request by hand
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, lambda: signal.raise_signal(signal.SIGINT), after)
        llm.add_request("mine", [6] * 20, greedy(15))
        prompts = ["Hello", [7] * 40, "c", "d", "e", [7] * 40]
        # The traceback is kept, as a debugger would: nothing may depend on its being freed.
        with pytest.raises(KeyboardInterrupt) as interrupted:
            run(llm, prompts, [greedy(n) for n in (9, 8, 1, 6, 5, 4)])
    assert set(llm.requests) <= {"mine"} and interrupted.traceback
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.scheduler.check()
    outs = drain(llm)
    assert list(outs) == ["mine"]
    assert tokens(outs["mine"][-1:]) == [expected([6] * 20, 15)]
    assert_idle(llm)
    assert_serves(llm, expected)


@pytest.mark.parametrize("place", ["schedule", "launch", "update", "finish"])
def test_ctrl_c_in_a_step_by_hand_loses_no_output(llm, monkeypatch, place):
    """`step` empties the inbox when the turn's work is done, and Ctrl-C that was noted must have
    come by then."""
    llm.add_request("mine", [6] * 20, greedy(5))
    outputs: list = []
    while len(outputs) < 3:
        outputs += llm.step()
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, 1, lambda: signal.raise_signal(signal.SIGINT), True)
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs += llm.step()
    assert [len(output.outputs[0].token_ids) for output in outputs + drain(llm)["mine"]] == [
        1, 2, 3, 4, 5]
    assert_idle(llm)


@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("place", ["launch", "schedule", "fetch"])
def test_an_error_in_a_step(llm, expected, monkeypatch, place, call):
    """Out of memory, say: `generate` raises it and cleans up. By hand, the step is simply lost, and
    may be tried again. A device reports its errors late: when the host fetches the tokens."""
    def fail():
        raise RuntimeError("out of memory")
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, fail, after=False)
        waited = []  # for the device, which may still read the lost step's buffers
        patch.setattr(llm.runner, "synchronize", lambda: waited.append(True))
        with pytest.raises(RuntimeError, match="out of memory"):
            run(llm, ["Hello", [7] * 40, "c"], greedy(9))
        assert len(waited) == 1
    assert_idle(llm)
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, fail, after=False)
        for name, prompt in (("one", "Hello"), ("two", [7] * 40)):
            llm.add_request(name, prompt, greedy(9))
        outs, failures = drain_through(llm, RuntimeError, llm.scheduler.check)
    assert failures == 1
    assert tokens([outs["one"], outs["two"]]) == [expected("Hello", 9), expected([7] * 40, 9)]
    assert_serves(llm, expected)


def test_the_last_abort_after_a_rank_has_died_leaves_no_step_in_flight(qwen3):
    """No result of it will come: whoever stepped while there was work stepped for ever."""
    with make(qwen3, async_scheduling=True) as llm:
        llm.add_request("mine", "Hello", greedy())
        llm.step()
        assert llm.scheduler.in_flight
        llm.runner.ranks.fail("rank 1 died")  # as it is noted between two steps
        with pytest.raises(RuntimeError, match="rank 1 died"):
            llm.abort_request("mine")
        assert_idle(llm)


def test_somebody_elses_signal_handler_is_called_and_kept(llm, expected, monkeypatch):
    """A handler that only takes a note, as a server has it: nothing is interrupted."""
    notes = []
    before = signal.signal(signal.SIGINT, lambda *args: notes.append(args))
    try:
        with monkeypatch.context() as patch:
            disturb(patch, llm, "update", 2, lambda: signal.raise_signal(signal.SIGINT), True)
            assert tokens(run(llm, "Hello", greedy())) == [expected("Hello")]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(notes) == 1


@pytest.mark.parametrize("checking", [True, False])
def test_the_audit_runs_when_it_is_asked_for(qwen3, monkeypatch, checking):
    """NANOSERVE_CHECK=1: a broken count is found after the step in which it breaks."""
    monkeypatch.setenv("NANOSERVE_CHECK", "1" if checking else "0")
    llm = make(qwen3)
    llm.add_request("r", "Hello", greedy(4))
    llm.step()
    llm.scheduler.blocks.ref_counts[llm.requests["r"].sequences[0].block_table[0]] += 1
    if checking:
        with pytest.raises(AssertionError, match="counts 2 references but is held by"):
            llm.step()
    else:
        assert llm.step()[0].outputs[0].finish_reason is None


# ------------------------------------------------------- trouble with a tokenizer


def test_a_tokenizer_that_fails_ends_one_request_alone(llm, expected, monkeypatch):
    """The tokens of a step are counted before they become text: a tokenizer that raised for one
    request left the others a token short, and the engine stuck with a finished one."""
    add = Detokenizer.add

    def picky(self, token_id):
        if self.params.seed == 13:
            raise RuntimeError("no such token")
        return add(self, token_id)

    monkeypatch.setattr(Detokenizer, "add", picky)
    llm.add_request("good", "Hello", greedy(6))
    llm.add_request("bad", "world", greedy(6, seed=13))
    llm.add_request("short", [1, 2, 3], greedy(1))
    outs, errors = drain_through(llm, RuntimeError)
    outs |= {out.request_id: out for out in llm.step()}
    assert errors == 1
    assert outs["bad"].outputs[0].finish_reason == "abort"
    assert outs["good"].outputs[0].token_ids == expected("Hello", 6)
    assert outs["good"].outputs[0].text == TOKENIZER.decode(
        expected("Hello", 6), skip_special_tokens=True)
    assert outs["short"].outputs[0].token_ids == expected([1, 2, 3], 1)
    assert_idle(llm)


def test_a_request_that_can_not_start_leaves_no_trace(llm, expected, monkeypatch):
    """A detokenizer looks at the prompt when it is made, and may raise: nothing is queued then."""
    def broken(self, *args):
        raise RuntimeError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "__init__", broken)
        with pytest.raises(RuntimeError, match="no such token"):
            run(llm, ["Hello", "world"], greedy(4))
        with pytest.raises(RuntimeError, match="no such token"):
            llm.add_request("mine", "Hello", greedy(4))
    llm.scheduler.check()
    assert not llm.has_unfinished_requests()
    assert_serves(llm, expected)


@pytest.mark.parametrize("how", ["by hand", "a stream that is closed"])
def test_a_tokenizer_that_fails_at_an_abort_leaves_the_others_theirs(llm, expected, monkeypatch,
                                                                     how):
    """Its own request has ended and has an output all the same; those behind it are aborted, too,
    and the error is raised at the end. They ran on without anybody."""
    flush, ended = Detokenizer.flush, []

    def picky(self):
        if self.params.seed == 13:
            raise RuntimeError("no such token")
        return flush(self)

    monkeypatch.setattr(Detokenizer, "flush", picky)
    monkeypatch.setattr(llm.hooks, "ended", [ended.extend])
    params = [greedy(20, seed=13), greedy(20)]
    if how == "by hand":
        for name, param in zip("ab", params, strict=True):
            llm.add_request(name, "Hello", param)
        llm.step()
        with pytest.raises(RuntimeError, match="no such token"):
            llm.abort_request(["a", "b"])
        assert {out.request_id: out.aborted for out in llm.step()} == {"a": True, "b": True}
    else:
        iterator = llm.stream(["Hello", "Hello"], params)
        next(iterator)
        with pytest.raises(RuntimeError, match="no such token"):
            iterator.close()
    assert len(ended) == 2 and not llm.requests
    assert_idle(llm)
    assert_serves(llm, expected)
