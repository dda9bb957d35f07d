"""What can be added to the engine: a folder for each idea, and the tables of what there is.

    nanoserve: LLM(model, enable_lora=True) ──one late import──► this file ──► lora/lora.py: LoRA
               from nanoserve import LoRARequest ─┘  nanoserve serve ─┘  llm.embed(...) ─┘

An extra is handed to the engine, which knows it by the methods of `nanoserve.hooks.Extra` alone.
So these tables are the one place that names all of them, and each idea is imported when somebody
asks for it. Delete the folder `nanoserve_extras`, and the engine runs without; delete one idea with
its rows here, and the others run.

Entry points would import every package that is installed to find out what it adds.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import Any

# What `from nanoserve import ...` finds here: the module of each name.
NAMES = dict.fromkeys(("PoolingParams", "PoolingRequestOutput", "PoolingOutput", "EmbeddingOutput",
                       "ClassificationOutput", "ScoringOutput"), "pooling.pooling")
NAMES |= {"PoolerConfig": "pooling.pooler", "StructuredOutputsParams": "structured.structured",
          "LoRARequest": "lora.lora", "AsyncLLM": "server.async_llm", "EngineArgs": "engine_args",
          "LLM": "base.llm", "LLMEngine": "base.llm", "EngineConfig": "base.engine_config",
          "ModelConfig": "base.config_files",
          "SamplingParams": "base.sampling_params",
          "TextPrompt": "base.inputs", "TokensPrompt": "base.inputs"}

# `nanoserve COMMAND`: the module with its `main`, its arguments, and its line in the list.
COMMANDS = {
    "serve": ("server.cli", "[MODEL]", "an HTTP server with OpenAI's endpoints"),
    "chat": ("tools.chat", "[MODEL]", "talk to a model, here or on a server"),
    "trace": ("trace.trace", "", "the scheduler at work, without a model"),
    "verify": ("tools.verify", "[MODEL]", "the engine's text beside transformers', in every mode"),
    "doctor": ("tools.doctor", "[MODEL]", "what this machine has, what works on it, how fast"),
    "convert": ("tools.convert", "FILE DIR",
                "a GGUF file becomes a folder that this engine serves"),
}

# Methods of `LLM`: the class that implements each, and the option that adds this class.
METHODS = dict.fromkeys(("encode", "embed", "classify", "score"), (
    "pooling.pooling.Pooling", "runner='pooling', not runner='generate'"))
METHODS |= dict.fromkeys(("update_weights", "sleep", "wake_up"), ("new_weights.NewWeights", ""))
METHODS |= {"deploy": ("layer_plan.layer_plan.LayerPlan", "layer_plan={'disk': 0}, say")}


def find(path: str) -> Any:
    """Import an object of this package by its path, for example "lora.lora.LoRA"."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"nanoserve_extras.{module}"), name)


def method_of(llm: Any, name: str) -> Callable:
    """Return the method of METHODS with this name, bound to this engine."""
    path, option = METHODS[name]
    if (extra := llm.extra(find(path))) is not None:
        method = getattr(extra, name)

        @wraps(method)
        def called(*args, **options):
            return method(*args, **options)

        called.engine = llm  # the extra has a weak reference only: keeps LLM(...).embed("a") alive
        return called

    def missing(*args, **options):
        raise ValueError(f"{name}() needs an engine that was made with {option}")

    return missing


def choose(args: Any, folder: Any, given: Iterable[Any] = ()) -> tuple[Any, Any, list]:
    """Make the extras that the options and the checkpoint need.

    args: an `EngineArgs`. given: extras that the user passed. Returns the engine's own options,
    the checkpoint's `ModelConfig`, and all extras in the order in which they are prepared and
    called. Raises `ValueError` for a checkpoint that can't be read, and for an option that would
    have no effect, because the user passed its extra with another value.
    """
    from nanoserve_extras.base.engine_config import EngineConfig
    from nanoserve_extras.base.facts import Fact

    args, model_config, network = read_model(args, folder)
    given, extras = list(given), []
    pools = args.runner == "pooling" or args.runner == "auto" and model_config.pools or any(
        Fact.GENERATES in one.ends for one in given)
    if not pools:
        args.check_generates()
    if isinstance(args.layer_plan, list) and args.pipeline_parallel_size == 1:
        args = replace(args, pipeline_parallel_size=len(args.layer_plan))
    chosen = {
        "base.weight_files.WeightFiles": True,
        "drafts.speculative.Speculation": args.speculative_config is not None,
        "recurrent.recurrent.Recurrent": model_config.keeps_states,
        "quantization.quantization.Quantization": (args.quantization is not None
                                                   or model_config.quantization is not None),
        "lora.lora.LoRA": args.enable_lora,
        "pooling.pooling.Pooling": pools,
        "structured.structured.StructuredOutput": not pools,
        "thinking.ThinkingBudget": not pools,
        "logits_processors.LogitsProcessors": bool(args.logits_processors),
        "trace.recorder.Recorder": args.trace is not None,
        "layer_plan.layer_plan.LayerPlan": (args.pipeline_parallel_size > 1
                                            or args.layer_plan is not None),
        "new_weights.NewWeights": True,
        "multimodal.multimodal.Multimodal": args.limit_mm_per_prompt is not None,
        "block_store.block_store.BlockStore": bool(args.kv_offload_bytes) or bool(args.kv_store),
        "base.plain_texts.SplitSpecialTokens": args.split_special_tokens}
    for kind in [find(path) for path, is_chosen in chosen.items() if is_chosen]:
        asked, mine = vars(args.part(kind.Options)), [x for x in given if isinstance(x, kind)]
        if not mine:
            extras.append(kind(**asked))
        for one in mine:
            for name, value in asked.items():
                if value not in (getattr(one.options, name), getattr(kind.Options(), name)):
                    raise ValueError(f"{name}={value!r} stands beside extras=[...], in which is "
                                     f"{kind.__name__}: give it to that one")
    # An extra that the user passed comes at its option's place in the order: some extras read what
    # earlier ones have prepared.
    places = {f"{__name__}.{path}": i for i, path in enumerate(chosen)}
    return args.part(EngineConfig), model_config, network + sorted(extras + given, key=lambda one: (
        places.get(f"{type(one).__module__}.{type(one).__qualname__}", len(places))))


def read_model(args: Any, folder: Any) -> tuple[Any, Any, list]:
    """The options, the checkpoint's config, and the extra that builds its network, if any."""
    from nanoserve_extras.base.config_files import ModelConfig

    known = args.model_impl == "nanoserve" or ModelConfig.is_known(folder, args.hf_overrides)
    if known and args.model_impl != "transformers" and not args.limit_mm_per_prompt:
        return args, ModelConfig.from_folder(folder, args.hf_overrides), []
    network = find("foreign.foreign.ForeignNetwork")(args, folder)
    return network.args, network.model_config, [network]
