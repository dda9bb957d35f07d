"""README tells the truth: its commands, its example, its pictures and its map are checked here.

The benchmark's table is checked in tests/docs/test_benchmarks_page.py, its links and those of all
other pages in tests/docs/test_pages.py.
"""

import re

import pytest
from pages import ROOT, between, block_after, read, run

from nanoserve.tools import house

README = read("README.md")


def test_it_is_short():
    assert len(README.encode()) <= 12_000, "a page of docs/ is the place for more"


def test_the_two_commands_are_those_that_ci_runs():
    script = (ROOT / ".ci" / "run").read_text()
    names = re.search(r"for name in (.*); do", script)[1].split()
    assert [block_after(README, f"<!-- ci: {name} -->").strip() for name in names] == [
        "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && python example.py",
        'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[test]" && '
        "python -m pytest",
    ]


def test_the_example_prints_what_is_shown():
    code = block_after(README, "\n```python")
    assert len(code.strip().splitlines()) == 5
    shown = block_after(README, "<!-- printed by the example above -->")
    assert run("-c", code).strip() == shown.strip()


def test_the_step_trace_is_real():
    shown = block_after(README, "<!-- printed by: python -m nanoserve.tools.trace -->")
    assert run("-m", "nanoserve.tools.trace") == shown


def test_the_pictures_are_there_and_small():
    for name in re.findall(r'(?:src|srcset)="(.*?)"', README):
        assert (ROOT / name).read_bytes()[:4] == b"\x89PNG"
        assert (ROOT / name).stat().st_size < 200_000


def test_the_map_lists_the_spine_and_what_each_file_teaches():
    """All but the numbers of lines, which a command writes and which may be those of last week."""
    shown = between(README, "<!-- printed by: python -m nanoserve.tools.house --map -->",
                    "<!-- end")
    number = re.compile(r"\| \d+ \|")
    printed = house.readme_map(house.read_house())
    assert number.sub("", shown.strip()) == number.sub("", printed)
    assert tuple(re.findall(r"\[`(\w+)`\]", shown)) == house.READING_ORDER


@pytest.mark.parametrize("term, meaning", [
    ("prefill", "computing a prompt"), ("KV", "keys and values"), ("TTFT", "time to the first"),
    ("ogits", "scores for every token"), ("RoPE", "rotary")])
def test_a_term_is_spelt_out_where_it_first_appears(term, meaning):
    """Within the lines around it; a drawing, a table or a command may use it a little before."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^<.*?$", "", README, flags=re.S | re.M)
    at = text.index(term)
    assert meaning in re.sub(r"\s+", " ", text[at - 30:at + 150]), text[at - 30:at + 150]
