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


@contextmanager
def applied(task: Task, copy: Path):
    try:
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
