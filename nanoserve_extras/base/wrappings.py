"""Wrappings: checkpoints of a supported text network with towers for images or sound beside it.

An engine for text alone runs the text network in the middle. This is where its entries are:

    config.json   {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
                   "text_config": {"hidden_size": 2560, ...}, "vision_config": {...}}
    tensors       language_model.model.layers.0...        beside vision_tower...
                  model.language_model.layers.0...        beside model.visual...
                  model.layers.0...                       beside visual...

`flatten` makes one object of both levels: the entries of `text_config`, and those that stand only
outside of it. Such files rely more on defaults of the text's config class than others: Gemma 3 4B
doesn't give its number of heads. For text alone M-RoPE's three positions (time, height, width;
Qwen2-VL, Wang et al. 2024) are equal, so it is plain RoPE: Qwen2.5-VL *is* Qwen2, and Qwen3-VL *is*
Qwen3.

Invariant: only wrappings of the table are read. Others may treat text differently, and are left to
transformers. Not known here: torch, families' flags.
"""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

# By the text's model_type, which names its class in transformers: the family.
TEXTS = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM"}
# By architecture: the model_type of a text_config that names none.
WRAPPINGS = {
    "Gemma3ForConditionalGeneration": "gemma3_text", "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2", "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama", "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text", "SmolVLMForConditionalGeneration": "llama"}
# Entries that are also read outside of text_config.
OUTER = ("architectures", "dtype", "torch_dtype", "eos_token_id", "quantization_config",
         "quantization")
# The beginning of a text network's names, which is its dialect; and the names of towers.
TEXT = re.compile(r"((?:model\.)?(?:language_model|text_model)\.(?:model\.)?|model\.|)"
                  r"(?:layers\.\d|embed_tokens\.|norm\.)")
TOWER = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|embed_vision|"
                   r"multi_modal_projector|connector)\.")


def flatten(architecture: str, config: dict, overrides: dict, names: list[str]) -> dict:
    """The entries of the text network inside the wrapping that config.json describes, under the
    wrapping's name; any other config is returned as it is. names: those of the checkpoint's
    tensors, if known.

    Raises `ValueError` for a wrapping without a text part.
    """
    if architecture not in WRAPPINGS:
        return config | overrides
    inner = text_part(architecture, config)
    kind = inner.get("model_type", WRAPPINGS[architecture])
    text = inner | {k: config[k] for k in OUTER if config.get(k) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), dict) and "mrope" in rope.values():
            text[name] = {k: "default" if v == "mrope" else v for k, v in rope.items()}
    said = [c["tie_word_embeddings"] for c in (config, inner)
            if c.get("tie_word_embeddings") is not None]
    if any(re.search(r"(^|\.)lm_head\.", name) for name in names):
        said = [bool(said) and all(said)]  # the head is untied, unless all entries say it is tied
    if said or names:  # else the family's default
        text["tie_word_embeddings"] = any(said) if said else True
    nested = overrides.get("text_config") or {}
    return {k: v for k, v in (text | {"model_type": kind} | overrides | nested).items()
            if k != "text_config"}


def text_part(architecture: str, config: dict) -> dict:
    """A wrapping's `text_config`. Raises `ValueError` if there is none."""
    inner = config.get("text_config")
    if inner is None and "hidden_size" in config:  # Qwen2-VL's first files have one level
        inner = {k: v for k, v in config.items() if k not in ("vision_config", "model_type")}
    if not isinstance(inner, dict):
        raise ValueError(f"config.json: {architecture} with text_config={inner!r:.60} has no text "
                         "part: use the config.json that came with the weights")
    return inner


# --------------------------------------------------------------------- names


def stored_names(folder: Path) -> list[str]:
    """The names of a checkpoint's tensors, from its index or its files' headers. [] if they can't
    be known without reading weights (one pickle), or if the loader will raise an error."""
    try:
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (folder / index).exists():
                return [*json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]]
        single = folder / "model.safetensors"
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        return [name for file in files for name in safe_open(file, "numpy").keys()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
        return []


def check_names(folder: Path, architecture: str, has_towers: bool) -> None:
    """Raises `ValueError` for names of two dialects, and for towers that config.json lacks."""
    names = stored_names(folder)
    dialects = sorted({found[1] for name in names if (found := TEXT.match(name))})
    if len(dialects) > 1 and any("_model." in one for one in dialects):
        raise ValueError(f"{folder}: the text network's tensors have two kinds of names, "
                         f"{dialects[0] or 'no prefix'} and {dialects[1]}: keep the files of one "
                         "of them")
    tower = next(filter(TOWER.match, names), None)
    if tower is not None and not has_towers:
        raise ValueError(f"{folder}: the tensor {tower} is part of a tower for images or sound, "
                         f"and {architecture} in config.json has none: use the config.json that "
                         "came with the weights")


def is_text(name: str) -> bool:
    """Whether a tensor of a wrapping belongs to its text network or to its LM head."""
    return bool(TEXT.match(name) or re.search(r"(^|\.)(language_model|text_model|lm_head)\.", name)
                or name.startswith("score."))
