"""The GPU measurement, rehearsed where there is none: no wrong name waits for the day of the GPU.

Everything but CUDA's own events, graphs and profiler runs here at toy sizes; what it writes is read
back. The workload and the roofline are those that PERFORMANCE's figures were derived from.
"""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

pytest.importorskip("triton")

import gpu_attention
import gpu_engine
import gpu_report
import measure

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing can be run here")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_rehearsal_runs_and_its_tables_parse(tmp_path, capsys):
    results = measure.main(["--rehearse", "--out", str(tmp_path), "--workers", "0"])
    said = capsys.readouterr().out
    bad = {name: result for name, result in results.items() if gpu_report.failed(result)}
    assert not bad, bad
    assert json.loads((tmp_path / "all.json").read_text()) == results
    assert {"machine", "ceilings", "decode table", "prefill table", "decode splits",
            "decode sweep", "prefill sweep", "Qwen3-0.6B throughput", "Qwen3-0.6B one stream",
            "Qwen3-0.6B profile"} < set(results)
    for name in ("decode table", "prefill table", "decode splits"):
        assert results[name] and not any("error" in row for row in results[name])
    for table in tables_in((tmp_path / "all.md").read_text()):
        assert len({len(row) for row in table}) == 1, table
    assert "=== summary" in said and "of the committed launch's time" not in said
    gpu_attention.compile_share(gpu_report.TOY, 0, 5)


def tables_in(text: str) -> list[list[list[str]]]:
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line.strip("|").split("|"))
        elif rows:
            found.append(rows)
            rows = []
    assert len(found) > 8
    return found


def test_a_wrong_launch_is_a_line_and_a_failed_part_keeps_the_others(tmp_path):
    report = gpu_report.Report(tmp_path, "attention", 60)
    report.measure("broken", 0, lambda: 1 / 0)
    case = gpu_attention.Case(gpu_report.TOY, (2, 1, 16), 16, 2, 1, 30)
    run = case.run
    assert "error" not in gpu_attention.row_of(report, case)
    case.run = lambda batch: 1.1 * run(batch)
    assert "row 0 is wrong" in gpu_attention.row_of(report, case)["error"]
    report.measure("next", 0, lambda: dict(fine=1))
    results = json.loads((tmp_path / "attention.json").read_text())
    assert "ZeroDivisionError" in results["broken"]["error"] and results["next"] == dict(fine=1)
    assert measure.joined([results, dict(broken=dict(fine=2))])["broken"] == dict(fine=2)


def test_the_timing_of_a_gpu_through_a_stand_in(monkeypatch):
    """What only a GPU runs of it: a graph, events, the median of the replays."""
    log, clock = [], iter([0, 5, 10, 13, 20, 29])  # milliseconds: 5, 3 and 9

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, end):
            return end.at - self.at

    for name, stand_in in dict(
            Event=Event, synchronize=lambda: log.append("wait"), _sleep=lambda cycles: None,
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: log.append("replay")),
            graph=lambda graph: nullcontext()).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(gpu_report, "ON_GPU", True)
    size = SimpleNamespace(repeats=3)
    assert gpu_report.timed(lambda: log.append("call"), size) == pytest.approx(0.005)
    assert log == ["call", "wait", "call", *["replay"] * 4, "wait"]


def test_the_best_launch_is_the_one_that_takes_the_least_time():
    ours, other = gpu_attention.committed("decode"), dict(BLOCK_M=16)
    rows = [dict(block_size=16, launch=launch, heads="8B", shape=[n, 1, 9], microseconds=time)
            for launch, n, time in ((ours, 1, 10), (ours, 8, 20), (other, 1, 5), (other, 8, 20))]
    first, second = gpu_attention.best(rows, "decode")
    assert first == dict(block_size=16, launch=other, time_of_ours=round(math.sqrt(.5), 4),
                         ours=False)
    assert second["ours"] and second["time_of_ours"] == 1
    assert len(gpu_attention.best(rows[:3], "decode")) == 1  # not at every shape: out


def test_the_workload_and_its_roofline():
    """142,827 prompt tokens, 133,966 output tokens, 1,023 decode steps with 130 rows on average;
    3.75 s at 4.3 TB/s and 790 TFLOP/s for 0.6B, 10.74 s for 8B. The scheduler alone runs it."""
    prompts, lengths = gpu_engine.workload(gpu_report.REAL)
    assert sum(map(len, prompts)) == 142_827 and sum(lengths) == 133_966
    config = EngineConfig(model="none", max_model_len=4096, max_num_seqs=256,
                          max_num_batched_tokens=16384, enable_prefix_caching=False)
    scheduler, steps = Scheduler(config, num_blocks=40_000), []
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        scheduler.add(Sequence(str(i), prompt, SamplingParams(max_tokens=n), arrival=i,
                               max_num_tokens=len(prompt) + n))
    while scheduler.has_unfinished():
        steps.append(step := scheduler.schedule())
        scheduler.update(step, [7] * len(step.sampling))
    decodes = [step for step in steps if step.num_tokens == len(step.sampling)]
    assert len(steps) == 1032 and len(decodes) == 1023
    assert round(sum(step.num_tokens for step in decodes) / len(decodes)) == 130
    for name, seconds in (("Qwen3-0.6B", 3.75), ("Qwen3-8B", 10.74)):
        least = gpu_engine.roofline(gpu_report.MODELS[name], steps, 4.3e12, 790e12)
        assert least == pytest.approx(seconds, rel=0.01)


def test_no_gpu_is_said_and_results_can_be_joined(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--part", "engine"])
    assert "torch sees no GPU: --rehearse" in capsys.readouterr().err
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"Qwen3-8B one stream": dict(tok_per_s=123.4, of_roofline=.5),
                                "decode sweep": dict(best=[], rows=[1])}))
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results.json")
    measure.main(["--table", str(file)])
    table = capsys.readouterr().out
    assert "| 190 | 123 |" in table and table.count(gpu_report.NOT_MEASURED) > 20
    assert json.loads((tmp_path / "results.json").read_text())["decode sweep"] == dict(best=[])
