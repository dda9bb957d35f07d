"""Quantised checkpoints: what the files mean, that each part comes once, and what is refused.

The oracle is packing.py, which packs by the formats' descriptions and says number by number what
comes out. In float32 the text of a quantised checkpoint is that of its dense twin, token for token.
"""

import json

import pytest
import torch
from loading import greedy, stored_tensors
from packing import (
    FORMATS,
    SMALL,
    Packed,
    awq,
    compressed,
    float_rows,
    fp8,
    gptq,
    int_rows,
    own,
    pack,
    text_of,
    write,
)
from safetensors.torch import load_file, save_file

from nanoserve import LLM
from nanoserve_extras.quantization.formats import assemble, read_format


def read(one: Packed, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """What becomes of a matrix called `layer`, and of other tensors."""
    names = {f"layer.{part}": tensor for part, tensor in one.tensors.items()} | others
    found = [(name, tensor) for _, name, tensor in assemble(
        iter(("a file", name, tensor) for name, tensor in names.items()), one.entry)]
    assert len(found) == len(dict(found))
    return dict(found)


# -------------------------------------------------------------------- what they mean


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(96, 64), (40, 88)], ids=str)
def test_a_matrix_is_what_its_parts_mean(name, shape):
    """The second shape has inputs that no group of 16 divides, where the format allows it."""
    one = FORMATS[name](*shape, 5)
    plain = torch.randn(4, dtype=torch.bfloat16)
    found = read(one, **{"norm.weight": plain, "layer.bias": plain})
    assert torch.equal(found.pop("layer.weight"), one.dense)
    assert set(found) == {"norm.weight", "layer.bias"} and found["norm.weight"] is plain


def test_the_numbers_of_a_word_by_hand():
    """0x76543210 holds 0, 1 ... 7; compressed-tensors takes 8 off, GPTQ a zero point of 7 + 1."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    one = torch.ones(1, 1)
    entry = pack(1, 8, 0, size=None).entry
    parts = dict(weight_packed=word, weight_scale=one, weight_shape=torch.tensor([1, 8]))
    assert read(Packed(entry, parts, one))["layer.weight"].tolist() == [[*range(-8, 0)]]
    entry = gptq(1, 8, 0).entry
    parts = dict(qweight=word, qzeros=torch.tensor([[7]], dtype=torch.int32), scales=one,
                 g_idx=torch.zeros(8, dtype=torch.int32))
    assert read(Packed(entry, parts, one))["layer.weight"].tolist() == [[*range(-8, 0)]]


# ---------------------------------------------------------------------- whole engines


@pytest.mark.parametrize("name", ["fp8, blocks", "pack-quantized, zeros", "gptq, act-order",
                                  "awq"])
def test_the_text_is_that_of_the_dequantised_weights(name, checkpoints, tmp_path, capfd):
    """Token for token in float32. The parts of a matrix may lie in different files."""
    kind = "qwen3-moe" if name in ("fp8, blocks", "awq") else "qwen3"  # each expert by itself
    quantized, dense = write(checkpoints[kind], tmp_path, FORMATS[name],
                             shards=2 if name == "awq" else 1)
    expected = text_of(dense)
    capfd.readouterr()
    with LLM(quantized, **SMALL) as llm:
        assert greedy(llm, 16) == expected
    assert "float32, quantization='dequantize'" in capfd.readouterr().err


def test_model_optimizers_own_file_is_enough(checkpoints, tmp_path, capfd):
    """Before its version 0.30 it wrote nothing into config.json. Keys and values have scales."""
    folder, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["NVFP4"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = None  # some tools write what there is not
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(dict(
        producer=dict(name="modelopt", version="0.29.0"), quantization=dict(
            quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16,
            exclude_modules=["lm_head"]))))
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.0.self_attn.{x}_proj.{x}_scale": torch.ones(()) for x in "kv"}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    expected = text_of(dense)
    for impl in ("nanoserve", "transformers"):
        capfd.readouterr()
        assert text_of(folder, model_impl=impl) == expected
        assert "quantization='dequantize'" in capfd.readouterr().err


def test_a_draft_model_may_be_quantised(checkpoints, tmp_path):
    """Its own config.json says so; the model that it drafts for is plain."""
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["int-quantized"])
    drafts = dict(method="draft_model", num_speculative_tokens=2, model=str(quantized))
    with pytest.raises(ValueError, match="quantization='dequantize'"):
        LLM(dense, **SMALL, speculative_config=drafts)
    with LLM(dense, **SMALL, speculative_config=drafts, quantization="dequantize") as llm:
        drafted = greedy(llm, 16)
        assert llm.metrics.num_drafts
    assert text_of(dense) == drafted


# ------------------------------------------------------------------- each part once


UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize("changed, words", [
    ({"weight_scale": None}, "layers.1.mlp.up_proj .*weight, weight_scale; 1 "),
    ({"weight_zero_point": torch.ones(96, 1)}, "up_proj.weight_zero_point"),
    ({"input_scale": torch.ones(1)}, "up_proj.input_scale"),
    ({"weight": torch.ones(90, 64).to(torch.int8), "weight_scale": torch.ones(90, 1)},
     "up_proj.weight .*shape")], ids=lambda value: "")
def test_a_matrix_whose_parts_are_wrong_is_named(checkpoints, tmp_path, changed, words):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["int-quantized"])
    tensors = stored_tensors(quantized) | {UP + part: tensor for part, tensor in changed.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None},
              quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=words):
        LLM(quantized, **SMALL)


def test_a_part_that_comes_twice_is_named():
    one = int_rows(8, 16, 0)
    tensors = [("a file", "layer.weight", one.tensors["weight"])] * 2
    with pytest.raises(ValueError, match="a file: .*layer.weight.*twice"):
        list(assemble(iter(tensors), one.entry))


@pytest.mark.parametrize("make, part, change, words", [
    (awq, "scales", lambda t: t.T.contiguous(), "\\[40, 4\\] blocks"),  # as many, in another order
    (pack, "weight_scale", lambda t: t.T.contiguous(), "\\(4, 40\\) scales"),
    (pack, "weight_packed", lambda t: t.short(), "numbers are torch.int16"),
    (fp8, "weight_scale_inv", lambda t: torch.full_like(t, 127, dtype=torch.uint8),
     "scales are torch.uint8"),  # exponents: 127 is 1.0
    (gptq, "scales", lambda t: t.int(), "scales are torch.int32"),
    (gptq, "g_idx", lambda t: t - 1, "g_idx names .*0 to 3"),
    (gptq, "g_idx", lambda t: t[1:], r"\(63,\) inputs by g_idx for"),
    (pack, "weight_shape", lambda t: t + 8, "weight_shape says"),
    (gptq, "qzeros", lambda t: t.T.contiguous(), "zero points"),
    (pack, "weight_shape", lambda t: t.float(), "weight_shape"),
    (fp8, "weight", lambda t: t.view(torch.int8), "numbers are torch.int8"),
    (FORMATS["FP8"], "weight", lambda t: t.view(torch.uint8), "numbers are torch.uint8"),
    (float_rows, "weight", lambda t: t.view(torch.int8), "numbers are torch.int8"),
    (int_rows, "weight", lambda t: t.view(torch.uint8), "numbers are torch.uint8"),
    (FORMATS["NVFP4"], "weight_scale", lambda t: t.view(torch.uint8), "scales are torch.uint8"),
    (FORMATS["NVFP4"], "weight_scale_2", lambda t: t.repeat(40, 1), "input of size 40"),
    (FORMATS["nvfp4-pack-quantized"], "weight_global_scale", lambda t: t * 0, "NaN or infinite"),
    (FORMATS["mxfp4-pack-quantized"], "weight_scale",
     lambda t: t.view(torch.float8_e4m3fn), "numbers are torch.float8_e4m3fn"),
    (FORMATS["mxfp4-pack-quantized"], "weight_scale", lambda t: t | 255, "NaN or infinite"),
    (own, "weight_scale", lambda t: t[:, :3], r"\(40, 3\) scales, \(40, 8\) minima"),
    (own, "weight_minimum", lambda t: t.T, r"\(8, 40\) minima"),
    (own, "weight_scale", lambda t: t * float("inf"), "NaN or infinite"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_parts_of_the_right_size_that_mean_something_else_are_refused(make, part, change, words):
    """Scales that lie transposed were reshaped, and other integers than words of 32 bits read:
    a weight of the right shape with wrong numbers."""
    one = make(40, 64, 0)
    one.tensors[part] = change(one.tensors[part])
    with pytest.raises(ValueError, match=f"layer don't fit.*{words}"):
        read(one)


# --------------------------------------------------------------------------- refusals


GPTQ, AWQ, FP8 = gptq(8, 16, 0).entry, awq(8, 16, 0).entry, fp8(8, 16, 0).entry
AUTO = dict(quant_method="auto-round", bits=4, packing_format="auto_round:auto_gptq")
INT8 = compressed("int-quantized", strategy="channel")
PACK = compressed("pack-quantized", strategy="channel", num_bits=4)
MIXED = dict(quant_method="modelopt", quant_algo="MIXED_PRECISION")


def groups(*settings: dict | int, form: str = "pack-quantized", **weights) -> dict:
    """Settings of compressed-tensors' groups, and of the weights in all of them."""
    one = compressed(form, num_bits=4, strategy="channel")["config_groups"]["group_0"]
    one["weights"] |= weights
    return compressed(form) | dict(config_groups={
        f"group_{i}": one | own if isinstance(own, dict) else own
        for i, own in enumerate(settings)})


REFUSED = [
    (dict(quant_method="bitsandbytes"), "quant_method='bitsandbytes'"),
    (dict(quant_method=["awq"]), r"quant_method=\['awq'\]"), (dict(bits=4), "quant_method=None"),
    (FP8 | dict(activation_scheme="tensor"), "activation_scheme='tensor'"),
    (FP8 | dict(fmt="e5m2"), "fmt='e5m2'"),
    (FP8 | dict(weight_block_size=[128]), "weight_block_size="),
    (FP8 | dict(weight_block_size=["a", 2]), "weight_block_size="),
    (AUTO | dict(packing_format="auto_round:gptqmodel_marlin"), "packing_format="),
    (AUTO | dict(data_type="mx_fp"), "data_type='mx_fp'"), (AUTO | dict(act_bits=8), "act_bits=8"),
    (MIXED | dict(quant_algo="W4A8_AWQ"), "quant_algo='W4A8_AWQ'"),
    (MIXED | dict(quantized_layers={"a": dict(quant_algo="W4A8_AWQ")}), "quant_algo='W4A8_AWQ'"),
    (MIXED | dict(quantized_layers=None), "quantized_layers=None"),
    (own(8, 16, 0).entry | dict(bits=5), "bits=5"),
    (GPTQ | dict(bits=3), "bits=3"), (GPTQ | dict(sym="yes"), "sym='yes'"),
    (GPTQ | dict(desc_act="static"), "desc_act='static'"),
    (GPTQ | dict(group_size=0), "group_size=0"),
    (GPTQ | dict(checkpoint_format=None), "checkpoint_format=None"),
    (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    (GPTQ | dict(is_marlin_format=True), "is_marlin_format=True"),
    (GPTQ | dict(dynamic={".*": dict(bits=3)}), "bits=3"),
    (GPTQ | dict(dynamic={"*.up": dict(bits=8)}), "pattern='..up'"),
    (GPTQ | dict(dynamic=[".*"]), "dynamic="),
    (AWQ | dict(extra_config={"layers.0.mlp": dict(bits=8)}), "bits=8"),
    (AWQ | dict(version="gemv"), "version='gemv'"), (AWQ | dict(zero_point="no"), "zero_point="),
    (dict(quant_method="awq", w_bit=3), "w_bit=3"),
    (INT8 | dict(transform_config=dict(a=1)), "transform_config="),
    (INT8 | dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config="),
    (PACK | dict(format="marlin-24"), "format='marlin-24'"),
    (PACK | dict(format="naive-quantized"), "num_bits=4"),
    (PACK | dict(format="nvfp4-pack-quantized"), "type='int'"),
    (groups(), "config_groups="), (groups(3), "group_0=3"),
    (groups(dict(weights=[8])), "weights="),
    (groups({}, form="int-quantized", num_bits=8, type="float"), "type='float'"),
    (groups({}, form="mxfp4-pack-quantized", type="float", group_size=32, symmetric=False),
     "symmetric=False"),
    (groups({}, num_bits=3), "num_bits=3"), (groups({}, dynamic=True), "dynamic=True"),
    (groups({}, strategy="tensor_group"), "strategy='tensor_group'"),
    (groups({}, strategy="group"), "group_size=None"),
    (groups(dict(format="int-quantized")), "format='int-quantized'"),
    (groups(dict(output_activations=dict(num_bits=8))), "output_activations="),
    (groups({}, dict(weights=dict(num_bits=8, strategy="channel"))), "config_groups=.*in two"),
    (groups({}, dict(weights={}), form="mixed-precision"), "format='mixed-precision'"),
    (groups({}, dict(weights=dict(num_bits=8), targets="Linear")), "targets='Linear'"),
]


@pytest.mark.parametrize("entry, words", REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_is_not_read_is_refused_by_name(entry, words):
    with pytest.raises(ValueError, match=f"quantization_config.* {words}"):
        read_format(entry)


def test_it_is_refused_before_anything_is_loaded(dummy):
    config = json.loads((dummy / "config.json").read_text())
    (dummy / "config.json").write_text(json.dumps(
        config | dict(quantization_config=dict(quant_method="bitsandbytes"))))
    with pytest.raises(ValueError, match="quant_method='bitsandbytes'"):
        LLM(dummy, skip_tokenizer_init=True)


def test_a_plain_checkpoint_has_nothing_to_assemble(qwen3):
    with pytest.raises(ValueError, match="quantization='dequantize'.*qwen3"):
        LLM(qwen3, quantization="dequantize")
    with pytest.raises(ValueError, match="quantization.*'awq'"):
        LLM(qwen3, quantization="awq")
