"""The model's hidden states, kept from one step to the next for a head that reads them.

**A state is found by its token's slot.** The states of a step stay on the device with the slots
where its KV went, on every rank, and the head's tokens have the same slots (hidden_drafts.py). So
nothing of who was where is sent along. Not known here: what is made of them.
"""

from functools import partial

import torch
from torch import nn

from nanoserve.model import Decoder, Pair

States = torch.Tensor  # (num_tokens, hidden_size), of one network or several side by side


class Taps:
    """The stream in front of some of the model's layers, kept until the next step."""

    def __init__(self, model: Decoder, layers: list[int]):
        self.streams: dict[int, States] = {}
        self.slots = torch.empty(0)
        for i in layers:
            model.layers[i].register_forward_pre_hook(partial(self.take, i))

    def take(self, i: int, layer: nn.Module, args: tuple) -> None:
        hidden, residual, _, _, batch, *_ = args
        self.streams[i] = hidden if residual is None else hidden + residual
        self.slots = batch.slot_mapping.clone()  # whose memory is used again

    def at(self, slots: torch.Tensor) -> States:
        """(num_tokens, layers x hidden_size) of the tokens with these slots."""
        ordered, order = self.slots.sort()
        index = order[torch.searchsorted(ordered, slots).clamp(max=len(order) - 1)]
        return torch.cat([stream[index] for _, stream in sorted(self.streams.items())], -1)


class LastTap(Taps):
    """The stream behind the last layer, of every token: that layer would skip those that do not
    sample, and so it is told that all are wanted, and the others are left out behind it."""

    def __init__(self, model: Decoder):
        super().__init__(model, [])
        model.layers[-1].register_forward_pre_hook(self.want_all)
        model.layers[-1].register_forward_hook(self.keep)

    def want_all(self, layer: nn.Module, args: tuple) -> tuple:
        *others, batch, self.wanted = args
        self.slots = batch.slot_mapping.clone()
        return *others, batch, None

    def keep(self, layer: nn.Module, args: tuple, stream: Pair) -> Pair:
        self.streams[0] = stream[0] + stream[1]
        if self.wanted is None:
            return stream
        return stream[0][self.wanted], stream[1][self.wanted]


class NormTap(Taps):
    """The states behind the last norm of transformers' network."""

    def __init__(self, model: nn.Module):
        super().__init__(model, [])
        model.register_forward_pre_hook(self.note)
        model.layers.get_decoder().norm.register_forward_hook(self.keep)

    def note(self, model: nn.Module, args: tuple) -> None:
        *_, batch, _ = args
        self.slots = batch.slot_mapping.clone()  # whose memory is used again

    def keep(self, norm: nn.Module, args: tuple, states: torch.Tensor) -> None:
        self.streams[0] = states[0]
