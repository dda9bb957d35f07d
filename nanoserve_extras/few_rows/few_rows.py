"""Steps of one to four rows in fewer kernels: seven a layer where there were ten.

    norm, qkv │ norms, RoPE, cache │ attention, joined │ o │ sum, norm, gate and up, act │ down

`LLM(model, extras=[FewRows()])` on a GPU. A layer of our decoder passes a step with so few tokens
to few_rows_triton.py, where norm, residual and gate are fused with the product next to them. Other
cases (more rows, quantised weights, adapters, experts or Gemma's second norms) use the plain steps
of `DecoderLayer`, which specify the result.

**Off until a GPU has shown that it is faster**: `python -m benchmarks.gpu --part engine` measures
one stream with it and without.
"""

from dataclasses import replace

import torch

from nanoserve.batch import Batch
from nanoserve.hooks import Extra
from nanoserve.layers import Linear
from nanoserve.model import MLP, DecoderLayer, Pair
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan


class FewRows(Extra):
    name = "FewRows()"
    needs = frozenset([Fact.ONE_RANK])

    def prepare(self, plan: Plan) -> Plan:
        """Raises `ValueError` without kernels for a GPU."""
        if plan.config.kernels != "triton":
            raise ValueError(f"FewRows() is a kernel for GPUs, and kernels={plan.config.kernels!r} "
                             "here: leave it out")
        return replace(plan, parts=replace(
            plan.parts, layers=plan.parts.layers | {"layer": FewRowsLayer}))


class FewRowsLayer(DecoderLayer):
    """Replaces `DecoderLayer`."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, cos_sin: Pair, kv: Pair,
                batch: Batch, wanted: torch.Tensor | None = None) -> Pair:
        from nanoserve_extras.few_rows.few_rows_triton import MOST_ROWS

        if not 0 < len(hidden) <= MOST_ROWS or not self.is_plain:
            return super().forward(hidden, residual, cos_sin, kv, batch, wanted)
        return self.fused(hidden, residual, cos_sin, kv, batch, wanted)

    @property
    def is_plain(self) -> bool:
        """Whether the layer's matrices are dense and contiguous. An adapter may come later."""
        if type(self.mlp) is not MLP or self.pre_feedforward_layernorm is not None:
            return False
        linear = (self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj,
                  self.mlp.down_proj)
        return all(type(one) is Linear and one.adapted is None for one in linear)

    def fused(self, hidden: torch.Tensor, residual: torch.Tensor | None, cos_sin: Pair, kv: Pair,
              batch: Batch, wanted: torch.Tensor | None) -> Pair:
        from nanoserve_extras.few_rows.few_rows_triton import product

        attention, mlp = self.self_attn, self.mlp
        before, behind = self.input_layernorm, self.post_attention_layernorm
        qkv, residual = product(hidden, attention.qkv_proj.packed, attention.qkv_proj.bias,
                                residual, before.weight, before.eps)
        out = attention.attend(qkv, cos_sin, kv, batch).flatten(1)
        if wanted is not None:
            out, residual = out[wanted], residual[wanted]
        out, _ = product(out, attention.o_proj.packed, attention.o_proj.bias)
        inner, residual = product(out, mlp.gate_up_proj.packed, mlp.gate_up_proj.bias, residual,
                                  behind.weight, behind.eps, mlp.activation)
        out, _ = product(inner, mlp.down_proj.packed, mlp.down_proj.bias)
        return out, residual
