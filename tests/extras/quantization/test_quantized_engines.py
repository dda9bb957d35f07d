"""Engines whose weights are 8 bits or 4: how a model is loaded, and its text.

The oracle of a text is an engine on a dense checkpoint whose matrices packing.py rounded or
dequantised, number for number. An LM head is 8 bits by row unless a test says otherwise.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from loading import greedy, stored_tensors
from packing import FORMATS, SMALL, by_definition, groups_by_definition, pack, text_of, write
from safetensors.torch import save_file
from weight_kinds import ENGINES, needs_interpreter

from nanoserve import LLM, SamplingParams, build
from nanoserve.layers import Linear
from nanoserve_extras.quantization import quantization, quantized_experts
from nanoserve_extras.quantization.quantized_linear import QuantisedLinear

ROUNDED = {"int8": by_definition, "int4": groups_by_definition}
SIZES = {"int8": {0}, "int4": {0, 32}}  # of groups: in int4 q, k and v have 8 bits by row
IN_8_BITS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
KINDS = {"torch": "TorchWeight", "cpu": "CpuWeight"}
either = pytest.mark.parametrize("quantization", ROUNDED)


@pytest.fixture
def rounded(checkpoints, tmp_path):
    """A dense checkpoint of the rounded matrices. shares: of columns, each rounded by itself, as
    ranks do it with those matrices whose columns they share."""
    def make(name: str, quantization: str, shares: int = 1) -> Path:
        folder = tmp_path / f"{name}-rounded"
        shutil.copytree(checkpoints[name], folder)
        tensors = stored_tensors(folder)
        for key in [key for key in tensors if key.endswith("_proj.weight") or ".experts." in key]:
            parts = shares if key.endswith(("o_proj.weight", "down_proj.weight")) else 1
            how = ROUNDED["int8" if key.endswith(IN_8_BITS) else quantization]
            tensors[key] = torch.cat([how(part).float() for part in
                                      tensors[key].chunk(parts, dim=1)], dim=1)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return head_rounded(folder)

    return make


def head_rounded(folder: Path) -> Path:
    """The checkpoint's LM head, or the embedding that is one, becomes what 8 bits leave of it."""
    tensors = stored_tensors(folder)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head] = by_definition(tensors[head]).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@either
@pytest.mark.parametrize("kernels, name", ENGINES)
def test_the_text_is_that_of_the_rounded_weights(name, kernels, quantization, checkpoints, rounded,
                                                 capfd, monkeypatch):
    """A step's experts are computed in portions, of which the last is cut."""
    monkeypatch.setitem(quantized_experts.PORTIONS, "cpu", 3)
    expected = text_of(rounded(name, quantization))
    capfd.readouterr()
    with LLM(checkpoints[name], **SMALL, kernels=kernels, quantization=quantization) as llm:
        assert greedy(llm, 16) == expected
        assert kinds(llm) == {(KINDS[kernels], size) for size in SIZES[quantization]}
    said = capfd.readouterr().err
    assert f"float32, quantization='{quantization}'" in said
    assert ("saves memory and costs time" in said) == (kernels == "torch")


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_layers_keep_8_bits_where_the_head_is_larger_than_all_of_them(name, checkpoints, capfd):
    """As in Gemma 3 270M, where 4 cost the text most and save next to nothing."""
    numbers = sum(one.numel() for key, one in stored_tensors(checkpoints[name]).items()
                  if "_proj.weight" in key or ".experts." in key)
    hidden = json.loads((checkpoints[name] / "config.json").read_text())["hidden_size"]
    for more, sizes in ((0, SIZES["int4"]), (1, {0})):
        with LLM(checkpoints[name], **SMALL, quantization="int4", load_format="dummy",
                 hf_overrides=dict(vocab_size=numbers // hidden + more)) as llm:
            assert {size for _, size in kinds(llm)} == sizes
        assert ("mostly vocabulary" in capfd.readouterr().err) == bool(more)


def kinds(llm: LLM) -> set[tuple[str, int]]:
    """And sizes of groups, of all matrices of the layers. Routers stay wide."""
    return {(type(one.packed).__name__, one.packed.size) for layer in llm.runner.model.layers
            for path, one in layer.named_modules()
            if isinstance(one, Linear) and path != "mlp.gate"}


@needs_interpreter
@pytest.mark.parametrize("quantization, drafts", [("int4", False), *(pytest.param(
    *full, marks=pytest.mark.full) for full in (("int8", False), ("int4", True), ("int8", True)))])
def test_kernels_for_a_gpu_are_recorded_in_graphs_experts_too(drafts, quantization, checkpoints,
                                                              rounded, recorded):
    """A mixture, or one as the draft model of a dense network."""
    name, options = ("tiny", dict(speculative_config=dict(
        method="draft_model", num_speculative_tokens=2, model=str(checkpoints["tiny-moe"])))
                     ) if drafts else ("tiny-moe", {})
    expected = text_of(rounded(name, quantization))[:6]
    with LLM(checkpoints[name], **SMALL | dict(max_num_seqs=1), kernels="triton",
             quantization=quantization, **options) as llm:
        assert greedy(llm, 6) == expected
        assert kinds(llm) == {("TritonWeight", size) for size in SIZES[quantization]}
    assert {size.network for size in recorded} == {0, int(drafts)}


def test_products_that_can_not_be_compiled_are_an_error_at_the_start(checkpoints, monkeypatch):
    """The compiler was asked in the first step, and each step failed."""
    def fails():
        raise build.BuildError("the C++ compiler g++ failed")

    monkeypatch.setattr(quantization, "library", fails)
    for asked in ("int8", "int4"):
        with pytest.raises(ValueError, match=rf"quantization='{asked}'.*g\+\+.*'torch'"):
            LLM(checkpoints["tiny"], **SMALL, quantization=asked, kernels="cpu")


@pytest.mark.parametrize("kernels", ["auto", pytest.param("triton", marks=needs_interpreter)])
def test_an_lm_head_that_is_the_embedding_is_there_once(checkpoints, kernels):
    with LLM(checkpoints["qwen3-tied"], **SMALL, quantization="int8", kernels=kernels) as llm:
        embedding = llm.runner.model.embed_tokens
        assert embedding.weight is None and not list(embedding.parameters())
        ids = torch.tensor([3, 255, 3])
        vectors = embedding(ids)
    stored = stored_tensors(checkpoints["qwen3-tied"])["model.embed_tokens.weight"]
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.double(), by_definition(stored)[ids])


@either
def test_ranks_round_their_own_shares(quantization, checkpoints, rounded, ranks_in_threads):
    for name in ("qwen3-tied", "qwen3-moe"):
        expected = text_of(rounded(name, quantization, shares=2))
        assert expected == text_of(
            checkpoints[name], quantization=quantization, tensor_parallel_size=2)


@either
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_more_than_two_matrices_wait_unrounded(load_format, quantization, checkpoints,
                                                  monkeypatch):
    """In a file that is sorted by names, k_proj waits for q_proj while o_proj comes. Made-up
    weights are made one at a time."""
    most, waiting, kind = 0, set(), QuantisedLinear
    make_room, finish = kind.make_room, kind.process_weights_after_loading

    def counted(self, *args):
        nonlocal most
        make_room(self, *args)
        waiting.add(self)
        most = max(most, len(waiting))

    def finished(self):
        finish(self)
        waiting.discard(self)
        assert self.weight is None and not self.pieces

    monkeypatch.setattr(kind, "make_room", counted)
    monkeypatch.setattr(kind, "process_weights_after_loading", finished)
    with LLM(checkpoints["qwen3"], **SMALL, quantization=quantization,
             load_format=load_format) as llm:
        assert greedy(llm, 4) and not waiting
        matrices = [m for m in llm.runner.model.modules() if isinstance(m, kind)]
    assert len(matrices) == 4 * 3 + 1 and most == (2 if load_format == "auto" else 1)


@pytest.mark.parametrize("quantization, near", [("int8", 0.99), ("int4", 0.9)])
def test_a_pooling_model_keeps_its_embedding(quantization, near, checkpoints):
    """It has no head, so nothing is gained by rounding the vectors that are looked up."""
    vectors = []
    for options in ({}, {"quantization": quantization}):
        with LLM(checkpoints["qwen3-tied"], **SMALL, runner="pooling", **options) as llm:
            assert llm.runner.model.embed_tokens.weight is not None
            vectors.append(torch.tensor(llm.embed([[*range(9)]])[0].outputs.embedding))
    assert not torch.equal(*vectors) and torch.dot(*vectors) > near


def test_whole_experts_of_ranks_are_refused(checkpoints):
    with pytest.raises(ValueError, match="expert_parallel=True with quantization="):
        LLM(checkpoints["mixtral"], **SMALL, quantization="int4", expert_parallel=True,
            tensor_parallel_size=2)


@either
def test_a_row_of_experts_has_the_same_bits_alone_and_in_a_crowd(checkpoints, quantization):
    """Chosen experts get other rows with each company."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    prompts = [[i, 7, 30 + i] * (1 + i) for i in range(6)]
    with LLM(checkpoints["qwen3-moe"], **SMALL | dict(num_gpu_blocks_override=64),
             quantization=quantization) as llm:
        def told(some):
            return [(one.token_ids, [step[token].logprob for token, step in zip(
                one.token_ids, one.logprobs, strict=True)]) for one in (
                    output.outputs[0] for output in llm.generate(some, params, use_tqdm=False))]

        assert told(prompts) == [told([prompt])[0] for prompt in prompts]


def test_the_bundled_model_hardly_notices():
    """On a few lines of ours; the held-out text's figures are in docs/extras.md. A
    hundredth of a nat is 1% of the perplexity."""
    text = ("The old woman put the kettle on the fire, and the two children sat down at the table. "
            "\"Have you come far?\" she asked. \"From the other side of the wood,\" said the boy, "
            "\"and we have not eaten since yesterday.\" So she gave them bread and milk, and when "
            "they had finished she told them of the king who lost his shadow.")
    params, losses = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for options in ({}, *({"quantization": one} for one in ("int8", "int4"))):
        with LLM(max_model_len=256, num_gpu_blocks_override=32, device="cpu", **options) as llm:
            scored = llm.generate(text, params, use_tqdm=False)[0].prompt_logprobs[1:]
        losses.append(-sum(one.logprob for each in scored for one in each.values()) / len(scored))
    assert losses[0] < 4
    for loss, bound in zip(losses[1:], (0.01, 0.05), strict=True):
        assert abs(loss - losses[0]) < bound


# ------------------------------------------------------------------------ a checkpoint's own 4 bits


INT4 = SMALL | dict(quantization="int4")
FOUR_BITS = ["pack-quantized", "pack-quantized, zeros", "gptq", "gptq_v2", "awq", "nanoserve"]


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
    return {name: one.packed.bits for name, one in llm.runner.model.named_modules()
            if isinstance(one, QuantisedLinear) and name != "lm_head"}


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


@pytest.mark.parametrize("name, kind", [("nanoserve", "int4"), ("nanoserve, 8 bits", "int8")])
def test_a_folder_of_ours_is_served_as_it_is(name, kind, checkpoints, tmp_path, capfd):
    """Asked for other bits it is rounded once more."""
    quantized, dense = write(checkpoints["qwen3"], tmp_path, FORMATS[name])
    expected = text_of(head_rounded(dense))
    with LLM(quantized, **SMALL) as llm:
        assert greedy(llm, 16) == expected
        assert {*bits(llm).values()} == {int(kind[-1])}
    assert f"float32, quantization='{kind}'" in capfd.readouterr().err
    assert text_of(quantized, quantization=kind, tensor_parallel_size=1) == expected
    for other in {"int8", "int4", "dequantize"} - {kind}:
        asked = None if other == "dequantize" else other
        assert text_of(quantized, quantization=other) == text_of(
            write_dense(quantized, dense), quantization=asked)


def write_dense(quantized: Path, dense: Path) -> Path:
    """The same numbers as a dense checkpoint, whose head is not rounded."""
    shutil.copytree(dense, folder := dense.parent / "plain", dirs_exist_ok=True)
    head = stored_tensors(quantized)["lm_head.weight"]
    save_file(stored_tensors(dense) | {"lm_head.weight": head}, folder / "model.safetensors",
              {"format": "pt"})
    return folder


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


@pytest.mark.parametrize("kernels", KINDS)
def test_an_embedding_of_4_bits_stays_so_where_it_is_the_head(kernels, checkpoints, tmp_path,
                                                              ranks_in_threads):
    quantized, dense = write(checkpoints["qwen3-tied"], tmp_path, FORMATS["gptq"])
    stored, plain, key = stored_tensors(quantized), stored_tensors(dense), "model.embed_tokens."
    one = FORMATS["gptq"](*plain[key + "weight"].shape, 9)
    del stored[key + "weight"]
    plain[key + "weight"] = one.dense
    save_file(stored | {key + part: tensor for part, tensor in one.tensors.items()},
              quantized / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    with LLM(quantized, **INT4, kernels=kernels) as llm:
        assert llm.runner.model.embed_tokens.packed.size
        assert torch.equal(llm.runner.model.embed_tokens(torch.arange(40)), one.dense[:40])
        got = greedy(llm, 16)
    assert got == text_of(dense)
    assert got == text_of(quantized, quantization="int4", kernels=kernels, tensor_parallel_size=2)


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
