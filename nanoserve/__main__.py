"""`nanoserve`, or `python -m nanoserve`: runs the command named behind it, or lists what there is.

    nanoserve                   the list
    nanoserve serve [MODEL]     an HTTP server with OpenAI's endpoints (server/cli.py)
    nanoserve trace             the scheduler at work, without a model (tools/trace.py)
    nanoserve verify [MODEL]    the engine's text beside transformers' (tools/verify.py)
    nanoserve doctor [MODEL]    what this machine has, and what works on it (tools/doctor.py)
    nanoserve convert FILE DIR  a GGUF file becomes a folder that this engine serves

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. Commands are annexes: they may be deleted, and may need
packages that a plain installation does not have.
"""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from nanoserve import __version__
from nanoserve.frontend.command import command

HOME = Path(__file__).parent.parent  # said, as there may be an installation elsewhere
# A word, and the module with its `main`.
COMMANDS = {"serve": "nanoserve.server.cli", "trace": "nanoserve.tools.trace",
            "verify": "nanoserve.tools.verify", "doctor": "nanoserve.tools.doctor",
            "convert": "nanoserve.tools.convert"}
LIST = f"""\
nanoserve {__version__}, {HOME}

Commands (--help tells more)
  nanoserve serve [MODEL]    an HTTP server with OpenAI's endpoints
  nanoserve trace            the scheduler at work, without a model
  nanoserve verify [MODEL]   the engine's text beside transformers', in every mode
  nanoserve doctor [MODEL]   what this machine has, what works on it, and how fast
  nanoserve convert FILE DIR a GGUF file becomes a folder that this engine serves

In Python
  from nanoserve import LLM, SamplingParams
  llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
  print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


def main(argv: list[str] | None = None) -> int:
    """Run a command with its arguments; returns the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with command():
        if name in ("-h", "--help", "help"):
            print(LIST)
            return 0
        if name in ("-V", "--version"):
            print(__version__)
            return 0
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "nanoserve --help lists what there is"
            print(f"nanoserve has no command {name!r}: {hint}", file=sys.stderr)
            return 2
        return run(name, rest)


def run(name: str, argv: list[str]) -> int:
    """Import a command's module and call its `main`."""
    module = COMMANDS[name]
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "nanoserve":
            why = f"{error.name} is not there: it belongs to an annexe, which may be deleted"
        else:
            needed = ("'nanoserve[server]', or in a clone pip install -e '.[server]'"
                      if ".server." in module else error.name)
            why = (f"nanoserve {name} needs {error.name}, which is not installed: "
                   f"pip install {needed}")
        print(why, file=sys.stderr)
        return 2
    return found.main(argv) or 0


if __name__ == "__main__":
    sys.exit(main())
