"""How weights are stored in memory: the layers for `LLM(quantization=...)`.

    a checkpoint that is quantised    formats.py       becomes floats, or keeps its own numbers
    int8, int4                        QuantisedLinear  rounds what is float, and packs it
                                      QuantisedExperts the same for a mixture's experts

Without the option a quantised checkpoint is dequantised, except one that `nanoserve convert` wrote,
which stays as it is; any other checkpoint is loaded as it is. The class of packed weights, with its
matrix product, depends on the engine's backend: `kind_of_weight`.

Invariant: the layers are chosen, and options that can't work are refused, before weights are read.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

from nanoserve.hooks import Extra
from nanoserve.model_config import ModelConfig
from nanoserve.progress import say
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.engine_args import QuantizationOptions
from nanoserve_extras.quantization.formats import assemble, read_format
from nanoserve_extras.quantization.quantized_experts import QuantisedExperts
from nanoserve_extras.quantization.quantized_linear import (
    GROUP,
    IN_8_BITS,
    CpuWeight,
    QuantisedEmbedding,
    QuantisedLinear,
    TorchWeight,
    library,
)


class Quantization(Extra):
    """The extra for `LLM(quantization=...)`, or a quantised checkpoint."""

    Options = QuantizationOptions

    @property
    def name(self) -> str:
        kind = self.options.quantization
        return "a quantised checkpoint" if kind is None else f"quantization={kind!r}"

    @property
    def needs(self) -> frozenset[Fact]:
        return frozenset([Fact.OWN_LINEAR])

    def prepare(self, plan: Plan) -> Plan:
        self.kind, layers = choose_layers(self.options.quantization, plan)
        note = (f"quantization={self.kind!r}",) if self.kind else ()
        return replace(plan, notes=plan.notes + note, parts=replace(plan.parts, layers=layers))


def choose_layers(kind: str | None, plan: Plan) -> tuple[str | None, dict[str, Any]]:
    """How weights are stored, and the entries of `Placement` for it. kind: the option. Raises
    `ValueError` for unsupported combinations; a slow choice is reported."""
    config, stored = plan.config, plan.model_config.quantization
    layers: dict[str, Any] = {"assemble": assemble}
    form = None if stored is None else read_format(stored)
    if form is not None:
        if form.passed_over:
            say(f"{config.model}: fixed scales of activations are passed over, as are those of "
                "keys and values and rounding by token: all are as accurate as dtype says")
        kind = kind or (form.served if form.parts else None)
    elif kind == "dequantize" and plan.draft_folder is None:
        raise ValueError(f"quantization='dequantize', but {config.model} is not quantised: leave "
                         "it out, or use 'int8', which rounds any checkpoint")
    if kind in ("int8", "int4"):
        weight = kind_of_weight(config.kernels)
        # If a checkpoint has 4-bit weights, its others are not rounded to 4 bits; dummy ones are.
        is_4 = form is not None and form.bits == 4 and config.load_format != "dummy"
        in_8 = kind == "int4" and form is None and is_mostly_vocabulary(plan.model_config)
        if in_8:
            say("quantization='int4' keeps 8 bits in this network, which is mostly vocabulary: 4 "
                "would save a tenth and cost its text more")
        size = GROUP if kind == "int4" and not is_4 and not in_8 else 0
        is_kept = form is not None and kind == f"int{form.bits}"
        has_4 = form is not None and form.bits == 4  # in these, too, where they are made up
        linear = partial(QuantisedLinear, kind=weight, size=size,
                         in_8_bits={"lm_head"} if has_4 else IN_8_BITS)
        if config.expert_parallel:
            raise ValueError(f"expert_parallel=True with quantization={kind!r}: leave it out, so "
                             "that each rank has a part of every expert")
        layers = {"linear": linear, "experts": partial(QuantisedExperts, linear=linear),
                  "embedding": partial(QuantisedEmbedding, kind=weight),
                  "assemble": partial(assemble, keep=is_kept)}
        if config.kernels == "cpu":
            try:
                library()  # compiled before the weights are read, and not in the first step
            except ImportError as error:
                raise ValueError(f"quantization={kind!r} with kernels='cpu', but {error}: mend "
                                 "that, or use kernels='torch'") from error
        if config.kernels not in ("cpu", "triton"):
            say(f"quantization={kind!r} with kernels={config.kernels!r} saves memory and costs "
                "time: weights are restored for each product")
        if kind == "int4" and is_4 and form.is_ordered:
            say("quantization='int4' of a checkpoint with act-order, whose groups' inputs are no "
                "neighbours: such weights become int8")
    return kind, layers


def is_mostly_vocabulary(model: ModelConfig) -> bool:
    """Whether the LM head has more numbers than all layers together, as in Gemma 3 270M. The head
    has 8 bits anyway: 4 in the layers save a tenth, and cost 12% of perplexity there."""
    attention = 2 * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    experts = model.num_experts * model.moe_intermediate_size
    outputs = [attention + 3 * (experts if is_mixture else model.intermediate_size)
               for is_mixture in model.moe_layers]  # of all of a layer's matrices, some transposed
    return model.vocab_size > sum(outputs)


def kind_of_weight(kernels: str) -> type[TorchWeight | CpuWeight]:
    """The packed weights that go with the engine's operators."""
    if kernels == "triton":
        from nanoserve_extras.quantization.quantized_triton import TritonWeight  # imports triton
        from nanoserve_extras.quantization.quantized_words import WordWeight
        return WordWeight if os.environ.get("NANOSERVE_WORDS") == "1" else TritonWeight
    return CpuWeight if kernels == "cpu" else TorchWeight
