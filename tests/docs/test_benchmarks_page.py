"""docs/benchmarks.md and README's table: every figure is of a measurement that is kept."""

import json
import re

import benchmark
from pages import between, read

from nanoserve.tools import bookkeeping

PAGE = read("docs/benchmarks.md")
DATA = json.loads(benchmark.DATA.read_text()) if benchmark.DATA.exists() else {}


def test_the_tables_are_what_was_measured():
    """No figure in them is typed by hand."""
    assert between(PAGE, benchmark.BEGIN, benchmark.END) == benchmark.render(DATA)


def test_readmes_table_is_of_the_newest_comparison():
    shown = between(read("README.md"), benchmark.BEGIN, benchmark.END)
    assert shown == benchmark.headlines(DATA)
    assert len([line for line in shown.splitlines() if line.startswith("|")]) <= 8


def test_the_bookkeeping_table_has_the_cases_that_the_command_measures():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \|(?: [\d.,]+ \|){4}$", PAGE, re.M)
    assert [tuple(int(n.replace(",", "")) for n in row) for row in rows] == bookkeeping.CASES


def test_bookkeeping_can_be_measured():
    """The command's own function runs; what it says about time is not judged here."""
    assert len(bookkeeping.time_bookkeeping(4, 10)) == 3
