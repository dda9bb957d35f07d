"""Any other architecture: transformers' network, inside our engine.

transformers 5 lets the attention of its models be replaced by name (`AttentionInterface`). More
than a hundred causal models then pass each layer's queries, keys and values to our function:

    embedding, projections, norms, RoPE, MLP, LM head        transformers' modules, a batch of 1
      └─ q, k, v of layer i ─► attend ─► norm_rope_store (no norm, angle 0) ─► the cache of layer i
                                  └────► paged_attention, with the window of layer i ─► back

Tokens of all rows are one sequence for the module, (1, num_tokens), each with its position. Further
inputs of attention are passed down as a keyword argument, not through a global.

Invariant: **a network that would be computed differently is refused, with its name and the
reason.** `attend` names its arguments and raises on any other (an experiment that ignored gpt-oss's
attention sinks wrote wrong text without an error). A `Probe` at load runs a few tokens twice, in
two orders. It shows that attention is called once in each layer; that its mask is causal or a
sliding window, which is read from the mask and not from config.json; and that tokens depend on each
other only through attention, by their positions. (recurrent.py, which builds on this file, adds a
state for each row.)

Known limits: no tensor parallelism; blocks behind a window are kept. Larger engines have their own
file for each model; here there is one, `model.py`, which is meant to be read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from nanoserve.batch import Batch
from nanoserve.config import EngineConfig
from nanoserve.device import full_float32
from nanoserve.layers import Placement
from nanoserve.loader import Tensors
from nanoserve.model import KVCache, Pair
from nanoserve.model_config import Rope, read_dtype
from nanoserve.sequence import visible
from nanoserve_extras.base.config_files import ENDINGS, ModelConfig
from nanoserve_extras.base.device import return_freed_memory
from nanoserve_extras.base.runner import fit_8_bits
from nanoserve_extras.foreign.foreign_graphs import ForeignRecorder
from nanoserve_extras.foreign.foreign_layers import say_what_stays, take_over
from nanoserve_extras.foreign.foreign_weights import fill, text_config_of, towers_of
from nanoserve_extras.quantization.quantized_linear import Quantised

PAGED, PROBED = "nanoserve", "nanoserve-probe"  # our names for attention: in steps, and at load
# Kinds of layers without attention, by their names in configs.
STATES = ("linear_attention", "hybrid", "mamba", "recurrent", "conv")
STRANGE = {"attend within chunks": ("chunked_attention",),
           "attend to a few keys that they choose (sparse attention)": (
               "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention")}
UNATTENDED = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")  # configs of states alone
MASK_LENGTH = 4096  # a mask that is causal up to here is taken to be causal


# ----------------------------------------------------------------- attention


def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attention_mask: object, *, nanoserve: object = None, scaling: float | None = None,
           sliding_window: int | None = None, softcap: float | None = None,
           is_causal: bool | None = None, dropout: float = 0.0,
           position_ids: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
           **others) -> tuple[torch.Tensor, None]:
    """Called by transformers in each layer; `nanoserve` is the argument that `forward` passed down.

    query: (1, heads, num_tokens, head_dim); key and value with their own number of heads. Returns
    (1, num_tokens, heads, head_dim). s_aux: sinks, (heads,). Raises `ValueError` for unknown
    arguments unless they are None or False, which mean "not used". q and k are rotated already, and
    there is no dropout.
    """
    strange = [name for name, given in others.items() if given is not None and given is not False]
    if strange:
        raise ValueError(f"its attention is given {', '.join(strange)}, which we don't compute")
    if nanoserve is None:
        raise ValueError("keyword arguments don't reach its attention")
    looks_ahead = is_causal is False or not getattr(module, "is_causal", True)
    if looks_ahead != nanoserve.looks_ahead:
        raise ValueError("its attention looks ahead" if looks_ahead else (
            f"its attention is causal, and to pool our own decoder's names end in {ENDINGS}"))
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ValueError(f"its attention is given s_aux of {tuple(s_aux.shape)}, not one for each "
                         f"of {query.shape[1]} heads")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latent = getattr(module, "latent", None)
    out = nanoserve.attend(getattr(module, "layer_idx", None),
                           latent.absorb(query) if latent else query, key, value, attention_mask,
                           scale, sliding_window, softcap, s_aux)
    return latent.expand(out) if latent else out, None


@dataclass(frozen=True)
class Mask:
    """Under a `Probe` a model gets this object instead of a mask, and passes it to its layers."""

    window: int | None = None  # how many keys a query sees, its own included; None: all before it
    looks_ahead: bool = False  # then the window is how many keys it sees on either side
    known: bool = True  # False: it is neither causal nor a sliding window nor symmetric


def describe_mask(mask_function: Callable, local_size: int | None = None, **unused) -> Mask:
    """Called by transformers to make a mask. mask_function: whether a query sees a key. local_size:
    the size of a window or another local pattern. With 13, queries 12, 13 and 26 see keys 0..12,
    1..13, 14..26.

    Attention in chunks, or over a bidirectional prefix, is not supported. A model may make a mask
    that no layer uses: Qwen2-MoE without windows makes one for a window of 0.
    """
    size = 2 * local_size if local_size else MASK_LENGTH
    half = size // 2
    queries = torch.tensor([0, 1, half - 1, half, half + 1, size, 2 * size])[:, None]
    keys = torch.arange(2 * size + 1)[None]
    zero = torch.tensor(0)  # the index of the batch, and of the head
    seen = mask_function(zero, zero, queries, keys).expand(len(queries), keys.shape[1])
    ahead = int(seen[5, size + 1:].sum())  # from the query in the middle, at `size`
    if ahead:
        expected = (keys - queries).abs() <= (2 * size if ahead == size else ahead)
        found = Mask(None if ahead == size else ahead, looks_ahead=True)
    else:
        expected = visible(queries, keys, local_size or None, queries)
        found = Mask(local_size)
    return found if torch.equal(seen, expected) else Mask(known=False)


@dataclass
class Probe:
    """Used at load in place of `Pages`. Its attention returns each token's own value, so that
    tokens could influence each other only outside of attention."""

    layers: dict[int, tuple] = field(default_factory=dict)  # q, k, v and the window, as called
    looks_ahead: bool = False

    def attend(self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: object, scale: float, window: int | None, softcap: float | None,
               sinks: torch.Tensor | None) -> torch.Tensor:
        layer = len(self.layers) if layer is None else layer
        if layer in self.layers:
            raise ValueError(f"attention is called more than once in layer {layer}")
        if not isinstance(mask, Mask):
            raise ValueError(f"it makes a mask of its own, which is {type(mask).__name__}")
        if not mask.known or mask.looks_ahead != self.looks_ahead:
            raise ValueError("its mask is neither causal nor a sliding window")
        if window not in (None, mask.window) and not self.looks_ahead:
            raise ValueError(f"in layer {layer} the call names a window of {window} and the mask "
                             f"has {mask.window}")
        if q.shape[3] % 2 or k.shape[3] != q.shape[3] or v.shape[3] > k.shape[3]:
            raise ValueError(f"heads in q, k and v of {q.shape[3]}, {k.shape[3]} and {v.shape[3]} "
                             "numbers: they must be even, q's like k's, v's at most as large")
        self.layers[layer] = q, k, v, mask.window
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


@dataclass
class Pages:
    """One step's cache and batch, for attention in every layer that has it."""

    layers: dict[int, tuple[Pair, int | None]]  # each layer's part of the KV cache, and its window
    batch: Batch
    on: Placement
    looks_ahead: bool = False
    last: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: see `paged_attention`
    angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object,
               scale: float, window: int | None, softcap: float | None,
               sinks: torch.Tensor | None) -> torch.Tensor:
        """Store k and v, and attend with q. The network has normalised and rotated them, so our
        operator gets no weights and angle 0."""
        if mask is not None:
            raise ValueError(f"layer {layer} makes a mask of its own")
        num_tokens, size, v_size = q.shape[2], q.shape[3], v.shape[3]
        cache, window = self.layers[layer]  # the mask's window: the call need not name it
        if size not in self.angles:
            angles = q.new_zeros(num_tokens, size, dtype=torch.float32)
            self.angles[size] = angles.cos(), angles  # ones and zeros, which change no bit
        # Values may be narrower than keys; the cache has one size for both. (n, heads, head_dim)
        qkv = torch.cat([x[0].transpose(0, 1) for x in (q, k, F.pad(v, (0, size - v_size)))], 1)
        q_stored = self.on.ops.norm_rope_store(
            qkv.to(self.on.dtype).contiguous(), None, None, 0.0, *self.angles[size],
            *cache, self.batch.slot_mapping)
        out = self.on.ops.paged_attention(q_stored, *cache, self.batch, scale, window, softcap,
                                          None if sinks is None else sinks.float(),
                                          self.last.get(layer))
        return out[None, :, :, :v_size].to(q.dtype).contiguous()


transformers.AttentionInterface.register(PAGED, attend)  # without a mask: none is made in steps
transformers.AttentionInterface.register(PROBED, attend)
transformers.AttentionMaskInterface.register(PROBED, describe_mask)


# --------------------------------------------------------------- the network


class TransformersModel(nn.Module):
    """Replaces `model.Decoder`: token ids to logits, by a network of transformers.

    `forward` returns logits, not hidden states: only a class's own `forward` has the operations
    after its LM head (Cohere and Granite scale logits, others have a soft-cap), so all of it runs.
    """

    looks_ahead, recorder = False, ForeignRecorder

    def __init__(self, network: nn.Module, config: ModelConfig, on: Placement,
                 left_out: int = 0, kept: dict[str, Quantised] | None = None, stage: object = None):
        super().__init__()
        take_over(network, on, kept or {}, config.sees)
        say_what_stays(network, on)
        return_freed_memory()
        for one in network.modules():  # that look for padding, and wait for the device
            if isinstance(one, transformers.PreTrainedModel):
                one.warn_if_padding_and_no_attention_mask = lambda *unused: None
        self.config, self.on, self.layers, self.left_out = config, on, network, left_out
        self.disk = stage and stage.disk  # stage: a `ForeignStage`
        self.stage = None if stage is None or stage.line.is_alone else stage
        # A few classes make the logits of all tokens: MiniCPM-V's.
        self.is_headless = False
        self.chooses = "logits_to_keep" in signature(network.forward).parameters
        self.here = range(config.num_hidden_layers) if stage is None else stage.here
        probed = self.probe(config.hidden_size if self.looks_ahead or self.here[0] else
                            config.vocab_size)
        self.attending = list(probed)  # layers; all of them, but for hybrids
        self.windows = [window for *_, window in probed.values()]
        self.kv_shapes = [(k.shape[1], k.shape[3]) for _, k, _, _ in probed.values()]
        self.wide = [i for i, (_, k, v, _) in enumerate(probed.values())
                     if not all(fit_8_bits(one[0].transpose(0, 1)) for one in (k, v))]
        self.set_attention(PAGED)

    def set_attention(self, name: str) -> None:
        """Set the attention. In a wrapping only that of the text network: a tower keeps its own."""
        whole = not (self.config.has_towers or self.config.sees)
        (self.layers if whole else self.layers.get_decoder()).set_attn_implementation(name)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids, positions: (num_tokens,); wanted: (k,), None for all. Returns logits, (k or
        num_tokens, vocab_size)."""
        return self.run(input_ids, positions, slice(None) if wanted is None else wanted,
                        self.pages(kv_cache, batch))

    def pages(self, kv_cache: KVCache, batch: Batch) -> Pages:
        by_layer = dict(zip(self.attending, zip(kv_cache, self.windows, strict=False), strict=True))
        return Pages(by_layer, batch, self.on)

    def too_wide(self) -> list[int]:
        return self.wide

    def drop_head(self) -> None:
        """From here on `forward` returns hidden states, which are pooled."""
        self.is_headless = True

    def compute_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Nothing to do: `forward` has returned logits."""
        return logits

    def run(self, ids: torch.Tensor, positions: torch.Tensor | None, wanted: torch.Tensor | slice,
            pages: Pages | Probe, **options) -> torch.Tensor:
        counted = None if positions is None else positions.long()[None]
        options |= dict(input_ids=ids.long()[None], position_ids=counted, use_cache=False,
                        nanoserve=pages)
        if self.is_headless:
            return self.layers.base_model(**options).last_hidden_state[0, wanted].contiguous()
        if self.stage is not None:
            return self.stage.run(wanted, options)
        if self.chooses:
            options["logits_to_keep"] = wanted
        out = self.layers(**options)
        return (out.logits[0] if self.chooses else out.logits[0, wanted]).contiguous()

    @full_float32()
    def probe(self, width: int) -> dict[int, tuple]:
        """The q, k, v and window of each layer with attention. width: the size of a token's output.
        Raises a `ValueError` with the reason for a network that can't run several rows as one."""
        probed, reason, wrong = {}, "", None
        try:
            self.set_attention(PROBED)
            probed = self._probe(width)
        except Exception as error:  # a network may raise anything
            reason, wrong = str(error) if isinstance(error, ValueError) else (
                f"a trial run ended with {type(error).__name__}: {error}"), error
        if self.stage is not None:
            self.stage.agree(self.config.architecture, reason)
        elif reason:
            raise refusal(self.config.architecture, reason) from wrong
        return probed

    @torch.inference_mode()
    def _probe(self, width: int) -> dict[int, tuple]:
        """Run up to four tokens in two orders, one at the last possible position. A token's results
        must be the same in both: then neither its neighbours nor its index in the row matter. If
        the class counts positions itself, it must begin at 0 as we do (Kosmos-2.5 begins at 2)."""
        last = self.config.max_position_embeddings - 1
        positions = torch.tensor(sorted({0, min(1, last), min(2, last), last}),
                                 device=self.on.device)
        ids = torch.arange(len(positions), device=self.on.device) % self.config.vocab_size
        order = positions.argsort(descending=True)
        first, layers = self.watch(ids, positions, width)
        if self.stage is not None:
            self.stage.shift = 1
            if not all(map(torch.equal, first, self.watch(ids, positions, width)[0])):
                raise ValueError("its layers read more than the stream of those before them")
            self.stage.shift = 0
        second, _ = self.watch(ids[order], positions[order], width)
        if not self.are_close([one.index_select(-2, order) for one in first], second):
            raise ValueError("its tokens know of each other's order without attention (a "
                             "convolution, a state, or positions that are counted and not read)")
        if not self.looks_ahead:
            counted = torch.arange(len(ids), device=self.on.device)
            text = text_config_of(self.layers.config)
            ids.fill_(0 if getattr(text, "pad_token_id", None) else 1)  # not padding
            if not self.are_close(self.watch(ids, counted, width)[0],
                                  self.watch(ids, None, width)[0]):
                raise ValueError("its positions do not begin at 0")
        return layers

    def watch(self, ids: torch.Tensor, positions: torch.Tensor | None,
              width: int) -> tuple[list[torch.Tensor], dict[int, tuple]]:
        """The output, and each layer's q, k and v, all (..., num_tokens, size); the layers as in
        `Probe`. positions: None to let the class count them. Raises `ValueError` unless each layer
        has attention, or at least one, if others keep states."""
        probe = Probe(looks_ahead=self.looks_ahead)
        everyone = torch.arange(len(ids), device=ids.device)
        out = self.run(ids, positions, everyone, probe,
                       attention_mask=torch.ones(1, len(ids), device=ids.device))
        num_layers = len(self.here)
        silent = [str(i) for i in self.here if i not in probe.layers]
        if silent and not (self.config.keeps_states and (probe.layers or self.stage)):
            raise ValueError(f"attention is not called in layer {', '.join(silent[:5])}"
                             f"{' ...' if len(silent) > 5 else ''} of {num_layers}")
        if len(probe.layers) > num_layers:
            raise ValueError(f"attention is called in {len(probe.layers)} layers, not in "
                             f"{num_layers}")
        if out.shape != (len(ids), width):
            raise ValueError(f"it returns {tuple(out.shape)} for {len(ids)} of {width}")
        if out.isnan().any():
            raise ValueError(f"it returns NaN in {self.on.dtype}: its weights hold some, or it "
                             "needs another dtype")
        layers = dict(sorted(probe.layers.items()))
        return [out, *(one for layer in layers.values() for one in layer[:3])], layers

    def are_close(self, ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        tolerance = torch.finfo(self.on.dtype).eps ** 0.5
        return all((one - other).norm() <= tolerance * one.norm()
                   for one, other in zip(ones, others, strict=True))


# ------------------------------------------------------- reading a checkpoint


def refusal(architecture: str, reason: str) -> ValueError:
    return ValueError(f"the architecture {architecture} is not supported: {reason}. Use a "
                      "checkpoint of another family (docs/models.md), or transformers itself")


def find_class(architecture: str, hf_config: transformers.PreTrainedConfig) -> type:
    """The class that config.json names. It must be causal, and let its attention be replaced."""
    if hf_config.is_encoder_decoder:
        raise refusal(architecture, "it is an encoder-decoder, and only decoders generate text "
                                    "here")
    known: list = []
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
                    transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING):
        found = mapping.get(type(hf_config), ())
        known += found if isinstance(found, tuple) else (found,)
    for model_class in known:
        # EXAONE 3 is Llama's network under a name of its own, which its files have.
        is_copy = len(known) == 1 and model_class.config_class is not type(hf_config)
        if model_class.__name__ == architecture or (
                is_copy and architecture.endswith("ForCausalLM")):
            break
    else:
        raise refusal(architecture, f"transformers {transformers.__version__} has no model of that "
                                    f"name that writes text for {hf_config.model_type!r}")
    if reason := strange_layers(text_config_of(hf_config)):
        raise refusal(architecture, reason)
    recurrent = keeps_states(model_class, text_config_of(hf_config))  # their classes don't say it
    if not recurrent and not model_class.is_backend_compatible():
        raise refusal(architecture, "its attention implementation can't be replaced")
    return model_class


def strange_layers(hf_config: transformers.PreTrainedConfig) -> str:
    """A description of layers without attention; "" if there are none. The probe finds them, too,
    but only after weights are read, and without the reason."""
    kinds = getattr(hf_config, "layer_types", None) or []
    if hf_config.model_type in UNATTENDED:
        return "its layers keep a recurrent state and none attends; such networks are not served"
    for words, names in STRANGE.items():
        if count := sum(kind in names for kind in kinds):
            which = "its layers" if count == len(kinds) else f"{count} of its {len(kinds)} layers"
            return f"{which} {words}; such layers are not served yet"
    if getattr(hf_config, "attn_temperature_tuning", False) and 0 in hf_config.no_rope_layers:
        return "its layers without RoPE scale q by positions that they count, from the first row on"
    return ""


def keeps_states(model_class: type, hf_config: transformers.PreTrainedConfig) -> bool:
    """Whether some layers keep a state of their own: recurrent/recurrent.py."""
    kinds = getattr(hf_config, "layer_types", None) or ["hybrid"]
    return bool({"linear_attention", "conv"}.intersection(kinds)) or (
        getattr(model_class, "_is_stateful", False) and not set(STATES).isdisjoint(kinds))


def describe(architecture: str, outer: transformers.PreTrainedConfig,
             sees: bool = False) -> ModelConfig:
    """The sizes of the network; for a wrapping those of its text network, except dtype and whether
    the head is tied. Other fields are neutral, since the network knows them. Windows are left out,
    so blocks behind them are kept. The MLP's size is guessed for the roofline, which counts three
    matrices: two of 4 times the hidden size (OPT, GPT-2) have as many weights as three of 8/3."""
    hf_config = text_config_of(outer)

    def size(name: str, default: int | None = None) -> int:
        try:
            value = getattr(hf_config, name, None) or default
        except RuntimeError:  # it differs by layer (Gemma 4), and only the probe can tell
            value = default
        if value is None:
            raise refusal(architecture, f"its config has no {name}, as decoders of text have")
        if type(value) is not int or value < 1:
            raise ValueError(f"config.json: {name} must be a whole number of at least 1, got "
                             f"{value!r}: hf_overrides can say it")
        return value

    heads, hidden, layers = (size(name) for name in (
        "num_attention_heads", "hidden_size", "num_hidden_layers"))
    return ModelConfig(
        architecture=architecture, text_type=hf_config.model_type,
        has_towers=hf_config is not outer and not sees, sees=sees,
        vocab_size=size("vocab_size"), hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads), intermediate_size=8 * hidden // 3,
        max_position_embeddings=min(size("max_position_embeddings"), *trained_lengths(hf_config)),
        dtype=read_dtype({"dtype": outer.dtype or hf_config.dtype or "float32"}),
        eos_token_ids=(), generation_defaults={}, windows=(None,) * layers,
        tie_word_embeddings=bool(getattr(outer, "tie_word_embeddings", False)),
        moe_layers=(False,) * layers, rms_norm_eps=0.0, rope=Rope(), activation="",
        attention_scale=0.0)


def trained_lengths(hf_config: transformers.PreTrainedConfig) -> list[int]:
    """Lengths up to which "longrope" does not depend on the batch: as soon as one position is
    beyond, it has other angles for all, so a long text would change others in its batch."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    return [kind["original_max_position_embeddings"] for kind in kinds
            if kind.get("rope_type") == "longrope"] or [2 ** 62]


# -------------------------------------------------------------------- weights


@torch.inference_mode(False)  # other ranks load within a step; a parameter's data is replaced here
def load(asked: EngineConfig, folder: Path, model_class: type,
         hf_config: transformers.PreTrainedConfig, config: ModelConfig, on: Placement,
         make: Callable[..., TransformersModel] = TransformersModel,
         tensors: Tensors | None = None, trial: bool = False, passed_over: str = "$^",
         make_stage: Callable | None = None) -> TransformersModel | None:
    """The network with its weights on a device. make: the class around it. trial: only try whether
    `tensors` fill it. make_stage: makes a `ForeignStage`. For other arguments see `fill`."""
    left_out: list[int] = []
    stage = None if trial or make_stage is None else make_stage(config, on)  # all names are tried
    kept: dict[str, Quantised] = {}

    def done(network: nn.Module, path: str) -> None:
        block, has_towers = network.get_submodule(path), config.has_towers or config.sees
        if not (has_towers and block in towers_of(network) or stage and not stage.has(path)):
            for one in block.parameters():
                one.data = one.data.to(on.device, on.dtype)
            take_over(network, on, kept, config.sees, path)
            if stage is not None:
                stage.shelve(network, path)

    network = fill(asked, model_class, hf_config, folder, on.dtype, tensors, passed_over,
                   left_out if config.has_towers else None, config.quantization and partial(
                       on.assemble, entry=config.quantization, later=True), kept, config.sees,
                   None if trial else done, stage)
    if trial:
        return None
    if stage is not None:
        for path in stage.on_disk:
            done(network, path)
        stage.take(network)
    network = network.to(on.device, on.dtype).eval().requires_grad_(False)
    return make(network, config, on, left_out=sum(left_out), kept=kept, stage=stage)
