"""Interruptions: Ctrl-C is held back while state changes, and threads take turns.

Python delivers Ctrl-C between any two lines of the main thread. A change that must not be left half
done stands in a `with ctrl_c_held()` block, which notes the signal and delivers it at its end: so
does the start and the end of a rank's process. A thread's turn with an engine is such a block, too,
and lets Ctrl-C through only where it waits for the device.

    with ctrl_c_held():        Ctrl-C is noted
        ...                    changes that belong together
    KeyboardInterrupt          is raised here, if Ctrl-C was noted

Where such a block has to wait, `with ctrl_c_held() as noted` says whether to wait any longer.

Not known here: steps, requests, ranks.
"""

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

POLL = 0.1  # seconds after which a thread that waits for its turn looks for Ctrl-C


class Hold:
    """Ctrl-C is held from `begin` to `end`. Signals reach only the main thread: in other threads
    nothing is done."""

    def __init__(self):
        self.noted: list[tuple] = []
        self.handler: Any = None  # the one from before `begin`, which gets what was noted
        self.is_open = False  # the next signal is let through: see `Pause`

    def begin(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if in_main_thread() and callable(handler):
            self.handler = handler
            signal.signal(signal.SIGINT, self.note)

    def note(self, *args: Any) -> None:
        self.noted.append(args)
        if self.is_open:
            self.deliver(self.handler)

    def deliver(self, handler: Any) -> None:
        """Hand on what was noted, if anything was: as a rule, this raises `KeyboardInterrupt`."""
        self.is_open = False
        if self.noted:
            first, self.noted[:] = self.noted[0], []
            handler(*first)

    def end(self) -> None:
        if in_main_thread() and self.handler is not None:
            handler, self.handler = self.handler, None
            signal.signal(signal.SIGINT, handler)
            self.deliver(handler)


class Pause:
    """Within a hold: a `with` block into which Ctrl-C is let through, unless an inner hold has it.

    No generator with `contextmanager`: Ctrl-C just before its end would leave it half done, and
    Python would resume it when it collects it, much later.
    """

    def __init__(self, hold: Hold):
        self.hold = hold

    def __enter__(self) -> None:
        self.hold.is_open = in_main_thread()
        if self.hold.is_open and self.hold.noted:
            self.hold.deliver(self.hold.handler)

    def __exit__(self, *exc_info) -> None:
        self.hold.is_open = False


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def ctrl_c_held():
    """Hold Ctrl-C until the `with` block is done, so that it never interrupts it half-way.

    `with` blocks may be nested: the inner one hands the signal on to the outer one. Yields a list,
    in which the signals are that were noted so far.
    """
    hold = Hold()
    hold.begin()
    try:
        yield hold.noted
    finally:
        hold.end()


@contextmanager
def ctrl_c_kills():
    """Ctrl-C ends the process at once: for imports, because libraries may catch what is raised in
    them. Where Ctrl-C is ignored (a shell's background), or is somebody else's, it stays so."""
    if not in_main_thread() or (
            signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def quiet_end():
    """A command that ends by Ctrl-C, or because `| head` has seen enough, shows no traceback. Its
    status is the shell's: 128 and the signal's number."""
    try:
        yield
        if sys.stdout is not None:  # as in a service that was started without one
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # Python flushes once more when it ends, and that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


class Turns:
    """Threads take turns, and *orders* are carried out between two turns.

        with turns:                        this thread's turn; others wait, and each gets its own.
            ...                            Ctrl-C is held,
            with turns.interruptible():    but not here
                ...
        turns.order(work)      from anywhere: another thread, a signal handler, a finalizer

    A signal handler or a finalizer may run in the middle of its own thread's turn. So its work is
    an order: it is put into a queue, and done at once if no turn is taken, else when the turn ends.

    Ctrl-C is held from the beginning of a turn to its end, because it may come between any two
    lines of `__exit__`, too. There it once left a turn that no one could end.

    A plain lock is unfair: the thread that has just released it usually takes it again. So there is
    a second lock, the doorway. A thread holds the doorway while it waits for a turn; a thread that
    wants another turn must first get the doorway.
    """

    def __init__(self):
        # Both reentrant: a signal's handler may come while its own thread waits in the doorway.
        self.lock, self.doorway = threading.RLock(), threading.RLock()
        self.depth = 0  # turns within turns of the thread that has the lock
        self.orders: deque[Callable[[], None]] = deque()
        self.hold = Hold()

    def __enter__(self) -> None:
        if not self._is_mine():
            self.hold.begin()
            self._wait_for(self.doorway)
            try:
                self._wait_for(self.lock)
            finally:
                self.doorway.release()
        self.depth += 1

    def _wait_for(self, lock: Any) -> None:
        while not lock.acquire(timeout=POLL):
            if self.hold.noted:
                self.hold.end()
                self.hold.begin()  # its handler has raised nothing: wait on

    def __exit__(self, *exc_info) -> None:
        """Errors of orders are printed: they are not the fault of the caller whose turn it was."""
        self.depth -= 1
        if self.depth:
            return
        try:
            try:
                errors = self._carry_out()
            finally:
                self.lock.release()
            for _, error in errors + self._carry_out():  # what came while the lock was given back
                traceback.print_exception(error)
        finally:
            self.hold.end()

    def interruptible(self) -> "Pause":
        """In the middle of a turn: within this `with` block Ctrl-C is not held. One that was noted
        is delivered at once."""
        return Pause(self.hold)

    def order(self, work: Callable[[], None]) -> None:
        """Do `work` now or when the turn ends; never waits. Raises work's error if done now. Those
        of other threads' orders, if they are done here, too, are printed."""
        self.orders.append(work)
        mine = None
        for done, error in self._carry_out():
            if done is work:
                mine = error
            else:
                traceback.print_exception(error)
        if mine is not None:
            raise mine

    def is_within(self) -> bool:
        """Whether this thread is in the middle of a turn."""
        return bool(self.depth) and self._is_mine()

    def _carry_out(self) -> list[tuple[Callable, Exception]]:
        """Do all orders; returns those that failed, with their errors. If a turn is not over, its
        end does them."""
        errors: list[tuple[Callable, Exception]] = []
        if not self.orders:
            return errors
        with ctrl_c_held():  # what is off the queue is done, too
            while self.orders and self.lock.acquire(blocking=False):
                try:
                    if self.depth:  # this thread's own turn: it is a handler that asks
                        break
                    self.depth = 1  # an order's own orders come after it
                    try:
                        while self.orders:
                            work = self.orders.popleft()
                            try:
                                work()
                            except Exception as error:
                                errors.append((work, error))
                    finally:  # also when an order ends the script
                        self.depth = 0
                finally:
                    self.lock.release()
        return errors

    def _is_mine(self) -> bool:
        return self.lock._is_owned()  # no public name; threading.Condition asks like this, too
