"""The GPU's measurement where there is none: a dry run at toy sizes, and its arithmetic."""

import json

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401

pytest.importorskip("triton")

from benchmarks import gpu, gpu_report  # noqa: E402

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


def test_without_a_gpu_the_dry_run_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--part", "engine"])
    assert "torch sees no GPU: --dry-run" in capsys.readouterr().err
