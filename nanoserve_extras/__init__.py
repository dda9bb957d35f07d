"""What can be added to the engine: a folder for each idea, and the tables of what there is.

    nanoserve: LLM(model, enable_lora=True) ──one late import──► this file ──► lora/lora.py: LoRA
               from nanoserve import LoRARequest ─┘  nanoserve serve ─┘  llm.embed(...) ─┘

An extra is handed to the engine, which knows it by the methods of `nanoserve.extra.Extra` alone.
So these tables are the one place that names all of them, and each idea is imported when somebody
asks for it. Delete the folder `nanoserve_extras`, and the engine runs without; delete one idea with
its rows here, and the others run.

Not known here: what an extra does. Road not taken: entry points, which would import every package
that is installed to find out what it adds.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# What `from nanoserve import ...` finds here: the module of each name.
NAMES = dict.fromkeys(("PoolingParams", "PoolingRequestOutput", "PoolingOutput", "EmbeddingOutput",
                       "ClassificationOutput", "ScoringOutput"), "pooling.pooling")
NAMES |= {"PoolerConfig": "pooling.pooler", "StructuredOutputsParams": "structured.structured",
          "LoRARequest": "lora.lora", "AsyncLLM": "server.async_llm"}

# `nanoserve COMMAND`: the module with its `main`, its arguments, and what the list says of it.
COMMANDS = {
    "serve": ("server.cli", "[MODEL]", "an HTTP server with OpenAI's endpoints"),
    "trace": ("trace.trace", "", "the scheduler at work, without a model"),
    "verify": ("tools.verify", "[MODEL]", "the engine's text beside transformers', in every mode"),
    "doctor": ("tools.doctor", "[MODEL]", "what this machine has, what works on it, how fast"),
    "convert": ("tools.convert", "FILE DIR",
                "a GGUF file becomes a folder that this engine serves"),
}

# Methods of `LLM`: the class that has each, and how an engine comes to have one.
METHODS = dict.fromkeys(("encode", "embed", "classify", "score"), (
    "pooling.pooling.Pooling", "runner='pooling', not runner='generate'"))
METHODS |= dict.fromkeys(("update_weights", "sleep", "wake_up"), ("new_weights.NewWeights", ""))
METHODS |= {"deploy": ("layer_plan.layer_plan.LayerPlan", "layer_plan={'disk': 0}, say")}


def find(path: str) -> Any:
    """What stands in a module of this package, "lora.lora.LoRA" say."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"nanoserve_extras.{module}"), name)


def method_of(llm: Any, name: str) -> Callable:
    """A method of METHODS, for this engine."""
    path, option = METHODS[name]
    if (extra := llm.extra(find(path))) is not None:
        return getattr(extra, name)

    def missing(*args, **options):
        raise ValueError(f"{name}() needs an engine that was made with {option}")

    return missing


def read_model(asked: Any, folder: Any) -> tuple[Any, Any, list]:
    """The options, the checkpoint's config, and the extra that makes its network, if one does."""
    from nanoserve.checkpoint.model_config import ModelConfig

    known = asked.model_impl == "nanoserve" or ModelConfig.is_known(folder, asked.hf_overrides)
    if known and asked.model_impl != "transformers" and not asked.limit_mm_per_prompt:
        return asked, ModelConfig.from_folder(folder, asked.hf_overrides), []
    network = find("foreign.foreign.ForeignNetwork")(asked, folder)
    return network.asked, network.model_config, [network]


def choose_extras(config: Any, model_config: Any) -> list:
    """The extras that the options ask for, in the order in which they are prepared and called."""
    generates = config.runner != "pooling"
    chosen = {
        "recurrent.recurrent.Recurrent": model_config.keeps_states,
        "quantization.quantization.Quantization": (config.quantization is not None
                                                   or model_config.quantization is not None),
        "lora.lora.LoRA": config.enable_lora,
        "pooling.pooling.Pooling": not generates,
        "structured.structured.StructuredOutput": generates,
        "layer_plan.layer_plan.LayerPlan": config.num_stages > 1 or config.layer_plan is not None,
        "new_weights.NewWeights": True,
        "multimodal.multimodal.Multimodal": config.limit_mm_per_prompt,
        "drafts.speculative.Speculation": config.speculative_config is not None,
        "block_store.block_store.BlockStore": (config.kv_offload_bytes
                                               or config.kv_store is not None),
        "trace.recorder.Recorder": config.trace is not None}
    return [find(path)() for path, is_chosen in chosen.items() if is_chosen]
