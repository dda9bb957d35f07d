"""Threads that share an engine take turns: no thread waits forever.

A turn is a `with` block. Ctrl-C is held from its beginning to its end. Otherwise it could come
between two lines of `__exit__`, and leave a turn that never ends.

    with turns:                        this thread's turn; others wait
        ...                            Ctrl-C is held,
        with turns.interruptible():    but not here
            ...
    turns.post(work)       from anywhere: another thread, a signal handler, a finalizer

A signal handler or a finalizer may run in the middle of its own thread's turn. So its work is
*posted*: put into a queue, and done at once if no thread has a turn, else when that turn ends.

A plain lock is unfair: the thread that has just released it usually takes it again. So there is a
second lock, the *doorway*. A thread holds the doorway while it waits for a turn; a thread that
wants another turn must first get the doorway.
"""

import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

# ---------------------------------------------------------------------- signals
# Ctrl-C is held back while state changes.
#
# Python delivers Ctrl-C between any two lines of the main thread. A change that must not be left
# half done stands in a `with ctrl_c_held()` block, which notes the signal and delivers it at the
# block's end. Turns use it, and so do the start and the end of a rank's process.
#
#     with ctrl_c_held():        Ctrl-C is noted
#         ...                    changes that belong together
#     KeyboardInterrupt          is raised here, if Ctrl-C was noted
#
# A block that has to wait uses `with ctrl_c_held() as noted`, and stops waiting when `noted` is not
# empty.
#
# Blocking the signal in the main thread (`pthread_sigmask`) would not do: another thread then gets
# the signal, and Python still runs the handler in the main thread.

class ctrl_c_held:
    """Hold Ctrl-C until the `with` block is done, so that it never interrupts the block half-way.

    `with` blocks may be nested: the inner one hands the signal on to the outer one. `as` gives the
    list of the signals noted so far. Signals reach only the main thread: in other threads nothing
    is done. This is a class and no generator with `contextmanager`, because Ctrl-C just before the
    generator's end would leave it half done.
    """

    def __init__(self):
        self.noted: list[tuple] = []
        self.handler: Any = None  # the handler before `begin`; it gets the first noted signal

    def __enter__(self) -> list[tuple]:
        self.begin()
        return self.noted

    def __exit__(self, *exc_info) -> None:
        self.end()

    def begin(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if in_main_thread() and callable(handler):
            self.handler = handler
            signal.signal(signal.SIGINT, self.note)

    def note(self, *args: Any) -> None:
        self.noted.append(args)

    def end(self) -> None:
        """Restore the handler, and hand the noted signal on to it, if there is one. As a rule, this
        raises `KeyboardInterrupt`."""
        if in_main_thread() and self.handler is not None:
            handler, self.handler = self.handler, None
            signal.signal(signal.SIGINT, handler)
            if self.noted:
                first, self.noted[:] = self.noted[0], []
                handler(*first)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


POLL = 0.1  # seconds after which a thread that waits for its turn looks for Ctrl-C


class Turns:
    """`with turns:` is a turn of this thread. Turns may be nested: an inner one never waits."""

    def __init__(self):
        # Both are reentrant: a signal handler may run while its own thread waits in the doorway.
        self.lock, self.doorway = threading.RLock(), threading.RLock()
        self.holds: list[ctrl_c_held | None] = []  # the turn's hold, then None for each inner turn
        self.posted: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        hold = None
        if not self._is_mine():
            hold = ctrl_c_held()  # not shared: a handler may take a turn while its thread waits
            hold.begin()
            while not self._take():
                hold.end()  # raises `KeyboardInterrupt` if Ctrl-C was noted meanwhile
                hold.begin()
        self.holds.append(hold)

    def _take(self) -> bool:
        """Take the lock, through the doorway. Returns False, with neither, after a while."""
        if not self.doorway.acquire(timeout=POLL):
            return False
        try:
            return self.lock.acquire(timeout=POLL)
        finally:
            self.doorway.release()

    def __exit__(self, *exc_info) -> None:
        hold = self.holds.pop()
        if hold is None:
            return
        try:
            try:
                self._do_posted()
            finally:
                self.lock.release()
            self._do_posted()  # work may have been posted while the lock was released
        finally:
            hold.end()

    def deliver_ctrl_c(self) -> None:
        """In the middle of a turn: raise `KeyboardInterrupt` now if Ctrl-C was noted."""
        hold = self.holds[0]
        if hold is not None and hold.noted:
            hold.end()
            hold.begin()

    def interruptible(self) -> "Interruptible":
        """In the middle of a turn: a `with` block in which Ctrl-C is not held. If Ctrl-C was noted
        before, it is delivered when the block begins."""
        return Interruptible(self.holds[0] or ctrl_c_held())

    def post(self, work: Callable[[], None]) -> None:
        """Do `work` now, or when the current turn ends; never waits. Raises the error of `work` if
        it is done now."""
        self.posted.append(work)
        self._do_posted(work)

    def is_within(self) -> bool:
        """Whether this thread is in the middle of a turn."""
        return bool(self.holds) and self._is_mine()

    def _do_posted(self, own: Callable | None = None) -> None:
        """Do all posted work, unless a thread has a turn: the end of that turn does it. Raises the
        error of `own`, the caller's work, and prints the errors of other work."""
        if not self.posted:  # as a rule; to hold Ctrl-C would take longer than to look
            return
        own_error = None
        with ctrl_c_held():  # work that is taken off the queue must be done
            while self.posted and not self.holds and self.lock.acquire(blocking=False):
                self.holds.append(None)  # a turn: what this work posts is done after it
                try:
                    own_error = self._do_one(own) or own_error
                finally:  # also if work raises `SystemExit`
                    self.holds.pop()
                    self.lock.release()
        if own_error is not None:
            raise own_error

    def _do_one(self, own: Callable | None) -> Exception | None:
        if not self.posted:  # another thread has just done it
            return None
        work = self.posted.popleft()
        try:
            work()
        except Exception as error:
            if work is own:
                return error
            traceback.print_exception(error)
        return None

    def _is_mine(self) -> bool:
        return self.lock._is_owned()  # not public, but threading.Condition calls it, too


class Interruptible:
    """Ends a hold, if it has begun, and begins it again after the `with` block. This is a class, as
    `ctrl_c_held` is: if a generator is left half done, Python resumes it when it is collected, much
    later."""

    def __init__(self, hold: ctrl_c_held):
        self.hold, self.was_held = hold, hold.handler is not None

    def __enter__(self) -> None:
        self.hold.end()

    def __exit__(self, *exc_info) -> None:
        if self.was_held:
            self.hold.begin()
