"""How the ranks above 0 serve: they receive what rank 0 launches, and run the same function on it.

    rank 0      launch       step ─write──► message ──► run(message, step) ──► tokens
                                               │ broadcast
    the others  serve_one                      └──────► run(message) ──► what stands in for them

A *message* is a buffer of int32 numbers, on every rank of the same size. Its first number says how
many of them are in use, or, below zero, that it is no step. So a rank that got nothing but the
buffer can read it: between two steps nothing is pickled, and no object of rank 0's is needed.

Invariant: from one message to the next all ranks run the same function, and so take part in the
same collectives.

Not known here: what is in a step and what a runner computes. Each rank is handed a function that
makes its runner. Road not taken: remote calls by name, as in vLLM's executors, which can do more,
and cost a short step more than its numbers do.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoserve.parallel.ranks import Ranks
from nanoserve.parallel.signals import ctrl_c_held

HEAD = 2 ** 13  # numbers that are broadcast before the length is known; most messages end in them
STOP = -1  # in the place of the length: no more steps will come
LAST_WORD = torch.full((HEAD,), STOP, dtype=torch.int32)  # what ends the other ranks


def serve_rank(ranks: Ranks, make_runner: Callable) -> None:
    """A rank above 0, from its start to its end: load, agree on the cache's size, and serve."""
    runner = make_runner(ranks=ranks)
    runner.count_kv_blocks()  # all ranks together
    runner.start(*ranks.agree(0, 0))
    while serve_one(runner):
        pass


@torch.inference_mode()
def serve_one(runner) -> bool:
    """Take part in one launch of rank 0. False: there will be no more."""
    message = runner.builder.take_buffer()
    with runner.ranks.together():
        broadcast(runner.ranks, message)
        if message[0] == STOP:
            return False
        if message[0] < 0:  # for an annexe: an adapter's weights, say (extras/lora.py)
            runner.parts.calls[int(message[0])](runner, message)
        else:
            runner.run(message)
    return True


def broadcast(ranks: Ranks, message: torch.Tensor, wait: bool = True) -> None:
    """Rank 0's message, into the buffers of the others. A long one takes a second broadcast. wait:
    until all have it; a later stage may still compute the step before."""
    if ranks.size > 1:
        ranks.broadcast_host(message[:HEAD], wait)
        if message[0] > HEAD:
            ranks.broadcast_host(message[HEAD:int(message[0])], wait)


class Arrivals:
    """Hidden states that another rank will send to rank 0, of the oldest step first."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.queue: deque[Arrival] = deque()

    def expect(self, receive: Callable, finish: Callable) -> "Arrival":
        """receive: waits for the hidden states; finish: makes the step's output of them."""
        arrival = Arrival(self, receive, finish)
        if self.ranks.rank == 0:
            self.queue.append(arrival)
        return arrival

    def drop(self) -> None:
        """Steps were lost: take what they have sent, so that it is nobody else's."""
        with ctrl_c_held():
            while self.queue and self.ranks.broken is None:
                with self.ranks.together():
                    self.queue.popleft().receive()
            self.queue.clear()


@dataclass
class Arrival:
    """In the place of a step's output, until it is asked for."""

    arrivals: Arrivals
    receive: Callable
    finish: Callable

    def to_host(self) -> "Arrival":
        return self

    @torch.inference_mode()
    def tolist(self) -> tuple[list, dict, list]:
        """Wait for the hidden states, and sample. Ctrl-C waits, too: half a tensor is of no use."""
        with ctrl_c_held(), self.arrivals.ranks.together():
            assert self.arrivals.queue.popleft() is self, "steps are fetched in their order"
            return self.finish(self.receive()).tolist()
