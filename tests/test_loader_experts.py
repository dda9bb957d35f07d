"""Mixtures of experts: in several files, on several ranks, made up."""

import json

import pytest
import torch
from loading import CPU, INDEX, load, stored_tensors, weights_of, without
from safetensors.torch import save_file

from nanoserve import loader
from nanoserve.layers import Experts, Placement
from nanoserve.loader import load_weights
from nanoserve.model import Decoder
from nanoserve.model_config import ModelConfig
from nanoserve.parallel import Ranks


@pytest.mark.parametrize("name", ["qwen3-moe-odd", "mixtral"])
def test_experts_in_shards_are_the_same_model(copy_of, name):
    """Real mixtures come in dozens of files, an expert's three matrices in two of them."""
    folder = copy_of(name)
    whole = load(folder)
    tensors = stored_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {key: f"model-{i % 5}.safetensors" for i, key in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({key: tensors[key] for key in names if weight_map[key] == file}, folder / file,
                  metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(dict(weight_map=weight_map)))
    for parameter, tensor in load(folder).items():
        assert torch.equal(tensor, whole[parameter]), parameter


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def test_other_ranks_experts_must_be_in_the_checkpoint_too(copy_of):
    """A rank passes over what is not its own, but not over a hole: rank 0 would serve on."""
    folder = copy_of("qwen3-moe", lambda tensors: without(tensors, EXPERT))
    config = ModelConfig.from_folder(folder)
    for rank in (0, 1):
        model = Decoder(config, Placement(torch.float32, CPU, Ranks(rank, 2), expert_parallel=True))
        with pytest.raises(ValueError, match=f"missing .*: {EXPERT}"):
            load_weights(model, loader.stored_tensors(folder), folder)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_dummy_weights_are_alike_where_ranks_must_be_alike(checkpoints, expert_parallel):
    """Norms, routers, and biases behind a sum: ranks that route differently answer nonsense."""
    config = ModelConfig.from_folder(checkpoints["qwen3-moe-odd"])
    models = [Decoder(config, Placement(torch.float32, CPU, Ranks(rank, 2),
                                        expert_parallel=expert_parallel)) for rank in (0, 1)]
    for model in models:
        loader.load_dummy_weights(model, seed=3)
    one, other = (weights_of(model) for model in models)
    alike = {name for name in one if one[name].shape == other[name].shape
             and torch.equal(one[name], other[name])}
    assert {name for name in one if "norm" in name or ".mlp.gate." in name} <= alike


def test_a_rank_without_experts_has_memory_for_none():
    """Where there are fewer than ranks. What is on "meta" no device packs."""
    experts = Experts(Ranks(0, 8).share(3), 16, 8, "silu", Placement(torch.float32, CPU))
    for _, fill in experts.tensors("experts"):
        fill(torch.ones(8, 16))
    experts.process_weights_after_loading()
    assert [(len(one), one.device) for one in experts.packed] == [(0, CPU)] * 2
