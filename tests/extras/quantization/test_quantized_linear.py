"""Products with weights of 8 bits by row and of 4 or 8 in groups; the oracle is float64, by the
definition of rounding, or number by number of what a checkpoint has (packing.py).

Engines that are made of such weights are the business of test_quantized_engines.py.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from packing import Drawn, by_definition, groups_by_definition
from weight_kinds import KINDS, TOLERANCE, close, needs_compiler, row_counts

from nanoserve import build
from nanoserve.build import functions_of
from nanoserve.layers import Placement
from nanoserve.parallel import Slice
from nanoserve_extras.quantization import quantized_linear
from nanoserve_extras.quantization.quantized_linear import (
    CpuWeight,
    Quantised,
    QuantisedLinear,
    TorchWeight,
    join,
    round_rows,
)

ON_TILES = "-DMATRIX_TILES -DPLAIN_TILES"  # products of bfloat16 alone
CPU_FLAGS = {"the machine's": "", "AVX2": "-mno-avx512f", "matrix tiles": ON_TILES,
             "plain C++": f"-mno-avx512f -mno-avx2 {ON_TILES}"}
BY_SIZE = {0: by_definition, 32: groups_by_definition}
CPU = torch.device("cpu")
both = pytest.mark.parametrize("size", BY_SIZE, ids=["8 bits", "4 bits"])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


HEADS = {"float16": torch.float16, "float32": torch.float32, "no minima": None}


def grouped(shape: tuple[int, int], size: int, seed: int = 0, bits: int = 4,
            heads: str = "float16") -> tuple[Quantised, torch.Tensor]:
    """A matrix as a file may have it, and what it means: q * s + m, number by number."""
    drawn, count = Drawn(*shape, bits, seed, size), -(-shape[1] // size)
    generator, dtype = torch.Generator().manual_seed(seed), HEADS[heads]
    values = torch.from_numpy(drawn.q - 128).to(torch.int8) if bits == 8 else (
        torch.from_numpy(drawn.q).byte())
    scales = torch.from_numpy(drawn.s).float() * (1 if dtype == torch.float16 else 1 / 3)
    lowest = -values.float().mean() + 4 * torch.randn(shape[0], count, generator=generator)
    minima = lowest * scales
    one = Quantised(values, scales, None, size) if dtype is None else Quantised(
        values, scales.to(dtype), minima.to(dtype), size)
    dense = torch.empty(shape)
    for i, group in enumerate(drawn.group):
        low = 0 if dtype is None else one.minima[:, group].float()
        dense[:, i] = values[:, i].float() * one.scales[:, group].float() + low
    return one, dense


def packed(kind, one: Quantised):
    """As `QuantisedLinear` does it."""
    return kind.of(join([one]), device=CPU)


# -------------------------------------------------------------------------- products


def check_products(kind, weight, meant: torch.Tensor, dtype: torch.dtype) -> None:
    """For numbers of rows around those of a tile."""
    bias = torch.randn(len(meant)).to(dtype)
    for num_rows in row_counts(kind, dtype):
        x = torch.randn(num_rows, meant.shape[1]).to(dtype)
        expected, got = x.double() @ meant.double().T, weight.linear(x, None)
        assert got.shape == expected.shape and got.dtype == dtype
        if num_rows:
            close(got, expected)
            close(got := weight.linear(x, bias), expected + bias.double())
            sums = weight.linear(x, bias, torch.float32)  # an LM head's: not rounded to x's dtype
            assert sums.dtype == torch.float32 and (
                kind is not CpuWeight or torch.equal(sums.to(dtype), got))
            close(sums.to(dtype), expected + bias.double())
            assert dtype is torch.float32 or sums.numel() < 20 or (sums != sums.to(dtype)).any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (33, 7), (100, 513), (40, 1537), (1, 1)], ids=str)
def test_a_product_is_that_of_the_rounded_weight(kind, dtype, shape):
    """Sizes that no panel, unit or block divides; transposed, as GPTQ's and AWQ's files have it."""
    weight = torch.randn(shape[::-1]).to(dtype).T
    check_products(kind, kind.of(weight), by_definition(weight), dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape, size", [
    ((16, 32), 32), ((33, 7), 16), ((100, 513), 64), ((40, 1537), 128), ((3, 1), 32),
    ((20, 1100), 1100), ((24, 2048), 1024), ((24, 96), 48)], ids=str)
def test_a_product_is_that_of_the_numbers_that_were_kept(kind, shape, size, bits, heads):
    """Sizes that no panel, line, group or block divides; a single group; groups above a block, and
    such as don't divide it. Rows are looked up bit by bit."""
    one, dense = grouped(shape, size, bits=bits, heads=heads)
    assert torch.equal(one[:], dense) and torch.equal(one[5:9], dense[5:9])
    weight, ids = packed(kind, one), torch.tensor([0, len(dense) - 1, len(dense) // 2, 0])
    assert torch.equal(weight.rows(ids), dense[ids])
    for dtype in (torch.float32, torch.bfloat16 if kind is CpuWeight else torch.float16):
        check_products(kind, weight, dense if kind is CpuWeight else dense.to(dtype), dtype)


def test_a_scale_that_float16_says_with_few_bits_stays_exact(kind):
    """Below 2^-14 it has fewer than 11; negative ones, as llama.cpp's have a sign."""
    scales = torch.tensor([[2 ** -24, -3 * 2 ** -24], [-2 ** -15, 60000]]).half()
    minima = torch.tensor([[-2 ** -24, 5 * 2 ** -24], [0, -60000]]).half()
    values = torch.arange(32).view(2, 16).fmod(16).byte()
    weight = packed(kind, Quantised(values, scales, minima, 8))
    meant = values.double().view(2, 2, 8) * scales.double()[..., None] + minima.double()[..., None]
    assert torch.equal(weight.rows(torch.arange(2)).double(), meant.flatten(1))
    got = weight.linear(torch.eye(16), None).T
    torch.testing.assert_close(got.double(), meant.flatten(1), rtol=1e-6, atol=0)


def test_numbers_that_float16_has_no_room_for_are_rounded_all_the_same(kind):
    """All of them too small for a scale of float16, or some too large."""
    for factor in (1e-6, 1e6):
        weight = torch.randn(20, 64) * factor
        error = (kind.of(weight, 32).linear(torch.eye(64), None).T - weight).abs()
        groups = weight.unflatten(1, (2, 32))
        step = (groups.amax(2) - groups.amin(2)) / 15
        assert (error.unflatten(1, (2, 32)) <= 0.501 * step[..., None]).all()


def test_the_numbers_are_kept_to_the_last_bit(kind):
    """Each input alone in its row: the sum is one weight, q * s + m, of which each part may be
    rounded. A CPU's 1 becomes 32767 and back, which is the weight times 1 + 2^-24."""
    one, dense = grouped((48, 160), 32)
    got = packed(kind, one).linear(torch.eye(160), None).T
    parts = one.values * one.scales.float().repeat_interleave(32, 1) + one.minima.float().abs(
        ).repeat_interleave(32, 1)
    assert ((got - dense).abs() <= 3e-7 * parts * (kind is CpuWeight)).all()


@both
def test_large_matrices_are_packed_in_portions(kind, size, monkeypatch):
    weight, ids = torch.randn(100, 64), torch.tensor([99, 0, 17, 17, 64])
    weight[17], weight[0] = 0, weight[0].abs() + 1  # no scale; 0 is below all of them
    whole, meant = kind.of(weight, size), BY_SIZE[size](weight)
    monkeypatch.setattr(quantized_linear, "PORTION", 64 * 40)  # 32 rows, whole panels
    for one in (whole, kind.of(weight, size)):
        close(one.linear(torch.eye(64), None), meant.T)
        torch.testing.assert_close(one.rows(ids).double(), meant[ids])


@both
@pytest.mark.parametrize("names", ["kq", "qk"])
def test_matrices_of_two_dtypes_are_rounded_once_in_any_order(size, names):
    """A plain one beside one that a file quantises, say: q, k and v are one product."""
    matrices = dict(q=torch.randn(32, 64), k=torch.randn(16, 64).bfloat16())
    layer = QuantisedLinear(64, dict(q=32, k=16), False, Placement(torch.bfloat16, CPU),
                            TorchWeight, size)
    fills = dict(layer.tensors(""))
    for name in names:
        fills[f"{name}.weight"](matrices[name])
    close(layer.multiply(torch.eye(64)), BY_SIZE[size](torch.cat([*matrices.values()])).T)


# --------------------------------------------------------------- the compiled product


@needs_compiler
@pytest.mark.parametrize("name", CPU_FLAGS)
def test_every_cpus_loop_is_right(name, monkeypatch):
    """Compiled for this machine as if it had less, or more, and without a warning. The last row has
    the same bits alone."""
    monkeypatch.setenv("CXXFLAGS", f"{CPU_FLAGS[name]} -Wall -Wextra -Werror -O1")
    found = functions_of(build.load(Path(quantized_linear.__file__).with_suffix(".cpp")))
    monkeypatch.setattr(quantized_linear, "library", lambda: found)
    weight = torch.randn(70, 1100)
    weights = [(CpuWeight.of(weight, size), meant(weight)) for size, meant in BY_SIZE.items()]
    for bits, heads in product((4, 8), HEADS):
        one, meant = grouped((70, 1100), 64, bits=bits, heads=heads)
        weights.append((packed(CpuWeight, one), meant.double()))
    for (one, meant), n, dtype in product(weights, (1, 5, 19, 50), (torch.float32, torch.bfloat16)):
        x = torch.randn(n, 1100).to(dtype)
        close(got := one.linear(x, None), x.double() @ meant.T)
        assert torch.equal(one.linear(x[-1:], None), got[-1:])


@needs_compiler
@both
def test_numbers_do_not_depend_on_the_threads(size):
    """To the last bit."""
    x, weight = torch.randn(70, 512), CpuWeight.of(torch.randn(600, 512), size)
    expected, before = weight.linear(x, None), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(5):
            assert torch.equal(weight.linear(x, None), expected)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_one_large_activation_spoils_no_other_block():
    """A block of 512 with an outlier a hundred times as large as the rest keeps of the rest what
    bfloat16 would; other blocks don't know of it."""
    x = torch.randn(3, 1024)
    x[:, 5] = 300
    for block, tolerance in ((slice(0, 512), 4e-3), (slice(512, 1024), 1e-4)):
        weight = torch.zeros(32, 1024)
        weight[:, block] = torch.randn(32, 512)
        weight[:, 5] = 0  # so that the outlier itself is not in the sum
        got, expected = CpuWeight.of(weight).linear(x, None), x.double() @ by_definition(weight).T
        assert (got - expected).norm() < tolerance * expected.norm()


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_stays_one_in_its_own_row(kind, size, bad):
    weight, x = kind.of(torch.randn(20, 600), size), torch.randn(17, 600)
    expected, others = weight.linear(x, None), torch.arange(17) != 3
    x[3, 590] = bad
    got = weight.linear(x, None)
    assert not got[3].isfinite().any()
    assert torch.equal(got[others], expected[others])


def test_rows_may_be_further_apart_than_they_are_wide(kind):
    weight, wide = kind.of(torch.randn(20, 100)), torch.full((9, 300), float("nan"))
    wide[:, 50:150] = torch.randn(9, 100)
    assert torch.equal(weight.linear(wide[:, 50:150], None),
                       weight.linear(wide[:, 50:150].contiguous(), None))


# ------------------------------------------------------------------------- joins, shares


@pytest.mark.parametrize("bits, heads, joined", [
    ((4, 4, 4), ("float16",) * 3, (4, torch.float16)),
    ((4, 8, 4), ("float16", "no minima", "float32"), (8, torch.float32)),
    ((8, 8, 4), ("no minima", "no minima", "float16"), (8, torch.float32))])
def test_matrices_in_groups_of_different_kinds_are_joined(kind, bits, heads, joined):
    """q, k and v of a file that has more bits for some of them."""
    pieces, dense = zip(*(grouped((8 + i, 192), *each) for i, each in enumerate(zip(
        (64, 192, 48), range(3), bits, heads, strict=True))), strict=True)
    whole = join([*pieces])
    assert (whole.size, whole.bits, whole.scales.dtype) == (16, *joined)
    assert torch.equal(whole[:], torch.cat(dense))
    assert torch.equal(kind.of(whole, device=CPU).rows(torch.arange(27)), torch.cat(dense))


def test_rows_of_8_bits_are_joined_as_such(kind):
    pieces = [round_rows(torch.randn(5 + i, 1030)) for i in range(2)]
    whole = kind.of(join(pieces), device=CPU)
    assert whole.size == 0
    assert torch.equal(whole.rows(torch.arange(11)), torch.cat([one[:] for one in pieces]))


@pytest.mark.parametrize("bits, heads", [(4, "float16"), (8, "no minima")])
@pytest.mark.parametrize("size", [16, 64, 192])
def test_a_share_of_the_columns_may_cut_groups(size, bits, heads):
    one, dense = grouped((10, 192), size, bits=bits, heads=heads)
    for start, stop in ((0, 40), (40, 120), (120, 192), (64, 64)):
        mine = one.share(Slice(2, 9, 10), Slice(start, stop, 192))
        assert torch.equal(mine[:], dense[2:9, start:stop])


def test_a_share_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(10, 192\).*\(10, 96\)"):
        grouped((10, 192), 64)[0].share(Slice.whole(10), Slice.whole(96))
