"""Quantised checkpoints as other programs write them: read as they are meant, or refused by name.

The same formats as in test_quantization.py, with what differs from writer to writer: zero points of
symmetric weights, parts that are left out or stored for nothing, other names, settings that differ
from matrix to matrix. The oracle is packing.py's formula for the numbers that were drawn.
"""

import shutil

import numpy as np
import pytest
import torch
from helpers import write_json
from loading import stored_tensors
from packing import (
    FORMATS,
    GROUP,
    SMALL,
    Drawn,
    Packed,
    awq,
    compressed,
    e2m1,
    float_rows,
    fp8,
    gptq,
    int_rows,
    pack,
    text_of,
    words,
    write,
    write_mixture,
)
from safetensors.torch import save_file

from nanoserve import LLM
from nanoserve_extras.quantization.formats import assemble, read_format


def read(one: Packed, **entry) -> torch.Tensor:
    """What becomes of a matrix. entry: settings of config.json beside its own."""
    parts = iter(("a file", f"layer.{part}", tensor) for part, tensor in one.tensors.items())
    [(_, name, weight)] = assemble(parts, one.entry | entry)
    assert name == "layer.weight"
    return weight


def without(one: Packed, part: str) -> Packed:
    return one._replace(tensors={key: value for key, value in one.tensors.items() if key != part})


def beside(one: Packed, **tensors: torch.Tensor) -> Packed:
    return one._replace(tensors=one.tensors | tensors)


# --------------------------------------------------------------------------- gptq


def symmetric(rows: int, columns: int, seed: int, bits: int = 4, stored: str = "7",
              version: str = "gptq") -> Packed:
    """GPTQ with sym=true: the zero point is 2^(bits - 1). stored: what stands in its place."""
    drawn, middle = Drawn(rows, columns, bits, seed), 2 ** (bits - 1)
    zeros = {"7": np.full_like(drawn.z, middle - 1), "8": np.full_like(drawn.z, middle),
             "0": np.zeros_like(drawn.z), "anything": drawn.z}[stored]
    one = gptq(rows, columns, seed, bits)
    entry = one.entry | dict(sym=True, checkpoint_format=version)
    return Packed(entry, one.tensors | dict(qzeros=words(zeros.T, bits)), drawn.dense(middle))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", ["7", "8", "0", "anything"])
def test_a_symmetric_matrix_has_its_zero_point_in_the_middle(stored, version, bits):
    """Files that say "gptq" and hold the 8 of "gptq_v2" were read off by one."""
    one = symmetric(40, 64, 3, bits, stored, version)
    assert torch.equal(read(one), one.dense)


@pytest.mark.parametrize("make", [
    gptq, lambda *of: gptq(*of, bits=8), lambda *of: gptq(*of, lacks=0), symmetric])
@pytest.mark.parametrize("columns", [64, 88])
def test_without_g_idx_neighbours_are_a_group(make, columns):
    """The last group may be cut off: 88 inputs in groups of 16."""
    one = make(40, columns, 3)
    assert torch.equal(read(without(one, "g_idx")), one.dense)


def test_without_g_idx_all_inputs_may_be_one_group():
    drawn = Drawn(24, 64, 4, 5, size=64)
    for size in (-1, None, 64):
        one = Packed(gptq(8, 16, 0).entry | dict(group_size=size), dict(
            qweight=words(drawn.q, 4).T.contiguous(), qzeros=words((drawn.z.T - 1) % 16, 4),
            scales=torch.from_numpy(drawn.s.T.copy())), drawn.dense())
        assert torch.equal(read(one), one.dense)


def test_an_order_that_is_not_stored_is_refused():
    one = gptq(40, 64, 3, shuffled=True)
    with pytest.raises(ValueError, match="layer .*desc_act=True.*g_idx"):
        read(without(one, "g_idx"))


def test_g_idx_may_come_last_and_in_another_file():
    one = gptq(40, 64, 3, shuffled=True)
    parts = [(f"file {i}", f"layer.{part}", tensor)
             for i, (part, tensor) in enumerate(sorted(one.tensors.items(), reverse=True))]
    [(_, name, weight)] = assemble(iter(parts), one.entry)
    assert torch.equal(weight, one.dense) and name == "layer.weight"


def test_the_other_parts_must_be_there():
    with pytest.raises(ValueError, match="layer .*; 1 "):
        read(without(without(gptq(8, 16, 0), "g_idx"), "qzeros"))


# ------------------------------------------------------------------- a bias of zeros


def biased(number: float):
    return lambda rows, columns, seed: beside(
        gptq(rows, columns, seed), bias=torch.full((rows,), number, dtype=torch.float16))


def test_a_bias_of_zeros_beside_each_matrix_changes_nothing(checkpoints, tmp_path):
    """AutoGPTQ's older files have one, and their config.json says that there is none."""
    found, expected = map(text_of, write(checkpoints["qwen3"], tmp_path, biased(0)))
    assert found == expected


def test_a_bias_that_is_not_zero_is_no_left_over(checkpoints, tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, biased(0.5))
    with pytest.raises(ValueError, match="_proj.bias has no place"):
        LLM(quantized, **SMALL)


def test_a_bias_of_zeros_that_the_model_has_is_used_once(checkpoints, tmp_path):
    """Dropped, it would be missing."""
    quantized, _ = write(checkpoints["llama-bias"], tmp_path, gptq)
    tensors = stored_tensors(quantized)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()
             if name.endswith(".bias")}
    assert zeros
    save_file(tensors | zeros, quantized / "model.safetensors", {"format": "pt"})
    with LLM(quantized, **SMALL) as llm:
        assert not llm.runner.model.layers[0].self_attn.qkv_proj.bias.any()


# ------------------------------------------------------------------ settings by module


GPTQ = gptq(8, 16, 0).entry


UP_AND_DOWN = {r"-:lm_head": {}, r"+:.*\.mlp\.(up|down)_proj": dict(bits=8), r".*\.mlp": {}}


@pytest.mark.parametrize("settings", [
    dict(dynamic=UP_AND_DOWN),
    dict(dynamic={r"model\.layers\.\d+\.mlp\.[ud]": dict(bits=8, group_size=GROUP)}),
    dict(extra_config={f"model.layers.12.mlp.{name}_proj": dict(bits=8, sym=False)
                       for name in ("up", "down")} | {"lm_head": dict(bits=16)}),
    dict(dynamic={r"+:.*(gate|q)_proj": dict(bits=4), ".*": dict(bits=8)}),
    dict(extra_config={r".*(up|down)_proj": dict(bits=8)}),
    dict(extra_config={"(up|down)": dict(bits=8), "model.layers.1": dict(bits=8)})])
def test_settings_of_some_matrices_go_by_their_names(settings):
    """GPTQModel's patterns match from the first letter on, AutoRound's anywhere, and the first that
    does is the one. AutoRound knows names, too, and layer 1 is not layer 12."""
    form = read_format(GPTQ | dict(bits=4) | settings)
    for name, bits in (("mlp.up", 8), ("mlp.down", 8), ("mlp.gate", 4), ("self_attn.q", 4)):
        assert form.of(f"model.layers.12.{name}_proj").bits == bits


def test_the_text_of_a_file_with_4_bits_and_8(checkpoints, tmp_path):
    folder, dense = write_mixture(checkpoints["qwen3"], tmp_path, {
        r"(up|down)_proj": FORMATS["gptq, 8 bits"], "_proj": gptq},
        GPTQ | dict(dynamic=UP_AND_DOWN))
    assert text_of(folder) == text_of(dense)
    assert len(text_of(folder, quantization="int4")) == 16


@pytest.mark.parametrize("settings", [
    dict(dynamic=None), dict(dynamic={}), dict(dynamic={r"-:.*\.down_proj": {}}),
    dict(dynamic={r"+:.*\.down_proj": dict(bits=4, group_size=GROUP)}),
    dict(extra_config={"lm_head": dict(bits=16, data_type="fp", group_size=128)}),
    dict(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
    dict(meta=dict(quantizer=["gptqmodel:4.0.0"], damp_percent=0.05)), dict(lm_head=True),
    dict(modules_to_not_convert=["lm_head"]), dict(is_marlin_format=False)])
def test_settings_that_the_tensors_names_say_once_more_are_read(settings):
    one = gptq(40, 64, 3)
    assert torch.equal(read(one, **settings), one.dense)


# ---------------------------------------------------------------------------- awq


def test_awq_without_zero_points_stores_an_8_in_their_place():
    one, drawn = awq(40, 64, 3), Drawn(40, 64, 4, 3)
    eights = beside(one, qzeros=torch.full_like(one.tensors["qzeros"], -0x77777778))
    assert torch.equal(read(eights, zero_point=False), drawn.dense(8))
    assert torch.equal(read(one), one.dense)
    with pytest.raises(ValueError, match="zero_point=False"):
        read(one, zero_point=False)


def test_awqs_older_names_are_known():
    one = awq(40, 64, 3)
    old = dict(quant_method="awq", w_bit=4, q_group_size=GROUP, version="GEMM", zero_point=True)
    assert torch.equal(read(one._replace(entry=old)), one.dense)


# ------------------------------------------------------------------ compressed-tensors


@pytest.mark.parametrize("make", [pack, int_rows], ids=["pack", "int"])
def test_zero_points_of_symmetric_weights_are_zeros(make):
    """Older files store them."""
    one = make(40, 64, 3)
    kind = torch.int8 if make is int_rows else torch.int32
    assert torch.equal(read(beside(one, weight_zero_point=torch.zeros(40, 1, dtype=kind))),
                       one.dense)


def changed(one: Packed, group: dict | None = None, **weights) -> Packed:
    """Other settings of the one group."""
    entry = one.entry["config_groups"]["group_0"]
    entry = entry | (group or {}) | dict(weights=entry["weights"] | weights)
    return one._replace(entry=one.entry | dict(config_groups=dict(group_0=entry)))


@pytest.mark.parametrize("change", [
    dict(actorder="weight"), dict(actorder="static"), dict(actorder=False), dict(dynamic=False),
    dict(group=dict(format="pack-quantized")), dict(group=dict(output_activations=None)),
    dict(group=dict(input_activations=dict(num_bits=8, type="int", dynamic=True))),
    dict(observer="minmax", scale_dtype="torch.bfloat16")], ids=str)
def test_settings_that_change_no_number_are_read(change):
    one = pack(40, 64, 3, symmetric=False)
    assert torch.equal(read(changed(one, **change)), one.dense)
    assert torch.equal(read(one, sparsity_config=dict(format="dense", targets=[])), one.dense)


@pytest.mark.parametrize("make", [float_rows, int_rows])
def test_the_oldest_format_may_hold_either_kind(make):
    """ "naive-quantized": of weights alone in 8-bit floats, and before other names were there."""
    one = make(40, 64, 3)
    assert torch.equal(read(one, format="naive-quantized"), one.dense)


def test_what_a_config_leaves_out_is_its_writers_default():
    """compressed-tensors' numbers are integers of 8 bits, Model Optimizer's groups have 16."""
    one = int_rows(40, 64, 3)
    weights = {key: value for key, value in one.entry["config_groups"]["group_0"][
        "weights"].items() if key not in ("type", "num_bits")}
    assert torch.equal(read(one, format="naive-quantized", config_groups=dict(
        group_0=dict(weights=weights))), one.dense)
    one = FORMATS["NVFP4"](40, 64, 3)
    assert one.entry.pop("group_size") == 16 and torch.equal(read(one), one.dense)


@pytest.mark.parametrize("name", ["group", "dynamic", True])
def test_an_order_of_inputs_has_several_names(name):
    one = pack(40, 64, 3, shuffled=True)
    assert torch.equal(read(changed(one, actorder=name)), one.dense)
    with pytest.raises(ValueError, match="weight_g_idx"):
        read(without(changed(one, actorder=name), "weight_g_idx"))


# ---------------------------------------------------------------------------- fp8


def test_exponents_are_scales():
    """ "ue8m0": powers of two, as a dtype of their own."""
    one = fp8(96, 64, 3)
    scale = 2.0 ** torch.randint(-9, -3, one.tensors["weight_scale_inv"].shape)
    expected = one.tensors["weight"].float() * scale.repeat_interleave(48, 0).repeat_interleave(
        40, 1)[:, :64]
    got = read(beside(one, weight_scale_inv=scale.to(torch.float8_e8m0fnu)), scale_fmt="ue8m0")
    assert torch.equal(got, expected)


def static_fp8(*of: int) -> Packed:
    """Ministral 3's and Devstral Small 2's files."""
    one = fp8(*of, block=None)
    return beside(one._replace(entry=one.entry | dict(activation_scheme="static")),
                  activation_scale=torch.tensor(0.013))


STATIC = dict(input_activations=dict(num_bits=8, dynamic=False, strategy="tensor"))


@pytest.mark.parametrize("one, scales", [
    (static_fp8(40, 64, 3), []),
    # llm-compressor's; older files have zero points beside the scales
    (changed(float_rows(40, 64, 3), STATIC), ["input_scale", "input_zero_point"]),
    (changed(int_rows(40, 64, 3), STATIC), ["input_scale", "input_zero_point"]),
    (float_rows(40, 64, 3), ["k_scale", "v_scale"])],
    ids=["fp8", "FP8", "W8A8", "keys and values"])
def test_fixed_scales_of_activations_and_of_a_cache_are_passed_over(one, scales):
    """As those that are found in the step."""
    one = beside(one, **dict.fromkeys(scales, torch.ones(1)))
    settings = dict(kv_cache_scheme=dict(num_bits=8)) if "k_scale" in scales else {}
    assert torch.equal(read(one, **settings), one.dense)
    assert read_format(one.entry | settings).passed_over


CACHE_ALONE = [
    dict(quant_method="compressed-tensors", format="dense", config_groups={},
         kv_cache_scheme=dict(num_bits=8, type="float")),
    compressed("naive-quantized") | dict(
        kv_cache_scheme=dict(num_bits=8), config_groups=dict(group_0=dict(
            targets=["re:.*k_proj"], weights=None, output_activations=dict(num_bits=8)))),
    dict(quant_method="modelopt", quant_algo=None, kv_cache_quant_algo="FP8")]


@pytest.mark.parametrize("entry", CACHE_ALONE, ids=lambda entry: entry["quant_method"])
@pytest.mark.parametrize("options", [{}, dict(model_impl="transformers"),
                                     dict(quantization="int8")], ids=str)
def test_where_the_cache_alone_is_rounded_weights_are_plain(checkpoints, tmp_path, entry, options):
    """Such a file was refused: its format packs no weight in a way that is known."""
    folder = tmp_path / "cache"
    shutil.copytree(checkpoints["qwen3"], folder)
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in (
        "k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale", "k_zero_point")}
    save_file(stored_tensors(folder) | scales, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", quantization_config=entry)
    assert text_of(folder, **options) == text_of(checkpoints["qwen3"], **options)


def test_that_scales_are_passed_over_is_said_once(checkpoints, tmp_path, capsys):
    folder, dense = write(checkpoints["qwen3"], tmp_path, static_fp8)
    expected = text_of(dense)
    for impl in ("nanoserve", "transformers"):
        capsys.readouterr()
        assert text_of(folder, model_impl=impl) == expected
        assert capsys.readouterr().err.count("scales of activations") == 1


@pytest.mark.parametrize("packing, make", [("gptq", gptq), ("awq", awq)])
def test_auto_rounds_files_are_gptqs_or_awqs(packing, make):
    """intel/auto-round's own method; `extra_config` names what stays plain."""
    one = make(40, 64, 3)
    entry = dict(quant_method="auto-round", packing_format=f"auto_round:auto_{packing}", bits=4,
                 group_size=GROUP, data_type="int", sym=False, autoround_version="0.8.0", iters=200,
                 extra_config={"lm_head": dict(bits=16, data_type="fp")})
    assert torch.equal(read(one._replace(entry=entry)), one.dense)


# ---------------------------------------------------------------- several formats in one checkpoint
# Each matrix is read by the group that names it: NVFP4 beside FP8 beside 16 bits, as
# llm-compressor, Unsloth and NVIDIA write them.


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
