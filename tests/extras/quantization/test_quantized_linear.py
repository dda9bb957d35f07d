"""Products with int8 weights; the oracle is float64, by the definition of rounding by row.

Engines that are made of such weights are test_quantized_engines.py's business.
"""

from pathlib import Path

import pytest
import torch
from packing import by_definition, groups_by_definition
from small_kinds import TOLERANCE, close, needs_compiler, row_counts, triton_kind

from nanoserve.device import build
from nanoserve.device.library import functions_of
from nanoserve_extras.quantization import int4_linear, quantized_linear
from nanoserve_extras.quantization.int4_linear import GroupedPanels, round_groups
from nanoserve_extras.quantization.quantized_linear import Panels, Rows, round_rows

CPU_FLAGS = {"the machine's": "", "AVX2": "-mno-avx512f", "plain C++": "-mno-avx512f -mno-avx2"}


def four_bits(weight: torch.Tensor) -> GroupedPanels:
    return GroupedPanels.of(tuple(weight.shape), 32, lambda some: round_groups(weight[some]),
                            torch.device("cpu"))


@pytest.fixture(params=[Rows, pytest.param(Panels, marks=needs_compiler),
                        triton_kind("TritonRows")], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


# -------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (33, 7), (100, 513), (40, 1537), (1, 1)], ids=str)
def test_a_product_is_that_of_the_rounded_weight(kind, dtype, shape):
    """Numbers of rows around those of a tile; sizes that no panel, unit or block divides."""
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(dtype)
    packed, rounded = kind.of(weight.to(dtype)), by_definition(weight.to(dtype))
    for num_rows in row_counts(kind, dtype):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        expected, got = x.double() @ rounded.T, packed.linear(x, None)
        assert got.shape == expected.shape and got.dtype == dtype
        if num_rows:
            close(got, expected)
            close(packed.linear(x, bias), expected + bias.double())


def test_it_is_near_the_product_of_the_weight_itself(kind):
    weight, x = torch.randn(64, 1024), torch.randn(9, 1024)
    expected = x.double() @ weight.double().T
    assert (kind.of(weight).linear(x, None) - expected).norm() < 1e-2 * expected.norm()


@needs_compiler
@pytest.mark.parametrize("name", CPU_FLAGS)
def test_every_cpus_loop_is_right(name, monkeypatch):
    """Of 8 bits and of 4: compiled for this machine as if it had less, and without a warning."""
    monkeypatch.setenv("CXXFLAGS", f"{CPU_FLAGS[name]} -Wall -Wextra -Werror -O1")
    found = functions_of(build.load(Path(quantized_linear.__file__).with_suffix(".cpp")))
    for module in (quantized_linear, int4_linear):
        monkeypatch.setattr(module, "library", lambda: found)
    weight = torch.randn(70, 1100)
    packed, rounded = Panels.of(weight), by_definition(weight)
    torch.testing.assert_close(packed.rows(torch.arange(70)).double(), rounded)
    for n in (1, 5, 19, 50):
        x = torch.randn(n, 1100)
        close(packed.linear(x, None), x.double() @ rounded.T)
        close(four_bits(weight).linear(x, None), x.double() @ groups_by_definition(weight).T)


def test_a_row_does_not_depend_on_the_others(kind):
    packed, x = kind.of(torch.randn(50, 700)), torch.randn(40, 700)
    together = packed.linear(x, None)
    for i in (0, 16, 39):
        alone = packed.linear(x[i:i + 1], None)[0]
        if kind is Panels:
            assert torch.equal(alone, together[i])
        else:
            torch.testing.assert_close(alone, together[i], rtol=1e-4, atol=1e-4)


@needs_compiler
def test_numbers_do_not_depend_on_the_threads():
    """To the last bit; of 8 bits and of 4."""
    x, weight = torch.randn(70, 512), torch.randn(600, 512)
    small = [Panels.of(weight), four_bits(weight)]
    expected, before = [one.linear(x, None) for one in small], torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(5):
            for one, alone in zip(small, expected, strict=True):
                assert torch.equal(one.linear(x, None), alone)
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
        got, expected = Panels.of(weight).linear(x, None), x.double() @ by_definition(weight).T
        assert (got - expected).norm() < tolerance * expected.norm()


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("pack", [Panels.of, four_bits], ids=["8 bits", "4 bits"])
def test_a_number_that_is_none_stays_one_in_its_own_row(pack, bad):
    packed, x = pack(torch.randn(20, 600)), torch.randn(17, 600)
    expected = packed.linear(x, None)
    for i in (0, 16):
        assert torch.equal(packed.linear(x[i:i + 1], None)[0], expected[i])
    x[3, 590] = bad
    got = packed.linear(x, None)
    assert got[3].isnan().all()
    assert torch.equal(got[torch.arange(17) != 3], expected[torch.arange(17) != 3])


def test_rounding_by_hand():
    values, scales = round_rows(torch.tensor([[1.27, -0.634, 0.0], [0.0, 0.0, 0.0], [-5, 2, 1]]))
    assert values.tolist() == [[127, -63, 0], [0, 0, 0], [-127, 51, 25]]
    torch.testing.assert_close(scales, torch.tensor([0.01, 0.0, 5 / 127]))


def test_large_matrices_are_rounded_in_portions(kind, monkeypatch):
    weight, ids = torch.randn(100, 24), torch.tensor([99, 0, 17, 17, 64])
    whole = kind.of(weight)
    monkeypatch.setattr(quantized_linear, "PORTION", 24 * 40)  # 32 rows, whole panels
    for one in (whole, kind.of(weight)):
        torch.testing.assert_close(one.rows(ids).double(), by_definition(weight)[ids])
        close(one.linear(torch.eye(24), None), by_definition(weight).T)
