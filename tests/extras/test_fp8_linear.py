"""8-bit floats: products against float64 and the definition of e4m3, and engines made of them.

torch's product runs on a CPU, too, with the very call that a GPU gets: its layout is tested here,
and a GPU's own numbers in tests/gpu. (Older versions of torch have no scales by row on a CPU.) The
oracle of a text is an engine of dense rounded matrices whose activations are rounded here, number
for number.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from loading import greedy, stored_tensors
from packing import Packed, by_definition, compressed, fp8_by_definition, write
from safetensors.torch import save_file

from nanoserve import LLM
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.extras import fp8_linear, quantized_linear
from nanoserve.extras.fp8_linear import Fp8Rows, ScaledRows, check_device, round_rows
from nanoserve.extras.quantization import choose_layers
from nanoserve.frontend.defaults import resolve
from nanoserve.layers import Linear

SMALL = dict(dtype="float32", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=16,
             device="cpu", quantization="fp8")
# Relative to the largest result. torch's product leaves as bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def torch_scales_rows() -> bool:
    numbers = torch.ones(32, 32).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(numbers, numbers.T, scale_a=torch.ones(32, 1), scale_b=torch.ones(1, 32),
                         out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.fixture(params=[Fp8Rows, pytest.param(ScaledRows, marks=pytest.mark.skipif(
    not torch_scales_rows(), reason="needs a torch that scales rows on this CPU"))])
def kind(request):
    return request.param


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T with both rounded by row, in float64."""
    (x, x_scales), (weight, scales) = fp8_by_definition(x), fp8_by_definition(weight)
    return (x @ weight.T) * x_scales * scales.T


def close(kind: type, got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).abs().max() / expected.abs().max()
    dtype = torch.bfloat16 if kind is ScaledRows else got.dtype
    assert error <= TOLERANCE[dtype], f"{error:.1e}"


# ------------------------------------------------------------------------------ products


def test_rounding_by_hand():
    values, scales = round_rows(torch.tensor([[0.52, -1.3, 0.07], [0, 0, 0], [448, 26, 1]]))
    assert values.tolist() == [[176, -448, 24], [0, 0, 0], [448, 26, 1]]
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    torch.testing.assert_close(scales, torch.tensor([1.3 / 448, 0, 1]))


def test_numbers_are_rounded_to_the_nearest():
    """Of very different sizes, so that those below the normal ones of e4m3 occur."""
    x = torch.randn(50, 300) * torch.logspace(-6, 0, 300)
    values, _ = round_rows(x)
    assert torch.equal(values.double(), fp8_by_definition(x)[0])
    assert (values.double().abs() < 2 ** -6).any() and (values == 0).any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (33, 7), (100, 513), (1, 1)], ids=str)
def test_a_product_is_that_of_the_rounded_numbers(kind, dtype, shape):
    """Sizes that 16 does not divide are filled up. A row of zeros on either side is one."""
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(dtype)
    weight[-1] *= shape[0] == 1
    packed = kind.of(weight.to(dtype))
    assert packed.values.dtype == torch.float8_e4m3fn
    assert not any(size % 16 for size in packed.values.shape)
    for num_rows in (0, 1, 6, 40):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        x[3:4] = 0
        expected, got = product(x, weight.to(dtype)), packed.linear(x, None)
        assert got.shape == expected.shape and got.dtype == dtype and got.is_contiguous()
        if num_rows:
            close(kind, got, expected)
            close(kind, packed.linear(x, bias), expected + bias.double())


def test_it_is_near_the_product_of_the_weight_itself(kind):
    weight, x = torch.randn(64, 1024), torch.randn(9, 1024)
    expected = x.double() @ weight.double().T
    assert (kind.of(weight).linear(x, None) - expected).norm() < 5e-2 * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_does_not_depend_on_the_others(kind, dtype):
    """Not even on one that is a thousand times as large, or no number at all."""
    packed, x = kind.of(torch.randn(50, 700)), torch.randn(40, 700).to(dtype)
    x[7] *= 1000
    x[8, 5] = torch.nan
    together = packed.linear(x, None)
    assert together[8].isnan().all() and not together[9:].isnan().any()
    for i in (0, 6, 9, 39):
        alone = packed.linear(x[i:i + 1], None)[0]
        if kind is Fp8Rows:
            assert torch.equal(alone, together[i])
        else:  # torch may choose other sums for other numbers of rows
            close(kind, alone, together[i].double())


def test_large_matrices_are_rounded_and_widened_in_portions(monkeypatch):
    weight, x = torch.randn(100, 32), torch.randn(5, 32)
    whole = Fp8Rows.of(weight)
    monkeypatch.setattr(quantized_linear, "PORTION", 32 * 40)  # 32 rows
    parts = Fp8Rows.of(weight)
    assert torch.equal(parts.values.float(), whole.values.float())
    assert torch.equal(parts.linear(x, None), whole.linear(x, None))


def test_a_gpu_without_8_bit_floats_is_refused_before_weights_are_read(qwen3, monkeypatch):
    model = ModelConfig.from_folder(qwen3)
    config = resolve(EngineConfig(model=str(qwen3), quantization="fp8"), "cuda", model)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for found in ((8, 0), (8, 6), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        with pytest.raises(ValueError, match="quantization='fp8', but NVIDIA A100 has compute "
                           f"capability {found[0]}.{found[1]},.* from 8.9 on: use 'int8'"):
            choose_layers(config, model, print)
    for found in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        said = []
        made = choose_layers(config, model, said.append)[1]["linear"]
        assert made.func is quantized_linear.Int8Linear
        assert made.keywords["kind"] is (
            fp8_linear.ScaledRows if config.kernels == "triton" else Fp8Rows)
        assert not said  # nothing is slow there
    choose_layers(replace(config, kernels="torch"), model, said.append)
    assert "costs time" in said[0]
    check_device("cpu")


# -------------------------------------------------------------------------- whole engines


@pytest.fixture
def rounded_text(checkpoints, tmp_path, monkeypatch):
    """The text of dense rounded matrices with rounded activations. shares: of the inputs of o and
    down, each rounded by itself, as ranks do it."""
    def make(name: str, shares: int = 1) -> list:
        folder = shutil.copytree(checkpoints[name], tmp_path / "rounded")
        tensors = stored_tensors(folder)
        for key, tensor in tensors.items():
            if key.endswith("_proj.weight"):
                tensors[key] = in_shares(key.removesuffix(".weight"), tensor, shares).float()
            elif key == "lm_head.weight" or "embed" in key and "lm_head.weight" not in tensors:
                tensors[key] = by_definition(tensor).float()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        multiply = Linear.multiply

        def rounded(self, x, bias=None):
            [*names] = self.matrices
            return multiply(self, x if names == ["lm_head"] else in_shares(
                names[0], x, shares).to(x), bias)

        plain = SMALL | dict(quantization=None)
        with monkeypatch.context() as patched, LLM(folder, **plain) as llm:
            patched.setattr(Linear, "multiply", rounded)
            return greedy(llm, 16)

    return make


def in_shares(name: str, tensor: torch.Tensor, shares: int) -> torch.Tensor:
    pieces = tensor.chunk(shares if name.endswith(("o_proj", "down_proj")) else 1, 1)
    return torch.cat([torch.mul(*fp8_by_definition(piece)) for piece in pieces], 1)


@pytest.mark.parametrize("name, kernels", [("qwen3", "torch"), ("qwen3-tied", "auto"),
                                           ("llama-bias", "torch")])
def test_the_text_is_that_of_the_rounded_numbers(name, kernels, checkpoints, rounded_text, capfd):
    expected = rounded_text(name)
    capfd.readouterr()
    with LLM(checkpoints[name], **SMALL, kernels=kernels) as llm:
        assert greedy(llm, 16) == expected
        layer, network = llm.runner.model.layers[0], llm.runner.model
        assert isinstance(layer.mlp.down_proj.packed, Fp8Rows)
        head = network.embed_tokens if name == "qwen3-tied" else network.lm_head
        assert head.packed[0].dtype == torch.int8
    said = capfd.readouterr().err
    assert "float32, quantization='fp8'" in said and "saves memory and costs time" in said


def test_ranks_round_their_own_shares(checkpoints, rounded_text, ranks_in_threads):
    expected = rounded_text("qwen3", shares=2)
    with LLM(checkpoints["qwen3"], **SMALL, tensor_parallel_size=2) as llm:
        assert greedy(llm, 16) == expected


def full_rows(rows: int, columns: int, seed: int) -> Packed:
    """compressed-tensors' e4m3 by row, whose largest number is 448, as those have it that divide
    by a row's largest."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).mul(120).clamp(-448, 448)
    values[torch.arange(rows), torch.arange(rows) % columns] = 448
    values = values.to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, 1, generator=generator) + 0.5) * columns ** -0.5 / 120
    return Packed(compressed("float-quantized", type="float", strategy="channel"),
                  dict(weight=values, weight_scale=scales), values.float() * scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_by_row_keeps_its_numbers(dtype, checkpoints, tmp_path):
    """It is dequantised and rounded again: to the same numbers. A scale is that of the engine's
    dtype."""
    quantized, _ = write(checkpoints["qwen3"], tmp_path, full_rows)
    stored = stored_tensors(quantized)
    with LLM(quantized, **SMALL | dict(dtype=dtype)) as llm:
        attention = llm.runner.model.layers[1].self_attn
        packed = {"qkv": attention.qkv_proj.packed, "o": attention.o_proj.packed}
    for names, one in packed.items():
        path = "model.layers.1.self_attn.{}_proj.weight{}"
        values, scales = (torch.cat([stored[path.format(name, part)].float() for name in names])
                          for part in ("", "_scale"))
        assert torch.equal(one.values.float(), values)
        torch.testing.assert_close(one.scales, scales[:, 0], atol=0,
                                   rtol=2e-7 if dtype == "float32" else 2 ** -8)
