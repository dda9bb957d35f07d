"""Vectors of an engine, and of transformers, which is the oracle."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import poisoned, write_json
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from nanoserve import LLM

TOLERANCE = 1e-5
MODULES = "sentence_transformers.sentence_transformer.modules"
POOLING = ("Pooling", dict(pooling_mode="mean"), {})
FAMILY_NAMES = ["llama3.1", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "gemma2", "gemma3"]


def start(folder, **options) -> LLM:
    return poisoned(LLM(folder, **dict(num_gpu_blocks_override=64, dtype="float32", device="cpu",
                                       runner="pooling") | options))


def vectors(outputs) -> list[torch.Tensor]:
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def data(outputs) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs]


def assert_close(got, expected, where: str = "") -> None:
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE,
                                   msg=lambda text, i=i: f"{where}, prompt {i}: {text}")


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def pooled(hidden: torch.Tensor, pooling_type: str) -> torch.Tensor:
    """The specification. hidden: (tokens, hidden_size)."""
    return normalised({"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0),
                       "ALL": hidden}[pooling_type])


@torch.no_grad()
def class_logits(folder, prompts) -> list[torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def write_files(folder: Path, *parts, first: dict | None = None, **entries) -> Path:
    """sentence-transformers' files: modules.json, a folder for each part (kind, config, tensors),
    and the model's own. first: of sentence_bert_config.json."""
    listed = [dict(idx=0, name="0", path="", type=f"{MODULES}.Transformer")]
    write_json(folder / "sentence_bert_config.json", **first or {})
    for i, (kind, config, tensors) in enumerate(parts, 1):
        place = f"{i}_{kind}"
        listed.append(dict(idx=i, name=str(i), path=place, type=f"{MODULES}.{kind}"))
        (folder / place).mkdir(exist_ok=True)
        write_json(folder / place / "config.json", **config)
        if tensors:
            save_file(tensors, folder / place / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    write_json(folder / "config_sentence_transformers.json", **entries)
    return folder


def dense(inputs, outputs, function="Tanh", bias=True, seed=0, **more):
    """The part, and what it computes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs ** 0.5
    tensors = {"linear.weight": weight}
    if bias:
        tensors["linear.bias"] = torch.randn(outputs, generator=generator)
    if more.get("use_residual") and inputs != outputs:
        tensors["residual.weight"] = torch.randn(outputs, inputs, generator=generator) / 4

    def compute(x):
        y = F.linear(x, weight, tensors.get("linear.bias"))
        y = y.softmax(-1) if function == "Softmax" else getattr(torch.nn, function)()(y)
        if not more.get("use_residual"):
            return y
        return y + (x if inputs == outputs else x @ tensors["residual.weight"].T)

    config = dict(in_features=inputs, out_features=outputs, bias=bias, activation_function=(
        f"torch.nn.modules.activation.{function}"), **more)
    return ("Dense", config, tensors), compute
