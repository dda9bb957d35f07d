"""Tiny random wrappings: those of the table in docs/models.md, with a tokenizer, and checkpoints of
our families written as the text of one. Nobody reads their towers."""

import json
import re
import shutil
from pathlib import Path

import torch
import transformers
from checkpoints import Reference, byte_tokenizer
from safetensors.torch import load_file, save_file

from benchmarks.models import WRAPPINGS, make

REFUSED = ("llama4",)
SERVED = [name for name in [*WRAPPINGS, "gemma3n"] if name not in REFUSED]
# Those that our own decoder runs: their text is of one of its families.
OURS = ("gemma3", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "smolvlm", "idefics3",
        "internvl", "llava")


def reference(folder: Path) -> Reference:
    """The whole network with its towers; of Gemma 3n the text alone."""
    if (folder / "text").exists():
        return Reference(folder / "text")
    return Reference(folder, auto=transformers.AutoModelForImageTextToText)


def make_wrapping(name: str, folder: Path) -> Path:
    make(name, folder)
    for part in (folder, folder / "text"):
        if part.exists():
            byte_tokenizer().save_pretrained(part)
    return folder


# How files spell the text network's names: behind "model.", the head, and a tower beside them.
DIALECTS = {"language_model.model.": ("language_model.lm_head.", "vision_tower."),
            "model.language_model.": ("lm_head.", "model.visual."),
            "model.": ("lm_head.", "visual.")}
OUTSIDE = {"Qwen3ForCausalLM": ("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text"),
           "LlamaForCausalLM": ("LlavaForConditionalGeneration", "llava", "llama")}


def as_wrapping(flat: Path, folder: Path, dialect: str) -> Path:
    """A checkpoint of one of our families as the text of a wrapping, in these names."""
    shutil.copytree(flat, folder)
    head, tower = DIALECTS[dialect]
    names = {"model.": dialect, "lm_head.": head}
    tensors = {re.sub(r"^(model\.|lm_head\.)", lambda found: names[found[1]], name): tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors[f"{tower}blocks.0.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((flat / "config.json").read_text())
    outer, kind, text_kind = OUTSIDE[text.pop("architectures")[0]]
    quantised = text.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=[outer], model_type=kind, vision_config={}, quantization_config=quantised,
        text_config=text | dict(model_type=text_kind))))
    return folder
