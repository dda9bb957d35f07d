"""README tells the truth: its commands and its example are run here, and the start page's trace.

Its list of files is checked in tests/test_architecture.py, the benchmark's table in
tests/docs/test_figures.py, its links and pictures in test_pages.py there.
"""

import re

from clean_process import needs_extras
from pages import ROOT, block_after, read, run

README = read("README.md")


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
    shown = block_after(README, "<!-- printed by the example above -->")
    assert run("-c", code).strip() == shown.strip()


@needs_extras
def test_the_step_trace_is_real():
    shown = block_after(read("docs/start.md"), "<!-- printed by: python -m nanoserve trace -->")
    assert run("-m", "nanoserve", "trace") == shown
