"""Engines whose weights are 4 bits: what is kept of a checkpoint, what is rounded, what is wider.

The oracle of a text is an engine on a dense checkpoint whose matrices packing.py unpacked or
rounded, number for number. An LM head, where nothing else is said, is 8 bits by row.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loading import greedy, stored_tensors
from packing import FORMATS, by_definition, groups_by_definition, pack, write
from rank_threads import start_in_threads
from safetensors.torch import save_file
from small_kinds import ENGINES, needs_interpreter

from nanoserve import LLM, SamplingParams
from nanoserve import llm as llm_module
from nanoserve.extras.int4_linear import GroupedPanels, GroupedRows, Int4Linear
from nanoserve.extras.quantized_linear import Panels, Rows
from nanoserve.extras.speculative import Speculation

SMALL = dict(dtype="float32", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=16,
             device="cpu")
INT4 = SMALL | dict(quantization="int4")
FOUR_BITS = ["pack-quantized", "pack-quantized, zeros", "gptq", "gptq_v2", "awq"]


def change(folder: Path, new: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """The checkpoint's matrices, but for an embedding that is no head, become others."""
    tensors = stored_tensors(folder)
    for key in tensors:
        if key.endswith("_proj.weight") or key == "lm_head.weight" or (
                "embed_tokens" in key and "lm_head.weight" not in tensors):
            tensors[key] = new(key, tensors[key]).float().contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def head_rounded(folder: Path) -> Path:
    return change(folder, lambda key, one: one if "_proj" in key else by_definition(one))


@pytest.fixture
def rounded(checkpoints, tmp_path):
    """A dense checkpoint of the rounded matrices. shares: of columns, each rounded by itself, as
    ranks do it with those matrices whose columns they share."""
    def make(name: str, shares: int = 1) -> Path:
        def new(key, tensor):
            if "_proj" not in key:
                return by_definition(tensor)
            parts = shares if key.endswith(("o_proj.weight", "down_proj.weight")) else 1
            return torch.cat([groups_by_definition(part) for part in tensor.chunk(parts, 1)], 1)

        return change(Path(shutil.copytree(checkpoints[name], tmp_path / f"{name}-rounded")), new)

    return make


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(llm_module, "start_ranks", start_in_threads)
    return dict(tensor_parallel_size=2)


def text_of(model: Path, **options) -> list:
    with LLM(model, **SMALL | options) as llm:
        return greedy(llm, 16)


KINDS = {"cpu": "GroupedPanels", "triton": "TritonGroups"}


# ---------------------------------------------------------------------------- kept


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_checkpoint_keeps_its_numbers(name, checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS[name])
    expected = text_of(head_rounded(dense))
    with LLM(quantized, **INT4) as llm:
        assert greedy(llm, 16) == expected and llm.config.quantization == "int4"
        kinds = {type(each) for each in small_ones(llm).values()}
        assert kinds in ({GroupedPanels}, {GroupedRows})  # with a compiler, and without
        assert isinstance(llm.runner.model.lm_head.packed, (Panels, Rows))


def small_ones(llm: LLM) -> dict:
    """The packed matrices of the layers, by name."""
    return {name: one.packed for name, one in llm.runner.model.named_modules()
            if isinstance(one, Int4Linear) and name != "lm_head"}


@pytest.mark.parametrize("dtype, kernels", [
    ("bfloat16", "auto"), ("float16", "auto"),
    pytest.param("float16", "triton", marks=needs_interpreter)])
def test_a_product_of_an_engine_is_near_that_of_the_unpacked_weights(dtype, kernels, checkpoints,
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
        "triton": ["TritonGroups"], "auto": ["GroupedPanels", "GroupedRows"]}[kernels]
    assert (outs[1] - outs[0]).norm() < 1e-2 * outs[0].norm()


def test_ranks_keep_their_shares(checkpoints, tmp_path, two_ranks):
    """A share of 48 columns ends within a group of 32."""
    quantized, dense = write(checkpoints["qwen3"], tmp_path,
                             lambda *of: pack(*of, symmetric=False, size=32))
    expected = text_of(head_rounded(dense))
    assert text_of(quantized, quantization="int4", **two_ranks) == expected


def test_a_lm_head_of_4_bits_stays_so(checkpoints, tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["pack-quantized, zeros"])
    tensors = stored_tensors(quantized)
    one = FORMATS["pack-quantized, zeros"](*tensors.pop("lm_head.weight").shape, 9)
    tensors |= {f"lm_head.{part}": tensor for part, tensor in one.tensors.items()}
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with LLM(quantized, **INT4) as llm:
        assert isinstance(llm.runner.model.lm_head.packed, (GroupedPanels, GroupedRows))
        got = greedy(llm, 16)
    assert got == text_of(quantized, quantization="dequantize")


# ------------------------------------------------------------------------- what is wider


def test_act_order_becomes_int8_and_is_said(checkpoints, tmp_path, capfd):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq, act-order"])
    expected = text_of(dense, quantization="int8")
    with LLM(quantized, **INT4) as llm:
        assert greedy(llm, 16) == expected
        assert {type(each) for each in small_ones(llm).values()} <= {Panels, Rows}
    assert "with act-order, whose groups' inputs are no neighbours" in capfd.readouterr().err


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
            wide = [name for name, one in small_ones(llm).items()
                    if isinstance(one, (Panels, Rows))]
    assert 0 < (outs[1] - outs[0]).norm() < 1e-2 * outs[0].norm()
    assert wide == ["layers.0.self_attn.qkv_proj"]


def test_groups_that_8_does_not_divide_become_int8(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, lambda *of: pack(*of, size=4))
    assert text_of(quantized, quantization="int4") == text_of(dense, quantization="int8")


def test_an_embedding_of_4_bits_is_unpacked(checkpoints, tmp_path):
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


@pytest.mark.parametrize("kernels, name", ENGINES)
def test_the_text_is_that_of_the_rounded_weights(name, kernels, checkpoints, rounded, capfd):
    expected = text_of(rounded(name))
    capfd.readouterr()
    with LLM(checkpoints[name], **INT4, kernels=kernels) as llm:
        assert greedy(llm, 16) == expected
        assert {type(one).__name__ for one in small_ones(llm).values()} == {
            KINDS.get(kernels, "GroupedRows")}
    said = capfd.readouterr().err
    assert "float32, quantization='int4'" in said
    assert ("saves memory and costs time" in said) == (kernels not in KINDS)


def test_ranks_round_their_own_shares(checkpoints, rounded, two_ranks):
    expected = text_of(rounded("qwen3-tied", shares=2))
    assert text_of(checkpoints["qwen3-tied"], quantization="int4", **two_ranks) == expected


def test_8_bits_of_a_checkpoint_are_rounded_once_more(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["int-quantized"])
    assert text_of(quantized, quantization="int4") == text_of(dense, quantization="int4")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_more_than_two_matrices_wait_unrounded(load_format, checkpoints, monkeypatch):
    most, waiting = 0, set()
    make_room, finish = Int4Linear.make_room, Int4Linear.finish_loading

    def counted(self):
        nonlocal most
        make_room(self)
        waiting.add(self)
        most = max(most, len(waiting))

    def finished(self):
        finish(self)
        waiting.discard(self)
        assert self.weight is None and not self.pieces

    monkeypatch.setattr(Int4Linear, "make_room", counted)
    monkeypatch.setattr(Int4Linear, "finish_loading", finished)
    with LLM(checkpoints["qwen3"], **INT4, load_format=load_format) as llm:
        assert greedy(llm, 4) and not waiting
        assert len(small_ones(llm)) == 4 * 3 and most == (2 if load_format == "auto" else 1)


def test_kept_numbers_never_have_room_as_a_dense_matrix(checkpoints, tmp_path, monkeypatch):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    made = []
    make_room = Int4Linear.make_room
    monkeypatch.setattr(Int4Linear, "make_room", lambda self: (made.append(self), make_room(self)))
    with LLM(quantized, **INT4) as llm:
        assert made == [llm.runner.model.lm_head]


def test_made_up_weights_of_a_4_bit_checkpoint_are_4_bits(checkpoints, tmp_path):
    quantized, _ = write(checkpoints["qwen3"], tmp_path, FORMATS["gptq"])
    with LLM(quantized, **INT4, load_format="dummy") as llm:
        assert {type(one) for one in small_ones(llm).values()} <= {GroupedPanels, GroupedRows}


def test_a_draft_model_may_keep_4_bits_beside_a_rounded_model(checkpoints, tmp_path):
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS["awq"])
    drafts = dict(method="draft_model", num_speculative_tokens=2, model=str(quantized))
    with LLM(dense, **INT4, speculative_config=drafts) as llm:
        drafted = greedy(llm, 16)
        assert llm.extra(Speculation).counts()[0]
    assert text_of(dense, quantization="int4") == drafted


def test_a_pooling_model_keeps_its_embedding(checkpoints):
    vectors = []
    for options in (SMALL, INT4):
        with LLM(checkpoints["qwen3-tied"], **options, runner="pooling") as llm:
            assert llm.runner.model.embed_tokens.weight is not None
            vectors.append(torch.tensor(llm.embed([[*range(9)]])[0].outputs.embedding))
    assert not torch.equal(*vectors) and torch.dot(*vectors) > 0.9


def test_experts_are_refused(checkpoints):
    with pytest.raises(ValueError, match="quantization='int4', but Mixtral.* has experts"):
        LLM(checkpoints["mixtral"], **INT4)


def test_the_bundled_model_loses_little():
    """On a few lines of ours; the held-out text's figure is in docs/quantization.md."""
    text = ("The old woman put the kettle on the fire, and the two children sat down at the table. "
            "\"Have you come far?\" she asked. \"From the other side of the wood,\" said the boy, "
            "\"and we have not eaten since yesterday.\" So she gave them bread and milk, and when "
            "they had finished she told them of the king who lost his shadow.")
    params, losses = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for options in ({}, {"quantization": "int4"}):
        with LLM(max_model_len=256, num_gpu_blocks_override=32, device="cpu", **options) as llm:
            scored = llm.generate(text, params, use_tqdm=False)[0].prompt_logprobs[1:]
        losses.append(-sum(one.logprob for each in scored for one in each.values()) / len(scored))
    assert losses[0] < 4 and abs(losses[1] - losses[0]) < 0.05  # nats: 5% of the perplexity
