"""A rank's `ModelRunner` with what extras need: another network, adapters, states beside the cache.

    nanoserve.model_runner     here
    RankParts                  Parts: what extras make on each rank
    make_networks, read        networks of transformers', one that drafts, poolers, stages
    compute, finish            blocks that are copied before a step; vectors in place of tokens
                               load, unload: other weights in a running engine

An extra's `prepare` puts what it needs into `Parts`, which reach each rank with the config.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.loader import Tensors, load_dummy_weights, load_weights
from nanoserve.model import Decoder
from nanoserve.model_config import ModelConfig
from nanoserve.model_runner import ModelRunner, RankParts
from nanoserve.sampler import SamplerOutput, SamplingInputs, sample
from nanoserve.sequence import Step
from nanoserve_extras.base.graphs import ExtrasRecorder
from nanoserve_extras.base.weight_files import find_weights


@dataclass(frozen=True)
class Parts(RankParts):
    """What extras give the runner of each rank."""

    traced: bool = False  # ranks tell when they computed
    weights: Callable[..., Tensors] = find_weights  # those that fill a `Decoder`
    decoder: Callable[..., Decoder] = Decoder  # or a class that has a part of the layers
    make_network: Callable[..., nn.Module] | None = None  # (placement, tensors): not a `Decoder`
    make_draft: Callable[["Runner"], nn.Module] | None = None  # network 1, which drafts
    pooler: object = None  # it takes the place of the LM head and the sampler
    # (network, hidden, finish), where another rank has the hidden states: gives an output on which
    # `tolist` receives them and calls `finish`.
    finish_later: Callable | None = None
    make_adapters: Callable | None = None  # (runner), called when its weights are loaded
    make_copier: Callable | None = None  # (runner), called when its cache is there


class Runner(ModelRunner):
    """config: as `ModelRunner`'s; max_num_seqs may be lowered."""

    parts: Parts
    adapters: object = None  # these two: see `Parts`
    copier: object = None

    @property
    def pooler(self) -> object:
        return self.parts.pooler

    def make_networks(self) -> None:
        self.on_load: list[Callable[[nn.Module], None]] = []  # extras are told of each new network
        if self.parts.make_draft is not None:
            self.networks.append(self.parts.make_draft(self))
        self.load()
        if hasattr(self.model, "most_rows"):  # it keeps states for so many sequences alone
            most = min(self.config.max_num_seqs, self.model.most_rows)
            self.config = replace(self.config, max_num_seqs=most)
        if self.parts.make_adapters is not None:
            self.adapters = self.parts.make_adapters(self)

    def load(self, tensors: Tensors | None = None) -> None:
        """Make the network that is served, once more if need be. tensors: its weights, if they are
        not those in its folder. After an error there is none."""
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
        """Give memory back to the system: that of the network that is served, or of the KV cache,
        and of the graphs, which read both. There can be no step until it is taken again."""
        self.synchronize()
        if weights and self.model is not None:
            self.networks.remove(self.model)
        if weights:
            self.model = None
        if kv_cache:
            self.kv_cache = []
        if weights and kv_cache:
            self.unrounded = None  # other layers may come
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

    def start(self, num_blocks: int, max_model_len: int) -> None:
        super().start(num_blocks, max_model_len)
        if self.parts.make_copier is not None:
            with self.on_device():
                self.copier = self.parts.make_copier(self)

    def record(self) -> None:
        """Where weights and cache are there, which an engine that sleeps lacks."""
        if self.wants_graphs and self.kv_cache and self.model is not None:
            with self.on_device():
                super().record()

    @property
    def recorder(self) -> Callable[..., ExtrasRecorder]:
        """Another network than a `Decoder` brings a class of its own."""
        return partial(getattr(self.model, "recorder", ExtrasRecorder),
                       num_networks=len(self.networks), num_drafts=self.parts.num_drafts)

    @property
    def wants_graphs(self) -> bool:
        """Not where ranks have parts of the layers, which hosts hand on."""
        is_whole = self.parts.decoder is Decoder and self.parts.finish_later is None
        return super().wants_graphs and is_whole

    def compute(self, batch: Batch, step: Step | None) -> SamplerOutput:
        if self.copier is not None:  # before the step reads or writes a block
            self.copier.move(batch.host, self.kv_cache)
        if not batch.num_tokens:  # it only saved blocks
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

    def forward(self, batch: Batch, wanted: torch.Tensor | None) -> torch.Tensor:
        if self.adapters is not None:
            self.adapters.choose(batch, wanted)
        return super().forward(batch, wanted)

    def close(self) -> None:
        self.on_load, self.adapters, self.copier = [], None, None
        super().close()
