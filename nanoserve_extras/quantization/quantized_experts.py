"""A mixture's experts in 8 or 4 bits: each is two packed products.

    hidden (n, h) ─ who chose expert 3? ─► rows ─ gate, up ─ act ─ down ─► times the weights of
                                                                 the router, and added to these rows

The three matrices of an expert are those of a gated MLP, so they are `QuantisedLinear` layers under
the checkpoint's own names: rounded when the last tensor of one has come, or kept as a file's own 4
bits, and shared out to ranks by width. The router stays wide: which experts a token gets is decided
by small differences.

Invariant: a row's result does not depend on the other rows. Confessed: the loop over the chosen
experts is Python's, which reads their numbers. So it is for CPUs; a GPU would wait in each layer.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanoserve.layers import Placement
from nanoserve.parallel.ranks import Span


class QuantisedExperts(nn.ModuleDict):
    """Takes the place of `layers.Experts`. linear: what makes the layer of a packed matrix."""

    def __init__(self, experts: int, hidden_size: int, inner: Span | int, activation: str,
                 on: Placement, linear: Callable[..., nn.Module]):
        super().__init__({str(i): nn.ModuleDict(dict(
            gate_up_proj=linear(hidden_size, {"gate_proj": inner, "up_proj": inner}, False, on),
            down_proj=linear(inner, {"down_proj": hidden_size}, False, on)))
            for i in range(experts)})
        self.activation, self.ops = activation, on.ops

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor,
                ids: torch.Tensor) -> torch.Tensor:
        """hidden (num_tokens, hidden_size); weights and ids (num_tokens, experts per token).
        Returns this rank's share of the sum, as `ops.experts` does."""
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in ids.unique().tolist():
            tokens, column = (ids == expert).nonzero(as_tuple=True)
            layers = self[str(expert)]
            inner = self.ops.act_and_mul(layers["gate_up_proj"].multiply(hidden[tokens]),
                                         self.activation)
            answer = layers["down_proj"].multiply(inner)
            out.index_add_(0, tokens, answer.float() * weights[tokens, column, None])
        return out.to(hidden.dtype)
