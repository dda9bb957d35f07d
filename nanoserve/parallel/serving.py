"""How the ranks above 0 serve: they receive what rank 0 launches, and run the same function on it.

    rank 0      launch       step ─write──► message ──► run(message, step) ──► tokens
                                               │ broadcast
    the others  serve_one                      └──────► run(message) ──► what stands in for them

A *message* is a buffer of int32 numbers, on every rank of the same size. Its first number says how
many of them are in use, or, below zero, that it is no step. So a rank that got nothing but the
buffer can read it: between two steps nothing is pickled, and no object of rank 0's is needed.

Invariant: from one message to the next all ranks run the same function, and so take part in the
same collectives.

Each rank is handed a function that makes its runner. vLLM's executors call functions of the other
ranks by name, which can do more, and costs a short step more than its numbers do.
"""

from collections.abc import Callable

import torch

from nanoserve.parallel.ranks import Ranks

HEAD = 2 ** 10  # numbers that are broadcast before the length is known: decodes mostly end there
STOP = -1  # in the place of the length: no more steps will come
LAST_WORD = torch.full((HEAD,), STOP, dtype=torch.int32)  # it ends the other ranks


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
        if message[0] < 0:  # for an extra: an adapter's weights, say
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
