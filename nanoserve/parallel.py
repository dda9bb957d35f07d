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
need a single `all_reduce` (Shoeybi et al. 2019, "Megatron-LM").

Rank 0 schedules and samples. The other ranks are processes that `start_ranks` starts on this
machine, or torchrun's. They receive the packed buffer of each step, and run the same function on it
(`serve_rank`).

Invariants: all ranks call the same collectives in the same order; when a rank's process ends, the
others raise an error that names it, and end. The group of ranks belongs to its engine, not to the
process, which may have several engines.

Not known here: a rank that is alive and does not answer (nanoserve_extras/base/watch.py). Roads not
taken: torch's DTensor would share tensors out by itself, and hide the idea. Python's own
multiprocessing would run the user's script again in every child ("spawn"), so the script would need
a `__main__` guard.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanoserve.turns import ctrl_c_held

# Dtypes of plain weights. Integers and 8-bit floats are no weights without their scales.
CHECKPOINT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

START_TIMEOUT = timedelta(minutes=10)  # until all ranks have started, and have loaded torch
FOR_EVER = timedelta(days=365)  # an idle engine's ranks wait for the next step, however long
GRACE_SECONDS = 5.0  # for what should happen by itself, before it is enforced
LOOPBACK = "127.0.0.1"  # ranks on one machine must not be reachable from outside

# A *message* is a step's buffer of int32 numbers, which has the same size on every rank. Its first
# number says how many of them are in use. Below zero it says that the message is no step.
HEAD = 2 ** 10  # numbers in the first broadcast: most messages of decode steps fit into it
STOP = -1  # a message's first number: no more steps will come

# A child ignores Ctrl-C, which is rank 0's business, before it does anything that takes time.
CHILD = ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
         "from nanoserve.parallel import run_child; run_child()")


# ------------------------------------------------------------------------ shares


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


# ------------------------------------------------------------------------- ranks


class Ranks:
    """What one rank knows of all ranks: its number, its shares, and the collectives. With a single
    rank there is no group, and every collective is the identity."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = rank, size  # among the ranks of this machine
        self.process = os.getpid()  # a fork has a copy of this object, and must not close the group
        self.parent: int | None = None  # the id of rank 0's process, if it has started this one
        self.threads_before: int | None = None  # torch's, to be restored when the engine has ended
        self.broken: str | None = None  # why the ranks can't go on, see `fail`
        # Made by `connect`.
        self.store: dist.Store | None = None  # where the ranks find each other
        self.control = None  # gloo's group, between the hosts: the steps' messages
        self.group = None  # the group between the devices: gloo's again, or NCCL's
        self.watch: Watch | None = None

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

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, on every rank."""
        if self.size > 1:
            assert x.is_contiguous(), "gloo would add what lies between the numbers of a view"
            self._run(self.group.allreduce, [x], options_of(dist.AllreduceOptions))
        return x

    def gather(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        """Join columns that were shared out by `share(total)`: (rows, share) -> (rows, total) on
        rank 0, None on the others. A collective needs equal sizes, so smaller shares are padded."""
        if self.size == 1:
            return x
        widest = -(-total // self.size)
        x = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._run(self.group.gather, [parts] if parts else [], [x],
                  options_of(dist.GatherOptions))
        if self.rank:
            return None
        sizes = [self.share(total, rank).size for rank in range(self.size)]
        return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's numbers to all ranks, from device to device."""
        if self.size > 1:
            self._run(self.group.broadcast, [x], options_of(dist.BroadcastOptions))

    def broadcast_host(self, x: torch.Tensor) -> None:
        """As `broadcast`, from host to host. Idle ranks wait here, because waiting in NCCL would
        keep their GPUs busy."""
        if self.size > 1:
            self._run(self.control.broadcast, [x], options_of(dist.BroadcastOptions))

    def broadcast_message(self, message: torch.Tensor) -> None:
        """Copy rank 0's message into the other ranks' buffers. These don't know its length before
        the first `HEAD` numbers have come, so a long message takes two broadcasts."""
        if self.size > 1:
            self.broadcast_host(message[:HEAD])
            if message[0] > HEAD:
                self.broadcast_host(message[HEAD:int(message[0])])

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
        smallest = options_of(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MIN)
        with self.together():
            self._run(self.control.allreduce, [tensor], smallest)
        return int(tensor)

    def _run(self, collective: Callable, *args) -> None:
        try:
            work = collective(*args)
            if work is not None:  # NCCL returns None where it runs on the current stream
                work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"rank {self.rank} lost the others: {error}") from error

    # ------------------------------------------------------- living and dying

    def connect(self, store: dist.Store, device: str, children: list[subprocess.Popen],
                address: str | None = None) -> None:
        """Wait until all ranks are there, and make the groups between them. children: the processes
        that this rank 0 has started, rank 1 first. address: where this rank listens; left to gloo
        (the host's name, or GLOO_SOCKET_IFNAME) between machines."""
        self.store, self.address = store, address
        self.watch = self.make_watch(children)
        with ctrl_c_held():  # an interrupted start would leave a half-started thread
            self.watch.start()
        self._wait_for_all()
        self.control = self.group = self.make_group("host", self.rank, self.size)
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
            self.group = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), self.rank,
                                               self.size, dist.ProcessGroupNCCL.Options())

    def make_watch(self, children: list[subprocess.Popen]) -> "Watch":
        return Watch(self, children)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        self.store.set(f"started/{self.rank}", "")
        for rank in range(self.size):
            while not self.store.check([f"started/{rank}"]):
                if time.monotonic() > deadline:
                    self.fail(f"rank {rank} did not start within {START_TIMEOUT}")
                self.raise_if_broken()
                time.sleep(0.02)

    def make_group(self, name: str, rank: int, size: int) -> dist.ProcessGroupGloo:
        """A group between hosts. All of its members call this with the same name and size."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOR_EVER
        options._threads = max(2, size)  # so many collectives may run at once
        device = (dist.ProcessGroupGloo.create_device(hostname=self.address) if self.address
                  else dist.ProcessGroupGloo.create_default_device())
        options._devices = [device]
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), rank, size, options)

    def fail(self, reason: str) -> None:
        """Note why the ranks can't go on. The first reason is kept: later ones follow from it."""
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
        try:
            yield
            self.raise_if_broken()  # a collective that was aborted gives numbers, but wrong ones
        except BaseException as error:
            is_lost = isinstance(error, ConnectionError)
            if is_lost:
                self.watch.wait_for_reason()
            self.fail(f"rank {self.rank} failed in what all ranks do together: {error}")
            self.watch.end(0)
            if is_lost:
                self.raise_if_broken()
            raise

    def abort(self, reason: str) -> None:
        """End the other ranks at once: they may wait for a message that will not come."""
        self.fail(reason)
        self.close()

    def close(self) -> None:
        """End this rank's part; rank 0 tells the others, so that they end, too."""
        if self.watch is None or self.process != os.getpid():
            return
        self.watch.stopped.set()  # from here on a rank that ends is not reported
        if self.rank == 0 and self.broken is None:
            self._say_stop()
        if self.group is not self.control:
            end = self.group.shutdown if self.broken is None else self.group.abort
            end()
        self.watch.end(GRACE_SECONDS if self.broken is None else 0)
        self.fail("the engine was shut down")
        if self.threads_before is not None:
            torch.set_num_threads(self.threads_before)
        # Rank 0 serves the store to the others, until this reference to it is dropped.
        self.control = self.group = self.watch = self.store = None

    def _say_stop(self) -> None:
        last_word = torch.full((HEAD,), STOP, dtype=torch.int32)
        timeout = timedelta(seconds=GRACE_SECONDS)  # a rank may hang
        with suppress(ConnectionError):  # the others have ended, or `watch.end` ends them
            self._run(self.control.broadcast, [last_word],
                      options_of(dist.BroadcastOptions, timeout=timeout))


def options_of(kind: type, **values):
    """Options with which a collective runs on the current stream, behind the kernels there, and is
    recorded in a graph. NCCL would otherwise use a stream of its own. Its root is rank 0 unless
    `values` say otherwise."""
    options = kind()
    options.asyncOp = False
    for name, value in values.items():
        setattr(options, name, value)
    return options


class Watch(threading.Thread):
    """A thread that notices when another process ends. Rank 0 watches the processes that it has
    started, and each of these watches rank 0 (torchrun watches its own).

    A collective of gloo fails when another rank's process ends, because its connections close. A
    collective of NCCL would wait forever, so it is aborted here.
    """

    BEAT = 0.5  # seconds between two looks
    PATIENCE = GRACE_SECONDS  # how long it may take until a death is noticed

    def __init__(self, ranks: Ranks, children: list[subprocess.Popen]):
        super().__init__(name="nanoserve-watch", daemon=True)
        self.ranks, self.children = ranks, children
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(self.BEAT):
            reason = self.look()
            if reason is not None and not self.stopped.is_set():
                self.end_all(reason)
                self.stopped.set()

    def look(self) -> str | None:
        """Which process died, if one did."""
        if self.ranks.parent not in (None, os.getppid()):  # an orphan gets another parent
            return "rank 0 died"
        for rank, child in enumerate(self.children, 1):
            if child.poll() is not None:
                return f"rank {rank} (process {child.pid}) died: exit code {child.returncode}"
        return None

    def end_all(self, reason: str) -> None:
        """Rank 0 raises an error in its next call, or in the present one: killing the children
        breaks the collective in which it may wait. A rank above 0 ends its own process, unless it
        has stopped by itself within `GRACE_SECONDS`."""
        ranks = self.ranks
        ranks.fail(reason)
        if ranks.rank == 0:
            print(f"nanoserve: {reason}", file=sys.stderr, flush=True)
        if ranks.group is not ranks.control:
            ranks.group.abort()  # NCCL's collectives don't fail when a process ends
        kill(self.children)
        if ranks.rank > 0 and not self.stopped.wait(GRACE_SECONDS):
            end_process(ranks.rank, reason)

    def wait_for_reason(self) -> None:
        """After a collective has failed: wait until it is known which rank died, if one did."""
        deadline = time.monotonic() + self.PATIENCE
        while self.ranks.broken is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self, grace: float) -> None:
        """From here on deaths are not reported. The children have `grace` seconds to exit."""
        self.stopped.set()
        if self.is_alive() and threading.current_thread() is not self:  # a finalizer runs anywhere
            self.join()
        deadline = time.monotonic() + grace
        for child in self.children:
            with suppress(subprocess.TimeoutExpired), ctrl_c_held():  # as in `kill`
                child.wait(max(0.0, deadline - time.monotonic()))
        kill(self.children)


def kill(children: list[subprocess.Popen]) -> None:
    """Ctrl-C inside `wait` would leave Popen's own lock taken."""
    with ctrl_c_held():
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def end_process(rank: int, reason: str) -> None:
    print(f"nanoserve: rank {rank} ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


# --------------------------------------------------------------------- processes


def start_ranks(size: int, device: str, serve: Callable[[Ranks], None],
                make_ranks: Callable[..., Ranks] = Ranks) -> Ranks:
    """Start the other ranks, or join them under torchrun, and return rank 0.

    device: "cpu" or "cuda". serve: what a rank above 0 runs. make_ranks: `Ranks` or a subclass.
    Both can be pickled. Raises `RuntimeError` if a rank does not start.
    """
    if size == 1:
        return make_ranks()
    if under_torchrun():  # they exist already
        return _join_torchrun(size, device, serve, make_ranks)
    first, *others = [make_ranks(rank, size) for rank in range(size)]
    first.threads_before = torch.get_num_threads()
    threads = max(1, first.threads_before // size)
    store, port = make_store()
    children: list[subprocess.Popen] = []
    try:
        for ranks in others:
            children.append(_spawn((ranks, port, device, threads, serve)))
        first.connect(store, device, children, LOOPBACK)
    except BaseException:
        kill(children)
        first.abort("the ranks could not start")
        raise
    # Rank 0, too, takes its share of the threads: one without a core delays all the others.
    torch.set_num_threads(threads)
    return first


def make_store() -> tuple[dist.TCPStore, int]:
    """Where the ranks find each other, and its port. The system picks a free port (0 asks for that)
    and binds it at once, so no other program can take it in between. The socket is made here
    because torch's own would listen to the whole network."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False,
                         timeout=START_TIMEOUT, master_listen_fd=listener.detach()), port


def _spawn(boot: tuple) -> subprocess.Popen:
    """A fresh interpreter with the same import path (-P: without the current folder in front). It
    reads `boot` from its standard input. What it prints goes to standard error."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    child = subprocess.Popen([sys.executable, "-P", "-c", CHILD], stdin=subprocess.PIPE, stdout=2,
                             env=os.environ | {"PYTHONPATH": path})
    with suppress(OSError), child.stdin:  # it may have ended already, which `Watch` will find out
        pickle.dump(boot, child.stdin)
    return child


def run_child() -> None:
    """What a started rank runs, from its first line to its end."""
    ranks, port, device, threads, serve = pickle.load(sys.stdin.buffer)
    ranks.parent, ranks.process = ranks.process, os.getpid()  # rank 0 has made it
    torch.set_num_threads(threads)
    try:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=START_TIMEOUT)
        ranks.connect(store, device, [], LOOPBACK)
        serve(ranks)
        ranks.close()
        sys.stdout.flush()
        os._exit(0)  # nothing is left to do, and torch's own exit is slow
    except Exception as error:
        # In one line, because rank 0 mostly prints the same. The process ends at once, which closes
        # its connections and so tells the others.
        end_process(ranks.rank, f"{type(error).__name__}: {error}")


def serve_rank(ranks: Ranks, make_runner: Callable) -> None:
    """A rank above 0, from its start to its end: load, agree on the cache's size, and serve."""
    runner = make_runner(ranks=ranks)
    runner.count_kv_blocks()  # all ranks together
    runner.start(*ranks.agree(0, 0))
    serve_steps(runner)


@torch.inference_mode()
def serve_steps(runner) -> None:
    """Take part in each launch of rank 0, until there will be no more."""
    while True:
        message = runner.builder.take_buffer()
        with runner.ranks.together():
            runner.ranks.broadcast_message(message)
            if message[0] == STOP:
                return
            runner.run(message)


# ---------------------------------------------------------------------- torchrun


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def take_gpu(size: int, device: str) -> None:
    """Raises `ValueError` if `size` ranks have too few GPUs. Under torchrun a rank's own GPU
    becomes the current one, before anything runs: otherwise all ranks would try their kernels on
    the first GPU, and keep memory there."""
    if size == 1 or device != "cuda":
        return
    count = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if under_torchrun() else size
    if (found := torch.cuda.device_count()) < count:
        raise ValueError(f"{size} ranks need {count} GPUs on this machine, torch sees {found}: "
                         "start fewer ranks (tensor_parallel_size, pipeline_parallel_size), or set "
                         "CUDA_VISIBLE_DEVICES to all of them")
    if under_torchrun():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def _join_torchrun(size: int, device: str, serve: Callable[[Ranks], None],
                   make_ranks: Callable[..., Ranks]) -> Ranks:
    """All ranks run the same script and come here. Ranks above 0 serve until rank 0 shuts down, and
    then end their script: only rank 0 runs the rest of it."""
    world = int(os.environ["WORLD_SIZE"])
    if size != world:
        raise ValueError(f"tensor_parallel_size times pipeline_parallel_size is {size}, but "
                         f"torchrun started {world} ranks: make the two equal")
    store, rank, _ = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
    store = dist.PrefixStore("nanoserve", store)
    if store.add(f"engines/{rank}", 1) > 1:
        raise RuntimeError("torchrun's ranks have served an engine already and are gone: make one "
                           "engine a run")
    ranks = make_ranks(rank, size)
    ranks.local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    ranks.connect(store, device, [])
    if rank > 0:
        with closing(ranks):
            serve(ranks)
        raise SystemExit(0)
    return ranks
