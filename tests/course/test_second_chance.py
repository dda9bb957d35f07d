"""Exercise 9: six lines bring the hits that its page promises, and the audit agrees with them.

Learners' copies leave this folder out.
"""

import re
import types

import pytest
from pages import ROOT, block_after, read

from course.scratch import tasks
from nanoserve import block_manager, scheduler
from nanoserve_extras.trace.trace import Simulation, read_csv

pytestmark = pytest.mark.floor
TASK = tasks("exercise")["9"]
SOLUTION = [  # the line before, and what is new
    ("        self.cached: dict[bytes, CacheEntry] = {}\n", "        self.was_hit = set()\n"),
    ("            self.ref_counts[entry.block_id] += 1\n",
     "            self.was_hit.add(entry.block_id)\n"),
    ("        for _ in range(num_missing):\n",
     "            while (first := next(iter(self.free_blocks))) in self.was_hit:\n"
     "                self.was_hit.discard(first)\n"
     "                self.free_blocks.move_to_end(first)\n"),
    ("            self.entry_of[block_id] = None\n",
     "            self.was_hit.discard(block_id)\n")]


def solved() -> types.ModuleType:
    """block_manager.py with the solution in it, beside the engine's own."""
    source = (ROOT / TASK.file).read_text(encoding="utf-8")
    for line, new in SOLUTION:
        assert source.count(line) == 1, line
        source = source.replace(line, line + new)
    module = types.ModuleType("solved")
    exec(compile(source, "solved", "exec"), vars(module))
    return module


@pytest.mark.parametrize("who, hits", [(block_manager, "22%"), (solved, "24%")],
                         ids=["the engine", "the solution"])
def test_the_score_is_the_one_that_the_page_promises(monkeypatch, who, hits):
    assert hits in TASK.text and sum(new.count("\n") for _, new in SOLUTION) == 6
    manager = (who() if who is solved else who).BlockManager
    monkeypatch.setattr(scheduler, "BlockManager", manager)
    command = block_after(read("course/exercises.md"), "24%:").split()
    options = dict(zip(command[4::2], command[5::2], strict=True))
    run = Simulation(read_csv(ROOT / options["--csv"]), int(options["--budget"]),
                     int(options["--blocks"]), int(options["--block-size"]), 4)
    for step in run.steps():
        if step.index % 100 == 0:
            run.scheduler.blocks.check([*run.scheduler.running, *run.scheduler.waiting])
    assert isinstance(run.scheduler.blocks, manager)
    assert re.search(r"prefix hits (\d+%)", run.summary())[1] == hits
