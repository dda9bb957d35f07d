"""Vectors of an engine, and of transformers, which is the oracle."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from helpers import poisoned, write_json
from transformers import AutoModelForSequenceClassification

from nanoserve import LLM

TOLERANCE = 1e-5
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


def write_modules(folder: Path, kinds: Iterable[str], **pooling) -> None:
    """What sentence-transformers says of a model's modules, of which the second pools so."""
    (folder / "modules.json").write_text(json.dumps([
        dict(idx=i, name=str(i), path=f"{i}_{kind}" if i else "",
             type=f"sentence_transformers.models.{kind}") for i, kind in enumerate(kinds)]))
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", word_embedding_dimension=64, **pooling)
