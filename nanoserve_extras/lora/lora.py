"""LoRA: many small adapters over one model, mixed in one batch.

An adapter (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models") changes a weight
W by a product of two thin matrices: y = x W^T + scaling * (x A^T) B^T, where A is (rank, inputs)
and B is (outputs, rank). All loaded adapters stand side by side in one A and one B, and a mask of
zeros and ones keeps, for each token, the columns of its own adapter:

    x A^T    (tokens, max_loras * rank)   id 1     id 2     id 3
    mask     a token of adapter 2       [ 0 0 0 0  1 1 1 1  0 0 0 0 ]
             a token without one        [ 0 0 0 0  0 0 0 0  0 0 0 0 ]    y += ((x A^T) * mask) B^T

So one step serves any mixture. The product is added to the layer's output, whatever the format of
its weight; each rank adds its part of the sum. Rank 0 reads an adapter, and sends it to all ranks.

**Invariant: an adapter's KV is found only by its own requests.** A sequence's block keys chain from
a root, a hash of the adapter's *content*, not of its name, number or path, which may mean other
weights later. A hit also compares the root's identity.

Known limits: the mask is a hidden input of the layers, the only one here; and all columns are
computed, with zeros for the other adapters. The road not taken: kernels that gather each token's
adapter (Punica, S-LoRA) would be one more function in each backend.
"""

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated

import regex
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import nn

from nanoserve import rules
from nanoserve.batch import Batch
from nanoserve.hooks import Extra
from nanoserve.layers import Linear, Placement, beside
from nanoserve.loader import translated
from nanoserve.model import Decoder
from nanoserve.model_config import read_json
from nanoserve.parallel import CHECKPOINT_DTYPES, HEAD
from nanoserve.request import Request
from nanoserve.rules import Count, Text
from nanoserve.sequence import CacheEntry, Step
from nanoserve.turns import ctrl_c_held
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.ranks import hand_out
from nanoserve_extras.base.runner import Runner
from nanoserve_extras.base.words import in_words
from nanoserve_extras.engine_args import LoRAOptions, keep_path

ADAPTER_FOLDER = rules.Rule("the folder of an adapter", keep_path)
SECTION = "adapter_ids"  # a row's number in the batch; empty where no row has an adapter
ADAPTER = -2  # stands for a step's first length: an adapter's weights follow
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT writes it in front of the modules' names
# Entries of `adapter_config.json` that are not supported, with the values that have no effect.
REFUSED = {"use_dora": False, "modules_to_save": None, "bias": "none", "lora_bias": False,
           "alora_invocation_tokens": None, "target_parameters": None,
           "layer_replication": None, "trainable_token_indices": None, "use_qalora": False,
           "use_bdlora": None, "arrow_config": None, "kasa_config": None,
           "monteclora_config": None}
# What compares a pattern of `adapter_config.json` raises. Some expressions search for ever.
PATTERN_ERRORS = (TypeError, TimeoutError, regex.error)
MOST_SECONDS = 1.0
# Initialisations of A and B. Others (PiSSA, OLoRA, LoftQ ...) also subtract something from the
# model's own weights, and PEFT does so again whenever it loads such an adapter.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request uses; the names are vLLM's.

    lora_name and lora_int_id are for the caller and have no effect. lora_path: a folder in PEFT's
    format. Raises `ValueError` for a wrong field.
    """

    lora_name: Text
    lora_int_id: Count
    lora_path: Annotated[str, ADAPTER_FOLDER]

    def __post_init__(self):
        rules.check_fields(self)


@dataclass(eq=False)
class Adapter:
    """A loaded adapter. adapter_id: from 1 on. root: parent of its sequences' first blocks."""

    name: str
    adapter_id: int
    root: CacheEntry
    requests: weakref.WeakSet = field(default_factory=weakref.WeakSet)


class AdaptedProducts:
    """The object for `Linear.adapt`: A and B of each of the layer's n matrices, of which this rank
    has a share. All A have the same inputs, so they are one matrix. Both are packed like any
    weight, again whenever an adapter is loaded."""

    def __init__(self, adapters: "Adapters", layer: Linear, sees_wanted: bool):
        # Weak, and no reference to a layer: in a reference cycle, a deleted engine would keep its
        # weights until Python's garbage collector runs.
        self.adapters = weakref.proxy(adapters)
        self.inputs, self.matrices = layer.inputs, layer.matrices
        self.sees_wanted = sees_wanted  # behind the last attention only the wanted tokens are left
        self.tokens: slice | torch.Tensor = slice(None)  # that it is given: see `choose`
        width, self.sizes = adapters.num_columns, [rows.size for rows in layer.matrices.values()]
        self.a = adapters.zeros(len(layer.matrices), width, layer.inputs.size)
        self.b = {name: adapters.zeros(rows.size, width) for name, rows in layer.matrices.items()}
        self.pack()

    def pack(self) -> None:
        pack = self.adapters.ops.prepack
        self.packed_a = pack(self.a.flatten(0, 1))
        self.packed_b = [pack(b) for b in self.b.values()]

    def choose(self, tokens: slice | torch.Tensor) -> None:
        """Select the tokens that the layer gets next: a part of the step's (recurrent.py)."""
        self.tokens = tokens

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        mask, linear = self.adapters.mask(self.sees_wanted), self.adapters.ops.linear
        if mask is not None:
            mask = mask[self.tokens]
            low = linear(x, self.packed_a).unflatten(1, (-1, mask.shape[1])) * mask[:, None]
            for i, part in enumerate(out.split(self.sizes, 1)):
                part += linear(low[:, i], self.packed_b[i])  # low: (tokens, n, max_loras * rank)
        return out

    def fill(self, name: str, columns: slice, low: torch.Tensor | None,
             high: torch.Tensor | None) -> None:
        """Set one matrix's A and B in an adapter's columns. None: zeros, no change by it."""
        a, b = self.a[list(self.b).index(name)][columns], self.b[name][:, columns]
        a[:], b[:] = 0, 0
        if low is not None:
            inputs, rows = self.inputs, self.matrices[name]
            a[:len(low)] = low[:, inputs.start:inputs.stop]
            b[:, :len(low)] = high[rows.start:rows.stop]


class Adapters:
    """The adapters of an engine: reads them, gives them ids, and masks them in a step.

    The least recently used adapter makes room for a new one. An adapter that a request needs stays
    until the request has ended. Only rank 0 reads adapters; the others get the weights from it.
    """

    def __init__(self, runner: Runner, options: LoRAOptions):
        model, device = runner.model, runner.device
        self.max_loras, self.max_rank = options.max_loras, options.max_lora_rank
        self.num_columns = self.max_loras * self.max_rank
        self.device, self.dtype, self.ranks = device, runner.dtype, runner.ranks
        self.ops = runner.ops
        self.id_of_column = torch.arange(self.num_columns, device=device) // self.max_rank + 1
        self.loaded: OrderedDict[bytes, Adapter] = OrderedDict()  # by content, oldest use first
        self.roots: dict[bytes, CacheEntry] = {}  # kept: a block may outlive its adapter
        self.known: dict[tuple, bytes] = {}  # content of files that have been read
        self.masks: tuple[torch.Tensor, torch.Tensor] | None = None
        self.lock = Lock()  # requests are made in any thread
        self.unsent: dict[int, dict[str, torch.Tensor]] = {}  # by id, what no layer has yet
        self.products: dict[str, tuple[AdaptedProducts, str]] = {}  # by the checkpoint's name
        # All that an adapter may name, also in layers that other ranks have (layer_plan.py): the
        # shape of each matrix, (outputs, inputs).
        everything = Decoder(model.config, Placement(self.dtype, torch.device("meta"))) if (
            isinstance(model, Decoder)) else model
        self.changeable = {path: (layer.matrices[name].total, layer.inputs.total)
                           for layer, names in adaptable(everything)
                           for path, name in names.items()}
        self.join(model)
        runner.on_load.append(self.join)

    def join(self, model: nn.Module) -> None:
        """Make each layer of a network add the adapters' products. A network that replaces another
        gets the adapters that are loaded."""
        last = f"layers.{len(model.layers) - 1}." if isinstance(model, Decoder) else "none"
        for layer, names in adaptable(model):
            first = next(iter(names))
            known = self.products.get(first)
            products = known[0] if known else AdaptedProducts(
                self, layer, first.startswith(last) and "q_proj" not in layer.matrices)
            layer.adapt(products)
            self.products |= {path: (products, name) for path, name in names.items()}

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    # ----------------------------------------------------------------- a step

    def choose(self, batch: Batch, wanted: torch.Tensor | None) -> None:
        """Set the masks of a step: for all of its tokens, and for the wanted ones."""
        self.masks = None
        if len(ids := batch.extra[SECTION]):
            ends = batch.cu_seqlens_q[1:]  # 1 3 6: tokens 3, 4 and 5 are row 2's
            tokens = torch.arange(batch.num_tokens, dtype=ends.dtype, device=ends.device)
            rows = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ids) - 1)  # padding
            mask = (ids[rows, None] == self.id_of_column).to(self.dtype)
            self.masks = mask, mask if wanted is None else mask[wanted]

    def mask(self, of_wanted: bool) -> torch.Tensor | None:
        """(tokens, max_loras * rank); None where no token of the step has an adapter."""
        return self.masks and self.masks[of_wanted]

    def send(self) -> None:
        """On rank 0, before a step: send the adapters loaded since the last step to all ranks."""
        while self.unsent:
            # One that is lost, or half there, would write another's text.
            with ctrl_c_held(), self.ranks.together():
                adapter_id, tensors = self.unsent.popitem()
                if self.ranks.size > 1:
                    head = torch.zeros(HEAD, dtype=torch.int32)
                    head[:2] = torch.tensor([ADAPTER, adapter_id])
                    self.ranks.broadcast_host(head)
                    hand_out(self.ranks, save(tensors))
                self._fill(adapter_id, tensors)

    def receive(self, head: torch.Tensor) -> None:
        """On another rank: the adapter whose head has been received."""
        self._fill(int(head[1]), load(bytes(hand_out(self.ranks))))

    def _fill(self, adapter_id: int, tensors: dict[str, torch.Tensor]) -> None:
        columns = slice((adapter_id - 1) * self.max_rank, adapter_id * self.max_rank)
        for path, (products, name) in self.products.items():
            products.fill(name, columns, tensors.get(f"{path}.A"), tensors.get(f"{path}.B"))
        for products in {products for products, _ in self.products.values()}:
            products.pack()

    def close(self) -> None:
        """Drop all matrices, which `assign`, held by a user's reference to the engine, would keep.
        """
        self.products, self.unsent, self.masks = {}, {}, None

    # -------------------------------------------------------------- requests

    def assign(self, request: Request) -> None:
        """Load the request's adapter, if it isn't loaded yet, and keep it while it is needed.

        Raises `ValueError` for an adapter that can't be used, or when `max_loras` are in use.
        """
        asked = request.lora_request
        if asked is None:
            return
        if not isinstance(asked, LoRARequest):
            raise ValueError(f"lora_request={asked!r:.80} must be a LoRARequest(lora_name, "
                             "lora_int_id, lora_path)")
        with self.lock:
            content = self._content(asked)
            adapter = self.loaded.get(content) or self._load(content, asked)
            self.loaded.move_to_end(content)
            adapter.requests.add(request)
            request.core = replace(
                request.core, root=adapter.root, adapter_id=adapter.adapter_id)

    def _content(self, asked: LoRARequest) -> bytes:
        """A hash of the two files. A file that has not changed is hashed once."""
        try:
            files = [Path(asked.lora_path) / name for name in ("adapter_config.json", WEIGHTS)]
            stats = [file.stat() for file in files]
            if not all(map(Path.is_file, files)):  # a pipe, which would be waited for
                raise OSError("one of its files is no regular file")
            seen = tuple((str(file), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
                         for file, s in zip(files, stats, strict=True))
            if seen not in self.known:
                parts = [hashlib.sha256(file.read_bytes()).digest() for file in files]
                self.known[seen] = hashlib.sha256(b"".join(parts)).digest()
        except OSError as error:
            raise ValueError(f"lora_path={str(asked.lora_path)!r}: {error.strerror or error}: it "
                             f"must be a folder with adapter_config.json and {WEIGHTS}") from error
        return self.known[seen]

    def _load(self, content: bytes, asked: LoRARequest) -> Adapter:
        pairs = read_adapter(Path(asked.lora_path), self.max_rank, self.changeable)
        adapter_id = self._free_id(asked)
        self.unsent[adapter_id] = {f"{path}.{letter}": tensor for path, pair in pairs.items()
                                   for letter, tensor in zip("AB", pair, strict=True)}
        root = self.roots.setdefault(content, CacheEntry(content, -1, [], None))
        self.loaded[content] = adapter = Adapter(asked.lora_name, adapter_id, root)
        return adapter

    def _free_id(self, asked: LoRARequest) -> int:
        taken = {adapter.adapter_id for adapter in self.loaded.values()}
        for adapter_id in range(1, self.max_loras + 1):
            if adapter_id not in taken:
                return adapter_id
        for content, adapter in self.loaded.items():  # a request without sequences needs it, too
            if all(request.sequences and request.finished for request in adapter.requests):
                return self.loaded.pop(content).adapter_id
        names = ", ".join(repr(adapter.name) for adapter in self.loaded.values())
        raise ValueError(f"lora_request={asked.lora_name!r}: requests use {names}, and "
                         f"max_loras={self.max_loras}: raise it, or wait for one of them")


def adaptable(model: nn.Module) -> Iterator[tuple[Linear, dict[str, str]]]:
    """The layers that adapters may change, each with the paths of its matrices and their names. In
    transformers' networks a layer of ours lies below the path of what it stands for, in a `Packed`
    (foreign_layers.py); 3-D parameters, of experts, have none."""
    above = "layers." if isinstance(model, Decoder) else ""
    for path, layer in model.layers.named_modules():
        if isinstance(layer, Linear) and ".experts." not in path and (
                "lm_head" not in layer.matrices):
            path = above + path.removesuffix(".linear")
            yield layer, {translated(beside(path, name)): name for name in layer.matrices}


def receive(runner: Runner, head: torch.Tensor) -> None:
    runner.adapters.receive(head)


def read_adapter(folder: Path, max_rank: int, shapes: dict[str, tuple[int, int]],
                 ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A of (rank, inputs) and scaled B of (outputs, rank) for each module that the adapter changes,
    of those in `shapes`. Raises `ValueError` for adapters that can't be served exactly."""
    settings = _read_settings(folder)
    with in_words(f"{folder / WEIGHTS} can't be read", OSError, SafetensorError), safe_open(
            folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    modules: dict[str, str] = {}  # by path: the name in the model that was trained
    for name, tensor in tensors.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        module = module.removeprefix(PREFIX)
        path = translated(module)
        if kind not in ("lora_A", "lora_B") or path not in shapes:
            names = sorted({path.rpartition(".")[2] for path in shapes})
            raise ValueError(f"{folder}: {name} changes what no adapter can change here: only the "
                             f"projections {', '.join(names)} of this model's layers; merge the "
                             "adapter instead (peft's merge_and_unload)")
        pairs.setdefault(path, {})[kind] = tensor
        modules[path] = module
    if not pairs:
        raise ValueError(f"{folder / WEIGHTS} has no tensors")
    return {path: _scaled(folder, modules[path], pair, settings, max_rank, *shapes[path])
            for path, pair in pairs.items()}


def _read_settings(folder: Path) -> dict:
    file = folder / "adapter_config.json"
    settings = read_json(file, required=True)
    if settings.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{file}: peft_type must be LORA")
    for name, nothing in REFUSED.items():
        if settings.get(name, nothing) not in (nothing, None, [], {}):
            raise ValueError(f"{file}: {name}={settings[name]!r} is not supported: merge the "
                             "adapter (peft's merge_and_unload) and load the merged folder")
    if (scaled := settings.get("use_rslora")) not in (True, False, None):
        raise ValueError(f"{file}: use_rslora={scaled!r} must be true or false")
    if (beginning := settings.get("init_lora_weights", True)) not in BEGINNINGS:
        raise ValueError(f"{file}: init_lora_weights={beginning!r} is not supported: it changes "
                         "the model's own weights as well; save the adapter converted (peft's "
                         "path_initial_model_for_weight_conversion), or merge it")
    return settings


def _scaled(folder: Path, path: str, pair: dict[str, torch.Tensor], settings: dict, max_rank: int,
            outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One module's two matrices, checked, with `scaling` in the second. path: as PEFT has it.

    scaling is alpha / rank, with rsLoRA alpha / sqrt(rank) (Kalajdzievski 2023).
    """
    if len(pair) < 2:
        raise ValueError(f"{folder}: {path} has only {next(iter(pair))}, both are needed")
    with in_words(f"{folder}: adapter_config.json: target_modules, exclude_modules and layers_* "
                  f"can't be compared with {path}", *PATTERN_ERRORS):
        if not is_targeted(settings, path):
            raise ValueError(f"{folder}: {path} has an adapter, and by adapter_config.json "
                             "(target_modules, exclude_modules, layers_to_transform) it has none: "
                             "PEFT would pass it over")
    a, b = pair["lora_A"].float(), pair["lora_B"].float()
    rank = a.shape[0] if a.dim() else 0
    if rank > max_rank:
        raise ValueError(f"{folder}: {path} has rank {rank}, max_lora_rank={max_rank}: raise it")
    expected = (rank, inputs), (outputs, rank)
    if (tuple(a.shape), tuple(b.shape)) != expected or not rank:
        raise ValueError(f"{folder}: {path} has shapes {tuple(a.shape)} and {tuple(b.shape)}, "
                         f"{expected[0]} and {expected[1]} expected: is it made for this model?")
    named = of_module(folder, settings, "rank_pattern", path, settings.get("r", rank))
    if rank != named:
        raise ValueError(f"{folder}: {path} has rank {rank}, and adapter_config.json says {named}")
    alpha = of_module(folder, settings, "alpha_pattern", path, settings.get("lora_alpha", 8))
    b = b * (alpha / (rank ** 0.5 if settings.get("use_rslora") else rank))
    kinds = {tensor.dtype for tensor in pair.values()} - set(CHECKPOINT_DTYPES)
    if kinds or not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"{folder}: {path} has numbers that are not finite, or no floats")
    return a, b


def of_module(folder: Path, settings: dict, name: str, path: str, default: float) -> float:
    """A module's number by PEFT's patterns: that of the first key which, as a regular expression,
    matches the end of its path, whole names only. Raises `ValueError` if it is no number, or the
    key no regular expression, or one that searches too long."""
    value = default
    given = settings.get(name) or {}
    with in_words(f"{folder}: adapter_config.json: {name}={given!r:.80} must name modules and "
                  "their numbers", AttributeError, *PATTERN_ERRORS):
        for key, of_key in given.items():
            if regex.match(rf"(.*\.)?({key})$", path, timeout=MOST_SECONDS):
                value = of_key
                break
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e308:
        raise ValueError(f"{folder}: adapter_config.json: {path} has the rank or alpha {value!r}, "
                         "which is no number")
    return value


def is_targeted(settings: dict, path: str) -> bool:
    """Whether PEFT gives a module an adapter. Without target_modules, or with "all-linear", PEFT
    looks into the model; then this trusts the file."""
    target, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if is_named(settings.get("exclude_modules") or [], path):
        return False
    if target is None or str(target).lower() == "all-linear":
        return True
    if isinstance(target, str) or path in target or layers in (None, []):
        return is_named(target, path)
    found = None
    for name in _as_list(settings.get("layers_pattern") or r".*?\.[^.]*"):
        found = found or regex.match(rf"(?:.*?\.)?{name}\.(\d+)\.", path, timeout=MOST_SECONDS)
    return bool(found) and int(found[1]) in _as_list(layers) and is_named(target, path)


def is_named(rule: str | list[str], path: str) -> bool:
    """Whether a rule names a module in one of PEFT's two ways: a regular expression for the whole
    path, or a list of ends of it."""
    if isinstance(rule, str):
        return bool(regex.fullmatch(rule, path, timeout=MOST_SECONDS))
    return any(f".{path}".endswith(f".{end}") for end in rule)


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


class LoRA(Extra):
    """The extra behind `LLM(enable_lora=True)`, or `LLM(extras=[LoRA(max_loras=4)])`."""

    Options = LoRAOptions
    name = "enable_lora=True"
    needs = frozenset([Fact.OWN_LINEAR])
    takes = ("lora_request",)

    def __init__(self, enable_lora: bool = True, **options: int):
        super().__init__(enable_lora=enable_lora, **options)

    def prepare(self, plan: Plan) -> Plan:
        return replace(plan, parts=replace(
            plan.parts, make_adapters=partial(Adapters, options=self.options),
            sections=plan.parts.sections | {SECTION: False},
            calls=plan.parts.calls | {ADAPTER: receive}))

    def check(self, request: Request) -> None:
        self.engine.runner.adapters.assign(request)

    def launching(self, step: Step) -> None:
        self.engine.runner.adapters.send()
        ids = {seq: seq.request.adapter_id for seq in step.num_new_tokens}
        if any(ids.values()):
            step.sections[SECTION] = ids

    def close(self) -> None:
        self.engine.runner.adapters.close()
