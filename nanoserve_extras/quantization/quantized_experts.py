"""A mixture's experts in 8 or 4 bits: each is two packed products.

    hidden (n, h) ─► a row for each choice, sorted by expert ─ gate, up ─ act ─ down ─► times the
                     weights of the router, and summed for each token

The three matrices of an expert are those of a gated MLP, so they are `QuantisedLinear` layers under
the checkpoint's own names: each is rounded when its last tensor has come, or keeps a file's own 4
bits, and is split among ranks by width. The router is not rounded, because small differences decide
which experts a token gets.

Invariant: compiled for a CPU, a row's result does not depend on the other rows. There all experts
are one call (`FusedExperts` in cpu.py). In plain torch a Python loop multiplies each chosen expert
and reads where its rows start. A GPU would have to wait for this number in each layer, so there one
launch finds it on the device (quantized_triton.py), and can be part of a CUDA graph.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from nanoserve.layers import Placement
from nanoserve.parallel import Slice
from nanoserve_extras.quantization.quantized_linear import QuantisedLinear

# Tokens in a portion, in which each is copied once per expert. On a CPU the system would map larger
# tensors anew each time; on a GPU each portion reads all weights again.
PORTIONS = {"cpu": 512, "cuda": 2048}


class QuantisedExperts(nn.ModuleDict):
    """Replaces `layers.Experts`. linear: makes the layer of a packed matrix."""

    def __init__(self, experts: int, hidden_size: int, inner: Slice | int, activation: str,
                 on: Placement, linear: Callable[..., QuantisedLinear]):
        super().__init__({str(i): nn.ModuleDict(dict(
            gate_up_proj=linear(hidden_size, {"gate_proj": inner, "up_proj": inner}, False, on),
            down_proj=linear(inner, {"down_proj": hidden_size}, False, on)))
            for i in range(experts)})
        for name in ("gate_up_proj", "down_proj"):  # behind the layers, which must be packed first
            self[f"all_{name}"] = Grouped([self[str(i)][name] for i in range(experts)])
        self.experts, self.activation, self.ops = experts, activation, on.ops
        self.fused: Callable | None = None  # a backend's, if it has all experts in one call

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor,
                ids: torch.Tensor) -> torch.Tensor:
        """hidden (num_tokens, hidden_size); weights and ids (num_tokens, experts per token).
        Returns this rank's share of the sum, as `ops.experts` does."""
        size, sums = PORTIONS[hidden.device.type], self.fused or self.first_sums
        portions = (numbers.split(size) for numbers in (hidden, weights, ids))
        return torch.cat([sums(*some) for some in zip(*portions, strict=True)])

    def first_sums(self, hidden: torch.Tensor, weights: torch.Tensor,
                   ids: torch.Tensor) -> torch.Tensor:
        """`sums`, or the backend's own function, which is made when all weights are loaded."""
        fuse, layers = getattr(self.ops, "FusedExperts", None), self["all_gate_up_proj"].layers
        if fuse is None or hidden.dtype == torch.float16 or not hasattr(layers[0].packed, "matrix"):
            return self.sums(hidden, weights, ids)
        gate_up, down = ([layer.packed for layer in self[name].layers]
                         for name in ("all_gate_up_proj", "all_down_proj"))
        self.fused = fuse(gate_up, down, self.activation, hidden.dtype)
        return self.fused(hidden, weights, ids)

    def sums(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sorted_ids, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_ids, torch.arange(
            self.experts + 1, dtype=ids.dtype, device=ids.device))
        rows = hidden.index_select(0, order // ids.shape[1])
        inner = self.ops.act_and_mul(self["all_gate_up_proj"](rows, starts), self.activation)
        answers = self["all_down_proj"](inner, starts).index_select(0, order.argsort()).float()
        return answers.unflatten(0, ids.shape).mul_(weights[..., None]).sum(1).to(hidden.dtype)


class Grouped(nn.Module):
    """One of the matrices, of all experts. Each expert multiplies its own rows."""

    def __init__(self, layers: list[QuantisedLinear]):
        super().__init__()
        self.layers, self.packed = layers, None

    def process_weights_after_loading(self) -> None:
        """If one launch multiplies with all matrices, stack them in memory."""
        if self.packed is None and hasattr(self.layers[0].kind, "stacked"):
            self.packed = self.layers[0].kind.stacked([layer.packed for layer in self.layers])
            for layer, memory, heads in zip(
                    self.layers, self.packed.memory, self.packed.heads, strict=True):
                layer.packed = self.packed._replace(memory=memory, heads=heads)

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs), sorted: those of expert e are from starts[e] to starts[e + 1]. Returns
        (rows, outputs)."""
        if self.packed is not None:
            return self.packed.grouped(x, starts)
        places = zip(self.layers, pairwise(starts.tolist()), strict=True)
        products = [layer.multiply(x[start:end]) for layer, (start, end) in places if start < end]
        return torch.cat(products or [self.layers[0].multiply(x)])  # there may be no rows
