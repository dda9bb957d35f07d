"""docs/scheduling.md: its arrivals, as its commands print them, and what other rules would give."""

import re
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from nanoserve.block_manager import BlockManager
from nanoserve.tools.trace import Simulation, read_csv

pytestmark = pytest.mark.floor
ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- printed by: python (.*?) -->\n```\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("command, shown", SHOWN,
                         ids=["fcfs", "shortest", "priority", "static", "hot prefix"])
def test_the_arrivals_are_as_printed(command, shown):
    out = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True,
                         text=True, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    assert out.stdout == shown


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
            if self.num_blocks_for(num_tokens) > len(seq.block_table):
                found = [b for b in self.free_blocks if self.entry_of[b]]
                for block_id in sorted(found, key=lambda b: rule(b, self.entry_of[b].key)):
                    self.free_blocks.move_to_end(block_id)
            return allocate(self, seq, num_tokens)

        run = Simulation(read_csv(ROOT / "docs" / "hot-prefix.csv"), 512, 320, 16, 16, .02, 1e-4)
        run.scheduler.blocks.on_commit.append(lambda entry: born.update({entry.key: next(ticks)}))
        with monkeypatch.context() as patch:
            for name, how in (("share", counted), ("_dereference", timed),
                              ("allocate", sorted_first)):
                patch.setattr(BlockManager, name, how)
            uses.clear()
            run.finish()
        return re.search(r"prefix hits (\d+%)", run.summary())[1]

    assert f"prefix hits {hits_by(lambda block, key: freed[block])}" in SHOWN[4][1]
    said = [hits_by(rule) for rule in (
        lambda block, key: born[key], lambda block, key: -freed[block],
        lambda block, key: (uses[key], born[key]))]
    assert "oldest first {} hits, newest first {}, least often used {}.".format(*said) in PAGE
