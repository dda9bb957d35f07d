"""docs/gpu.md: its table is what was measured on a GPU, or says that it was not."""

import json

import pytest
from pages import read

PAGE = read("docs/gpu.md")


def test_the_table_is_not_measured_or_what_was_measured():
    """Every figure is of a committed gpu.json, which benchmarks/gpu.py wrote on a GPU."""
    pytest.importorskip("triton")
    from benchmarks.gpu import RESULTS, page_table

    results = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
        assert results["machine"]["device"] != "cpu", "a dry run is no measurement"
    shown = PAGE[PAGE.index("<!-- printed by: python -m benchmarks.gpu --table -->"):]
    assert shown.split("\n", 1)[1].startswith(page_table(results) + "\n")
    if not results:
        rows = [line.strip("| ").split(" | ") for line in shown.splitlines()[3:]
                if line.startswith("|")]
        assert all(row[2].strip() == row[4].strip() == "not measured" for row in rows[:15])
