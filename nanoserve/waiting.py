"""Who goes first: the queue of sequences that wait, and the one key by which everything is ordered.

    policy      the key
    fcfs        arrival                                     first come, first served
    priority    priority, arrival                           the lowest number first
    shortest    arrival_time + num_prompt_tokens / 1,000    a prompt of 1,000 tokens is as urgent as
                                                            one of 10 that came 0.99 seconds later

`shortest` is shortest job first with aging: a short prompt's first token comes sooner, on average,
if long ones wait for it, and a sequence that has waited long becomes urgent. All that wait grow
older at the same rate, so the difference between two keys never changes, and the key needs no
clock. A prompt of 3,000 tokens is never passed by one that comes 3 seconds later or more, so no
sequence starves.

Invariant: **a sequence's key never changes.** So the queue can be a heap, the running ones can be a
sorted list of the same order, and one that is preempted comes back to where it stood. (A key that
counts what is *left* to compute would need a new heap in every step.)

Not known here: blocks, budgets, steps. The order decides when a sequence is computed, never
which token comes out.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from nanoserve.sequence import Sequence

RATE = 1000  # with "shortest": so many prompt tokens weigh as much as a second of waiting

Key = tuple[float, int, int]


class WaitingQueue:
    """A heap, because preempted sequences come back into the middle of the order. One that has
    ended stays in it as a dead entry, until it surfaces or the dead are the majority.

    policy: `EngineConfig.scheduling_policy`.
    """

    def __init__(self, policy: str = "fcfs"):
        self.policy = policy
        self.heap: list[tuple[Key, Sequence]] = []
        self.num_dead = 0

    def order(self, seq: Sequence) -> Key:
        """Who goes first. Unique, so that a heap never compares two sequences."""
        urgency: float = 0
        if self.policy == "priority":
            urgency = seq.priority
        elif self.policy == "shortest":
            urgency = seq.arrival_time + seq.num_prompt_tokens / RATE
        return (urgency, seq.arrival, seq.index)

    def __len__(self) -> int:
        """How many wait."""
        return len(self.heap) - self.num_dead

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        return (seq for _, seq in self.heap if seq.finish_reason is None)

    def push(self, seq: Sequence) -> None:
        """O(log n)."""
        heappush(self.heap, (self.order(seq), seq))

    def first(self) -> Sequence | None:
        """The next one, which stays; None where no sequence waits."""
        while self.heap and self.heap[0][1].finish_reason is not None:
            heappop(self.heap)
            self.num_dead -= 1
        return self.heap[0][1] if self.heap else None

    def pop(self) -> Sequence:
        """Take out what `first` has just returned."""
        return heappop(self.heap)[1]

    def bury(self) -> None:
        """One that waits here has ended. The heap is rebuilt once most of it is dead: amortised, an
        abort costs O(1)."""
        self.num_dead += 1
        if self.num_dead > 64 and self.num_dead > len(self.heap) // 2:
            self.heap = [item for item in self.heap if item[1].finish_reason is None]
            heapify(self.heap)
            self.num_dead = 0

    def check(self) -> None:
        """Audit: for tests."""
        for key, seq in self.heap:
            assert key == self.order(seq), f"the key of sequence {seq.name} has changed"
            assert seq.row < 0 and not seq.block_table and not seq.num_inflight_tokens, (
                f"sequence {seq.name} waits, but holds a row, blocks or a step in flight")
        dead = sum(seq.finish_reason is not None for _, seq in self.heap)
        assert dead == self.num_dead, f"{dead} dead entries in the queue, counted {self.num_dead}"
