"""The draft head of a checkpoint whose network is transformers': Qwen3.5's (hidden_drafts.py).

transformers ignores the tensors `mtp.*`, and has no class for them. But the head's layer is one of
the family's attention layers, and so is its last norm. So a network of the family with this one
layer is the head, except for its input and output.

    the token behind ─ the model's embedding ─ norm ┐
    the model's state, behind its last norm ── norm ┴─ [fc] ─ layer ─ norm ─ the model's LM head

The second draft reads the state that the LM head read for the first. It matters that states are
taken after the last norm: before it LightLLM (#1402) got 1.8 tokens a step instead of 2.7.

Known limits: heads of one layer, an embedding of the model's.
"""

import copy
import weakref
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import nn

from nanoserve.batch import Batch
from nanoserve.config import EngineConfig
from nanoserve.layers import Placement
from nanoserve.model import KVCache
from nanoserve.model_config import read_json
from nanoserve_extras.base.config_files import QUANTIZED, ModelConfig
from nanoserve_extras.base.weight_files import stored_tensors
from nanoserve_extras.drafts.hidden_taps import Head, NormTap, States
from nanoserve_extras.foreign.foreign import override, read_hf_config
from nanoserve_extras.foreign.foreign_weights import fill, text_config_of
from nanoserve_extras.foreign.transformers_model import TransformersModel

OWN = "mtp."  # in front of the head's tensors
FIRST = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")  # modules in front of its layer
VOCAB_SIZE = 4  # the one-layer network's; only the trial at load reads its embedding


class ForeignHead(Head):
    """network: a network of one layer, with the modules `FIRST`. kept: see `fill`."""

    def __init__(self, network: nn.Module, config: ModelConfig, on: Placement,
                 asked: EngineConfig, kept: dict):
        super().__init__(config, asked, on)
        self.network = TransformersModel(network, config, on, kept=kept)

    def join(self, model: TransformersModel) -> None:
        self.taps, whole = NormTap(model, self.own, self.num_tokens), model.layers
        self.embed, self.logits = (weakref.WeakMethod(part.forward) for part in (
            whole.get_input_embeddings(), whole.get_output_embeddings()))

    def guess(self, embedded: States, states: States, positions: torch.Tensor, kv_cache: KVCache,
              batch: Batch, wanted: torch.Tensor) -> States:
        net = self.network.layers
        both = torch.cat((net.pre_fc_norm_embedding(embedded), net.pre_fc_norm_hidden(states)), -1)
        return net.get_decoder()(
            inputs_embeds=net.fc(both)[None], position_ids=positions.long()[None], use_cache=False,
            nanoserve=self.network.pages(kv_cache, batch)).last_hidden_state[0, wanted]


def make_foreign_head(asked: EngineConfig, config: ModelConfig, folder: Path,
                      on: Placement) -> ForeignHead:
    """Load the head from the model's own files. Raises `ValueError` for missing tensors."""
    entries = override(read_json(folder / "config.json"), asked.hf_overrides or {})
    text = text_config_of(read_hf_config(config.architecture, {
        name: entry for name, entry in entries.items() if name not in QUANTIZED}))
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    text = type(text).from_dict(text.to_dict() | dict(
        num_hidden_layers=1, layer_types=["full_attention"], vocab_size=VOCAB_SIZE,
        pad_token_id=None))
    first: dict[str, torch.Tensor] = {}
    kept: dict = {}

    def tensors():
        own = (one for one in stored_tensors(folder, asked.load_format) if one[1].startswith(OWN))
        if config.quantization:  # before they have other names, which say how each is stored
            own = on.assemble(own, config.quantization, later=True)
        for file, name, tensor in own:
            part = name.removeprefix(OWN)
            if part.split(".")[0] in FIRST:
                first[part] = (tensor if isinstance(tensor, torch.Tensor) else tensor())[:]
            else:
                yield file, f"model.{part}", tensor

    made_up = asked.load_format == "dummy"
    network = fill(asked, model_class, text, folder, on.dtype, None if made_up else tensors(),
                   passed_over=r"embed_tokens|lm_head", kept=kept)
    if missing := [name for name in FIRST if not made_up and f"{name}.weight" not in first]:
        raise ValueError(f"{folder}: missing tensors: {OWN}{missing[0]}.weight")
    for name in FIRST:
        module = (copy.deepcopy(network.get_decoder().norm) if "norm" in name else
                  nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False))
        module.load_state_dict({"weight": first.get(f"{name}.weight", module.weight)})
        network.add_module(name, module)
    network = network.to(on.device, on.dtype).eval().requires_grad_(False)
    config = replace(config, num_hidden_layers=1, vocab_size=VOCAB_SIZE, keeps_states=False,
                     has_towers=False, sees=False)
    return ForeignHead(network, config, on, asked, kept)
