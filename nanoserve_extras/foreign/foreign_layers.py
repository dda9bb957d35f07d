"""Parts of transformers' networks that our operators compute: matrices, RMS norms, gated MLPs.

transformers writes a norm as six torch operators, each of which reads and writes memory. So parts
of a network are replaced by ours if these compute the same:

    nn.Linear, Conv1D                           Packed: ops.linear, or a product of small weights
    one vector, one eps                         Norm: ops.rms_norm by the vector, or by 1 + it
    gate, up and down, or gate_up and down      Gated: Packed ─ ops.act_and_mul ─ Packed
    a matrix of all experts                     PackedExperts, in transformers' grouped product

Invariant: **numbers decide, not names and classes.** A copy of each part is tried in float32, with
the trial's own weight, or with matrices of one number a row (`Picks`), so that no sum hides a
difference. Rows have all magnitudes: small ones show eps, large ones a clamp. A part that raises or
gives other numbers is not replaced. In half precision our parts differ because they round less
often. The road not taken: a table of transformers' classes would grow with each version of it.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from copy import copy
from itertools import permutations, product
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D

from nanoserve import ops
from nanoserve.device import full_float32
from nanoserve.layers import Linear, Placement
from nanoserve.loader import translated
from nanoserve.parallel import Slice
from nanoserve.progress import say
from nanoserve_extras.base.device import return_freed_memory
from nanoserve_extras.foreign.foreign_weights import EXPERTS, towers_of
from nanoserve_extras.foreign.latent import keep_latents
from nanoserve_extras.quantization.quantized_experts import Grouped
from nanoserve_extras.quantization.quantized_linear import Quantised

TRITON = "nanoserve.triton_fused"  # the module of the kernels that multiply experts' matrices
SIZES = torch.tensor([1e-6, 1e-3, 1e-2, 1, 10, 100, 1e3, 1e5])[:, None]  # the rows of a trial


class Shape(torch.Tensor):
    """Stands for a weight that was packed: code that multiplies with it elsewhere gets an error. A
    tensor on the device "meta" would be multiplied silently."""

    _is_hf_initialized = True  # transformers' word for: draw no random numbers here

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ not in ("__get__", "size", "dim", "numel", "is_floating_point"):
            raise ValueError(f"a weight takes part in {function.__name__} outside of its own layer")
        return super().__torch_function__(function, types, args, kwargs or {})


class Packed(nn.Module):
    """Matrices of a network of transformers with the same input, multiplied by one of our `Linear`
    layers, which may round them. matrices: by name; an LM head's name is "lm_head". kept: for each
    matrix the checkpoint's own 4 bits, of which its weight was made, or None."""

    def __init__(self, matrices: dict[str, nn.Module], on: Placement,
                 kept: list[Quantised | None]):
        super().__init__()
        # GPT-2's are stored transposed.
        self.was_transposed = any(type(one) is Conv1D for one in matrices.values())
        weights = [one.weight.T.contiguous() if type(one) is Conv1D else one.weight.detach()
                   for one in matrices.values()]
        rows = dict(zip(matrices, map(len, weights), strict=True))
        biases = [one.bias for one in matrices.values() if one.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.linear = on.linear(weights[0].shape[1], rows, False, on)
        self.out_dtype = torch.float32 if "lm_head" in matrices else None
        if any(kept):
            end = 0
            for weight, own in zip(weights, kept, strict=True):
                start, end = end, end + len(weight)
                self.linear.fill(slice(start, end), Slice.whole(len(weight)), own or weight)
        else:  # one alone is not copied
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.linear.weight = nn.Parameter(whole, requires_grad=False)
        return_freed_memory()  # the last one's: else a network is in memory nearly twice
        self.linear.process_weights_after_loading()
        self.weight = torch.empty(sum(rows.values()), weights[0].shape[1], dtype=on.dtype,
                                  device="meta").as_subclass(Shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear.multiply(x.reshape(-1, x.shape[-1]), self.bias, self.out_dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class PackedExperts(Shape):
    """All experts' matrices, in the place of the 3-D parameter of transformers' grouped product.
    The product takes it as (experts, inputs, outputs), stored so or transposed. Rows come sorted,
    with the index at which each expert's rows end. transformers computes gates, biases and sums."""

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, grouped: nn.Module) -> "PackedExperts":
        """shape, dtype: the parameter's. grouped: multiplies, as `Grouped` does."""
        experts = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        experts.grouped = grouped
        return experts

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ == "transpose":
            return args[0]
        if function.__name__ == "_grouped_mm" and type(args[1]) is cls:
            return args[1].grouped(args[0], F.pad(kwargs["offs"], (1, 0)))
        return super().__torch_function__(function, types, args, kwargs)


class WideExperts(nn.Module):
    """The same product with weights that are not rounded, (experts, outputs, inputs), by the kernel
    of `triton_fused.experts`. torch's own product reads the ends of experts' rows on the host,
    except for bfloat16 on two kinds of GPU, and so can't be recorded as a CUDA graph."""

    def __init__(self, weight: torch.Tensor, multiply: Callable):
        super().__init__()
        self.weight, self.multiply = nn.Parameter(weight, requires_grad=False), multiply

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """x (rows, inputs), starts (experts + 1,) -> (rows, outputs)"""
        return self.multiply(x.contiguous(), self.weight, starts)


def packed_expert(weight: torch.Tensor, on: Placement, kept: list[Quantised | None]) -> Packed:
    """weight: (outputs, inputs). kept: as in `Packed`, for each of the parts that its rows are
    joined of."""
    parts = {str(i): SimpleNamespace(weight=nn.Parameter(part, requires_grad=False), bias=None)
             for i, part in enumerate(weight.split(len(weight) // len(kept)))}
    return Packed(parts, on, kept)


class Norm(nn.Module):
    """An RMS norm by `weight`, or by 1 + `weight` if there is an offset. It has the attribute
    `weight`, because some networks read the weight's dtype."""

    def __init__(self, weight: nn.Parameter, offset: int, eps: float, ops: ModuleType):
        super().__init__()
        self.weight, self.eps, self.ops = weight, eps, ops
        self.scale = weight.float() + offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.ops.rms_norm(rows, self.scale, self.eps).view(x.shape)


class Gated(nn.Module):
    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: str, ops: ModuleType):
        super().__init__()
        self.gate_up, self.down, self.activation, self.ops = gate_up, down, activation, ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x.reshape(-1, x.shape[-1]))
        out = self.down(self.ops.act_and_mul(both, self.activation))
        return out.view(*x.shape[:-1], out.shape[-1])


# ------------------------------------------------------------------ the trials


class Picks(nn.Module):
    """Replaces a matrix in a trial: each output is twice one of the inputs."""

    def __init__(self, shape: tuple[int, int], first: int):
        super().__init__()
        i = torch.arange(shape[0])
        self.at = (i + i // shape[1] + first) % shape[1]  # each time around, one further

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x.index_select(-1, self.at.to(x.device))  # contiguous, as a product is


@full_float32()
def agree(part: nn.Module, ours: nn.Module, x: torch.Tensor, noise: float = 0.0) -> bool:
    """Whether two modules agree in each number, for rows x, (n, size), together and each alone.
    noise: the allowed error where a formula subtracts, relative to a row's largest number."""
    try:
        for rows in (x, *x.split(1)):
            wanted = ours(rows[None])
            lost = 1e-5 * wanted.abs() + noise * wanted.abs().amax(-1, keepdim=True)
            if not ((part(rows[None]) - wanted).abs() <= lost).all():
                return False
    except Exception:  # the part may need anything that a trial lacks
        return False
    return True


def our_norm(part: nn.Module, on: Placement) -> Norm | None:
    """Our norm, if a part is an RMS norm. In some rows of the trial a few numbers dominate: after
    normalising they are as large as possible."""
    own, numbers = [*part.named_parameters()], [x for x in vars(part).values() if type(x) is float]
    if [vector.dim() for _, vector in own] == [1] and not [*part.children()]:
        (name, vector), trial = own[0], copy(part)
        x = torch.randn(len(SIZES), len(vector), generator=torch.Generator().manual_seed(0))
        trial._parameters = {name: nn.Parameter((x[0] * 1000 ** x[1]).to(on.device))}
        x = (SIZES * torch.stack((x, -x, x ** 9))).flatten(0, 1).to(on.device)
        for eps, offset in product(numbers, (0, 1)):
            if agree(trial, Norm(trial._parameters[name], offset, eps, on.ops), x):
                return Norm(vector, offset, eps, on.ops)
    return None


def roles(part: nn.Module, on: Placement) -> tuple[list[str], str, str] | None:
    """The roles in a gated MLP: the names of its first matrices, one or two with the gate in front;
    the name of the last one, after which the trial sees the whole middle; and the activation."""
    linear = {name: one for name, one in part.named_children() if type(one) is nn.Linear}
    others = [name for name, _ in part.named_parameters() if name.rpartition(".")[0] not in linear]
    if len(linear) not in (2, 3) or others:
        return None
    for *first, last in permutations(linear):
        picks = [Picks(linear[name].weight.shape, i) for i, name in enumerate(first)]
        if sum(len(one.at) for one in picks) != 2 * linear[last].in_features:
            continue
        x = SIZES * torch.randn(len(SIZES), linear[first[0]].in_features,
                                generator=torch.Generator().manual_seed(0))
        trial, x = copy(part), torch.cat((x, -x)).to(on.device)
        down = Picks((linear[last].in_features,) * 2, 1)
        trial._modules = part._modules | dict(zip((*first, last), (*picks, down), strict=True))
        for activation in ops.ACTIVATIONS:
            ours = Gated(lambda x, picks=picks: torch.cat([one(x) for one in picks], -1), down,
                         activation, on.ops)
            # gelu_tanh has 1 + tanh(x), which is near 0.
            if agree(trial, ours, x, noise=1e-5 if activation == "gelu_tanh" else 1e-12):
                return first, last, activation
    return None


# ----------------------------------------------------------------- the network


def take_over(network: nn.Module, on: Placement, kept: dict[str, Quantised],
              sees: bool = False, below: str = "") -> None:
    """Replace a network's parts by ours, except those in its towers. sees: whether it has towers.
    kept: by our names. below: the path of the block to which this is limited; parts that were
    replaced before stay. A router, an `nn.Linear` with an output per expert, is not rounded."""
    head, top = head_of(network), network.get_submodule(below)
    towers, rounds = towers_of(network) if sees else (), on.linear is not Linear
    routed = {one.down_proj.size(0) for one in network.modules() if hasattr(one, "is_transposed")}
    if on.device.type == "cpu":
        keep_latents(top)

    def packed(path: str, found: dict[str, nn.Module]) -> Packed:
        own = {name: kept.get(translated(f"{path}.{name}.weight".lstrip("."))) for name in found}
        return Packed({"lm_head" if one is head else name: one for name, one in found.items()},
                      on, [*own.values()])

    for path, module in top.named_modules(prefix=below):  # no list: what was replaced is freed
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if child in towers or isinstance(child, Linear):
                continue
            if type(child) in (nn.Linear, Conv1D):
                if not (rounds and type(child) is nn.Linear and child.out_features in routed):
                    setattr(module, name, packed(path, {name: child}))
            elif hasattr(child, "is_transposed"):  # it comes with `use_experts_implementation`
                if rounds:
                    pack_experts(inner, child, on, kept)
                elif on.ops.experts.__module__ == TRITON:
                    widen_experts(child)
            elif len(inspect.signature(child.forward).parameters) != 1:
                continue
            elif norm := our_norm(child, on):
                setattr(module, name, norm)
            elif found := roles(child, on):
                first, last, activation = found
                setattr(module, name, Gated(
                    packed(inner, {one: getattr(child, one) for one in first}),
                    packed(inner, {last: getattr(child, last)}), activation, on.ops))


def head_of(network: nn.Module) -> nn.Module | None:
    """The LM head, or the last matrix of a classifier, whose numbers stay float32. Raises
    `ValueError` for a classifier without one."""
    if not (name := type(network).__name__).endswith("ForSequenceClassification"):
        return network.get_output_embeddings()
    below = {*network.base_model.modules()}
    matrices = [one for one in network.modules() if isinstance(one, (nn.Linear, Packed))
                and one not in below]
    if not matrices:
        raise ValueError(f"the architecture {name} is not supported: its scores are made by no "
                         "matrix of its own (nn.Linear) behind the layers. Use a checkpoint of "
                         "another family (docs/models.md), or sentence-transformers itself")
    return matrices[-1]


def pack_experts(path: str, experts: nn.Module, on: Placement,
                 kept: dict[str, Quantised]) -> None:
    """Pack the matrices of a layer's experts, one at a time."""
    experts.config._experts_implementation = "grouped_mm"
    experts._is_hf_initialized = True  # see `Shape`
    for name, matrices in [*experts.named_parameters(recurse=False)]:
        if matrices.dim() == 3:
            parts = joined_of(experts.config.model_type, name)
            packed = nn.ModuleList(packed_expert(matrix.contiguous(), on, [
                kept.get(translated(f"{path}.{i}.{part}")) for part in parts])
                for i, matrix in enumerate(matrices.mT if experts.is_transposed else matrices))
            grouped = Grouped([one.linear for one in packed])
            grouped.process_weights_after_loading()
            put_experts(experts, name, matrices.shape, packed[0].weight.dtype, grouped)
            experts.add_module(f"packed_{name}", packed)


def widen_experts(experts: nn.Module) -> None:
    """Let our kernel multiply with the matrices of a layer's experts, unrounded."""
    from nanoserve.triton_fused import each_expert  # not reached where there is no triton

    experts.config._experts_implementation = "grouped_mm"
    experts._is_hf_initialized = True  # see `Shape`
    for name, matrices in [*experts.named_parameters(recurse=False)]:
        if matrices.dim() == 3:
            weight = matrices.detach()
            grouped = WideExperts(weight.mT if experts.is_transposed else weight, each_expert)
            put_experts(experts, name, matrices.shape, matrices.dtype, grouped)
            experts.add_module(f"wide_{name}", grouped)


def put_experts(experts: nn.Module, name: str, shape: torch.Size, dtype: torch.dtype,
                grouped: nn.Module) -> None:
    """Replace a parameter by `grouped`."""
    delattr(experts, name)  # only now, so that it can be tried again if an earlier line fails
    setattr(experts, name, PackedExperts.of(shape, dtype, grouped))


def joined_of(model_type: str, name: str) -> list[str]:
    """A checkpoint's names of the matrices that transformers joins to an expert's rows of this
    parameter, in order: gate_proj.weight and up_proj.weight, or w1.weight and w3.weight."""
    for one in get_checkpoint_conversion_mapping(model_type) or ():
        if isinstance(one, WeightConverter) and one.target_patterns[0].endswith(f".{name}"):
            return [source.rpartition("*.")[2] for source in one.source_patterns]
    return EXPERTS.get(name, [name])


def say_what_stays(network: nn.Module, on: Placement) -> None:
    """If weights are rounded, report which ones are not: embeddings, routers and unusual parts,
    with which no `Packed` multiplies."""
    stays: Counter[str] = Counter()
    before = 0
    for module in network.modules():
        size = sum(p.nbytes for p in module.parameters(recurse=False) if not p.is_meta)
        stays[type(module).__name__] += size
        before += size + (module.weight.numel() * on.dtype.itemsize
                          if isinstance(module, Packed) else 0)
    if on.linear is Linear:
        return
    largest = ", ".join(f"{name} {size / before:.0%}" for name, size in stays.most_common(3)
                        if size >= before / 200)
    say(f"{stays.total() / before:.0%} of the weights' bytes stay as they are ({largest}), the "
        "rest is rounded")
