"""Small weights in transformers' networks: token for token what the rounded network writes.

The oracle is transformers' own `generate`, in float32, on a checkpoint whose matrices were rounded
here by definition (packing.py), or on the dense matrices that a quantised file means.
"""

import json
import re
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
import wrappings
from architectures import ARCHITECTURES, GQA, Made, make
from checkpoints import Reference
from hybrids import HYBRIDS
from packing import FORMATS, by_definition, fp8, groups_by_definition, write
from safetensors.torch import load_file, save_file
from test_latent import MODELS
from torch import nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from transformers.integrations import mxfp4
from transformers.pytorch_utils import Conv1D
from weight_kinds import needs_compiler, needs_interpreter

from nanoserve import LLM, SamplingParams
from nanoserve_extras.foreign import foreign_layers
from nanoserve_extras.foreign.foreign_layers import Packed
from nanoserve_extras.quantization import formats

PROMPTS = [[7, 200, 31, 4], [99] * 3 + [5, 17, 250, 33, 8, 121, 64, 2, 78, 3, 11, 90, 41, 6], [12]]
SMALL = dict(model_impl="transformers", dtype="float32", num_gpu_blocks_override=24,
             max_num_batched_tokens=16, max_num_seqs=4)
GREEDY = SamplingParams(temperature=0, max_tokens=10)
ROUNDED = {"int8": by_definition, "int4": groups_by_definition}
kernels = pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_compiler)])


def gemma4_moe() -> Gemma4TextConfig:
    return Gemma4TextConfig(
        **GQA, head_dim=8, global_head_dim=16, sliding_window=13, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"])


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict:
    configs = HYBRIDS | MODELS | ARCHITECTURES | {"gemma4-moe": gemma4_moe}
    return Made(tmp_path_factory.mktemp("architectures"),
                lambda name, folder: make(configs[name](), folder))


def texts(folder, **options) -> list[list[int]]:
    with LLM(folder, **SMALL | options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def reference(folder) -> list[list[int]]:
    of = Reference(folder)
    return [of.generate(prompt, GREEDY.max_tokens)[0] for prompt in PROMPTS]


@torch.no_grad()
def rounded(source, folder, quantization):
    """Every matrix, an expert's, too; a head by row; an embedding, a router and what latent
    attention absorbs never."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight, model.config.tie_word_embeddings = nn.Parameter(head.weight.clone()), False
    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in experts:
        for stack in [one for one in module.parameters(recurse=False) if one.dim() == 3]:
            for one in stack.mT if module.is_transposed else stack:
                one.copy_(ROUNDED[quantization](one).float())
    counts = [len(module.down_proj) for module in experts]
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and not name.endswith("kv_b_proj") and getattr(
                module, "out_features", None) not in counts:
            weight = module.weight if type(module) is nn.Linear else module.weight.T
            how = ROUNDED["int8" if module is head or name.endswith((
                "q_proj", "k_proj", "v_proj", "qkv_proj")) else quantization]
            new = how(weight).float()
            module.weight.copy_(new if type(module) is nn.Linear else new.T)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name, quantization", [
    ("olmo2", "int4"), ("glm4", "int4"), ("granite-swa", "int8"), ("gemma4", "int4"),
    ("gpt2", "int4"),  # stored transposed, a tied head
    ("gpt-oss", "int4"),  # experts whose gate and up alternate, with biases; sinks
    ("qwen3.5-moe", "int4"), ("lfm2-moe", "int4"), ("granite4-h", "int8"),
    ("nemotron-h", "int4"),  # experts without a gate
    ("glm4-moe-lite", "int4"), ("gemma4-moe", "int4"),  # its router is an `nn.Linear`
    ("qwen3.5", "int8"), ("qwen3-next", "int4")])  # delta nets
def test_the_text_is_that_of_the_rounded_weights(made, tmp_path, name, quantization, capfd):
    """Experts are rounded one by one, and routers stay."""
    expected = reference(rounded(made[name], tmp_path / "rounded", quantization))
    assert expected != reference(made[name])
    for kernels in ("auto", "torch") if name in ("olmo2", "gpt2", "gpt-oss") else ("auto",):
        assert texts(made[name], quantization=quantization, kernels=kernels) == expected
    said = capfd.readouterr().err
    assert "Experts" not in said or name == "gpt-oss"  # where their biases stay
    if name in ("qwen3.5", "qwen3-next") and shutil.which("g++"):
        assert "1 of 1 layers by delta_rule" in said


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("name, quantization", [
    ("gpt-oss", "int4"), ("glm4-moe-lite", "int8"), ("nemotron-h", "int4")])
def test_experts_are_multiplied_by_kernels_for_a_gpu(made, tmp_path, recorded, name, quantization):
    """Transposed or not, with biases or without, with a gate or without."""
    expected = reference(rounded(made[name], tmp_path / "rounded", quantization))
    assert texts(made[name], quantization=quantization, kernels="triton") == expected
    assert recorded


@kernels
@pytest.mark.parametrize("name, form, quantization", [
    ("olmo2", "gptq", None), ("olmo2", "gptq", "int4"), ("olmo2", "awq", "int4"),
    ("olmo2", "pack-quantized, zeros", "int4"), ("olmo2", "fp8, blocks", None),
    ("glm4-moe-lite", "fp8, blocks", None), ("glm4-moe-lite", "pack-quantized", "int4"),
    ("glm4-moe-lite", "gptq", "int4")])
def test_the_text_of_a_quantised_file_is_that_of_what_it_means(made, tmp_path, name, form,
                                                               quantization, kernels):
    """Its own 4 bits are kept, an expert's, too. What the file left dense becomes 8 bits then."""
    quantized, dense = write(made[name], tmp_path, FORMATS[form])
    if quantization == "int4":
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        with torch.no_grad():
            for path, module in model.named_modules():
                if path.endswith(("lm_head", "with_mqa")):
                    module.weight.copy_(by_definition(module.weight))
        model.save_pretrained(dense)
    with LLM(quantized, **SMALL, quantization=quantization, kernels=kernels) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        sizes = [one.linear.packed.size for path, one in llm.runner.model.named_modules()
                 if ".experts.packed_" in path and isinstance(one, Packed)]
    assert [output.outputs[0].token_ids for output in outputs] == reference(dense)
    assert quantization is None or 0 not in sizes


def test_each_expert_may_be_stored_by_itself(tmp_path):
    """So quantised files have them (Gemma 4 26B-A4B's, in two spellings), where the class knows a
    layer's experts in one tensor alone."""
    source = make(gemma4_moe(), tmp_path / "source")
    stored, paths = load_file(source / "model.safetensors"), ("0.experts.", "1.moe.experts.")
    for name in [name for name in stored if ".experts." in name]:
        above, _, what = name.replace("1.experts.", paths[1]).rpartition(".")
        for i, matrix in enumerate(stored.pop(name)):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, one in parts if what == "gate_up_proj" else [(what, matrix)]:
                stored[f"{above}.{i}.{part}.weight"] = one.contiguous()
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    quantized, dense = write(source, tmp_path, FORMATS["pack-quantized, zeros"])
    stored = load_file(dense / "model.safetensors")
    for layer, path in enumerate(paths):
        gate, up, down = (torch.stack([stored.pop(f"model.layers.{path}{i}.{part}.weight")
                                       for i in range(4)])
                          for part in ("gate_proj", "up_proj", "down_proj"))
        stored[f"model.layers.{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        stored[f"model.layers.{layer}.experts.down_proj"] = down
    save_file(stored, dense / "model.safetensors", {"format": "pt"})
    assert texts(quantized) == reference(dense)


def test_a_block_is_packed_before_the_next_but_one_is_made(tmp_path, monkeypatch):
    """So that a network never waits for its last tensor unrounded."""
    config = ARCHITECTURES["olmo2"]()
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    source = make(config, tmp_path / "source")
    events, making, packing = [], formats.make_weight, Packed.__init__

    def make_weight(file, module, *rest):
        events.append(int(re.search(r"layers\.(\d)", module)[1]))
        return making(file, module, *rest)

    def init(self, matrices, *rest):
        events.append("packed")
        packing(self, matrices, *rest)

    monkeypatch.setattr(formats, "make_weight", make_weight)
    monkeypatch.setattr(Packed, "__init__", init)
    quantized, _ = write(source, tmp_path, FORMATS["fp8, blocks"])
    with LLM(quantized, **SMALL, quantization="int8"):
        pass
    products = (events.count("packed") - 1) // 4  # and the head
    for layer in range(1, 4):
        assert events[:events.index(layer)].count("packed") == products * (layer - 1)
    assert products > 1 and events.count(3) == 7


def test_a_block_that_can_not_be_packed_says_why(made, monkeypatch):
    """transformers would hide the reason: "issues during automatic conversion"."""
    def fails(*rest):
        raise MemoryError("no room for an expert")

    monkeypatch.setattr(foreign_layers, "packed_expert", fails)
    with pytest.raises(MemoryError, match="^no room for an expert"):
        texts(made["glm4-moe-lite"], quantization="int8")


@pytest.mark.parametrize("block", [(8, 40), (48, 40)], ids=str)
def test_8_bit_floats_of_all_experts_in_one_tensor_are_read(tmp_path, block):
    """As transformers saves them, with the scales beside: they were left over."""
    quantized, dense = write(make(gemma4_moe(), tmp_path / "source"), tmp_path,
                             partial(fp8, block=block))
    stored, plain = (load_file(folder / "model.safetensors") for folder in (quantized, dense))
    for name in [name for name, tensor in plain.items() if tensor.dim() == 3 and "experts" in name]:
        made = [fp8(*one.shape, seed, block) for seed, one in enumerate(plain[name])]
        plain[name] = torch.stack([one.dense for one in made])
        stored[name], stored[f"{name}_scale_inv"] = (
            torch.stack([[*one.tensors.values()][i] for one in made]) for i in range(2))
    for folder, tensors in ((quantized, stored), (dense, plain)):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert texts(quantized) == reference(dense)
    del stored[f"{name}_scale_inv"]
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is quantised, but has only weight of weight, weight_sc"):
        texts(quantized)


def test_gpt_oss_own_files_are_read(tmp_path):
    """Its experts in 4-bit floats, with a power of 2 for 32 inputs. The oracle is transformers' own
    converter of these tensors, which makes them bfloat16."""
    folder, dense = tmp_path / "mxfp4", tmp_path / "dense"
    config = ARCHITECTURES["gpt-oss"]()
    config.intermediate_size = 64
    source = make(config, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    stored, generator = model.state_dict(), torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator)
        blocks, scales = blocks.byte(), scales.byte()
        stored[name].copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(dense)
    for copy in (source, dense):
        shutil.copytree(copy, folder, dirs_exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in stored.items() if not name.endswith(
        ("gate_up_proj", "down_proj"))}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]))))
    assert texts(folder) == reference(dense) != reference(source)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="down_proj is quantised, but has only blocks"):
        texts(folder)


@pytest.mark.parametrize("name", ["llava", "glm4v"])
def test_a_wrapping_keeps_its_own_4_bits(tmp_path, name):
    """Whatever the file calls its text network. What a tower has is passed over, quantised or not;
    4 bits that were taken for others would become 8, and write nearly the same."""
    source = wrappings.make_wrapping(name, tmp_path / "source")
    quantized, dense = write(source, tmp_path, FORMATS["gptq"])
    expected = wrappings.reference(dense)
    with torch.no_grad():
        head = expected.model.get_output_embeddings()
        head.weight = nn.Parameter(by_definition(head.weight).float())
    with LLM(quantized, **SMALL, quantization="int4", kernels="torch") as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        sizes = Counter(module.linear.packed.size for module in llm.runner.model.modules()
                        if isinstance(module, Packed))
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs[0].token_ids == expected.generate(prompt, GREEDY.max_tokens)[0]
    assert sizes == {16: 12, 0: 1}  # gate and up are one; the head is 8 bits


def test_what_stays_is_said_with_its_share_of_the_bytes(made, capfd):
    texts(made["gpt-oss"], quantization="int8")
    model = AutoModelForCausalLM.from_pretrained(made["gpt-oss"])
    share = model.model.embed_tokens.weight.nbytes / sum(p.nbytes for p in model.parameters())
    assert f"stay as they are (Embedding {share:.0%}" in capfd.readouterr().err
    texts(made["gpt-oss"])
    assert "stay as they are" not in capfd.readouterr().err


def test_a_file_whose_parts_do_not_suit_is_named(made, tmp_path):
    quantized, _ = write(made["olmo2"], tmp_path, FORMATS["gptq"])
    file = quantized / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.up_proj"
    # AutoGPTQ wrote a bias of zeros beside each matrix; one that is not zero is an error.
    save_file(stored | {f"{name}.bias": torch.zeros(48)}, file, {"format": "pt"})
    texts(quantized)
    for changed, words in [({f"{name}.bias": torch.ones(48)}, f"unexpected.*{name}.bias"),
                           ({f"{name}.qweight": torch.zeros(1, 1, dtype=torch.int32)},
                            f"{name} don't fit")]:
        save_file(stored | changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            texts(quantized)


def test_what_is_not_read_is_refused_in_words(made, tmp_path):
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_pretrained(made["gpt2"]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    entry = dict(quant_method="fp8", fmt="e4m3")
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=entry)))
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*transposed"):
        texts(folder, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="quantization='dequantize'"):
        texts(made["olmo2"], quantization="dequantize")
    folder, name = tmp_path / "gpt-oss", "model.layers.0.mlp.experts.down_proj"
    shutil.copytree(made["gpt-oss"], folder)
    stored = load_file(folder / "model.safetensors")
    for kind in (torch.int8, torch.float8_e4m3fn):  # transformers would take them for the numbers
        save_file(stored | {name: stored[name].to(kind)}, folder / "model.safetensors",
                  {"format": "pt"})
        with pytest.raises(ValueError, match=f"{name} is {kind}: quantised"):
            texts(folder)
