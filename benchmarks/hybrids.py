"""Which snapshots of recurrent states to keep: hit rates of chats, counted without a network.

    python -m benchmarks.hybrids                       seconds; writes the table of docs/hybrids.md

Users chat with the scheduler alone. Each has ten turns: 40 new tokens, an answer of 56, and the
next turn begins with all of it. The hit rate is the share of those tokens of earlier turns that the
next one does not compute again. "every boundary" keeps a snapshot wherever one can be taken,
"prompts" at the last boundary of each prompt, and "ours" adds one that moves on with each sequence.
"""

import random
from pathlib import Path

from benchmarks.tables import table, write
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.extras.recurrent_snapshots import Snapshot, Snapshots
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CoreRequest, Sequence

PAGE = Path(__file__).parent.parent / "docs" / "hybrids.md"
BEGIN = "<!-- written by benchmarks/hybrids.py -->\n"
USERS, TURNS, NEW, ANSWER, POOLS = (1, 8), 10, 40, 56, (4, 16, 64)


class EveryBoundary(Snapshots):
    """All are alike: none moves on."""

    def take(self, seq: Sequence, end: int) -> Snapshot | None:
        snapshot = super().take(seq, end)
        if snapshot is not None:
            snapshot.owner = None
        return snapshot


class Prompts(Snapshots):
    def take(self, seq: Sequence, end: int) -> Snapshot | None:
        return super().take(seq, end) if end < len(seq.token_ids) else None


RULES = {"every boundary": EveryBoundary, "prompts": Prompts, "ours": Snapshots}


def hit_rate(rule: type[Snapshots], num_snapshots: int, num_users: int) -> float:
    """Users type at their own pace: each turn comes in a random order, two at a time."""
    rng, known, cached = random.Random(0), 0, 0
    config = EngineConfig(model="none", max_num_batched_tokens=2048, max_num_seqs=8)
    scheduler = Scheduler(config, num_blocks=2000)
    snapshots = rule(scheduler, config.max_num_seqs, num_snapshots)
    chats: list[list[int]] = [[] for _ in range(num_users)]
    for turn in range(TURNS):
        order = rng.sample(range(num_users), num_users)
        for i in range(0, num_users, 2):
            seqs = []
            for user in order[i:i + 2]:
                prompt = chats[user] + [rng.randrange(1000) for _ in range(NEW)]
                seqs.append(Sequence(CoreRequest(f"{turn}.{user}", SamplingParams(), user,
                                                 max_num_tokens=len(prompt) + ANSWER), prompt))
                scheduler.add(seqs[-1])
            run(scheduler, snapshots, rng)
            for user, seq in zip(order[i:i + 2], seqs, strict=True):
                known, cached = known + len(chats[user]), cached + seq.num_cached_tokens
                chats[user] = seq.token_ids
    snapshots.check()
    return cached / known


def run(scheduler: Scheduler, snapshots: Snapshots, rng: random.Random) -> None:
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        snapshots.plan(step)
        grown = scheduler.update(step, [rng.randrange(1000) for _ in step.sampling])
        snapshots.updated(step, grown)
        snapshots.ended([seq for seq in grown if seq.finish_reason])


def main() -> None:
    head = ["users", "rule", *(f"{size} snapshots" for size in POOLS)]
    rows = [[str(users), name, *(f"{hit_rate(rule, size, users):.0%}" for size in POOLS)]
            for users in USERS for name, rule in RULES.items()]
    print(table([head, *rows]))
    if PAGE.exists():
        write(PAGE, table([head, ["---"] * len(head), *rows]), BEGIN)


if __name__ == "__main__":
    main()
