"""Wrappings through transformers: the text part of a multimodal network, without its towers.

A `...ForConditionalGeneration` holds a text network and towers for images or sound, which text
never calls. The class that config.json names runs, since only its own `forward` says what it does
behind its LM head; but its towers are taken out, and have no memory at any time:

    network ─┬─ model ─┬─ language_model   filled from the files
             │         ├─ vision_tower     one number in place of each tensor while weights
             │         └─ projector        are filled in, then nothing
             └─ lm_head                    filled from the files

Which modules are towers follows from where transformers' `get_decoder` finds the text network:
whatever is neither that, nor above it, nor the head. A class that needs a tower for text (none is
known but Gemma 3n, which has a class for text alone) fails in the probe, and is refused.

Invariant: every tensor of the text network is in the files, or that is an error; towers' tensors
are neither read nor missed. Not known here: attention, steps. Road not taken: our own head on the
text network alone, which would leave out what a class does with logits.
"""

from collections.abc import Iterator

import torch
import transformers
from torch import nn


def text_config_of(hf_config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """The sizes of the text network; `hf_config` itself where that is all there is."""
    return hf_config.get_text_config(decoder=True)


def text_class(model_class: type, hf_config: transformers.PreTrainedConfig,
               ) -> tuple[type, transformers.PreTrainedConfig]:
    """The class to run, and its config. Gemma 3n's wrapping embeds the tokens of images in each
    step, and its tower needs another package (timm): its class for text alone takes its place."""
    if hf_config.model_type != "gemma3n":
        return model_class, hf_config
    text = text_config_of(hf_config)
    text.dtype = text.dtype or hf_config.dtype
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], text


def outside_of_text(network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each tower as (the module above it, its name there); towers may be single parameters."""
    text, head = network.get_decoder(), network.get_output_embeddings()
    [path] = [path for path, module in network.named_modules() if module is text]
    above = network
    for step in path.split("."):
        for name, child in above.named_children():
            if name != step and child is not head:
                yield above, name
        for name, _ in above.named_parameters(recurse=False):
            yield above, name
        above = getattr(above, step)


def towers_of(network: nn.Module) -> set[nn.Module]:
    """All modules within towers."""
    return {part for above, name in outside_of_text(network) if name in above._modules
            for part in getattr(above, name).modules()}


def make_network(model_class: type, hf_config: transformers.PreTrainedConfig,
                 stored: dict[str, torch.Tensor], dtype: torch.dtype,
                 has_towers: bool) -> tuple[nn.Module, dict]:
    """transformers' network with the stored weights, and what it says was missing or left over. In
    a wrapping, towers get stand-ins: else transformers would draw random weights for them."""
    towers = stand_ins(model_class, hf_config, dtype) if has_towers else {}
    network, found = model_class.from_pretrained(
        None, config=hf_config, state_dict=stored | towers, dtype=dtype, output_loading_info=True)
    if has_towers:
        drop_towers(network)
    return network, found


def stand_ins(model_class: type, hf_config: transformers.PreTrainedConfig,
              dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All that lies in towers, by transformers' names: each tensor is one number, seen often."""
    with torch.device("meta"):
        network = model_class(hf_config)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    drop_towers(network)
    return {name: torch.zeros((), dtype=dtype).expand(shapes[name])
            for name in shapes.keys() - network.state_dict().keys()}


def drop_towers(network: nn.Module) -> None:
    for above, name in [*outside_of_text(network)]:
        setattr(above, name, None)
