"""docs/block-store.md tells the truth: its example prints what is shown, and its table's numbers
are of the kind that the command prints."""

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


def test_the_bench_fills_its_tables(capsys, monkeypatch):
    """With a tiny model: what it found is exact, what it timed is not looked at."""
    tiny = bench_block_store.roofline.MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32)
    monkeypatch.setitem(bench_block_store.roofline.MODELS, "tiny", tiny)
    bench_block_store.main(["--model", "tiny", "--prompt-tokens", "100", "--rounds", "1",
                            "--conversations", "4", "--turns", "3", "--rows", "2"])
    out = capsys.readouterr().out
    found = dict(re.findall(r"^\| (cold|warm|after a restart).*?\| .*? \| (\d+) \|", out, re.M))
    assert found == {"cold": "0", "warm": "96", "after a restart": "96"}
    without, pooled = re.findall(r"pool.*?\| (\d+)% \|", out)
    assert int(without) < int(pooled) == 48, "(0 + 96 + 192) of 600"
    assert re.search(r"\| bfloat16 \| [\d.]+ \| [+-]", out)


def test_the_table_is_there():
    table = PAGE.partition("bench_block_store -->")[2]
    assert "after a restart" in table and "a pool of" in table and "rows decode" in table
