"""Whose turn it is: threads share an engine step by step, and Ctrl-C waits for the books.

A step reads and writes what all requests share, so one thread at a time takes a step, and whoever
waits is next (`Turns`). Three things come at any line all the same, in a thread's own turn:

    Ctrl-C                  `ctrl_c_held` lets it wait until the books agree again
    a signal's handler      may abort or shut down: `Turns.run` puts it off to the method's end
    the garbage collector   may close a stream, which aborts its requests: the same

Invariant: what `ctrl_c_held` encloses is done whole, and what `Turns.run` is asked for never finds
a method that is `in_turn` half done. Confessed: a signal's handler that adds a request or steps is
not put off; it may abort, close a stream, or shut down.

Not known here: steps, requests. Road not taken: a thread of the engine's own and queues to it,
which would do without all of this, but could not be single-stepped in a debugger.
"""

import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import wraps


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
    """A reentrant lock whose waiting threads get their turn.

    A plain lock goes to whoever is awake: the thread that gave it back a moment ago takes it again,
    hundreds of times, and one that waits wakes up too late each time. Here who waits stands in a
    doorway with room for one, and whoever comes back has to wait behind it.

    Confessed: Ctrl-C in the very moment of taking it or giving it back can leave it with the main
    thread, which may enter again, but nobody else.
    """

    def __init__(self):
        # Both reentrant: a signal's handler may come in while its own thread waits in the doorway.
        self.lock, self.doorway = threading.RLock(), threading.RLock()
        self.busy = False  # somebody is within a method that is `in_turn`
        self.put_off: deque[Callable[[], None]] = deque()  # until that has ended

    def __enter__(self) -> None:
        with nullcontext() if self._is_mine() else self.doorway:
            self.lock.acquire()

    def __exit__(self, *exc_info) -> None:
        self.lock.release()

    def _is_mine(self) -> bool:
        return self.lock._is_owned()  # no public name; threading.Condition asks like this, too

    def run(self, method: Callable[[], None]) -> None:
        """Call a method that is `in_turn`: now, or if this thread is within one, or waits for the
        end of another thread's, behind that."""
        if self.busy and (self._is_mine() or self.doorway._is_owned()):
            self.put_off.append(method)
        else:
            method()


def in_turn(method: Callable) -> Callable:
    """A method of an engine that needs its `lock`, and during which `run` lets nothing else change
    it, not even its own thread: what it is asked for meanwhile is done at the end. What fails there
    is printed and not raised, because whoever called the method has nothing to do with it."""
    @wraps(method)
    def whole(engine, *args, **options):
        with (lock := engine.lock):
            outer, lock.busy = lock.busy, True
            try:
                return method(engine, *args, **options)
            finally:
                lock.busy = outer
                if lock.put_off and not outer:
                    with ctrl_c_held():  # what is off the list is done, too
                        while lock.put_off:
                            try:
                                lock.put_off.popleft()()
                            except Exception:
                                traceback.print_exc()
    return whole


def take_all(inbox: list) -> list:
    """What is in it. The list itself stays, because others hold on to it; and so does what a stream
    that the garbage collector closes between these two lines adds to it."""
    found = inbox[:]
    del inbox[:len(found)]
    return found
