"""What a checkpoint is: `ModelConfig`, read from a Hugging Face `config.json`.

Nine families are one decoder with different flags, and here is where the flags come from. Files
come in dialects: old and new spellings of the RoPE settings, `torch_dtype` or `dtype`, sizes that
are left out when they can be derived or when they are the default of the family's class. Every
dialect is absorbed here; the rest of the engine asks "is there a q-norm?", never "is it a Qwen3?".

    config.json            {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000, ...}
      over FAMILIES[...]   what the family's files leave out, or never say because it is always so
      becomes              ModelConfig(qk_norm=True, windows=(None, ...), rope=RopeConfig(...), ...)

Invariant: a feature that is not implemented is refused by name. To ignore it would give fluent but
wrong text.

Not known here: torch, tensors, options of the engine. Road not taken: transformers' own
`AutoConfig`. It reads all dialects, but its import is slow, and it accepts features that this
engine does not have.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.rope_config import (
    RopeConfig,
    override_new_spelling,
    read_flag,
    read_number,
    read_ropes,
    stretched_length,
)
from nanoserve.checkpoint.wrappings import TEXTS, WRAPPINGS, flatten, stored_names

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# What each family's config.json may leave out (the defaults of its class in transformers) and
# what it never says because it is always so. Everything else about a family is read from the file.
_GEMMA = dict(hidden_activation="gelu_pytorch_tanh", head_dim=256, norm_offset=True,
              scale_embedding=True, post_norms=True, tie_word_embeddings=True, sliding_window=4096,
              num_key_value_heads=4, query_pre_attn_scalar=256, final_logit_softcapping=None,
              attention_bias=False, layer_types=None)
_QWEN = dict(sliding_window=4096, use_sliding_window=False)
_QWEN2 = _QWEN | dict(max_position_embeddings=32768, qkv_bias=True, max_window_layers=28,
                      layer_types=None)
FAMILIES: dict[str, dict] = {
    "LlamaForCausalLM": dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False),
    "MistralForCausalLM": dict(max_position_embeddings=131072, num_key_value_heads=8,
                               sliding_window=4096, layer_types=None),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,  # with layers for drafts
    "Qwen3ForCausalLM": _QWEN | dict(max_position_embeddings=32768, qk_norm=True, head_dim=128,
                                     max_window_layers=28, layer_types=None, attention_bias=False),
    "MixtralForCausalLM": dict(max_position_embeddings=131072, num_key_value_heads=8,
                               sliding_window=None, rms_norm_eps=1e-5, rope_theta=1e6,
                               num_experts=8, num_experts_per_tok=2),
    "Qwen3MoeForCausalLM": _QWEN | dict(max_position_embeddings=32768, qk_norm=True,
                                        num_key_value_heads=4, num_experts=128,
                                        num_experts_per_tok=8, norm_topk_prob=False,
                                        moe_intermediate_size=768, decoder_sparse_step=1,
                                        mlp_only_layers=[], attention_bias=False),
    "Gemma2ForCausalLM": _GEMMA | dict(max_position_embeddings=8192, full_every=2,
                                       attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "Gemma3ForCausalLM": dict(_GEMMA, max_position_embeddings=131072, sliding_window_pattern=6,
                              qk_norm=True, rope_theta=1e6, rope_local_base_freq=1e4),
}
# The end of an architecture's name is the head's. The layers below are those of ...ForCausalLM.
ENDINGS = "Model, EmbeddingModel, ForSequenceClassification, ForRewardModel, ForRewardModeling"
HEAD = re.compile(rf"(Text)?(ForCausalLM|{ENDINGS.replace(', ', '|')})$")
SUPPORTED = f"one of {', '.join(FAMILIES)}, or with another ending that pools: {ENDINGS}"
# Entries where null means "off"; in all others it means "as usual", like leaving the entry out.
OFF_WHEN_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# How a file says that its weights are quantised; the second name is MLX's.
QUANTIZED = ("quantization_config", "quantization")
# Entries of some families alone, which have a default for them above; in others' files they mean
# nothing, as in transformers.
OF_SOME_FAMILIES = {entry for family in FAMILIES.values() for entry in family} - {
    "head_dim", "max_position_embeddings", "num_experts", "num_experts_per_tok",
    "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}


# Entries that count layers (the first group), tokens, or rows of weights.
SIZE = re.compile(r"^(n\w*_\w*layers?|\w+coder_layers|depth)$|_(window)$"
                  r"|_(?:size|dim|heads?|experts|inner|embd)$|^d_")
MOST_LAYERS, MOST_WEIGHTS, MOST_NESTED = 1000, 2 ** 32, 64  # the second: where files don't say


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only network, as flags and sizes. Read it with `from_folder` or `from_dict`."""

    architecture: str
    pools: bool = False  # made for pooling and not for generating, as far as its files tell
    has_towers: bool = False  # for images or sound: a wrapping, of which only the text is run
    sees: bool = False  # a wrapping whose tower for images is run as well
    keeps_states: bool = False  # some layers have a memory of their own
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than the attention heads: grouped-query attention
    head_dim: int  # need not be hidden_size / num_attention_heads
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool  # the LM head is the embedding matrix
    qkv_bias: bool = False  # biases on the q, k and v projections ...
    o_bias: bool = False  # ... and on the output projection: Qwen2 has only the first
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3, Gemma 3)
    dtype: str  # the checkpoint's own
    eos_token_ids: tuple[int, ...]  # every one of them ends a sequence
    generation_defaults: dict  # the sampling entries of generation_config.json
    # Sliding windows: how many keys a query sees in each layer, its own included; None: all.
    windows: tuple[int | None, ...]
    # Mixture of experts: which layers have one, and its sizes.
    moe_layers: tuple[bool, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the chosen experts' weights are made to sum to 1
    # What Gemma does differently.
    activation: str  # "silu" or "gelu_tanh"
    norm_offset: bool = False  # RMSNorm multiplies by 1 + weight
    scale_embedding: bool = False  # embeddings times sqrt(hidden_size)
    post_norms: bool = False  # a norm behind attention and MLP as well
    attention_scale: float  # scores are q * k times this
    attention_softcap: float | None = None  # scores are squeezed into (-cap, cap)
    logits_softcap: float | None = None
    rope_local: RopeConfig | None = None  # RoPE of the layers with a window, where it differs
    # How weights are stored where they are quantised, as the file says.
    quantization: dict | None = None

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: dict | None = None) -> "ModelConfig":
        """Read `config.json` and, where there is one, `generation_config.json`.

        Raises `ValueError` naming the file, the architecture or the entry that is not supported.
        """
        folder, overrides = Path(folder), overrides or {}
        config = read_flat(folder, overrides)
        override_new_spelling(config, overrides)
        if "torch_dtype" in overrides:
            config["dtype"] = overrides["torch_dtype"]
        model_config = cls.from_dict(config, read_generation(folder, overrides))
        # sentence-transformers leaves its own file beside the architecture of a generator.
        return replace(model_config, pools=model_config.pools or (folder / "modules.json").exists())

    @staticmethod
    def is_known(folder: str | Path, overrides: dict | None = None) -> bool:
        """Whether the engine's own decoder computes this architecture. It is causal, and so not for
        EmbeddingGemma, a Gemma 3 that looks ahead."""
        config = read_flat(Path(folder), overrides or {})
        family = find_family(config)
        looks_ahead = family is FAMILIES["Gemma3ForCausalLM"] and config.get(
            "use_bidirectional_attention")
        return family is not None and not looks_ahead

    @classmethod
    def from_dict(cls, config: dict, generation: dict | None = None) -> "ModelConfig":
        """Read the contents of the two files."""
        architecture = read_architecture(config)
        family = find_family(config)
        if family is None:
            raise ValueError(f"the architecture {architecture} is not supported: choose "
                             f"{SUPPORTED}")
        config = family | {k: v for k, v in config.items() if (
            v is not None or k in OFF_WHEN_NULL) and (k in family or k not in OF_SOME_FAMILIES)}
        _refuse_what_is_not_implemented(config)
        sizes = _read_sizes(config)
        generation = generation or {}
        rope, rope_local = read_ropes(config)
        sizes["max_position_embeddings"] = stretched_length(config, rope)
        bias = read_flag(config, "attention_bias", False)
        scale = read_number(config, "query_pre_attn_scalar", sizes["head_dim"]) ** -0.5
        return cls(
            architecture=architecture, has_towers=architecture in WRAPPINGS,
            pools=not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")),
            **sizes, **_read_experts(config, family, sizes),
            **{flag: family.get(flag, False) for flag in (
                "qk_norm", "norm_offset", "scale_embedding", "post_norms")},
            rms_norm_eps=read_number(config, "rms_norm_eps", 1e-6),
            rope=rope, rope_local=rope_local,
            tie_word_embeddings=read_flag(config, "tie_word_embeddings", False),
            qkv_bias=bias or family.get("qkv_bias", False), o_bias=bias,
            mlp_bias=read_flag(config, "mlp_bias", False),
            windows=_read_windows(config, family, sizes["num_hidden_layers"]),
            activation=ACTIVATIONS[_activation(config)], attention_scale=scale,
            attention_softcap=_softcap(config, "attn_logit_softcapping"),
            logits_softcap=_softcap(config, "final_logit_softcapping"),
            dtype=read_dtype(config),
            eos_token_ids=read_eos(config, generation),
            generation_defaults=generation, quantization=read_quantization(config))

    @property
    def has_lm_head(self) -> bool:
        """Whether the checkpoint can generate. "LMHeadModel" is the older ending, as in GPT-2."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel",
                                           "ForConditionalGeneration"))

    @property
    def window(self) -> int | None:
        """The largest window of all layers; None if some layer reads all keys."""
        reaches = [window for window in self.windows if window is not None]
        return max(reaches) if len(reaches) == len(self.windows) else None


# ------------------------------------------------------- reading, entry by entry


def read_architecture(config: dict) -> str:
    """The network's name. `architectures` is a list of one; files of old tools leave it out."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"config.json: architectures={names!r} names no network (its model_type is "
            f"{config.get('model_type')!r}): add the entry, or give it with hf_overrides="
            f"{{'architectures': [...]}}; choose {SUPPORTED}")
    return name


def read_flat(folder: Path, overrides: dict) -> dict:
    """config.json with overrides, a wrapping's as that of the text network inside."""
    config = read_config(folder)
    architecture = read_architecture(config | overrides)
    names = stored_names(folder) if architecture in WRAPPINGS else []
    return flatten(architecture, config, overrides, names)


def find_family(config: dict) -> dict | None:
    """What `FAMILIES` has for a config, a wrapping's being flat; None for a network not ours."""
    architecture, kind = read_architecture(config), str(config.get("model_type"))
    if architecture in WRAPPINGS:
        return FAMILIES[TEXTS[kind][0]] if kind in TEXTS else None
    return FAMILIES.get(HEAD.sub("", architecture) + "ForCausalLM")


def read_config(folder: Path) -> dict:
    """config.json, with sizes that its weight files can hold: another network takes all memory, or
    years, before a tensor is found not to fit. Raises `ValueError`."""
    config = read_json(folder / "config.json", required=True)
    num_bytes = sum(file.stat().st_size for place in ("*", "*/*") for file in folder.glob(place)
                    if file.suffix in (".safetensors", ".bin") and file.is_file())
    for part in filter(lambda part: isinstance(part, dict), (config, *config.values())):
        width = part.get("hidden_size", part.get("n_embd"))
        for name, size in part.items():
            if type(size) is int and (found := SIZE.search(name)):
                wide = 1 if found.lastindex else width if type(width) is int else 64
                most = MOST_LAYERS if found[1] else max(4 * num_bytes, MOST_WEIGHTS)
                if size < 0 or size * wide > most:  # 2 bits a weight, at least
                    raise ValueError(f"{folder}: config.json: {name}={size}, with a width of "
                                     f"{width}, is below 0, or more than {num_bytes:,} bytes hold")
    return config


def read_json(path: Path, required: bool = False) -> dict:
    """{} for a missing file, unless it is required. transformers 5 writes an infinity as
    {"__float__": "Infinity"}. Raises `ValueError` naming the file and the reason."""
    def number(entry: dict) -> dict | float:
        return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry

    if not path.exists() and not required:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=number)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: a model folder needs its config.json") from None
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    level = [content]
    for _ in range(MOST_NESTED):  # what is nested deeper ends in a RecursionError somewhere
        level = [one for each in level if isinstance(each, (dict, list))
                 for one in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise ValueError(f"{path} is nested more than {MOST_NESTED} deep")
    return content


def inside(folder: Path, name: str | Path) -> Path:
    """What a file of the folder names. Raises `ValueError` unless its path stays in the folder. A
    link there may lead out: the hub's cache is made of links."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{folder}: {str(name)!r} is named by one of its files and lies outside "
                         "of it: only files in the folder are read")
    return folder / name


def _read_sizes(config: dict) -> dict[str, Any]:
    """Sizes as the file or its family has them. Where both are silent, every head has its own keys
    and values, and the heads share the hidden size out evenly (64 heads of 128 for 8,192)."""
    sizes = {name: _size(config, name) for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings")}
    num_heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = _size(config, "num_key_value_heads", num_heads)
    sizes["head_dim"] = _size(config, "head_dim", sizes["hidden_size"] // num_heads)
    if num_heads % sizes["num_key_value_heads"]:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of "
                         f"num_key_value_heads={sizes['num_key_value_heads']} in config.json")
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim={sizes['head_dim']} in config.json is odd: RoPE turns "
                         "pairs of dimensions")
    return sizes


def _read_experts(config: dict, family: dict, sizes: dict[str, Any]) -> dict:
    """Mixtral and transformers 5 say `num_local_experts`, Qwen says `num_experts`."""
    num_layers = sizes["num_hidden_layers"]
    if "num_experts" not in family:
        return dict(moe_layers=(False,) * num_layers)
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts = _size(config, name)
    per_token = _size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok={per_token} but {name}={num_experts}")
    # Every `decoder_sparse_step`-th layer has experts, but for those that are named as dense.
    every, dense = _size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list of layers")
    return dict(
        moe_layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers)),
        num_experts=num_experts, num_experts_per_tok=per_token,
        moe_intermediate_size=_size(config, "moe_intermediate_size", sizes["intermediate_size"]),
        norm_topk_prob=read_flag(config, "norm_topk_prob", True))


def _read_windows(config: dict, family: dict, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. A file names the layers' types, or a rule: every n-th sees
    everything (Gemma), the first n do (Qwen 2 and 3). Others have one for all layers, or none, and
    what their files say about single layers is ignored, as transformers does. The exception is a
    Mistral file with layer types, which is a Ministral's: its types are used."""
    every = _size(config, "sliding_window_pattern", family.get("full_every", num_layers + 1))
    first, kinds = _size(config, "max_window_layers", 0, low=0), config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i < first or (i + 1) % every == 0 else "sliding_attention"
                 for i in range(num_layers)]
    if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers or any(
            kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ValueError(f"config.json: layer_types={kinds!r} must name full_attention or "
                         f"sliding_attention for each of {num_layers} layers")
    if config.get("sliding_window") is None or not read_flag(config, "use_sliding_window", True):
        return (None,) * num_layers
    window = _size(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _activation(config: dict) -> str:
    """Gemma's files have both names; `hidden_activation` is the right one."""
    return config.get("hidden_activation", config.get("hidden_act", "silu"))


def _softcap(config: dict, name: str) -> float | None:
    """None for no cap (a file says so with null). Anything but a number above 0 is refused."""
    return None if config.get(name) is None else read_number(config, name)


def read_dtype(config: dict) -> str:
    """transformers 5 writes `dtype`, earlier versions `torch_dtype`; neither means float32."""
    return str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")


def read_quantization(config: dict) -> dict | None:
    """The entry, unchanged. One that names no method (what Gemma's
    QAT weights were trained for) is about no tensor: they must be plain, or are refused."""
    if config.get("quantization") is not None:
        raise ValueError(f"config.json: quantization={str(config['quantization'])[:60]}: MLX's "
                         "quantised checkpoints are not supported, use the unquantised one")
    entry = config.get("quantization_config")
    if entry is not None and not isinstance(entry, dict):
        raise ValueError(f"config.json: quantization_config={entry!r:.60} must be an object")
    return entry if entry and entry.get("quant_method") is not None else None


def _size(config: dict, name: str, default: int | None = None, low: int = 1) -> int:
    """One entry. Raises `ValueError` unless it is a whole number of at least `low`; `true`, which
    Python takes for 1, is none."""
    value = config.get(name, default)
    if type(value) is not int or value < low:
        raise ValueError(f"config.json: {name} must be a whole number of at least {low}, got "
                         f"{value!r}")
    return value


def read_generation(folder: Path, overrides: dict) -> dict:
    """`generation_config.json`, if it is there, with the EOS that the user overrides."""
    return read_json(folder / "generation_config.json") | {
        name: overrides[name] for name in ("eos_token_id",) if name in overrides}


def read_eos(config: dict, generation: dict) -> tuple[int, ...]:
    """All that the two files name, and no class's default. A chat model's turn often ends with a
    token that only one of them has, and would run on without it."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"eos_token_id={value!r:.80} must be a token id or a list of them: "
                             "see config.json and generation_config.json")
        found += ids
    return tuple(dict.fromkeys(found))


def _refuse_what_is_not_implemented(config: dict) -> None:
    """The entries that would change the network in a way that nothing here computes."""
    if not isinstance(_activation(config), str) or _activation(config) not in ACTIVATIONS:
        name = "hidden_activation" if "hidden_activation" in config else "hidden_act"
        raise ValueError(f"config.json: {name}={_activation(config)!r} is not supported: choose "
                         f"one of {', '.join(ACTIVATIONS)}, or model_impl='transformers'")
    if read_flag(config, "use_bidirectional_attention", False):
        raise ValueError("config.json: use_bidirectional_attention=True is not supported: text is "
                         "generated causally")
    if not read_flag(config, "is_causal", True):
        raise ValueError("config.json: is_causal=False is not supported: every token would see "
                         "those behind it, and text is computed causally here")
