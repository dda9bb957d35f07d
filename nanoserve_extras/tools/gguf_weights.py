"""The tensors of a GGUF file as transformers' networks have them, some rows in memory at a time.

    blk.3.attn_q.weight             ──►  model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_up_exps.weight        ──►  model.layers.3.mlp.experts.0.up_proj.weight, .1., .2. ...

llama.cpp's own package knows the names. What its converter stores otherwise is turned back here:
the order of rows, where RoPE's pairs are neighbours or heads stand by turns; norms plus 1; -exp(A).
All of this leaves a row's blocks whole, so that 4 bits can stay what they are.

    Q4_0    (q - 8) * d, 32 to a block     is `Quantised` in groups of 32: kept, bit by bit
    others                                 are rounded again where 4 or 8 bits are asked for

Q4_1 and Q4_K add a minimum that is no multiple of the scale, IQ4 and MXFP4 step unevenly, and Q8_0
has a scale for each 32 numbers where our 8 bits have one for a row.

Invariant: each tensor of the network comes from the file once, in its shape, and each of the file's
has a place.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nanoserve_extras.quantization.quantized_linear import (
    GROUP,
    Quantised,
    portions,
    round_groups,
    round_rows,
)


class Family(NamedTuple):
    """An architecture of llama.cpp's: its kind of config in transformers, and how it is stored."""

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
# Of Qwen 3.5: what makes or takes value heads.
VALUE_HEADS = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out", "ssm_alpha", "ssm_beta", "ssm_a",
               "ssm_dt")
# Matrices of layers that may be rounded; routers and what states decay by stay wide.
ROUNDED = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output|gate)|ffn_(gate|up|down)(_exps|_shexp)?|"
                     r"ssm_out|shortconv\.(in|out)_proj)\.weight")
EXPERTS = dict(gate="gate_proj", up="up_proj", down="down_proj")
DENSE_EXPERTS = {"lfm2moe": dict(gate="w1", up="w3", down="w2")}


class Source(NamedTuple):
    """A tensor of the file, and the matrices of the network that it holds: a layer's experts, or
    one. A tensor of one dimension is a row."""

    tensor: Any  # gguf's: `data` (..., bytes of a row) or floats, `tensor_type`
    names: list[str]
    shape: tuple[int, ...]  # one matrix's
    rows: torch.Tensor | None = None  # the network's order
    columns: torch.Tensor | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def can_be_rounded(self) -> bool:
        return ROUNDED.fullmatch(self.tensor.name) is not None

    def matrices(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each with its name: what is stored of its rows."""
        data = self.tensor.data
        return zip(self.names, data.reshape(len(self.names), -1, data.shape[-1]), strict=True)

    def portions(self, stored: np.ndarray, keep: bool) -> Iterator[torch.Tensor | Quantised]:
        """Some rows of a matrix after others, in float32. keep: blocks that fit stay 4 bits."""
        from gguf import dequantize
        for some in portions(len(stored), self.shape[-1]):
            rows = np.array(stored[some if self.rows is None else self.rows[some]])
            if keep and self.tensor.tensor_type.name == "Q4_0" and self.columns is None:
                yield four_bits(torch.from_numpy(rows))
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
            has = one.shape[::-1].tolist()
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
    """All of them, behind an exchange of `dim` and the next one."""
    return numbers.transpose(dim, dim + 1).flatten()


# ---------------------------------------------------------------------- rounding


def four_bits(rows: torch.Tensor) -> Quantised:
    """Blocks of Q4_0, (outputs, bytes): a float16 and 32 numbers, i and i + 16 in a byte."""
    blocks = rows.view(len(rows), -1, 2 + GROUP // 2)
    scales, pairs = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    values = torch.cat([pairs & 15, pairs >> 4], 2).flatten(1)
    return Quantised(values, torch.full(scales.shape, 8, dtype=torch.uint8), scales.float(), GROUP)


def rounded(source: Source, name: str, stored: np.ndarray, dtype: torch.dtype, bits: str | None,
            squares: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in `dtype`, or as compressed-tensors stores 8 or 4 bits, by its names. bits: None,
    int8, int4. squares (2,): those of changes and of numbers are added."""
    bits = bits if source.can_be_rounded else None
    out = torch.empty(() if bits else source.shape, dtype=dtype)
    pieces, done = [], 0
    for wide in source.portions(stored, keep=bits == "int4"):
        if bits is None:
            again = out.view(-1, source.shape[-1])[done:done + len(wide)].copy_(wide).float()
            done += len(wide)
        else:
            few = wide if isinstance(wide, Quantised) else (
                round_rows(wide) if bits == "int8" else round_groups(wide))
            again = few.restored()
            wide = again if few is wide else wide
            pieces.append(compressed(few))
        squares += torch.stack([(again - wide).square().sum(), wide.square().sum()])
    if bits is None:
        return {name: out}
    if bits == "int4":
        pieces[0]["weight_shape"] = torch.tensor(source.shape)
    return {f"{name.removesuffix('weight')}{end}": torch.cat([
        one[end] for one in pieces if end in one]) for end in pieces[0]}


def compressed(few: Quantised) -> dict[str, torch.Tensor]:
    """Some rows, as compressed-tensors names and packs them: zero points along the rows."""
    if few.zeros is None:
        return dict(weight=few.values, weight_scale=few.scales)
    return dict(weight_packed=words(few.values), weight_scale=few.scales,
                weight_zero_point=words(few.zeros.T).T.contiguous())


def words(values: torch.Tensor) -> torch.Tensor:
    """(n, m) numbers of 4 bits -> (n, m / 8) int32, the first in the lowest bits."""
    eights = nn.functional.pad(values, (0, -values.shape[1] % 8)).int().unflatten(1, (-1, 8))
    return (eights << torch.arange(0, 32, 4, dtype=torch.int32)).sum(2, dtype=torch.int32)
