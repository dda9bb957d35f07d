"""Runs a script that was written for vLLM: `python -m nanoserve_extras.tools.as_vllm SCRIPT ...`.

    import vllm                           ─┐
    from vllm import LLM                   ├─► a stand-in of that name ─► what we have for the name
    from vllm.sampling_params import ...  ─┘                          └─► ImportError: what to use

A finder in front of Python's own (PEP 451) answers for `vllm` and for the submodules that scripts
import from. All of these stand-ins know the same names, because vLLM moves names between its
modules. A name that is missing here has its row in frontend/vllm.py, as every other word of vLLM's.

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
from types import ModuleType
from typing import Any
from uuid import uuid4

from transformers import AutoTokenizer

import nanoserve
from nanoserve.checkpoint.hub import find_model
from nanoserve.checkpoint.tokenizers import Tokenizer
from nanoserve.frontend.command import command
from nanoserve.frontend.vllm import ROWS, in_our_words, nearest
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.engine_args import EngineArgs as EveryOption
from nanoserve_extras.tools.as_vllm_trl import ONLY_SERVER, translated

VERSION = "0.33.0"  # the vLLM whose names these are: some scripts ask
MODULES = {"vllm", *(f"vllm.{name}" for name in """
    sampling_params pooling_params outputs inputs config config.pooler logger utils
    utils.argparse_utils distributed engine engine.arg_utils engine.llm_engine
    engine.async_llm_engine entrypoints entrypoints.llm lora lora.request v1 v1.engine
    v1.engine.async_llm v1.engine.llm_engine v1.metrics v1.metrics.reader
    logprobs assets assets.image assets.audio assets.video multimodal multimodal.utils
    utils.network_utils distributed.weight_transfer distributed.weight_transfer.nccl_common
    distributed.weight_transfer.packed_tensor tokenizers renderers renderers.hf""".split())}
# Names that are not in `nanoserve` itself: where they are, and what they are called there.
HOMES = {"EngineArgs": ("nanoserve_extras.tools.as_vllm", "CliEngineArgs"),
         "AsyncEngineArgs": ("nanoserve_extras.tools.as_vllm", "CliEngineArgs"),
         "FlexibleArgumentParser": ("nanoserve.frontend.command", "DashedParser"),
         "AsyncLLM": ("nanoserve_extras.server.async_llm", "AsyncLLM"),
         "AsyncLLMEngine": ("nanoserve_extras.server.async_llm", "AsyncLLM"),
         "PromptType": ("nanoserve.frontend.prompts", "Prompt"),
         "SamplingParams": ("nanoserve_extras.tools.as_vllm", "ScriptParams"),
         **{name: ("nanoserve_extras.tools.as_vllm", name)
            for name in ("random_uuid", "get_tokenizer", "resolve_chat_template")},
         "init_logger": ("logging", "getLogger"),
         "cleanup_dist_env_and_memory": ("gc", "collect")}
HOMES |= {"LLM": ("nanoserve_extras.tools.as_vllm_trl", "TrainersLLM")} | {
    name: ("nanoserve_extras.tools.as_vllm_trl", "only_server") for name in ONLY_SERVER}
HOMES |= {name: ("nanoserve.frontend.metrics", name)
          for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")}
HOMES |= {f"{kind}RequestOutput": ("nanoserve_extras.pooling.pooling", "PoolingRequestOutput")
          for kind in ("Embedding", "Classification", "Scoring")}


class StandIn(ModuleType):
    """A module of vLLM's."""

    def __getattr__(self, name: str):
        if f"{self.__name__}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")
        if name == "__version__":
            return VERSION
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(name)
        if name in HOMES:
            module, ours = HOMES[name]
            return getattr(import_module(module), ours)
        if name in nanoserve.__all__:
            return getattr(nanoserve, name)
        row = ROWS.get(("import", name))
        near = nearest(name, [*HOMES, *nanoserve.__all__])
        hint = row.remedy if row else f"did you mean {near}?" if near else "it is not here"
        raise ImportError(f"nanoserve has no {self.__name__}.{name}: {hint}")


class StandInFinder:
    """Finds and makes the stand-ins."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, self, is_package=True)
        if name.startswith("vllm."):
            raise ModuleNotFoundError(f"nanoserve has no {name}: it stands in for the names of "
                                      "vllm that scripts use", name=name)
        return None

    def find_distributions(self, context: Any) -> Iterator["Package"]:
        """For who asks importlib.metadata which vLLM is installed."""
        if context.name in (None, "vllm"):
            yield Package()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are looked up when they are used."""


# ------------------------------------------ what only scripts for vLLM use


class Package(Distribution):
    """The metadata of an installed package."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str) -> Path:
        return Path(path)


class ScriptParams(nanoserve.SamplingParams):
    """`SamplingParams` in which True is the number 1, as in vLLM's."""

    def __post_init__(self):
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(said := getattr(self, name), bool):
                setattr(self, name, int(said) or None)
        super().__post_init__()


def random_uuid() -> str:
    return uuid4().hex


def get_tokenizer(name: str, *, tokenizer_mode: str = "auto", **options: Any) -> Tokenizer:
    """transformers', with its options."""
    said = in_our_words("get_tokenizer()", "LLM", dict(tokenizer_mode=tokenizer_mode), ())
    return AutoTokenizer.from_pretrained(find_model(name, weights=False), **options, **said)


def resolve_chat_template(tokenizer: Tokenizer, chat_template: str | None = None,
                          **others: Any) -> str | None:
    """The template that a chat is written by; tools and the model's class choose none here."""
    return chat_template or tokenizer.chat_template


class CliEngineArgs(EveryOption):
    """`nanoserve.EngineArgs` with the two methods that read a command line."""

    def __init__(self, **options):
        super().__init__(**translated(options))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from nanoserve_extras.server.cli import add_engine_options  # needs the server's packages
        parser.add_argument("--model", default=str(BUNDLED_MODEL))
        add_engine_options(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "CliEngineArgs":
        from nanoserve_extras.server.cli import engine_options
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
        for name in MODULES & set(sys.modules):
            del sys.modules[name]
    return 0


if __name__ == "__main__":
    with command():
        sys.exit(main())
