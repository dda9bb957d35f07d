"""One decoder, driven by `ModelConfig`: nine families differ in flags, not in code.

Read it top-down like the figure in a paper: tokens are embedded, pass a stack of identical layers
(each adds the outputs of attention and of an MLP to the residual stream), are normalised, and
become logits:

    ids ─ embed ─► hidden ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─► ... ─ norm ─ logits
                           └────────────────────────┘└──────────────┘    × layers

Invariant: no hidden inputs. What a forward pass reads stands in its signature: `hidden`,
`positions`, the KV cache and the batch. Tokens are the only dimension that varies; there is no
batch dimension and no padding, because rows are told apart by attention alone.

With tensor parallelism every rank runs this same code on its share of the heads, of the MLP's width
and of the vocabulary, and has the whole residual stream. How a matrix is cut is decided here, where
the layers are made; in a step only `Linear`, `Embedding`, `MoE` and `compute_logits` communicate.

A flag may switch a line on or off (qk-norm, biases, a second norm). Anything that needs another
algorithm is another class, as `MoE` is. Road not taken: one file for each family, as transformers
has it, where a fix is made as many times as there are files.

Names follow the checkpoints' (`layers.0.self_attn.o_proj`): the loader hardly has to rename.
"""

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.layers import Linear, Placement, RMSNorm, RotaryEmbedding
from nanoserve.model_config import ModelConfig

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, cos and sin, a stream's two terms
KVCache = list[Pair]  # K and V of each layer, see `ops.new_cache`


class Decoder(nn.Module):
    """The whole network: token ids to hidden states, and hidden states to logits.

    A network of an extra, which replaces this class, has the same `forward` and `compute_logits`,
    and those of the attributes below that have a comment.

    here: the layers that are built, all if left out. Others are on other ranks, or on disk.
    """

    # How the names of tensors begin that are not needed: here MiMo's layers for drafts.
    unused: tuple[str, ...] = ("mtp_layers.",)

    def __init__(self, config: ModelConfig, on: Placement, here: range | None = None):
        super().__init__()
        everything = range(config.num_hidden_layers)
        self.here = everything if here is None else here
        self.config = config  # a `ModelConfig`
        self.on = on
        self.ranks = on.ranks
        _, kv_heads = on.ranks.share_heads(config.num_attention_heads, config.num_key_value_heads)
        self.kv_shapes = [(kv_heads.size, config.head_dim)] * len(self.here)  # one a layer

        vocabulary = on.ranks.share(config.vocab_size)
        tied = config.tie_word_embeddings
        self.embed_tokens = on.embedding(vocabulary, config.hidden_size, on, tied=tied)
        self.rotary = self.rotary_local = RotaryEmbedding(config.rope, on.device)
        if config.rope_local is not None:
            self.rotary_local = RotaryEmbedding(config.rope_local, on.device)
        layer = on.layer or DecoderLayer
        self.layers = nn.ModuleList(
            layer(config, i, on) if i in self.here else nn.Identity() for i in everything)
        # A backend may run all layers in one call, with the same bits.
        self.run_layers = getattr(on.ops, "run_layers", None)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, on, config.norm_offset)
        self.lm_head = None
        if not tied:
            self.lm_head = on.linear(config.hidden_size, {"lm_head": vocabulary}, False, on)

    def take_head(self, name: str, head: nn.Module | None) -> None:
        """Put another head, by its name in the checkpoint, or none, in the place of the LM head. A
        tied embedding is then no LM head, either."""
        self.lm_head, self.embed_tokens.tied = None, False
        setattr(self, name, head)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)"""
        hidden = self.embed_tokens(ids)
        if self.config.scale_embedding:  # by a number in the stream's own precision, as trained
            hidden = hidden * torch.tensor(self.config.hidden_size ** 0.5, dtype=hidden.dtype)
        return hidden

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids, positions: (num_tokens,). wanted: (k,) indices of the tokens whose hidden
        states are needed, None for all. The others still write their keys and values in the last
        layer, but skip its output projection and MLP. Returns (k or num_tokens, hidden_size).
        """
        stream = self.through(self.embed(input_ids), positions, kv_cache, batch, wanted)
        return self.norm.add(*stream)[0]

    def through(self, hidden: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor | None) -> Pair:
        """Run the layers that are built. Returns the residual stream as two terms."""
        residual: torch.Tensor | None = None  # the stream is the sum of the two
        cos_sin = local_cos_sin = self.rotary(positions)
        if self.rotary_local is not self.rotary:
            local_cos_sin = self.rotary_local(positions)
        layers, windows, calls = [*self.layers], self.config.windows, []
        for kv, i in zip(kv_cache, self.here, strict=False):  # a draft network's caches may follow
            angles = cos_sin if windows[i] is None else local_cos_sin
            calls.append((layers[i], angles, kv, wanted if i == len(layers) - 1 else None))
        stream = None if self.run_layers is None else self.run_layers(calls, hidden, batch)
        if stream is not None:
            return stream
        for layer, angles, kv, wanted_here in calls:
            hidden, residual = layer(hidden, residual, angles, kv, batch, wanted_here)
        return hidden, residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(num_rows, hidden_size) -> (num_rows, vocab_size) in float32, on rank 0; None on the
        others. Only rows that sample come here."""
        return self.ranks.gather(self.own_logits(hidden), self.config.vocab_size)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of this rank's share of the vocabulary."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = head.logits(hidden)
        cap = self.config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream (pre-norm).

    The last addition is left to the norm that follows, in this layer or the next, which reads the
    sum anyway: a layer takes and returns the stream as two terms, each (num_tokens, hidden_size).
    `wanted`: see `Decoder.forward`.

    `post_attention_layernorm` has two meanings: in most families it is the norm before the MLP; in
    Gemma it is a norm after attention, and `pre_feedforward_layernorm` is the one before the MLP.
    """

    def __init__(self, config: ModelConfig, index: int, on: Placement):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, on, config.norm_offset)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, index, on)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.post_norms else None
        self.mlp = (MoE if config.moe_layers[index] else MLP)(config, on)
        self.post_feedforward_layernorm = norm() if config.post_norms else None
        # Or one layer, where something in between has to run in Python.
        fused = getattr(on.ops, "FusedLayer", None)
        is_plain = type(self).forward is DecoderLayer.forward
        self.one_call = fused(on.dtype, self) if fused is not None and is_plain else None

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, cos_sin: Pair, kv: Pair,
                batch: Batch, wanted: torch.Tensor | None = None) -> Pair:
        if self.one_call is not None and self.one_call.suits(self, hidden, wanted):
            return self.one_call(self, hidden, residual, cos_sin, kv, batch, wanted)
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self.self_attn(normed, cos_sin, kv, batch, wanted)
        if wanted is not None:
            residual = residual[wanted]
        if self.pre_feedforward_layernorm is None:
            normed, residual = self.post_attention_layernorm.add(attended, residual)
            return self.mlp(normed), residual
        attended = self.post_attention_layernorm(attended)
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache, with RoPE and optional qk-norm.

    A rank has a share of the KV heads with the query heads that read them (`Ranks.share_heads`).
    """

    def __init__(self, config: ModelConfig, index: int, on: Placement):
        super().__init__()
        self.ops = on.ops
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.window = config.windows[index]
        heads, kv_heads = on.ranks.share_heads(config.num_attention_heads,
                                               config.num_key_value_heads)
        q = heads.times(self.head_dim)
        kv = kv_heads.times(self.head_dim)
        self.qkv_proj = on.linear(config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv},
                                  config.qkv_bias, on)
        self.o_proj = on.linear(q, {"o_proj": config.hidden_size}, config.o_bias, on)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, on, config.norm_offset)
            self.k_norm = RMSNorm(self.head_dim, self.eps, on, config.norm_offset)

    def forward(self, hidden: torch.Tensor, cos_sin: Pair, kv: Pair, batch: Batch,
                wanted: torch.Tensor | None = None) -> torch.Tensor:
        out = self.attend(self.qkv_proj(hidden), cos_sin, kv, batch)
        if wanted is not None:
            out = out[wanted]
        return self.o_proj(out.flatten(1))

    def attend(self, qkv: torch.Tensor, cos_sin: Pair, kv: Pair, batch: Batch) -> torch.Tensor:
        """qkv: (num_tokens, width of q, k and v) -> (num_tokens, num_heads, head_dim)"""
        qkv = qkv.view(len(qkv), -1, self.head_dim)  # (num_tokens, heads of q, k and v, head_dim)
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        q = self.ops.norm_rope_store(qkv, q_weight, k_weight, self.eps, *cos_sin, *kv,
                                     batch.slot_mapping)  # (num_tokens, num_heads, head_dim)
        return self.ops.paged_attention(q, *kv, batch, self.scale, self.window, self.softcap)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), the gated MLP (Shazeer 2020, "GLU Variants")."""

    def __init__(self, config: ModelConfig, on: Placement):
        super().__init__()
        self.ops = on.ops
        self.activation = config.activation
        stream = config.hidden_size
        inner = on.ranks.share(config.intermediate_size)
        self.gate_up_proj = on.linear(stream, {"gate_proj": inner, "up_proj": inner},
                                      config.mlp_bias, on)
        self.down_proj = on.linear(inner, {"down_proj": stream}, config.mlp_bias, on)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(hidden)
        return self.down_proj(self.ops.act_and_mul(gate_up, self.activation))


class MoE(nn.Module):
    """A mixture of experts: a router picks a few MLPs for each token and weighs their answers
    (Shazeer et al. 2017; Jiang et al. 2024, "Mixtral of Experts").

    Ranks have either a share of every expert, as of an MLP, or (`expert_parallel`) whole experts:
    fewer and larger matrix products, but all ranks wait for the one whose experts are chosen most.
    """

    def __init__(self, config: ModelConfig, on: Placement):
        super().__init__()
        self.ranks = on.ranks
        self.experts_per_token = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        experts = config.num_experts
        inner = config.moe_intermediate_size
        # Every rank has the router, so all of them pick the same experts without communication.
        self.gate = Linear(config.hidden_size, {"gate": experts}, False, on)
        if on.expert_parallel:
            experts = on.ranks.share(experts)
        else:
            inner = on.ranks.share(inner)
        self.experts = on.experts(experts, config.hidden_size, inner, config.activation, on)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.gate.logits(hidden).softmax(-1)  # (num_tokens, num_experts)
        weights, ids = scores.topk(self.experts_per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.ranks.all_reduce(self.experts(hidden, weights, ids))
