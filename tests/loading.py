"""A checkpoint's tensors, and the parameters that they become."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanoserve import LLM, SamplingParams, loader
from nanoserve.layers import Embedding, Experts, Linear, Placement
from nanoserve.loader import load_weights
from nanoserve.model import Decoder
from nanoserve.model_config import ModelConfig

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Filled(Placement):
    """Each weight is one number until it is loaded."""

    number: float = torch.nan

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        return super().weight(*shape, dtype=dtype).fill_(self.number)


def empty_model(folder: Path, number: float = torch.nan, kind: type = ModelConfig) -> Decoder:
    """The network of a folder's config.json, every weight this number until it is loaded. kind: of
    config, which reads the file."""
    return Decoder(kind.from_folder(folder), Filled(torch.float32, CPU, number=number))


def load(folder: Path, find: Callable | None = None,
         kind: type = ModelConfig) -> dict[str, torch.Tensor]:
    """Weights by name, as the loader leaves them. find: what reads the files, if not the engine."""
    model = empty_model(folder, kind=kind)
    tensors = loader.stored_tensors(folder) if find is None else find(model, folder)
    load_weights(model, tensors, folder)
    return weights_of(model)


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """By name, in a namespace that packs nothing: a packed weight is what its parameter was."""
    weights = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, Linear) or isinstance(module, Embedding) and module.tied:
            weights[f"{path}.weight"] = module.packed
        elif isinstance(module, Experts):
            weights[f"{path}.gate_up_proj"], weights[f"{path}.down_proj"] = module.packed
    return weights


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, in one piece or in shards."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()}


def greedy(llm: LLM, max_tokens=8) -> list[int]:
    """Tokens of a short prompt: an engine that gives the right ones has the right weights."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return llm.generate([list(range(20))], params, use_tqdm=False)[0].outputs[0].token_ids


def without(tensors: dict, *names: str) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name not in names}
