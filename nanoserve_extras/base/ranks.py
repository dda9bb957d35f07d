"""Ranks that watch each other's heartbeats, and send to one another.

`WatchedRanks` is what `nanoserve_extras.base.llm.LLM` hands to `start_ranks` in the place of
`Ranks`. It adds what only extras use: messages between two ranks, and groups of some of them, for
stages (layer_plan.py); and what it takes to notice a rank that lives and does not answer: at the
start the first collectives of GPUs, and later heartbeats (watch.py).

Bytes for all ranks, an adapter's weights say: `hand_out`, which takes plain ranks, too.
"""

import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanoserve.parallel import Ranks, options_of
from nanoserve_extras.base.watch import Heartbeats

TAGS = 2 ** 16  # gloo's numbers of messages; far more than are ever on their way
FIRST_SECONDS = 60.0  # for the first collectives of GPUs, see `try_collectives`


class WatchedRanks(Ranks):
    """`Ranks` for engines with extras."""

    def __init__(self, rank: int = 0, size: int = 1):
        super().__init__(rank, size)
        self.parts: dict[str, Ranks] = {}  # see `part`
        self.busy = False  # inside `together` or `waiting`, where a dead rank would block this one
        self.posts = False  # see `post_broadcasts`
        self.posted: deque = deque()  # numbers on their way to other ranks, see `post`
        self.number = 0  # counts broadcasts between the hosts: on all ranks the same
        self.done = 0  # the last such number after which this rank has sent all that it had to
        self.awaited: list[int] = []  # a message's sender, its number, and its delay in beats

    def part(self, name: str, members: range) -> Ranks:
        """Some of the ranks, this one among them, as a group with shares and collectives of its
        own. All of its members call it; the same name is the same group. This object goes on
        watching whether they live."""
        if name not in self.parts:
            self.parts[name] = part = Ranks(members.index(self.rank), len(members))
            if part.size > 1:
                part.control = part.group = self.make_group(name, part.rank, part.size)
        return self.parts[name]

    # --------------------------------------------------------------- messages

    def post_broadcasts(self) -> None:
        """From here on rank 0 doesn't wait until all ranks have what it broadcasts between the
        hosts: the last stage of a pipeline may still be busy with an earlier step."""
        self.posts = True

    def broadcast_host(self, x: torch.Tensor) -> None:
        if self.posts and self.rank == 0:
            x = x.clone()  # the caller may write to its own at once
            self.post(x, self.control.broadcast, [x], options_of(dist.BroadcastOptions))
        else:
            super().broadcast_host(x)
        self.number += 1

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send numbers to one other rank, without waiting until it has received them."""
        self.post(x, self.control.send, [x], to, self.number % TAGS)

    def post(self, x: torch.Tensor, collective: Callable, *args) -> None:
        """Begin a collective, and keep its numbers until it has ended."""
        self.posted.append((x, collective(*args)))
        while len(self.posted) > 2 * self.size:
            _, work = self.posted.popleft()
            self._run(lambda work=work: work)

    def receive(self, x: torch.Tensor, source: int, number: int) -> torch.Tensor:
        """Wait for what another rank sends, which is as long as `x`; returns `x`, filled. number:
        the sender's `number` when it sends this, so that a later message is not taken for it."""
        self.awaited = [source, number, 0]
        self._run(self.control.recv, [x], source, number % TAGS)
        self.awaited = []
        return x

    # ------------------------------------------------------- living and dying

    def connect(self, store: dist.Store, device: str, children: list[subprocess.Popen],
                address: str | None = None) -> None:
        super().connect(store, device, children, address)
        self.watch.begin()
        if device == "cuda":
            try_collectives(self, torch.device("cuda", self.local_rank))

    def make_watch(self, children: list[subprocess.Popen]) -> Heartbeats:
        return Heartbeats(self, children)

    @contextmanager
    def together(self):
        self.busy = self.size > 1
        try:
            with super().together():
                yield
            self.done = self.number
        finally:
            self.busy = False

    @contextmanager
    def waiting(self):
        """Encloses waiting for this rank's device. Ctrl-C is harmless in here."""
        self.busy = self.size > 1
        try:
            yield
        finally:
            self.busy = False

    def close(self) -> None:
        super().close()
        self.parts.clear()  # their groups hold the store as well


def gather_best(ranks: Ranks, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """The id of the highest value of each row on rank 0, (rows,), and None on the other ranks.
    If values are equal, the lowest rank's id wins. values, ids: this rank's best, (rows, 1)."""
    best = ranks.gather(torch.cat((values.double(), ids.double()), 1), 2 * ranks.size)
    if best is None:
        return None
    values, ids = best.view(len(best), -1, 2).unbind(2)  # each (rows, ranks)
    return ids.gather(1, values.argmax(1, keepdim=True))[:, 0].long()


def try_collectives(ranks: Ranks, device: torch.device) -> None:
    """Compare an all_reduce, a gather and a broadcast between the devices, before anything is
    read: GPUs that can't reach each other's memory fail here, or give wrong numbers. Raises
    `RuntimeError` with what may help."""
    remedy = ("set NCCL_P2P_DISABLE=1 if these GPUs can't reach each other's memory, give a "
              "container more shared memory (docker run --shm-size=1g or --ipc=host), and "
              "NCCL_DEBUG=INFO tells more")
    mine = torch.full((1, 1), 1.0 + ranks.rank, device=device)
    all_ranks, given = torch.arange(1.0, ranks.size + 1)[None], mine.clone()
    try:
        total, parts = ranks.all_reduce(mine.clone()), ranks.gather(mine, ranks.size)
        ranks.broadcast(given)
        if device.type == "cuda":
            wait_for(device, FIRST_SECONDS)
        right = {"all_reduce": float(total) == float(all_ranks.sum()),
                 "gather": parts is None or torch.equal(parts.cpu(), all_ranks),
                 "broadcast": float(given) == 1}
    except (RuntimeError, ConnectionError) as error:
        raise RuntimeError(f"the GPUs' first collective failed ({error}): {remedy}") from error
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise RuntimeError(f"{', '.join(wrong)} of the GPUs gives wrong numbers: {remedy}")


def wait_for(device: torch.device, seconds: float) -> None:
    """Wait until the GPU has run all queued kernels. Raises `RuntimeError` after `seconds`."""
    done, deadline = torch.cuda.Event(), time.monotonic() + seconds
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {seconds:.0f} s")
        time.sleep(0.01)


def hand_out(ranks: Ranks, content: bytes = b"") -> bytes | bytearray:
    """Return rank 0's bytes on all ranks. Slow, and only for the time between two steps."""
    if ranks.size == 1:
        return content
    length = torch.tensor([len(content)])
    ranks.broadcast_host(length)
    handed = bytearray(content if ranks.rank == 0 else int(length))
    if handed:
        ranks.broadcast_host(torch.frombuffer(handed, dtype=torch.uint8))
    return handed
