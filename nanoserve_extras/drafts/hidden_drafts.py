"""Drafts from the model's hidden states, by a small head that reads them (EAGLE-3, MTP).

A model's hidden states tell more about the next tokens than its last token does. So a head of one
layer reads them: those of three of the model's layers, concatenated (Li et al. 2025, "EAGLE-3"). At
position t it reads the model's states there and the token at t + 1, and guesses the token at t + 2:

    position           0     1     2     3         the model has computed 0..3, and sampled x4
    model's states    h0    h1    h2    h3  ┐
    token behind      x1    x2    x3    x4  ┴──► head ──► g3 ──► d5   the first draft
                                          its own:  g3, d5 ──► g4 ──► d6   the second

The head is network 1 of the engine, with one more KV layer in the same blocks, so chunks, prefix
hits and preemption need no special case. It runs when the next step is planned, once for all tokens
that the last step has computed, and then once for each further draft. Some checkpoints contain such
a head (`OwnHead`; for networks of transformers: hidden_drafts_foreign.py).

Invariant: no token changes, as with any drafts (speculative.py). Known limits: heads of one layer,
and no trees. The KV of a block's last token depends on the token that followed it, so a sequence
that reuses the block and goes on otherwise may get a worse draft there.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.layers import Placement, RMSNorm, RotaryEmbedding
from nanoserve.loader import Tensors, load_dummy_weights, load_weights
from nanoserve.model import MLP, Attention, Decoder, DecoderLayer, KVCache, Pair
from nanoserve.model_config import read_json
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner
from nanoserve_extras.base.weight_files import find_weights, stored_tensors
from nanoserve_extras.drafts.guessers import UNKNOWN, Guesser, write_drafts
from nanoserve_extras.drafts.hidden_taps import Head, LastTap, LayerTaps, States

HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3LLamaForCausalLM")
VARIANTS = ("fc_norm", "norm_before_fc", "norm_output")  # heads with these are not known here
OWN = "model.mtp_layers.0."  # a checkpoint's own head
OURS = {"MiMoForCausalLM": "num_nextn_predict_layers"}  # the entry with its number of layers
FOREIGN = {f"Qwen3_5{kind}For{task}": "mtp_num_hidden_layers" for kind in ("", "Moe")
           for task in ("CausalLM", "ConditionalGeneration")}
BLOCK = r"^(?=self_attn|mlp|input_layernorm|post_attention_layernorm)"  # the parts of a layer


# -------------------------------------------------------------------- the head


class HeadLayer(nn.Module):
    """A decoder's layer whose attention reads two concatenated vectors."""

    def __init__(self, config: ModelConfig, on: Placement, norms_first: bool):
        super().__init__()
        self.norms_first = norms_first
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, on) for _ in range(3))
        self.self_attn = Attention(config, 0, on)
        self.self_attn.qkv_proj = on.linear(2 * config.hidden_size,
                                            self.self_attn.qkv_proj.matrices, config.qkv_bias, on)
        self.mlp = MLP(config, on)

    def forward(self, embedded: States, states: States, angles: Pair, kv: Pair, batch: Batch,
                wanted: torch.Tensor) -> States:
        normed = self.hidden_norm(states)
        residual = normed if self.norms_first else states
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        attended = self.self_attn(both, angles, kv, batch, wanted)
        normed, residual = self.post_attention_layernorm.add(attended, residual[wanted])
        return self.mlp(normed) + residual


class EagleHead(Head):
    """EAGLE-3's head. Names are those of checkpoints. model: the network whose states it reads."""

    def __init__(self, entries: dict, asked: EngineConfig, model: ModelConfig, on: Placement):
        # Its layer is Llama's, whatever the model is.
        config = ModelConfig.from_dict(entries | dict(
            architectures=["LlamaForCausalLM"], tie_word_embeddings=False))
        super().__init__(config, asked, on)
        self.ranks, self.layers = on.ranks, tapped(entries, model.num_hidden_layers)
        self.fc = on.linear(len(self.layers) * model.hidden_size, {"fc": config.hidden_size},
                            False, on)
        self.midlayer = HeadLayer(config, on, bool(entries.get("norm_before_residual")))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, on)
        self.size = entries.get("draft_vocab_size") or config.vocab_size
        self.lm_head = on.linear(config.hidden_size, {"lm_head": on.ranks.share(self.size)}, False,
                                 on)
        self.rotary = RotaryEmbedding(config.rope, on.device)
        self.targets = torch.arange(self.size, device=on.device)  # the model's ids of its tokens

    def tap(self, model: nn.Module) -> LayerTaps:
        return LayerTaps(model, self.own, self.num_tokens, self.layers)

    def read(self, states: States) -> States:
        return self.fc(states)

    def guess(self, embedded: States, states: States, positions: torch.Tensor, kv_cache: KVCache,
              batch: Batch, wanted: torch.Tensor) -> States:
        return self.midlayer(embedded, states, self.rotary(positions), kv_cache[0], batch, wanted)

    def compute_logits(self, hidden: States) -> torch.Tensor | None:
        """Logits over the model's vocabulary. A head has the frequent tokens only."""
        logits = self.ranks.gather(self.lm_head.logits(self.norm(hidden)), self.size)
        if logits is None or self.size == self.config.vocab_size:
            return logits
        every = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return every.index_copy_(1, self.targets, logits)

    def renamed(self, tensors: Tensors) -> Tensors:
        """The head's tensors under our names; the map of its vocabulary goes to `targets`. A head's
        own copy of the model's embedding is left out."""
        for file, name, tensor in tensors:
            if name == "d2t":  # how much larger the model's id is
                self.targets += tensor.to(self.targets)
            elif name != "t2d" and "embed_tokens." not in name:
                yield file, name.removeprefix("model.").replace("layers.0.", "midlayer."), tensor


class OwnHead(Head):
    """The head in the model's own checkpoint, as MiMo has it ("multi-token prediction"): one more
    decoder layer, which reads the last layer's output and ends in the model's LM head. Its second
    draft reads the state that the LM head read for the first."""

    def __init__(self, config: ModelConfig, asked: EngineConfig, on: Placement):
        super().__init__(config, asked, on)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, on) for _ in range(3))
        self.input_proj = on.linear(2 * config.hidden_size, {"input_proj": config.hidden_size},
                                    False, on)
        self.block = DecoderLayer(config, 0, on)
        self.rotary = RotaryEmbedding(config.rope, on.device)

    def tap(self, model: Decoder) -> LastTap:
        return LastTap(model, self.own, self.num_tokens)

    def guess(self, embedded: States, states: States, positions: torch.Tensor, kv_cache: KVCache,
              batch: Batch, wanted: torch.Tensor) -> States:
        both = torch.cat((self.hidden_layernorm(states), self.token_layernorm(embedded)), -1)
        stream = self.block(self.input_proj(both), None, self.rotary(positions), kv_cache[0],
                            batch, wanted)
        return self.final_layernorm.add(*stream)[0]

    def renamed(self, tensors: Tensors) -> Tensors:
        for file, name, tensor in tensors:
            if name.startswith(OWN):
                yield file, re.sub(BLOCK, "block.", name.removeprefix(OWN)), tensor


def from_speculators(name: str, entries: dict) -> dict:
    """The entries of a head in speculators' format, converted to EAGLE-3's: the entries of its
    layer are nested, and its tensors have the same names. Raises `ValueError` for settings that
    EAGLE-3 lacks."""
    for entry, rights in (("speculators_model_type", ["eagle3"]), ("embed_requires_grad", [
            False, None]), ("norm_before_residual", [True, False])):
        if entries.get(entry) not in rights:
            raise ValueError(f"model={name!r} is a head in the format of speculators, with "
                             f"{entry}={entries.get(entry)!r}, which is not supported: choose one "
                             f"with {rights[0]!r}")
    own = {key: value for key, value in entries.items() if value is not None}
    return own | own.pop("transformer_layer_config", {}) | dict(architectures=[HEADS[0]])


def tapped(entries: dict, num_layers: int) -> list[int]:
    """The layers before which the model's states are read."""
    named = entries.get("eagle_config") or entries
    return sorted(named.get("eagle_aux_hidden_state_layer_ids")
                  or (2, num_layers // 2, num_layers - 3))


def make_head(config: EngineConfig, new: Callable[[Placement], Head], folder: Path,
              on: Placement) -> Head:
    """Load a head's weights from a folder: its own, or the model's, which contains it."""
    head = new(on=on)
    if config.load_format == "dummy":
        load_dummy_weights(head, config.seed)
    else:
        own = head.renamed(stored_tensors(folder, config.load_format))
        load_weights(head, find_weights(head, folder, given=own), folder)
    return head


def join_head(make: Callable[[Path, Placement], Head], folder: Path, runner: Runner) -> Head:
    """On each rank: make the head network 1, which reads the states of the loaded network, also of
    one that is loaded later."""
    head = make(folder, runner.placement)
    runner.on_load.append(head.join)
    return head


# ----------------------------------------------------------------- the methods


class HiddenGuesser(Guesser):
    """Drafts by a head that reads the model's hidden states."""

    keys = ("model",)
    needs = Guesser.needs | {Fact.IN_MEMORY}

    @classmethod
    def prepare(cls, asked: dict, plan: Plan) -> Plan:
        make = cls.find_head(asked, plan)
        return replace(plan, parts=replace(
            plan.parts, make_draft=partial(join_head, make, Path(asked["model"]))))

    @staticmethod
    def find_head(asked: dict, plan: Plan) -> Callable[[Path, Placement], Head]:
        """The function that makes the head. A head belongs to one model: its sizes must match."""
        model = plan.model_config
        if asked.get("model") is None:
            raise ValueError("model is missing: name the folder or hub id of a head that was "
                             f"trained for {plan.config.model!r}")
        name = str(asked["model"])
        folder = find_folder(name)
        asked["model"] = str(folder)
        entries = read_json(folder / "config.json", required=True)
        if "speculators_config" in entries:
            entries = from_speculators(name, entries)
        if not set(HEADS).intersection(entries.get("architectures") or ()):
            raise ValueError(f"model={name!r} is no EAGLE-3 head, by its architectures "
                             f"{entries.get('architectures')}: choose one of {', '.join(HEADS)}")
        known = entries | (entries.get("eagle_config") or {})
        if strange := [key for key in VARIANTS if known.get(key)] or (
                ["num_hidden_layers"] if known.get("num_hidden_layers", 1) != 1 else []):
            raise ValueError(f"model={name!r} has {strange[0]}={known[strange[0]]!r}, which is not "
                             "supported: choose a head of one layer without it")
        for size, wanted in (("vocab_size", model.vocab_size),
                             ("target_hidden_size" if "target_hidden_size" in entries else
                              "hidden_size", model.hidden_size)):
            if entries.get(size) != wanted:
                raise ValueError(f"model={name!r} was trained for another model: its {size} is "
                                 f"{entries.get(size)}, not {wanted}")
        if strange := set(tapped(entries, model.num_hidden_layers)) - {
                *range(model.num_hidden_layers)}:
            raise ValueError(f"model={name!r} reads layer {min(strange)} of "
                             f"{model.num_hidden_layers}: it was trained for another model")
        return partial(make_head, plan.config, partial(
            EagleHead, entries, plan.config, model))

    def __init__(self, asked: dict, engine: LLMEngine):
        self.num_drafts, self.runner = asked["num_speculative_tokens"], engine.runner
        self.computed: dict[Sequence, int] = {}  # the first position that the last step computed

    def updated(self, step: Step) -> None:
        self.computed = dict(zip(step.num_new_tokens, step.starts, strict=True))

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Placeholders, if the sequence's last hidden state exists: not after a lost step."""
        return [UNKNOWN] * min(most, self.num_drafts) if seq in self.computed else []

    def fill(self, step: Step) -> None:
        """The head computes all tokens that the model computed in the last step, except wrong
        drafts, so that no position lacks its KV, and then goes on alone."""
        first = Step(step.index, network=1, shift=1, sampling=[
            seq for seq, drafts in step.drafts.items() if UNKNOWN in drafts])
        for seq, start in self.computed.items():
            if seq.row >= 0 and seq.num_computed_tokens > start:  # it was not preempted
                first.num_new_tokens[seq] = seq.num_computed_tokens - start
                first.starts.append(start)
        self.computed = {}
        if first.num_new_tokens:
            first.block_moves, step.block_moves = step.block_moves, []
            write_drafts(self.runner, step, first)


class OwnGuesser(HiddenGuesser):
    """Drafts by the head in the model's own checkpoint."""

    keys = ()

    @staticmethod
    def find_head(asked: dict, plan: Plan) -> Callable[[Path, Placement], Head]:
        model, folder = plan.model_config, plan.folder
        is_ours = plan.parts.make_network is None
        if (entry := (OURS if is_ours else FOREIGN).get(model.architecture)) is None:
            raise ValueError(f"method='mtp' reads the heads of {', '.join(OURS | FOREIGN)}, and "
                             f"not that of {model.architecture}: choose another method")
        entries = read_json(folder / "config.json")
        if (entries.get("text_config") or entries).get(entry) != 1:
            raise ValueError(f"{plan.config.model!r} has no head of one layer of its own, by its "
                             f"{entry}: choose another method")
        asked["model"] = str(folder)
        if is_ours:
            return partial(make_head, plan.config, partial(OwnHead, model, plan.config))
        from nanoserve_extras.drafts.hidden_drafts_foreign import make_foreign_head
        return partial(make_foreign_head, plan.config, model)
