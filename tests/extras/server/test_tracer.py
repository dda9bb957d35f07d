"""The step trace of a running server: it can't fill up, and shows nobody's words.

Oracle: the recorder, which has its own tests; here it is looked at what it is handed, and when.
"""

import pytest
from small_engine import greedy, make, run, tokens
from witness import Witness, read

pytest.importorskip("fastapi")

from nanoserve_extras.server.tracer import Tracer  # noqa: E402
from nanoserve_extras.trace import recorder  # noqa: E402
from nanoserve_extras.trace.recorder import page  # noqa: E402


def test_steps_are_recorded_and_texts_are_not(qwen3, tmp_path):
    with make(qwen3) as llm:
        watching = Tracer(llm)
        run(llm, ["my secret", "yours"], greedy(5))
        stream = watching.stream()
    assert [request[1:2] + request[3:] for request in stream["requests"]] == [[9, ""], [5, ""]]
    assert sum(frame["i"] >= 0 for frame in stream["frames"]) == 6 - 1
    (tmp_path / "it.html").write_text(page(stream))
    assert "secret" not in str(read(tmp_path / "it.html"))


def test_blocks_that_were_cached_before_can_be_found_from_the_first_step_on(qwen3):
    with make(qwen3, block_size=4) as llm:
        run(llm, ["the same words"], greedy(5))
        witness = Witness(Tracer(llm), llm.scheduler)
        llm.add(witness)
        run(llm, ["the same words"], greedy(5))
    assert witness.num_read == 5 and witness.admitted[0]


def test_a_full_recording_begins_anew_when_the_engine_is_idle_and_stops_no_request(
        qwen3, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_STEPS", 4)
    with make(qwen3, async_scheduling=True) as llm:
        expected = tokens(run(llm, ["one", "two"], greedy(9)))
        watching = Tracer(llm)
        assert tokens(run(llm, ["one", "two"], greedy(9))) == expected
        assert watching.closed and len(watching.frames) == 4
        run(llm, ["three"], greedy(2))
        assert not watching.closed and len(watching.frames) == 2
        assert watching.stream()["requests"][0][1] == 5
        llm.scheduler.check()


def test_a_full_recording_does_not_begin_anew_while_somebody_runs(qwen3, monkeypatch):
    """It would not know the blocks of those who run."""
    monkeypatch.setattr(recorder, "MAX_STEPS", 2)
    with make(qwen3) as llm:
        watching = Tracer(llm)
        llm.add_request("first", "one", greedy(9))
        for _ in range(4):
            llm.step()
        llm.add_request("second", "two", greedy(2))
        assert watching.closed and len(llm.scheduler.running) == 1
