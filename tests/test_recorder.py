"""The step trace against the scheduler and the block manager that it was recorded from.

The oracles are independent of the recorder: a ledger, which replays the frames with nothing but
lists, has to agree with the block manager's reference counts and cache entries after *every*
`schedule()`, and the unrolled rows have to be the `Step`s themselves. A `Witness` stands behind the
trace among the observers and compares while the engine runs.
"""

import json
import random
import subprocess
import sys

import pytest

from nanoserve import LLM, EngineConfig, SamplingParams
from nanoserve.tools import recorder
from nanoserve.tools.recorder import Trace, chrome_trace, page, rows
from nanoserve.tools.trace import Arrival, Simulation

EVIL = '</script><img src=x onerror="document.title=1"><!--<script>&lt;\u2028\ud83d'


class Ledger:
    """Frames -> who holds which block, and what can be found; with lists alone."""

    def __init__(self, num_blocks: int):
        self.tables: dict[int, list[int]] = {}
        self.findable: set[int] = set()
        self.num_blocks = num_blocks

    def read(self, frame: dict) -> None:
        gives = frame.get("g", [])
        for request, count in zip(gives[::2], gives[1::2]):
            table = self.tables[request]
            assert table and count <= len(table), "gives back what it does not have"
            self.tables[request] = [] if count < 0 else table[count:]
        for request, *blocks in frame.get("b", []):
            self.tables.setdefault(request, []).extend(blocks)
        assert not self.findable & set(frame.get("k", []))
        assert self.findable >= set(frame.get("e", []))
        self.findable |= set(frame.get("k", []))
        self.findable -= set(frame.get("e", []))

    def ref_counts(self) -> list[int]:
        held = [block for table in self.tables.values() for block in table]
        return [held.count(block) for block in range(self.num_blocks)]


class Witness:
    """Stands behind a trace: compares memory after each `schedule()`, and remembers the steps."""

    def __init__(self, trace: Trace, scheduler):
        self.trace, self.blocks = trace, scheduler.blocks
        self.ledger = Ledger(scheduler.blocks.num_blocks)
        self.num_read = 0
        self.steps: list[dict[str, tuple[int, int, bool]]] = []
        self.preempted, self.admitted, self.ends = [], [], []

    def added(self, *args) -> None:
        pass

    def scheduled(self, step) -> None:
        if len(self.trace.frames) == self.num_read:
            assert not step.num_new_tokens and not step.preempted
            return
        [frame] = self.trace.frames[self.num_read:]
        self.num_read += 1
        self.ledger.read(frame)
        self.compare()
        self.steps.append({seq.name: (start, n, seq in step.sampling) for (seq, n), start in zip(
            step.num_new_tokens.items(), step.starts, strict=True)})
        self.preempted.append([seq.name for seq in step.preempted])
        self.admitted.append({seq.name: start for seq, (start, _, _) in zip(
            step.num_new_tokens, self.steps[-1].values()) if seq in step.admitted and start})

    def compare(self) -> None:
        assert self.ledger.ref_counts() == self.blocks.ref_counts
        assert self.ledger.findable == {
            entry.block_id for entry in self.blocks.entry_of if entry is not None}

    def updated(self, *args) -> None:
        pass

    def ended(self, sequences) -> None:
        self.ends += [(seq.name, seq.finish_reason, len(seq.output_token_ids))
                      for seq in sequences if seq.name not in {end[0] for end in self.ends}]

    def compare_stream(self, stream: dict) -> None:
        """The whole stream, when all is over."""
        *frames, tail = stream["frames"]
        assert len(frames) == self.num_read == len(self.steps) > 0 and tail["i"] == -1
        self.ledger.read(tail)
        self.compare()
        names = [request[0] for request in stream["requests"]]
        for frame, found, expected in zip(frames, rows(frames), self.steps, strict=True):
            assert {names[request]: (start, n, samples)
                    for request, start, n, samples in found} == expected
            assert len(found) == len(expected)
        assert [[names[r] for r in frame.get("p", [])] for frame in frames] == self.preempted
        assert [{names[r]: n for r, n in zip(f.get("h", [])[::2], f.get("h", [])[1::2])}
                for f in frames] == self.admitted
        ends = [value for frame in stream["frames"] for value in frame.get("f", [])]
        assert [(names[r], *rest) for r, *rest in zip(ends[::3], ends[1::3], ends[2::3])
                ] == self.ends
        assert sorted(r for frame in stream["frames"] for r in frame.get("q", [])) == list(
            range(len(names)))
        times = [frame["t"] for frame in stream["frames"]]
        assert times == sorted(times)


def watch(llm: LLM) -> Witness:
    witness = Witness(llm.trace, llm.scheduler)
    llm.observers.append(witness)
    return witness


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


@pytest.mark.parametrize("seed", range(12))
def test_any_simulated_run_can_be_replayed(tmp_path, seed):
    simulation = tight(seed, tmp_path)
    trace = simulation.observers[-1]
    witness = Witness(trace, simulation.scheduler)
    simulation.observers.append(witness)
    simulation.finish()
    witness.compare_stream(trace.stream())


def test_the_runs_above_reach_what_they_are_meant_to_reach(tmp_path):
    """Every kind of event does occur in them, or the test would be blind."""
    kinds: set[str] = set()
    for seed in range(12):
        simulation = tight(seed, tmp_path)
        simulation.finish()
        kinds.update(*simulation.observers[-1].frames)
    assert kinds >= set("qfhpxcgbke")


PARAMS = dict(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("name, options", [
    ("qwen3", {}), ("qwen3", dict(async_scheduling=True)),
    ("qwen3", dict(async_scheduling=True, num_gpu_blocks_override=16, max_model_len=64)),
    ("qwen3", dict(num_gpu_blocks_override=16, max_model_len=64, max_num_batched_tokens=9)),
    ("qwen3", dict(enable_prefix_caching=False)), ("mistral", {}),
    ("mistral", dict(async_scheduling=True, max_num_batched_tokens=11))], ids=str)
def test_a_real_run_can_be_replayed(checkpoints, tmp_path, name, options):
    """Overlap, preemption, sliding windows (blocks given back from the front), n samples, stop
    tokens in the middle of a step in flight, and an abort: the ledger agrees at every step, the
    text is the same as without a trace, and the file is written when `generate` ends."""
    rng = random.Random(3)
    common = rng.choices(range(256), k=9)
    prompts = [common * (i % 2) + rng.choices(range(256), k=rng.randint(1, 20)) for i in range(7)]
    options = dict(block_size=4, num_gpu_blocks_override=60) | options

    def params(stop):
        return [SamplingParams(**PARAMS, stop_token_ids=stop if i % 3 == 0 else None)
                for i in range(7)] + [SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)]

    prompts.append(prompts[0])
    with LLM(checkpoints[name], **options) as llm:
        first = llm.generate(prompts[0], SamplingParams(**PARAMS), use_tqdm=False)[0]
        stop = first.outputs[0].token_ids[6:7]
        llm.reset_prefix_cache()
        plain = llm.generate(prompts, params(stop), use_tqdm=False)
    path = tmp_path / "run.html"
    with LLM(checkpoints[name], **options, trace=str(path)) as llm:
        witness = watch(llm)
        llm.add_request("aborted", prompts[3], SamplingParams(**PARAMS))
        for _ in range(4):
            llm.step()
        llm.abort_request("aborted")
        traced = llm.generate(prompts, params(stop), use_tqdm=False)
        assert path.exists()
        assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
        witness.compare_stream(llm.trace.stream())
    assert ("aborted", "abort") in {end[:2] for end in witness.ends}
    assert [[s.token_ids for s in out.outputs] for out in traced] == [
        [s.token_ids for s in out.outputs] for out in plain]


def test_a_run_that_fails_leaves_a_trace(checkpoints, tmp_path, capsys):
    """A step that breaks in the middle is a frame that never ended; its request ends as an abort,
    and the same engine goes on recording."""
    path = tmp_path / "run.html"
    with LLM(checkpoints["qwen3"], block_size=4, trace=str(path)) as llm:
        witness = watch(llm)
        launch, calls = llm.runner.launch, []

        def breaks(step):
            calls.append(step)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return launch(step)

        llm.runner.launch = breaks
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(**PARAMS), use_tqdm=False)
        frames = read(path)["frames"]
        assert [frame["d"] >= 0 for frame in frames] == [True, True, True, False, True]
        assert frames[-1]["f"] == [0, "abort", 3, 1, "abort", 3]
        llm.generate([7, 8, 9], SamplingParams(**PARAMS), use_tqdm=False)
        witness.compare_stream(llm.trace.stream())
    assert len(read(path)["frames"]) == 4 + 20 + 1
    assert f"24 steps of 3 requests in {path}" in capsys.readouterr().err


def read(path) -> dict:
    """The data of a page, as a browser finds it."""
    text = path.read_text(encoding="utf-8")
    marker = '<script id="data" type="application/json">'
    start = text.index(marker) + len(marker)
    return json.loads(text[start:text.index("</script>", start)])


@pytest.mark.parametrize("ending", ["raise RuntimeError", "import os; os.kill(os.getpid(), 2)"],
                         ids=["error", "ctrl-c"])
def test_a_script_that_just_ends_leaves_a_trace(checkpoints, tmp_path, ending):
    """Without shutdown(), by an error or by Ctrl-C: what was stepped by hand is written."""
    path = tmp_path / "run.html"
    code = (f"from nanoserve import LLM, SamplingParams\n"
            f"llm = LLM({str(checkpoints['qwen3'])!r}, trace={str(path)!r})\n"
            f"llm.add_request('x', [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))\n"
            f"for _ in range(5): llm.step()\n{ending}\n")
    subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert len(read(path)["frames"]) == 6


# ------------------------------------------------------------ the files


def simulate(tmp_path, arrivals, *options) -> Trace:
    simulation = Simulation(arrivals, *options)
    simulation.record(str(tmp_path / "run.html"))
    simulation.finish()
    return simulation.observers[-1]


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


def test_two_thousand_steps_of_256_requests_are_a_small_file(tmp_path):
    """A crowd that is preempted and chunked all along, not one that cruises: below 10 MB."""
    rng = random.Random(0)
    arrivals = [Arrival(rng.randint(100, 900), rng.randint(100, 900), 64, i / 100)
                for i in range(256)]
    trace = simulate(tmp_path, arrivals, 512, 4096, 16, 256)
    assert len(trace.frames) > 1500 and any("p" in frame for frame in trace.frames)
    trace.write()
    assert (tmp_path / "run.html").stat().st_size < 10e6 / 4


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
        for one, following in zip(track, track[1:]):
            assert one["ts"] + one["dur"] <= following["ts"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["prefix hit", "preempted",
                                                             "prefix hit"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_json_target_writes_a_chrome_trace(checkpoints, tmp_path, overlap):
    """With overlap a step is scheduled before the last one has ended; slices still lie in line."""
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.json"),
             async_scheduling=overlap) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [e["args"]["tokens"] for e in events if e["ph"] == "X" and e["pid"] == 2] == [3, 3]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(steps) == 4 and all(e["dur"] > 0 for e in steps)
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in zip(steps, steps[1:]))


def test_whoever_else_listens_for_evictions_still_hears_them(tmp_path):
    simulation = Simulation([Arrival(8, 2), Arrival(8, 2)], 8, 3, 4, 1)
    heard: list[bytes] = []
    simulation.scheduler.blocks.on_evict = heard.append
    simulation.record(str(tmp_path / "run.html"))
    simulation.finish()
    assert heard
    simulation.close()
    assert simulation.scheduler.blocks.on_evict == heard.append


def test_a_trace_that_is_full_says_so_and_the_engine_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_STEPS", 5)
    trace = simulate(tmp_path, [Arrival(3, 9), Arrival(4, 9)], 8, 20, 4, 4)
    assert len(trace.frames) == 5 and "only the first 5 steps" in trace.stream()["meta"]["note"]
    trace.write()
    assert len(read(tmp_path / "run.html")["frames"]) == 6


def test_writing_often_is_not_what_a_script_spends_its_time_on(tmp_path, monkeypatch):
    """The file is written again only if that took less than 1/20 of the time since; `close`
    writes what is left. The clock is ours: writing takes 1 second."""
    now = [100.0]
    trace = simulate(tmp_path, [Arrival(3, 9)], 8, 20, 4, 4)
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])
    written = []
    monkeypatch.setattr(recorder, "page", lambda stream: written.append(now[0]) or now.__setitem__(
        0, now[0] + 1) or "")
    for _ in range(60):
        now[0] += 1
        trace.frames.append(trace.frames[-1])
        trace.write()
    assert written == [101.0, 122.0, 143.0]
    trace.frames.append(trace.frames[-1])
    trace.close()
    trace.close()
    assert len(written) == 4


def test_a_file_that_cannot_be_written_costs_no_output(checkpoints, tmp_path, capsys):
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html")) as llm:
        (tmp_path / "run.html.part").mkdir()
        [out] = llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 3
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["run.txt", "run", "no/such/folder/run.html", ".html"])
def test_a_wrong_target_is_refused_at_once(path):
    with pytest.raises(ValueError, match="trace="):
        EngineConfig(model="x", trace=path)


def test_writing_that_failed_is_not_tried_at_every_turn(tmp_path, monkeypatch):
    """It takes its time as well; it leaves no half a file; and `close` tries once more."""
    now, said = [100.0], []
    trace = simulate(tmp_path, [Arrival(3, 9)], 8, 20, 4, 4)
    trace.say = said.append
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(recorder, "page", lambda stream: now.__setitem__(0, now[0] + 1) or "")
    (tmp_path / "run.html").mkdir()  # in the way
    for _ in range(30):
        trace.write()
        now[0] += 1
    assert len(said) == 2 and all("can't be written" in line for line in said)
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    (tmp_path / "run.html").rmdir()
    trace.close()
    assert (tmp_path / "run.html").is_file()


def test_a_template_that_cannot_be_read_costs_no_output(tmp_path, monkeypatch):
    trace = simulate(tmp_path, [Arrival(3, 2)], 8, 20, 4, 4)
    monkeypatch.setattr(recorder, "TEMPLATE", tmp_path / "gone.html")
    trace.write()
    assert not list(tmp_path.iterdir())


def test_an_abort_after_the_last_step_is_written(checkpoints, tmp_path):
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html"),
             async_scheduling=False) as llm:
        llm.add_request("x", [1, 2, 3], SamplingParams(**PARAMS))
        llm.step()
        llm.trace.write(always=True)
        llm.abort_request("x")
    assert [frame.get("f") for frame in read(tmp_path / "run.html")["frames"]] == [
        None, [0, "abort", 1]]


def test_a_step_in_flight_when_the_trace_fills_up_has_its_time(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_STEPS", 5)
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html"),
             async_scheduling=True) as llm:
        llm.generate([1, 2, 3], SamplingParams(**PARAMS), use_tqdm=False)
    *frames, _ = read(tmp_path / "run.html")["frames"]
    assert len(frames) == 5 and all(frame["d"] >= 0 for frame in frames)


@pytest.mark.parametrize("text", [5, b"bytes"])
def test_a_prompts_text_that_is_no_text_is_shown_as_it_is(checkpoints, tmp_path, text):
    """With token ids beside it the engine passes it through and never looks at it."""
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html")) as llm:
        llm.generate({"prompt": text, "prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2),
                     use_tqdm=False)
    assert read(tmp_path / "run.html")["requests"][0][3] == str(text)


def test_ctrl_c_while_the_last_trace_is_written_still_shuts_down(checkpoints, tmp_path):
    llm = LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html"))

    def interrupted():
        raise KeyboardInterrupt

    llm.trace.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.shutdown()
    assert llm.runner is None and llm.scheduler is None
