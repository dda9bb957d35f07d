"""The parts a decoder is made of: RMSNorm, RoPE, Linear, Embedding, and a mixture of experts.

Each part owns its weights *and* how they get there. A checkpoint stores q, k and v (or gate and up)
as separate matrices, while the engine multiplies with one, because one large product is faster than
three small ones; and with tensor parallelism a rank keeps a share of each matrix only. So a part
knows its pieces by name and `weight_loader` cuts out of each what belongs here:

    checkpoint           q_proj (64, 32)   k_proj (16, 32)   v_proj (16, 32)
                          rows 32..63       rows 8..15        rows 8..15         rank 1 of 2
                              │                 │                 │
    qkv_proj.weight      rows 0..31        rows 32..39       rows 40..47         (48, 32)

A Linear that is cut by rows gives a share of the outputs ("column parallel" in the literature,
which writes the matrix transposed); one that is cut by columns sees a share of the inputs, and the
ranks' results are summed ("row parallel"). The two alternate: see parallel.py.

Invariant: a weight is written through `weight_loader` or not at all, and the loader proves that
every piece that `pieces()` names was written exactly once. `finish_loading()` is called after the
last one: there a CPU's weights are packed (packing.py), without anybody else knowing.

The interface is nn.Module's (`Part` says where it isn't), the memory is not initialised: the loader
fills every byte. Road not taken: `nn.Linear` and `nn.Embedding`, which spend seconds on random
numbers that are overwritten.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve import ops
from nanoserve.device.packing import pack, product, second_copy
from nanoserve.parallel.ranks import SOLO, Ranks, Span
from nanoserve.checkpoint.rope_config import RopeConfig

# What is a weight as it stands; integers and 8-bit floats mean nothing without their scales.
CHECKPOINT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Placement:
    """Where weights are kept, as what, and what computes between them: the same for all parts of
    a model."""

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = SOLO
    ops: ModuleType = ops  # or `kernels`, which has the same functions
    packed: bool = False  # weights are repacked for this machine's CPU, and can't be read any more

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        memory = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(memory, requires_grad=False)


def _copy(into: torch.Tensor, tensor: torch.Tensor, rows: Span, columns: Span | None) -> None:
    """Copy a share of a checkpoint's tensor. `columns` is None where it has one dimension."""
    if tensor.dtype not in CHECKPOINT_DTYPES:
        raise ValueError(f"{tensor.dtype} in the file: quantised weights are not supported")
    expected = (rows.total,) if columns is None else (rows.total, columns.total)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"shape {tuple(tensor.shape)} in the file, {expected} expected")
    share = tensor[rows.start:rows.stop]
    into.copy_(share if columns is None else share[:, columns.start:columns.stop])


class Part(nn.Module):
    """A module with less Python between its callers and its `forward`.

    nn.Module looks for hooks in each call, and for `self.weight` in three dictionaries. A CPU feels
    it, because in between the weights push that code out of the core's cache: of a decoding step of
    Qwen3-0.6B it was 2 to 3% (AMD EPYC). So a call is `forward` until a forward hook is registered,
    for its whole class then, and weights and parts are in the module's own dictionary, too.

    Confessed: hooks of gradients or of all modules are not called, and what takes the place of a
    weight or a part by other means than an assignment (`add_module`, `functional_call`) isn't seen.
    """

    __call__ = property(attrgetter("forward"))  # whatever that is by now; in C, without a frame

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def register_forward_hook(self, *args, **kwargs):
        self._look_for_hooks()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args, **kwargs):
        self._look_for_hooks()
        return super().register_forward_pre_hook(*args, **kwargs)

    def _look_for_hooks(self) -> None:
        if type(self).__call__ is Part.__call__:  # and not its own, or somebody's
            type(self).__call__ = nn.Module.__call__


class RMSNorm(Part):
    """Root mean square normalisation: `ops.rms_norm` and its weight.

    offset: the weight is stored as its distance from 1 (Gemma), and kept in float32, because 1 +
    weight in bfloat16 would lose most of it.
    """

    def __init__(self, size: int, eps: float, on: Placement, offset: bool = False):
        super().__init__()
        self.eps, self.offset, self.ops = eps, offset, on.ops
        self.weight = on.weight(size, dtype=torch.float32 if offset else None)

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        yield "weight", None

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        _copy(self.weight, tensor, Span.whole(len(self.weight)), None)

    def finish_loading(self) -> None:
        if self.offset:
            self.weight += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor,
            residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` joins the residual stream: (the stream normalised, the stream)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """The norms of query heads and of key heads, which `ops.norm_rope_store` applies in one go.

    weight: (sets, 1, head_dim). q and k are seen as (num_tokens, sets, num_kv_heads, head_dim), so
    that one multiplication serves both: the last set is the keys and has their weight, each before
    it is num_kv_heads query heads and has a copy of theirs. (Not the groups of grouped-query
    attention.) Only the weight is asked for, not `forward` or `add`.
    """

    def __init__(self, head_dim: int, sets: int, eps: float, on: Placement, offset: bool):
        super().__init__(head_dim, eps, on, offset)
        self.weight = on.weight(sets, 1, head_dim, dtype=self.weight.dtype)

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        yield "weight", "q"
        yield "weight", "k"

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        for weight in self.weight[:-1] if part == "q" else self.weight[-1:]:
            _copy(weight[0], tensor, Span.whole(weight.shape[1]), None)


class Linear(Part):
    """x @ weight.T + bias, its output rows made of named parts, each of them this rank's share.

    inputs: the columns that are here. parts: the rows by name, in order, e.g. {"q": Span(32, 64,
    64), ...}; a part that every rank has whole is a `Span.whole`.
    """

    def __init__(self, inputs: Span, parts: dict[str, Span], bias: bool, on: Placement):
        super().__init__()
        self.inputs, self.parts, self.ranks, self.packed = inputs, parts, on.ranks, on.packed
        self.inputs_whole = inputs.is_whole  # asked in every call
        size = sum(rows.size for rows in parts.values())
        self.weight = on.weight(size, inputs.size)
        self.bias = on.weight(size) if bias else None
        self.keeps_second = False  # a copy in another order beside the packed one: see packing.py
        self.product = product(self.weight, self._bias_of_product())

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """What has to be loaded: (parameter, part), the part None where there is only one."""
        for name, _ in self.named_parameters(recurse=False):
            for part in self.parts if len(self.parts) > 1 else [None]:
                yield name, part

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Copy one part (the only one, if `part` is None) of "weight" or "bias" into its rows."""
        part = part or next(iter(self.parts))
        start = 0
        for other, rows in self.parts.items():
            if other == part:
                _copy(getattr(self, name)[start:start + rows.size], tensor, rows,
                      self.inputs if name == "weight" else None)
            start += rows.size

    def finish_loading(self) -> None:
        """All parts are in place, and the weight can be packed. The plain one is freed, or not."""
        if self.packed:
            plain = self.weight.data
            self.weight = nn.Parameter(pack(plain), requires_grad=False)
            self.product = product(self.weight.data, self._bias_of_product(),
                                   second_copy(plain) if self.keeps_second else None)

    def _bias_of_product(self) -> torch.Tensor | None:
        """None where the ranks' results are summed: it is added after that, once (and not once a
        rank: nano-vllm #125)."""
        return self.bias if self.inputs_whole else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x)
        if self.inputs_whole:
            return out
        out = self.ranks.all_reduce(out)
        return out if self.bias is None else out + self.bias


class Embedding(Part):
    """Token ids to vectors; with tied weights its matrix is the LM head, too.

    A rank keeps a range of the vocabulary, answers zeros for the other tokens, and the sum over the
    ranks is the answer. A packed weight has no rows to look up, so a tied one is kept twice
    (or three times: see packing.py).
    """

    def __init__(self, tokens: Span, hidden_size: int, on: Placement, tied: bool = False):
        super().__init__()
        self.tokens, self.ranks, self.packed = tokens, on.ranks, on.packed and tied
        self.weight = on.weight(tokens.size, hidden_size)
        self.keeps_second = False  # see Linear
        self.logits = product(self.weight)  # (num_rows, hidden_size) -> (num_rows, tokens.size)

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        yield "weight", None

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str | None = None) -> None:
        _copy(self.weight, tensor, self.tokens, Span.whole(self.weight.shape[1]))

    def finish_loading(self) -> None:
        """The LM head's copy is packed, if there is one."""
        if self.packed:
            plain = self.weight.data  # it stays, for the look-up
            self.logits = product(pack(plain), None,
                                  second_copy(plain) if self.keeps_second else plain)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tokens.is_whole:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self.tokens.start) | (ids >= self.tokens.stop)
        local = (ids - self.tokens.start).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill_(elsewhere[:, None], 0)
        return self.ranks.all_reduce(vectors)


class Experts(Part):
    """The gated MLPs of a mixture of experts, of which each token uses a few.

    experts: those that are here; hidden_size: of the stream; inner: the share of each expert's
    width. Either all experts are here with a share of each, or some of them whole.
    """

    def __init__(self, experts: Span, hidden_size: int, inner: Span, activation: str,
                 on: Placement):
        super().__init__()
        self.experts, self.inner = experts, inner
        self.activation, self.ops = activation, on.ops
        self.gate_up_proj = on.weight(experts.size, 2 * inner.size, hidden_size)
        self.down_proj = on.weight(experts.size, hidden_size, inner.size)

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """Other ranks' experts, too: they must be in the checkpoint, and are passed over."""
        for expert in range(self.experts.total):
            yield "gate_up_proj", f"{expert}.gate"
            yield "gate_up_proj", f"{expert}.up"
            yield "down_proj", f"{expert}.down"

    def weight_loader(self, name: str, tensor: torch.Tensor, part: str) -> None:
        expert, kind = part.split(".")
        expert = int(expert) - self.experts.start
        if not 0 <= expert < self.experts.size:
            return
        hidden, width = Span.whole(self.down_proj.shape[1]), self.inner.size
        if kind == "down":
            _copy(self.down_proj[expert], tensor, hidden, self.inner)
        else:
            start = width if kind == "up" else 0
            _copy(self.gate_up_proj[expert, start:start + width], tensor, self.inner, hidden)

    def finish_loading(self) -> None:
        """Nothing to repack."""

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor,
                ids: torch.Tensor) -> torch.Tensor:
        """hidden (num_tokens, hidden_size); weights and ids (num_tokens, experts per token).

        Returns this rank's share of the sum.
        """
        return self.ops.experts(hidden, weights, ids, self.gate_up_proj, self.down_proj,
                                self.experts.start, self.activation)


class RotaryEmbedding(Part):
    """RoPE (Su et al. 2021): positions become angles, pairs of dimensions are turned by them.

    Angles are computed once a step and shared by all layers, not read from a table: a table for
    131,072 positions takes 64 MB and saves microseconds.
    """

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device):
        super().__init__()
        frequencies = rope_frequencies(head_dim, rope).repeat(2).to(device)  # of both halves
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scale = rope.attention_factor

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (num_tokens,) -> cos and sin, each (num_tokens, 1, 1, head_dim): the same for
        all heads, which come in sets of KV heads (`HeadNorm`).

        Both in float32 whatever the model's dtype: bfloat16 can't tell position 4095 from 4096.
        """
        angles = positions[:, None, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)


def rope_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Radians a position for each pair of dimensions, (head_dim / 2,), in float32.

    To reach further than it was trained, a model's waves are stretched by `factor`: all of them
    ("linear"), or only the long ones, which never made a full turn in training, with a blend in
    between. "llama3" blends by the number of turns, "yarn" (Peng et al. 2023) by the index.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta ** exponents
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    keep = _llama3_keep(frequencies, rope) if rope.rope_type == "llama3" else (
        _yarn_keep(head_dim, rope))
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _llama3_keep(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """0 for waves of at most `low_freq_factor` turns in training, 1 from `high_freq_factor` on."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return keep.clamp(0, 1)


def _yarn_keep(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """1 up to the pair that makes `beta_fast` turns, 0 from the one that makes `beta_slow` on."""
    def pair_with(turns: float) -> float:  # frequency theta^(-2i/d), solved for the index i
        wave = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # the reference's way out of a division by zero
    return 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
