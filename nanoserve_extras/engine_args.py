"""All options of `LLM(...)`: a record for each extra, and `EngineArgs`, which joins all of them.

    LLM(model, max_num_seqs=8, enable_lora=True) ──► EngineArgs ──part(EngineConfig)──► the engine
                                                        └──────part(LoRAOptions)─────► the extra

Each record is the only place of its options: their names, defaults and rules. An extra names its
record as `Options`. `EngineArgs` inherits from all of them, so the command line, a dict of options
and vLLM's `EngineArgs` know the same names without a second list. Imports no torch.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from nanoserve.config import keep_function
from nanoserve.rules import (
    Anything,
    Count,
    Flag,
    Options,
    Rule,
    Size,
    choice,
    instance,
    list_of,
    number,
    only_if,
    rule_of,
)
from nanoserve_extras.base.engine_config import EngineConfig
from nanoserve_extras.base.vllm import takes_vllms_words

Record = TypeVar("Record", bound=Options)


def check_parts(record: Options, whole: str, *parts: str) -> None:
    """Raises `ValueError` if an option of `parts` is set while `whole`, which it needs, is not."""
    for name in parts:
        value = getattr(record, name)
        if value != getattr(type(record), name) and not getattr(record, whole):
            raise ValueError(f"{name}={value!r} has no effect without {whole}: set it, or leave "
                             f"{name} out")


@dataclass(frozen=True, kw_only=True)
class ForeignOptions(Options):
    """Which implementation runs a checkpoint. model_impl: "auto" is nanoserve's own decoder if it
    supports the architecture, else transformers."""

    model_impl: Annotated[str, choice("auto", "nanoserve", "transformers")] = "auto"


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Options):
    """How weights are stored in memory. quantization: "int8" and "int4" round any checkpoint;
    "dequantize" restores the weights of a quantised one, as `None` does, too."""

    quantization: Annotated[str, Rule(
        "dequantize, int8 or int4 (a quantised checkpoint's format, fp8 say, is in its "
        "config.json: leave it out)", choice("dequantize", "int8", "int4").keep)] | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(Options):
    """How much memory copies of recurrent states take. snapshot_bytes: memory for the states at the
    ends of cached blocks; `None` is a share of the KV cache's memory."""

    snapshot_bytes: Size | None = None


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Options):
    """How many adapters are in memory, and how large. max_loras: the number of adapters in memory
    at the same time. max_lora_rank: the largest rank of an adapter."""

    enable_lora: Flag = False
    max_loras: Count = 1
    max_lora_rank: Count = 16

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "enable_lora", "max_loras", "max_lora_rank")


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(Options):
    """Whether a model pools, and how. runner: "auto" follows the checkpoint's purpose. convert: the
    kind of pooling model that a generator becomes. pooler_config: a `PoolerConfig`, or a dict of
    its fields.
    """

    runner: Annotated[str, choice("auto", "generate", "pooling")] = "auto"
    convert: Annotated[str, choice("auto", "none", "embed", "classify", "reward")] = "auto"
    pooler_config: Anything = None

    def check_generates(self) -> None:
        """Raises `ValueError` for an option that has no effect on a generator."""
        for name, default in (("convert", "auto"), ("pooler_config", None)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name}={value!r} has no effect on a generator: add "
                                 "runner='pooling', or leave it out")


@dataclass(frozen=True, kw_only=True)
class LayerPlanOptions(Options):
    """Where the layers are. layer_plan: a list gives the number of layers of each stage, a dict the
    number of layers on disk. max_wait: seconds for which a server gathers prompts, so that each
    layer is read once for all of them."""

    layer_plan: Annotated[dict | list, instance(
        (dict, list), "how many layers each rank has, as [12, 16], or those that stay on disk, as "
        "{'disk': 8}")] | None = None
    max_wait: Annotated[float, number(0, 3600)] = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "layer_plan", "max_wait")


def keep_limits(limits: Any) -> dict[str, int] | None:
    """Check the limits, in vLLM's form. Returns `None` if prompts may have no images or sounds."""
    only_if(isinstance(limits, dict), limits)
    keep = rule_of(Size).keep
    kept = {kind: keep(most) for kind, most in limits.items() if keep(most)}
    return only_if(kept.keys() <= {"image", "audio"}, limits) and kept or None


@dataclass(frozen=True, kw_only=True)
class MultimodalOptions(Options):
    """How many images and sounds a prompt may have. limit_mm_per_prompt: `None` for prompts of text
    alone. mm_processor_kwargs: override the settings in the model's folder. encoder_cache_tokens:
    the size of the cache of encoded images and sounds."""

    limit_mm_per_prompt: Annotated[dict, Rule(
        "a dict like {'image': 4} or {'audio': 1}: the most of a kind that a prompt may have "
        "(no 'video': its frames are images)", keep_limits)] | None = None
    mm_processor_kwargs: Annotated[dict, Rule(
        "a dict of arguments that the checkpoint's processor takes",
        lambda given: only_if(isinstance(given, dict), given) or None)] | None = None
    encoder_cache_tokens: Count = 8192

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "limit_mm_per_prompt", "mm_processor_kwargs", "encoder_cache_tokens")


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """How tokens are drafted, and how many. speculative_config: the method,
    `num_speculative_tokens`, and the method's own options (docs/extras.md)."""

    speculative_config: Annotated[dict, instance(
        dict, "a dict such as {'method': 'ngram', 'num_speculative_tokens': 5}")] | None = None


def keep_processor(given: Any) -> Any:
    """A function or a class, given as an object or by its name."""
    if isinstance(given, str):
        from nanoserve_extras.base.command import named  # late: that module knows all commands
        given = named(given)
    is_vllms = hasattr(given, "new_req_logits_processor") or hasattr(given, "update_state")
    return given if is_vllms else keep_function(given)


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorOptions(Options):
    """Logits processors for all requests. logits_processors: functions and classes as in
    `SamplingParams`, vLLM's classes, or the names of any of these."""

    logits_processors: Annotated[list, list_of(
        keep_processor, "a list of functions f(token_ids, logits), of classes, or of MODULE:NAME")
        ] | None = None


def keep_path(path: Any) -> str | Path:
    """Check the path of a folder, which need not exist."""
    return only_if(isinstance(path, (str, Path)) and bool(str(path).strip()), path)


@dataclass(frozen=True, kw_only=True)
class BlockStoreOptions(Options):
    """Host memory and disk for blocks that the KV cache evicts. kv_offload_bytes: host memory for
    blocks. kv_store: a folder in which blocks outlive the engine. kv_store_bytes: the limit on the
    folder's size."""

    kv_offload_bytes: Size = 0
    kv_store: Annotated[str, Rule("the path of a folder", keep_path)] | None = None
    kv_store_bytes: Count = 8 * 2 ** 30

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "kv_store", "kv_store_bytes")


def keep_new_file(path: Any) -> str | Path:
    """Check the path of a file, which need not exist, in a folder, which must."""
    is_one = isinstance(path, (str, Path)) and Path(path).suffix in (".html", ".json")
    return only_if(is_one and Path(path).parent.is_dir(), path)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """Where each step is recorded. trace: the file of the page, or of Perfetto's events."""

    trace: Annotated[str, Rule(
        "a file in a folder that exists, ending in .html (a page to look at) or .json (for "
        "Perfetto)", keep_new_file)] | None = None


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions(Options):
    """How special tokens in messages are read. split_special_tokens: as plain text."""

    split_special_tokens: Flag = False


# A record's fields come behind those of the records on its right: the engine's own are the first.
@takes_vllms_words("LLM()", "LLM")
@dataclass(frozen=True, kw_only=True)
class EngineArgs(PlainTextOptions, TraceOptions, BlockStoreOptions, LogitsProcessorOptions,
                 DraftOptions, MultimodalOptions, LayerPlanOptions, PoolingOptions,
                 LoRAOptions, RecurrentOptions, QuantizationOptions, ForeignOptions, EngineConfig):
    """Checked as its parts are: raises `ValueError`, naming the field and the remedy."""

    def part(self, record: type[Record]) -> Record:
        """The fields that belong to one record, for example `args.part(EngineConfig)`."""
        return record(**{one.name: getattr(self, one.name) for one in fields(record)})
