"""`nanoserve COMMAND`: runs the command named behind it, or lists what there is.

A command is a module with a function `main(argv)`, which is imported when the command is named, so
that none of them costs the others anything. They stand in the table `COMMANDS`, and may need
packages that a plain installation does not have.
"""

import argparse
import sys
from difflib import get_close_matches
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import nanoserve
from nanoserve.__main__ import HOME, IN_PYTHON
from nanoserve_extras import COMMANDS
from nanoserve_extras.base.words import in_words

# Commands of other programs that people type, and ours.
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


def run(argv: list[str]) -> int:
    """Run a command with its arguments; returns the exit code."""
    name, *rest = argv
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
    return found.main(rest) or 0


def named(text: str) -> Any:
    """What MODULE:NAME names; the module may lie in the current folder. Raises `ValueError`."""
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
