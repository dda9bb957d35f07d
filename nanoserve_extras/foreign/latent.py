"""Latent attention: the cache holds the latents of which keys and values are made (DeepSeek-V2,
2024).

These layers compress a token into one *latent* of some 512 numbers, and one rotated key of 64 that
all heads share. Each head's key and value are products of the latent. transformers' networks expand
it before attention, so a token of GLM-4.7-Flash would keep 10,240 numbers a layer. But a product
may move to the other side of a sum (W_K and W_V are one head's halves of `kv_b_proj`):

    score  = q · (W_K latent) + q_rot · k_rot   =  [W_Kᵀ q, q_rot] · [latent, k_rot]
    output = sum of p (W_V latent)              =  W_V (sum of p latent)

So queries are multiplied by W_Kᵀ, outputs by W_V ("absorbed"), and attention sees one KV head whose
key is [latent, k_rot] and whose value is the latent. The cache has one size for both: 1,152 numbers
for 10,240. Blocks, prefix cache and backends stay as they are.

Invariant: the text is that of the expanded network up to near-ties, as sums are in another order.
Known limits: CPUs. A head of 576 numbers is more than a GPU's tile holds (docs/log), so there
keys and values stay expanded. `kv_b_proj` is never rounded. The values are a copy of a part of the
keys; without it the backends would have to know of latent attention.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Latent:
    """The matrices that one layer absorbs. w_k: (heads, size of q and k without rotation, latent
    size); w_v: (heads, latent size, size of a value)."""

    w_k: torch.Tensor
    w_v: torch.Tensor

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """(1, heads, num_tokens, size) to (1, heads, num_tokens, latent + rotated size)."""
        plain, rotated = query.split(
            (self.w_k.shape[1], query.shape[-1] - self.w_k.shape[1]), dim=-1)
        return torch.cat((plain @ self.w_k, rotated), dim=-1)

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """(1, num_tokens, heads, latent size) to (1, num_tokens, heads, size of a value)."""
        return (out.transpose(1, 2) @ self.w_v).transpose(1, 2)


def keep_latents(network: nn.Module) -> None:
    """Make the layers that transformers marks by `expand_kv` pass on latents, and store the
    absorbed matrices in their attribute `latent`."""
    for module in network.modules():
        expands = getattr(module, "kv_b_proj", None) if hasattr(module, "expand_kv") else None
        if type(expands) is nn.Linear and expands.bias is None:
            size = module.qk_nope_head_dim
            weight = expands.weight.unflatten(0, (-1, size + module.v_head_dim))
            module.latent = Latent(weight[:, :size], weight[:, size:].mT.contiguous())
            module.expand_kv, module.kv_b_proj = key_and_value, nn.Identity()


def key_and_value(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and value of one head, (1, 1, num_tokens, size), instead of those of all heads."""
    return torch.cat((latent, rotated), dim=-1), latent
