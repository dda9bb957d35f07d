"""`nanoserve`, or `python -m nanoserve`: what there is; with a command behind it, that command.

    nanoserve                   what this machine and this package have (tools/about.py)
    nanoserve serve [MODEL]     an HTTP server with OpenAI's endpoints (server/cli.py)

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. Commands are annexes: they may be deleted, and may need
packages that a plain installation has not.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

# A word, and the module with its `main`.
COMMANDS = {"about": "nanoserve.tools.about", "serve": "nanoserve.server.cli"}


def main(argv: list[str] | None = None) -> int:
    """Run a command with its arguments; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name, *rest = ["about"] if not argv or argv[0] in ("-h", "--help", "help") else argv
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "python -m nanoserve lists what there is"
        print(f"nanoserve has no command {name!r}: {hint}", file=sys.stderr)
        return 2
    try:
        command = import_module(COMMANDS[name])
    except ModuleNotFoundError as error:
        print(_what_is_missing(name, error), file=sys.stderr)
        return 2
    return command.main(rest) or 0


def _what_is_missing(command: str, error: ModuleNotFoundError) -> str:
    if (error.name or "").startswith("nanoserve"):
        return f"{error.name} is not there: it belongs to an annex, which may be deleted"
    room = COMMANDS[command].split(".")[1]  # an extra has its annex's name
    return (f"nanoserve {command} needs {error.name}, which is not installed: pip install "
            f"'nanoserve[{room}]', or in a clone pip install -e '.[{room}]'")


if __name__ == "__main__":
    sys.exit(main())
