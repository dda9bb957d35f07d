"""Small weights in words: the products of `TritonWeight`, in another order of memory."""

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture
from weight_kinds import needs_interpreter

from nanoserve_extras.quantization.quantization import kind_of_weight
from nanoserve_extras.quantization.quantized_linear import round_groups, round_rows

pytest.importorskip("triton")

from nanoserve_extras.quantization.quantized_triton import TritonWeight
from nanoserve_extras.quantization.quantized_words import WordWeight

pytestmark = needs_interpreter
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype, heads", [(torch.float32, torch.float32),
                                          (torch.float16, torch.float16)], ids=str)
@pytest.mark.parametrize("outputs, inputs, size", [
    (40, 64, 0), (7, 1040, 0), (5, 100, 0),  # the last does not fit: it stays as it was
    (24, 160, 32), (3, 2112, 32), (9, 256, 128), (6, 96, 24), (5, 288, 64)])
def test_products_of_any_number_of_rows(outputs, inputs, size, dtype, heads):
    """Of one to four by its kernel, of more by those of `TritonWeight`; rows; experts."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    whole = torch.randn(outputs, inputs, generator=generator) * inputs ** -0.5
    rounded = round_groups(whole, size, heads) if size else round_rows(whole)
    packed, dense = WordWeight.of(rounded, 0, CPU), rounded[:].double()
    assert torch.equal(packed.rows(torch.tensor([2, 0])), rounded[:][[2, 0]])
    moved = not torch.equal(packed.memory, TritonWeight.of(rounded, 0, CPU).memory)
    assert packed.fits == moved == (size % 32 == 0 and inputs != 100)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    for count in (1, 2, 3, 4, 5, 70):
        x = torch.randn(count, inputs, generator=generator).to(dtype)
        right = x.double() @ dense.T + bias.double()
        got = packed.linear(x, bias)
        tolerance = 4 * torch.finfo(dtype).eps
        assert got.dtype == dtype and (got - right).norm() < tolerance * right.norm(), count
    wide = packed.linear(x[:2], None, torch.float32)
    assert wide.dtype == torch.float32
    experts = WordWeight.stacked([packed, packed])
    got = experts.grouped(x, torch.tensor([0, 30, 70]))
    assert (got - x.double() @ dense.T).norm() < tolerance * right.norm()


def test_it_is_off_unless_asked_for(monkeypatch):
    assert kind_of_weight("triton") is TritonWeight
    monkeypatch.setenv("NANOSERVE_WORDS", "1")
    assert kind_of_weight("triton") is WordWeight
