"""Interruptions: Ctrl-C that waits for the books, threads that take turns, orders in a queue.

Python delivers Ctrl-C between any two lines of the main thread. `ctrl_c_held` encloses what must
not be left half done: it notes the signal and delivers it at its end. A step of the engine, and the
start and the end of a rank's process, are such places.

    with ctrl_c_held():        ^C is noted
        ...                    the books change, all of them
    KeyboardInterrupt          here, if it was

Not known here: steps, requests, ranks.
"""

import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext


@contextmanager
def ctrl_c_held():
    """Let Ctrl-C wait until the block is done, so that it never meets half-changed books.

    Signals reach only the main thread; elsewhere nothing is done. Blocks may be nested: the inner
    one hands the signal on to the outer one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    seen = []
    signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(*seen[0])


class Turns:
    """Threads take turns, and *orders* are carried out between two turns.

        with turns:           this thread's turn; others wait, and each gets its own
        turns.order(work)     from anywhere: another thread, a signal's handler, a finalizer

    A handler and the garbage collector come in the middle of their own thread's turn. What they ask
    for is an order: appended to a queue, carried out at once if no turn is taken, else at its end.

    A plain lock goes to the thread that is awake: the one that gave it back a moment ago takes it
    again, hundreds of times. Here a thread that waits stands in a doorway with room for one, and
    the thread that comes back has to wait behind it.

    Confessed: Ctrl-C in the very moment of taking a turn or giving it back can leave the lock with
    the main thread, which may enter again, and no other thread.
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
        """What fails in an order is printed: the caller whose turn it was had no part in it."""
        self.depth -= 1
        try:
            errors = self._carry_out()
        finally:
            self.lock.release()
        for error in errors + self._carry_out():  # what came while the lock was given back
            traceback.print_exception(error)

    def order(self, work: Callable[[], None]) -> None:
        """Never waits. Raises what `work` raises, if it is carried out at once."""
        self.orders.append(work)
        for error in self._carry_out():
            raise error

    def is_within(self) -> bool:
        """Whether this thread is in the middle of a turn."""
        return bool(self.depth) and self._is_mine()

    def _carry_out(self) -> list[Exception]:
        """All orders, unless a thread's turn is not over: its end will see them."""
        errors: list[Exception] = []
        while self.orders and self.lock.acquire(blocking=False):
            try:
                if self.depth:  # this thread's own turn: it is a handler that asks
                    break
                with ctrl_c_held():  # what is off the queue is done, too
                    self.depth = 1  # an order's own orders come after it
                    try:
                        while self.orders:
                            try:
                                self.orders.popleft()()
                            except Exception as error:
                                errors.append(error)
                    finally:  # also when an order ends the script
                        self.depth = 0
            finally:
                self.lock.release()
        return errors

    def _is_mine(self) -> bool:
        return self.lock._is_owned()  # no public name; threading.Condition asks like this, too
