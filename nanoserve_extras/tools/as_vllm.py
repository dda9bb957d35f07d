"""Runs a script that was written for vLLM: `python -m nanoserve_extras.tools.as_vllm SCRIPT ...`.

    import vllm                           ─┐
    from vllm import LLM                   ├─► a stand-in of that name ─► what we have for the name
    from vllm.sampling_params import ...  ─┘                          └─► ImportError: what to use

A finder in front of Python's own (PEP 451) answers for `vllm` and for each of its submodules. All
of these stand-ins know the same names, because vLLM moves names between its modules. For a name
that is missing here `INSTEAD` has a remedy.

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
from nanoserve_extras.base.vllm import BEST, UPDATE, in_our_words, missing_method, nearest
from nanoserve_extras.engine_args import EngineArgs as EveryOption
from nanoserve_extras.server.arguments import add_engine_options, engine_options
from nanoserve_extras.tools.as_vllm_trl import ONLY_SERVER, translated

VERSION = "0.33.0"  # the vLLM whose names these are: some scripts ask
# Modules that scripts reach by `import vllm` alone, as in vllm.lora.request.LoRARequest.
INNER = set("config distributed inputs lora outputs pooling_params request sampling_params utils"
            .split())
# Names that are not in `nanoserve` itself, and where they are.
OURS, POOLING = "nanoserve_extras.tools.as_vllm", "nanoserve_extras.pooling.pooling"
HOMES = {"LLM": f"{OURS}_trl:TrainersLLM",
         "FlexibleArgumentParser": "nanoserve_extras.base.command:DashedParser",
         "PromptType": "nanoserve_extras.base.inputs:Prompt", "init_logger": "logging:getLogger"}
HOMES |= dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), f"{OURS}:CliEngineArgs")
HOMES |= dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), "nanoserve_extras.server.async_llm:AsyncLLM")
HOMES |= dict.fromkeys(("cleanup_dist_env_and_memory", "destroy_model_parallel",
                        "destroy_distributed_environment"), "gc:collect")
HOMES |= dict.fromkeys(ONLY_SERVER, f"{OURS}_trl:only_server")
HOMES |= {name: f"nanoserve_extras.logits_processors:{name}" for name in (
    "LogitsProcessor", "AdapterLogitsProcessor", "RequestLogitsProcessor", "BatchUpdate",
    "MoveDirectionality", "process_dict_updates")}
HOMES |= {"VllmConfig": "nanoserve.config:EngineConfig"}  # what a processor is made with
HOMES |= {"cached_get_tokenizer": f"{OURS}:get_tokenizer",
          "TokenizerLike": "nanoserve.detokenizer:Tokenizer"}
HOMES |= {name: f"{OURS}:{name}" for name in (
    "random_uuid", "get_tokenizer", "resolve_chat_template", "print_embeddings")}
HOMES |= {name: f"nanoserve_extras.base.metrics:{name}"
          for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")}
HOMES |= {f"{kind}RequestOutput": f"{POOLING}:PoolingRequestOutput"
          for kind in ("Embedding", "Classification", "Scoring")}
# Names, and modules, that scripts import and that are missing here: what to do instead.
INSTEAD = {
    "BeamSearchParams": BEST, "GuidedDecodingParams": "use StructuredOutputsParams",
    "KVTransferConfig": "say kv_store='folder' to LLM(...)",
    "ModelRegistry": "an architecture is a row of FAMILIES in model_config.py, see CONTRIBUTING.md",
    "envs": "options of LLM(...) say what vLLM's environment variables do",
    "ProfilerConfig": "make the engine with trace='run.html', or put torch.profiler around "
                      "generate()",
    "LateChunkingParams": "encode(pooling_task='token_embed') gives a vector for each token: take "
                          "the mean over each chunk's",
    "UsageContext": "leave it out: nothing is reported to anybody",
    "current_platform": "torch.cuda.is_available() tells whether there is a GPU",
    "get_open_port": "leave it out: ranks find each other without a port of yours",
    "init_batch_invariance": "leave it out: on CPUs a text's numbers never depend on the batch",
    "load_chat_template": "chat(chat_template=Path(file).read_text()) takes the text itself",
    "cached_tokenizer_from_config": "LLM.get_tokenizer() is the engine's",
    "entrypoints": "python -m nanoserve serve is the server, and AsyncLLM what a server of your own"
                   " is made of",
    "serial_utils": "base64.b64decode and numpy.frombuffer read what the server writes",
    "benchmarks": "python bench.py measures, and datasets of Hugging Face have prompts",
    "watermarking": "texts are written without a watermark",
    "hf_api": "use huggingface_hub",
    "model_executor": "networks are those of nanoserve/model.py, or transformers'",
    "stat_loggers": "LLM.get_metrics() has the numbers, and the server /metrics"}
INSTEAD |= dict(kv_transfer=INSTEAD["KVTransferConfig"], weight_transfer=UPDATE,
                loggers=INSTEAD["stat_loggers"])
INSTEAD |= dict.fromkeys(
    ("model_loader", "tensorizer"), "a folder's safetensors files are read, each rank its share: "
    "LLM(folder)")
INSTEAD |= dict.fromkeys(
    ("WeightTransferConfig", "WeightTransferInitRequest", "WeightTransferUpdateRequest",
     "NCCLWeightTransferEngine"), UPDATE)
INSTEAD |= dict.fromkeys(
    ("CompilationConfig", "CompilationMode", "CUDAGraphMode", "AttentionConfig"),
    "leave it out: on a GPU decode steps are recorded as CUDA graphs by themselves")
INSTEAD |= dict.fromkeys(
    ("ImageAsset", "AudioAsset", "VideoAsset", "fetch_image", "MultiModalDataBuiltins",
     "multimodal"),
    "hand over an image of PIL, a path or bytes, and a sound as an array: see docs/extras.md")


class StandIn(ModuleType):
    """A module of vLLM's."""

    def __getattr__(self, name: str):
        if name == "__version__":
            return VERSION
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(name)
        if name in HOMES:
            return resolve_name(HOMES[name])
        if name in nanoserve.__all__:
            return getattr(nanoserve, name)
        if name in INNER:
            return import_module(f"{self.__name__}.{name}")
        near = nearest(name, [*HOMES, *nanoserve.__all__])
        hint = f"did you mean {near}?" if near else "it is not here"
        for word in (name, *reversed(self.__name__.split("."))):  # or all in one of its modules
            if word in INSTEAD:
                hint = INSTEAD[word]
                break
        raise ImportError(f"nanoserve has no {self.__name__}.{name}: {hint}")


class StandInFinder:
    """Finds and makes the stand-ins."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        is_theirs = name.partition(".")[0] == "vllm"
        return ModuleSpec(name, self, is_package=True) if is_theirs else None

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
    """The template that a chat is written by; tools and the model's class choose none here."""
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
