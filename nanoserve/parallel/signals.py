"""Ctrl-C is held back while state changes.

Python delivers Ctrl-C between any two lines of the main thread. A change that must not be left half
done stands in a `with ctrl_c_held()` block, which notes the signal and delivers it at its end: so
does the start and the end of a rank's process.

    with ctrl_c_held():        Ctrl-C is noted
        ...                    changes that belong together
    KeyboardInterrupt          is raised here, if Ctrl-C was noted

Where such a block has to wait, `with ctrl_c_held() as noted` says whether to wait any longer. A
thread's turn with an engine holds Ctrl-C, too (parallel/turns.py).

A mask of the main thread (`pthread_sigmask`) would not do: another thread then gets the signal, and
Python still runs its handler in the main thread.
"""

import signal
import threading
from typing import Any


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
