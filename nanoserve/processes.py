"""The ranks' processes: how they start, and how none of them waits for ever for one that died.

`LLM(tensor_parallel_size=2)` starts its own ranks as child processes on this machine; under
`torchrun` the ranks exist already, maybe on several machines, and are joined.

    user's script     LLM(...) ─► start_ranks ─► schedule, broadcast, forward, ... ─► shutdown()
                                   │ stdin: what to do          │ store: heartbeats          │
    child, rank 1                  └► run_child ─► serve: receive, forward, ... ─────────┴► exits

Each rank counts its heartbeats in a shared store. Rank 0 takes a rank for dead when its count has
not changed during 13 beats of rank 0; no clock is compared. Mostly a death is noticed sooner: a
parent sees its child's exit, a rank in a collective a closed connection.

Nobody counts rank 0's beats, because its user's code may hold Python's lock for minutes. A child
waits as long as its parent lives. A rank that torchrun has started waits as long as the store
answers: the store's thread needs no lock. A heartbeat also tells how far its rank is: a message
that was sent may take 30 beats. Computing has no limit.

Invariants: when a rank dies, the others end within half a minute and name it; no process, port or
shared memory outlives the engine. Between requests no rank waits with a time-out.

Python's own multiprocessing would run the user's script again in every child ("spawn"), and so it
wants a `__main__` guard in the script.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from nanoserve.parallel import Ranks
from nanoserve.turns import ctrl_c_held

START_TIMEOUT = timedelta(minutes=10)  # until all ranks are there: interpreters start, torch loads
FOR_EVER = timedelta(days=365)  # an idle engine's ranks wait for the next step, however long
HEARTBEAT_SECONDS = 1.0
MAX_MISSED_HEARTBEATS = 13  # with the grace an error comes within 20 s
MAX_LATE_HEARTBEATS = 30  # between a message that was sent, and its receipt
STEP = 2 ** 32  # a count of heartbeats is below it; above it stands how far the rank is
GAVE_UP = -2 ** 62  # a last heartbeat adds this: the count is below zero then
LOOPBACK = "127.0.0.1"  # ranks on one machine must not be reachable from outside
GRACE_SECONDS = 5.0  # for what should happen by itself, before it is enforced

# A child ignores Ctrl-C, which is rank 0's business, before it does anything that takes time.
CHILD = ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
         "from nanoserve.processes import run_child; run_child()")


# ----------------------------------------------------------------- starting


def start_ranks(size: int, device: str, serve: Callable[[Ranks], None]) -> Ranks:
    """Start the other ranks, or join them under torchrun, and return rank 0.

    device: "cpu" or "cuda". serve: what a rank above 0 runs; it can be pickled. Raises `ValueError`
    for a size that can't be, `RuntimeError` if a rank doesn't come up.

    Under torchrun the ranks above 0 come here with the same script. They serve until rank 0 shuts
    down, and then their script ends: only rank 0 runs the rest of it.
    """
    if size == 1:
        return Ranks()
    if under_torchrun():  # they exist already
        ranks = _join_torchrun(size, device)
        if ranks.rank > 0:
            with closing(ranks):
                serve(ranks)
            raise SystemExit(0)
        return ranks
    check_gpus(device, size, f"tensor_parallel_size={size}")
    store, port = make_store()
    all_threads = torch.get_num_threads()
    threads = max(1, all_threads // size)
    children: list[subprocess.Popen] = []
    try:
        for rank in range(1, size):
            boot = (rank, size, port, device, threads, serve)
            children.append(_spawn(boot))
        ranks = _connect(Ranks(0, size), store, device, children, LOOPBACK)
        # Rank 0, too, takes its share: threads without a core of their own hold up all the others.
        torch.set_num_threads(threads)
        ranks.watch.threads_before = all_threads
        return ranks
    except BaseException:
        _kill(children)
        raise


def make_store() -> tuple[dist.TCPStore, int]:
    """Where the ranks find each other, and its port: 0 lets the system pick one that is free, and
    nobody can take it in between. The socket is made here because torch's own would listen to the
    whole network."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False,
                         timeout=START_TIMEOUT, master_listen_fd=listener.detach()), port


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def take_gpu(size: int, device: str) -> None:
    """Under torchrun a rank's own GPU becomes the current one, before anything runs: all of them
    would try their kernels on the first, and keep memory there."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if size > 1 and device == "cuda" and under_torchrun() and (
            local_rank < torch.cuda.device_count()):  # too few: see check_gpus
        torch.cuda.set_device(local_rank)


def check_gpus(device: str, count: int, what: str) -> None:
    """Raises `ValueError` where there are too few."""
    if device == "cuda" and (found := torch.cuda.device_count()) < count:
        raise ValueError(f"{what} needs {count} GPUs, torch sees {found}: start fewer ranks, or "
                         "set CUDA_VISIBLE_DEVICES to all of them")


def _spawn(boot: tuple) -> subprocess.Popen:
    """A fresh interpreter with the same import path (-P: without the current folder in front). Its
    standard input first brings what it is to do, and then stays open for as long as rank 0 lives.
    What it prints goes to standard error."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    child = subprocess.Popen([sys.executable, "-P", "-c", CHILD], stdin=subprocess.PIPE, stdout=2,
                             env=os.environ | {"PYTHONPATH": path})
    try:
        pickle.dump(boot, child.stdin)
        child.stdin.flush()
    except OSError:
        pass  # it has ended already, which `Watch.wait_for_all` finds out
    return child


def run_child() -> None:
    """What a started rank runs, from its first line to its end."""
    parent = os.getppid()
    rank, size, port, device, threads, serve = pickle.load(sys.stdin.buffer)
    ranks = Ranks(rank, size, parent=parent)
    torch.set_num_threads(threads)
    try:
        if ranks.lost_parent:
            _end(rank, "rank 0 died")  # and nobody would answer
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=START_TIMEOUT)
        _connect(ranks, store, device, [], LOOPBACK)
        serve(ranks)
        ranks.close()
        sys.stdout.flush()
        os._exit(0)  # nothing is left to do, and torch's own exit is slow
    except Exception as error:
        # In one line, because rank 0 mostly prints the same. Then the process ends at once: the
        # others notice closed sockets sooner than missing heartbeats.
        _end(rank, f"{type(error).__name__}: {error}")


def _end(rank: int, reason: str) -> None:
    print(f"nanoserve: rank {rank} ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _join_torchrun(size: int, device: str) -> Ranks:
    world = int(os.environ["WORLD_SIZE"])
    if size != world:
        raise ValueError(f"tensor_parallel_size times pipeline_parallel_size is {size}, but "
                         f"torchrun started {world} ranks: make the two equal")
    store, rank, _ = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
    store = dist.PrefixStore("nanoserve", store)
    if store.add(f"engines/{rank}", 1) > 1:
        raise RuntimeError("torchrun's ranks have served an engine already and are gone: make one "
                           "engine a run")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    check_gpus(device, local_size, f"torchrun with {local_size} ranks on this machine")
    ranks = Ranks(rank, size)
    ranks.local_rank = int(os.environ.get("LOCAL_RANK", rank))
    ranks.local_size = local_size
    return _connect(ranks, store, device, [])


def _connect(ranks: Ranks, store: dist.Store, device: str, children: list,
             address: str | None = None) -> Ranks:
    """Make the groups, and start to watch. Waits until all ranks are there. address: where this
    rank listens; left to gloo (the host's name, or GLOO_SOCKET_IFNAME) between machines."""
    ranks.watch = Watch(ranks, store.clone(), children)
    ranks.watch.wait_for_all()
    ranks.make_group = partial(_make_group, store, address)
    ranks.control = ranks.group = ranks.make_group("host", ranks.rank, ranks.size)
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
        ranks.group = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), ranks.rank,
                                            ranks.size, dist.ProcessGroupNCCL.Options())
    with ctrl_c_held():  # an interrupted start would leave a half-started thread
        ranks.watch.start()
    ranks.watch.store_server = store  # rank 0's own serves the others for as long as it is kept
    if device == "cuda":
        ranks.try_collectives(torch.device("cuda", ranks.local_rank))
    return ranks


def _make_group(store: dist.Store, address: str | None, name: str, rank: int,
                size: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = FOR_EVER
    options._threads = max(2, size)  # as many collectives may be begun and not ended
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address) if address
                        else dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


# ----------------------------------------------------------- living and dying


class Watch(threading.Thread):
    """Counts this rank's heartbeats, watches the others', and ends ranks when one has died.

    store: a connection of its own, because calls on a shared one may block. children: the processes
    that this rank 0 has started, rank 1 first.
    """

    def __init__(self, ranks: Ranks, store: dist.Store, children: list[subprocess.Popen]):
        super().__init__(name="nanoserve-watch", daemon=True)
        self.ranks, self.store, self.children = ranks, store, children
        self.heartbeats = dict.fromkeys(range(ranks.size), 0)  # the counts in the store
        self.missed = dict(self.heartbeats)  # beats of this rank since a count has changed
        self.lost: str | None = None
        self.stopped = threading.Event()
        self.store_server: dist.Store | None = None
        self.threads_before: int | None = None  # restored when the engine has ended

    def wait_for_all(self) -> None:
        """Wait for every rank's first heartbeat. Raises `RuntimeError` naming one that has none."""
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        self.store.add(f"heartbeat/{self.ranks.rank}", 1)
        for rank in self.heartbeats:
            while not self.store.add(f"heartbeat/{rank}", 0):
                reason = self._ended_child()
                if reason is None and time.monotonic() > deadline:
                    reason = f"rank {rank} did not start within {START_TIMEOUT}"
                if reason is not None:
                    raise RuntimeError(f"{reason}, before the engine was up")
                time.sleep(0.02)

    def run(self) -> None:
        beats = threading.Thread(target=self._exchange_heartbeats, daemon=True)
        beats.start()
        while not self.stopped.wait(HEARTBEAT_SECONDS):
            reason = self._look()
            if reason is not None and not self.stopped.is_set():
                self._end_all(reason)
                self.stopped.set()
        beats.join(GRACE_SECONDS)  # Python's end aborts a process with a thread in torch's store

    def _exchange_heartbeats(self) -> None:
        """In a thread of its own: if the store's machine loses power, these calls never return, and
        `run` must still notice that no heartbeat arrives."""
        told = 0
        try:
            while not self.stopped.wait(HEARTBEAT_SECONDS):
                done = self.ranks.done
                for rank in self.heartbeats:
                    more = 1 + STEP * (done - told) if rank == self.ranks.rank else 0
                    heartbeat = self.store.add(f"heartbeat/{rank}", more)
                    if heartbeat != self.heartbeats[rank]:
                        self.heartbeats[rank], self.missed[rank] = heartbeat, 0
                told = done
            if self.ranks.broken is not None and self.ranks.parent is None:
                self.store.add(f"heartbeat/{self.ranks.rank}", GAVE_UP)
        except RuntimeError:  # the store is rank 0's, or torchrun's, which ends with its ranks
            self.lost = "rank 0 died, and its store with it"

    def find_the_dead(self) -> None:
        """After a collective has failed: wait until it is known who died, if anybody did."""
        deadline = time.monotonic() + MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS + GRACE_SECONDS
        while self.ranks.broken is None and time.monotonic() < deadline:
            if (reason := self._ended_child()) is not None:
                self.ranks.fail(reason)
            time.sleep(0.05)

    def give_up(self) -> None:
        """This rank can't go on. Its children are ended, and its last heartbeat tells other ranks.
        Deaths from here on are not reported."""
        self.stopped.set()
        _kill(self.children)

    def close(self) -> None:
        """The engine has ended: wait for the children to exit, and kill those that don't."""
        self.stopped.set()
        if self.is_alive() and threading.current_thread() is not self:  # a finalizer runs anywhere
            self.join()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self.children:
            child.stdin.close()
            try:
                with ctrl_c_held():
                    child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(self.children)
        if self.threads_before is not None:
            torch.set_num_threads(self.threads_before)
        self.store = self.store_server = None

    def _look(self) -> str | None:
        """One beat. Returns which rank died or lost a message, if one did."""
        own, parent, awaited = self.ranks.rank, self.ranks.parent, self.ranks.awaited
        for rank, heartbeat in self.heartbeats.items():
            # Rank 0 counts all; a rank of torchrun its own, which stop if the store is silent.
            counts = own == 0 or (parent is None and rank == own)
            self.missed[rank] += 1
            if counts and self.missed[rank] > MAX_MISSED_HEARTBEATS:
                seconds = MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS
                return f"rank {0 if own else rank} died: no heartbeat for {seconds:.0f} s"
            if heartbeat < 0:
                return f"rank {rank} died: it could not go on"
            if awaited[:1] == [rank] and heartbeat >= STEP * awaited[1]:
                awaited[2] += 1
                if awaited[2] >= MAX_LATE_HEARTBEATS:
                    return f"a message from rank {rank} to rank {own} was lost"
        return self.lost or self._ended_child()

    def _ended_child(self) -> str | None:
        if self.ranks.lost_parent:
            return "rank 0 died"
        for rank, child in enumerate(self.children, 1):
            with ctrl_c_held():  # in the middle of `poll` it would leave Popen's own lock taken
                if child.poll() is not None:
                    return f"rank {rank} (process {child.pid}) died: exit code {child.returncode}"
        return None

    def _end_all(self, reason: str) -> None:
        """Rank 0 raises an error in its next call, or in the present one: killing the children
        breaks the collective in which it may wait. Without children, a rank that is busy or above 0
        ends its own process, unless it has stopped by itself within `GRACE_SECONDS`."""
        ranks = self.ranks
        ranks.fail(reason)
        if ranks.rank == 0:
            print(f"nanoserve: {reason}", file=sys.stderr, flush=True)
        if ranks.group is not ranks.control:
            ranks.group.abort()  # NCCL's collectives don't fail when a process ends
        if self.children:
            _kill(self.children)
        elif not self.stopped.wait(GRACE_SECONDS) and (ranks.busy or ranks.rank > 0):
            _end(ranks.rank, reason)


def _kill(children: list[subprocess.Popen]) -> None:
    with ctrl_c_held():
        for child in children:
            child.kill()
        for child in children:
            child.wait()
