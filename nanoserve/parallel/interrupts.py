"""Interruptions: Ctrl-C is held back while state changes, and threads take turns.

Python delivers Ctrl-C between any two lines of the main thread. A change that must not be left half
done stands in a `with ctrl_c_held()` block, which notes the signal and delivers it at its end. The
engine does so around its changes in a step, and around the start and end of a rank's process.

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
from contextlib import contextmanager, nullcontext


@contextmanager
def ctrl_c_held():
    """Hold Ctrl-C until the `with` block is done, so that it never interrupts it half-way.

    Signals reach only the main thread; in other threads nothing is done. `with` blocks may be
    nested: the inner one hands the signal on to the outer one. Yields a list, in which the signals
    are that were noted so far.
    """
    handler = signal.getsignal(signal.SIGINT)
    noted: list[tuple] = []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield noted
        return
    signal.signal(signal.SIGINT, lambda *args: noted.append(args))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])


@contextmanager
def quiet_end():
    """A command that ends by Ctrl-C, or because `| head` has seen enough, shows no traceback. Its
    status is the shell's: 128 and the signal's number."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # Python flushes once more when it ends, and that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


class Turns:
    """Threads take turns, and *orders* are carried out between two turns.

        with turns:           this thread's turn; others wait, and each gets its own
        turns.order(work)     from anywhere: another thread, a signal handler, a finalizer

    A signal handler or a finalizer may run in the middle of its own thread's turn. So its work is
    an order: it is put into a queue, and done at once if no turn is taken, else when the turn ends.

    A plain lock is unfair: the thread that has just released it usually takes it again. So there is
    a second lock, the doorway. A thread holds the doorway while it waits for a turn; a thread that
    wants another turn must first get the doorway.

    Known limit: Ctrl-C at the moment when the main thread takes or ends a turn can leave the lock
    with it. Then no other thread gets a turn.
    """

    def __init__(self):
        # Both reentrant: a signal's handler may come while its own thread waits in the doorway.
        self.lock, self.doorway = threading.RLock(), threading.RLock()
        self.depth = 0  # turns within turns of the thread that has the lock
        self.orders: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        with nullcontext() if self._is_mine() else self.doorway:
            self.lock.acquire()
        self.depth += 1

    def __exit__(self, *exc_info) -> None:
        """Errors of orders are printed: they are not the fault of the caller whose turn it was."""
        self.depth -= 1
        try:
            errors = self._carry_out()
        finally:
            self.lock.release()
        for _, error in errors + self._carry_out():  # what came while the lock was given back
            traceback.print_exception(error)

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
        while self.orders and self.lock.acquire(blocking=False):
            try:
                if self.depth:  # this thread's own turn: it is a handler that asks
                    break
                with ctrl_c_held():  # what is off the queue is done, too
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
