"""SnapKV (Li et al. 2024): the last tokens of a prompt vote on which of its KV is kept.

    prompt   [ blk 0 | blk 1 | blk 2 | blk 3 | blk 4 | the last 32 tokens ] answer ...
    votes       9.1     0.3     0.2     4.4     0.1      always kept
    kept     [ blk 0 |         blk 3 |                 the last 32 tokens ] answer ...

A vote is an attention weight: the share of its softmax that a query of the *observed* tokens gives
to a key. The weights of all layers, heads and observed queries are summed block by block, and the
blocks with the largest sums are kept. The answer is generated with these only. So a long prompt is
computed once with all of its KV, which is then freed.

Backends do not return weights, so these queries are computed again here, by the formula. This needs
the plain backend (`kernels="torch"`), whose cache has a simple layout. The votes are counted when
the whole prompt is computed, whatever its chunks were.

The paper chooses single tokens, for each head. Here one table serves all heads, and memory is freed
in blocks.
"""

from dataclasses import dataclass

import torch
from torch import nn

from nanoserve import rules
from nanoserve.batch import Batch, rows_of
from nanoserve.engine import LLMEngine
from nanoserve.model import Attention
from nanoserve.ops import restored
from nanoserve.sequence import CacheEntry, Sequence, Step
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.forgetting.forgetting import Forgetting

NEVER = 2 ** 62  # behind all positions


@dataclass(frozen=True, kw_only=True)
class SnapKVOptions(rules.Options):
    """Options in tokens. keep: tokens of the prompt to keep, besides the observed ones; observed:
    the prompt's last tokens, whose queries vote."""

    keep: rules.Count = 1024
    observed: rules.Count = 32


class SnapKV(Forgetting):
    """`LLM(model, kernels="torch", extras=[SnapKV(keep=1024, observed=32)])`"""

    Options = SnapKVOptions
    needs = Forgetting.needs | {Fact.ONE_RANK, Fact.OWN_LINEAR, Fact.IN_MEMORY}

    def prepare(self, plan: Plan) -> Plan:
        plan = super().prepare(plan)
        if plan.network != "nanoserve" or plan.config.kernels != "torch":
            raise ValueError("SnapKV reads attention's weights, which only nanoserve's own network "
                             f"with kernels='torch' shows, got kernels={plan.config.kernels!r}, "
                             f"network {plan.network}")
        return plan

    def attach(self, engine: LLMEngine) -> None:
        super().attach(engine)
        self.votes: dict[Sequence, torch.Tensor] = {}  # one for each token of the prompt
        self.rows: list[tuple[int, Sequence, int]] = []  # in this step: row, sequence, first query
        self.listen(engine.runner.model)
        engine.runner.on_load.append(self.listen)

    def listen(self, model: nn.Module) -> None:
        for layer in model.layers:
            layer.self_attn.register_forward_hook(self.count)

    # ------------------------------------------------------------ the rule

    def boundary(self, seq: Sequence, position: int) -> int:
        return seq.num_prompt_tokens if position < seq.num_prompt_tokens else NEVER

    def first_drop(self, seq: Sequence) -> int:
        return seq.num_prompt_tokens

    def first_observed(self, seq: Sequence) -> int:
        return max(0, seq.num_prompt_tokens - self.options.observed)

    def choose(self, seq: Sequence, position: int) -> list[int]:
        """All full blocks before the observed tokens, except those with the most votes."""
        num_full = self.first_observed(seq) // self.block_size * self.block_size
        votes = self.votes.pop(seq)[:num_full].view(-1, self.block_size).sum(1)  # of each block
        ranked = votes.argsort(descending=True, stable=True)
        return sorted(ranked[self.options.keep // self.block_size:].tolist())

    # ----------------------------------------------------------- the votes

    def usable(self, seq: Sequence, hits: list[CacheEntry]) -> list[CacheEntry]:
        """Hits must end before the observed tokens until the votes are counted."""
        hits = super().usable(seq, hits)
        return hits if seq in self.chosen else hits[:self.first_observed(seq) // self.block_size]

    def launching(self, step: Step) -> None:
        self.rows.clear()
        seqs, starts, query_lens = rows_of(step)
        for row, (seq, start, num_new) in enumerate(zip(seqs, starts, query_lens, strict=True)):
            observed = self.first_observed(seq)
            if seq in self.chosen or start + num_new <= observed:
                continue
            if start <= observed:  # all observed tokens are still to come, perhaps again
                self.votes[seq] = torch.zeros(seq.num_prompt_tokens, dtype=torch.float64,
                                              device=self.engine.runner.device)
            self.rows.append((row, seq, max(0, observed - int(start))))

    def count(self, attention: Attention, args: tuple, output: torch.Tensor) -> None:
        """Called after each layer's attention, with its arguments."""
        hidden, cos_sin, (k_cache, _), batch, *_ = args
        for row, seq, first in self.rows:
            queries = slice(int(batch.cu_seqlens_q[row]) + first, int(batch.cu_seqlens_q[row + 1]))
            q = turned_queries(attention, hidden, cos_sin, args[2])[queries]
            weights = weights_of(q, k_cache, batch, row, attention.scale, attention.softcap)
            self.votes[seq][:weights.shape[-1]] += weights.double().sum((0, 1, 2))

    def dropped(self, step: Step) -> None:
        """The votes of a lost step may be half counted: all observed tokens are recomputed."""
        for seq in step.num_new_tokens:
            if seq in self.votes and seq.row >= 0:
                self.engine.scheduler.preempt(seq)

    def ended(self, sequences: list[Sequence]) -> None:
        super().ended(sequences)
        for seq in sequences:
            self.votes.pop(seq, None)


def turned_queries(attention: Attention, hidden: torch.Tensor, cos_sin: tuple,
                   kv: tuple) -> torch.Tensor:
    """The queries of a step's tokens, as attention makes them, without writing KV. All tokens take
    part, as LoRA adds to each its own adapter. (num_tokens, num_heads, head_dim)"""
    qkv = attention.qkv_proj(hidden).view(len(hidden), -1, attention.head_dim)
    q_weight = None if attention.q_norm is None else attention.q_norm.weight
    k_weight = None if attention.k_norm is None else attention.k_norm.weight
    nowhere = torch.full([len(hidden)], -1, dtype=torch.int32, device=hidden.device)
    return attention.ops.norm_rope_store(qkv, q_weight, k_weight, attention.eps, *cos_sin, *kv,
                                         nowhere)


def weights_of(q: torch.Tensor, k_cache: torch.Tensor, batch: Batch, row: int, scale: float,
               softcap: float | None) -> torch.Tensor:
    """softmax(q k^T * scale) of a row's last queries, (kv_heads, group, queries, keys). Read it
    beside `ops.paged_attention`."""
    positions = torch.arange(batch.seq_lens_host[row], device=q.device)
    block_size, num_kv_heads, _ = k_cache.shape[1:]
    blocks = batch.block_tables[row, positions // block_size]
    keys = restored(k_cache[blocks, positions % block_size])  # (keys, kv_heads, head_dim)
    grouped = q.float().view(len(q), num_kv_heads, -1, q.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    is_seen = positions <= positions[-len(q):, None]
    return scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
