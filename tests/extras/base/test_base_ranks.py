"""What `WatchedRanks` adds to `Ranks`. (Its heartbeats: test_watch.py; messages and parts:
layer_plan.)"""

import re
from types import SimpleNamespace

import pytest
import torch
from rank_threads import in_threads, thread_ranks

from nanoserve_extras.base.ranks import (
    WatchedRanks,
    gather_best,
    hand_out,
    try_collectives,
    wait_for,
)


@pytest.mark.parametrize("broken, says", [
    (dict(), None),
    (dict(all_reduce=lambda x: x + 1), "all_reduce of the GPUs gives wrong numbers"),
    (dict(gather=lambda x, total: torch.zeros(1, total)), "gather of the GPUs gives wrong"),
    (dict(broadcast=lambda x: x.zero_()), "broadcast of the GPUs gives wrong"),
    (dict(broadcast=lambda x: (_ for _ in ()).throw(ConnectionError("NCCL error: unhandled"))),
     "first collective failed .NCCL error: unhandled")])
def test_the_first_collectives_of_gpus_are_compared(broken, says):
    """Behind a broken P2P link NCCL hangs, fails, or sums up garbage: the error says what helps."""
    def work(ranks: WatchedRanks) -> str:
        if ranks.rank == 0:
            vars(ranks).update(broken)
        try:
            try_collectives(ranks, torch.device("cpu"))
        except RuntimeError as error:
            return str(error)
        return ""

    first = in_threads(thread_ranks(1 if broken else 3, WatchedRanks), work)[0]
    if says is None:
        assert first == ""
    else:
        assert re.search(f"{says}.*NCCL_P2P_DISABLE=1.*--shm-size=1g", first)


def test_a_gpu_that_never_answers_is_not_waited_for(monkeypatch):
    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with pytest.raises(RuntimeError, match="no answer within 0 s"):
        wait_for(torch.device("cuda"), 0.01)
    event.query = lambda: True
    wait_for(torch.device("cuda"), 0.01)


@pytest.mark.parametrize("posts", [False, True])
def test_all_ranks_get_rank_0s_bytes(posts):
    """Also where rank 0 does not wait, and writes to its numbers at once."""
    def work(ranks: WatchedRanks) -> tuple:
        if posts:
            ranks.post_broadcasts()
        got = bytes(hand_out(ranks, b"from rank 0" if ranks.rank == 0 else b"not asked"))
        nothing = bytes(hand_out(ranks))
        numbers = torch.full((1000,), ranks.rank + 5)
        ranks.broadcast_host(numbers)
        told = numbers.unique().tolist()
        numbers.zero_()
        return got, nothing, told, ranks.number

    assert in_threads(thread_ranks(3, WatchedRanks), work) == [(b"from rank 0", b"", [5], 4)] * 3


def test_what_all_do_together_is_done_when_it_has_ended():
    """A watch looks at these from another thread."""
    ranks = WatchedRanks(0, 2)
    ranks.watch = SimpleNamespace(end=lambda grace: None)
    for encloses in ranks.together, ranks.waiting:
        with encloses():
            ranks.number += 1
            assert ranks.busy
        assert not ranks.busy and ranks.done == 1
    with pytest.raises(ZeroDivisionError), ranks.together():
        ranks.number += 1
        raise ZeroDivisionError
    assert not ranks.busy and ranks.done == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_best_of_all_ranks_is_the_argmax(dtype):
    """Rank by rank only the best of its columns is sent. Whole numbers from -2 to 2 tie often, and
    the lowest id wins; infinities and NaN count as in torch's argmax."""
    whole = torch.randint(-2, 3, (60, 11), generator=torch.Generator().manual_seed(0)).to(dtype)
    whole[40:50:2, 3], whole[41:50, 9], whole[50:55], whole[55:, ::5] = (
        torch.nan, torch.inf, -torch.inf, torch.nan)

    def best(ranks: WatchedRanks):
        share = ranks.share(11)
        values, ids = whole[:, share.start:share.stop].max(1, keepdim=True)
        return gather_best(ranks, values, ids + share.start)

    first, *others = in_threads(thread_ranks(3, WatchedRanks), best)
    assert torch.equal(first, whole.argmax(1)) and others == [None, None]
