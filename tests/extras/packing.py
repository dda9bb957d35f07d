"""Quantised checkpoints, made: packers in the other direction than quantization.py reads.

Whole numbers, zero points and scales are drawn, not rounded from weights, so that all of them
occur. From them come a format's tensors, and by a formula the matrix that they mean:
weight[o, i] = (q[o, i] - z[o, g]) * s[o, g], with the group g of input i. Nothing is shared with
the code under test; one packer serves several formats where the formats say the same.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from loading import greedy
from safetensors.torch import load_file, save_file

from nanoserve import LLM

# Options of an engine that runs such a checkpoint.
SMALL = dict(dtype="float32", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=16,
             device="cpu")
GROUP = 16
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a word's eight numbers, from the lowest bits up


class Packed(NamedTuple):
    """One matrix: config.json's entry, tensors by the last words of their names, the meaning."""

    entry: dict
    tensors: dict[str, torch.Tensor]
    dense: torch.Tensor


def words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Each 32 / bits neighbours of a row in one integer, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    padded[:, :columns] = numbers
    packed = np.zeros((rows, padded.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        packed |= padded[:, (order or range(per_word))[i]::per_word] << np.uint32(bits * i)
    return torch.from_numpy(packed.view(np.int32))


class Drawn:
    """Numbers of `bits` bits from 0 up, zero points alike, scales, and each input's group."""

    def __init__(self, rows: int, columns: int, bits: int, seed: int, size: int = GROUP,
                 shuffled: bool = False):
        rng = np.random.default_rng(seed)
        groups = -(-columns // size)
        self.q = rng.integers(0, 2 ** bits, (rows, columns))
        self.z = rng.integers(0, 2 ** bits, (rows, groups))
        deviation = 2 ** bits / 12 ** 0.5
        self.s = (rng.uniform(0.5, 1.5, (rows, groups)) * 2.5 * columns ** -0.5 / deviation)
        self.s = self.s.astype(np.float16)
        self.group = np.arange(columns) // size
        if shuffled:
            rng.shuffle(self.group)

    def dense(self, middle: int | None = None) -> torch.Tensor:
        """middle: the zero point of all, where there are none."""
        z = np.full_like(self.z, middle) if middle is not None else self.z
        z, s = z[:, self.group], self.s[:, self.group]  # each input's own
        return torch.from_numpy((self.q - z).astype(np.float32) * s.astype(np.float32))


def by_definition(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight, in float64: whole multiples of a 127th of its row's largest."""
    step = weight.double().abs().amax(1, keepdim=True) / 127
    return (weight.double() / step.clamp(min=1e-300)).round() * step


def groups_by_definition(weight: torch.Tensor, size: int = 32) -> torch.Tensor:
    """The same of groups of neighbours in a row: the lowest number, and 15 steps up to the highest.
    That number and the step are float16."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for start in range(0, weight.shape[1], size):
        group = weight[:, start:start + size].double()
        low, high = group.amin(1, True), group.amax(1, True)
        first, step = low.half().double(), ((high - low) / 15).half().double()
        values = ((group - first) / step.clamp(min=1e-300)).round().clamp(0, 15)
        out[:, start:start + size] = values * step + first
    return out


def contiguous(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def fp8(rows: int, columns: int, seed: int, block: tuple[int, int] | None = (48, 40)) -> Packed:
    """Blocks that divide neither side."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).mul(40).to(torch.float8_e4m3fn)
    block_rows, block_columns = block or (rows, columns)
    scale = torch.rand(-(-rows // block_rows), -(-columns // block_columns), generator=generator)
    scale = (scale + 0.5) * 2.5 * columns ** -0.5 / 40
    dense = torch.tensor([[float(weight[o, i]) * scale[o // block_rows, i // block_columns]
                           for i in range(columns)] for o in range(rows)])
    entry = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
    if block is None:
        return Packed(entry, dict(weight=weight, weight_scale=scale.reshape(())), dense)
    return Packed(entry | dict(weight_block_size=list(block)),
                  dict(weight=weight, weight_scale_inv=scale), dense)


def compressed(form: str, **weights) -> dict:
    """compressed-tensors' entry."""
    weights = dict(num_bits=8, type="int", symmetric=True, group_size=None, actorder=None) | weights
    return dict(quant_method="compressed-tensors", format=form, quantization_status="compressed",
                ignore=["lm_head"], kv_cache_scheme=None,
                config_groups=dict(group_0=dict(targets=["Linear"], weights=weights,
                                                input_activations=None, output_activations=None)))


def float_rows(rows: int, columns: int, seed: int) -> Packed:
    one = fp8(rows, columns, seed, (1, columns))
    tensors = dict(weight=one.tensors["weight"], weight_scale=one.tensors["weight_scale_inv"])
    return Packed(compressed("float-quantized", type="float", strategy="channel"), tensors,
                  one.dense)


def int_rows(rows: int, columns: int, seed: int, symmetric: bool = True) -> Packed:
    drawn = Drawn(rows, columns, 8, seed, columns)
    tensors = dict(weight=contiguous((drawn.q - 128).astype(np.int8)),
                   weight_scale=torch.from_numpy(drawn.s))
    if not symmetric:
        tensors["weight_zero_point"] = contiguous((drawn.z - 128).astype(np.int8))
    return Packed(compressed("int-quantized", strategy="channel", symmetric=symmetric), tensors,
                  drawn.dense(128 if symmetric else None))


def pack(rows: int, columns: int, seed: int, bits: int = 4, symmetric: bool = True,
         size: int | None = GROUP, shuffled: bool = False) -> Packed:
    """compressed-tensors' words: q along the inputs, zero points along the outputs."""
    drawn = Drawn(rows, columns, bits, seed, size or columns, shuffled)
    tensors = dict(weight_packed=words(drawn.q, bits), weight_scale=torch.from_numpy(drawn.s),
                   weight_shape=torch.tensor([rows, columns]))
    if not symmetric:
        tensors["weight_zero_point"] = words(drawn.z.T, bits).T.contiguous()
    if shuffled:
        tensors["weight_g_idx"] = torch.from_numpy(drawn.group).int()
    entry = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, group_size=size,
                       strategy="group" if size else "channel",
                       actorder="group" if shuffled else None)
    return Packed(entry, tensors, drawn.dense(2 ** (bits - 1) if symmetric else None))


def gptq(rows: int, columns: int, seed: int, bits: int = 4, lacks: int = 1,
         shuffled: bool = False) -> Packed:
    """Transposed: q packed along the inputs, zero points along the outputs, less `lacks`; of 4
    bits 0 - 1 is 15."""
    drawn = Drawn(rows, columns, bits, seed, GROUP, shuffled)
    tensors = dict(qweight=words(drawn.q, bits).T.contiguous(),
                   qzeros=words((drawn.z.T - lacks) % 2 ** bits, bits),
                   scales=contiguous(drawn.s.T), g_idx=torch.from_numpy(drawn.group).int())
    entry = dict(quant_method="gptq", bits=bits, group_size=GROUP, desc_act=shuffled, sym=False,
                 checkpoint_format="gptq" if lacks else "gptq_v2")
    return Packed(entry, tensors, drawn.dense())


def awq(rows: int, columns: int, seed: int) -> Packed:
    """Transposed, and both packed along the outputs in an order of their own."""
    drawn = Drawn(rows, columns, 4, seed)
    tensors = dict(qweight=words(drawn.q.T, 4, AWQ_COLUMNS),
                   qzeros=words(drawn.z.T, 4, AWQ_COLUMNS), scales=contiguous(drawn.s.T))
    entry = dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True)
    return Packed(entry, tensors, drawn.dense())


def e2m1(rows: int, columns: int, seed: int, form: str) -> Packed:
    """Numbers of 4 bits: a sign, an exponent of two bits, one bit behind the point. Two a byte, the
    first in the low half. form: compressed-tensors' "nv" or "mx", or "modelopt"."""
    rng, size = np.random.default_rng(seed), 32 if form == "mx" else 16
    codes = rng.integers(0, 16, (rows, columns))
    exponent, digit = codes >> 1 & 3, codes & 1
    values = np.where(exponent == 0, digit / 2, (1 + digit / 2) * 2.0 ** (exponent - 1))
    values *= np.where(codes & 8, -1, 1)
    pairs = contiguous((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    groups, whole = (rows, -(-columns // size)), 2.0 ** -9  # exact, and so is its inverse
    if form == "mx":
        exponents = rng.integers(121, 124, groups)
        scales = 2.0 ** (exponents - 127)
        tensors = dict(weight_packed=pairs, weight_scale=contiguous(exponents.astype(np.uint8)))
    else:
        stored = torch.from_numpy(rng.uniform(20, 60, groups)).to(torch.float8_e4m3fn)
        scales = stored.double().numpy() * whole
        tensors = dict(weight_scale=stored)
    scale = torch.tensor(scales).repeat_interleave(size, 1)[:, :columns]
    dense = (torch.from_numpy(values) * scale).float()
    if form == "modelopt":
        tensors |= dict(weight=pairs, weight_scale_2=torch.tensor(whole),
                        input_scale=torch.tensor(0.01))
        return Packed(dict(quant_method="modelopt", quant_algo="NVFP4", group_size=size,
                           kv_cache_scheme=dict(num_bits=8, type="float", dynamic=False)),
                      tensors, dense)
    entry = compressed(f"{form}fp4-pack-quantized", num_bits=4, type="float", group_size=size,
                       strategy="tensor_group" if form == "nv" else "group")
    if form == "nv":
        tensors |= dict(weight_packed=pairs, weight_global_scale=torch.tensor([1 / whole]),
                        input_global_scale=torch.tensor([3.0]))
        entry["config_groups"]["group_0"]["input_activations"] = dict(
            num_bits=4, type="float", dynamic="local")
    return Packed(entry, tensors, dense)


def modelopt_fp8(algo: str) -> Callable[[int, int, int], Packed]:
    """One scale, one for each row, or for blocks of 128 x 128, with two dimensions of 1 more."""
    def make(rows: int, columns: int, seed: int) -> Packed:
        block = {"FP8": None, "FP8_PB_WO": (128, 128)}.get(algo, (1, columns))
        one = fp8(rows, columns, seed, block)
        [scale] = [tensor for part, tensor in one.tensors.items() if part != "weight"]
        scale = scale[:, None, :, None] if algo == "FP8_PB_WO" else scale.squeeze()
        return Packed(dict(quant_method="modelopt", quant_algo=algo), dict(
            weight=one.tensors["weight"], weight_scale=scale, input_scale=torch.tensor(0.5)),
            one.dense)

    return make


def mxfp8(rows: int, columns: int, seed: int, is_compressed: bool = False) -> Packed:
    """e4m3, and a power of 2 for 32 inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).mul(40).to(torch.float8_e4m3fn)
    exponents = torch.randint(118, 121, (rows, -(-columns // 32)), generator=generator)
    dense = weight.float() * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)[:, :columns]
    entry = dict(quant_method="modelopt", quant_algo="MXFP8") if not is_compressed else compressed(
        "mxfp8-quantized", type="float", strategy="group", group_size=32)
    return Packed(entry, dict(weight=weight, weight_scale=exponents.to(torch.uint8)), dense)


def own(rows: int, columns: int, seed: int, bits: int = 4) -> Packed:
    """What `nanoserve convert` writes: groups of 8 with minima in 4 bits, without in 8."""
    drawn = Drawn(rows, columns, bits, seed, 8)
    scales, minima = torch.from_numpy(drawn.s), torch.zeros(rows, 0).half()
    values = torch.from_numpy(drawn.q - (128 if bits == 8 else 0)).to(torch.int8)
    dense = values.float() * scales.float()[:, drawn.group]
    if bits == 4:
        minima = -3.3 * scales
        dense += minima.float()[:, drawn.group]
    numbers = values if bits == 8 else contiguous(
        (drawn.q[:, ::2] | drawn.q[:, 1::2] << 4).astype(np.uint8))
    return Packed(dict(quant_method="nanoserve", bits=bits), dict(
        weight=numbers, weight_scale=scales, weight_minimum=minima), dense)


FORMATS: dict[str, Callable[[int, int, int], Packed]] = {
    "fp8, blocks": fp8,
    "fp8, one scale": lambda *of: fp8(*of, block=None),
    "float-quantized": float_rows,
    "int-quantized": int_rows,
    "int-quantized, zeros": lambda *of: int_rows(*of, symmetric=False),
    "pack-quantized": pack,
    "pack-quantized, zeros": lambda *of: pack(*of, symmetric=False),
    "pack-quantized, 8 bits": lambda *of: pack(*of, bits=8, size=None),
    "pack-quantized, 8 bits, zeros": lambda *of: pack(*of, bits=8, symmetric=False),
    "pack-quantized, act-order": lambda *of: pack(*of, symmetric=False, shuffled=True),
    "gptq": gptq,
    "gptq, 8 bits": lambda *of: gptq(*of, bits=8),
    "gptq_v2": lambda *of: gptq(*of, lacks=0),
    "gptq, act-order": lambda *of: gptq(*of, shuffled=True),
    "awq": awq,
    "nvfp4-pack-quantized": lambda *of: e2m1(*of, "nv"),
    "mxfp4-pack-quantized": lambda *of: e2m1(*of, "mx"),
    "NVFP4": lambda *of: e2m1(*of, "modelopt"),
    "nanoserve": own,
    "nanoserve, 8 bits": lambda *of: own(*of, bits=8),
    "mxfp8-quantized": lambda *of: mxfp8(*of, is_compressed=True),
    "MXFP8": mxfp8,
    **{algo: modelopt_fp8(algo) for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")},
}


def write(source: Path, folder: Path, make: Callable[[int, int, int], Packed],
          shards: int = 1) -> tuple[Path, Path]:
    """Two copies of a checkpoint: every `_proj` quantised, and the same as dense matrices. shards:
    files of the first one, over which the parts of each matrix are dealt out."""
    quantized, dense = folder / "quantized", folder / "dense"
    stored, plain, entry = {}, load_file(source / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        if name.endswith("_proj.weight"):
            entry, tensors, plain[name] = make(*tensor.shape, seed)
            stored |= {name.removesuffix("weight") + part: one for part, one in tensors.items()}
        else:
            stored[name] = tensor
    for copy in (quantized, dense):
        shutil.copytree(source, copy)
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_parts(stored, quantized, shards)
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | dict(quantization_config=entry)))
    return quantized, dense


def write_mixture(source: Path, folder: Path, makers: dict[str, Callable[[int, int, int], Packed]],
                  entry: dict) -> tuple[Path, Path]:
    """As `write`, but each matrix is packed by the maker whose pattern finds its name, if any."""
    made: dict[str, Packed] = {}

    def make(rows: int, columns: int, seed: int) -> Packed:
        name = sorted(load_file(source / "model.safetensors"))[seed]
        maker = next((one for part, one in makers.items() if re.search(part, name)), None)
        if maker is None:
            plain = load_file(source / "model.safetensors")[name]
            return Packed(entry, dict(weight=plain), plain)
        made[name] = maker(rows, columns, seed)
        return made[name]._replace(entry=entry)

    return write(source, folder, make)


def save_parts(stored: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    files = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(stored)}
    for file in set(files.values()):
        save_file({name: one for name, one in stored.items() if files[name] == file},
                  folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=files)))


def text_of(folder: Path, **options) -> list[int]:
    """Greedy, by an engine that is made of this folder."""
    with LLM(folder, **SMALL | options) as llm:
        return greedy(llm, 16)
