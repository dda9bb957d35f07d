"""Engines whose weights are 4 bits: what is kept of a checkpoint, what is rounded, what is wider.

The oracle of a text is an engine on a dense checkpoint whose matrices packing.py dequantised or
rounded, number for number. An LM head, where nothing else is said, is 8 bits by row.
"""

from pathlib import Path

import pytest
import torch
from loading import greedy, stored_tensors
from packing import FORMATS, SMALL, by_definition, pack, text_of, write
from safetensors.torch import save_file
from weight_kinds import needs_interpreter

from nanoserve import LLM
from nanoserve_extras.drafts.speculative import Speculation
from nanoserve_extras.quantization.quantized_linear import QuantisedLinear

INT4 = SMALL | dict(quantization="int4")
FOUR_BITS = ["pack-quantized", "pack-quantized, zeros", "gptq", "gptq_v2", "awq"]


def head_rounded(folder: Path) -> Path:
    """The checkpoint's LM head, or the embedding that is one, becomes what 8 bits leave of it."""
    tensors = stored_tensors(folder)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head] = by_definition(tensors[head]).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---------------------------------------------------------------------------- kept


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_checkpoint_keeps_its_numbers(name, checkpoints, tmp_path):
    kind = "qwen3-moe" if name in ("pack-quantized", "gptq") else "qwen3"  # experts, too
    quantized, dense = write(checkpoints[kind], tmp_path, FORMATS[name])
    expected = text_of(head_rounded(dense))
    with LLM(quantized, **INT4) as llm:
        assert greedy(llm, 16) == expected
        assert {*bits(llm).values()} == {4} and llm.runner.model.lm_head.packed.size == 0


def bits(llm: LLM) -> dict[str, int]:
    """What the matrices of the layers are packed to, by name."""
    return {name: 4 if one.packed.size else 8 for name, one in llm.runner.model.named_modules()
            if isinstance(one, QuantisedLinear) and name != "lm_head"}


@pytest.mark.parametrize("dtype, kernels", [
    ("bfloat16", "auto"), ("float16", "auto"),
    pytest.param("float16", "triton", marks=needs_interpreter)])
def test_a_product_of_an_engine_is_near_that_of_the_dequantised_weights(dtype, kernels, checkpoints,
                                                                     tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    outs, x = [], None
    for quantization in ("dequantize", "int4"):
        with LLM(quantized, **SMALL | dict(quantization=quantization, dtype=dtype,
                                           kernels=kernels)) as llm:
            layer = llm.runner.model.layers[0].self_attn.qkv_proj
            x = torch.randn(5, 64).to(getattr(torch, dtype)) if x is None else x
            outs.append(layer(x).double())
    assert type(layer.packed).__name__ in {
        "triton": ["TritonWeight"], "auto": ["CpuWeight", "TorchWeight"]}[kernels]
    assert layer.packed.size == 16
    assert (outs[1] - outs[0]).norm() < 1e-2 * outs[0].norm()


def test_ranks_keep_their_shares(checkpoints, tmp_path, ranks_in_threads):
    """A share of 48 columns ends within a group of 32."""
    quantized, dense = write(checkpoints["qwen3"], tmp_path,
                             lambda *of: pack(*of, symmetric=False, size=32))
    expected = text_of(head_rounded(dense))
    assert text_of(quantized, quantization="int4", tensor_parallel_size=2) == expected


def test_a_lm_head_of_4_bits_stays_so(checkpoints, tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["pack-quantized, zeros"])
    tensors = stored_tensors(quantized)
    one = FORMATS["pack-quantized, zeros"](*tensors.pop("lm_head.weight").shape, 9)
    tensors |= {f"lm_head.{part}": tensor for part, tensor in one.tensors.items()}
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with LLM(quantized, **INT4) as llm:
        assert llm.runner.model.lm_head.packed.size
        got = greedy(llm, 16)
    assert got == text_of(quantized, quantization="dequantize")


# ------------------------------------------------------------------------- what is wider


def test_act_order_becomes_int8_and_is_said(checkpoints, tmp_path, capfd):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq, act-order"])
    expected = text_of(dense, quantization="int8")
    with LLM(quantized, **INT4) as llm:
        assert greedy(llm, 16) == expected
        assert {*bits(llm).values()} == {8}
    assert "act-order" in capfd.readouterr().err


def test_a_plain_matrix_beside_4_bits_is_left_wider(checkpoints, tmp_path):
    """A checkpoint leaves out what suffers most. k is plain, and so q, k and v are 8 bits."""
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    tensors, key = stored_tensors(quantized), "model.layers.0.self_attn.k_proj."
    tensors = {name: one for name, one in tensors.items() if not name.startswith(key)}
    tensors[key + "weight"] = stored_tensors(dense)[key + "weight"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    x, outs = torch.randn(5, 64), []
    for options in (SMALL, INT4):
        with LLM(quantized, **options) as llm:
            outs.append(llm.runner.model.layers[0].self_attn.qkv_proj(x))
            of_8 = [name for name, number in bits(llm).items() if number == 8]
    assert 0 < (outs[1] - outs[0]).norm() < 1e-2 * outs[0].norm()
    assert of_8 == ["layers.0.self_attn.qkv_proj"]


def test_groups_that_8_does_not_divide_become_int8(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, lambda *of: pack(*of, size=4))
    assert text_of(quantized, quantization="int4") == text_of(dense, quantization="int8")


def test_an_embedding_of_4_bits_is_dequantised(checkpoints, tmp_path):
    """Where it is the head, too, the head's 8 bits are made of it."""
    quantized, dense = write(checkpoints["qwen3-tied"], tmp_path, FORMATS["gptq"])
    stored, plain, key = stored_tensors(quantized), stored_tensors(dense), "model.embed_tokens."
    one = FORMATS["gptq"](*plain[key + "weight"].shape, 9)
    del stored[key + "weight"]
    plain[key + "weight"] = one.dense
    save_file(stored | {key + part: tensor for part, tensor in one.tensors.items()},
              quantized / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    assert text_of(quantized, quantization="int4") == text_of(head_rounded(dense))


# ------------------------------------------------------------------------------ rounded


def test_8_bits_of_a_checkpoint_are_rounded_once_more(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["int-quantized"])
    assert text_of(quantized, quantization="int4") == text_of(dense, quantization="int4")


def test_kept_numbers_never_have_room_as_a_dense_matrix(checkpoints, tmp_path, monkeypatch):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    made = []
    make_room = QuantisedLinear.make_room
    monkeypatch.setattr(QuantisedLinear, "make_room",
                        lambda self, *args: (made.append(self), make_room(self, *args)))
    with LLM(quantized, **INT4) as llm:
        assert made == [llm.runner.model.lm_head]


def test_made_up_weights_of_a_4_bit_checkpoint_are_4_bits(checkpoints, tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    with LLM(quantized, **INT4, load_format="dummy") as llm:
        assert {*bits(llm).values()} == {4}


def test_a_draft_model_may_keep_4_bits_beside_a_rounded_model(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["awq"])
    drafts = dict(method="draft_model", num_speculative_tokens=2, model=str(quantized))
    with LLM(dense, **INT4, speculative_config=drafts) as llm:
        drafted = greedy(llm, 16)
        assert llm.extra(Speculation).num_drafts
    assert text_of(dense, quantization="int4") == drafted
