"""The check of the course: it finds what is missing or wrong, shows one failure, and passes what is
right. Each check is a run of pytest in a copy of the project.
"""

import os
import re
import subprocess
import sys

import pytest
from pages import ROOT
from scratch_copies import applied, check, needs_time

from course.scratch import tasks

EXERCISES, BUGS = tasks("exercise"), tasks("bug")
BUGS_IN_CI = ["2", "12"]


@pytest.mark.parametrize("number", ["1", *(pytest.param(n, marks=needs_time)
                                           for n in list(EXERCISES)[1:])])
def test_a_check_fails_at_what_is_not_written_and_passes_with_what_is(number, copy):
    """Without the bodies it shows one failure, which names one of them; with the project's own
    bodies, which are the solution, all is green. What other exercises ask for is sealed."""
    task = EXERCISES[number]
    with applied(task, copy):
        status, said = check(task, copy)
    assert status == 1 and said.count("What went wrong") == 1
    assert any(f"exercise {number}: write {name}" in said for name in task.names)
    with applied(task, copy, solved=True):
        status, said = check(task, copy)
    assert status == 0, said
    assert re.fullmatch(r"\d+ tests pass\.", said.strip())


FORGETS = "            seq.num_inflight_tokens -= num_done\n"


def test_a_failure_tells_the_test_the_audit_and_the_steps(copy):
    """A body that is wrong: the sentence of the audit, and the steps up to there."""
    task = EXERCISES["5"]
    path = copy / task.file
    whole = path.read_text(encoding="utf-8")
    broken = whole.replace(FORGETS, "")
    assert broken != whole
    path.write_text(broken, encoding="utf-8")
    try:
        status, said = check(task, copy)
    finally:
        path.write_text(whole, encoding="utf-8")
    assert status == 1
    for words in ("tests/test_scheduler.py::", "nanoserve/block_manager.py:",
                  "sequence A has computed 10 tokens in blocks for 8",
                  "step 0: 8 tokens | A 0..5 ↦ | B 0..3"):
        assert words in said, said


def test_a_check_says_when_a_test_does_not_end(tmp_path):
    """One that only waits for its turn, as on a busy machine, is no loop."""
    (tmp_path / "test_loop.py").write_text(
        "import time\ndef test_a_wait():\n    time.sleep(1)\n"
        "def test_a_loop():\n    while True:\n        pass\n")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from course import check
check.SECONDS = 0.5
sys.exit(check.main(["test_loop.py"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 1 and "did not end within 0.5 seconds" in done.stdout, done.stderr
    assert "test_loop.py::test_a_loop" in done.stdout


def test_other_libraries_print_nothing_at_the_end(tmp_path):
    """nanobind listed forty lines of leaks behind "109 tests pass" where triton was imported."""
    (tmp_path / "test_end.py").write_text(
        "import atexit, os\ndef test_an_end():\n    atexit.register(os.write, 2, b'leaked')\n")
    done = subprocess.run([sys.executable, "-m", "course.check", "test_end.py"], cwd=tmp_path,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"1 tests pass.\n", b"")


@pytest.mark.parametrize("number", [*BUGS_IN_CI, *(pytest.param(n, marks=needs_time)
                                              for n in BUGS if n not in BUGS_IN_CI)])
def test_a_planted_bug_is_caught(number, copy):
    bug = BUGS[number]
    with applied(bug, copy):
        status, said = check(bug, copy)
    assert status == 1, f"a hole: {bug.checks} passes with bug {number}\n{said}"
    assert bug.checks[0] in said
