"""A rank's `ModelRunner` with what extras need: another network, adapters, states beside the cache.

    nanoserve.model_runner     here
    RankParts                  Parts: objects of extras on each rank
    make_networks, read        networks of transformers, draft networks, poolers, stages
    compute, finish            blocks that are copied before a step; vectors in place of tokens
                               load, unload: other weights in a running engine

An extra's `prepare` puts what it needs into `Parts`, which reach each rank with the config.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.loader import Tensors, load_dummy_weights, load_weights
from nanoserve.model import Decoder, KVCache
from nanoserve.model_config import ModelConfig
from nanoserve.model_runner import ModelRunner, RankParts
from nanoserve.sampler import SamplerOutput, SamplingInputs, sample
from nanoserve.sequence import NO_TOKEN, Step
from nanoserve_extras.base.device import return_freed_memory
from nanoserve_extras.base.graphs import ExtrasRecorder
from nanoserve_extras.base.ranks import gather_best
from nanoserve_extras.base.weight_files import find_weights


@dataclass(frozen=True)
class Parts(RankParts):
    """The functions and objects that extras give to the runner of each rank."""

    traced: bool = False  # ranks report when they computed
    # How a rank above 0 answers a message that is no step, by the message's first number.
    calls: dict[int, Callable[["Runner", torch.Tensor], None]] = field(default_factory=dict)
    weights: Callable[..., Tensors] = find_weights  # those that fill a `Decoder`
    decoder: Callable[..., Decoder] = Decoder  # or a class with a part of the layers
    make_network: Callable[..., nn.Module] | None = None  # (placement, tensors): not a `Decoder`
    make_draft: Callable[["Runner"], nn.Module] | None = None  # network 1, which drafts
    pooler: object = None  # replaces the LM head and the sampler
    # (network, hidden, finish), if another rank has the hidden states: returns an output, whose
    # `tolist` receives them and calls `finish`.
    finish_later: Callable | None = None
    make_adapters: Callable | None = None  # (runner), called when its weights are loaded
    make_copier: Callable | None = None  # (runner), called when its cache is there


class Runner(ModelRunner):
    """config: as `ModelRunner`'s; max_num_seqs may be lowered."""

    parts: Parts
    adapters: object = None  # these two: see `Parts`
    copier: object = None
    kv_shapes: list[tuple[int, int]] = []  # kept while there are no weights
    unrounded: list[int] | None = None  # caches that stay in `dtype`, if others are int8

    @property
    def pooler(self) -> object:
        return self.parts.pooler

    def make_networks(self) -> None:
        self.networks: list[nn.Module] = []  # the served one, and perhaps a draft network
        self.on_load: list[Callable[[nn.Module], None]] = []  # extras are told of each new network
        if self.parts.make_draft is not None:
            self.networks.append(self.parts.make_draft(self))
        self.load()
        if hasattr(self.model, "most_rows"):  # it has states for so many sequences only
            most = min(self.config.max_num_seqs, self.model.most_rows)
            self.config = replace(self.config, max_num_seqs=most)
        if self.parts.make_adapters is not None:
            self.adapters = self.parts.make_adapters(self)

    def load(self, tensors: Tensors | None = None) -> None:
        """Make the served network, or make it anew. tensors: its weights; None: those in its
        folder. After an error there is no network."""
        self.unload()
        make = self.parts.make_network
        with self.on_device():
            self.model = (self.read(self.model_config, self.folder, tensors) if make is None
                          else make(self.placement, tensors=tensors))
            self.networks.insert(0, self.model)
            self.note_caches()
            for tell in self.on_load:
                tell(self.model)
        self.give_back()

    def unload(self, weights: bool = True, kv_cache: bool = False) -> None:
        """Free the memory of the served network or of the KV cache, and of the graphs, which read
        both. No step can run until they are loaded and allocated again."""
        self.synchronize()
        if weights and self.model is not None:
            self.networks.remove(self.model)
        if weights:
            self.model = None
        if kv_cache:
            self.kv_cache = []
        if weights and kv_cache:
            self.unrounded = None  # the next network may have other layers
        self.graphs = None
        self.give_back()

    def read(self, model_config: ModelConfig, folder: Path,
             tensors: Tensors | None = None) -> Decoder:
        model = self.parts.decoder(model_config, self.placement)
        if self.pooler is not None:
            self.pooler.replace_head(model, self.placement)
        if self.config.load_format == "dummy" and tensors is None:
            load_dummy_weights(model, self.config.seed)
        else:
            load_weights(model, self.parts.weights(model, folder, self.config.load_format, tensors),
                         folder)
        return model

    def largest_steps(self) -> list[Step]:
        """One step for each network: the draft network may be the wider one."""
        steps: list[Step] = []
        for network in range(len(self.networks)):
            [step] = super().largest_steps()
            step.network = network
            steps.append(step)
        return steps

    def network_of(self, batch: Batch) -> nn.Module:
        return self.networks[batch.network]

    def cache_of(self, batch: Batch) -> KVCache:
        return self.kv_cache[len(self.model.kv_shapes):] if batch.network else self.kv_cache

    def note_caches(self) -> None:
        """Note the caches' shapes: first the served network's, then the draft network's."""
        self.kv_shapes = [shape for network in self.networks for shape in network.kv_shapes]
        if self.config.kv_cache_dtype == "int8" and self.unrounded is None:
            # Decided once, because a cache's layout can't change later.
            own = getattr(self.model, "too_wide", None)
            self.unrounded = too_wide(self.model) if own is None else own()

    def cache_dtype(self, layer: int) -> torch.dtype:
        is_wide = self.unrounded is not None and layer in self.unrounded
        return self.dtype if is_wide else super().cache_dtype(layer)

    @property
    def window(self) -> int | None:
        """The attention window. A draft network looks back from one token earlier."""
        windows = [network.config.window for network in self.networks]
        return None if None in windows else max(windows) + len(windows) - 1

    def start(self, num_blocks: int, max_model_len: int) -> None:
        super().start(num_blocks, max_model_len)
        if self.parts.make_copier is not None:
            with self.on_device():
                self.copier = self.parts.make_copier(self)

    def record(self) -> None:
        """Record graphs, if weights and cache exist: an engine that sleeps lacks them."""
        if self.wants_graphs and self.kv_cache and self.model is not None:
            with self.on_device():
                super().record()

    @property
    def recorder(self) -> Callable[..., ExtrasRecorder]:
        """The recorder's class; a network that is no `Decoder` may have its own."""
        return partial(getattr(self.model, "recorder", ExtrasRecorder),
                       num_networks=len(self.networks), num_drafts=self.parts.num_drafts)

    @property
    def wants_graphs(self) -> bool:
        """Whether to record graphs: not if stages pass hidden states on through the hosts."""
        is_whole = self.parts.decoder is Decoder and self.parts.finish_later is None
        return super().wants_graphs and is_whole

    def run(self, message: torch.Tensor, step: Step | None = None) -> SamplerOutput | None:
        """Run a step, or a call that is no step, for example loading an adapter's weights."""
        if step is None and message[0] < 0:
            return self.parts.calls[int(message[0])](self, message)
        return super().run(message, step)

    def compute(self, batch: Batch, step: Step | None) -> SamplerOutput:
        if self.copier is not None:  # before the step reads or writes a block
            self.copier.move(batch.host, self.kv_cache)
        if not batch.num_tokens:  # the step only saved blocks
            return SamplerOutput(batch.logits_indices.long())
        return super().compute(batch, step)

    def finish(self, hidden: torch.Tensor, batch: Batch, step: Step | None,
               chosen: torch.Tensor | None) -> SamplerOutput:
        if self.pooler is not None:
            return self.pooler.pool(hidden, len(batch.logits_indices))
        if self.parts.finish_later is None:
            return super().finish(hidden, batch, step, chosen)
        network = self.networks[batch.network]
        return self.parts.finish_later(network, hidden, partial(
            sample, inputs=SamplingInputs.of(step, batch, self.parts.constraints), batch=batch,
            compute_logits=network.compute_logits, ops=self.ops, chosen=chosen))

    def choose(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """For greedy rows each rank sends its best token only. Drafts are greedy."""
        network = self.networks[batch.network]
        if self.ranks.size > 1 and batch.is_greedy and isinstance(network, Decoder):
            return likeliest(network, hidden)
        if not batch.network:
            return super().choose(hidden, batch)
        logits = network.compute_logits(hidden)
        return None if logits is None else self.ops.argmax(logits)

    def forward(self, batch: Batch, wanted: torch.Tensor | None) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.choose(batch, wanted)
        return super().forward(batch, wanted)

    def fetch(self, output: SamplerOutput) -> tuple[list[int], dict[int, list], list[list]]:
        with self.ranks.waiting():
            return super().fetch(output)

    def give_back(self) -> None:
        """Return freed memory to the system. Without this call torch would keep it."""
        return_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.on_load, self.networks, self.adapters, self.copier = [], [], None, None
        super().close()
        self.give_back()


def likeliest(model: Decoder, hidden: torch.Tensor) -> torch.Tensor | None:
    """The argmax of `compute_logits`, (num_rows,), on rank 0; None on the others."""
    logits = model.own_logits(hidden)
    ids = model.on.ops.argmax(logits)[:, None]
    # If one rank finds no token for a row, the row gets none: that rank's value is infinity.
    is_none = ids == NO_TOKEN
    best = logits.gather(1, ids.clamp(min=0)).masked_fill(is_none, torch.inf)
    ids = (model.embed_tokens.tokens.start + ids).masked_fill(is_none, NO_TOKEN)
    return gather_best(model.ranks, best, ids)


# -------------------------------------------------- keys that 8 bits can't hold


def too_wide(model: Decoder) -> list[int]:
    """Indices in `kv_shapes` of keys or values that don't `fit_8_bits`, tried with random x."""
    x = torch.randn(16, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    x, found = x.to(model.on.device, model.on.dtype), []
    for i, (heads, size) in enumerate(model.kv_shapes):
        layer = model.layers[model.here[i]]
        qkv = layer.self_attn.qkv_proj(layer.input_layernorm(x)).view(len(x), -1, size)
        if not model.ranks.least(fit_8_bits(qkv[:, -2 * heads:])):
            found.append(i)
    return found


def fit_8_bits(x: torch.Tensor) -> bool:
    """Whether one scale per head suits keys or values, (num_tokens, heads, head_dim). In a few
    channels Qwen 2.5's keys have biases of hundreds, beside which the differences between tokens
    would be rounded away."""
    wide = x.float().transpose(0, 1)  # (heads, num_tokens, head_dim)
    differences = wide.diff(dim=1).abs()  # between a token and the next
    typical = differences.median(2).values.median(1).values  # (heads,); 0.95 for normal numbers
    largest = wide.abs().amax((1, 2))  # it becomes 127 of int8: a difference should be 8 at least
    return bool((largest <= 16 * typical).all())
