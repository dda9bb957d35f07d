"""The GPU's measurement where there is none: a dry run at toy sizes, and its arithmetic."""

import json

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401

pytest.importorskip("triton")

from benchmarks import gpu, gpu_attention, gpu_report  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing can be run here"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]


@pytest.mark.full
def test_a_dry_run_measures_every_part(tmp_path, capsys):
    results = gpu.main(["--dry-run", "--out", str(tmp_path), "--workers", "0"])
    assert not gpu_report.troubles(results)
    assert json.loads((tmp_path / "all.json").read_text()) == results
    assert {"machine", "ceilings", "decode table", "prefill table", "decode splits",
            "decode sweep", "prefill sweep", "Qwen3-0.6B throughput", "Qwen3-0.6B one stream",
            "Qwen3-0.6B profile"} < set(results)
    for name in ("decode sweep", "prefill sweep"):  # once each launch of them was an error
        assert results[name]["complete"] and results[name]["best"][0]["time_of_ours"] > 0
    assert "=== summary" in capsys.readouterr().out


def test_a_dry_run_fails_where_a_line_of_a_table_does(tmp_path, monkeypatch):
    """The sweep's stand-in for `_tiles` took five arguments where it got six, and nobody saw it."""
    monkeypatch.setattr(gpu_attention.kernels, "_num_splits", lambda rows, heads: 1)
    with pytest.raises(SystemExit, match="(?s)decode table.*TypeError.*decode sweep"):
        gpu.main(["--dry-run", "--part", "attention", "--out", str(tmp_path)])


def test_models_without_room_are_left_out(monkeypatch, capsys):
    """8B in 16 bits is 16.4 GB, and 0.6B 1.2: sizes of Qwen3's published files."""
    for total, left in ((8, ["Qwen3-0.6B"]), (24, ["Qwen3-0.6B", "Qwen3-8B"])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda total=total: (0, total * 2 ** 30))
        assert list(gpu_report.that_fit(gpu_report.REAL).models) == left
    assert "Qwen3-8B is left out: 15.3 GB" in capsys.readouterr().out


def test_without_a_gpu_the_dry_run_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--part", "engine"])
    assert "torch sees no GPU: --dry-run" in capsys.readouterr().err
