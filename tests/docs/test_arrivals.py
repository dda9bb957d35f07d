"""docs/scheduling.md: its arrivals, as its commands print them, and what other rules would give."""

import re
import subprocess
import sys
from collections import Counter
from itertools import count

import pytest
from pages import ROOT, block_after, read, rows_of

from nanoserve.block_manager import BlockManager
from nanoserve_extras.trace.trace import Simulation, read_csv

pytestmark = pytest.mark.floor
PAGE = read("docs/scheduling.md")


def printed(*options: str, page: str = PAGE, marker: str = "<!-- command -->") -> str:
    """By the page's command, with these options more."""
    command = block_after(page, marker).replace("\\\n", "").split()
    out = subprocess.run([sys.executable, *command[1:], *options], cwd=ROOT, capture_output=True,
                         text=True, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "priority"])
def test_the_arrivals_under_each_policy(policy):
    everybody, *groups = printed("--policy", policy).splitlines()
    found = [policy, *re.search(r"TTFT mean (.*?), p99 (.*?) \|.* (\d+) preemption",
                                everybody).groups()]
    for line in groups:
        p99, p50, share = re.search(r", p99 (.*?) \|.*TTFT p50 (.*?), (.*?) within", line).groups()
        found += [p50, p99, share]
    assert len(groups) == 2 and found in rows_of(PAGE)


def test_what_max_wait_brings():
    page = read("docs/layers.md")
    rows = [row for row in rows_of(page[page.index("<!-- visits -->"):]) if len(row) == 4][1:]
    assert len(rows) == 4
    for wait, *shown in rows:
        said = printed("--max-wait", wait, page=page, marker="<!-- visits -->")
        found = re.search(r"^(\S+) steps.* TTFT mean (.*?), p99 (.*?) \|", said)
        assert list(found.groups()) == shown


def test_the_hot_prefix_tells_eviction_rules_apart(monkeypatch):
    """A rule is a sort key of the free blocks that can be found; the first is reused first. The
    block manager's own rule is the time at which a block was freed, and needs no sorting."""
    born, freed, uses, ticks = {}, {}, Counter(), count()
    share, allocate, free = BlockManager.share, BlockManager.allocate, BlockManager._dereference

    def counted(self, seq, hits):
        uses.update(entry.key for entry in hits)
        share(self, seq, hits)

    def timed(self, block_id):
        freed[block_id] = next(ticks)
        free(self, block_id)

    def hits_by(rule) -> str:
        def sorted_first(self, seq, num_tokens):
            if rule and self.num_blocks_for(num_tokens) > len(seq.block_table):
                found = [b for b in self.free_blocks if self.entry_of[b]]
                for block_id in sorted(found, key=lambda b: rule(b, self.entry_of[b].key)):
                    self.free_blocks.move_to_end(block_id)
            return allocate(self, seq, num_tokens)

        run = Simulation(read_csv(ROOT / "docs" / "hot-prefix.csv"), 512, 320, 16, 16, .02, 1e-4)
        run.scheduler.hooks.committed.append(
            lambda entry: born.update({entry.key: next(ticks)}))
        with monkeypatch.context() as patch:
            for name, how in (("share", counted), ("_dereference", timed),
                              ("allocate", sorted_first)):
                patch.setattr(BlockManager, name, how)
            uses.clear()
            run.finish()
        return re.search(r"prefix hits (\d+%)", run.summary())[1]

    own = hits_by(None)
    assert f"finds {own} of all prompt" in PAGE and own == hits_by(lambda block, key: freed[block])
    said = [hits_by(rule) for rule in (
        lambda block, key: born[key], lambda block, key: -freed[block],
        lambda block, key: (uses[key], born[key]))]
    assert "oldest first {}, newest first {}, least often used {}.".format(*said) in (
        PAGE.replace("\n", " "))
