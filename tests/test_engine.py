"""Driving the engine by hand, aborting, and calls that share an engine."""

from copy import copy

import pytest
from small_engine import (
    HELLO,
    TOKENIZER,
    assert_serves,
    drain,
    greedy,
    make,
    run,
    tokens,
)

from nanoserve import LLM, RequestOutputKind

# -------------------------------------------------------------- driving it by hand


def test_step_by_step(llm, expected):
    """Each output of a request has everything so far; the last one is finished."""
    llm.add_request("one", "Hello", greedy(5))
    llm.add_request("two", [1, 2, 3], greedy(3))
    outs = drain(llm)
    assert tokens(outs["one"]) == [expected("Hello", n) for n in range(1, 6)]
    assert tokens(outs["two"]) == [expected([1, 2, 3], n) for n in range(1, 4)]
    for seen in outs.values():
        assert [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]


def test_a_request_id_is_used_once_at_a_time(llm):
    llm.add_request("r", "Hello", greedy(3))
    with pytest.raises(ValueError, match="request_id='r'"):
        llm.add_request("r", "other", greedy(3))
    assert len(drain(llm)["r"][-1].outputs[0].token_ids) == 3
    llm.add_request("r", "other", greedy(2))
    assert len(drain(llm)["r"][-1].outputs[0].token_ids) == 2


def test_aborting_what_is_not_there_is_harmless(llm):
    llm.abort_request("never heard of")
    for wrong in (None, 3):
        with pytest.raises(ValueError, match=f"request_id={wrong}"):
            llm.abort_request(wrong)
    assert llm.step() == []


# ----------------------------------------------------- calls that share an engine


def test_requests_by_hand_survive_generate(llm, expected):
    """Results of offline calls went to the wrong request and last tokens were lost (mini-sglang
    #62), and a counter that was not reset between calls lost results (transformers #45943). Here
    requests that were added by hand run along, and keep every output for the next `step()`."""
    llm.add_request("mine", "Hello", greedy(6))
    llm.add_request("later", "Hello", greedy(20))
    first = llm.step()
    assert_serves(llm, expected)
    assert_serves(llm, expected)
    outs = drain(llm)
    mine = [out for out in first if out.request_id == "mine"] + outs["mine"]
    assert tokens(mine) == [expected("Hello", n) for n in range(1, 7)]
    assert tokens(outs["later"][-1:]) == [expected("Hello", 20)]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_finished_outputs_wait_for_step_under_any_name(llm, expected, kind):
    """Requests by hand may be called "1", "2", ..., as the engine calls its own. One that finishes
    during a `generate` is not the next `generate`'s result, however their ids collide."""
    next_name = next(copy(llm.names))
    names = [str(next_name + 2 * i) for i in range(7)]
    for i, name in enumerate(names):
        llm.add_request(name, [i] * 3, greedy(2, output_kind=kind))
    for i in range(12):
        assert tokens(run(llm, [20 + i] * 3, greedy(4))) == [expected([20 + i] * 3, 4)]
    outs = drain(llm)
    assert list(outs) == names
    for i, name in enumerate(names):
        ids = tokens(outs[name])
        total = sum(ids, []) if kind is RequestOutputKind.DELTA else ids[-1]
        assert total == expected([i] * 3, 2)


def test_a_stream_that_has_not_started_takes_nothing_from_others(llm, expected):
    """Streams are submitted when they are first asked; until then their ids are only promised."""
    one, other = llm.stream("Hello", greedy(4)), llm.stream("world", greedy(4))
    assert_serves(llm, expected)
    next_name = next(copy(llm.names))
    for number in range(next_name - 7, next_name + 2):
        llm.add_request(str(number), [1, 2, 3], greedy(5))
    assert tokens(list(one)[-1:]) == [expected("Hello", 4)]
    assert tokens(list(other)[-1:]) == [expected("world", 4)]
    outs = drain(llm)
    assert len(outs) == 9
    for seen in outs.values():
        assert tokens(seen[-1:]) == [expected([1, 2, 3], 5)]


def stop_spinning(monkeypatch, llm: LLM) -> None:
    """Turn a loop that waits for ever into a failure."""
    schedule, count = llm.scheduler.schedule, 0

    def counted():
        nonlocal count
        count += 1
        assert count < 100, "the engine steps and steps, and nothing comes of it"
        return schedule()
    monkeypatch.setattr(llm.scheduler, "schedule", counted)


def test_step_leaves_a_streams_outputs_to_the_stream(llm, expected, monkeypatch):
    """Whoever steps, moves all requests on; but an output goes to those who asked for it. A stream
    whose last output was given to somebody else would wait for ever."""
    stop_spinning(monkeypatch, llm)
    stream = llm.stream("Hello", greedy(5))
    seen = [next(stream)]
    llm.add_request("mine", "world", greedy(9))
    outs = drain(llm)
    assert list(outs) == ["mine"] and tokens(outs["mine"][-1:]) == [expected("world", 9)]
    seen += stream
    assert tokens(seen) == [expected("Hello", n) for n in range(1, 6)]


def test_an_id_is_free_again_when_its_request_has_finished(llm, expected, monkeypatch):
    """The stream's request finishes while somebody else steps; before the stream has looked, its id
    is used by hand. Each gets what is its own."""
    stop_spinning(monkeypatch, llm)
    stream = llm.stream("Hello", greedy(4))
    name = next(stream).request_id
    run(llm, "world", greedy(6))
    llm.add_request(name, [1, 2, 3], greedy(2))
    assert tokens(list(stream)[-1:]) == [expected("Hello", 4)]
    assert tokens(drain(llm)[name][-1:]) == [expected([1, 2, 3], 2)]


def test_two_engines_do_not_disturb_each_other(checkpoints, references):
    """A fixed port and shared-memory name made two engines on a machine clash, and a second engine
    in one process initialised the process group twice (nano-vllm). Step by step in turns, with
    different models, each says what it says alone; shutting one down leaves the other alone."""
    engines = {name: make(checkpoints[name]) for name in ("qwen3", "llama3.1")}
    outs = {name: [] for name in engines}
    for llm in engines.values():
        llm.add_request("r", HELLO, greedy(8))
    while any(llm.has_unfinished_requests() for llm in engines.values()):
        for name, llm in engines.items():
            outs[name] += llm.step()
    for name in engines:
        assert outs[name][-1].outputs[0].token_ids == references(name, HELLO, 8)[0]
    engines["qwen3"].shutdown()
    again = run(engines["llama3.1"], HELLO, greedy(8))
    assert tokens(again) == [references("llama3.1", HELLO, 8)[0]]


def test_several_requests_can_be_aborted_at_once(llm):
    """vLLM's engine takes a list of ids."""
    for name in "abc":
        llm.add_request(name, "Hello", greedy(9))
    llm.step()
    llm.abort_request(["a", "c", "unknown"])
    outs = drain(llm)
    assert [outs[name][-1].outputs[0].finish_reason for name in "abc"] == [
        "abort", "length", "abort"]
    for [*_, last] in outs.values():
        assert last.finished and last.outputs[0].text == TOKENIZER.decode(tokens([last])[0])
