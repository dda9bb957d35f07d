"""The command `nanoserve`, and how a command ends: without a traceback, even by Ctrl-C.

    if __name__ == "__main__":
        with command():
            main()              imports torch, so it is called within the block

Ctrl-C, or a pipe that its reader closes (`nanoserve ... | head`), is no error: a traceback would
explain nothing. The exit status is 128 plus the signal's number, as a shell expects.

While a library is being imported, Ctrl-C ends the process at once. Some libraries catch exceptions
raised during their import, and go on half loaded or raise another error. So modules that take long
to import are imported within the `with` block; this file imports none of them.

If Ctrl-C is ignored (as in a shell's background), or has a handler of its own, it stays so. The
commands themselves, such as `nanoserve serve`, are in `nanoserve_extras`.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nanoserve import __version__

INTERRUPTED, BROKEN_PIPE = 130, 141  # a shell's status for SIGINT (2), SIGPIPE (13)
HOME = Path(__file__).parent.parent  # printed, because there may be several installations
IN_PYTHON = """\
In Python
  from nanoserve import LLM, SamplingParams
  llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
  print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


@contextmanager
def command():
    """A block for a whole command, its slow imports included. Raises `SystemExit` with a shell's
    status after Ctrl-C, or when the pipe that takes the output is closed."""
    is_default = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # a service may have been started without one
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # Python flushes again at its end, and that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C as Python does, but within an `import` statement end the process at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` begins with. Returns the exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with command():
        try:
            import nanoserve_extras
        except ModuleNotFoundError:
            print(f"nanoserve {__version__}, {HOME}\n\nNo commands: nanoserve_extras, which has "
                  f"them, is not there\n\n{IN_PYTHON}")
            return 0 if argv[0] in ("-h", "--help") else 2
        return nanoserve_extras.find("base.command.run")(argv)


if __name__ == "__main__":
    sys.exit(main())
