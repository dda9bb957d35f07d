"""What the tests of the pages share: a page's text, what stands in it, and how its commands run."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", *sorted(
    f"{folder}/{path.name}" for folder in ("docs", "docs/log", "course")
    for path in (ROOT / folder).glob("*.md"))]


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
    """What `python` prints with these arguments, `-c` and a program or `-m` and a module. It runs
    here: a process of its own would import torch and transformers once more, for 2 s."""
    # On the CPU, as in the pages: a GPU may round an example's text into another one. As a user
    # runs it, without an audit after every step.
    torch = sys.modules.get("torch")  # some of the pages' tests need none
    with (contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(ROOT),
          mock.patch.dict(os.environ, {"NANOSERVE_CHECK": "", "CUDA_VISIBLE_DEVICES": ""}),
          mock.patch.object(torch.cuda, "is_available", lambda: False) if torch else (
              contextlib.nullcontext()),
          mock.patch.object(sys, "argv", list(command))):
        option, what, *arguments = command
        if option == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            sys.argv[:] = [what, *arguments]
            try:
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert not end.code, printed.getvalue()
    return printed.getvalue()
