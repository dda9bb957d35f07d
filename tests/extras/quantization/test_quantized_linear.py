"""Products with weights of 8 bits by row and of 4 in groups; the oracle is float64, by the
definition of rounding, or number by number of what a checkpoint has (packing.py).

Engines that are made of such weights are the business of test_quantized_engines.py.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from packing import Drawn, by_definition, groups_by_definition
from weight_kinds import KINDS, TOLERANCE, close, needs_compiler, row_counts

from nanoserve.device import build
from nanoserve.device.library import functions_of
from nanoserve.layers import Placement
from nanoserve.parallel.ranks import Span
from nanoserve_extras.quantization import quantized_linear
from nanoserve_extras.quantization.quantized_linear import (
    CpuWeight,
    Quantised,
    QuantisedLinear,
    TorchWeight,
    join,
)

CPU_FLAGS = {"the machine's": "", "AVX2": "-mno-avx512f", "plain C++": "-mno-avx512f -mno-avx2",
             "matrix tiles": "-DMATRIX_TILES -DPLAIN_TILES"}  # of bfloat16 alone
BY_SIZE = {0: by_definition, 32: groups_by_definition}
CPU = torch.device("cpu")
both = pytest.mark.parametrize("size", BY_SIZE, ids=["8 bits", "4 bits"])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def grouped(shape: tuple[int, int], size: int, seed: int = 0) -> tuple[Quantised, torch.Tensor]:
    """A matrix of 4 bits as a checkpoint has it, and what it means."""
    drawn = Drawn(*shape, 4, seed, size)
    parts = (torch.from_numpy(drawn.q).byte(), torch.from_numpy(drawn.z).byte(),
             torch.from_numpy(drawn.s).float())
    return Quantised(*parts, size), drawn.dense()


def packed(kind, one: Quantised):
    """As `QuantisedLinear` does it."""
    one = join([one])
    return kind.of(one, one.size, CPU)


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, size", [
    ((16, 32), 32), ((33, 7), 16), ((100, 513), 64), ((40, 1537), 128), ((1, 1), 32),
    ((20, 1100), 1100), ((24, 2048), 1024), ((24, 96), 48)], ids=str)
def test_a_product_is_that_of_the_numbers_that_were_kept(kind, dtype, shape, size):
    """Sizes that no panel, line, group or block divides; a single group; groups above a block, and
    such as don't divide it."""
    one, dense = grouped(shape, size)
    check_products(kind, packed(kind, one), dense if kind is CpuWeight else dense.to(dtype), dtype)


def test_the_numbers_are_kept_to_the_last_bit(kind):
    """Scales of float16 have no use for the four bits that a zero point takes from a float32. Each
    input alone in its row: the sum is one weight. A CPU's 1 becomes 32767 and back, which is the
    weight times 1 + 2^-24."""
    one, dense = grouped((48, 160), 32)
    assert torch.equal(one[:], dense) and torch.equal(one[5:9], dense[5:9])
    assert torch.equal(packed(TorchWeight, one).rows(slice(0, 48)), dense)
    got = packed(kind, one).linear(torch.eye(160), None).T
    torch.testing.assert_close(got, dense, rtol=3e-7 * (kind is CpuWeight), atol=0)


@both
def test_large_matrices_are_packed_in_portions(kind, size, monkeypatch):
    weight, ids = torch.randn(100, 64), torch.tensor([99, 0, 17, 17, 64])
    weight[17], weight[0] = 0, weight[0].abs() + 1  # no scale; 0 is below all of them
    whole, meant = kind.of(weight, size), BY_SIZE[size](weight)
    monkeypatch.setattr(quantized_linear, "PORTION", 64 * 40)  # 32 rows, whole panels
    for one in (whole, kind.of(weight, size)):
        close(one.linear(torch.eye(64), None), meant.T)
        if not size:
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
    for size, meant in BY_SIZE.items():
        one = CpuWeight.of(weight, size)
        for n, dtype in product((1, 5, 19, 50), (torch.float32, torch.bfloat16)):
            x = torch.randn(n, 1100).to(dtype)
            close(got := one.linear(x, None), x.double() @ meant(weight).T)
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


def test_matrices_in_groups_of_different_size_are_joined():
    pieces, dense = zip(*(grouped((8 + i, 192), size, i) for i, size in enumerate((64, 192, 48))),
                        strict=True)
    whole = join([*pieces])
    assert whole.size == 16 and torch.equal(whole[:], torch.cat(dense))


@pytest.mark.parametrize("size", [16, 64, 192])
def test_a_share_of_the_columns_may_cut_groups(size):
    one, dense = grouped((10, 192), size)
    for start, stop in ((0, 40), (40, 120), (120, 192), (64, 64)):
        mine = one.share(Span(2, 9, 10), Span(start, stop, 192))
        assert torch.equal(mine[:], dense[2:9, start:stop])


def test_a_share_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(10, 192\).*\(10, 96\)"):
        grouped((10, 192), 64)[0].share(Span.whole(10), Span.whole(96))
