"""docs/benchmarks.md and README's table: every figure is of a measurement that is kept."""

import json
import re

from pages import between, read

from benchmarks import host, tables

PAGE = read("docs/benchmarks.md")
DATA = json.loads(tables.DATA.read_text()) if tables.DATA.exists() else {}


def test_the_tables_are_what_was_measured():
    """No figure in them is typed by hand."""
    assert between(PAGE, tables.BEGIN, tables.END) == tables.render(DATA)


def test_readmes_table_is_of_the_newest_comparison():
    shown = between(read("README.md"), tables.BEGIN, tables.END)
    assert shown == tables.headlines(DATA)
    assert len([line for line in shown.splitlines() if line.startswith("|")]) <= 8


def test_the_bookkeeping_table_has_the_cases_that_the_command_measures():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \|(?: [\d.,]+ \|){4}$", PAGE, re.M)
    assert [tuple(int(n.replace(",", "")) for n in row) for row in rows] == host.CASES
