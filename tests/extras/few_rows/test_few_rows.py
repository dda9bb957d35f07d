"""Products of one to four rows, with what is fused into them, against float64; and engines."""

import pytest
import torch
from checkpoints import assert_same_text
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import LLM, SamplingParams, ops
from nanoserve.graphs import Size
from nanoserve_extras.few_rows.few_rows import FewRows

pytest.importorskip("triton")

from nanoserve_extras.few_rows.few_rows_triton import product

EPS = 1e-6


def numbers(*sizes: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 64, 40), (2, 100, 7), (3, 1500, 5),
                                                   (4, 32, 96)])
@pytest.mark.parametrize("norm, adds, bias, activation", [
    (False, False, False, None), (True, False, True, None), (True, True, True, "silu"),
    (True, True, False, "gelu_tanh"), (False, True, True, None)])
def test_a_product_with_what_stands_around_it(dtype, rows, inputs, outputs, norm, adds, bias,
                                              activation):
    """Sizes that no tile divides, of one piece and of two; rows that are no power of two."""
    matrices = 2 if activation else 1
    x = numbers(rows, 2 * inputs).to(dtype)[:, :inputs]  # rows that are further apart
    residual = numbers(rows, inputs + 1)[:, 1:].to(dtype).contiguous() if adds else None
    weight = numbers(matrices * outputs, inputs, scale=inputs ** -0.5).to(dtype)
    added = numbers(matrices * outputs).to(dtype) if bias else None
    gain = 1 + numbers(inputs, scale=0.1) if norm else None
    got, total = product(x, weight, added, residual, gain, EPS, activation)
    stream = x if residual is None else x + residual
    assert torch.equal(total, stream) and got.dtype == dtype
    wide = stream.double()
    if norm:
        wide = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * gain.double()
    right = wide @ weight.double().T + (0 if added is None else added.double())
    if activation:
        right = ops.act_and_mul(right, activation)
    assert (got - right).norm() < 3 * torch.finfo(dtype).eps * right.norm()


def start(folder, extras, **options) -> LLM:
    return LLM(folder, extras=extras, dtype="float32", device="cpu", kernels="triton",
               num_gpu_blocks_override=48, max_num_seqs=1, **options)


def launches(llm: LLM) -> int:
    """Kernels of a recorded step's layers: ours, and torch's products."""
    calls = [call[0] for call in llm.runner.graphs.graphs[Size(1, 1)][0].calls]
    ours = [one for one in calls if not hasattr(one, "overloadpacket")]
    products = [one for one in calls if hasattr(one, "overloadpacket")
                and one.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::linear")]
    return len(ours) + len(products)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama-bias", marks=pytest.mark.full)])
def test_steps_of_few_rows_write_transformers_text_in_fewer_kernels(checkpoints, references,
                                                                    recorded, name):
    """A prompt, and one row: seven kernels a layer for ten, where attention's keys are split."""
    params, found = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), []
    expected, gaps = references(name, [5] * 20, 12)
    for extras in [], [FewRows()]:
        with start(checkpoints[name], extras) as llm:
            [output] = llm.generate([[5] * 20], params, use_tqdm=False)
            assert_same_text(output.outputs[0].token_ids, expected[:4], gaps, name)
            found.append(launches(llm))
            layers = llm.runner.model_config.num_hidden_layers
    assert found == [10 * layers + 1, 7 * layers + 1], "and the last norm"
    assert Size(1, 1) in recorded


def test_what_else_a_layer_has_takes_the_plain_steps(checkpoints, references):
    """Experts, a second norm, small weights, and five rows; and a CPU's kernels refuse."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for name in "qwen3-moe", "gemma2":
        with start(checkpoints[name], [FewRows()], enforce_eager=True) as llm:
            [output] = llm.generate([[1, 7, 9]], params, use_tqdm=False)
            expected, gaps = references(name, [1, 7, 9], 12)
            assert_same_text(output.outputs[0].token_ids, expected[:3], gaps, name)
    with pytest.raises(ValueError, match=r"FewRows\(\) is a kernel for GPUs.*leave it out"):
        LLM(checkpoints["qwen3"], device="cpu", kernels="torch", extras=[FewRows()])
