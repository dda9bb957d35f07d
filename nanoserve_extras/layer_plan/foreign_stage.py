"""A stage of transformers' network: some of its layers, and stand-ins for the others.

A class's own loop passes each layer its arguments: angles, a mask by its kind. So this loop is
kept, and runs over another list:

    rank 0   ids ─► embed ─► [ layer 0 ] ─► left    [ hollow | hollow | hollow ] ─► norm ─► head
                                     │                       ▲
    rank 1   made up ─► [ hollow | layer 1 | layer 2 ] ─► left
                                     ▲ the stream

A forward pass is left (by an exception) after the rank's last layer. When the stream has come back,
rank 0 runs the forward pass again over hollow layers only, for the operations after the layers.

Invariant: **layers pass on one stream, and nothing else.** A layer that also reads other things
(earlier layers' keys, the embedding) would get wrong ones without an error. So a trial at load
combines the same stream with another embedding, and the results must be equal.
"""

import re
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from nanoserve.loader import Tensors
from nanoserve_extras.foreign.transformers_model import Probe
from nanoserve_extras.layer_plan.layer_disk import Disk

NUM_MADE_UP = 64  # different rows of a made-up stream


class Left(Exception):
    """Leaves a forward pass. out: the output of the rank's last layer."""


class Nothing:
    """The output of a hollow layer. It suits loops that take a tensor, the first item of a tuple,
    or both items of a pair."""

    def __getitem__(self, index: int) -> "Nothing":
        if index > 1:
            raise IndexError
        return self


class Hollow(nn.Module):
    """Replaces a module that is on another rank. It has the module's plain attributes (its kind,
    for example), which other code reads, and none of its submodules."""

    def __init__(self, module: nn.Module, forward: Callable):
        super().__init__()
        vars(self).update(vars(module) | vars(self) | {"forward": forward})


class ForeignStage:
    """The layers of one rank. line: a `layer_plan.Line`."""

    def __init__(self, line, num_layers: int):
        self.line, self.num_layers, self.here = line, num_layers, line.place.layers
        self.disk = Disk() if line.place.on_disk else None
        self.made_up = torch.randn(NUM_MADE_UP, line.row.shape[1],
                                   generator=torch.Generator().manual_seed(0)).to(line.row)
        self.stream = self.made_up  # the input of the layers here, or the output of the last layer
        self.beside: list[None] | None = None  # the stream in a tuple that a layer returns
        self.shift = 0  # in a trial: to another embedding

    # ------------------------------------------------------------------ loading

    def take(self, network: nn.Module) -> None:
        """Keep the parts of this rank, and note the names of the others."""
        decoder, paths = network.get_decoder(), {one: path for path, one in network.named_modules()}
        found = [(name, list(one)) for name, one in decoder.named_children()
                 if isinstance(one, nn.ModuleList) and len(one) == self.num_layers]
        if len(found) != 1:
            raise ValueError(f"{type(network).__name__} has no list of {self.num_layers} layers, "
                             "of which ranks could have a part: leave layer_plan out")
        [(self.name, layers)], self.ends = found, list[str]()
        self.on_disk = {f"{paths[decoder]}.{self.name}.{i}".lstrip("."): i
                        for i in self.line.place.on_disk}
        if self.line.is_alone:
            return
        self.network, this = weakref.proxy(network), weakref.proxy(self)  # weak: no circle
        self.hollow = nn.ModuleList(Hollow(layer, partial(ForeignStage.pass_by, this, i))
                                    for i, layer in enumerate(layers))
        setattr(decoder, self.name, nn.ModuleList(
            layer if i in self.here else self.hollow[i] for i, layer in enumerate(layers)))
        layers[self.here[-1]].register_forward_hook(self.leave)
        if self.line.stage:
            layers[self.here[0]].register_forward_pre_hook(self.enter, with_kwargs=True)
            for one in (network.get_input_embeddings(), network.get_output_embeddings()):
                above, _, name = paths[one].rpartition(".")
                setattr(network.get_submodule(above), name,
                        Hollow(one, partial(ForeignStage.embed, this)))
                self.ends.append(name)

    def has(self, path: str) -> bool:
        """Whether a module of the network, or a tensor of a file, is here. (A tower may have more
        layers, in a list of the same name.)"""
        if self.line.is_alone:
            return True
        layer = re.search(rf"(?:^|\.){self.name}\.(\d+)(?:\.|$)", path)
        return int(layer[1]) in self.here if layer else not any(
            f".{end}." in f".{path}." for end in self.ends)

    def pass_over(self, tensors: Tensors) -> Tensors:
        """Leave out the tensors of other stages, whose data is not read."""
        return (one for one in tensors if self.has(one[1]))

    def shelve(self, network: nn.Module, path: str) -> None:
        """The module at this path has been packed: if it is a layer for the disk, move its weights
        there."""
        if path in self.on_disk:
            layer = network.get_submodule(path)
            if not hasattr(layer, "shelf"):
                self.disk.take(layer, self.on_disk[path])
            layer.shelf.process_weights_after_loading()

    def agree(self, architecture: str, reason: str) -> None:
        """Called after the trial on all ranks. If it failed on one, this raises `ValueError` on
        all. reason: why it failed on this rank, or ""."""
        if not self.line.world.least(not reason):
            raise ValueError(f"{architecture} can't be shared out to stages: "
                             f"{reason or 'another rank says why'}; leave pipeline_parallel_size "
                             "or layer_plan out")

    # ------------------------------------------------------------------ in the network

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.made_up[(ids + self.shift) % NUM_MADE_UP]

    def pass_by(self, i: int, *args, **named) -> object:
        if i < self.num_layers - 1:
            return Nothing()
        stream = self.stream[None]
        return stream if self.beside is None else (stream, *self.beside)

    def enter(self, layer: nn.Module, args: tuple, named: dict) -> tuple[tuple, dict]:
        if args:
            args = self.stream[None], *args[1:]
        else:
            named = named | {"hidden_states": self.stream[None]}
        if any(isinstance(one, Nothing) for one in (*args, *named.values())):
            raise ValueError("a layer reads more than the stream of those before it")
        return args, named

    def leave(self, layer: nn.Module, args: tuple, out: torch.Tensor | tuple) -> None:
        if isinstance(out, tuple):
            self.beside = [None] * (len(out) - 1)
        raise Left(out[0] if isinstance(out, tuple) else out)

    # ------------------------------------------------------------------ a step

    def run(self, wanted: torch.Tensor | slice, options: dict) -> torch.Tensor:
        """Receive the stream, compute, and send it on: `TransformersModel.run` in a step. `norm`
        comes later, so this returns a stand-in of shape (len(wanted), ...). In the trial at load
        the stream is made up, and the output is returned: logits on rank 0."""
        line, [ids] = self.line, options["input_ids"]
        is_trial = isinstance(options["nanoserve"], Probe)
        if line.stage:
            self.stream = self.made_up[ids % NUM_MADE_UP] if is_trial else line.receive(len(ids))
        line.begin()
        stream = self.through(options)
        if is_trial:
            return stream[wanted] if line.stage else self.norm(stream[wanted])
        if self.num_layers - 1 in self.here:
            stream = stream[wanted]
        line.send(stream.contiguous())
        return stream[:len(wanted)]

    def through(self, options: dict) -> torch.Tensor:
        """The layers here. Returns (num_tokens, hidden_size)."""
        try:
            self.network(**options)
        except Left as left:
            [stream] = left.args
        shape = 1, options["input_ids"].shape[1], self.made_up.shape[1]
        if stream.shape != shape or stream.dtype != self.made_up.dtype:
            raise ValueError(f"a layer returns {tuple(stream.shape)} of {stream.dtype} and not "
                             f"{shape} of {self.made_up.dtype}")
        return stream[0]

    def norm(self, stream: torch.Tensor) -> torch.Tensor:
        """The operations after the layers, LM head included: (n, hidden_size) to logits."""
        decoder, self.stream = self.network.get_decoder(), stream
        if not len(stream):  # not all classes can do without a row
            self.stream = self.made_up
        here = getattr(decoder, self.name)
        ids = torch.full((1, len(self.stream)), self.shift, device=stream.device)
        setattr(decoder, self.name, self.hollow)
        try:
            return self.network(input_ids=ids, position_ids=ids, use_cache=False,
                                attention_mask=torch.ones_like(ids)).logits[0, :len(stream)]
        finally:
            setattr(decoder, self.name, here)
