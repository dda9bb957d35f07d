"""Ranks as threads of one process, with real groups between them."""

import pickle
import threading
from types import SimpleNamespace

import torch.distributed as dist
from stand_ins import LikeNCCL

from nanoserve.parallel import FOR_EVER, Ranks


def thread_ranks(size: int, make_ranks=Ranks) -> list[Ranks]:
    """Ranks with real groups between them, one for each of as many threads. That of their devices
    answers as NCCL's would."""
    store, ranks = dist.HashStore(), [make_ranks(rank, size) for rank in range(size)]

    def make_group(name: str, rank: int, size: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, FOR_EVER)

    def connect(one: Ranks) -> None:
        one.make_group = make_group
        one.control = make_group("host", one.rank, size)
        one.group = LikeNCCL(one.control)
        one.watch = SimpleNamespace(stopped=threading.Event(), end=lambda grace: None,
                                    wait_for_reason=lambda: None)
    in_threads(ranks, connect)
    return ranks


def start_in_threads(size: int, device: str, serve, make_ranks=Ranks) -> Ranks:
    """In the place of `llm.start_ranks`: the other ranks serve in threads of this process, and get
    what they run as processes would."""
    first, *others = thread_ranks(size, make_ranks)
    for one in others:
        threading.Thread(target=pickle.loads(pickle.dumps(serve)), args=(one,),
                         daemon=True).start()
    return first


def in_threads(ranks: list[Ranks], work) -> list:
    """What `work(ranks)` returns on each rank."""
    results, errors = [None] * len(ranks), []

    def run(one: Ranks) -> None:
        try:
            results[one.rank] = work(one)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), errors
    assert not errors, errors
    return results
