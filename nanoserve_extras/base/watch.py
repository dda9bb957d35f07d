"""Heartbeats: they also detect a rank that is alive and does not answer.

The plain `Watch` sees that a process has ended. It does not see that a process hangs or is stopped,
that its machine has lost power, or that a message was lost. So each rank counts its heartbeats in
the ranks' shared store, and rank 0 takes a rank for dead when its count has not changed during 13
beats of rank 0; no clocks are compared.

    rank 0     beats, counts all others' beats ──► 13 missed: the rank is dead
    rank 1     beats                           ──► the store is silent: rank 0 is dead (torchrun)

Rank 0's beats are not counted, because its user's code may hold Python's lock for minutes. A child
waits as long as its parent lives. A rank that torchrun has started waits as long as the store
answers: the store's thread needs no lock. A heartbeat also tells how many messages its rank has
sent: a message may take 30 beats to arrive. There is no limit on computing.

Invariants: when a rank dies, the others end within half a minute and name it. Between requests no
rank waits with a time-out.
"""

import subprocess
import threading

from nanoserve import parallel
from nanoserve.parallel import Watch

STEP = 2 ** 32  # counts of heartbeats are below it; multiples of it tell the rank's progress
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
        self.counts = dict.fromkeys(range(ranks.size), 0)  # the counts in the store
        self.missed = dict(self.counts)  # beats of this rank since a count has changed
        self.lost: str | None = None
        self.all_are_there = False

    def begin(self) -> None:
        """All ranks have started. From here on a silent rank is taken for dead."""
        self.missed = dict.fromkeys(self.missed, 0)
        self.all_are_there = True

    def run(self) -> None:
        beats = threading.Thread(target=self._exchange, daemon=True)
        beats.start()
        super().run()
        beats.join(parallel.GRACE_SECONDS)  # Python's end aborts if a thread is in torch's store

    def _exchange(self) -> None:
        """Exchange heartbeats with the store. This runs in a thread of its own: if the store's
        machine loses power, calls never return, and `run` must still notice the silence."""
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
        """Do one beat's check: return why a rank is taken for dead, or None."""
        for rank in self.counts:
            self.missed[rank] += 1
        return super().look() or self._silent() or self._late() or self.lost

    def _silent(self) -> str | None:
        own, is_torchruns = self.ranks.rank, self.ranks.parent is None
        for rank, count in self.counts.items():
            if count < 0:
                return f"rank {rank} died: it could not go on"
            # Rank 0 checks all counts. A rank of torchrun checks its own, which stops if the store
            # is silent.
            counts = own == 0 or is_torchruns and rank == own
            if counts and self.all_are_there and self.missed[rank] > self.MAX_MISSED:
                seconds = self.MAX_MISSED * self.BEAT
                return f"rank {0 if own else rank} died: no heartbeat for {seconds:.0f} s"
        return None

    def _late(self) -> str | None:
        """Whether a message was sent long ago and has not arrived: the error's text, or None."""
        for sender, number, _ in [self.ranks.awaited] if self.ranks.awaited else []:
            if self.counts[sender] >= STEP * number:
                self.ranks.awaited[2] += 1
                if self.ranks.awaited[2] >= self.MAX_LATE:
                    return f"a message from rank {sender} to rank {self.ranks.rank} was lost"
        return None

    def end_all(self, reason: str) -> None:
        """End all ranks. Rank 0 under torchrun has no children whose death would break a
        collective, so it ends its own process if it is in one."""
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
