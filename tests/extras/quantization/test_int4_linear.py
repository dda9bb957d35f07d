"""Products with weights of 4 bits in groups; the oracle is float64, number by number (packing.py).

Engines that are made of such weights are test_int4_engines.py's business.
"""

import shutil

import pytest
import torch
from packing import Drawn, groups_by_definition
from small_kinds import TOLERANCE, close, needs_compiler, row_counts, triton_kind

from nanoserve.parallel.ranks import Span
from nanoserve_extras.quantization import int4_linear, quantized_linear
from nanoserve_extras.quantization.int4_linear import (
    Grouped,
    GroupedPanels,
    GroupedRows,
    join,
    round_groups,
)

CPU = torch.device("cpu")


@pytest.fixture(params=[GroupedRows, pytest.param(GroupedPanels, marks=needs_compiler),
                        triton_kind("TritonGroups")], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


def grouped(shape: tuple[int, int], size: int, seed: int = 0) -> tuple[Grouped, torch.Tensor]:
    """A matrix as a checkpoint has it, and what it means."""
    drawn = Drawn(*shape, 4, seed, size)
    parts = (torch.from_numpy(drawn.q).byte(), torch.from_numpy(drawn.z).byte(),
             torch.from_numpy(drawn.s).float())
    return Grouped(*parts, size), drawn.dense()


def packed(kind, one: Grouped):
    """As `Int4Linear` does it."""
    one = join([one])
    return kind.of(one.shape, one.size, one.some, CPU)


# -------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, size", [
    ((16, 32), 32), ((33, 7), 16), ((100, 513), 64), ((40, 1537), 128), ((1, 1), 32),
    ((20, 1100), 1100), ((24, 2048), 1024), ((24, 96), 48)], ids=str)
def test_a_product_is_that_of_the_numbers_that_were_kept(kind, dtype, shape, size):
    """Numbers of rows around those of a tile; sizes that no panel, line, group or block divides; a
    single group; groups above a block, and such as don't divide it."""
    one, dense = grouped(shape, size)
    small, bias = packed(kind, one), torch.randn(shape[0]).to(dtype)
    weight = dense if kind is GroupedPanels else dense.to(dtype)
    for num_rows in row_counts(kind, dtype):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        expected, got = x.double() @ weight.double().T, small.linear(x, None)
        assert got.shape == expected.shape and got.dtype == dtype
        if num_rows:
            close(got, expected)
            close(small.linear(x, bias), expected + bias.double())


def test_the_numbers_are_kept_to_the_last_bit():
    """Scales of float16 have no use for the bits that a panel takes from a float32."""
    one, dense = grouped((48, 160), 32)
    assert torch.equal(one[:], dense) and torch.equal(one[5:9], dense[5:9])
    assert torch.equal(packed(GroupedRows, one).rows(slice(0, 48)), dense)
    eye = torch.eye(160)  # a 1 becomes 32767 and back: the sum is one weight, times 1 + 2^-24
    if shutil.which("g++"):
        got = packed(GroupedPanels, one).linear(eye, None).T
        assert torch.allclose(got, dense, rtol=3e-7, atol=0)


# -------------------------------------------------------------------------- rounding


def test_rounding_by_hand():
    """The first group reaches from -0.5 to 1: steps of 0.1, and 0 is the sixth of the 16."""
    one = round_groups(torch.tensor([[1.0, -0.5, 0.26, 0.0, 0.0, 0.0, -3.0]]), 3)
    assert one.values.tolist() == [[15, 0, 8, 0, 0, 0, 0]]
    assert one.zeros.tolist() == [[5, 0, 15]]
    torch.testing.assert_close(one.scales, torch.tensor([[0.1, 0.0, 0.2]]))
    torch.testing.assert_close(one[:], torch.tensor([[1.0, -0.5, 0.3, 0, 0, 0, -3.0]]))


@pytest.mark.parametrize("shape", [(50, 64), (3, 100), (1, 1)], ids=str)
def test_no_weight_moves_by_more_than_a_step(shape):
    """Half a step by its own rounding, and half a step where the zero point was rounded, too. The
    step of the whole row is at least that of a group."""
    weight = torch.randn(shape)
    got = round_groups(weight)[:]
    torch.testing.assert_close(got.double(), groups_by_definition(weight), rtol=1e-5, atol=1e-6)
    step = (weight.clamp(min=0).amax(1) - weight.clamp(max=0).amin(1))[:, None] / 15
    assert ((got - weight).abs() <= step * 1.001).all()


def test_a_rounded_product_is_near_the_weights_own(kind):
    """To 8% in groups of 32, where numbers are normal: 4 bits are no more than that."""
    weight, x = torch.randn(64, 1024), torch.randn(9, 1024)
    small = kind.of((64, 1024), 32, lambda some: round_groups(weight[some]), CPU)
    expected = x.double() @ weight.double().T
    assert 0.05 * expected.norm() < (small.linear(x, None) - expected).norm() < (
        0.1 * expected.norm())


def test_large_matrices_are_packed_in_portions(kind, monkeypatch):
    one, dense = grouped((100, 24), 8)
    monkeypatch.setattr(quantized_linear, "PORTION", 24 * 40)  # 32 rows, whole panels
    close(packed(kind, one).linear(torch.eye(24), None), dense.double().T)


# ------------------------------------------------------------------------- joins, shares


def test_matrices_in_groups_of_different_size_are_joined():
    pieces, dense = zip(*(grouped((8 + i, 192), size, i) for i, size in enumerate((64, 192, 48))),
                        strict=True)
    whole = join([*pieces])
    assert whole.size == 16 and torch.equal(whole[:], torch.cat(dense))


def test_groups_that_no_line_divides_do_not_fit():
    assert join([grouped((8, 60), 20)[0]]) is None


@pytest.mark.parametrize("size", [16, 64, 192])
def test_a_share_of_the_columns_may_cut_groups(size):
    one, dense = grouped((10, 192), size)
    for start, stop in ((0, 40), (40, 120), (120, 192), (64, 64)):
        mine = one.share(Span(2, 9, 10), Span(start, stop, 192))
        assert torch.equal(mine[:], dense[2:9, start:stop])


def test_a_share_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(10, 192\) in the file, \(10, 96\) expected"):
        grouped((10, 192), 64)[0].share(Span.whole(10), Span.whole(96))


def test_words_by_hand():
    """Even inputs in the low half, odd ones in the high half, each from the lowest bits up."""
    words = int4_linear.words_of(torch.arange(8, dtype=torch.uint8)[None])
    assert words.tolist() == [[0x75316420]]
