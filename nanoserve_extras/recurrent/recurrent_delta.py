"""Gated delta nets (Yang et al. 2024) by our own operator: fast layers for Qwen3.5 and similar.

transformers' module keeps its weights, and its matrices stay `Packed`, in int8 and int4, too. The
operations between them are computed here, for all rows of a step at once:

    x ─ [qkv] ─ convolve, SiLU ─ delta_rule ─ rms_norm ─ times SiLU(z) ─ [out] ─►
      └ [z], [b], [a]: gates     the state: (heads, key_dim, value_dim) in float32

`delta_rule` here is the specification, in plain torch, and runs on any device. The two fast ones
pass the same test: compiled for CPUs (recurrent_delta.cpp), Triton's for GPUs
(recurrent_triton.py).

Invariant: a module's class is no proof that it computes this. At load each one is tried
(recurrent.py), and if the numbers differ, transformers' own forward is used.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.build import functions_of, load


class DeltaNet:
    """Replaces a module's forward. net: the module, or a weak proxy of it. delta_rule: see
    `delta_rule_for`."""

    def __init__(self, net: nn.Module, ops: ModuleType, delta_rule: Callable):
        self.net, self.ops, self.delta_rule = net, ops, delta_rule
        self.rate = -net.A_log.float().exp()
        self.norm_weight = net.norm.weight.float()

    def forward(self, hidden_states: torch.Tensor, cache, **unused) -> torch.Tensor:
        """(1, num_tokens, hidden_size), of the rows of `cache`, a recurrent.py's `Rows`. No mask is
        looked at: a row has no padding."""
        net, ops = self.net, self.ops
        conv_states, states = (cache.states[kind, net.layer_idx, 0]
                               for kind in ("conv", "recurrent"))
        qkv, z, b, a = self.project(hidden_states[0])
        qkv = self.convolve(qkv, conv_states, cache)
        decay = (self.rate * F.softplus(a.float() + net.dt_bias)).exp()
        out = self.delta_rule(qkv, decay, b.float().sigmoid(), states, cache.sources, cache.slots,
                              cache.starts)
        out = ops.rms_norm(out.flatten(0, 1), self.norm_weight, net.norm.variance_epsilon)
        out = ops.act_and_mul(torch.cat((z, out.view_as(z)), 1), "silu")
        return net.out_proj(out)[None]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """qkv, (num_tokens, channels); z, (num_tokens, heads * value_dim); b and a, (num_tokens,
        heads). Qwen3-Next's two products have all of a key head side by side."""
        net = self.net
        if hasattr(net, "in_proj_qkv"):
            return net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)
        q, k, v, *gates = (one[0] for one in net.fix_query_key_value_ordering(
            net.in_proj_qkvz(x)[None], net.in_proj_ba(x)[None]))
        return torch.cat([one.flatten(1) for one in (q, k, v)], 1), gates[0].flatten(1), *gates[1:]

    def convolve(self, qkv: torch.Tensor, states: torch.Tensor, cache) -> torch.Tensor:
        """The causal convolution of each channel. qkv: (num_tokens, channels); states: the earlier
        inputs of all rows, (num_states, width - 1, channels). Computed as an image of one line in
        channels-last memory it takes an eighth of conv1d's time (docs/log)."""
        conv, convolved = self.net.conv1d, torch.empty_like(qkv)
        for tokens, sources, targets in cache.parts:
            kept = states.index_select(0, sources)
            if cache.query_lens is None:  # each token has a window of its own
                window = torch.cat((kept.flatten(0, 1), qkv))[cache.windows]
            else:
                window = torch.cat((kept, qkv[tokens].unflatten(0, (len(sources), -1))), 1)
            states.index_copy_(0, targets, window[:, -kept.shape[1]:])
            out = F.conv2d(window.transpose(1, 2).unsqueeze(2), conv.weight.unsqueeze(2),
                           conv.bias, groups=conv.groups)
            convolved[tokens] = F.silu(out).squeeze(2).transpose(1, 2).flatten(0, 1)
        return convolved


def delta_rule(qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor,
               sources: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """S = decay S + k (beta (v - decay S^T k))^T, out = S^T q / sqrt(key_dim): the value that the
    state S has for the key k moves towards v (gated delta rule, Yang et al. 2024). q and k are
    normalised before.

    qkv: (num_tokens, channels), heads of q, of k, of v; one of q and k serves several of v. decay,
    beta: (num_tokens, heads) in float32. states: (num_states, heads, key_dim, value_dim) in
    float32; row r's tokens, starts[r] to starts[r + 1] - 1, begin with states[sources[r]], and
    token t leaves what comes of it in states[slots[t]]. Returns (num_tokens, heads, value_dim)."""
    heads, key_dim, value_dim = states.shape[1:]
    out = qkv.new_empty(len(qkv), heads, value_dim)
    for source, start, end in zip(sources, starts, starts[1:], strict=False):
        for t in range(start, end):
            qk, v = qkv[t].float().split((qkv.shape[1] - heads * value_dim, heads * value_dim))
            qk = qk.view(2, -1, key_dim)
            qk = qk * torch.rsqrt(qk.pow(2).sum(-1, keepdim=True) + 1e-6)
            q, k = qk.repeat_interleave(heads // qk.shape[1], 1)[..., None]  # (heads, key_dim, 1)
            S = states[source] * decay[t, :, None, None]
            error = v.view(heads, 1, value_dim) - (k * S).sum(1, keepdim=True)
            source = slots[t]
            states[source] = S + k * beta[t, :, None, None] * error
            out[t] = (q * states[source]).sum(1) * key_dim ** -0.5
    return out


def delta_rule_for(kernels: str) -> Callable[..., torch.Tensor]:
    """The fast version for a backend; for `ops` the specification."""
    if kernels == "triton":
        from nanoserve_extras.recurrent.recurrent_triton import delta_rule as in_triton
        return in_triton
    return compiled_delta_rule if kernels == "cpu" else delta_rule


@cache
def library() -> SimpleNamespace:
    """The function of recurrent_delta.cpp, compiled on first use. Raises `BuildError`."""
    return functions_of(load(Path(__file__).with_suffix(".cpp")))


def compiled_delta_rule(qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
                        states: torch.Tensor, sources: torch.Tensor, slots: torch.Tensor,
                        starts: torch.Tensor) -> torch.Tensor:
    """`delta_rule`, with the same arguments and meaning."""
    return library().delta_rule(qkv, decay, beta, states, sources, slots, starts,
                                _ends=len(sources) + 1)
