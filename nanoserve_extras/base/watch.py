"""Heartbeats: a rank that is alive and does not answer is noticed, too.

The plain `Watch` sees that a process has ended. One that hangs or is stopped, whose machine has
lost power, or whose message was lost, has not. So each rank counts its heartbeats in the ranks'
shared store, and rank 0 takes a rank for dead when its count has not changed during 13 beats of
rank 0; no clock is compared.

    rank 0     beats, counts all others' beats ──► 13 missed: the rank is dead
    rank 1     beats                           ──► the store is silent: rank 0 is dead (torchrun)

Rank 0's beats are not counted, because its user's code may hold Python's lock for minutes. A child
waits as long as its parent lives. A rank that torchrun has started waits as long as the store
answers: the store's thread needs no lock. A heartbeat also tells how far its rank is: a message
that was sent may take 30 beats. Computing has no limit.

Invariants: when a rank dies, the others end within half a minute and name it. Between requests no
rank waits with a time-out.
"""

import subprocess
import threading

from nanoserve import parallel
from nanoserve.parallel import Watch

STEP = 2 ** 32  # a count of heartbeats is below it; above it stands how far the rank is
GAVE_UP = -2 ** 62  # a last heartbeat adds this: the count is below zero then


class Heartbeats(Watch):
    """The watch of a `WatchedRanks`. It has a connection to the store of its own, because calls on
    a shared one may block."""

    BEAT = 1.0
    MAX_MISSED = 13  # with the grace an error comes within 20 s
    MAX_LATE = 30  # beats between a message that was sent, and its receipt

    def __init__(self, ranks: parallel.Ranks, children: list[subprocess.Popen]):
        super().__init__(ranks, children)
        self.store = ranks.store.clone()
        self.counts = dict.fromkeys(range(ranks.size), 0)  # those in the store
        self.missed = dict(self.counts)  # beats of this rank since a count has changed
        self.lost: str | None = None
        self.all_are_there = False

    def begin(self) -> None:
        """All ranks are there. From here on their silence counts."""
        self.missed = dict.fromkeys(self.missed, 0)
        self.all_are_there = True

    def run(self) -> None:
        beats = threading.Thread(target=self._exchange, daemon=True)
        beats.start()
        super().run()
        beats.join(parallel.GRACE_SECONDS)  # Python's end aborts if a thread is in torch's store

    def _exchange(self) -> None:
        """In a thread of its own: if the store's machine loses power, these calls never return, and
        `run` must still notice that no heartbeat arrives."""
        told = 0
        try:
            while not self.stopped.wait(self.BEAT):
                done = self.ranks.done
                for rank in self.counts:
                    more = 1 + STEP * (done - told) if rank == self.ranks.rank else 0
                    count = self.store.add(f"heartbeat/{rank}", more)
                    if count != self.counts[rank]:
                        self.counts[rank], self.missed[rank] = count, 0
                told = done
            if self.ranks.broken is not None and self.ranks.parent is None:
                self.store.add(f"heartbeat/{self.ranks.rank}", GAVE_UP)
        except RuntimeError:  # the store is rank 0's, or torchrun's, which ends with its ranks
            self.lost = "rank 0 died, and its store with it"

    def look(self) -> str | None:
        """One beat."""
        for rank in self.counts:
            self.missed[rank] += 1
        return super().look() or self._silent() or self._late() or self.lost

    def _silent(self) -> str | None:
        own, is_torchruns = self.ranks.rank, self.ranks.parent is None
        for rank, count in self.counts.items():
            if count < 0:
                return f"rank {rank} died: it could not go on"
            # Rank 0 counts all; a rank of torchrun its own, which stop if the store is silent.
            counts = own == 0 or is_torchruns and rank == own
            if counts and self.all_are_there and self.missed[rank] > self.MAX_MISSED:
                seconds = self.MAX_MISSED * self.BEAT
                return f"rank {0 if own else rank} died: no heartbeat for {seconds:.0f} s"
        return None

    def _late(self) -> str | None:
        """A message that its sender has sent long ago."""
        for sender, number, _ in [self.ranks.awaited] if self.ranks.awaited else []:
            if self.counts[sender] >= STEP * number:
                self.ranks.awaited[2] += 1
                if self.ranks.awaited[2] >= self.MAX_LATE:
                    return f"a message from rank {sender} to rank {self.ranks.rank} was lost"
        return None

    def end_all(self, reason: str) -> None:
        """Rank 0 of torchrun's has no children whose death would break a collective: it ends its
        own process if it is busy."""
        super().end_all(reason)
        ranks = self.ranks
        if ranks.rank == 0 and not self.children and (
                not self.stopped.wait(parallel.GRACE_SECONDS) and ranks.busy):
            parallel.end_process(0, reason)

    @property
    def PATIENCE(self) -> float:
        return self.MAX_MISSED * self.BEAT + parallel.GRACE_SECONDS

    def end(self, grace: float) -> None:
        super().end(grace)
        self.store = None
