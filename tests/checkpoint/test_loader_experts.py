"""Mixtures of experts: a missing, left-over or wrong expert is named."""

import json

import pytest
import torch
from loading import CPU, INDEX, load, stored_tensors, weights_of, without
from safetensors.torch import save_file

from nanoserve.checkpoint import loader
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.layers import Placement
from nanoserve.model import Decoder
from nanoserve.parallel.ranks import Ranks

QWEN_EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight".format
MIXTRAL_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight".format


@pytest.mark.parametrize("checkpoint, name, said", [
    ("qwen3-moe", QWEN_EXPERT(2, 3, "down"), None), ("qwen3-moe", QWEN_EXPERT(0, 0, "gate"), None),
    ("qwen3-moe", QWEN_EXPERT(0, 1, "up"), None),
    ("qwen3-moe", "model.layers.2.mlp.gate.weight", None),  # a router
    ("qwen3-moe", "model.layers.1.mlp.gate_proj.weight", None),  # of the layer without experts
    # Mixtral's experts are named as the others' would be.
    ("mixtral", MIXTRAL_EXPERT(1, 2, "w1"), QWEN_EXPERT(1, 2, "gate")),
    ("mixtral", MIXTRAL_EXPERT(1, 2, "w3"), QWEN_EXPERT(1, 2, "up")),
    ("mixtral", MIXTRAL_EXPERT(1, 2, "w2"), QWEN_EXPERT(1, 2, "down")),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
])
def test_a_missing_expert_is_named(copy_of, checkpoint, name, said):
    folder = copy_of(checkpoint, lambda tensors: without(tensors, name))
    with pytest.raises(ValueError, match=f"{checkpoint}: 1 tensors are missing .*: {said or name}"):
        load(folder)


@pytest.mark.parametrize("checkpoint, name", [
    ("qwen3-moe", QWEN_EXPERT(2, 4, "down")), ("mixtral", MIXTRAL_EXPERT(1, 4, "w1")),  # 5 of 4
    ("qwen3-moe", QWEN_EXPERT(1, 0, "up")),  # in the layer that has none
    ("qwen3-moe", "model.layers.1.mlp.gate.weight"),
    ("qwen3-moe", QWEN_EXPERT(0, 0, "up").replace("weight", "bias")),
    ("mixtral", MIXTRAL_EXPERT(0, 0, "w4")), ("qwen3", QWEN_EXPERT(0, 0, "up")),
    ("qwen3-moe", "model.layers.0.mlp.experts.gate_up_proj"),
])
def test_a_left_over_expert_is_named(copy_of, checkpoint, name):
    folder = copy_of(checkpoint, lambda tensors: tensors | {name: torch.zeros(4)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: the tensor {name} has no place"):
        load(folder)


@pytest.mark.parametrize("checkpoint, name, shape, expected", [
    ("qwen3-moe", QWEN_EXPERT(2, 3, "down"), (40, 64), (64, 40)),
    ("qwen3-moe", QWEN_EXPERT(2, 3, "up"), (1, 64), (40, 64)),
    ("qwen3-moe", QWEN_EXPERT(2, 3, "gate"), (96, 64), (40, 64)),
    ("qwen3-moe", "model.layers.0.mlp.gate.weight", (5, 64), (4, 64)),
    ("mixtral", MIXTRAL_EXPERT(0, 3, "w2"), (96, 64), (64, 96)),
    ("mixtral", MIXTRAL_EXPERT(0, 3, "w3"), (96,), (96, 64)),
])
def test_an_expert_of_a_wrong_shape_is_named(copy_of, checkpoint, name, shape, expected):
    folder = copy_of(checkpoint, lambda tensors: tensors | {name: torch.zeros(shape)})
    with pytest.raises(ValueError) as error:
        load(folder)
    for words in ("model.safetensors", name, str(shape), str(expected)):
        assert words in str(error.value)


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
    del tensors[names[3]]
    file = weight_map[names[3]]
    save_file({key: tensors[key] for key in tensors if weight_map[key] == file}, folder / file)
    with pytest.raises(ValueError, match="1 tensors are missing"):
        load(folder)


def test_other_ranks_experts_must_be_in_the_checkpoint_too(copy_of):
    """A rank passes over what is not its own, but not over a hole: rank 0 would serve on."""
    folder = copy_of("qwen3-moe", lambda tensors: without(tensors, QWEN_EXPERT(0, 3, "up")))
    config = ModelConfig.from_folder(folder)
    for rank in (0, 1):
        model = Decoder(config, Placement(torch.float32, CPU, Ranks(rank, 2)), expert_parallel=True)
        with pytest.raises(ValueError, match=f"missing .*: {QWEN_EXPERT(0, 3, 'up')}"):
            load_weights(model, config, folder)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_dummy_weights_are_alike_where_ranks_must_be_alike(checkpoints, expert_parallel):
    """Norms, routers, and biases behind a sum: ranks that route differently answer nonsense."""
    config = ModelConfig.from_folder(checkpoints["qwen3-moe-odd"])
    models = [Decoder(config, Placement(torch.float32, CPU, Ranks(rank, 2)), expert_parallel)
              for rank in (0, 1)]
    for model in models:
        loader.load_dummy_weights(model, seed=3)
    one, other = (weights_of(model) for model in models)
    alike = {name for name in one if one[name].shape == other[name].shape
             and torch.equal(one[name], other[name])}
    assert {name for name in one if "norm" in name or ".mlp.gate." in name} <= alike
