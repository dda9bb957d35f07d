"""What the tests of the pages share: a page's text, what stands in it, and how its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}"
                                                 for path in (ROOT / "docs").glob("*.md"))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def block_after(text: str, marker: str, start: int = 0) -> str:
    """The content of the first fenced block behind `marker`."""
    at = text.index(marker, start)
    return re.search(r"^```\w*\n(.*?)^```", text[at:], re.S | re.M)[1]


def between(text: str, start: str, end: str) -> str:
    """What stands between two markers, each of which is there once."""
    [_, rest] = text.split(start)
    return rest.split(end)[0]


def rows_of(text: str) -> list[list[str]]:
    """The cells of every line of every table, heads and all; a cell may hold an escaped bar."""
    lines = re.findall(r"^\| (.*) \|$", text, re.M)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def run(*command: str) -> str:
    # On the CPU, as in the pages: a GPU may round an example's text into another one. As a user
    # runs it, without an audit after every step.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NANOSERVE_CHECK": ""}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                            encoding="utf-8", env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout
