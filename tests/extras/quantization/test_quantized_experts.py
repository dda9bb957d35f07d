"""A layer of experts in few bits, without an engine; the oracle is float64, token by token."""

from functools import partial

import pytest
import torch
from packing import by_definition, groups_by_definition
from torch.nn.functional import silu
from weight_kinds import KINDS, close

from nanoserve import ops
from nanoserve.layers import Placement
from nanoserve_extras.quantization import quantized_experts
from nanoserve_extras.quantization.quantized_experts import QuantisedExperts
from nanoserve_extras.quantization.quantized_linear import CpuWeight, QuantisedLinear

HIDDEN, INNER = 50, 37  # groups of 32 have tails


@pytest.mark.parametrize("kind", KINDS[:2])  # Triton: test_quantized_triton.py
@pytest.mark.parametrize("size, rounded", [(0, by_definition), (32, groups_by_definition)],
                         ids=["8 bits", "4 bits"])
def test_each_token_has_its_experts_in_any_portion(kind, size, rounded, monkeypatch):
    """Expert 3 has no rows; the last portion is cut, or a single token. Compiled for a CPU, every
    bit is that of one portion."""
    layer = QuantisedExperts(5, HIDDEN, INNER, "silu",
                             Placement(torch.float32, torch.device("cpu"), ops=ops),
                             partial(QuantisedLinear, kind=kind, size=size))
    meant = {}
    for path, module in layer.named_modules():
        for name, fill in module.tensors(path) if hasattr(module, "tensors") else ():
            matrix = torch.randn((HIDDEN, INNER) if "down" in name else (INNER, HIDDEN)) / 6
            meant[name] = rounded(matrix)
            fill(matrix)
    for module in layer.modules():
        if hasattr(module, "finish_loading"):
            module.finish_loading()
    for top_k in (1, 2):
        x, weights = torch.randn(9, HIDDEN), torch.rand(9, top_k)
        ids = torch.tensor([0, 1, 2, 4])[torch.rand(9, 4).argsort(1)[:, :top_k]]
        whole = layer(x, weights, ids)
        close(whole, torch.stack([
            sum(w * (meant[f"{i}.down_proj.weight"] @ (
                silu(meant[f"{i}.gate_proj.weight"] @ row) * (
                    meant[f"{i}.up_proj.weight"] @ row)))
                for w, i in zip(factors, own.tolist(), strict=True))
            for row, factors, own in zip(x.double(), weights.double(), ids, strict=True)]))
        for portion in (4, 8):
            with monkeypatch.context() as patch:
                patch.setitem(quantized_experts.PORTIONS, "cpu", portion)
                cut = layer(x, weights, ids)
            close(cut, whole.double())
            assert kind is not CpuWeight or torch.equal(cut, whole)
