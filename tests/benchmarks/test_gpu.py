"""The GPU's measurement where there is none: a dry run at toy sizes, and its arithmetic."""

import json
import math

import pytest
import torch
from helpers import sequence
from quick_interpreter import quick_interpreter  # noqa: F401

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.scheduler import Scheduler

pytest.importorskip("triton")

from benchmarks import gpu, gpu_attention, gpu_engine, gpu_report  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing can be run here")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_dry_run_measures_every_part_and_its_tables_are_complete(tmp_path, capsys):
    results = gpu.main(["--dry-run", "--out", str(tmp_path), "--workers", "0"])
    bad = {name: result for name, result in results.items() if gpu_report.failed(result)}
    assert not bad, bad
    assert json.loads((tmp_path / "all.json").read_text()) == results
    assert {"machine", "ceilings", "decode table", "prefill table", "decode splits",
            "decode sweep", "prefill sweep", "Qwen3-0.6B throughput", "Qwen3-0.6B one stream",
            "Qwen3-0.6B profile"} < set(results)
    for name in ("decode table", "prefill table", "decode splits"):
        assert results[name] and not any("error" in row for row in results[name])
    tables = tables_in((tmp_path / "all.md").read_text())
    assert len(tables) > 8
    for table in tables:
        assert len({len(row) for row in table}) == 1, table
    assert "=== summary" in capsys.readouterr().out


def tables_in(text: str) -> list[list[list[str]]]:
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line.strip("|").split("|"))
        elif rows:
            found.append(rows)
            rows = []
    return found


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
        scheduler.add(sequence(str(i), prompt, SamplingParams(max_tokens=n), arrival=i,
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


def test_without_a_gpu_the_dry_run_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--part", "engine"])
    assert "torch sees no GPU: --dry-run" in capsys.readouterr().err


def test_results_are_joined_into_the_pages_table(tmp_path, monkeypatch, capsys):
    """The first run that measured a part counts; of the sweeps only the best launches are kept."""
    files = [tmp_path / "attention.json", tmp_path / "engine.json"]
    files[0].write_text(json.dumps({"Qwen3-8B one stream": dict(error="out of memory")}))
    files[1].write_text(json.dumps({"Qwen3-8B one stream": dict(tok_per_s=123.4, of_roofline=.5),
                                    "decode sweep": dict(best=[], rows=[1])}))
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu.json")
    gpu.main(["--table", *map(str, files)])
    table = capsys.readouterr().out
    assert "| 190 | 123 |" in table and table.count(gpu_report.NOT_MEASURED) > 20
    assert json.loads((tmp_path / "gpu.json").read_text())["decode sweep"] == dict(best=[])
