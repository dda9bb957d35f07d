"""Tensor parallelism: one network on several ranks, each with its share (shard) of every matrix.

How a weight reaches its rank:

    checkpoint    gate_proj (6 x 4)      down_proj (4 x 6)          q_proj: rows, by whole heads
                  ┌─────────┐ rank 0     ┌──────┬──────┐            o_proj: columns, by whole heads
                  │ rows 0-2│            │ cols │ cols │            embedding: rows, by token
                  ├─────────┤            │ 0-2  │ 3-5  │            experts: each like these two,
                  │ rows 3-5│ rank 1     └──────┴──────┘            or dealt out whole
                  └─────────┘             rank 0  rank 1            norms, router: on every rank
    a step        h ──► gate(h), 3 of 6 ──► down's share of the sum ──► all_reduce ──► h, on all

A matrix cut by rows gives a share of the outputs ("column parallel" in the literature, which writes
it transposed), one cut by columns a part of each sum ("row parallel"). One after the other they
need a single `all_reduce` (Shoeybi et al. 2019, "Megatron-LM"). Rank 0 schedules and samples.

Invariants: all ranks call the same collectives in the same order; a rank that fails in between
says so and never takes part again. A group belongs to its engine and not to the process.

Where the ranks come from, and how their deaths are noticed: processes.py. torch's DTensor would
share tensors out by itself, and hide the idea.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from select import select
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Dtypes of plain weights. Integers and 8-bit floats are no weights without their scales.
CHECKPOINT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
GOODBYE_TIMEOUT = timedelta(seconds=5)
TAGS = 2 ** 16  # gloo's numbers of messages; far more than are ever on their way
FIRST_SECONDS = 60.0  # for the first collectives of GPUs, see `try_collectives`


class Slice(NamedTuple):
    """A share, [start, stop) of `total`: rows, columns, heads, experts or tokens."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Slice":
        return cls(0, total, total)

    @classmethod
    def of(cls, share: "Slice | int") -> "Slice":
        """A plain number means all of it."""
        return cls.whole(share) if isinstance(share, int) else share

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def times(self, n: int) -> "Slice":
        """The same share in smaller units. Head 1 of 4, 64 numbers each: 64..127 of 256."""
        return Slice(self.start * n, self.stop * n, self.total * n)


def copy_share(into: torch.Tensor, rows: Slice, columns: Slice | None,
               tensor: torch.Tensor) -> None:
    """Copy a share of a checkpoint's tensor. columns: None where it has one dimension. Raises
    `ValueError` for another shape, a dtype that plain weights don't have, and NaN: one number of a
    matrix makes all that comes out of the network NaN, and then every token is the same."""
    if tensor.dtype not in CHECKPOINT_DTYPES:
        raise ValueError(f"{tensor.dtype} in the file: quantised weights are not supported")
    expected = (rows.total,) if columns is None else (rows.total, columns.total)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"shape {tuple(tensor.shape)} in the file, {expected} expected")
    share = tensor[rows.start:rows.stop]
    into.copy_(share if columns is None else share[:, columns.start:columns.stop])
    if not into.is_meta and into.numel() and not torch.stack(into.aminmax()).isfinite().all():
        raise ValueError(f"it holds NaN, infinity, or numbers that {into.dtype} has not: take "
                         "another dtype, or a checkpoint without them")


def check_shares(size: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises `ValueError` if `size` ranks can't share these heads. Shares may be uneven, but each
    rank needs a head, and KV heads that several ranks keep must be kept equally often."""
    sizes = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or n % num_kv_heads == 0]
    if size not in sizes:
        raise ValueError(
            f"tensor_parallel_size={size} can't share {num_heads} attention heads with "
            f"{num_kv_heads} KV heads: choose one of {', '.join(map(str, sizes))}")


class Ranks:
    """What one rank knows of all ranks: its number, its shares, and the collectives.

    With a single rank there is no group, and every collective is the identity. parent: rank 0's
    process, if that has started this one.
    """

    def __init__(self, rank: int = 0, size: int = 1, parent: int | None = None):
        self.rank, self.size, self.parent = rank, size, parent
        self.local_rank = rank  # on its machine: which GPU is its own
        self.local_size = size
        self.control = None  # gloo, between the hosts: the steps' messages
        self.group = None  # between the devices: gloo again, or NCCL
        self.make_group: Callable | None = None  # takes a name, this one's number, and the size
        self.parts: dict[str, Ranks] = {}  # see `part`
        self.watch = None  # processes.Watch
        self.process = os.getpid()  # a forked process has a copy of this object, and must not close
        self.busy = False  # inside `together` or `waiting`, where a dead rank would block this one
        self.posted: deque = deque()  # numbers on their way to other ranks, see `post`
        self.number = 0  # counts broadcasts between the hosts: on all ranks the same
        self.done = 0  # the last such number after which this rank has sent all that it had to
        self.awaited: list[int] = []  # a message's sender, its number, and its delay in beats
        self.broken: str | None = None  # why the ranks can't go on, see `fail`
        self.lock = threading.Lock()

    def share(self, total: int, rank: int | None = None) -> Slice:
        """The share of `rank`, or of this rank. Sizes differ by 1 at most: 2, 3, 2, 3 of 10."""
        rank = self.rank if rank is None else rank
        return Slice(total * rank // self.size, total * (rank + 1) // self.size, total)

    def share_heads(self, num_heads: int, num_kv_heads: int) -> tuple[Slice, Slice]:
        """This rank's query heads and the KV heads that they read.

        With fewer KV heads than ranks a KV head is kept by several ranks, which share its query
        heads: of 8 heads, 2 KV heads and 4 ranks, rank 1 has heads 2..3, and KV head 0 like rank 0.
        """
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            kv_heads = self.share(num_kv_heads)
            return kv_heads.times(group), kv_heads
        copies = self.size // num_kv_heads
        kv_head, copy = divmod(self.rank, copies)
        first = kv_head * group
        heads = Slice(first + group * copy // copies, first + group * (copy + 1) // copies,
                     num_heads)
        return heads, Slice(kv_head, kv_head + 1, num_kv_heads)

    def part(self, name: str, members: range) -> "Ranks":
        """Some of the ranks, this one among them, as a group with shares and collectives of its
        own. All of its members call it; the same name is the same group. This object goes on
        watching whether they live."""
        if name not in self.parts:
            self.parts[name] = part = Ranks(members.index(self.rank), len(members))
            if part.size > 1:
                part.control = part.group = self.make_group(name, part.rank, part.size)
        return self.parts[name]

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, on every rank."""
        if self.size > 1:
            assert x.is_contiguous(), "gloo would add what lies between the numbers of a view"
            self._run(self.group.allreduce, [x], _options(dist.AllreduceOptions))
        return x

    def gather(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        """Columns shared out by `share(total)`: (rows, share) -> (rows, total) on rank 0, None on
        the others. Collectives want equal sizes, so a smaller share is padded on its way."""
        if self.size == 1:
            return x
        widest = -(-total // self.size)
        x = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._run(self.group.gather, [parts] if parts else [], [x],
                  _options(dist.GatherOptions, rootRank=0))
        if self.rank:
            return None
        sizes = [self.share(total, rank).size for rank in range(self.size)]
        return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=1)

    def gather_best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        """The id of the highest value of each row on rank 0, (rows,), and None on the other ranks.
        If values are equal, the lowest rank's id wins. values, ids: this rank's best, (rows, 1)."""
        best = self.gather(torch.cat((values.double(), ids.double()), 1), 2 * self.size)
        if best is None:
            return None
        values, ids = best.view(len(best), -1, 2).unbind(2)  # each (rows, ranks)
        return ids.gather(1, values.argmax(1, keepdim=True))[:, 0].long()

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's numbers to all ranks, from device to device."""
        if self.size > 1:
            self._run(self.group.broadcast, [x], _from_rank_0())

    def broadcast_host(self, x: torch.Tensor, wait: bool = True) -> None:
        """The same from host to host. Idle ranks wait here, because waiting in NCCL would keep
        their GPUs busy. wait: whether rank 0 waits until all ranks have the numbers. Otherwise it
        sends a copy, so that `x` may be written to at once."""
        if self.size > 1:
            if wait or self.rank > 0:
                self._run(self.control.broadcast, [x], _from_rank_0())
            else:
                x = x.clone()
                self.post(x, self.control.broadcast, [x], _from_rank_0())
            self.number += 1

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send numbers to one other rank, without waiting until it has received them."""
        self.post(x, self.control.send, [x], to, self.number % TAGS)
        while len(self.posted) > 2 * self.size:
            _, work = self.posted.popleft()
            self._run(lambda work=work: work)

    def post(self, x: torch.Tensor, collective: Callable, *args) -> None:
        """Begin a collective, and keep its numbers until it has ended."""
        self.posted.append((x, collective(*args)))

    def receive(self, x: torch.Tensor, source: int, number: int) -> torch.Tensor:
        """Wait for what another rank sends, which is as long as `x`; returns `x`, filled. number:
        the sender's `number` when it sends this, so that a later message is not taken for it."""
        self.awaited = [source, number, 0]
        self._run(self.control.recv, [x], source, number % TAGS)
        self.awaited = []
        return x

    def try_collectives(self, device: torch.device) -> None:
        """Compare an all_reduce, a gather and a broadcast between the devices, before anything is
        read: GPUs that can't reach each other's memory fail here, or give wrong numbers. Raises
        `RuntimeError` with what may help."""
        remedy = ("set NCCL_P2P_DISABLE=1 if these GPUs can't reach each other's memory, give a "
                  "container more shared memory (docker run --shm-size=1g or --ipc=host), and "
                  "NCCL_DEBUG=INFO tells more")
        mine = torch.full((1, 1), 1.0 + self.rank, device=device)
        ranks, given = torch.arange(1.0, self.size + 1)[None], mine.clone()
        try:
            total, parts = self.all_reduce(mine.clone()), self.gather(mine, self.size)
            self.broadcast(given)
            if device.type == "cuda":
                wait_for(device, FIRST_SECONDS)
            right = {"all_reduce": float(total) == float(ranks.sum()),
                     "gather": parts is None or torch.equal(parts.cpu(), ranks),
                     "broadcast": float(given) == 1}
        except (RuntimeError, ConnectionError) as error:
            raise RuntimeError(f"the GPUs' first collective failed ({error}): {remedy}") from error
        if wrong := [name for name, is_right in right.items() if not is_right]:
            raise RuntimeError(f"{', '.join(wrong)} of the GPUs gives wrong numbers: {remedy}")

    def hand_out(self, content: bytes = b"") -> bytes | bytearray:
        """Return rank 0's bytes on all ranks. Slow, and only for the time between two steps."""
        if self.size == 1:
            return content
        length = torch.tensor([len(content)])
        self.broadcast_host(length)
        handed = bytearray(content if self.rank == 0 else int(length))
        if handed:
            self.broadcast_host(torch.frombuffer(handed, dtype=torch.uint8))
        return handed

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """Rank 0's numbers, on all ranks; what the others give doesn't matter."""
        tensor = torch.tensor(numbers)
        with self.together():
            self.broadcast_host(tensor)
        return tuple(tensor.tolist())

    def least(self, value: int) -> int:
        """The smallest of all ranks' numbers, between the hosts, and outside any step."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value])
        options = _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MIN)
        with self.together():
            self._run(self.control.allreduce, [tensor], options)
        return int(tensor)

    def _run(self, collective, *args) -> None:
        try:
            work = collective(*args)
            if work is not None:  # NCCL returns None where it runs on the current stream
                work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"rank {self.rank} lost the others: {error}") from error

    # ------------------------------------------------------- living and dying

    @property
    def lost_parent(self) -> bool:
        """Whether rank 0, which started this process, has died. Its death closes the pipe to this
        process's standard input, unless a fork of rank 0 holds the pipe open. Then the death shows
        in the parent's id."""
        return self.parent is not None and (
            self.parent != os.getppid() or bool(select([sys.stdin], [], [], 0)[0]))

    def fail(self, reason: str) -> None:
        """Note why the ranks can't go on. The first reason is kept: later ones follow from it."""
        with self.lock:
            self.broken = self.broken or reason

    def raise_if_broken(self) -> None:
        """Raises `RuntimeError` if the ranks can't go on."""
        if self.broken is not None:
            raise RuntimeError(f"{self.broken}. This engine has ended: make a new LLM")

    @contextmanager
    def together(self):
        """Encloses what all ranks do at the same time. After an error inside, their collectives no
        longer match: the group is closed, and the error names the rank that died, if one did."""
        if self.size == 1:
            yield
            return
        self.raise_if_broken()
        self.busy = True
        try:
            yield
            self.raise_if_broken()  # a collective that was aborted gives numbers, but wrong ones
            self.done = self.number
        except BaseException as error:
            if isinstance(error, ConnectionError):
                self.watch.find_the_dead()
            self.fail(f"rank {self.rank} failed in what all ranks do together: {error}")
            self.watch.give_up()
            if isinstance(error, ConnectionError):
                self.raise_if_broken()
            raise
        finally:
            self.busy = False

    @contextmanager
    def waiting(self):
        """Encloses waiting for this rank's device, whose results another rank's death may delay or
        spoil. Ctrl-C is harmless in here."""
        self.busy = self.size > 1
        try:
            yield
        finally:
            self.busy = False
        self.raise_if_broken()

    def abort(self, reason: str) -> None:
        """End the other ranks at once: they may wait for a message that will not come."""
        if self.watch is not None:
            self.fail(reason)
            self.watch.give_up()
            self.close()

    def close(self, last_word: torch.Tensor | None = None) -> None:
        """End this rank's part. last_word: what rank 0 tells the others, so that they end, too."""
        if self.watch is None or self.process != os.getpid():
            return
        self.watch.stopped.set()  # from here on it is no death when a rank ends
        if last_word is not None and self.rank == 0 and self.broken is None:
            options = _from_rank_0(timeout=GOODBYE_TIMEOUT)  # a rank may hang
            try:
                self._run(self.control.broadcast, [last_word], options)
            except ConnectionError:
                pass  # they have ended already, or will be made to
        if self.group is not self.control:
            end = self.group.shutdown if self.broken is None else self.group.abort
            end()
        self.fail("the engine was shut down")
        self.watch.close()
        self.control = self.group = self.watch = self.make_group = None
        self.parts.clear()  # their groups hold the store as well


SOLO = Ranks()


def wait_for(device: torch.device, seconds: float) -> None:
    """Wait until the GPU has run all queued kernels. Raises `RuntimeError` after `seconds`."""
    done, deadline = torch.cuda.Event(), time.monotonic() + seconds
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {seconds:.0f} s")
        time.sleep(0.01)


def _from_rank_0(**values) -> dist.BroadcastOptions:
    return _options(dist.BroadcastOptions, rootRank=0, rootTensor=0, **values)


def _options(kind: type, **values):
    """Options with which a collective runs on the current stream, behind the kernels there, and is
    recorded in a graph. NCCL would otherwise use a stream of its own."""
    options = kind()
    options.asyncOp = False
    for name, value in values.items():
        setattr(options, name, value)
    return options


# ---------------------------------------------------------------------- serving
# How the ranks above 0 serve: they receive what rank 0 launches, and run the same function on it.
#
#     rank 0      launch       step ─write──► message ──► run(message, step) ──► tokens
#                                                │ broadcast
#     the others  serve_one                      └──────► run(message) ──► what stands in for them
#
# A *message* is a buffer of int32 numbers, on every rank of the same size. Its first number says
# how many of them are in use, or, below zero, that it is no step. So a rank that got nothing but
# the buffer can read it: between two steps nothing is pickled, and no object of rank 0's is needed.
#
# Invariant: from one message to the next all ranks run the same function, and so take part in the
# same collectives.
#
# Each rank is handed a function that makes its runner. vLLM's executors call functions of the other
# ranks by name, which can do more, and costs a short step more than its numbers do.

HEAD = 2 ** 10  # numbers of the first broadcast, which holds most messages of decode steps whole
STOP = -1  # in the place of the length: no more steps will come
LAST_WORD = torch.full((HEAD,), STOP, dtype=torch.int32)  # the message that ends the other ranks


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
    """Copy rank 0's message into the other ranks' buffers; a long one takes a second broadcast.
    wait: whether rank 0 waits until all have it. A later stage of a pipeline may still be busy with
    the step before."""
    if ranks.size > 1:
        ranks.broadcast_host(message[:HEAD], wait)
        if message[0] > HEAD:
            ranks.broadcast_host(message[HEAD:int(message[0])], wait)
