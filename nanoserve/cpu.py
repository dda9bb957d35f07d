"""The CPU's backend: `ops`, compiled. What each function means is written in ops.py.

cpu.cpp computes, and declares what its functions take. build.py compiles it, and calls functions
with checked arguments and memory for the results. This file adds what build.py can't know: packed
weights, the cache, and sizes that no argument has by itself.

    weight (outputs, inputs) ─ prepack ─► panels
    x (rows, inputs), panels ─ linear ─► (rows, outputs)

Importing this module compiles the library if need be, and raises `BuildError` where that can't be
done. float16 is computed in float32.
"""

import ctypes
from collections.abc import Iterable
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from nanoserve import ops
from nanoserve.batch import Batch
from nanoserve.build import DTYPES, Matrix, functions_of, in_float32, load
from nanoserve.device import lasting_zeros, zeros

__all__ = ["act_and_mul", "add_rms_norm", "argmax", "sample_tokens", "experts", "thresholds",
           "linear", "embed", "new_cache", "norm_rope_store", "prepack", "paged_attention",
           "rms_norm"]

PANEL = 16  # outputs of a panel, tokens of a tile of the cache
IS_GELU = {"silu": False, "gelu_tanh": True}
COMPILED = load()
LIBRARY = functions_of(COMPILED)  # a keyword argument is a size, which the tensors must fit


class PackedWeight(NamedTuple):
    """A packed weight: the panels' 32-bit units, and the shape and dtype of the original."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    def matrix(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Matrix | None:
        """The record that a fused function takes; None for rows of another dtype."""
        outputs, inputs = self.shape
        return None if dtype != self.dtype else Matrix.of(
            COMPILED, dtype, self.memory, bias, inputs=inputs, outputs=outputs)


def multiplies(dtype: torch.dtype) -> str:
    """The instructions that multiply matrices of a dtype here, as the start-up line names them."""
    of_others, of_bfloat16 = (ctypes.c_char_p * 2).in_dll(COMPILED, "multiplies")
    return (of_bfloat16 if dtype == torch.bfloat16 else of_others).decode()


def prepack(weight: torch.Tensor) -> PackedWeight:
    weight = in_float32(weight).contiguous()
    *count, outputs, inputs = weight.shape
    # 32-bit units, rounded up to half a matrix tile of 8 (matrix_tiles.h): 33 floats take 40.
    units = -(-inputs * weight.itemsize // 4 // 8) * 8
    memory = lasting_zeros(prod(count), -(-outputs // PANEL), units, PANEL, dtype=torch.int32)
    LIBRARY.prepack(weight.view(prod(count), outputs, inputs), memory)
    return PackedWeight(memory, tuple(weight.shape), weight.dtype)


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None,
           out_dtype: torch.dtype | None = None) -> torch.Tensor:
    product = LIBRARY.product if out_dtype is None else LIBRARY.wide_product
    return product(x.contiguous(), packed, bias)


def embed(ids: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    rows = packed.memory[0, ids // PANEL, :, ids % PANEL]  # (n, units)
    return rows.view(packed.dtype)[:, :packed.shape[-1]].contiguous()  # units may be padded


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return LIBRARY.add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = LIBRARY.add_rms_norm(x, residual, weight, eps)
    return out, x if residual is None else total


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    size = gate_up.shape[1] // 2
    return LIBRARY.act_and_mul(gate_up, IS_GELU[activation], size=size, _both=2 * size)


def experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_proj: PackedWeight, down_proj: PackedWeight, first_expert: int,
            activation: str) -> torch.Tensor:
    return LIBRARY.experts(hidden, weights, ids, gate_up_proj, down_proj, first_expert,
                           IS_GELU[activation], _both=2 * down_proj.shape[2])


def new_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
              dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of 16 slots, as cpu.cpp describes them: the shape says the sizes, not where a number
    lies. float16 is kept as float32."""
    while num_blocks * block_size % PANEL:  # until the last tile is whole
        num_blocks += 1
    shape = (num_blocks, block_size, num_kv_heads, stored(head_dim, dtype))
    dtype = torch.float32 if dtype == torch.float16 else dtype
    return zeros(*shape, dtype=dtype, device=device), zeros(*shape, dtype=dtype, device=device)


def stored(size: int, dtype: torch.dtype) -> int:
    """A cache's last size: heads are padded to whole panels, 72 to 80, and in int8 a scale of four
    bytes follows each token's head."""
    padded = size + -size % PANEL
    return padded + 4 if dtype == torch.int8 else padded


def norm_rope_store(qkv: torch.Tensor, q_weight: torch.Tensor | None,
                    k_weight: torch.Tensor | None, eps: float, cos: torch.Tensor,
                    sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> torch.Tensor:
    _, heads, size = qkv.shape  # heads: all of q, k and v
    # An odd size must be refused: the library is told an even one, which qkv does not fit.
    return LIBRARY.norm_rope_store(
        qkv, q_weight, k_weight, eps, cos, sin, k_cache, v_cache, slot_mapping,
        heads=heads - 2 * k_cache.shape[2], size=size - size % 2,
        stored=stored(size, k_cache.dtype))


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
                    scale: float, window: int | None = None, softcap: float | None = None,
                    sinks: torch.Tensor | None = None,
                    last: torch.Tensor | None = None) -> torch.Tensor:
    (tokens, heads, size), _, block_size, kv_heads = q.shape, *k_cache.shape[:3]
    check_lengths(batch, tokens, block_size)
    # So are heads that are no multiple of the KV heads.
    return LIBRARY.paged_attention(
        q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, scale,
        window or 0, softcap or 0, sinks, last, heads=heads - heads % kv_heads,
        _ends=len(batch.block_tables) + 1,
        stored=stored(size, k_cache.dtype))


def check_lengths(batch: Batch, tokens: int, block_size: int) -> None:
    """Raises `ValueError` if rows have more tokens than there are, or than their blocks hold."""
    width, longest = batch.block_tables.shape[1], max(batch.seq_lens_host, default=0)
    if tokens < sum(batch.query_lens) or longest > width * block_size:
        raise ValueError(f"{tokens} queries for rows of {batch.query_lens}, and {width} blocks of "
                         f"{block_size} tokens for a row of {longest}")


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return LIBRARY.argmax(logits)


def thresholds(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> ops.Thresholds:
    return LIBRARY.thresholds(logits, temperature, top_k, top_p, min_p)


def sample_tokens(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
                  positions: torch.Tensor,
                  thresholds: ops.Thresholds | None = None) -> torch.Tensor:
    low, last = thresholds or (None, None)
    return LIBRARY.sample_tokens(logits, temperature, seeds, positions, low, last)


# ----------------------------------------------------------- a layer in one call

MOST_TOKENS = 64  # of a fused step: with more, what lies between products does not count


def record(name: str, **fields: list[str]) -> type[ctypes.Structure]:
    """A struct of C++. fields: names by their type."""
    types = dict(pointers=ctypes.c_void_p, matrices=Matrix, numbers=ctypes.c_long,
                 floats=ctypes.c_float)
    return type(name, (ctypes.Structure,), {"_fields_": [
        (one, types[kind]) for kind, names in fields.items() for one in names.split()]})


# As cpu.cpp has them.
Layer = record(
    "Layer", pointers="input_norm q_norm k_norm attended_norm mlp_norm answer_norm k v",
    matrices="qkv o gate_up down",
    numbers="size heads kv_heads head_dim stored block_size window is_gelu",
    floats="eps scale softcap")
Tokens = record("Tokens", pointers="cos sin slots tables seq_lens starts",
                numbers="count rows width")
LAYERS = dict(zip(DTYPES, map(
    ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_void_p)] * 2, ctypes.c_long,
                     *[ctypes.c_void_p] * 3, ctypes.c_long, *[ctypes.c_void_p] * 2),
    (ctypes.c_void_p * len(DTYPES)).in_dll(COMPILED, "layers")), strict=True))
MIXTURES = dict(zip(DTYPES, map(
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.POINTER(Matrix)] * 2,
                     *[ctypes.c_long] * 2, ctypes.c_void_p, *[ctypes.c_long] * 5),
    (ctypes.c_void_p * len(DTYPES)).in_dll(COMPILED, "mixtures")), strict=True))


class Places:
    """Where tensors lie whose addresses are written down. One that sleeps loses its memory, and may
    wake up elsewhere; those of one storage move together."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        self.tensors = [*{one.untyped_storage().data_ptr(): one for one in tensors}.values()]
        self.addresses = self.found()

    def found(self) -> list[int]:
        return [one.data_ptr() for one in self.tensors]


class FusedExperts:
    """`experts` for weights of any library, each expert's by itself. gate_up, down: packed weights
    with `matrix`, (2 * inner, size) and (size, inner)."""

    def __init__(self, gate_up: list, down: list, activation: str, dtype: torch.dtype):
        self.dtype, self.is_gelu, self.packed = dtype, IS_GELU[activation], (gate_up, down)
        self.count = len(gate_up)
        self.write_down()
        self.size, self.inner = self.down[0].outputs, self.down[0].inputs

    def write_down(self) -> None:
        self.gate_up, self.down = ((Matrix * self.count)(
            *[one.matrix(self.dtype, None) for one in matrices]) for matrices in self.packed)
        self.places = Places(one.memory for one in chain(*self.packed))

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor,
                 ids: torch.Tensor) -> torch.Tensor:
        """As `ops.experts`."""
        if self.places.found() != self.places.addresses:
            self.write_down()
        tokens, chosen, out = len(hidden), ids.shape[1], torch.empty_like(hidden)
        MIXTURES[self.dtype](
            address(hidden, self.dtype, tokens, self.size),
            address(weights, torch.float32, tokens, chosen),
            address(ids, torch.int64, tokens, chosen), self.gate_up, self.down, 0, self.is_gelu,
            out.data_ptr(), tokens, self.size, chosen, self.count, self.inner)
        return out


class FusedLayer:
    """The steps of a `model.DecoderLayer` in one call, for steps of few tokens: Python's share of
    such a step is larger than that of the arithmetic between its products. Sizes are checked, and
    addresses written down, when the first step comes, and again when a weight was packed anew. A
    mixture's experts are a second call. Where somebody has put another module into the layer, or
    watches one, the layer runs step by step.

    dtype: of the residual stream. layer: newly made.
    """

    def __init__(self, dtype: torch.dtype, layer: nn.Module):
        self.dtype = dtype
        self.known: list[tuple] = []  # each `Linear` with its weight and adapters then
        self.norms: list[tuple] = []  # the parameters of each norm, and its weight then
        self.places = Places()
        self.is_mixture = not hasattr(layer.mlp, "gate_up_proj")
        experts = set(layer.mlp.modules()) if self.is_mixture else ()  # are called as a module
        self.own = dict(layer._modules)
        # The modules inside, each with those in it. `layer` is not among them: it has this object.
        self.inside = [(one, dict(one._modules)) for one in layer.modules()
                       if one is not layer and one not in experts]
        self.record: ctypes.Structure | None = None  # None: the layer runs step by step

    def suits(self, layer: nn.Module, hidden: torch.Tensor, wanted: torch.Tensor | None) -> bool:
        """Whether this step of the layer can be one call."""
        is_large = len(hidden) > MOST_TOKENS or (wanted is not None and len(wanted) > len(hidden))
        if is_large or hidden.dtype != self.dtype or layer._modules != self.own:
            return False
        for module, own in self.inside:
            if module._modules != own or is_watched(module):
                return False
        if not self.is_as_it_was():
            self.write_down(layer)
        return self.record is not None

    def is_as_it_was(self) -> bool:
        for linear, packed, adapted in self.known:
            if linear.packed is not packed or linear.adapted is not adapted:
                return False
        for parameters, weight in self.norms:
            if parameters["weight"] is not weight:
                return False
        return bool(self.known) and self.places.found() == self.places.addresses

    def write_down(self, layer: nn.Module) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.record, self.places = None, Places()
        linears = dict(qkv=attention.qkv_proj, o=attention.o_proj)
        if not self.is_mixture:
            linears |= dict(gate_up=mlp.gate_up_proj, down=mlp.down_proj)
        self.known = [(one, one.packed, one.adapted) for one in linears.values()]
        can_be_called = self.dtype in DTYPES and all(
            hasattr(one.packed, "matrix") and one.adapted is None and one.ranks.size == 1
            for one in linears.values())
        has_last_norm = layer.post_feedforward_layernorm is not None
        if not can_be_called or attention.head_dim % 2 or (self.is_mixture and has_last_norm):
            return
        made = Layer(**{name: one.packed.matrix(self.dtype, one.bias)
                        for name, one in linears.items()})
        made.size, made.head_dim = made.o.outputs, attention.head_dim
        made.heads = made.o.inputs // attention.head_dim
        made.kv_heads = (made.qkv.outputs // attention.head_dim - made.heads) // 2
        if not fit_together(made, self.is_mixture):
            return
        made.window, made.softcap = attention.window or 0, attention.softcap or 0
        made.eps, made.scale = attention.eps, attention.scale
        norms = self.write_norms(layer, made)
        biases = [one.bias for one in linears.values() if one.bias is not None]
        self.places = Places([*norms, *biases, *(packed.memory for _, packed, _ in self.known)])
        if not self.is_mixture:
            made.is_gelu = IS_GELU[mlp.activation]
        self.record = made

    def write_norms(self, layer: nn.Module, made: ctypes.Structure) -> list[torch.Tensor]:
        (size, head_dim), self.norms = (made.size, made.head_dim), []
        for name, norm, length in (
                ("input_norm", layer.input_layernorm, size),
                ("q_norm", layer.self_attn.q_norm, head_dim),
                ("k_norm", layer.self_attn.k_norm, head_dim),
                ("attended_norm", layer.post_attention_layernorm, size),
                ("mlp_norm", layer.pre_feedforward_layernorm, size),
                ("answer_norm", layer.post_feedforward_layernorm, size)):
            if norm is not None:
                setattr(made, name, address(norm.weight, torch.float32, length))
                self.norms.append((norm._parameters, norm.weight))
        return [weight for _, weight in self.norms]

    def __call__(self, layer: nn.Module, hidden: torch.Tensor, residual: torch.Tensor | None,
                 cos_sin: tuple, kv: tuple, batch: Batch, wanted: torch.Tensor | None,
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        out, stream = call_layers([self.place(kv)], [self.tokens(batch, cos_sin)], hidden, residual,
                                  wanted)
        return (layer.mlp(out) if self.is_mixture else out), stream

    def place(self, kv: tuple[torch.Tensor, torch.Tensor]) -> int:
        """The record's address; this cache is the one that it names then."""
        k, v = kv
        if self.record.k != k.data_ptr() or self.record.v != v.data_ptr():
            self.write_cache(k, v)
        return ctypes.addressof(self.record)

    def tokens(self, batch: Batch, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> int:
        """The address of what all layers of a step read. It is checked once for a batch."""
        made = batch.prepared.get(id(cos_sin[0]))
        if made is None:
            made = tokens_of(batch, *cos_sin, self.record.head_dim, self.record.block_size)
            batch.prepared[id(cos_sin[0])] = made, cos_sin
        else:
            made, _ = made
        return ctypes.addressof(made)

    def write_cache(self, k: torch.Tensor, v: torch.Tensor) -> None:
        made, (_, made.block_size, _, made.stored) = self.record, k.shape
        shape = len(k), made.block_size, made.kv_heads, stored(made.head_dim, k.dtype)
        kind = k.dtype if k.dtype == torch.int8 else self.dtype
        made.k, made.v = address(k, kind, *shape), address(v, kind, *shape)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to be called along with a module, or in its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def run_layers(calls: list[tuple], hidden: torch.Tensor,
               batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The layers of a decoder in one call. calls: each layer with cos and sin, keys and values, and
    the tokens that are wanted behind it. None where a layer has to run by itself."""
    records, tokens = [], []
    for layer, cos_sin, kv, wanted in calls:
        one = getattr(layer, "one_call", None)  # None: not a `DecoderLayer`, but what replaced one
        if one is None or is_watched(layer) or not one.suits(layer, hidden, wanted) or (
                one.is_mixture):
            return None
        records.append(one.place(kv))
        tokens.append(one.tokens(batch, cos_sin))
    return call_layers(records, tokens, hidden, None, wanted) if calls else None


def call_layers(records: list[int], tokens: list[int], hidden: torch.Tensor,
                residual: torch.Tensor | None, wanted: torch.Tensor | None,
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """records, tokens: addresses, of each layer. wanted: of the last one. As `DecoderLayer`."""
    array = ctypes.c_void_p * len(records)
    size, count = Layer.from_address(records[0]).size, Tokens.from_address(tokens[0]).count
    rows = count if wanted is None else len(wanted)
    out, stream = hidden.new_empty(rows, size), hidden.new_empty(rows, size)
    LAYERS[hidden.dtype](
        array(*records), array(*tokens), len(records), address(hidden, hidden.dtype, count, size),
        None if residual is None else address(residual, hidden.dtype, count, size),
        None if wanted is None else address(wanted, torch.int64, rows), rows,
        out.data_ptr(), stream.data_ptr())
    return out, stream


def fit_together(made: ctypes.Structure, is_mixture: bool) -> bool:
    """Whether each matrix of a layer reads what the one before it writes."""
    heads = made.heads + 2 * made.kv_heads
    attends = made.o.inputs == made.heads * made.head_dim and made.qkv.inputs == made.size and (
        made.qkv.outputs == heads * made.head_dim)
    return attends and (is_mixture or (
        made.gate_up.inputs == made.down.outputs == made.size
        and made.gate_up.outputs == 2 * made.down.inputs))


def tokens_of(batch: Batch, cos: torch.Tensor, sin: torch.Tensor, head_dim: int,
              block_size: int) -> ctypes.Structure:
    count, (rows, width) = batch.num_tokens, batch.block_tables.shape
    check_lengths(batch, count, block_size)
    return Tokens(
        address(cos, torch.float32, count, head_dim),
        address(sin, torch.float32, count, head_dim),
        address(batch.slot_mapping, torch.int32, count),
        address(batch.block_tables, torch.int32, rows, width),
        address(batch.seq_lens, torch.int32, rows),
        address(batch.cu_seqlens_q, torch.int32, rows + 1), count, rows, width)


def address(x: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a tensor's memory is. Raises `ValueError` if C++ would read other memory than its."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"a layer takes {dtype} {shape}, contiguous and on the CPU; this is "
                         f"{x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}")
    return x.data_ptr()
