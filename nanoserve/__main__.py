"""The command `nanoserve`, and how a command ends: in silence, also by Ctrl-C or a closed pipe.

    if __name__ == "__main__":
        with command():
            main()              which imports torch itself, late

A script whose user presses Ctrl-C, or types `| head` behind it, has nothing to explain, and so no
traceback to print. Its status is 128 and the signal's number: what a shell expects.

While a library is being imported, Ctrl-C ends the process at once. Libraries catch what is raised
in them: some go on with half of themselves, some make another error of it. So whatever takes long
to import stands within the `with` block; this file imports nothing that does.

Where Ctrl-C is ignored (a shell's background), or is somebody else's, it stays so. The commands
themselves, `nanoserve serve` say, are those of `nanoserve_extras`.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nanoserve import __version__

INTERRUPTED, BROKEN_PIPE = 130, 141  # the shell's words for SIGINT (2) and SIGPIPE (13)
HOME = Path(__file__).parent.parent  # printed, as there may be an installation elsewhere
IN_PYTHON = """\
In Python
  from nanoserve import LLM, SamplingParams
  llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
  print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


@contextmanager
def command():
    """The whole of a command, from the imports that take long. Raises `SystemExit` with the shell's
    status where it was interrupted, or where nobody reads its output any longer."""
    is_default = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as in a service that was started without one
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # Python flushes once more when it ends, and that must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: as always, but within an `import` statement the process ends here and now."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the command that is named first; returns the exit code."""
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
