"""`nanoserve`, or `python -m nanoserve`: runs the command named behind it, or lists what there is.

    nanoserve                   what this machine and this package have (tools/about.py)
    nanoserve serve [MODEL]     an HTTP server with OpenAI's endpoints (server/cli.py)

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. Commands are annexes: they may be deleted, and may need
packages that a plain installation does not have.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from nanoserve.frontend.command import command

HOME = Path(__file__).parent.parent  # an installation elsewhere must not stand in for this one
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
    module = COMMANDS[name]
    if not HOME.joinpath(*module.split(".")).with_suffix(".py").exists():
        print(f"{module} is not there: it belongs to an annex, which may be deleted",
              file=sys.stderr)
        return 2
    with command():
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            room = module.split(".")[1]  # an extra has its annex's name
            print(f"nanoserve {name} needs {error.name}, which is not installed: pip install "
                  f"'nanoserve[{room}]', or in a clone pip install -e '.[{room}]'", file=sys.stderr)
            return 2
        return found.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
