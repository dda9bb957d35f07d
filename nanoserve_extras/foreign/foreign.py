"""Checkpoints that our decoder doesn't support: which network of transformers runs them.

    config.json ──► a class of transformers' ──┬─► causal, and generates: transformers_model.py
                                               ├─► causal, some layers with a state: recurrent.py
                                               └─► an encoder, which pools: encoder.py

The last two build on the causal network's file. This file finds out whether some layers keep a
state, and `llm` then adds recurrent.py.

Invariant: a checkpoint that can't be served is refused with the reason, before weights are read.
Code that comes with a model (`trust_remote_code`) is never run.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import transformers

from nanoserve.hooks import Extra
from nanoserve.model_config import read_eos, read_generation
from nanoserve_extras.base.config_files import (
    QUANTIZED,
    ModelConfig,
    read_architecture,
    read_config,
    read_quantization,
)
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.words import in_words
from nanoserve_extras.base.wrappings import WRAPPINGS, flatten, stored_names, text_part
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.foreign.encoder import make_pooler, read_encoder
from nanoserve_extras.foreign.foreign_weights import text_class, text_config_of
from nanoserve_extras.foreign.transformers_model import (
    describe,
    find_class,
    keeps_states,
    load,
    refusal,
)

ENCODERS = re.compile("((?<!LMHead)(?<!Reward)Model|ForSequenceClassification|ForMaskedLM)$")
# The facts that an encoder ends.
ENCODER = frozenset([Fact.GENERATES, Fact.GRAPHS, Fact.OWN_LINEAR, Fact.PREFIX_CACHE])


class ForeignNetwork(Extra):
    """The extra that runs a network of transformers. args: the options; model_config: the
    checkpoint's sizes."""

    needs = frozenset([Fact.ONE_RANK])

    def __init__(self, args: EngineArgs, folder: Path):
        super().__init__()
        self.args, self.model_config, self.make_network = read_foreign(args, folder)

    @property
    def name(self) -> str:
        return f"transformers' {self.model_config.architecture}"

    @property
    def is_encoder(self) -> bool:
        """Whether the network is bidirectional. Causal networks may pool, too."""
        return self.model_config.pools

    @property
    def ends(self) -> frozenset[Fact]:
        return ENCODER if self.is_encoder else frozenset()

    def prepare(self, plan: Plan) -> Plan:
        return replace(plan, network="transformers",
                       make_pooler=make_pooler if self.is_encoder else None,
                       parts=replace(plan.parts, make_network=self.make_network))


def read_foreign(asked: EngineArgs,
                 folder: Path) -> tuple[EngineArgs, ModelConfig, Callable]:
    """For `LLM`: the options, the checkpoint's config, and a function that loads its network on a
    `Placement`.

    Raises `ValueError` for a network that transformers lacks, or that can't be served by it.
    """
    if asked.model_impl == "nanoserve":
        raise ValueError("limit_mm_per_prompt does not go together with model_impl='nanoserve': "
                         "the towers are transformers', leave one of the two out")
    asked = replace(asked, model_impl="transformers")
    entries = override(read_config(folder), asked.hf_overrides or {})
    architecture = read_architecture(entries)
    if architecture in WRAPPINGS:  # whether the head is the embedding, as our decoder reads it
        flat = flatten(architecture, entries, asked.hf_overrides or {}, stored_names(folder))
        for part in (entries, entries.get("text_config") or {}):
            part |= {k: v for k, v in flat.items() if k == "tie_word_embeddings"}
    if architecture == "MistralForCausalLM" and "layer_types" in entries:  # as transformers does
        architecture, entries["model_type"] = "MinistralForCausalLM", "ministral"
    stored = read_quantization(entries)
    hf_config = read_hf_config(architecture, {  # transformers would look for its own readers
        name: entry for name, entry in entries.items() if name not in QUANTIZED})
    decodes = re.search("For(CausalLM|ConditionalGeneration)$", architecture)
    if not decodes and (asked.runner == "pooling" or asked.runner == "auto" and (
            (folder / "modules.json").exists() or ENCODERS.search(architecture))):
        args, config, make = read_encoder(asked, folder, architecture, hf_config)
        return args, replace(config, quantization=stored), make
    model_class = find_class(architecture, hf_config)
    if "text_config" in hf_config.sub_configs:
        text_part(architecture, entries)  # classes would take their defaults, for 4B and more
    generation = read_generation(folder, asked.hf_overrides or {})
    eos = read_eos(entries, generation) or read_eos(entries.get("text_config") or {}, {})
    sees = asked.limit_mm_per_prompt is not None
    config = replace(describe(architecture, hf_config, sees), generation_defaults=generation,
                     eos_token_ids=eos, quantization=stored,
                     keeps_states=keeps_states(model_class, text_config_of(hf_config)))
    model_class, hf_config = text_class(model_class, hf_config)
    return asked, config, partial(load, asked, folder, model_class, hf_config, config)


def unknown(kind: object, entries: dict) -> str:
    """Why the installed transformers can't read a config: it's too old, or never could."""
    said, installed = str(entries.get("transformers_version")), transformers.__version__
    newer = [*map(int, re.findall(r"\d+", said)[:2])] > [*map(int, installed.split(".")[:2])]
    why = (f"config.json was written by {said}, so install that" if newer
           else "code that comes with a model is never run")
    return f"transformers {installed} knows no model_type={kind!r}, and {why}"


def override(entries: dict, overrides: dict) -> dict:
    """config.json with overrides. In a wrapping an override goes to the outer level if that has the
    entry, else to `text_config`."""
    inner = entries.get("text_config")
    if isinstance(inner, dict):
        nested = {k: v for k, v in overrides.items() if k not in entries}
        overrides = overrides | {"text_config": inner | nested | overrides.get("text_config", {})}
    return entries | overrides


def read_hf_config(architecture: str, entries: dict) -> transformers.PreTrainedConfig:
    kind = entries.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise refusal(architecture, unknown(kind, entries))
    with in_words("config.json: transformers can't read it"):  # whatever its classes raise
        return transformers.CONFIG_MAPPING[kind].from_dict(entries)
