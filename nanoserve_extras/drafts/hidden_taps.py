"""The model's hidden states, kept from one step to the next, and the head that reads them.

Invariant: **a state is found by its token's slot.** The states of a step stay on the device with
the slots of its KV, on every rank, and the head's tokens have the same slots (hidden_drafts.py). So
a step need not be told which row a state came from. The head's own states are at `Sequence.row`.
All states stay at one address, where CUDA graphs write and read them, too.
"""

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.config import EngineConfig
from nanoserve.layers import Placement
from nanoserve.model import Decoder, KVCache, Pair
from nanoserve.model_config import ModelConfig

States = torch.Tensor  # (num_tokens, hidden_size), of one layer or several side by side


class Taps:
    """States of a network's last step, in `streams`. The subclasses choose which ones are kept.
    own: the head's states; num_tokens: the most tokens of a step."""

    def __init__(self, model: nn.Module, own: States, num_tokens: int,
                 layers: Iterable[int] = (0,)):
        self.streams = {i: own.new_zeros(num_tokens, model.config.hidden_size) for i in layers}
        self.slots = own.new_zeros(num_tokens, dtype=torch.int32)
        model.register_forward_pre_hook(self.note)

    def note(self, model: nn.Module, args: tuple) -> None:
        _, _, _, batch, *_ = args
        self.slots.fill_(-1)[:batch.num_tokens].copy_(batch.slot_mapping)

    def keep(self, i: int, states: States) -> None:
        self.streams[i][:len(states)].copy_(states)

    def at(self, slots: torch.Tensor) -> States:
        """(num_tokens, layers x hidden_size) of the tokens with these slots."""
        ordered, order = self.slots.sort()
        index = order[torch.searchsorted(ordered, slots).clamp(max=len(order) - 1)]
        return torch.cat([stream[index] for _, stream in sorted(self.streams.items())], -1)


class LayerTaps(Taps):
    """The residual stream before some layers."""

    def __init__(self, model: nn.Module, own: States, num_tokens: int, layers: list[int]):
        super().__init__(model, own, num_tokens, layers)
        is_ours = isinstance(model, Decoder)
        found = model.layers if is_ours else getattr(model.layers.get_decoder(), "layers", None)
        if found is None:  # GPT-2 calls them h
            raise ValueError(f"speculative_config: {type(model.layers).__name__} has no list of "
                             "layers of that name, whose states a head could read: choose another "
                             "method")
        for i in layers:
            found[i].register_forward_pre_hook(
                partial(self.take if is_ours else self.take_foreign, i), with_kwargs=True)

    def take(self, i: int, layer: nn.Module, args: tuple, named: dict) -> None:
        hidden, residual, *_ = args
        self.keep(i, hidden if residual is None else hidden + residual)

    def take_foreign(self, i: int, layer: nn.Module, args: tuple, named: dict) -> None:
        """transformers' layers get the whole stream, (1, num_tokens, hidden_size)."""
        self.keep(i, (args[0] if args else named["hidden_states"])[0])


class LastTap(Taps):
    """The residual stream after the last layer, of every token. That layer would skip tokens that
    don't sample, so it is told to compute all, and the others are dropped after it."""

    def __init__(self, model: Decoder, own: States, num_tokens: int):
        super().__init__(model, own, num_tokens)
        model.layers[-1].register_forward_pre_hook(self.want_all)
        model.layers[-1].register_forward_hook(self.take)

    def want_all(self, layer: nn.Module, args: tuple) -> tuple:
        *others, self.wanted = args
        return *others, None

    def take(self, layer: nn.Module, args: tuple, stream: Pair) -> Pair:
        self.keep(0, stream[0] + stream[1])
        if self.wanted is None:
            return stream
        return stream[0][self.wanted], stream[1][self.wanted]


class NormTap(Taps):
    """The states after the last norm of a network of transformers."""

    def __init__(self, model: nn.Module, own: States, num_tokens: int):
        super().__init__(model, own, num_tokens)
        model.layers.get_decoder().norm.register_forward_hook(self.take)

    def take(self, norm: nn.Module, args: tuple, states: torch.Tensor) -> None:
        self.keep(0, states[0])


class Head(nn.Module):
    """The base of all heads. config: that of its only layer; asked: the engine's config. For
    attributes without a comment see `Decoder`."""

    unused: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, asked: EngineConfig, on: Placement):
        super().__init__()
        self.config, self.on, self.num_tokens = config, on, asked.max_num_batched_tokens
        _, kv_heads = on.ranks.share_heads(config.num_attention_heads, config.num_key_value_heads)
        self.kv_shapes = [(kv_heads.size, config.head_dim)]
        self.own = torch.zeros(asked.max_num_seqs + 1, config.hidden_size, dtype=on.dtype,
                               device=on.device)

    def join(self, model: nn.Module) -> None:
        """From now on read this network's states, and use its embedding and its LM head."""
        embed = model.embed if isinstance(model, Decoder) else (
            model.layers.get_input_embeddings().forward)
        self.taps, self.embed = self.tap(model), weakref.WeakMethod(embed)
        self.logits = weakref.WeakMethod(model.compute_logits)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor | None) -> States:
        """The first drafts of a step read the model's states, further ones the head's own. The host
        tells the two apart, because it does not know the input of further drafts yet. In a graph
        the device does.
        """
        states = own = self.own[batch.sample_rows]
        if batch.graph or not batch.num_unknown:
            states = self.read(self.taps.at(batch.slot_mapping))
        if batch.graph:
            states = torch.where(batch.input_ids[:, None] < 0, own, states)
        out = self.guess(self.embed()(input_ids), states, positions, kv_cache, batch,
                         slice(None) if wanted is None else wanted)
        self.own[batch.sample_rows] = out
        return out

    def read(self, states: States) -> States:
        """Transform the model's states, before an embedding is concatenated."""
        return states

    def compute_logits(self, hidden: States) -> torch.Tensor | None:
        return self.logits()(hidden)
