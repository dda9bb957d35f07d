"""What our operators compute of transformers' networks: matrices, RMS norms, gated MLPs.

transformers writes a norm as six torch operators, and each goes through memory anew. So parts of
a network give way to ours where these compute the same:

    nn.Linear, Conv1D                           Packed: ops.linear, or a product of small weights
    one vector, one eps                         Norm: ops.rms_norm by the vector, or by 1 + it
    gate, up and down, or gate_up and down      Gated: Packed ─ ops.act_and_mul ─ Packed

Invariant: **names and classes say nothing, numbers do.** A part goes through a trial in float32: a
norm with rows of many sizes, some so small that eps counts; an MLP as a copy of it whose matrices
are small and random. A part that raises or gives other numbers stays transformers'. In half
precision ours differ by rounding less often. Not known here: attention, steps, states. Road not
taken: a table of transformers' classes, which each version of it would make longer.
"""

import inspect
from collections import Counter
from copy import copy
from functools import partial
from itertools import permutations, product
from types import ModuleType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nanoserve import ops
from nanoserve.checkpoint.loader import translated
from nanoserve.extras.foreign_weights import towers_of
from nanoserve.extras.int4_linear import Grouped
from nanoserve.frontend.metrics import say
from nanoserve.layers import Linear, Placement
from nanoserve.parallel.ranks import Span

SIZES = torch.tensor([1e-3, 1e-2, 1.0, 30.0])[:, None]  # of rows in the trial of a norm


class Shape(torch.Tensor):
    """What is left of a weight that was packed: who multiplies with it elsewhere is told so. A
    tensor on "meta" would take part in silence, and what it has to say would be lost."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ not in ("__get__", "size", "dim", "numel", "is_floating_point"):
            raise ValueError(f"a weight takes part in {function.__name__} outside of its own layer")
        return super().__torch_function__(function, types, args, kwargs or {})


class Packed(nn.Module):
    """Matrices of transformers' network with the same input, multiplied by a `Linear` of ours,
    which may round them. matrices: by name; an LM head's is "lm_head". kept: for each the
    checkpoint's own 4 bits, of which its weight was made, or None."""

    def __init__(self, matrices: dict[str, nn.Module], on: Placement,
                 kept: list[Grouped | None]):
        super().__init__()
        # GPT-2's are stored transposed.
        weights = [one.weight.T.contiguous() if type(one) is Conv1D else one.weight.detach()
                   for one in matrices.values()]
        rows = dict(zip(matrices, map(len, weights), strict=True))
        biases = [one.bias for one in matrices.values() if one.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.linear = on.linear(weights[0].shape[1], rows, False, on)
        if any(kept):
            end = 0
            for weight, own in zip(weights, kept, strict=True):
                start, end = end, end + len(weight)
                self.linear.fill(slice(start, end), Span.whole(len(weight)), own or weight)
        else:  # one alone is not copied
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.linear.weight = nn.Parameter(whole, requires_grad=False)
        self.linear.finish_loading()
        self.weight = torch.empty(sum(rows.values()), weights[0].shape[1], dtype=on.dtype,
                                  device="meta").as_subclass(Shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear.multiply(x.reshape(-1, x.shape[-1]), self.bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class Norm(nn.Module):
    """By `weight`, or by 1 + `weight` if there is an offset. Some ask for the weight's dtype."""

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


def agree(part: nn.Module, ours: nn.Module, x: torch.Tensor) -> bool:
    try:
        return torch.allclose(part(x), ours(x), rtol=1e-4, atol=1e-6)
    except Exception:  # it may want anything that is not here
        return False


def our_norm(part: nn.Module, on: Placement) -> Norm | None:
    """What takes the place of an RMS norm."""
    vectors, numbers = [*part.parameters()], [x for x in vars(part).values() if type(x) is float]
    if [vector.dim() for vector in vectors] == [1] and not [*part.children()]:
        x = torch.randn(len(SIZES), len(vectors[0]), generator=torch.Generator().manual_seed(0))
        for eps, offset in product(numbers, (0, 1)):
            ours = Norm(vectors[0], offset, eps, on.ops)
            if agree(part, ours, (SIZES * x).to(on.device)):
                return ours
    return None


def roles(part: nn.Module, on: Placement) -> tuple[list[str], str, str] | None:
    """Of a gated MLP the names of what is multiplied with first, one or two matrices with the gate
    in front; of the last one; and the activation. A copy of it with small matrices tells."""
    linear = [name for name, one in part.named_children() if type(one) is nn.Linear]
    if len(linear) not in (2, 3):
        return None
    new = partial(nn.Linear, device=on.device, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, both, down = torch.randn(2, 3, 8, device=on.device), new(8, 12), new(6, 8)
        for *first, last in permutations(linear):
            small, parts = copy(part), [new(8, 12 // len(first)) for _ in first]
            both.weight, both.bias = (
                nn.Parameter(torch.cat([getattr(one, name) for one in parts]))
                for name in ("weight", "bias"))
            small._modules = part._modules | dict(zip(first, parts, strict=True)) | {last: down}
            for activation in ops.ACTIVATIONS:
                if agree(small, Gated(both, down, activation, on.ops), x):
                    return first, last, activation
    return None


# ----------------------------------------------------------------- the network


def take_over(network: nn.Module, on: Placement, kept: dict[str, Grouped],
              sees: bool = False) -> None:
    """Put ours in the place of a network's parts, but not of its towers', if it sees. kept: by our
    names."""
    head, before = network.get_output_embeddings(), sum(p.nbytes for p in network.parameters())
    towers = towers_of(network) if sees else ()

    def packed(path: str, above: nn.Module, *names: str) -> Packed:
        found = {name: getattr(above, name) for name in names}
        own = {name: kept.get(translated(f"{path}.{name}.weight".lstrip("."))) for name in names}
        return Packed({"lm_head" if one is head else name: one for name, one in found.items()},
                      on, [*own.values()])

    for path, module in network.named_modules():  # no list: what was replaced must be freed
        for name, child in module.named_children():
            if child in towers:
                continue
            if type(child) in (nn.Linear, Conv1D):
                setattr(module, name, packed(path, module, name))
            elif len(inspect.signature(child.forward).parameters) != 1:
                continue
            elif norm := our_norm(child, on):
                setattr(module, name, norm)
            elif found := roles(child, on):
                first, last, activation = found
                below = f"{path}.{name}"
                setattr(module, name, Gated(packed(below, child, *first),
                                            packed(below, child, last), activation, on.ops))
    if on.linear is not Linear:
        say_what_stays(network, before)


def say_what_stays(network: nn.Module, before: int) -> None:
    """What no `Packed` multiplies with keeps its dtype: embeddings, and experts, which transformers
    has as one parameter for all of a layer. before: the bytes of all weights."""
    stays: Counter[str] = Counter()
    for module in network.modules():
        stays[type(module).__name__] += sum(
            p.nbytes for p in module.parameters(recurse=False) if not p.is_meta)
    largest = ", ".join(f"{name} {size / before:.0%}" for name, size in stays.most_common(3)
                        if size >= before / 200)
    say(f"{stays.total() / before:.0%} of the weights' bytes stay as they are ({largest}), the "
        "rest is rounded")
