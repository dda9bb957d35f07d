"""Checkpoints to parameters: everything arrives where it belongs, once, or there is an error.

The oracle is the checkpoint itself, read whole with `safetensors.torch.load_file` and put together
by hand. Every way in which a folder can be wrong must end in a `ValueError` that names the file or
the tensor, never in text from random weights.
"""

import re
import shutil
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from checkpoints import CHECKPOINTS
from helpers import write_json
from loading import empty_model, greedy, load, stored_tensors, weights_of, without
from safetensors import safe_open
from safetensors.torch import save_file

from nanoserve import LLM, layers, loader
from nanoserve.loader import load_weights
from nanoserve.loader import stored_tensors as stored

# ------------------------------------------------------ everything in its place


def fused(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What the engine's parameter `name` must hold, from the checkpoint's tensors by hand."""
    name = name if name == "lm_head.weight" else "model." + name
    if any("block_sparse_moe" in key for key in stored):
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." in name:
        return experts(stored, *name.split(".experts."))
    for ours, theirs in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        if ours in name:
            return torch.cat([stored[name.replace(ours, f"{part}_proj")] for part in theirs])
    return stored[name]


def experts(stored: dict[str, torch.Tensor], prefix: str, parameter: str) -> torch.Tensor:
    """All experts of a layer in one tensor; w1, w3 and w2 are Mixtral's gate, up and down."""
    gate, up, down = ("w1", "w3", "w2") if "block_sparse" in prefix else (
        "gate_proj", "up_proj", "down_proj")
    parts = (gate, up) if parameter == "gate_up_proj" else (down,)
    each = []
    while f"{prefix}.experts.{len(each)}.{gate}.weight" in stored:
        each.append(torch.cat([stored[f"{prefix}.experts.{len(each)}.{part}.weight"]
                               for part in parts]))
    return torch.stack(each)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_parameter_holds_the_checkpoints_numbers(checkpoints, name):
    """For biases as well: their loaders crashed, or nobody called them (nano-vllm #125, #203).
    Gemma's norms are stored as their distance from 1."""
    stored, loaded = stored_tensors(checkpoints[name]), load(checkpoints[name])
    for parameter, tensor in loaded.items():
        offset = 1 if "gemma" in name and "norm" in parameter else 0
        assert torch.equal(tensor, fused(stored, parameter) + offset), parameter
    num_stored = sum(t.numel() for t in stored.values())
    assert sum(t.numel() for t in loaded.values()) == num_stored  # and nothing was left behind
    biases = [parameter for parameter in loaded if parameter.endswith(".bias")]
    assert len(biases) == {"llama-bias": 4 * 3, "qwen2": 3, "qwen2-window": 3}.get(name, 0)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3-tied", "qwen3-sharded", "mixtral",
                                  "qwen3-moe", "qwen3-moe-odd"])
def test_every_number_is_written_exactly_once(checkpoints, name, monkeypatch):
    """A model id was given instead of a path, the glob found no weights, and the engine answered
    with random text (nano-vllm #97). Here each copy adds 1: afterwards all must be 1."""
    model = empty_model(checkpoints[name], 0)
    monkeypatch.setattr(layers, "copy_share", lambda into, *_: into.add_(1))
    load_weights(model, stored(checkpoints[name]), checkpoints[name])
    for parameter, tensor in weights_of(model).items():
        assert (tensor == 1).all(), parameter


def test_shards_are_all_read(copy_of, checkpoints):
    for name, tensor in load(copy_of("qwen3-sharded")).items():
        assert torch.equal(tensor, load(checkpoints["qwen3"])[name])


def test_a_second_copy_under_another_name_is_ignored(copy_of):
    """As original Llama folders carry one."""
    for name in ("qwen3-sharded", "qwen3"):
        folder = copy_of(name)
        save_file({"tok_embeddings.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
        load(folder)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_matrices_of_one_layer_alone_wait_to_be_packed(checkpoints, name):
    """All of the model waited, and was there twice for a while."""
    model = empty_model(checkpoints[name])
    waited = []

    def watched():
        for one in stored(checkpoints[name]):
            waited.append({path.split(".")[0] for path, weight in model.layers.named_parameters()
                           if weight.dim() > 1 and not weight.is_meta})
            yield one

    load_weights(model, watched(), checkpoints[name])
    assert max(map(len, waited)) == 1 and not waited[-1]


def test_weights_are_converted_to_the_engines_dtype(checkpoints):
    """But for those of norms, which are computed in float32 whatever the dtype."""
    llm = LLM(checkpoints["qwen3"], dtype="bfloat16", kernels="torch", num_gpu_blocks_override=16)
    stored = stored_tensors(checkpoints["qwen3"])
    for name, tensor in weights_of(llm.runner.model).items():
        expected = fused(stored, name)
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


# ------------------------------------------------------------- tied and untied


ROTARY = "model.layers.0.self_attn.rotary_emb."


def test_tensors_that_follow_from_others_are_left_aside(copy_of, references):
    """Tied checkpoints that store the head again, and old ones with RoPE's tables as buffers. What
    is stored there is wrong on purpose; the head is a copy of the embedding."""
    folder = copy_of("qwen3-tied", lambda tensors: tensors | {
        ROTARY + "inv_freq": torch.full((8,), 9.0),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    llm = LLM(folder, num_gpu_blocks_override=16, dtype="float32")
    assert greedy(llm) == references("qwen3-tied", list(range(20)), 8)[0]


@pytest.mark.parametrize("name, shape", [
    (ROTARY + "inv_freq", (4, 8, 8)), (ROTARY + "weight", (8,)),
    ("model.layers.1.self_attn.bias", (64,))])
def test_a_weight_named_like_a_buffer_is_no_buffer(copy_of, name, shape):
    folder = copy_of("qwen3-tied", lambda tensors: tensors | {name: torch.ones(shape)})
    with pytest.raises(ValueError, match=re.escape(name)):
        load(folder)


def test_a_tied_model_with_a_head_of_its_own_is_refused(copy_of):
    """A fine-tune had trained its head apart and kept tie_word_embeddings: the head was left aside,
    and the text was fluent and wrong. With the flag put right the same file loads."""
    head = torch.randn(260, 64)
    folder = copy_of("qwen3-tied", lambda tensors: tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match="lm_head.weight.*hf_overrides"):
        load(folder)
    write_json(folder / "config.json", tie_word_embeddings=False)
    assert torch.equal(load(folder)["lm_head.weight"], head)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_weights_are_refused(copy_of, dtype):
    """They were cast to floats without their scales, and gave garbage."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = copy_of("qwen3", lambda tensors: tensors | {name: torch.ones(96, 64).to(dtype)})
    with pytest.raises(ValueError, match=f"{name}.*{dtype}"):
        load(folder)


# ---------------------------------------------------------- wrong checkpoints


QWEN_EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight".format
MIXTRAL_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight".format


@pytest.mark.parametrize("checkpoint, name, said", [
    *(("llama-bias", name, None) for name in (
        "model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.bias", "model.layers.0.input_layernorm.weight")),
    ("qwen3-moe", QWEN_EXPERT(2, 3, "down"), None), ("qwen3-moe", QWEN_EXPERT(0, 1, "up"), None),
    ("qwen3", "lm_head.weight", None),  # untied, that is
    ("qwen3-moe", "model.layers.2.mlp.gate.weight", None),  # a router
    ("qwen3-moe", "model.layers.1.mlp.gate_proj.weight", None),  # of the layer without experts
    # Mixtral's experts are named as the others' would be.
    ("mixtral", MIXTRAL_EXPERT(1, 2, "w1"), QWEN_EXPERT(1, 2, "gate")),
    ("mixtral", MIXTRAL_EXPERT(1, 2, "w2"), QWEN_EXPERT(1, 2, "down")),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
])
def test_a_missing_tensor_is_named_as_the_checkpoint_would(copy_of, checkpoint, name, said):
    folder = copy_of(checkpoint, lambda tensors: without(tensors, name))
    with pytest.raises(ValueError, match=f"{checkpoint}: 1 .*missing.*{said or name}"):
        load(folder)


@pytest.mark.parametrize("checkpoint, name", [
    ("qwen3", "model.layers.3.mlp.up_proj.weight"),  # one layer more than config.json has
    *(("qwen3", name) for name in (
        "model.layers.0.self_attn.q_norm.weight.scale", "model.layers.0.self_attn.sinks", "stray",
        "model.layers.0.self_attn.o_proj.bias", "model.layers.0.self_attn.qkv_proj.weight")),
    ("qwen3-moe", QWEN_EXPERT(2, 4, "down")), ("mixtral", MIXTRAL_EXPERT(1, 4, "w1")),  # 5 of 4
    ("qwen3-moe", QWEN_EXPERT(1, 0, "up")),  # in the layer that has none
    ("qwen3-moe", QWEN_EXPERT(0, 0, "up").replace("weight", "bias")),
    ("mixtral", MIXTRAL_EXPERT(0, 0, "w4")), ("qwen3", QWEN_EXPERT(0, 0, "up")),
    ("qwen3-moe", "model.layers.0.mlp.experts.gate_up_proj"),
])
def test_a_left_over_tensor_is_named_with_its_file(copy_of, checkpoint, name):
    folder = copy_of(checkpoint, lambda tensors: tensors | {name: torch.ones(4)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{name} has no place"):
        load(folder)


@pytest.mark.parametrize("checkpoint, name, shape", [
    ("qwen3", "model.layers.1.self_attn.k_proj.weight", (32, 64)),
    ("qwen3", "model.norm.weight", (1,)), ("qwen3", "model.embed_tokens.weight", (256, 64)),
    ("qwen3", "model.layers.2.mlp.gate_proj.weight", (192, 64)),
    ("qwen3-moe", QWEN_EXPERT(2, 3, "down"), (40, 64)),
    ("qwen3-moe", QWEN_EXPERT(2, 3, "gate"), (96, 64)),
    ("qwen3-moe", "model.layers.0.mlp.gate.weight", (5, 64)),
    ("mixtral", MIXTRAL_EXPERT(0, 3, "w2"), (96, 64)),
    ("mixtral", MIXTRAL_EXPERT(0, 3, "w3"), (96,)),
])
def test_a_wrong_shape_is_named_with_both_shapes(copy_of, checkpoints, checkpoint, name, shape):
    expected = tuple(stored_tensors(checkpoints[checkpoint])[name].shape)
    folder = copy_of(checkpoint, lambda tensors: tensors | {name: torch.zeros(shape)})
    with pytest.raises(ValueError) as error:
        load(folder)
    for words in ("model.safetensors", name, "config.json", str(shape), str(expected)):
        assert words in str(error.value)


@pytest.mark.parametrize("dtype, number, fits", [
    ("float32", torch.nan, False), ("float32", -torch.inf, False), ("float32", 1e5, True),
    ("float16", 1e5, False)])
def test_a_number_that_would_make_all_others_nan_is_named(copy_of, dtype, number, fits):
    """Each logit was NaN then, and the text a token without end."""
    def damaged(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = number
        return tensors

    folder, options = copy_of("qwen3", damaged), dict(dtype=dtype, num_gpu_blocks_override=8)
    if fits:
        with LLM(folder, **options):
            return
    with pytest.raises(ValueError, match=rf"up_proj.weight .*{dtype} has not: take another dtype"):
        LLM(folder, **options)


def test_a_folder_without_weights(copy_of):
    """The folder of a git clone without LFS, or of another program's format."""
    folder = copy_of("qwen3")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(ValueError, match=r"qwen3.*\*.safetensors.*load_format='dummy'"):
        LLM(folder)


def cut(folder, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])


def store_twice(folder) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "model-99999.safetensors")


FLAWS = [
    # An interrupted download: cut in the header, in its length, or somewhere in the numbers.
    *(("qwen3", lambda folder, length=length: cut(folder, length),
       r"model\.safetensors.*truncated") for length in (0, 5, 200, -1, -5000)),
    # Which of them would be right?
    ("qwen3-sharded", store_twice, "model-99999.*model.norm.weight.*twice"),
    ("qwen3", lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    *(("qwen3", lambda folder, name=name, text=text: (folder / name).write_bytes(text),
       f"{name} .*{words}") for name in ("config.json", "generation_config.json")
      for text, words in ((b"{", "not valid JSON"), (b"[1]", "JSON object, got list"),
                          (b"\0\xff", "not valid JSON"))),
]


@pytest.mark.parametrize("checkpoint, change, words", FLAWS,
                         ids=[f"{i} {words}" for i, (*_, words) in enumerate(FLAWS)])
def test_a_broken_file_is_named(copy_of, checkpoint, change, words):
    folder = copy_of(checkpoint)
    change(folder)
    with pytest.raises(ValueError, match=words):
        LLM(folder, num_gpu_blocks_override=16)


@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_a_folder_without_a_tokenizer(copy_of, name):
    """For some families transformers makes an empty tokenizer then: all text would be ""."""
    folder = copy_of(name)
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=f"(?s){name}.*tokenizer=.*skip_tokenizer_init"):
        LLM(folder)
    assert greedy(LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=16))


# ---------------------------------------------------------------- dummy weights


def test_dummy_weights_need_nothing_but_a_config(checkpoints, tmp_path):
    shutil.copy(checkpoints["llama-bias"] / "config.json", tmp_path)

    def dummy(**options) -> LLM:
        return LLM(tmp_path, load_format="dummy", num_gpu_blocks_override=16, kernels="torch",
                   **options)

    first, same, other = dummy(), dummy(seed=0), dummy(seed=1)
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        first.generate("a text prompt")
    tokens = greedy(first)
    assert len(tokens) == 8 and tokens == greedy(same)
    parameters = [weights_of(llm.runner.model) for llm in (first, same, other)]
    for name, tensor in parameters[0].items():
        assert tensor.isfinite().all() and torch.equal(tensor, parameters[1][name]), name
        # Norms are ones; everything else is random, and different for another seed.
        assert torch.equal(tensor, parameters[2][name]) == ("norm" in name), name


def test_dummy_weights_do_not_look_at_the_files(copy_of):
    file = copy_of("qwen3") / "model.safetensors"
    file.write_bytes(b"nothing")
    llm = LLM(file.parent, load_format="dummy", num_gpu_blocks_override=16)
    assert greedy(llm) and llm.generate(["a text prompt"], use_tqdm=False)[0].finished


# ------------------------------------------------------------------- memory


def test_loading_needs_the_model_and_one_shard_at_most(checkpoints, monkeypatch):
    """Two copies of a model that just fits into memory are one too many: when a tensor comes out of
    a file, no more than the one before may still be alive."""
    folder, watched, alive = checkpoints["qwen3-sharded"], [], []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        watched.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in watched))
        return tensor

    @contextmanager
    def watched_open(file, framework):
        with safe_open(file, framework=framework) as opened:
            yield SimpleNamespace(keys=opened.keys,
                                  get_tensor=lambda name: watch(opened.get_tensor(name)))

    monkeypatch.setattr(loader, "safe_open", watched_open)
    load(folder)
    assert len(watched) == len(stored_tensors(folder)) and max(alive) <= 2
