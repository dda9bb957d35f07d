"""Runs some of the project's tests, and shows one failure: `python -m course.check TESTS`.

A failure is what a learner reads next, so there is one, and all that is known about it: the test's
name and docstring, the assertion's or the audit's sentence, where it happened, and the last steps.
"""

import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from textwrap import dedent, indent

import pytest

SECONDS = 15  # a test may take so many of the CPU: more is a loop without an end


class OneFailure:
    """A plugin of pytest, in place of its own terminal."""

    def __init__(self):
        self.num_passed, self.failed, self.steps, self.scheduler = 0, False, [], None
        self.out = open(os.dup(1), "w", encoding="utf-8")  # pytest takes what tests print

    def pytest_collection_finish(self, session):
        """Keep the newest scheduler's steps, and who ended. By now the tests have imported it."""
        if (module := sys.modules.get("nanoserve.scheduler")) is None:
            return
        schedule, finish = module.Scheduler.schedule, module.Scheduler.finish

        def watched(scheduler):
            if scheduler is not self.scheduler:
                self.scheduler, self.steps = scheduler, []
            step = schedule(scheduler)
            if self.steps and not step.num_new_tokens and self.steps[-1].endswith(": 0 tokens"):
                self.steps.pop()  # the newest of many empty steps says all
            self.steps.append(str(step))
            return step

        def ended(scheduler, seq, reason, *others, **named):
            if self.steps:  # in one line behind the newest step
                more = ", " if "\n" in self.steps[-1] else "\n        ended: "
                self.steps[-1] += f"{more}{seq.name} ({reason})"
            return finish(scheduler, seq, reason, *others, **named)
        module.Scheduler.schedule, module.Scheduler.finish = watched, ended

    def pytest_collectreport(self, report):
        if report.failed and not self.failed:
            self.failed = True
            print(f"A file can't be read:\n\n{report.longrepr}", file=self.out, flush=True)

    def pytest_runtest_setup(self, item):
        self.item, self.steps = item, []
        self.began = time.thread_time()
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.signal(signal.SIGPROF, self.does_not_end)
            signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS / 10)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        self.num_passed += report.passed and call.when == "call"
        if report.failed and not self.failed:
            self.failed, error = True, call.excinfo.value
            said = f"{type(error).__name__}: {error}".replace("Use -v to get more diff", "")
            lines = [one[:300] for one in said.splitlines()[:12]]  # a sequence's repr is longer
            self.show("\n".join(lines), traceback.extract_tb(call.excinfo.tb))
        return report

    def does_not_end(self, number, frame):
        """The timer counts the CPU time of all threads, torch's too; this one's decides. On a busy
        machine, where a test waits for its turn, neither goes on."""
        if time.thread_time() - self.began < SECONDS:
            return
        self.show(f"It did not end within {SECONDS} seconds of the CPU's time. Is there a loop "
                  "without an end?", traceback.extract_stack(frame))
        os._exit(1)  # a loop may catch what is raised

    def show(self, what: str, frames: traceback.StackSummary) -> None:
        name, doc = self.item.name, self.item.function.__doc__
        words = re.sub(r"^test_|\[.*", "", name).replace("_", " ")
        parts = {self.item.nodeid: f"{words}\n\n{dedent('    ' + doc.strip())}" if doc else words,
                 "What went wrong": what, "Where": ""}
        here = os.getcwd() + os.sep
        for folder in ("tests", "nanoserve"):  # in each the innermost line
            for frame in [one for one in frames if one.filename.startswith(here + folder)][-1:]:
                parts["Where"] += f"{frame.filename[len(here):]}:{frame.lineno}    {frame.line}\n"
        if self.steps:
            parts["The steps up to there"] = "\n".join(self.steps[-12:])
        for head, body in parts.items():
            print(f"{head}\n\n{indent(body.rstrip(), '    ')}\n", file=self.out, flush=True)


def main(arguments: list[str]) -> int:
    """pytest's status. One process, no terminal; hypothesis looks for no smaller example."""
    from hypothesis import Phase, settings

    settings.register_profile("course", phases=[Phase.explicit, Phase.generate], derandomize=True)
    settings.load_profile("course")
    plugin = OneFailure()
    options = "-o addopts= --import-mode=importlib -p no:terminal -p no:cacheprovider -x".split()
    files = [Path(one.partition("::")[0]) for one in arguments if ".py" in one]
    if all("pytestmark = pytest.mark.floor\n" in file.read_text("utf-8") for file in files):
        options += ["-m", "floor"]  # then no torch is imported
    status = pytest.main([*options, *arguments], plugins=[plugin])
    if status == 0:
        print(f"{plugin.num_passed} tests pass.", flush=True)
    return int(status)  # 1: a test failed; 4 or 5: there are no such tests


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # at a usual exit other libraries print, too: nanobind lists leaks of triton's
