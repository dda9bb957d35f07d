"""Quantised checkpoints: small integers and 8-bit floats in the files, weights for the engine.

A weight of 4 or 8 bits is a whole number q, and a group of neighbours shares a scale s and perhaps
a zero point z: w = (q - z) * s. (GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023; FP8, Micikevicius
et al. 2022.) The formats differ in how they store q, s and z, under which names:

    quant_method                        q                                 z                   s
    fp8                                 weight, e4m3                                    per block
    compressed-tensors  float-, int-,   weight, e4m3 or int8    as it is     per row, group, block
                        naive-, mxfp8-
                        pack-quantized  weight_packed           packed along the outputs   per group
                        nvfp4-, mxfp4-  weight_packed, e2m1              per 16 (and one of all), 32
    modelopt                            weight, e4m3 or e2m1                      one; as with nvfp4
    mxfp4               gpt-oss's       ..._blocks, e2m1                          ..._scales, per 32
    nanoserve           weight, 4 bits in pairs, or int8         weight_minimum (-z * s)   per group
    gptq                                qweight, transposed     qzeros, stored minus 1     per group
    awq                                 qweight, transposed     qzeros, both in its own order

`assemble` is called between the files and the loader. It gathers the tensors of one matrix, passes
on one weight in float32, and frees them. `quantization="dequantize"` uses this file alone, and
saves no memory. `"int8"` rounds the result again (quantized_linear.py). For `"int4"` weights of 4
bits in groups are passed on unchanged.

In a mixture of formats (NVFP4 beside FP8, for example) each matrix has the format of the group that
names it.

Invariant: settings that would change the text and are not supported are refused by name, as is a
matrix with missing parts. `ignore` is not read, and `targets` only if groups differ, because the
names of the tensors tell the same. Products of 8-bit floats are not used: many GPUs that have them
refuse some shapes, or compute wrong results in a CUDA graph.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanoserve.loader import translated
from nanoserve_extras.quantization.quantized_linear import Quantised, unpaired, with_minima

Parts = dict[str, torch.Tensor]  # the tensors of one matrix, by the last words of their names
Tensors = Iterator[tuple[Path, str, torch.Tensor]]
WORD = 32  # bits of the integers into which small numbers are packed
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # bits 4 i .. 4 i + 3 of a word are column AWQ_ORDER[i]
E4M3 = torch.float8_e4m3fn
STORED = (E4M3, torch.int8, torch.uint8)  # a `weight` of another dtype is plain
BY_MODULE = ("bits", "group_size", "sym")  # some formats let these differ by matrix
# Scales of activations, ignored if these are floats (`Format.passed_over`).
ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale", "input_global_scale")
CACHED = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")
OTHER_SCALES = (*ACTIVATIONS, *CACHED, "output_scale")
# The rows and columns that share a scale, where None is all of a matrix'; and Model Optimizer's
# names for them.
Block = tuple[int | None, int | None]
WHOLE, BY_ROW = (None, None), (1, None)
MODELOPT_FP8 = {"FP8": WHOLE, "FP8_PER_CHANNEL_PER_TOKEN": BY_ROW, "FP8_PB_WO": (128, 128),
                "MXFP8": (1, 32)}
# Twice the values of E2M1: four bits with a sign, two bits of exponent and one of mantissa.
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
E2M1_PAIRS = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)],
                          dtype=torch.int8)  # the first in the low half


class Numbers(NamedTuple):
    """What a matrix' tensors say: weight = (values - zeros) * scales. zeros and scales: one for
    each block, of which the last ones may be cut off."""

    values: torch.Tensor  # (outputs, inputs)
    zeros: torch.Tensor | None
    scales: torch.Tensor
    block: Block | None
    groups: torch.Tensor | None = None  # in place of a block, the group of each input


class Format(NamedTuple):
    """The tensors that make a matrix, and how to combine them. optional: a part that some files
    lack. passed_over: further scales, by which other engines round activations, or keys and values.
    find: in a mixture of formats, finds the format of a matrix by its name.
    """

    parts: tuple[str, ...]
    read: Callable[[Parts], Numbers | Quantised]
    bits: int = 8
    is_ordered: bool = False  # "act-order": inputs are assigned to groups by importance
    optional: str = ""
    passed_over: tuple[str, ...] = ()
    find: Callable[[str], "Format | None"] | None = None
    served: str = "dequantize"  # the default of `quantization=`

    def of(self, module: str) -> "Format":
        """The format of one matrix. Raises `ValueError` if no group of a mixture names it."""
        form = self if self.find is None else self.find(module)
        if form is None:
            raise ValueError(f"{module} is quantised, but config.json's groups don't name it")
        return form


def assemble(tensors: Tensors, entry: dict, keep: bool = False, later: bool = False) -> Tensors:
    """The tensors of a checkpoint, with the parts of each matrix combined to one weight (outputs,
    inputs).

    entry: config.json's `quantization_config`. keep: a weight of 4 bits in groups, or of a format
    of ours, becomes a `Quantised`. later: yield functions that make the weights. Raises
    `ValueError` naming file and tensor.
    """
    def made(file: Path, module: str, parts: Parts) -> tuple:
        make = partial(make_weight, file, module, parts, form.of(module), keep)
        return file, module + ending, make if later else make()

    form = read_format(entry)
    joint, ending = ("_", "") if form.read is experts_of else (".", ".weight")
    waiting: dict[str, Parts] = {}
    for file, name, tensor in one_by_one(tensors):
        module, _, part = name.rpartition(joint)
        part = "weight_scale" if part == "weight_scale_inv" else part  # it is multiplied with, too
        if part in form.passed_over:
            continue
        if part in OTHER_SCALES:
            raise ValueError(f"{file}: {name} is a scale of activations or of a KV cache, which "
                             "are not rounded here: use a checkpoint whose weights alone are")
        is_part = part in form.parts and (part != "weight" or tensor.dtype in STORED)
        if not is_part or part not in (own := form.of(module)).parts:
            if part != "weight_zero_point" or tensor.any():  # older files of symmetric weights
                yield file, name, tensor
            continue
        group = waiting.setdefault(module, {})
        if part in group:
            raise ValueError(f"{file}: the tensor {name} comes twice")
        group[part] = tensor
        if len(group) == len(own.parts):
            del waiting[module]
            yield made(file, module, group)
    for module, group in waiting.items():
        own = form.of(module)
        if {*own.parts} - {*group, own.optional}:
            raise ValueError(f"{module} is quantised, but has only {', '.join(sorted(group))} of "
                             f"{', '.join(own.parts)}; {len(waiting)} such in all")
        yield made(file, module, group)


def one_by_one(tensors: Tensors) -> Tensors:
    """Split fused experts: transformers saves all experts of a layer in one tensor of 8-bit floats,
    and their scales in another. Each matrix gets the name that it has in other files."""
    for file, name, tensor in tensors:
        found = re.fullmatch(r"(.*\.)(gate_up|down)_proj(_scale_inv)?", name)
        if found is None or tensor.dim() != 3 or not (found[3] or tensor.dtype == E4M3):
            yield file, name, tensor
            continue
        for i, one in enumerate(tensor):
            halves = one.chunk(2) if len(one) > 1 else (one, one)  # one scale may be for both
            parts = zip(("gate", "up"), halves, strict=True) if found[2] != "down" else [
                ("down", one)]
            for part, matrix in parts:
                yield file, f"{found[1]}{i}.{part}_proj.weight{found[3] or ''}", matrix


def make_weight(file: Path, module: str, parts: Parts, form: Format,
                keep: bool) -> torch.Tensor | Quantised:
    """Combine the parts of a matrix. Raises a `ValueError` that names the module."""
    try:
        numbers = form.read(parts)
        if form.read is experts_of:
            return numbers
        if isinstance(numbers, Quantised):
            return numbers if keep else numbers[:]
        return kept(numbers) if keep and form.bits == 4 else dense(numbers)
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in parts.items())
        raise ValueError(f"{file}: the tensors of {module} don't fit together, or not with "
                         f"config.json ({shapes}): {error}") from None


# ------------------------------------------------------------------ the formats


def read_format(entry: dict) -> Format:
    """The format in a `quantization_config`. Raises `ValueError` for unsupported settings."""
    method = entry.get("quant_method")
    readers = {"fp8": read_fp8, "compressed-tensors": read_compressed, "gptq": read_gptq,
               "awq": read_awq, "modelopt": read_modelopt, "nanoserve": read_own,
               "mxfp4": lambda entry: Format(("blocks", "scales"), experts_of)}
    if method == "auto-round":  # it writes GPTQ's tensors, or AWQ's
        allow(entry, "data_type", ("int",), "int")
        allow(entry, "act_bits", (16, None))
        method = allow(entry, "packing_format", (
            "auto_round:auto_gptq", "auto_round:auto_awq")).rpartition("_")[2]
    if not isinstance(method, str) or method not in readers:
        refuse("quant_method", method, f"choose one of {', '.join(readers)}, auto-round")
    if rounds_cache_alone(entry):
        return Format((), checked, passed_over=OTHER_SCALES)
    form = readers[method](entry)
    if others := [([target], readers[method](entry | settings))
                  for target, settings in settings_of_some(entry)]:
        form = mixed([*others, (["Linear"], form)])
    if entry.get("kv_cache_scheme") is None:
        return form
    return form._replace(passed_over=(*form.passed_over, *CACHED))


def rounds_cache_alone(entry: dict) -> bool:
    """Whether only keys and values are rounded, and all weights are plain."""
    if entry.get("quant_method") == "modelopt":
        return entry.get("quant_algo") is None and bool(
            entry.get("kv_cache_scheme") or entry.get("kv_cache_quant_algo"))
    named = section(entry, "config_groups")
    return (entry.get("quant_method") == "compressed-tensors"
            and bool(entry.get("kv_cache_scheme"))
            and not any(section(named, name).get("weights") for name in named))


def settings_of_some(entry: dict) -> Iterator[tuple[str, dict]]:
    """Settings for some of the matrices, as targets of `mixed`: from GPTQModel's `dynamic`, whose
    keys are patterns, and AutoRound's `extra_config`, whose keys are names or patterns for any part
    of a name. Matrices that are not packed have plain tensors. Entries equal to the default are
    yielded, too, because the first pattern that matches decides."""
    for name, one in (section(entry, "dynamic") | section(entry, "extra_config")).items():
        settings = {key: one[key] for key in BY_MODULE if isinstance(one, dict) and key in one}
        if name.startswith("-:") or settings.get("bits") in (16, 32):
            continue
        if name in section(entry, "dynamic"):
            yield f"re:{name.removeprefix('+:')}", settings
        else:
            is_pattern = set(name) & set("*+?^$()[]{}|\\")
            yield f"re:.*(?:{name})" if is_pattern else name, settings


def mixed(groups: list[tuple[list[str], Format]]) -> Format:
    """A mixture of formats, each with its targets: names of matrices or of modules above them,
    patterns ("re:..."), or the class "Linear". They are tried in this order, as compressed-tensors
    does."""
    targets = [(target, form) for named, form in groups for target in named]
    names = {translated(target): form for target, form in targets}
    patterns = [(compiled(target[3:]), form) for target, form in targets
                if target.startswith("re:")]
    if len(names) < len(targets):
        refuse("config_groups", [named for named, _ in groups], "no target may be in two")

    def find(module: str) -> Format | None:
        above = translated(module)
        while above and above not in names:
            above = above.rpartition(".")[0]
        return names.get(above) or next((
            form for pattern, form in patterns if pattern.match(module)), names.get("Linear"))

    forms = [form for _, form in groups]
    return Format(tuple({part for form in forms for part in form.parts}), forms[0].read,
                  min(form.bits for form in forms), any(form.is_ordered for form in forms),
                  passed_over=tuple({one for form in forms for one in form.passed_over}), find=find)


def compiled(pattern: str) -> re.Pattern:
    """Compile a pattern once: there may be more patterns than `re` caches, and each matrix tries
    them."""
    try:
        return re.compile(pattern)
    except re.error as error:
        refuse("pattern", pattern, f"it is no regular expression ({error})")


def refuse(name: str, value: Any, remedy: str) -> None:
    raise ValueError(f"config.json: quantization_config with {name}={value!r:.80} is not "
                     f"supported: {remedy}, or use the unquantised checkpoint, which "
                     "quantization='int4' rounds")


def allow(entry: dict, name: str, values: tuple, default: Any = None) -> Any:
    """The entry `name`, which must be one of `values`."""
    value = entry.get(name, default)
    if value not in values:
        refuse(name, value, f"choose {' or '.join(map(str, values))}")
    return value


def blocks(name: str, value: Any, count: int) -> list[int]:
    """Check the size, or `count` sizes, of the blocks that share a scale."""
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if len(sizes) != count or not all(type(size) is int and size > 0 for size in sizes):
        what = "a whole number above 0" if count == 1 else f"{count} whole numbers above 0"
        refuse(name, value, f"it must be {what}")
    return list(sizes)


def section(entry: dict, name: str) -> dict:
    """The entry `name`, which must be an object; {} if it is missing."""
    value = entry.get(name) or {}
    if not isinstance(value, dict):
        refuse(name, value, "it must be an object")
    return value


def strings(name: str, value: Any) -> list[str]:
    """A list of names."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        refuse(name, value, "it must be a list of strings")
    return value


def read_fp8(entry: dict) -> Format:
    """DeepSeek's and Qwen's FP8 has a scale for each block of 128 x 128, Mistral's one for each
    matrix. Other engines round activations, dynamically or by a fixed scale; this one doesn't."""
    scheme = allow(entry, "activation_scheme", ("dynamic", "static"), "dynamic")
    allow(entry, "fmt", ("e4m3",), "e4m3")
    block = entry.get("weight_block_size")
    block = WHOLE if block is None else tuple(blocks("weight_block_size", block, 2))
    return of_bytes(E4M3, block)._replace(passed_over=ACTIVATIONS if scheme == "static" else ())


def read_compressed(entry: dict) -> Format:
    """compressed-tensors, written by llm-compressor. Each of `config_groups` has its own format."""
    named = section(entry, "config_groups")
    groups = [section(named, name) for name in named]
    if any(group.get("weights") != groups[0].get("weights") for group in groups):
        return mixed([(strings("targets", group.get("targets")), read_compressed(entry | dict(
            format=group.get("format") or entry.get("format"), config_groups={name: group})))
            for name, group in zip(named, groups, strict=True) if group.get("weights")])
    form = allow(entry, "format", tuple(COMPRESSED))
    for name in ("transform_config", "sparsity_config"):
        if (asked := section(entry, name)) and asked.get("format") != "dense":
            refuse(name, asked, "weights are neither rotated nor sparse here")
    if not groups:
        refuse("config_groups", entry.get("config_groups"), "there must be some")
    for group in groups:
        allow(group, "format", (form, None))
        allow(group, "output_activations", (None, {}))
    weights, (types, bits, packed) = section(groups[0], "weights"), COMPRESSED[form]
    weights = weights | dict(type=allow(weights, "type", types, types[0]), num_bits=allow(
        weights, "num_bits", bits, bits[0] if len(bits) == 1 else None))
    inputs = [section(group, "input_activations") for group in groups]
    is_fixed = any(one and one.get("dynamic") is not True for one in inputs)  # or "local"
    return packed(weights)._replace(passed_over=ACTIVATIONS if is_fixed else ())


def read_modelopt(entry: dict) -> Format:
    """NVIDIA's Model Optimizer. The KV cache's scales are ignored."""
    if entry.get("quant_algo") == "MIXED_PRECISION":
        layers = section(entry, "quantized_layers")
        if not layers:
            refuse("quantized_layers", entry.get("quantized_layers"), "it must say which")
        return mixed([([name], read_modelopt(section(layers, name))) for name in layers])
    algo = allow(entry, "quant_algo", (*MODELOPT_FP8, "NVFP4", "MIXED_PRECISION"))
    if algo in MODELOPT_FP8:
        form = of_bytes(E4M3, MODELOPT_FP8[algo], by_powers=algo == "MXFP8")
    else:
        form = of_pairs(group_size(entry) or 16, "weight", "weight_scale", "weight_scale_2")
    return form._replace(passed_over=(*ACTIVATIONS, *CACHED))


def read_gptq(entry: dict) -> Format:
    bits, size = allow(entry, "bits", (4, 8)), group_size(entry)
    name = "checkpoint_format" if "checkpoint_format" in entry else "format"  # old and new
    version = allow(entry, name, ("gptq", "gptq_v2"), "gptq")
    allow(entry, "is_marlin_format", (False, None))
    is_symmetric, is_ordered = (allow(entry, name, (True, False), False)
                                for name in ("sym", "desc_act"))

    def read(p: Parts) -> Numbers:
        """Values are transposed, (inputs, outputs), zeros and scales are (groups, outputs). Version
        1 stores zero points minus 1: in 4 bits a stored 15 is -1, so the zero point is 0. Symmetric
        weights have their zero point in the middle, and the stored one, which some tools write
        minus 1, is not read."""
        if is_ordered and "g_idx" not in p:
            refuse("desc_act", True, "there is no g_idx, which says the order")
        values, zeros = split_words(p["qweight"], bits, 0).T, split_words(p["qzeros"], bits, 1)
        zeros = ((zeros + (version == "gptq")) % 2 ** bits)[:, :len(values)].T
        if is_symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        return Numbers(values, zeros, p["scales"].T, (1, size), p.get("g_idx"))

    return Format(("qweight", "qzeros", "scales", "g_idx"), read, bits, is_ordered, "g_idx")


def read_awq(entry: dict) -> Format:
    allow(entry, "bits" if "bits" in entry else "w_bit", (4,))
    name = "version" if "version" in entry else "format"  # old and new
    allow({name: str(entry.get(name, "gemm")).lower()}, name, ("gemm",))
    size, has_zeros = group_size(entry), allow(entry, "zero_point", (True, False), True)

    def read(p: Parts) -> Numbers:
        """Transposed, too; values and zeros are packed along the outputs in AWQ's own order."""
        place = torch.tensor(AWQ_ORDER).argsort()
        values, zeros = (split_words(p[name], 4, 1).unflatten(1, (-1, 8))[..., place].flatten(1).T
                         for name in ("qweight", "qzeros"))
        if not has_zeros and (zeros != 8).any():
            refuse("zero_point", False, "zero points other than 8 are stored")
        return Numbers(values, zeros, p["scales"].T, (1, size))

    return Format(("qweight", "qzeros", "scales"), read, 4)


def group_size(entry: dict) -> int | None:
    """How many inputs share a scale; None: all of them."""
    size = entry.get("group_size", entry.get("q_group_size"))
    return None if size in (None, -1) else blocks("group_size", size, 1)[0]


def read_own(entry: dict) -> Format:
    """The format of `nanoserve convert`: values as in memory, float16 or float32 scales."""
    bits = allow(entry, "bits", (4, 8))

    def read(p: Parts) -> Quantised:
        values = checked(p["weight"], torch.uint8, torch.int8)
        values = unpaired(values) if values.dtype == torch.uint8 else values
        scales, minima = floats(p["weight_scale"]), floats(p["weight_minimum"])
        (rows, inputs), (_, groups) = values.shape, scales.shape
        size = inputs // max(groups, 1)
        if scales.shape != (rows, groups) or size * groups != inputs or (
                minima.shape not in ((rows, 0), (rows, groups))):
            raise ValueError(f"{tuple(scales.shape)} scales, {tuple(minima.shape)} minima")
        if not (scales.isfinite().all() and minima.isfinite().all()):
            raise ValueError("a scale is NaN or infinite")
        if minima.shape[1]:
            return with_minima(values, scales, minima, size)
        return Quantised(values, scales, None, size)

    return Format(("weight", "weight_scale", "weight_minimum"), read, bits, served=f"int{bits}")


# ------------------------------------------------------------- kinds of packing


def of_bytes(dtype: torch.dtype, block: Block, zeros: tuple[str, ...] = (),
             by_powers: bool = False) -> Format:
    """8 bits, stored as they are. by_powers: scales are the exponents of powers of 2."""
    return Format(("weight", "weight_scale", *zeros), lambda p: Numbers(
        checked(p["weight"], dtype), p.get("weight_zero_point"),
        powers(p["weight_scale"]) if by_powers else p["weight_scale"], block))


def of_pairs(size: int, numbers: str, scales: str, scale: str | None = None,
             join: Callable = torch.mul) -> Format:
    """4-bit floats, of which so many share a scale: the exponent of a power of 2, or a float to be
    joined with that of the whole matrix."""
    def read(p: Parts) -> Numbers:
        factors = powers(p[scales]) if scale is None else (
            join(floats(p[scales]), one_float(p[scale])))
        return Numbers(e2m1(p[numbers]), None, factors / 2, (1, size))

    return Format((numbers, scales, *[scale] * (scale is not None)), read)


def bytes_of(weights: dict, by_powers: bool = False) -> Format:
    """compressed-tensors' 8 bits."""
    dtype = torch.int8 if weights["type"] == "int" else E4M3
    return of_bytes(dtype, block_of(weights), zeros_of(weights), by_powers)


def pairs_of(weights: dict, **whole: Any) -> Format:
    """compressed-tensors' 4-bit floats."""
    allow(weights, "symmetric", (True,), True)
    [size] = blocks("group_size", weights.get("group_size"), 1)
    return of_pairs(size, "weight_packed", "weight_scale", **whole)


def words_of(weights: dict) -> Format:
    """compressed-tensors' words: 2^(bits - 1) is added, to zero points, too, so that none is
    negative."""
    bits, block = weights["num_bits"], block_of(weights)
    is_ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")

    def read(p: Parts) -> Numbers:
        rows, columns = p["weight_shape"].tolist()
        values = split_words(p["weight_packed"], bits, 1)[:, :columns]
        if tuple(values.shape) != (rows, columns):
            raise ValueError(f"weight_shape says {(rows, columns)}")
        zeros = torch.full_like(p["weight_scale"], 2 ** (bits - 1))
        if "weight_zero_point" in p:
            zeros = split_words(p["weight_zero_point"], bits, 0)[:rows]
        groups = p.get("weight_g_idx")
        if groups is not None and (groups < 0).any():  # -1: there is no order
            groups = None
        return Numbers(values, zeros, p["weight_scale"], block, groups)

    parts = ("weight_packed", "weight_shape", "weight_scale", *zeros_of(weights))
    return Format((*parts, *["weight_g_idx"] * is_ordered), read, bits, is_ordered)


def zeros_of(weights: dict) -> tuple[str, ...]:
    return () if weights.get("symmetric", True) else ("weight_zero_point",)


def block_of(weights: dict) -> Block:
    """compressed-tensors'."""
    allow(weights, "dynamic", (False, None))
    strategy = allow(weights, "strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        return (1, *blocks("group_size", weights.get("group_size"), 1))
    if strategy == "block":
        return tuple(blocks("block_structure", weights.get("block_structure"), 2))
    return WHOLE if strategy == "tensor" else BY_ROW


# compressed-tensors' formats: the types and bits of numbers, and how they are packed.
COMPRESSED = {
    "float-quantized": (("float",), (8,), bytes_of), "int-quantized": (("int",), (8,), bytes_of),
    "naive-quantized": (("int", "float"), (8,), bytes_of),
    "mxfp8-quantized": (("float",), (8,), partial(bytes_of, by_powers=True)),
    "pack-quantized": (("int",), (4, 8), words_of),
    "mxfp4-pack-quantized": (("float",), (4,), pairs_of),
    "nvfp4-pack-quantized": (("float",), (4,), partial(
        pairs_of, scale="weight_global_scale", join=torch.div))}


# ------------------------------------------------------------------- arithmetic


def dense(numbers: Numbers) -> torch.Tensor:
    """The weight, (outputs, inputs), in float32."""
    weight, (zeros, scales, groups) = numbers.values.float(), by_group(numbers)
    if zeros is not None:
        weight -= zeros.float()[:, groups]
    return weight.mul_(scales[:, groups])


def kept(numbers: Numbers) -> Quantised | torch.Tensor:
    """4-bit weights unchanged; dense, if the inputs of a group are not adjacent."""
    zeros, scales, groups = by_group(numbers)
    size = int((groups == 0).sum())
    if not size or not torch.equal(groups, torch.arange(len(groups)) // size):
        return dense(numbers)
    return with_minima(numbers.values.to(torch.uint8), scales, -zeros.float() * scales, size)


def by_group(numbers: Numbers) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Zeros and scales, (outputs, groups of inputs), and the group of each input, because
    "act-order" assigns inputs to groups by importance."""
    values, zeros, scales, block, groups = numbers
    scales = floats(scales)
    if not scales.isfinite().all():
        raise ValueError("a scale is NaN or infinite")
    (rows, inputs), height = values.shape, 1
    if groups is None:
        height, width = block[0] or rows, block[1] or inputs
        groups, counts = torch.arange(inputs) // width, [-(-rows // height), -(-inputs // width)]
    else:
        counts, groups = [rows, scales.shape[-1]], groups.long()
        if groups.shape != (inputs,):
            raise ValueError(f"{tuple(groups.shape)} inputs by g_idx for {(rows, inputs)} weights")
        if inputs and not 0 <= int(groups.min()) <= int(groups.max()) < counts[1]:
            raise ValueError(f"g_idx names other groups than 0 to {counts[1] - 1}")

    def for_rows(each: torch.Tensor) -> torch.Tensor:
        if [n for n in each.shape if n > 1] != [n for n in counts if n > 1]:
            raise ValueError(f"{tuple(each.shape)} scales or zero points for {counts} blocks")
        return each.reshape(counts).repeat_interleave(height, 0)[:rows]

    return None if zeros is None else for_rows(zeros), for_rows(scales), groups


def experts_of(p: Parts) -> torch.Tensor:
    """blocks (experts, outputs, inputs / 32, 16) and scales (experts, outputs, inputs / 32) to
    (experts, inputs, outputs), transposed as the network has them. bfloat16 holds them exactly."""
    count, outputs, groups, size = p["blocks"].shape
    out = torch.empty(count, groups * 2 * size, outputs, dtype=torch.bfloat16)
    for one, block, exponents in zip(out, p["blocks"], p["scales"], strict=True):
        one.copy_(dense(Numbers(e2m1(block.flatten(1)), None, powers(exponents) / 2,
                                (1, 2 * size))).T)
    return out


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Pairs of 4-bit floats, (outputs, inputs / 2), to twice their values, (outputs, inputs)."""
    pairs = checked(packed, torch.uint8).flatten()
    return E2M1_PAIRS.index_select(0, pairs.int()).view(len(packed), -1)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Scales that are powers of 2, of which the exponents are stored, plus 127 (e8m0)."""
    exponents = checked(exponents, torch.uint8, torch.float8_e8m0fnu).view(torch.uint8)
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)  # 255 becomes infinity


def floats(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32. Integers are refused: they are exponents or bits of another format."""
    if not scales.is_floating_point():
        raise ValueError(f"scales are {scales.dtype}, which is no float")
    return scales.float()


def one_float(scale: torch.Tensor) -> torch.Tensor:
    """A matrix's only scale, (). Several ones would be broadcast silently."""
    return floats(scale).reshape(())


def checked(numbers: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """The same tensor, if it has one of these dtypes: other bits would be misread."""
    if numbers.dtype not in dtypes:
        raise ValueError(f"numbers are {numbers.dtype}, not {' or '.join(map(str, dtypes))}")
    return numbers


def split_words(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack words into 32 / bits numbers of `bits` bits each, the lowest bits first."""
    packed = checked(packed, torch.int32)
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    shape = [1] * (packed.dim() + 1)
    shape[dim + 1] = -1
    numbers = (packed.unsqueeze(dim + 1) >> shifts.view(shape)) & (2 ** bits - 1)
    return numbers.flatten(dim, dim + 1)
