"""docs/block-store.md tells the truth: its example prints what is shown, and its tables are those
that the command prints, but for the times."""

import os
import re
import subprocess
import sys
from pathlib import Path

from nanoserve.tools import bench_block_store

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "block-store.md").read_text(encoding="utf-8")


def test_the_second_start_finds_what_the_first_one_computed():
    program = re.search(r"^```python\n(.*?)^```", PAGE, re.S | re.M)[1]
    shown = re.search(r"printed by the example above -->\n```\n(.*?)^```", PAGE, re.S | re.M)[1]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NANOSERVE_CHECK": ""}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env,
                            capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert result.stdout == shown
    assert int(re.search(r"second start: (\d+)", shown)[1]) > 200


def without_times(text: str) -> list[str]:
    """The lines of its tables; a time, and what follows from it, has a decimal point."""
    return [re.sub(r"[+-]?\d+\.\d+%?", "?", line) for line in text.splitlines() if line[:1] == "|"]


def test_the_bench_prints_the_pages_tables(capsys, monkeypatch):
    """With a tiny model, and as many tokens, conversations and rows as the page says: what is found
    doesn't depend on the model. By hand: 93 blocks of 16 are in 1,500 tokens; and of turns that ask
    for 100, 200, 300 and 400 tokens the last three find 96, 192 and 288, which is 58% of 1,000."""
    tiny = bench_block_store.roofline.MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32)
    monkeypatch.setitem(bench_block_store.roofline.MODELS, "tiny", tiny)
    bench_block_store.main(["--model", "tiny", "--rounds", "1"])
    table = PAGE.partition("bench_block_store -->")[2].partition("<!-- end")[0]
    lines = without_times(capsys.readouterr().out)
    assert lines == without_times(table)
    assert [line.split(" | ")[2] for line in lines[2:5]] == ["0", "1,488", "1,488"]
    assert "| a pool of 1 GiB | 58% | ? |" in lines
