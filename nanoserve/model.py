"""One decoder, driven by `ModelConfig`: eight families differ in flags, not in code.

Read it top-down like the figure in a paper: tokens are embedded, pass a stack of identical layers
(each adds what attention and an MLP have to say to the residual stream), are normalised, and become
logits:

    ids ─ embed ─► hidden ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─► ... ─ norm ─ logits
                           └────────────────────────┘└──────────────┘    × layers

Invariant: no hidden inputs. What a forward pass reads stands in its signature: `hidden`,
`positions`, the KV cache and the batch. Tokens are the only dimension that varies; there is no
batch dimension and no padding, because rows are told apart by attention alone.

With tensor parallelism every rank runs this same code on its share of the heads, of the MLP's width
and of the vocabulary, and has the whole residual stream. How a matrix is cut is decided here, where
the layers are made; only `Linear`, `Embedding`, `MoE` and `compute_logits` communicate.

A flag may switch a line on or off (qk-norm, biases, a second norm). Anything that needs another
algorithm is another class, as `MoE` is. Road not taken: one file for each family, as transformers
has it, where a fix is made as many times as there are files.

Names follow the checkpoints' (`layers.0.self_attn.o_proj`): the loader hardly has to rename.
"""

from itertools import islice

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.layers import (
    Embedding,
    Experts,
    HeadNorm,
    Linear,
    Part,
    Placement,
    RMSNorm,
    RotaryEmbedding,
)
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.parallel.ranks import Span, share_heads

MAX_PROMPT_LOGPROB_ROWS = 256  # prompt logprobs: positions whose logits are there at the same time
KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # a layer's K and V, see kv_cache.py
Places = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # see `places_of` of ops or kernels


class Decoder(Part):
    """The whole network: `embed`, `forward` over a range of layers, `compute_logits`."""

    def __init__(self, config: ModelConfig, on: Placement, expert_parallel: bool = False):
        super().__init__()
        self.config, self.ranks, self.ops = config, on.ranks, on.ops
        vocabulary = on.ranks.share(config.vocab_size)
        self.embed_tokens = Embedding(vocabulary, config.hidden_size, on,
                                      tied=config.tie_word_embeddings)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope, on.device)
        self.rotary_local = None if config.rope_local is None else RotaryEmbedding(
            config.head_dim, config.rope_local, on.device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, on, expert_parallel)
                                    for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, on, config.norm_offset)
        self.lm_head = None if config.tie_word_embeddings else Linear(
            Span.whole(config.hidden_size), {"all": vocabulary}, False, on)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)"""
        hidden = self.embed_tokens(ids)
        if self.config.scale_embedding:  # by a number of the stream's own precision, as trained
            hidden = hidden * torch.tensor(self.config.hidden_size ** 0.5, dtype=hidden.dtype)
        return hidden

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, layers: range | None = None,
                taps: dict[int, torch.Tensor] | None = None,
                wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run `layers`, one behind the other (default: all); the last one's output is normalised.

        hidden: (num_tokens, hidden_size), positions: (num_tokens,). Where `taps` has a layer's
        number as a key, its value becomes that layer's output. wanted: (k,) indices of the tokens
        whose output is needed, None for all. The others still write their keys and values in the
        last layer, but skip its output projection and MLP. Returns (k or num_tokens, hidden_size).
        """
        layers = range(len(self.layers)) if layers is None else layers
        global_rope = local_rope = self.rotary(positions)  # cos and sin
        if self.rotary_local is not None:
            local_rope = self.rotary_local(positions)
        places = self.ops.places_of(batch.slot_mapping, kv_cache[0][0].shape[1])
        residual = None  # the stream is `hidden`, or the sum of both where there are two
        last = len(self.layers) - 1
        in_range = islice(self.layers, layers.start, layers.stop)  # `self.layers[i]` takes longer
        for i, layer in zip(layers, in_range, strict=True):
            cos, sin = global_rope if self.config.windows[i] is None else local_rope
            hidden, residual = layer(hidden, residual, cos, sin, places, kv_cache[i], batch,
                                     wanted if i == last else None)
            if taps is not None and i in taps:
                taps[i] = hidden + residual
        if layers.stop == len(self.layers):
            return self.norm.add(hidden, residual)[0]
        return hidden if residual is None else hidden + residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(num_rows, hidden_size) -> (num_rows, vocab_size), on rank 0; None on the others. Only
        rows that sample come here."""
        logits = (self.embed_tokens.logits(hidden) if self.lm_head is None
                  else self.lm_head(hidden))
        logits = self.ranks.gather(logits, self.config.vocab_size)
        cap = self.config.logits_softcap
        return logits if cap is None or logits is None else cap * torch.tanh(logits / cap)


class DecoderLayer(Part):
    """Attention and MLP, each behind a norm and added to the residual stream (pre-norm).

    The last addition is left to the norm that follows, in this layer or the next, which reads the
    sum anyway: a layer takes and returns the stream as two terms, each (num_tokens, hidden_size).
    `wanted`: see `Decoder.forward`.

    `post_attention_layernorm` is a name with two meanings: for most families the norm in front of
    the MLP, which Gemma calls `pre_feedforward_layernorm` because it has one behind attention, too.
    """

    def __init__(self, config: ModelConfig, index: int, on: Placement, expert_parallel: bool):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, on, config.norm_offset)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, index, on)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.post_norms else None
        self.mlp = (MoE(config, on, expert_parallel) if config.moe_layers[index]
                    else MLP(config, on))
        self.post_feedforward_layernorm = norm() if config.post_norms else None

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor,
                sin: torch.Tensor, places: Places, kv: tuple[torch.Tensor, torch.Tensor],
                batch: Batch, wanted: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self.self_attn(normed, cos, sin, places, kv, batch, wanted)
        if wanted is not None:
            residual = residual[wanted]
        if self.pre_feedforward_layernorm is None:
            normed, residual = self.post_attention_layernorm.add(attended, residual)
            return self.mlp(normed), residual
        attended = self.post_attention_layernorm(attended)
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class Attention(Part):
    """Grouped-query attention over the paged KV cache, with RoPE and optional qk-norm.

    A rank has a share of the KV heads with the query heads that read them; `share_heads` says how.
    """

    def __init__(self, config: ModelConfig, index: int, on: Placement):
        super().__init__()
        self.head_dim, self.eps, self.ops = config.head_dim, config.rms_norm_eps, on.ops
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.window = config.windows[index]
        heads, kv_heads = share_heads(config.num_attention_heads, config.num_key_value_heads,
                                      on.ranks)
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        stream = Span.whole(config.hidden_size)
        self.qkv_proj = Linear(stream, {"q": q, "k": kv, "v": kv}, config.qkv_bias, on)
        self.o_proj = Linear(q, {"all": stream}, config.o_bias, on)
        self.qk_norm = None if not config.qk_norm else HeadNorm(
            self.head_dim, heads.size // kv_heads.size + 1, self.eps, on, config.norm_offset)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: Places,
                kv: tuple[torch.Tensor, torch.Tensor], batch: Batch,
                wanted: torch.Tensor | None = None) -> torch.Tensor:
        # (num_tokens, heads of q, k and v, head_dim); q and out: (num_tokens, num_heads, head_dim)
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        weight = None if self.qk_norm is None else self.qk_norm.weight
        q = self.ops.norm_rope_store(qkv, weight, self.eps, cos, sin, *kv, places)
        out = self.ops.paged_attention(q, *kv, batch, self.scale, self.window, self.softcap)
        return self.o_proj((out if wanted is None else out[wanted]).flatten(1))


class MLP(Part):
    """down(act(gate(x)) * up(x)), the gated MLP (Shazeer 2020, "GLU Variants")."""

    def __init__(self, config: ModelConfig, on: Placement):
        super().__init__()
        stream, inner = Span.whole(config.hidden_size), on.ranks.share(config.intermediate_size)
        self.activation, self.ops = config.activation, on.ops
        self.gate_up_proj = Linear(stream, {"gate": inner, "up": inner}, config.mlp_bias, on)
        self.down_proj = Linear(inner, {"all": stream}, config.mlp_bias, on)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.act_and_mul(self.gate_up_proj(hidden), self.activation))


class MoE(Part):
    """A mixture of experts: a router picks a few MLPs for each token and weighs their answers
    (Shazeer et al. 2017; Jiang et al. 2024, "Mixtral of Experts").

    Over ranks either each expert is shared out like an MLP, or (`expert_parallel`) the experts are:
    fewer and larger matrix products, but a rank whose experts are popular is waited for.
    """

    def __init__(self, config: ModelConfig, on: Placement, expert_parallel: bool):
        super().__init__()
        self.ranks = on.ranks
        self.experts_per_token = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        experts, inner = Span.whole(config.num_experts), Span.whole(config.moe_intermediate_size)
        # Every rank has the router, so that all of them pick the same experts unasked.
        self.gate = Linear(Span.whole(config.hidden_size), {"all": experts}, False, on)
        if expert_parallel:
            experts = on.ranks.share(experts.total)
        else:
            inner = on.ranks.share(inner.total)
        self.experts = Experts(experts, config.hidden_size, inner, config.activation, on)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.gate(hidden).float().softmax(-1)  # (num_tokens, num_experts)
        weights, ids = scores.topk(self.experts_per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.ranks.all_reduce(self.experts(hidden, weights, ids))
