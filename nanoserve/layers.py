"""The layers a decoder is made of: RMSNorm, RoPE, Linear, Embedding, and a mixture of experts.

Each layer is an ordinary `nn.Module` that owns its weights *and* knows which checkpoint tensors
fill them. A checkpoint stores q, k and v (or gate and up) as separate matrices, while the engine
multiplies with one, because one large product is faster than three small ones; and with tensor
parallelism a rank keeps a share of each matrix only:

    checkpoint           q_proj (64, 32)   k_proj (16, 32)   v_proj (16, 32)
                          rows 32..63       rows 8..15        rows 8..15         rank 1 of 2
                              │                 │                 │
    qkv_proj.weight      rows 0..31        rows 32..39       rows 40..47         (48, 32)

`tensors(path)` names these checkpoint tensors, each with a function that copies this rank's share
of it. The loader checks that each of these functions was called exactly once. When all tensors of a
decoder's layer have come, the loader calls `process_weights_after_loading`, which packs the weight
into the memory layout that this device multiplies with (`ops.prepack`). A weight that will be
packed has memory only from its first tensor (`make_room`) until then, so a model is never in memory
twice.

A Linear is cut by rows or by columns, and the two alternate: see parallel.py. Not known here:
files, the order of layers, the KV cache. Road not taken: `nn.Linear` and `nn.Embedding`, which
first draw random weights that are overwritten.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve import ops
from nanoserve.model_config import Rope
from nanoserve.parallel import Ranks, Slice, copy_share

Tensors = Iterator[tuple[str, Callable[[torch.Tensor], None]]]  # see `tensors` of any layer


@dataclass(frozen=True)
class Placement:
    """The device and dtype of the weights, and the operators: the same for all layers of a model.

    empty: allocates a weight's memory. expert_parallel: ranks have whole experts, see `MoE`.
    linear, embedding, experts: the classes of these layers, which an extra may replace by its own.
    assemble: an extra's function that makes weights from a quantised checkpoint's tensors.
    """

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = Ranks()  # a single one
    ops: ModuleType = ops  # or one of its backends, which have the same functions
    empty: Callable[..., torch.Tensor] = torch.empty
    expert_parallel: bool = False
    linear: Callable[..., "Linear"] = field(default_factory=lambda: Linear)
    embedding: Callable[..., "Embedding"] = field(default_factory=lambda: Embedding)
    experts: Callable[..., nn.Module] = field(default_factory=lambda: Experts)
    layer: Callable[..., nn.Module] | None = None  # in the place of `DecoderLayer`
    assemble: Callable | None = None

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Memory that the loader will fill."""
        memory = self.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(memory, requires_grad=False)

    def shape(self, *shape: int) -> nn.Parameter:
        """A placeholder for a weight without memory: torch's "meta" tensors are only a shape."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"),
                            requires_grad=False)


def beside(path: str, name: str) -> str:
    """The name of a neighbour: beside "layers.0.self_attn.qkv_proj", "q_proj" is
    "layers.0.self_attn.q_proj"."""
    return ".".join(filter(None, (path.rpartition(".")[0], name)))


class RMSNorm(nn.Module):
    """Root mean square normalisation: `ops.rms_norm` and its weight.

    The weight is kept in float32. offset: the checkpoint stores weight - 1 (Gemma); adding the
    1 in bfloat16 would lose most digits.
    """

    def __init__(self, size: int, eps: float, on: Placement, offset: bool = False):
        super().__init__()
        self.ops = on.ops
        self.eps = eps
        self.offset = offset
        self.weight = on.weight(size, dtype=torch.float32)
        self.neutral = 0 if offset else 1  # a random model's weight: see `load_dummy_weights`

    def tensors(self, path: str) -> Tensors:
        rows = Slice.whole(len(self.weight))
        yield f"{path}.weight", partial(copy_share, self.weight, rows, None)

    def process_weights_after_loading(self) -> None:
        if self.offset:
            self.weight += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor,
            residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` joins the residual stream: (the stream normalised, the stream)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Linear(nn.Module):
    """x @ weight.T + bias. The rows of its weight are those of several checkpoint matrices.

    inputs: this rank's columns. matrices: the checkpoint's names in order, each with this rank's
    rows, e.g. {"q_proj": Slice(32, 64, 64), ...}. A plain number means all of them.
    """

    def __init__(self, inputs: Slice | int, matrices: dict[str, Slice | int], bias: bool,
                 on: Placement):
        super().__init__()
        self.on = on
        self.ops = on.ops
        self.ranks = on.ranks
        self.inputs = Slice.of(inputs)
        self.matrices = {name: Slice.of(rows) for name, rows in matrices.items()}
        size = sum(rows.size for rows in self.matrices.values())
        self.weight = on.shape(size, self.inputs.size)
        self.bias = on.weight(size) if bias else None
        self.packed: torch.Tensor | None = None  # takes the weight's place
        self.adapted: Callable | None = None  # see `adapt`

    def tensors(self, path: str) -> Tensors:
        start = 0
        for name, rows in self.matrices.items():
            here = slice(start, start + rows.size)
            yield beside(path, f"{name}.weight"), partial(self.fill, here, rows)
            if self.bias is not None:
                copy_bias = partial(copy_share, self.bias[here], rows, None)
                yield beside(path, f"{name}.bias"), copy_bias
            start += rows.size

    def make_room(self, dtype: torch.dtype | None = None) -> None:
        """Allocate the weight, which packing will free. dtype: None for the model's own."""
        self.weight = self.on.weight(*self.weight.shape, dtype=dtype)

    def fill(self, here: slice, rows: Slice, tensor: torch.Tensor) -> None:
        """Copy this rank's share of one checkpoint matrix into the rows `here` of the weight."""
        if self.weight.is_meta:
            self.make_room()
        copy_share(self.weight[here], rows, self.inputs, tensor)

    def process_weights_after_loading(self) -> None:
        self.packed = self.ops.prepack(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, inputs) -> (num_tokens, outputs)"""
        if self.inputs.is_whole:
            return self.multiply(x, self.bias)
        # The ranks' results are summed: the bias is added afterwards, or each rank would add it.
        out = self.ranks.all_reduce(self.multiply(x))
        return out if self.bias is None else out + self.bias

    def adapt(self, add: Callable) -> None:
        """From now on `add(x, product)` gives the product with what adapters add to it."""
        self.adapted = add

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` in float32, for an LM head or a router: their outputs are compared."""
        return self.multiply(x, self.bias, torch.float32)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None,
                 out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out = self.ops.linear(x, self.packed, bias, out_dtype)
        return out if self.adapted is None else self.adapted(x, out)


class Embedding(nn.Module):
    """Token ids to vectors; with tied weights its matrix is the LM head, too.

    A rank keeps a range of the vocabulary and gives zeros for the other tokens; the ranks' results
    are summed. A tied weight is kept in packed form alone, and vectors are looked up in that form.
    """

    def __init__(self, tokens: Slice, hidden_size: int, on: Placement, tied: bool = False):
        super().__init__()
        self.ops = on.ops
        self.ranks = on.ranks
        self.dtype = on.dtype
        self.tokens = tokens
        self.tied = tied
        self.weight = on.weight(tokens.size, hidden_size)
        self.packed: torch.Tensor | None = None  # takes the place of a tied weight

    def tensors(self, path: str) -> Tensors:
        columns = Slice.whole(self.weight.shape[1])
        yield f"{path}.weight", partial(copy_share, self.weight, self.tokens, columns)

    def process_weights_after_loading(self) -> None:
        if self.tied:
            self.packed = self.ops.prepack(self.weight.data)
            self.weight = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)"""
        if self.tokens.is_whole:
            return self.embed(ids)
        elsewhere = (ids < self.tokens.start) | (ids >= self.tokens.stop)
        local = (ids - self.tokens.start).masked_fill(elsewhere, 0)
        vectors = self.embed(local).masked_fill_(elsewhere[:, None], 0)
        return self.ranks.all_reduce(vectors)

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """The vectors in these rows of the weight."""
        if self.packed is None:
            return F.embedding(rows, self.weight)
        return self.ops.embed(rows, self.packed).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the LM head: (num_rows, hidden_size) -> (num_rows, tokens that are here), float32"""
        return self.ops.linear(hidden, self.packed, None, torch.float32)


class Experts(nn.Module):
    """The gated MLPs of a mixture of experts, of which each token uses a few.

    experts: this rank's; hidden_size: of the residual stream; inner: this rank's share of each
    expert's width. One of the two is whole: see `MoE`.
    """

    def __init__(self, experts: Slice | int, hidden_size: int, inner: Slice | int, activation: str,
                 on: Placement):
        super().__init__()
        self.on = on
        self.ops = on.ops
        self.activation = activation
        self.experts = Slice.of(experts)
        self.inner = Slice.of(inner)
        count = self.experts.size
        width = self.inner.size
        self.gate_up_proj = on.shape(count, 2 * width, hidden_size)
        self.down_proj = on.shape(count, hidden_size, width)
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None  # takes the place of both

    def make_room(self) -> None:
        self.gate_up_proj = self.on.weight(*self.gate_up_proj.shape)
        self.down_proj = self.on.weight(*self.down_proj.shape)

    def tensors(self, path: str) -> Tensors:
        """Other ranks' experts, too: they must be in the checkpoint, but are not copied."""
        for expert in range(self.experts.total):
            for name in ("gate_proj", "up_proj", "down_proj"):
                fill = partial(self.fill, expert - self.experts.start, name)
                yield f"{path}.{expert}.{name}.weight", fill

    def fill(self, i: int, name: str, tensor: torch.Tensor) -> None:
        if self.down_proj.is_meta:  # also on a rank without experts: `finish` packs on all
            self.make_room()
        if not 0 <= i < self.experts.size:
            return
        hidden = Slice.whole(self.down_proj.shape[1])
        gate, up = self.gate_up_proj[i].split(self.inner.size)
        if name == "gate_proj":
            copy_share(gate, self.inner, hidden, tensor)
        elif name == "up_proj":
            copy_share(up, self.inner, hidden, tensor)
        else:
            copy_share(self.down_proj[i], hidden, self.inner, tensor)

    def process_weights_after_loading(self) -> None:
        gate_up = self.ops.prepack(self.gate_up_proj.data)
        self.gate_up_proj = None  # freed before the other one is packed
        self.packed = gate_up, self.ops.prepack(self.down_proj.data)
        self.down_proj = None

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor,
                ids: torch.Tensor) -> torch.Tensor:
        """hidden (num_tokens, hidden_size); weights and ids (num_tokens, experts per token).
        Returns this rank's share of the sum."""
        return self.ops.experts(hidden, weights, ids, *self.packed, self.experts.start,
                                self.activation)


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al. 2021): positions become angles, pairs of dimensions are turned by them.

    Angles are computed once a step and shared by all layers, not read from a table: a table for
    131,072 positions takes 64 MB and saves next to nothing.
    """

    def __init__(self, rope: Rope, device: torch.device):
        super().__init__()
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", frequencies.repeat(2), persistent=False)  # both halves
        self.scale = rope.scale

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (num_tokens,) -> cos and sin, each (num_tokens, head_dim). Both in float32,
        for any dtype of the model: bfloat16 can't tell position 4095 from 4096."""
        angles = positions[:, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale
