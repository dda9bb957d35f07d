"""Runs a script that was written for vLLM: `python -m nanoserve_extras.tools.as_vllm SCRIPT ...`.

    import vllm                           ─┐
    from vllm import LLM                   ├─► a stand-in of that name ─► what we have for the name
    from vllm.sampling_params import ...  ─┘                          └─► ImportError: what to use

A finder in front of Python's own (PEP 451) answers for `vllm` and for each of its submodules. All
of these stand-ins know the same names, because vLLM moves names between its modules. Where a name
is, or what to do instead, stands in base/vllm.py.

Invariant: nothing is replaced by something that does less: a stand-in has a name only if what it
stands for is here. Known limit: what a script reads of vLLM's insides is not there. The script's
text is not patched, which would change its lines.
"""

import argparse
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from uuid import uuid4

from transformers import AutoTokenizer

import nanoserve
from nanoserve.detokenizer import Tokenizer
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.command import command
from nanoserve_extras.base.vllm import ROWS, in_our_words, missing_method, nearest
from nanoserve_extras.engine_args import EngineArgs as EveryOption
from nanoserve_extras.server.arguments import add_engine_options, engine_options
from nanoserve_extras.tools.as_vllm_trl import translated

VERSION = "0.33.0"  # the vLLM whose names these are: some scripts ask
# Modules that scripts reach by `import vllm` alone, as in vllm.lora.request.LoRARequest.
INNER = set("config distributed inputs lora outputs pooling_params request sampling_params utils"
            .split())
HERE = [name for (taker, name), row in ROWS.items() if taker == "import" and row.ours]


class StandIn(ModuleType):
    """A module of vLLM's."""

    def __getattr__(self, name: str):
        if name == "__version__":
            return VERSION
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(name)
        row = ROWS.get(("import", name))
        if row is not None and row.ours:
            return resolve_name(row.ours + name * row.ours.endswith(":"))
        if name in nanoserve.__all__:
            return getattr(nanoserve, name)
        if name in INNER:
            return import_module(f"{self.__name__}.{name}")
        words = [name, *reversed(self.__name__.split("."))]  # or all in one of its modules
        rows = [row for word in words if (row := ROWS.get(("import", word))) and row.remedy]
        near = nearest(name, [*HERE, *nanoserve.__all__])
        hint = f"did you mean {near}?" if near else "it is not here"
        hint = rows[0].remedy if rows else hint
        raise ImportError(f"nanoserve has no {self.__name__}.{name}: {hint}")


class StandInFinder:
    """Finds and makes the stand-ins."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        is_theirs = name.partition(".")[0] == "vllm"
        return ModuleSpec(name, self, is_package=True) if is_theirs else None

    def find_distributions(self, context: Any) -> Iterator["Package"]:
        """Answers importlib.metadata's question which vLLM is installed."""
        if context.name in (None, "vllm"):
            yield Package()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""


# ------------------------------------------ what only scripts for vLLM use


class Package(Distribution):
    """The metadata of an installed package."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str) -> Path:
        return Path(path)


def random_uuid() -> str:
    return uuid4().hex


def get_tokenizer(name: str, *, tokenizer_mode: str = "auto", **options: Any) -> Tokenizer:
    """transformers', with its options."""
    said = in_our_words("get_tokenizer()", "LLM", dict(tokenizer_mode=tokenizer_mode), ())
    return AutoTokenizer.from_pretrained(find_folder(name, weights=False), **options, **said)


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    shown = f"{str(embeds[:4])[:-1]}, ...]" if len(embeds) > 4 else embeds
    print(f"{prefix}: {shown} (size={len(embeds)})")


def resolve_chat_template(tokenizer: Tokenizer, chat_template: str | None = None,
                          **others: Any) -> str | None:
    """The chat template. Here tools and the model's class don't affect the choice."""
    return chat_template or tokenizer.chat_template


class CliEngineArgs(EveryOption):
    """`nanoserve.EngineArgs` with the two methods that read a command line."""

    def __init__(self, model: str = str(BUNDLED_MODEL), **options):
        super().__init__(model=model, **translated(model, options))

    def __getattr__(self, name: str):
        raise AttributeError(missing_method(name, dir(type(self)), "EngineArgs"))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model", default=str(BUNDLED_MODEL))
        add_engine_options(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "CliEngineArgs":
        return cls(model=args.model, **engine_options(args))


def main(argv: list[str] | None = None) -> int:
    """Run the script that is named, with the arguments behind it."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or not Path(argv[0]).is_file():
        print("usage: python -m nanoserve_extras.tools.as_vllm SCRIPT [ARGUMENT ...], where "
              "SCRIPT is a Python file", file=sys.stderr)
        return 2
    finder, before = StandInFinder(), (sys.argv, sys.path[:])
    sys.meta_path.insert(0, finder)
    sys.argv, sys.path[:0] = argv, [str(Path(argv[0]).resolve().parent)]
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        sys.meta_path.remove(finder)
        sys.argv, sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    return 0


if __name__ == "__main__":
    with command():
        sys.exit(main())
