"""`python -m nanoserve`: what there is, and `python -m nanoserve COMMAND`: one of its commands.

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. Without a command, `about` tells what there is.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {"about": "nanoserve.tools.about"}  # a word, and the module with its `main`


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
        if not (error.name or "").startswith("nanoserve"):
            raise
        print(f"{error.name} is not there: it belongs to an annex, which may be deleted",
              file=sys.stderr)
        return 2
    return command.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
