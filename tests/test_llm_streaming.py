"""Streams: what was shown is never taken back, and leaving early gives everything back."""

from itertools import pairwise

import pytest
from small_engine import assert_serves, drain, greedy, run, tokens

from nanoserve import RequestOutputKind, SamplingParams

EMOJI = "é 👨\u200d👩\u200d👧 ok"


@pytest.mark.parametrize("stop", [None, " ok", "ok!"])
def test_streaming_cumulative(llm, say, stop):
    """Each output continues the one before, up to `generate`'s text; no broken characters."""
    say(EMOJI)
    final = run(llm, "Say: ", greedy(40, stop=stop))[0].outputs[0]
    outs = [out.outputs[0] for out in llm.stream("Say: ", greedy(40, stop=stop))]
    assert final.text == (EMOJI[:-3] if stop == " ok" else EMOJI)
    assert (outs[-1].text, outs[-1].token_ids) == (final.text, final.token_ids)
    assert [len(out.token_ids) for out in outs] == list(range(1, len(final.token_ids) + 1))
    for earlier, later in pairwise(outs):
        assert later.text.startswith(earlier.text) and "\ufffd" not in earlier.text
        assert earlier.finish_reason is None


@pytest.mark.parametrize("stop", [None, " ok", "ok!"])
def test_streaming_deltas_add_up(llm, say, stop):
    """Several samples at once; the pieces of each, put together, are its whole text."""
    say(EMOJI)
    params = dict(n=3, max_tokens=40, stop=stop)
    [final] = run(llm, "Say: ", SamplingParams(**params))
    outs = list(llm.stream("Say: ", SamplingParams(**params, output_kind=RequestOutputKind.DELTA)))
    for index in range(3):
        pieces = [out.outputs[index] for out in outs]
        assert "".join(piece.text for piece in pieces) == final.outputs[index].text
        assert sum((p.token_ids for p in pieces), []) == final.outputs[index].token_ids
        assert not any("\ufffd" in piece.text for piece in pieces)
        assert pieces[-1].finish_reason == final.outputs[index].finish_reason == "stop"
    assert max(len(piece.text) for out in outs for piece in out.outputs) < len(EMOJI)


def test_streaming_final_outputs_only(llm, expected):
    """One output a request, in the order in which they finish."""
    params = [greedy(n, output_kind=RequestOutputKind.FINAL_ONLY) for n in (9, 5, 7)]
    outs = list(llm.stream(["a", "b", "c"], params))
    assert [out.prompt for out in outs] == ["b", "c", "a"]
    assert tokens(outs) == [expected("b", 5), expected("c", 7), expected("a", 9)]
    assert all(out.finished for out in outs)


@pytest.mark.parametrize("how", ["close", "abandon", "raise", "break before the first"])
def test_leaving_a_stream_early_gives_everything_back(llm, expected, how):
    """The consumer goes away, or fails: its requests are aborted, other people's go on."""
    llm.add_request("mine", "Hello", greedy(20))
    iterator = llm.stream(["a", "b", [7] * 40, "d", "e"], greedy(20))
    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            for out in iterator:
                1 / (3 - len(out.outputs[0].token_ids))
    elif how != "break before the first":
        next(iterator), next(iterator)
    if how == "close":
        iterator.close()
    del iterator
    assert [request.request_id for request in llm.requests.values()] == ["mine"]
    assert len(llm.scheduler.waiting) + len(llm.scheduler.running) == 1
    outs = drain(llm)
    assert list(outs) == ["mine"] and tokens(outs["mine"][-1:]) == [expected("Hello", 20)]
    assert_serves(llm, expected)


def test_a_consumer_may_abort_its_own_request(llm, expected):
    """The stream ends with what it had, instead of waiting for ever."""
    outs = []
    for out in llm.stream(["Hello", "world"], greedy(12)):
        outs.append(out)
        if out.prompt == "Hello" and len(out.outputs[0].token_ids) == 3:
            llm.abort_request(out.request_id)
    last = {out.prompt: out.outputs[0] for out in outs}
    assert (last["Hello"].finish_reason, len(last["Hello"].token_ids)) == ("abort", 3)
    assert last["world"].token_ids == expected("world", 12)
