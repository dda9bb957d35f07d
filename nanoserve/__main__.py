"""`nanoserve`, or `python -m nanoserve`: runs the command named behind it, or lists what there is.

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. They stand in a table of `nanoserve_extras`, which may
be deleted, and may need packages that a plain installation does not have.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from nanoserve import __version__
from nanoserve.command import command

HOME = Path(__file__).parent.parent  # said, as there may be an installation elsewhere
IN_PYTHON = """\
In Python
  from nanoserve import LLM, SamplingParams
  llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
  print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


def commands() -> dict[str, tuple[str, str, str]]:
    """The commands by name: module, arguments, what it does."""
    try:
        import nanoserve_extras
    except ModuleNotFoundError:
        return {}
    return nanoserve_extras.COMMANDS


def listing() -> str:
    lines = [f"  nanoserve {f'{name} {arguments}':<18} {what}"
             for name, (_, arguments, what) in commands().items()]
    return "\n".join([f"nanoserve {__version__}, {HOME}", "",
                      "Commands (--help tells more)" if lines else "No commands: nanoserve_extras, "
                      "which has them, is not there", *lines, "", IN_PYTHON])


def main(argv: list[str] | None = None) -> int:
    """Run a command with its arguments; returns the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with command():
        if name in ("-h", "--help", "help"):
            print(listing())
            return 0
        if name in ("-V", "--version"):
            print(__version__)
            return 0
        if name not in (known := commands()):
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "nanoserve --help lists what there is"
            print(f"nanoserve has no command {name!r}: {hint}", file=sys.stderr)
            return 2
        return run(name, known[name][0], rest)


def run(name: str, module: str, argv: list[str]) -> int:
    """Import a command's module and call its `main`."""
    try:
        found = import_module(f"nanoserve_extras.{module}")
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "nanoserve_extras":
            why = f"{error.name} is not there: it may have been deleted"
        else:
            needed = ("'nanoserve[server]', or in a clone pip install -e '.[server]'"
                      if module.startswith("server.") else error.name)
            why = (f"nanoserve {name} needs {error.name}, which is not installed: "
                   f"pip install {needed}")
        print(why, file=sys.stderr)
        return 2
    return found.main(argv) or 0


if __name__ == "__main__":
    sys.exit(main())
