"""Checkpoints whose matrices have several formats: each is read by the group that names it.

As llm-compressor, Unsloth and NVIDIA write them: NVFP4 beside FP8 beside 16 bits. The oracle is the
dense checkpoint of packing.py's formulas.
"""

import json

import pytest
from packing import FORMATS, compressed, e2m1, float_rows, int_rows, pack, text_of, write_mixture

from nanoserve import LLM
from nanoserve_extras.quantization.formats import read_format

ATTENTION, MLP, DOWN = r"(q|k|v)_proj", r"(gate|up)_proj", "down_proj"


def groups(*of: tuple[list[str], dict, bool]) -> dict:
    """compressed-tensors' entry of (targets, entry of the format, whether it names its format)."""
    return compressed("mixed-precision") | dict(ignore=["lm_head", "re:.*o_proj"], config_groups={
        f"group_{i}": one["config_groups"]["group_0"] | dict(targets=targets) | (
            dict(format=one["format"]) if named else {})
        for i, (targets, one, named) in enumerate(of)})


FP8, NV, INT8 = float_rows(8, 16, 0).entry, e2m1(8, 16, 0, "nv").entry, int_rows(8, 16, 0).entry
PACK = pack(8, 16, 0).entry
EIGHT = dict(quant_algo="FP8")
FOUR = dict(quant_algo="NVFP4", group_size=16)


def modelopt(name: str, **entry) -> dict:
    """name: how the checkpoint spells a layer."""
    layers = {f"{name}.{i}.{path}_proj": EIGHT for i in range(8) for path in (
        "self_attn.q", "self_attn.k", "self_attn.v")}
    layers |= {f"{name}.{i}.mlp": FOUR for i in range(8)}
    return dict(quant_method="modelopt", quant_algo="MIXED_PRECISION",
                kv_cache_quant_algo="FP8", quantized_layers=layers) | entry


MIXTURES = {
    "NVFP4, FP8 and 16 bits": (
        {ATTENTION: FORMATS["float-quantized"], MLP: FORMATS["nvfp4-pack-quantized"],
         DOWN: FORMATS["nvfp4-pack-quantized"]},
        groups((["re:.*(gate|up|down)_proj"], NV, True),
               (["re:.*self_attn.(q|k|v)_proj$"], FP8, True))),
    "a class, and names before it": (
        {ATTENTION: FORMATS["pack-quantized"], "layers.0.mlp": FORMATS["nvfp4-pack-quantized"],
         MLP: FORMATS["int-quantized"], DOWN: FORMATS["int-quantized"]},
        groups((["Linear"], INT8, True), (["re:.*self_attn.*"], PACK, True),
               ([f"model.layers.0.mlp.{one}_proj" for one in ("gate", "up", "down")], NV, True))),
    "ModelOpt's": (
        {ATTENTION: FORMATS["FP8"], MLP: FORMATS["NVFP4"], DOWN: FORMATS["NVFP4"]},
        modelopt("model.layers")),
    "ModelOpt's of a wrapping": (
        {ATTENTION: FORMATS["FP8"], MLP: FORMATS["NVFP4"], DOWN: FORMATS["NVFP4"]},
        modelopt("model.language_model.layers"))}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("impl", ["nanoserve", "transformers"])
def test_the_text_is_that_of_the_dense_matrices(checkpoints, tmp_path, name, impl):
    quantized, dense = write_mixture(checkpoints["qwen3"], tmp_path, *MIXTURES[name])
    assert text_of(quantized, model_impl=impl) == text_of(dense, model_impl=impl)
    few = dict(model_impl=impl, quantization="int8")
    assert text_of(quantized, **few) == text_of(dense, **few)


def test_experts_of_a_mixture_of_formats(checkpoints, tmp_path):
    quantized, dense = write_mixture(checkpoints["qwen3-moe"], tmp_path, {
        r"experts\.\d+\.": FORMATS["nvfp4-pack-quantized"], ATTENTION: FORMATS["float-quantized"]},
        groups((["re:.*experts.*"], NV, True), (["Linear"], FP8, True)))
    assert text_of(quantized) == text_of(dense)


def test_a_matrix_that_no_group_names_is_named(checkpoints, tmp_path):
    quantized, _ = write_mixture(checkpoints["qwen3"], tmp_path, {
        ATTENTION: FORMATS["float-quantized"], MLP: FORMATS["nvfp4-pack-quantized"]},
        groups((["re:.*q_proj"], FP8, True), (["re:.*gate_proj"], NV, True)))
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj .*groups don't name it"):
        LLM(quantized, max_model_len=64)
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mixed-precision"


@pytest.mark.parametrize("entry, words", [
    (groups((["Linear"], FP8, True), (["Linear"], NV, True)), "config_groups=.*in two"),
    (groups((["re:a"], FP8, False), (["re:b"], NV, True)), "format='mixed-precision'"),
    (groups(("Linear", FP8, True), (["re:b"], NV, True)), "targets='Linear'.*list of strings"),
    (modelopt("model.layers", quantized_layers={"a": dict(quant_algo="W4A8_AWQ")}), "W4A8_AWQ"),
    (modelopt("model.layers", quantized_layers=None), "quantized_layers=None")])
def test_groups_that_say_too_little_or_too_much_are_refused(entry, words):
    with pytest.raises(ValueError, match=words):
        read_format(entry)
