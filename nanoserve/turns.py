"""Threads that share an engine take turns, and each gets its own.

A turn is a `with` block. Ctrl-C is held from its beginning to its end, because it may come between
any two lines of `__exit__`, too. There it once left a turn that no one could end.

    with turns:                        this thread's turn; others wait
        ...                            Ctrl-C is held,
        with turns.interruptible():    but not here
            ...
    turns.post(work)       from anywhere: another thread, a signal handler, a finalizer

A signal handler or a finalizer may run in the middle of its own thread's turn. So its work is
*posted*: put into a queue, and done at once if no turn is taken, else when the turn ends.

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
# half done stands in a `with ctrl_c_held()` block, which notes the signal and delivers it at its
# end: so does the start and the end of a rank's process.
#
#     with ctrl_c_held():        Ctrl-C is noted
#         ...                    changes that belong together
#     KeyboardInterrupt          is raised here, if Ctrl-C was noted
#
# Where such a block has to wait, `with ctrl_c_held() as noted` says whether to wait any longer. A
# thread's turn with an engine holds Ctrl-C, too (turns.py).
#
# A mask of the main thread (`pthread_sigmask`) would not do: another thread then gets the signal,
# and Python still runs its handler in the main thread.

class ctrl_c_held:
    """Hold Ctrl-C until the `with` block is done, so that it never interrupts it half-way.

    `with` blocks may be nested: the inner one hands the signal on to the outer one. `as` gives a
    list, in which the signals are that were noted so far. Signals reach only the main thread: in
    other threads nothing is done. A class, and no generator with `contextmanager`, which Ctrl-C
    just before its end would leave half done.
    """

    def __init__(self):
        self.noted: list[tuple] = []
        self.handler: Any = None  # the one from before `begin`; it gets the first that was noted

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
        """Hand on what was noted, if anything was: as a rule, this raises `KeyboardInterrupt`."""
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
    """`with turns:` is a turn of this thread. It may be nested: once more inside is free."""

    def __init__(self):
        # Both reentrant: a signal's handler may come while its own thread waits in the doorway.
        self.lock, self.doorway = threading.RLock(), threading.RLock()
        self.holds: list[ctrl_c_held | None] = []  # the turn's, then None for each turn within it
        self.posted: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        hold = None
        if not self._is_mine():
            hold = ctrl_c_held()  # a new one: a handler may take a turn while its thread waits
            hold.begin()
            while not self._take(hold.noted):
                hold.end()
                hold.begin()  # Ctrl-C has raised nothing: wait on
        self.holds.append(hold)

    def _take(self, noted: list) -> bool:
        """Take the lock, through the doorway. False, with neither, if Ctrl-C is noted meanwhile."""
        while not self.doorway.acquire(timeout=POLL):
            if noted:
                return False
        try:
            while not self.lock.acquire(timeout=POLL):
                if noted:
                    return False
            return True
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
            self._do_posted()  # some may have been posted while the lock was given back
        finally:
            hold.end()

    def deliver_ctrl_c(self) -> None:
        """In the middle of a turn: raise `KeyboardInterrupt` now if Ctrl-C was noted."""
        hold = self.holds[0]
        if hold is not None and hold.noted:
            hold.end()
            hold.begin()

    def interruptible(self) -> "Interruptible":
        """In the middle of a turn: within this `with` block Ctrl-C is not held. One that was noted
        is delivered at once."""
        return Interruptible(self.holds[0] or ctrl_c_held())

    def post(self, work: Callable[[], None]) -> None:
        """Do `work` now or when the turn ends; never waits. Raises work's error if done now."""
        self.posted.append(work)
        self._do_posted(work)

    def is_within(self) -> bool:
        """Whether this thread is in the middle of a turn."""
        return bool(self.holds) and self._is_mine()

    def _do_posted(self, own: Callable | None = None) -> None:
        """Do all that is posted; if a turn is not over, its end does it. Raises the error of `own`,
        and prints those of other work: the caller is not at fault."""
        if not self.posted:
            return
        errors: list[Exception] = []
        with ctrl_c_held():  # work that is off the queue is done, too
            while self.posted and self.lock.acquire(blocking=False):
                try:
                    if self.holds:  # this thread's own turn: it is a handler that asks
                        break
                    errors += self._empty_queue(own)
                finally:
                    self.lock.release()
        if errors:
            raise errors[0]

    def _empty_queue(self, own: Callable | None) -> list[Exception]:
        """In a turn of its own, so that work that is posted by work comes after it. Returns the
        error of `own`, if it has one."""
        errors: list[Exception] = []
        self.holds.append(None)
        try:
            while self.posted:
                work = self.posted.popleft()
                try:
                    work()
                except Exception as error:
                    if work is own:
                        errors.append(error)
                    else:
                        traceback.print_exception(error)
        finally:  # also when work ends the script
            self.holds.pop()
        return errors

    def _is_mine(self) -> bool:
        return self.lock._is_owned()  # no public name; threading.Condition asks like this, too


class Interruptible:
    """Ends a hold, if it has begun, and begins it again. A class, as `ctrl_c_held` is: Python would
    resume a generator that is left half done when it collects it, much later."""

    def __init__(self, hold: ctrl_c_held):
        self.hold, self.was_held = hold, hold.handler is not None

    def __enter__(self) -> None:
        self.hold.end()

    def __exit__(self, *exc_info) -> None:
        if self.was_held:
            self.hold.begin()
