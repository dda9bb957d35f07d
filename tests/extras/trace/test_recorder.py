"""The step trace against the scheduler and the block manager that it was recorded from.

The oracles are independent of the recorder: a ledger, which replays the frames with nothing but
lists, has to agree with the block manager's reference counts and cache entries after *every*
`schedule()`, and the unrolled rows have to be the `Step`s themselves. A `Witness` stands behind the
trace among the extras and compares while the engine runs.
"""

import json
import random
from itertools import pairwise

import pytest
from witness import Witness, read

from nanoserve_extras.engine_args import TraceOptions
from nanoserve_extras.trace import recorder
from nanoserve_extras.trace.recorder import Trace, chrome_trace, page
from nanoserve_extras.trace.trace import Arrival, Simulation

pytestmark = pytest.mark.floor
EVIL = '</script><img src=x onerror="document.title=1"><!--<script>&lt;\u2028\ud83d'


def tight(seed: int, tmp_path) -> Simulation:
    """Little memory and small steps, so that there are hits, chunks, evictions, preemptions."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice([1, 3, 4]), rng.randint(12, 40)
    half = num_blocks * block_size // 2
    arrivals = [Arrival(n := rng.randint(1, half), rng.randint(1, half), rng.randint(0, n),
                        i * rng.random() / 50) for i in range(14)]
    arrivals.sort(key=lambda arrival: arrival.seconds)
    simulation = Simulation(arrivals, rng.randint(4, 30), num_blocks, block_size,
                            rng.randint(1, 9))
    simulation.record(str(tmp_path / "run.json"))
    return simulation


@pytest.mark.parametrize("seed", range(8))
def test_any_simulated_run_can_be_replayed(tmp_path, seed):
    simulation = tight(seed, tmp_path)
    trace = simulation.extras[-1]
    witness = Witness(trace, simulation.scheduler)
    simulation.add(witness)
    simulation.finish()
    witness.compare_stream(trace.stream())


# ------------------------------------------------------------ the files


def simulate(tmp_path, arrivals, *options) -> Trace:
    simulation = Simulation(arrivals, *options)
    simulation.record(str(tmp_path / "run.html"))
    simulation.finish()
    return simulation.extras[-1]


def test_no_text_can_end_the_data(tmp_path):
    """What a request brings along is data: the page has as many tags with it as without it."""
    trace = simulate(tmp_path, [Arrival(3, 2)], 8, 8, 4, 4)
    harmless = page(trace.stream())
    trace.requests[0][0] = trace.requests[0][3] = trace.meta["title"] = EVIL
    evil = page(trace.stream())
    assert evil.count("<") == harmless.count("<") and evil.isascii() == harmless.isascii()
    trace.write()
    data = read(tmp_path / "run.html")
    assert data["requests"][0][3] == data["meta"]["title"] == EVIL


def test_the_chrome_trace_has_the_same_tokens(tmp_path):
    """Every token of every request is in one slice of its track, and slices don't overlap."""
    trace = simulate(tmp_path, [Arrival(10, 5, 8), Arrival(12, 5, 8), Arrival(14, 3)], 12, 9, 4, 4)
    stream = trace.stream()
    events = chrome_trace(stream)["traceEvents"]
    json.dumps(events)
    # By hand, from the table in the README: A computes 10 + 4, B hits 8 and computes 4 + 4, C
    # computes 14, is preempted, hits 12, recomputes 2 and computes 2 more (in two slices).
    tracks = {tid: [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (2, tid)]
              for tid in range(3)}
    assert [[(e["name"], e["args"]["tokens"]) for e in tracks[tid]] for tid in range(3)] == [
        [("prefill", 10), ("decode", 4)], [("prefill", 4), ("decode", 4)],
        [("prefill", 7), ("prefill", 7), ("recompute", 3), ("decode", 1)]]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["args"]["tokens"] for e in steps] == [10, 12, 9, 2, 2, 4, 1]
    for track in (*tracks.values(), steps):
        for one, following in pairwise(track):
            assert one["ts"] + one["dur"] <= following["ts"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["prefix hit", "preempted",
                                                             "prefix hit"]


def test_a_trace_that_is_full_says_so_and_the_engine_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_STEPS", 5)
    trace = simulate(tmp_path, [Arrival(3, 9), Arrival(4, 9)], 8, 20, 4, 4)
    assert len(trace.frames) == 5 and "only the first 5 steps" in trace.stream()["meta"]["note"]
    trace.write()
    assert len(read(tmp_path / "run.html")["frames"]) == 6


@pytest.mark.parametrize("fails", [False, True])
def test_writing_often_is_not_what_a_script_spends_its_time_on(tmp_path, monkeypatch, fails):
    """The file is written again only if that took less than 1/20 of the time since, also where it
    fails; `close` writes what is left. The clock is ours: writing takes 1 second."""
    now = [100.0]
    trace = simulate(tmp_path, [Arrival(3, 9)], 8, 20, 4, 4)
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])
    written = []
    monkeypatch.setattr(recorder, "page", lambda stream: written.append(now[0]) or now.__setitem__(
        0, now[0] + 1) or "")
    if fails:
        (tmp_path / "run.html").mkdir()  # in the way
    for _ in range(60):
        now[0] += 1
        trace.is_written = False  # there is news
        trace.write()
    assert written == [101.0, 122.0, 143.0]
    trace.is_written = False  # there is news
    trace.close()
    trace.close()
    assert len(written) == 4 + fails
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"], "no half a file"


@pytest.mark.parametrize("name", ["run.html", "run.json"])
def test_nobody_else_reads_a_trace_and_no_link_leads_it_elsewhere(tmp_path, name):
    """It begins with each prompt, and was readable by all."""
    trace = simulate(tmp_path, [Arrival(3, 9)], 8, 20, 4, 4)
    trace.path, others = tmp_path / name, tmp_path / "others"
    others.write_text("theirs")
    for planted in (name, f"{name}.part"):
        (tmp_path / planted).symlink_to(others)
    trace.write(always=True)
    assert others.read_text() == "theirs" and trace.is_written
    assert trace.path.stat().st_mode & 0o777 == 0o600 and not trace.path.is_symlink()


@pytest.mark.parametrize("path", ["run.txt", "run", "no/such/folder/run.html", ".html"])
def test_a_wrong_target_is_refused_at_once(path):
    with pytest.raises(ValueError, match="trace must be a file"):
        TraceOptions(trace=path)


def test_a_template_that_cannot_be_read_costs_no_output(tmp_path, monkeypatch):
    trace = simulate(tmp_path, [Arrival(3, 2)], 8, 20, 4, 4)
    monkeypatch.setattr(recorder, "TEMPLATE", tmp_path / "gone.html")
    trace.write()
    assert not list(tmp_path.iterdir())
