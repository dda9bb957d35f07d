"""Tiny random checkpoints of wrappings: a text network that has a tower for images beside it.

Written by transformers' own classes, with the tokenizer of checkpoints.py. Towers are as small as
their classes let them be; nobody reads them.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from architectures import GQA, make, randomise
from checkpoints import BOS, EOS, Reference, byte_tokenizer
from helpers import write_json
from safetensors.torch import load_file, save_file

KINDS = ["sliding_attention", "full_attention"]
WINDOWS = dict(GQA, head_dim=8, sliding_window=13, layer_types=KINDS)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)
GEMMA4_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=14,
                     position_embedding_size=16)
QWEN_VISION = dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, out_hidden_size=32,
                   intermediate_size=16, patch_size=14, spatial_merge_size=1)
M_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
IMAGE = dict(image_token_id=250)


def wrap(kind: str, text: dict, vision: dict | None, **outer) -> Callable:
    """A config of this model_type; text and vision: entries of its parts."""
    parts = dict(text_config=text, **({} if vision is None else dict(vision_config=vision)))
    return lambda: transformers.AutoConfig.for_model(
        kind, **(dict(bos_token_id=BOS, eos_token_id=EOS) | parts | outer))


MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
WRAPPINGS: dict[str, Callable] = {
    "gemma3": wrap("gemma3", dict(WINDOWS, query_pre_attn_scalar=24), VISION,
                   mm_tokens_per_image=4),
    # The last layer shares the keys of those before it, each layer has an embedding of its own.
    "gemma4": wrap("gemma4", dict(
        WINDOWS, num_hidden_layers=4, layer_types=2 * KINDS, num_kv_shared_layers=2,
        global_head_dim=16, num_global_key_value_heads=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=260, final_logit_softcapping=5.0, use_double_wide_mlp=True),
        GEMMA4_VISION),
    "gemma4-experts": wrap("gemma4", dict(
        WINDOWS, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24,
        hidden_size_per_layer_input=0, global_head_dim=16), GEMMA4_VISION),
    "mistral3": wrap("mistral3", dict(GQA, model_type="mistral", head_dim=8, sliding_window=None),
                     dict(VISION, model_type="pixtral", head_dim=8)),
    "ministral3": wrap("mistral3", dict(
        GQA, model_type="ministral3", head_dim=8, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
            llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0)),
        dict(VISION, model_type="pixtral", head_dim=8)),
    "qwen2-vl": wrap("qwen2_vl", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "qwen2.5-vl": wrap("qwen2_5_vl", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "qwen3-vl": wrap("qwen3_vl", dict(GQA, head_dim=8, **M_ROPE), dict(
        QWEN_VISION, deepstack_visual_indexes=[0], num_position_embeddings=16), **IMAGE),
    "qwen3-vl-moe": wrap("qwen3_vl_moe", dict(GQA, **MOE, head_dim=8, **M_ROPE), dict(
        QWEN_VISION, deepstack_visual_indexes=[0], num_position_embeddings=16), **IMAGE),
    "glm4v": wrap("glm4v", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "smolvlm": wrap("smolvlm", dict(GQA, model_type="llama"), VISION, **IMAGE),
    "idefics3": wrap("idefics3", dict(GQA, model_type="llama"), VISION, **IMAGE),
    "internvl": wrap("internvl", dict(GQA, model_type="qwen2"), dict(
        VISION, image_size=[28, 28], patch_size=[14, 14]), **IMAGE),
    "llava": wrap("llava", dict(GQA, model_type="llama"), dict(
        VISION, model_type="clip_vision_model", projection_dim=16), image_token_index=250),
}


# Those that our own decoder runs: their text is of one of its families.
OURS = ("gemma3", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "smolvlm", "idefics3",
        "internvl", "llava")


def reference(folder: Path) -> Reference:
    """The whole network with its towers; of Gemma 3n the text alone."""
    if (folder / "text").exists():
        return Reference(folder / "text")
    return Reference(folder, auto=transformers.AutoModelForImageTextToText)


def make_wrapping(name: str, folder: Path) -> Path:
    if name == "gemma3n":
        return make_gemma3n(folder)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForImageTextToText.from_config(WRAPPINGS[name]())
    randomise(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_gemma3n(folder: Path) -> Path:
    """Its tower is another package's (timm), so that only the text can be made here: then the
    files are written as the whole one's. Text alone is in `folder / "text"`."""
    config = transformers.Gemma3nTextConfig(**dict(
        WINDOWS, num_hidden_layers=4, layer_types=2 * KINDS, num_kv_shared_layers=2,
        intermediate_size=[48] * 4, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=260, laurel_rank=4,
        altup_num_inputs=2))
    make(config, folder / "text")
    tensors = load_file(folder / "text" / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor
             for name, tensor in tensors.items()}
    named["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(4, 3, 3, 3)
    named["model.embed_vision.embedding.weight"] = torch.zeros(4, 16)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "text" / "config.json").read_text())
    (folder / "config.json").write_text("{}")
    write_json(folder / "config.json", architectures=["Gemma3nForConditionalGeneration"],
               model_type="gemma3n", eos_token_id=EOS, text_config=text,
               vision_config=dict(hidden_size=16, vocab_size=4), audio_config=dict(hidden_size=16))
    byte_tokenizer().save_pretrained(folder)
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
