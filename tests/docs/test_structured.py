"""docs/structured.md tells the truth: its example, and its table of steps."""

import re

from pages import block_after, read, run

from benchmarks import structured
from nanoserve.llm import BUNDLED_MODEL

PAGE = read("docs/structured.md")


def test_the_example_prints_what_is_shown():
    printed = run("-c", block_after(PAGE, "\n```python"))
    assert printed == block_after(PAGE, "<!-- printed by the example above -->")
    assert printed == block_after(
        read("README.md"), "<!-- printed by the example of docs/structured.md -->")


def test_the_table_of_steps_is_real():
    """Its last column is time, which a page doesn't show and a test doesn't measure."""
    table = structured.steps_table(str(BUNDLED_MODEL), rounds=0)
    assert "near-tie" not in table
    shown = block_after(PAGE, "<!-- printed by: python -m benchmarks.structured")
    assert [line[:-7].rstrip() for line in table.splitlines()] == shown.splitlines()


def test_masks_of_a_made_up_vocabulary_are_measured():
    table = structured.mask_table(num_rows=3, vocab_size=1000, rounds=1).splitlines()
    assert len(table) == 4 and table[0].startswith("3 rows, 1,000 tokens")
    assert all(re.search(r" +[\d,]+ +[\d,]+$", line) for line in table[1:])
