"""Ranks that watch each other's heartbeats, and send to one another.

`WatchedRanks` is what `nanoserve_extras.base.llm.LLM` hands to `start_ranks` in the place of
`Ranks`. It adds messages between two ranks and groups of some ranks, both for pipeline stages
(layer_plan.py). It also notices a rank that is alive and does not answer: at start-up by the first
collectives between GPUs, later by heartbeats (watch.py).

`hand_out` sends bytes to all ranks, for example an adapter's weights. It takes plain ranks, too.
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

TAGS = 2 ** 16  # gloo's tags of messages; far more than are ever in flight
FIRST_SECONDS = 60.0  # for the first collectives of GPUs, see `try_collectives`


class WatchedRanks(Ranks):
    """`Ranks` for engines with extras."""

    def __init__(self, rank: int = 0, size: int = 1):
        super().__init__(rank, size)
        self.parts: dict[str, Ranks] = {}  # see `part`
        self.busy = False  # inside `together` or `waiting`, where a dead rank would block this one
        self.posts = False  # see `post_broadcasts`
        self.posted: deque = deque()  # tensors on their way to other ranks, see `post`
        self.number = 0  # counts broadcasts between the hosts: on all ranks the same
        self.done = 0  # the last broadcast for which this rank has sent all its messages
        self.awaited: list[int] = []  # a message's sender, its number, and its delay in beats

    def part(self, name: str, members: range) -> Ranks:
        """A group of some of the ranks, this one among them, with its own shares and collectives.
        All members must call it; the same name gives the same group. This object goes on watching
        whether all ranks are alive."""
        if name not in self.parts:
            self.parts[name] = part = Ranks(members.index(self.rank), len(members))
            if part.size > 1:
                part.control = part.group = self.make_group(name, part.rank, part.size)
        return self.parts[name]

    # --------------------------------------------------------------- messages

    def post_broadcasts(self) -> None:
        """From here on rank 0 doesn't wait until all ranks have received a broadcast between hosts:
        the last stage of a pipeline may still be busy with an earlier step."""
        self.posts = True

    def broadcast_host(self, x: torch.Tensor) -> None:
        if self.posts and self.rank == 0:
            x = x.clone()  # the caller may write to its tensor at once
            self.post(x, self.control.broadcast, [x], options_of(dist.BroadcastOptions))
        else:
            super().broadcast_host(x)
        self.number += 1

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a tensor to one other rank, without waiting until it was received."""
        self.post(x, self.control.send, [x], to, self.number % TAGS)

    def post(self, x: torch.Tensor, collective: Callable, *args) -> None:
        """Begin a collective, and keep its tensor alive until it has ended."""
        self.posted.append((x, collective(*args)))
        while len(self.posted) > 2 * self.size:
            _, work = self.posted.popleft()
            self._run(lambda work=work: work)

    def receive(self, x: torch.Tensor, source: int, number: int) -> torch.Tensor:
        """Wait for a tensor of the size of `x` from another rank; returns `x`, filled. number: the
        sender's `number` at the time of sending, so that a later message is not taken for it."""
        self.awaited = [source, number, 0]
        self._run(self.control.recv, [x], source, number % TAGS)
        self.awaited = []
        return x

    # ------------------------------------------------------- start and end

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
        self.parts.clear()  # their groups keep the store alive, too


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
