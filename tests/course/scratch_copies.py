"""How the tests of the course run its checks: in one copy of the project, which is changed and put
right again."""

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from course.scratch import ROOT, Task

# Each takes some seconds. In CI a few stand for all; all are run with the extra 'test-full'.
needs_time = pytest.mark.skipif(importlib.util.find_spec("peft") is None or "CI" in os.environ,
                                reason="long: it is run with the extra 'test-full', outside CI")


def before_and_after(task: Task, folder: Path) -> tuple[str, str]:
    """The task's file as it is, and as the task leaves it in `folder`."""
    place = folder / task.file
    place.parent.mkdir(parents=True)
    before = (ROOT / task.file).read_text(encoding="utf-8")
    place.write_text(before, encoding="utf-8")
    task.apply(folder)
    return before, place.read_text(encoding="utf-8")


@contextmanager
def applied(task: Task, copy: Path, solved: bool = False):
    """As a learner gets it: what others ask for is sealed. solved: its own bodies are there."""
    try:
        if task.kind == "exercise":
            task.seal(copy)
        if not solved:
            task.apply(copy)
        yield
    finally:
        shutil.copy(ROOT / task.file, copy / task.file)


def check(task: Task, copy: Path) -> tuple[int, str]:
    """The status and the words of the check."""
    done = subprocess.run([sys.executable, "-m", "course.check", *task.checks], cwd=copy, text=True,
                          capture_output=True, encoding="utf-8",
                          env=os.environ | {"PYTHONPATH": str(copy), "PYTHONUTF8": "1"})
    return done.returncode, done.stdout + done.stderr
