"""`nanoserve COMMAND`: runs a command, or lists all of them.

A command is a module with a function `main(argv)`. It is imported only when the command is run, so
it may need packages that the others don't. The table `COMMANDS` lists all commands.

A command ends without a traceback, even by Ctrl-C:

    if __name__ == "__main__":
        with command():
            main()              imports torch, so it is called within the block

Ctrl-C and a pipe closed by its reader (`nanoserve ... | head`) are no errors, and a traceback would
explain nothing. The exit status is 128 plus the signal's number, as a shell expects.

While a library is being imported, Ctrl-C ends the process at once. Some libraries catch exceptions
raised during their import, and go on half loaded or raise another error. So modules that take long
to import are imported within the `with` block; this file imports none of them.

If Ctrl-C is ignored (as in a shell's background jobs), or has a custom handler, this is kept.
"""

import argparse
import os
import signal
import sys
import threading
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import nanoserve
from nanoserve.__main__ import HOME, IN_PYTHON
from nanoserve_extras import COMMANDS
from nanoserve_extras.base.words import in_words

INTERRUPTED, BROKEN_PIPE = 130, 141  # a shell's status for SIGINT (2), SIGPIPE (13)

# Commands of other programs that people type, and hints to ours.
OTHERS = {
    "pull": "nothing is fetched in advance: a hub id is when it is first used, by nanoserve serve "
            "MODEL or nanoserve chat MODEL (HF_HOME is where it is kept)",
    "run": "nanoserve chat MODEL talks to one, nanoserve serve MODEL serves it",
    "bench": "python bench.py measures the throughput, in a clone",
    "list": "models are folders, hub ids and GGUF files: there is no list of them",
    "ps": "a server tells what it has at /v1/models, and what it does at /",
    "rm": "delete hub models in HF_HOME (~/.cache/huggingface), converted ones in "
          "~/.cache/nanoserve",
    "show": "nanoserve verify MODEL tells how it would be run"}


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


def run(argv: list[str]) -> int:
    """Run a command with its arguments; returns the exit code."""
    with command():
        return _run(*argv)


def _run(name: str, *rest: str) -> int:
    if name in ("-h", "--help", "help"):
        print(listing())
        return 0
    if name in ("-V", "--version"):
        print(nanoserve.__version__)
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = OTHERS.get(name) or (f"did you mean {near[0]}?" if near else
                                    "nanoserve --help lists what there is")
        print(f"nanoserve has no command {name!r}: {hint}", file=sys.stderr)
        return 2
    module = COMMANDS[name][0]
    try:
        found = import_module(f"nanoserve_extras.{module}")
    except ModuleNotFoundError as error:
        print(_lacking(name, module, str(error.name)), file=sys.stderr)
        return 2
    return found.main([*rest]) or 0


def named(text: str) -> Any:
    """Import the object that MODULE:NAME names. The module may lie in the current folder. Raises
    `ValueError`."""
    if "" not in sys.path:
        sys.path.append("")
    with in_words(f"{text} (MODULE:NAME)", ImportError, AttributeError, ValueError):
        return resolve_name(text)


def listing() -> str:
    lines = [f"  nanoserve {f'{name} {arguments}':<18} {what}"
             for name, (_, arguments, what) in COMMANDS.items()]
    head = f"nanoserve {nanoserve.__version__}, {HOME}"
    return "\n".join([head, "", "Commands (--help tells more)", *lines, "", IN_PYTHON])


def _lacking(name: str, module: str, missing: str) -> str:
    if missing.split(".")[0] == "nanoserve_extras":
        return f"{missing} is not there: it may have been deleted"
    needed = ("'nanoserve[server]', or in a clone pip install -e '.[server]'"
              if module.startswith("server.") else missing)
    return f"nanoserve {name} needs {missing}, which is not installed: pip install {needed}"


class DashedParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len, as vLLM's does."""

    def parse_known_args(self, args=None, namespace=None):
        words = [word.partition("=") for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args([
            (name.replace("_", "-") if name.startswith("--") else name) + equals + value
            for name, equals, value in words], namespace)
