"""docs/structured.md tells the truth: its example, and its table of steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

from nanoserve.llm import BUNDLED_MODEL
from nanoserve.tools import bench_structured

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")


def block_after(marker: str, page: str = PAGE) -> str:
    return re.search(r"^```\w*\n(.*?)^```", page[page.index(marker):], re.S | re.M)[1]


def test_the_example_prints_what_is_shown():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NANOSERVE_CHECK": ""}
    result = subprocess.run([sys.executable, "-c", block_after("\n```python")], cwd=ROOT, env=env,
                            capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert result.stdout == block_after("<!-- printed by the example above -->")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert result.stdout == block_after(
        "<!-- printed by the example of docs/structured.md -->", readme)


def test_the_table_of_steps_is_real():
    """Its last column is time, which a page doesn't show and a test doesn't measure."""
    table = bench_structured.steps_table(str(BUNDLED_MODEL), rounds=0)
    assert "near-tie" not in table
    shown = block_after("<!-- printed by: python -m nanoserve.tools.bench_structured")
    assert [line[:-7].rstrip() for line in table.splitlines()] == shown.splitlines()


def test_masks_of_a_made_up_vocabulary_are_measured():
    table = bench_structured.mask_table(num_rows=3, vocab_size=1000, rounds=1).splitlines()
    assert len(table) == 4 and table[0].startswith("3 rows, 1,000 tokens")
    assert all(re.search(r" +[\d,]+ +[\d,]+$", line) for line in table[1:])
