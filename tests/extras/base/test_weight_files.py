"""Weights in `pytorch_model.bin`: as good as safetensors, and no file executes anything."""

import os
import pickle
import re

import pytest
import torch
from helpers import write_json
from loading import INDEX, greedy, stored_tensors
from loading import load as load_by
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nanoserve import LLM
from nanoserve_extras.base import weight_files
from nanoserve_extras.base.config_files import ModelConfig


def load(folder):
    return load_by(folder, weight_files.find_weights, ModelConfig)


def pickled(folder, files: dict[str, dict] | None = None, **options):
    """The folder's weights as pickles: in one, or as `files` share them out."""
    tensors = stored_tensors(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for name, some in (files or {"pytorch_model.bin": tensors}).items():
        torch.save(some, folder / name, **options)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_the_same_model_as_safetensors(copy_of, checkpoints, zipped):
    """Also one that was written before torch wrote archives (1.6)."""
    folder = pickled(copy_of("qwen3"), _use_new_zipfile_serialization=zipped)
    loaded = load(folder)
    for name, tensor in load(checkpoints["qwen3"]).items():
        assert torch.equal(tensor, loaded[name]), name


def test_a_pickle_is_mapped_and_not_read(copy_of, monkeypatch):
    asked, torch_load = [], torch.load

    def watched(*args, **options):
        asked.append(options)
        return torch_load(*args, **options)

    monkeypatch.setattr(torch, "load", watched)
    load(pickled(copy_of("qwen3")))
    assert asked == [dict(mmap=True, weights_only=True)]


@pytest.mark.parametrize("index", [True, False])
def test_shards(copy_of, references, index):
    folder = copy_of("qwen3")
    tensors = stored_tensors(folder)
    names, half = sorted(tensors), len(tensors) // 2
    files = {f"pytorch_model-0000{i + 1}-of-00002.bin": {name: tensors[name] for name in some}
             for i, some in enumerate((names[:half], names[half:]))}
    pickled(folder, files)
    if index:
        (folder / "pytorch_model.bin.index.json").write_text("{}")
        write_json(folder / "pytorch_model.bin.index.json", weight_map={
            name: file for file, some in files.items() for name in some})
    with LLM(folder, num_gpu_blocks_override=16) as llm:
        assert greedy(llm) == references("qwen3", list(range(20)), 8)[0]


def test_a_tied_head_that_is_stored_again(copy_of, references):
    """A pickle names embedding and head, which are the same memory. Where they are not, it is an
    error: one of them was trained by itself, and would be lost."""
    folder = copy_of("qwen3-tied")
    tensors = stored_tensors(folder)
    embedding = tensors["model.embed_tokens.weight"]
    head = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    pickled(folder, {"pytorch_model.bin": head | {"lm_head.weight": embedding}})
    with LLM(folder, num_gpu_blocks_override=16) as llm:  # the first of the two by its name
        assert greedy(llm) == references("qwen3-tied", list(range(20)), 8)[0]
    pickled(folder, {"pytorch_model.bin": tensors | {"lm_head.weight": embedding + 1}})
    with pytest.raises(ValueError, match="lm_head.weight.*hf_overrides"):
        load(folder)


def test_each_tensor_is_still_wanted_exactly_once(copy_of):
    folder = copy_of("qwen3")
    tensors = stored_tensors(folder)
    pickled(folder, {"pytorch_model.bin": tensors, "pytorch_model-2.bin": {}})
    load(folder)  # the one file that everybody knows; what lies beside it is somebody else's
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-1.bin")
    torch.save({"model.norm.weight": torch.zeros(64)}, folder / "pytorch_model-2.bin")
    with pytest.raises(ValueError, match="pytorch_model-2.bin.*model.norm.weight.*twice"):
        load(folder)


def test_safetensors_are_preferred_and_can_be_insisted_on(copy_of, references):
    folder = copy_of("qwen3")
    (folder / "pytorch_model.bin").write_bytes(b"nothing")
    load(folder)
    with pytest.raises(ValueError, match="pytorch_model.bin can't be read"):
        LLM(folder, load_format="pt")
    pickled(folder)
    with pytest.raises(ValueError, match=r"qwen3.*\*.safetensors"):
        LLM(folder, load_format="safetensors")
    with LLM(folder, load_format="pt", num_gpu_blocks_override=16) as llm:
        assert greedy(llm) == references("qwen3", list(range(20)), 8)[0]


class Program:
    """What a pickle can hold: a call of anything, here of a command of the shell."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["archive", "before archives", "plain"])
def test_a_file_that_wants_to_execute_something_is_refused(copy_of, tmp_path, how):
    folder, mark = pickled(copy_of("qwen3")), tmp_path / "executed"
    file, content = folder / "pytorch_model.bin", {"model.norm.weight": Program(mark)}
    if how == "plain":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how == "archive")
    with pytest.raises(ValueError, match="pytorch_model.bin .*system.*safetensors"):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("content", [
    [1, 2], {"state_dict": {"a": torch.zeros(2)}}, {5: torch.zeros(2)}, torch.zeros(2)], ids=str)
def test_another_programs_pickle_is_refused(copy_of, content):
    folder = pickled(copy_of("qwen3"), {"pytorch_model.bin": content})
    with pytest.raises(ValueError, match="must hold a dict"):
        load(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_half_a_pickle_is_named_wherever_it_was_cut(tmp_path, zipped):
    """torch has a dozen errors for it, IndexError and struct.error among them."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 1 if len(whole) < 500 else 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="pytorch_model.bin (can't be read, truncated|asks)"):
            list(weight_files.stored_tensors(tmp_path))


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_a_folder_without_weights(copy_of, load_format):
    """The folder of a git clone without LFS, or of another program's format."""
    folder = copy_of("qwen3")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    wanted = {"safetensors": r"\*.safetensors", "pt": r"pytorch_model\*.bin",
              "auto": r"\*.safetensors or pytorch_model\*.bin"}[load_format]
    with pytest.raises(ValueError, match=f"qwen3.*{wanted}.*load_format='dummy'"):
        LLM(folder, load_format=load_format)


ROTARY = "model.layers.0.self_attn.rotary_emb."
BUFFERS = {ROTARY + "inv_freq": (8,), "model.rotary_emb.original_inv_freq": (8,),
           ROTARY + "cos_cached": (1, 1, 64, 16), ROTARY + "sin_cached": (64, 16),
           "rope.freqs": (8,), "model.layers.0.self_attention.maybe_rotary.inv_freq": (8,),
           "model.layers.1.self_attn.bias": (1, 1, 64, 64),
           "model.layers.1.self_attn.masked_bias": ()}


def test_tensors_that_follow_from_others_are_left_aside(copy_of, references):
    """Tied checkpoints that store the head again, and old ones with RoPE's tables and masks as
    buffers. What is stored there is wrong on purpose; the head is a copy of the embedding."""
    folder = copy_of("qwen3-tied", lambda tensors: tensors | {
        name: torch.full(shape, 9.0) for name, shape in BUFFERS.items()} | {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.embed_tokens.position_ids": torch.arange(64)[None]})
    for impl in ("nanoserve", "transformers"):
        llm = LLM(folder, num_gpu_blocks_override=16, model_impl=impl, dtype="float32")
        assert greedy(llm) == references("qwen3-tied", list(range(20)), 8)[0]


@pytest.mark.parametrize("name, shape", [
    ("model.layers.1.self_attn.bias", (64,)), ("model.layers.1.self_attn.masked_bias", (64,)),
    (ROTARY + "inv_freq", (4, 8, 8)), (ROTARY + "weight", (8,)),
    ("model.embed_tokens.position_ids", (64, 64))])
def test_a_weight_named_like_a_buffer_is_no_buffer(copy_of, name, shape):
    """Known by its shape, or by being floats. (transformers itself passes over any inv_freq.)"""
    folder = copy_of("qwen3-tied", lambda tensors: tensors | {name: torch.ones(shape)})
    for impl in ("nanoserve", *["transformers"] * ("inv_freq" not in name)):
        with pytest.raises(ValueError, match=re.escape(name)):
            LLM(folder, num_gpu_blocks_override=16, model_impl=impl)


def test_a_number_that_transformers_network_would_make_nan_is_refused(copy_of):
    def damaged(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = torch.nan
        return tensors

    with pytest.raises(ValueError, match="NaN in torch.float32"):
        LLM(copy_of("qwen3", damaged), dtype="float32", model_impl="transformers")


# ------------------------------------------------------------------ an index


def test_an_index_names_the_files_and_others_are_ignored(copy_of):
    folder = copy_of("qwen3-sharded")
    save_file({"stray": torch.zeros(3)}, folder / "model-99999.safetensors")
    load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match="model-99999.*stray has no place"):
        load(folder)


FLAWS = [
    ("qwen3-sharded", lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
     f"{INDEX}.*model-00002"),
    *(("qwen3-sharded", lambda folder, name=name: write_json(
        folder / INDEX, weight_map={"model.norm.weight": name}), f"{name}'.*outside")
      for name in ("../elsewhere.safetensors", "a/../../b.safetensors", "/c.bin")),
    *(("qwen3-sharded", lambda folder, text=text: (folder / INDEX).write_text(text),
       f"{INDEX} (has no readable weight_map|is not valid JSON|must hold)") for text in (
           "", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a', "[" * 100_000)),
]


@pytest.mark.parametrize("checkpoint, change, words", FLAWS,
                         ids=[f"{i} {words}" for i, (*_, words) in enumerate(FLAWS)])
def test_a_broken_index_is_named(copy_of, checkpoint, change, words):
    folder = copy_of(checkpoint)
    change(folder)
    with pytest.raises(ValueError, match=words):
        load(folder)


# ------------------------------------------------- the experts of a layer in two tensors


def load_given(folder, tensors: dict) -> dict:
    named = [("given", *one) for one in tensors.items()]
    return load_by(folder, lambda model, _: weight_files.find_weights(model, folder, given=named),
                   ModelConfig)


@pytest.mark.parametrize("name", ["qwen3-moe-odd", "mixtral"])
def test_experts_in_one_tensor_a_layer_are_the_same_model(checkpoints, name):
    """transformers 5 has them so in memory: a trainer that sent its network was refused."""
    tensors = AutoModelForCausalLM.from_pretrained(checkpoints[name]).state_dict()
    loaded = load_given(checkpoints[name], tensors)
    for parameter, tensor in load(checkpoints[name]).items():
        assert torch.equal(tensor, loaded[parameter]), parameter
    joined = next(key for key in tensors if key.endswith("gate_up_proj"))
    for wrong in (tensors[joined][:-1], tensors[joined][:, 1:], tensors[joined][0]):
        with pytest.raises(ValueError, match="experts"):
            load_given(checkpoints[name], tensors | {joined: wrong})
