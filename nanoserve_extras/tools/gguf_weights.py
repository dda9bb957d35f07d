"""The tensors of a GGUF file as transformers' networks have them, some rows in memory at a time.

    blk.3.attn_q.weight             ──►  model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_up_exps.weight        ──►  model.layers.3.mlp.experts.0.up_proj.weight, .1., .2. ...

llama.cpp's own package knows the names. Changes by its converter are reversed here: the order of
rows, if RoPE's pairs are neighbours or heads are interleaved; norms plus 1; -exp(A). None of these
splits a row's blocks, so blocks can be kept unchanged. A block has integers q, and for 16 or 32 of
them a scale s and perhaps a minimum m, weight = q * s + m. In a block of 256 ("K") scales and
minima are products:

    Q4_0, Q4_1           s = d                       m = -8 d, or as stored      4 bits
    Q4_K                 s = d * (6 bits)            m = -dmin * (6 bits)        4 bits
    Q5_0, Q5_1, Q5_K     the same with a fifth bit of q, elsewhere in the block  8 bits
    Q6_K, Q8_0           s = d * (8 bits), s = d     none                        8 bits

With int4 these blocks are kept as `Quantised`, bit by bit: 5-bit numbers are stored in 8 bits,
because rounding to 4 would lose their advantage. Other kinds (IQ4 and MXFP4 have uneven steps) are
rounded again, to 8 bits. A file of only Q8_0 or floats becomes 4 bits, except `IN_8_BITS`, and
except networks that are mostly vocabulary.

Invariant: each tensor of the network comes from the file once, in its shape, and each tensor of the
file is used.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nanoserve_extras.quantization.quantized_linear import (
    GROUP,
    IN_8_BITS,
    Quantised,
    portions,
    round_groups,
    round_rows,
    with_minima,
)
from nanoserve_extras.tools.gguf_entries import Stored


class Family(NamedTuple):
    """One of llama.cpp's architectures: its config class in transformers, and how it is stored."""

    model_type: str
    said: dict = {}  # fields that no entry names
    pairs: bool = False  # RoPE turns neighbours: rows of q and k are in another order
    raised: bool = False  # norms are 1 more than in the network


FAMILIES = {
    "llama": Family("llama", pairs=True), "mistral3": Family("ministral3", pairs=True),
    "granite": Family("granite", pairs=True), "smollm3": Family("smollm3", pairs=True),
    "qwen2": Family("qwen2"), "qwen3": Family("qwen3"), "olmo2": Family("olmo2"),
    "qwen3moe": Family("qwen3_moe", dict(norm_topk_prob=True)), "phi3": Family("phi3"),
    "qwen35": Family("qwen3_5_text", raised=True), "glm4": Family("glm4"),
    "qwen35moe": Family("qwen3_5_moe_text", raised=True), "starcoder2": Family("starcoder2"),
    "lfm2": Family("lfm2", dict(block_auto_adjust_ff_dim=False)),
    "lfm2moe": Family("lfm2_moe"),
    "gemma2": Family("gemma2", raised=True), "gemma3": Family("gemma3_text", raised=True)}
# Qwen 3.5's tensors whose rows or columns are value heads.
VALUE_HEADS = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out", "ssm_alpha", "ssm_beta", "ssm_a",
               "ssm_dt")
# Matrices of layers that may be rounded; routers and what states decay by stay wide.
EMBEDDINGS = ("token_embd.weight", "output.weight")  # they are kept as they are, or wide
WIDE = ("F32", "F16", "BF16", "F64", "Q8_0")  # a file of these alone becomes 4 bits
ROUNDED = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output|gate)|ffn_(gate|up|down)(_exps|_shexp)?|"
                     r"ssm_out|shortconv\.(in|out)_proj)\.weight")
EXPERTS = dict(gate="gate_proj", up="up_proj", down="down_proj")
DENSE_EXPERTS = {"lfm2moe": dict(gate="w1", up="w3", down="w2")}


class Source(NamedTuple):
    """A tensor of the file, and the matrices of the network that it holds: a layer's experts, or
    one. A tensor of one dimension is a row."""

    tensor: Stored
    names: list[str]
    shape: tuple[int, ...]  # one matrix's
    rows: torch.Tensor | None = None  # the network's order
    columns: torch.Tensor | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def can_be_rounded(self) -> bool:
        return ROUNDED.fullmatch(self.tensor.name) is not None

    def matrices(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each matrix by name, with the stored bytes of its rows."""
        data = self.tensor.data
        return zip(self.names, data.reshape(len(self.names), -1, data.shape[-1]), strict=True)

    def portions(self, stored: np.ndarray) -> Iterator[torch.Tensor | Quantised]:
        """A matrix in portions of rows: integers, if its blocks have them, or float32."""
        from gguf import dequantize
        unpack = UNPACK.get(self.tensor.tensor_type.name)
        for some in portions(len(stored), self.shape[-1]):
            rows = np.array(stored[some if self.rows is None else self.rows[some]])
            one = unpack(torch.from_numpy(rows)) if unpack and self.change is None else None
            if one is not None and self.columns is not None:
                one = in_order(one, self.columns)
            if one is not None:
                yield one
                continue
            wide = torch.from_numpy(dequantize(rows, self.tensor.tensor_type))
            wide = wide if self.columns is None else wide[:, self.columns]
            yield self.change(wide) if self.change else wide


def sources(tensors: list, arch: str, network: nn.Module, drafts: int) -> list[Source]:
    """The network's tensors and where they are in the file. network: transformers', on "meta".
    drafts: the last layers of the file, which are left out (MTP).

    Raises `ValueError` naming a tensor that is missing, of another shape or without a place, and
    `NotImplementedError` for blocks that gguf can't read."""
    import gguf
    layers, found, missing = network.config.num_hidden_layers, [], []
    [number] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    known = gguf.get_tensor_name_map(number, layers)
    left_out = tuple(f"blk.{layers + i}." for i in range(drafts))
    stored = {one.name: one for one in tensors if not one.name.startswith(left_out)}
    tied = network.get_expanded_tied_weights_keys(all_submodels=True)
    for name, parameter in network.state_dict().items():
        for source, names, shape in [] if name in tied else places(name, parameter, arch, known):
            if (one := stored.pop(source, None)) is None:
                missing.append(name)
                continue
            has = [*one.shape]
            if [n for n in has if n > 1] != [n for n in (len(names), *shape) if n > 1]:
                raise ValueError(f"{name} has {has} numbers, and {[*parameter.shape]} by the "
                                 "metadata: take another file")
            gguf.dequantize(one.data.reshape(-1, one.data.shape[-1])[:1], one.tensor_type)
            found.append(Source(one, names, shape, **stored_otherwise(
                source, shape, arch, network.config)))
    if missing:
        raise ValueError(f"missing keys {', '.join(sorted(missing)[:5])}. If it is one part of "
                         "several, join them: llama-gguf-split --merge")
    if stored:
        raise ValueError(f"{type(network).__name__} has no place for "
                         f"{', '.join(sorted(stored)[:5])}")
    return found


def places(name: str, parameter: torch.Tensor, arch: str, known: Any) -> Iterator[tuple]:
    """Where a tensor of the network is in the file: names there, here, and its shape. A layer's
    experts are two tensors here, three in the file, and many in a checkpoint."""
    if match := re.fullmatch(r"(model\.layers\.(\d+)\..*experts\.)(gate_up|down)_proj", name):
        path, layer, kind = match.groups()
        count, outputs, inputs = parameter.shape
        for one in kind.split("_"):
            end = DENSE_EXPERTS.get(arch, EXPERTS)[one]
            yield (f"blk.{layer}.ffn_{one}_exps.weight",
                   [f"{path}{i}.{end}.weight" for i in range(count)],
                   (outputs // len(kind.split("_")), inputs))
        return
    spelled = re.sub(r"\.dt_bias$", ".dt_proj.bias", re.sub("expert_bias$", r"\g<0>.bias", name))
    end = re.search(r"(\.weight|\.bias)?$", spelled)[0]
    yield f"{known.get_name(spelled.removesuffix(end))}{end}", [name], tuple(parameter.shape)


def stored_otherwise(name: str, shape: tuple[int, ...], arch: str, config: Any) -> dict:
    """How a tensor differs in the file: fields of `Source`."""
    kind, family = name.split(".")[-2 if name.endswith(("weight", "bias")) else -1], FAMILIES[arch]
    if family.pairs and kind in ("attn_q", "attn_k"):  # a pair's halves are neighbours there
        heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        return {"rows" if len(shape) > 1 else "columns": swapped(
            torch.arange(shape[0]).view(heads, -1, 2), 1)}
    if family.raised and name.endswith("norm.weight") and kind != "ssm_norm":
        return dict(change=lambda wide: wide - 1)
    if not arch.startswith("qwen35") or kind not in VALUE_HEADS:
        return {}
    # A key's value heads stand together here, and in the file those of all keys by turns.
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, along = config.linear_value_head_dim * values, int(kind == "ssm_out")
    size = values if shape[along] == values else size
    first = shape[along] - size  # q and k come before
    order = torch.cat([torch.arange(first), first + swapped(
        torch.arange(size).view(values // keys, keys, -1), 0)])
    return {"columns" if along or len(shape) == 1 else "rows": order,
            "change": (lambda wide: (-wide).log()) if kind == "ssm_a" else None}


def swapped(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers, flattened, after swapping `dim` and the next dimension."""
    return numbers.transpose(dim, dim + 1).flatten()


# ------------------------------------------------------------------------ blocks

EACH_LOW_HALF = 0x0f0f0f0f0f0f0f0f  # of eight bytes at once


def halves(blocks: torch.Tensor) -> torch.Tensor:
    """(..., 2 bytes) of float16, in float32"""
    return blocks.contiguous().view(torch.float16)[..., 0].float()


def nibbles(pairs: torch.Tensor, high: torch.Tensor | None = None) -> torch.Tensor:
    """(..., n) bytes to (..., 2 n): numbers of 4 bits, of which the low halves come first. high:
    the fifth bits of all, (..., n / 4)."""
    words, low = pairs.clone(memory_format=torch.contiguous_format).view(torch.int64), EACH_LOW_HALF
    out = words.new_empty(*words.shape[:-1], 2, words.shape[-1])
    torch.bitwise_and(words, low, out=out[..., 0, :])
    torch.bitwise_and(words >> 4, low, out=out[..., 1, :])
    out = out.flatten(-2).view(torch.uint8)
    return out if high is None else out.bitwise_or_(fields(high, 1, 8) << 4)


def fields(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """(..., n) bytes to (..., n * count): each byte's numbers of some bits, the lowest first."""
    found = numbers_of_bytes(bits, count).index_select(0, packed.flatten().int())
    return found.view(*packed.shape).view(torch.uint8)


@cache
def numbers_of_bytes(bits: int, count: int) -> torch.Tensor:
    """(256,): the numbers of some bits in each byte, as bytes of one word."""
    table = [[byte >> bits * i & 2 ** bits - 1 for i in range(count)] for byte in range(256)]
    words = torch.tensor(table, dtype=torch.uint8)  # (256, count)
    return words.view(torch.int64 if count == 8 else torch.int32)[:, 0]


def q4_0(b: torch.Tensor) -> Quantised:
    scales = halves(b[..., :2])
    return with_minima(nibbles(b[..., 2:]), scales, -8 * scales, GROUP)


def q4_1(b: torch.Tensor) -> Quantised:
    return with_minima(nibbles(b[..., 4:]), halves(b[..., :2]), halves(b[..., 2:4]), GROUP)


def q5_0(b: torch.Tensor) -> Quantised:
    values = nibbles(b[..., 6:], b[..., 2:6]).view(torch.int8).sub_(16)
    return Quantised(values, halves(b[..., :2]), None, GROUP)


def q5_1(b: torch.Tensor) -> Quantised:
    values = nibbles(b[..., 8:], b[..., 4:8]).view(torch.int8)
    return with_minima(values, halves(b[..., :2]), halves(b[..., 2:4]), GROUP)


def q8_0(b: torch.Tensor) -> Quantised:
    return Quantised(b[..., 2:].contiguous().view(torch.int8), halves(b[..., :2]), None, GROUP)


def levels(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of a block's eight groups (Q4_K, Q5_K): d and dmin times 6 bits each. Those
    of the last four groups have their upper two bits in front of the others' six."""
    first, second, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    steps = torch.cat([first & 63, both & 15 | first >> 6 << 4], -1)
    lows = torch.cat([second & 63, both >> 4 | second >> 6 << 4], -1)
    return halves(b[..., :2])[..., None] * steps, halves(b[..., 2:4])[..., None] * -lows.float()


def q4_k(b: torch.Tensor) -> Quantised:
    return with_minima(nibbles(b[..., 16:].unflatten(-1, (4, 32))), *levels(b), GROUP)


def q5_k(b: torch.Tensor) -> Quantised:
    """Bit i of byte k is the fifth of number k in group i."""
    low = nibbles(b[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = fields(b[..., 16:48], 1, 8).unflatten(-1, (32, 8)).mT
    return with_minima((low | high << 4).view(torch.int8), *levels(b), GROUP)


def q6_k(b: torch.Tensor) -> Quantised:
    """In two halves of 64 bytes with the lower four bits, and 32 with the upper two, of 128
    numbers. A group is 16 of them."""
    low = nibbles(b[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = fields(b[..., 128:192].unflatten(-1, (2, 32)), 2, 4).unflatten(-1, (32, 4)).mT
    scales = b[..., 192:208].contiguous().view(torch.int8) * halves(b[..., 208:])[..., None]
    return Quantised((low | high << 4).view(torch.int8).sub_(32), scales, None, GROUP // 2)


def in_matrix(size: int, read: Callable[[torch.Tensor], Quantised]) -> Callable:
    """size: bytes of a block."""
    def unpack(rows: torch.Tensor) -> Quantised:
        """(outputs, bytes)"""
        one = read(rows.unflatten(1, (-1, size)))
        return Quantised(*(None if part is None else part.flatten(1) for part in (
            one.values, one.scales, one.minima)), one.size)

    return unpack


UNPACK = {name: in_matrix(size, read) for name, size, read in (
    ("Q4_0", 18, q4_0), ("Q4_1", 20, q4_1), ("Q5_0", 22, q5_0), ("Q5_1", 24, q5_1),
    ("Q8_0", 34, q8_0), ("Q4_K", 144, q4_k), ("Q5_K", 176, q5_k), ("Q6_K", 210, q6_k))}


def in_order(one: Quantised, columns: torch.Tensor) -> Quantised | None:
    """The matrix with its inputs in another order; None if that would split a group."""
    groups = columns[::one.size] // one.size
    if not torch.equal((groups[:, None] * one.size + torch.arange(one.size)).flatten(), columns):
        return None
    return Quantised(one.values[:, columns], one.scales[:, groups],
                     None if one.minima is None else one.minima[:, groups], one.size)


# ---------------------------------------------------------------------- rounding


class Change(NamedTuple):
    """A matrix's entry in the report: the format of its numbers, their count, and the sums of
    squares of the numbers and of their rounding errors."""

    how: str
    numbers: int
    moved: float
    squares: float


def keeps_8_bits(found: list[Source]) -> bool:
    """Whether matrices of layers that have 8 bits or more get 8 where 4 are asked for: where some
    matrix has fewer, and where the vocabulary has more numbers than all of them, as `LLM` has it
    (`is_mostly_vocabulary`)."""
    of_layers = [one for one in found if one.can_be_rounded]
    [vocabulary] = [prod(one.shape) for one in found if one.tensor.name == EMBEDDINGS[0]]
    return vocabulary > sum(len(one.names) * prod(one.shape) for one in of_layers) or any(
        one.tensor.tensor_type.name not in WIDE for one in of_layers)


def rounded(source: Source, name: str, stored: np.ndarray, dtype: torch.dtype, bits: str | None,
            keep_8: bool) -> tuple[dict[str, torch.Tensor], Change]:
    """A matrix in `dtype`, or in 8 or 4 bits, as tensors by their names. bits: None, int8, int4.
    keep_8: see `keeps_8_bits`."""
    kind = source.tensor.tensor_type.name
    is_embedding = source.tensor.name in EMBEDDINGS and kind in UNPACK
    fits, has_8 = source.shape[-1] % GROUP == 0, keep_8 or name.split(".")[-2] in IN_8_BITS
    if bits is None or not (source.can_be_rounded or bits == "int4" and is_embedding) or (
            bits == "int4" and not fits):
        return widened(source, name, stored, dtype)
    pieces, moved, squares = [], 0.0, 0.0
    for part in source.portions(stored):
        is_kept = bits == "int4" and isinstance(part, Quantised) and (
            kind != "Q8_0" or has_8 or is_embedding)
        few = part
        if not is_kept:
            wide = part[:] if isinstance(part, Quantised) else part
            few = round_rows(wide) if bits == "int8" else (
                round_8_bit_groups(wide) if has_8 else round_groups(wide))
            moved += float((few[:] - wide).square().sum())
            squares += float(wide.square().sum())
        pieces.append(few)
    how = "8 bits by row" if bits == "int8" else f"{few.bits} bits in groups of {few.size}"
    return parts_of(name, pieces), Change(how, stored.shape[0] * source.shape[-1], moved, squares)


def widened(source: Source, name: str, stored: np.ndarray,
            dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Change]:
    out, done, moved, squares = torch.empty(source.shape, dtype=dtype), 0, 0.0, 0.0
    rows = out.view(-1, source.shape[-1])
    for part in source.portions(stored):
        wide = part[:]
        again = rows[done:done + len(wide)].copy_(wide)
        done += len(wide)
        moved += float((again.float() - wide).square().sum())
        squares += float(wide.square().sum())
    return {name: out}, Change(str(dtype).removeprefix("torch."), out.numel(), moved, squares)


def round_8_bit_groups(wide: torch.Tensor) -> Quantised:
    one = round_rows(wide.reshape(-1, GROUP))
    return Quantised(one.values.view(wide.shape), one.scales.view(len(wide), -1), None, GROUP)


def parts_of(name: str, pieces: list[Quantised]) -> dict[str, torch.Tensor]:
    """A matrix as `formats.read_own` finds it. Minima that are 0 have no columns."""
    heads = [torch.cat([one.scales for one in pieces]), torch.cat([
        one.scales[:, :0] if one.minima is None else one.minima for one in pieces])]
    narrow = [part.half() for part in heads]
    if all(map(torch.equal, narrow, heads)):
        heads = narrow
    numbers = torch.cat([one.pairs() if one.bits == 4 else one.values for one in pieces])
    return {name: numbers, f"{name}_scale": heads[0], f"{name}_minimum": heads[1]}
