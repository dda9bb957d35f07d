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
    """Options that have no effect without another one, the whole, must then have their defaults."""
    for name in parts:
        value = getattr(record, name)
        if value != getattr(type(record), name) and not getattr(record, whole):
            raise ValueError(f"{name}={value!r} has no effect without {whole}: set it, or leave "
                             f"{name} out")


@dataclass(frozen=True, kw_only=True)
class ForeignOptions(Options):
    """Whose network runs a checkpoint. model_impl: "auto" is nanoserve's own network if it has one,
    else transformers'."""

    model_impl: Annotated[str, choice("auto", "nanoserve", "transformers")] = "auto"


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Options):
    """How weights are stored in memory. quantization: "int8" and "int4" round any checkpoint;
    "dequantize" restores the numbers of a quantised one, which is also what `None` does."""

    quantization: Annotated[str, Rule(
        "dequantize, int8 or int4 (a quantised checkpoint's format, fp8 say, is in its "
        "config.json: leave it out)", choice("dequantize", "int8", "int4").keep)] | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(Options):
    """How much memory copies of recurrent states take. snapshot_bytes: for states behind cached
    blocks. `None`: a share of the KV cache's memory."""

    snapshot_bytes: Size | None = None


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Options):
    """How many adapters there may be at a time, and of which size. max_loras: adapters in memory at
    the same time. max_lora_rank: the largest rank of one."""

    enable_lora: Flag = False
    max_loras: Count = 1
    max_lora_rank: Count = 16

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "enable_lora", "max_loras", "max_lora_rank")


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(Options):
    """Whether a model pools, and how. runner: "auto" is what the checkpoint was made for. convert:
    what a generator becomes that pools. pooler_config: a `PoolerConfig`, or a dict of its fields.
    """

    runner: Annotated[str, choice("auto", "generate", "pooling")] = "auto"
    convert: Annotated[str, choice("auto", "none", "embed", "classify", "reward")] = "auto"
    pooler_config: Anything = None

    def check_generates(self) -> None:
        """Raises `ValueError` for what has no effect on a generator."""
        for name, default in (("convert", "auto"), ("pooler_config", None)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name}={value!r} has no effect on a generator: add "
                                 "runner='pooling', or leave it out")


@dataclass(frozen=True, kw_only=True)
class LayerPlanOptions(Options):
    """Where the layers are. layer_plan: a list has how many layers each stage has, a dict how many
    are on disk. max_wait: seconds in which a server gathers prompts, so that layers are read once
    for all of them."""

    layer_plan: Annotated[dict | list, instance(
        (dict, list), "how many layers each rank has, as [12, 16], or those that stay on disk, as "
        "{'disk': 8}")] | None = None
    max_wait: Annotated[float, number(0, 3600)] = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "layer_plan", "max_wait")


def keep_limits(limits: Any) -> dict[str, int] | None:
    """As vLLM's. `None` where a prompt may have none."""
    only_if(isinstance(limits, dict), limits)
    keep = rule_of(Size).keep
    kept = {kind: keep(most) for kind, most in limits.items() if keep(most)}
    return only_if(kept.keys() <= {"image", "audio"}, limits) and kept or None


@dataclass(frozen=True, kw_only=True)
class MultimodalOptions(Options):
    """How many images and sounds a prompt may have. limit_mm_per_prompt: `None` for prompts of text
    alone. mm_processor_kwargs: laid over what the folder's files say. encoder_cache_tokens: the
    size of the cache of what the tower made."""

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
    """Who guesses tokens, and how many. speculative_config: the method, `num_speculative_tokens`,
    and what the method takes beside them (docs/extras.md)."""

    speculative_config: Annotated[dict, instance(
        dict, "a dict such as {'method': 'ngram', 'num_speculative_tokens': 5}")] | None = None


def keep_processor(given: Any) -> Any:
    """A function or a class, itself or by its name."""
    if isinstance(given, str):
        from nanoserve_extras.base.command import named  # here: it knows all commands
        given = named(given)
    is_vllms = hasattr(given, "new_req_logits_processor") or hasattr(given, "update_state")
    return given if is_vllms else keep_function(given)


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorOptions(Options):
    """What edits the logits of all requests. logits_processors: functions and classes as those of
    `SamplingParams`, vLLM's classes, or their names."""

    logits_processors: Annotated[list, list_of(
        keep_processor, "a list of functions f(token_ids, logits), of classes, or of MODULE:NAME")
        ] | None = None


def keep_path(path: Any) -> str | Path:
    """That of a folder, which need not exist."""
    return only_if(isinstance(path, (str, Path)) and bool(str(path).strip()), path)


@dataclass(frozen=True, kw_only=True)
class BlockStoreOptions(Options):
    """How much memory and disk blocks may take that the KV cache evicts. kv_offload_bytes: host
    memory for blocks. kv_store: a folder for them, in which they outlive the engine.
    kv_store_bytes: the most that is in this folder."""

    kv_offload_bytes: Size = 0
    kv_store: Annotated[str, Rule("the path of a folder", keep_path)] | None = None
    kv_store_bytes: Count = 8 * 2 ** 30

    def __post_init__(self):
        super().__post_init__()
        check_parts(self, "kv_store", "kv_store_bytes")


def keep_new_file(path: Any) -> str | Path:
    """A file that need not exist, in a folder that does."""
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
    """What special tokens in messages are. split_special_tokens: plain text, and no tokens."""

    split_special_tokens: Flag = False


# A record's fields come behind those of the records on its right: the engine's own are the first.
@takes_vllms_words("LLM()", "LLM")
@dataclass(frozen=True, kw_only=True)
class EngineArgs(PlainTextOptions, TraceOptions, BlockStoreOptions, LogitsProcessorOptions,
                 DraftOptions, MultimodalOptions, LayerPlanOptions, PoolingOptions,
                 LoRAOptions, RecurrentOptions, QuantizationOptions, ForeignOptions, EngineConfig):
    """Checked as its parts are: raises `ValueError`, naming the field and the remedy."""

    def part(self, record: type[Record]) -> Record:
        """The fields that another record has, too: `args.part(EngineConfig)`."""
        return record(**{one.name: getattr(self, one.name) for one in fields(record)})
