"""What a checkpoint is: `ModelConfig`, of what transformers reads in its `config.json`.

Nine families are one decoder with different flags, and here is where the flags come from. Files
come in dialects: old and new spellings, sizes that are left out when they can be derived or when
they are the default of the family's class. transformers' config classes know them all; the rest of
the engine asks "is there a q-norm?", never "is it a Qwen3?".

    config.json            {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000, ...}
      read by              transformers' Qwen3Config, of the entries that it knows
      and FAMILIES[...]    what the family's files never say, because it is always so
      becomes              ModelConfig(qk_norm=True, windows=(None, ...), rope=Rope(...), ...)

Invariant: a feature that is not implemented is refused by name. To ignore it would give fluent but
wrong text.

Not known here: tensors, options of the engine. transformers is imported when a file is read: it
brings torch, and takes seconds, which a tokenizer takes anyway. Road not taken: its `AutoConfig`
chooses a class by `model_type`; here `architectures` decides, as for the network.
"""

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanoserve.wrappings import TEXTS, WRAPPINGS, flatten, stored_names

# ---------------------------------------------------------------------- rope
# RoPE: how fast each pair of dimensions turns, and recipes for texts longer than in training.
#
# A pair i of a head of d dimensions turns by theta^(-2i/d) radians a position (Su et al. 2021). The
# first pairs turn fast and tell neighbours apart, the last ones hardly turn and tell distant
# positions apart. Beyond the lengths of its training a model meets new angles of the slow pairs:
#
#     pair       0 ............................ d/2 - 1
#     turns      many in training               less than one
#     stretched  not at all     a blend         by `factor`          "llama3", "yarn"
#
# "linear" stretches all pairs alike; "llama3" blends by the number of turns, "yarn" (Peng et al.
# 2023) by the index. transformers computes all three. Files write a recipe in two spellings:
#
#   transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, ..}
#                      or one such object each for "full_attention" and "sliding_attention"
#   before:          "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8, ..} or null
#
# Invariant: the numbers are transformers', bit for bit. A recipe that is not known is refused by
# name; "dynamic" is known and refused, because with it a token's KV would depend on the other
# requests of the batch.

RECIPES = ("default", "linear", "yarn", "llama3")
KINDS = ("full_attention", "sliding_attention")
RECIPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                  "original_max_position_embeddings", "attention_factor")


@dataclass(frozen=True)
class Rope:
    """What is left of a recipe: numbers. They are computed once, where the file is read, so that
    ranks need no transformers."""

    frequencies: tuple[float, ...] = ()  # radians a position for each pair, (head_dim / 2,)
    scale: float = 1.0  # cos and sin times this: yarn sharpens attention


def make_rope(hf: Any, kind: str | None = None) -> Rope:
    """hf: transformers' config, with a `head_dim`; kind: of layers, where their recipes differ."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    recipe = hf.rope_parameters[kind] if kind else hf.rope_parameters
    if recipe["rope_type"] == "default":
        exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.int64).float() / hf.head_dim
        return Rope(tuple((1.0 / recipe["rope_theta"] ** exponents).tolist()))
    frequencies, scale = ROPE_INIT_FUNCTIONS[recipe["rope_type"]](hf, layer_type=kind)
    return Rope(tuple(frequencies.tolist()), scale)


def check_ropes(config: dict, by_kind: bool) -> None:
    """by_kind: whether the family has a recipe for each kind of layers (Gemma 3); numbers are
    checked already.

    Raises `ValueError` naming the recipe or the entry that is not supported."""
    _check_recipe(config)
    for name in ("rope_scaling", "rope_parameters"):
        entries = config.get(name, {})
        kinds = [kind for kind in KINDS if isinstance(entries, dict) and kind in entries]
        if name == "rope_parameters" and entries and bool(kinds) != by_kind:
            form = f"one each for {' and '.join(KINDS)}" if by_kind else "one for all layers"
            raise ValueError(f"config.json: {name}={entries!r:.80} must be {form}")
        for recipe in [entries[kind] for kind in kinds] or [entries]:
            if not isinstance(recipe, dict):
                raise ValueError(f"config.json: {name}={entries!r:.80}: {recipe!r:.80} must be an "
                                 "object")
            _check_recipe(recipe)


def _check_recipe(recipe: dict) -> None:
    """An object of the file, or the entries beside it."""
    rope_type = recipe.get("rope_type", recipe.get("type", "default"))
    if rope_type not in RECIPES:
        reason = ("its angles depend on the longest sequence of the batch, and text must not; "
                  if rope_type == "dynamic" else "")
        raise ValueError(f"config.json: RoPE scaling {rope_type!r} is not supported: {reason}"
                         f"choose one of {', '.join(RECIPES)}, or model_impl='transformers'")
    if (part := recipe.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"config.json: partial_rotary_factor={part!r} is not supported: only 1 "
                         "is, but by model_impl='transformers'")
    if not isinstance(truncate := recipe.get("truncate", True), bool):
        raise ValueError(f"config.json: truncate must be true or false, got {truncate!r}")
    low, high = recipe.get("low_freq_factor"), recipe.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"config.json: low_freq_factor={low} must be below "
                         f"high_freq_factor={high}")


def stretched_length(config: dict) -> int:
    """The longest sequence. YaRN's recipe as model cards give it names the length in training and
    the factor, and leaves max_position_embeddings as it was: 32,768 times 4 is 131,072. 0 for other
    recipes, and where the file itself does not name the length in training."""
    recipe = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if recipe.get("rope_type") != "yarn":
        return 0
    name = "original_max_position_embeddings"  # transformers prefers the one beside the object
    return int(config.get(name, recipe.get(name, 0)) * recipe.get("factor", 1))


def override_new_spelling(config: dict, overrides: dict) -> None:
    """Overrides in one spelling win over a file in the other; rope_scaling replaces a recipe."""
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        config.pop("rope_scaling", None)
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or not rope or "rope_parameters" in overrides:
        return
    new = overrides.get("rope_scaling") or {}
    if not isinstance(new, dict):
        raise ValueError(f"hf_overrides: rope_scaling={new!r} must be an object")
    new = dict(new)
    both = isinstance(rope.get("full_attention"), dict)  # for each kind of layer (Gemma 3)
    old, local = rope["full_attention"] if both else rope, rope.get("sliding_attention") or {}
    if "rope_scaling" in overrides:
        del config["rope_scaling"]
        new["rope_type"] = new.get("rope_type", new.get("type", "default"))
        old = {k: v for k, v in old.items() if k in ("rope_theta", "partial_rotary_factor")}
    if "rope_theta" in overrides:
        new["rope_theta"] = overrides["rope_theta"]
    if "rope_local_base_freq" in overrides:
        local = local | dict(rope_theta=overrides["rope_local_base_freq"])
    new = old | new
    config["rope_parameters"] = dict(full_attention=new, sliding_attention=local) if both else new


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# By architecture: the class of transformers that reads its files, by its model_type, and what files
# never say because it is always so.
_GEMMA = dict(norm_offset=True, scale_embedding=True, post_norms=True)
FAMILIES: dict[str, tuple[str, dict]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", dict(qkv_bias=True)),
    "MiMoForCausalLM": ("qwen2", dict(qkv_bias=True)),  # with layers for drafts; it has no class
    "Qwen3ForCausalLM": ("qwen3", dict(qk_norm=True)),
    "MixtralForCausalLM": ("mixtral", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", dict(qk_norm=True)),
    "Gemma2ForCausalLM": ("gemma2", _GEMMA),
    # Its class has the soft-cap of Gemma 2's attention, and its network does not look at it.
    "Gemma3ForCausalLM": ("gemma3_text", dict(_GEMMA, qk_norm=True, attention_softcap=None)),
}
# The end of an architecture's name is the head's. The layers below are those of ...ForCausalLM.
ENDINGS = ("Model, EmbeddingModel, ForSequenceClassification, ForRewardModel, ForRewardModeling, "
           "ForProcessRewardModel")
HEAD = re.compile(rf"(Text)?(ForCausalLM|{ENDINGS.replace(', ', '|')})$")
# transformers runs these by Llama's class, which files that it saves name; entries and tensors are
# their own.
LIKE_LLAMA = ("exaone", "internlm3", "iquestcoder")
SUPPORTED = f"one of {', '.join(FAMILIES)}, or with another ending that pools: {ENDINGS}"
# Entries where null means "off", or as many as heads; in all others it means "as usual", like
# leaving the entry out.
MEANT_NULLS = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
               "num_key_value_heads")
# How a file says that its weights are quantised; the second name is MLX's.
QUANTIZED = ("quantization_config", "quantization")
# Their numbers are no sizes of networks: GPTQ's `group_size` is -1 where all of a row is one group.
NO_NETWORKS = (*QUANTIZED, "compression_config", "attn_config", "rope_scaling", "rope_parameters")
# Older names, and two that networks look for in every file: classes take them undeclared.
UNDECLARED = ("head_dim", "tie_word_embeddings", "sliding_window_pattern", "rope_theta",
              "rope_scaling", "rope_local_base_freq", "partial_rotary_factor",
              "original_max_position_embeddings")
# What a file must have, unless it is a wrapping's: heads by default would give wrong text.
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
          "intermediate_size")
WHOLE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
         "sliding_window_pattern", "max_window_layers", "num_experts", "num_local_experts",
         "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
# What a number must be above.
BOUNDS = dict.fromkeys((*WHOLE, *RECIPE_NUMBERS, "rms_norm_eps", "query_pre_attn_scalar",
                        "attn_logit_softcapping", "final_logit_softcapping"), 0) | {
    "max_window_layers": -1, "rope_theta": 1, "rope_local_base_freq": 1}

# Entries that count layers (the first group), tokens, or rows of weights.
SIZE = re.compile(r"^(n\w*_\w*layers?|\w+coder_layers|depth)$|_(window)$"
                  r"|_(?:size|dim|heads?|experts|inner|embd)$|^d_")
MOST_LAYERS, MOST_WEIGHTS, MOST_NESTED = 1000, 2 ** 32, 64  # the second: where files don't say


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only network, as flags and sizes. Read it with `from_folder` or `from_dict`."""

    architecture: str
    text_type: str = ""  # transformers' model_type of the text network, a wrapping's inner one
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
    rope: Rope
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
    rope_local: Rope | None = None  # RoPE of the layers with a window, where it differs
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
        kind, _ = find_family(config) or (None, {})
        return kind is not None and not (
            kind == "gemma3_text" and config.get("use_bidirectional_attention"))

    @classmethod
    def from_dict(cls, config: dict, generation: dict | None = None) -> "ModelConfig":
        """Read the contents of the two files."""
        architecture, found = read_architecture(config), find_family(config)
        if found is None:
            raise ValueError(f"the architecture {architecture} is not supported: choose "
                             f"{SUPPORTED}")
        kind, flags = found
        _refuse_what_is_not_implemented(config)
        entries = _without_nulls(config)
        if architecture not in WRAPPINGS:
            entries = dict.fromkeys(NEEDED) | entries
            if kind == "mistral" and "layer_types" in entries:
                kind = "ministral"  # as transformers does, but for the text of a wrapping
        hf, rope, rope_local = _read_by_transformers(kind, entries)
        generation = generation or {}
        return _checked(cls(
            architecture=architecture, text_type=kind, has_towers=architecture in WRAPPINGS,
            pools=not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")),
            rope=rope, rope_local=rope_local, **_read_network(hf) | flags, **_read_experts(hf),
            dtype=read_dtype(config), eos_token_ids=read_eos(config, generation),
            generation_defaults=generation, quantization=read_quantization(config)))

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


def find_family(config: dict) -> tuple[str, dict] | None:
    """The row of `FAMILIES` for a config, a wrapping's being flat; None for a network not ours."""
    architecture, kind = read_architecture(config), str(config.get("model_type"))
    if architecture in WRAPPINGS:
        return (kind, FAMILIES[TEXTS[kind]][1]) if kind in TEXTS else None
    if kind in LIKE_LLAMA:
        return None
    return FAMILIES.get(HEAD.sub("", architecture) + "ForCausalLM")


def read_config(folder: Path) -> dict:
    """config.json, with sizes that its weight files can hold: another network takes all memory, or
    years, before a tensor is found not to fit. Raises `ValueError`."""
    config = read_json(folder / "config.json", required=True)
    # Model Optimizer's own file: until its version 0.30 config.json said nothing.
    stored = read_json(folder / "hf_quant_config.json").get("quantization")
    if isinstance(stored, dict) and config.get("quantization_config") is None:
        config["quantization_config"] = stored | dict(quant_method="modelopt")
    num_bytes = sum(file.stat().st_size for place in ("*", "*/*") for file in folder.glob(place)
                    if file.suffix in (".safetensors", ".bin") and file.is_file())
    parts = [part for name, part in config.items() if name not in NO_NETWORKS]
    for part in filter(lambda part: isinstance(part, dict), (config, *parts)):
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
        raise ValueError(f"{path} does not exist: a model folder needs its config.json (a GGUF "
                         "file is named itself, as FOLDER/FILE.gguf or OWNER/REPOSITORY:Q4_K_M)"
                         ) from None
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    level = [content]
    for _ in range(MOST_NESTED):  # deeper nesting ends in a RecursionError somewhere
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


def _without_nulls(entries: dict) -> dict:
    """A copy: transformers writes to RoPE's objects."""
    return {name: _without_nulls(value) if isinstance(value, dict) else value
            for name, value in entries.items() if value is not None or name in MEANT_NULLS}


def _read_by_transformers(kind: str, config: dict) -> tuple[Any, Rope, Rope | None]:
    """The config that transformers' class of this model_type makes of the file, with RoPE of all
    layers, and of those with a window where the file tells them apart (Gemma 3).

    Entries that mean something to another family alone mean nothing, as in transformers: only what
    the class knows is read. Raises `ValueError`."""
    from transformers import CONFIG_MAPPING

    made_by: Any = CONFIG_MAPPING[kind]
    by_kind = kind == "gemma3_text"
    known = _known_to(made_by)
    entries = {name: value for name, value in config.items() if name in known}
    _check_numbers(entries)
    check_ropes(entries, by_kind)
    for recipe in (entries.get("rope_scaling", {}), entries.get("rope_parameters", {})):
        if "type" in recipe:  # the older name, which Gemma 3's class passes over
            recipe.setdefault("rope_type", recipe["type"])
    entries["max_position_embeddings"] = max(stretched_length(entries), entries.get(
        "max_position_embeddings", made_by.max_position_embeddings))
    try:
        hf = made_by(**entries)
        hf.head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        if by_kind:  # a kind without layers has no complete recipe
            every, windowed = (make_rope(hf, one if one in hf.layer_types else hf.layer_types[0])
                               for one in KINDS)
        else:
            every, windowed = make_rope(hf), None
    except Exception as error:  # whatever its checks raise; they name the field and the value
        why = " ".join(str(error).split())  # on one line
        raise ValueError(f"config.json: transformers' {made_by.__name__} can't read it: {why:.300};"
                         " correct the entry, or give another with hf_overrides={...}") from error
    return hf, every, windowed


def _known_to(made_by: Any) -> set[str]:
    """The entries of a network that transformers' class reads, under all their names."""
    from transformers import PreTrainedConfig

    known = {f.name for f in fields(made_by) if not f.name.endswith("_token_id")}
    known -= {f.name for f in fields(PreTrainedConfig)}  # dtype, labels: nothing of the network
    return known | {*UNDECLARED, *(name for pair in made_by.attribute_map.items() for name in pair)}


def _check_numbers(entries: dict) -> None:
    """Also those in RoPE's objects. `true`, which Python takes for 1, is no number."""
    for name, value in entries.items():
        if isinstance(value, dict):
            _check_numbers(value)
        elif name in BOUNDS and not (value is None and name in MEANT_NULLS):
            bound, types = BOUNDS[name], (int,) if name in WHOLE else (int, float)
            if type(value) not in types or not bound < value < math.inf:
                raise ValueError(f"config.json: {name} must be a {'whole ' * (name in WHOLE)}number"
                                 f" above {bound}, got {value!r}")


def _checked(config: ModelConfig) -> ModelConfig:
    """The same, unless its sizes do not fit together."""
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of "
                         f"num_key_value_heads={num_kv_heads} in config.json")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} in config.json is odd: RoPE turns pairs of "
                         "dimensions")
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(f"config.json: num_experts_per_tok={config.num_experts_per_tok} but "
                         f"num_experts={config.num_experts}")
    return config


def _read_network(hf: Any) -> dict:
    """The sizes, and what a family's flags may say otherwise."""
    sizes = {name: getattr(hf, name) for name in (
        *NEEDED, "max_position_embeddings", "rms_norm_eps")}
    bias = getattr(hf, "attention_bias", False)
    return sizes | dict(
        num_key_value_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim, tie_word_embeddings=getattr(hf, "tie_word_embeddings", False),
        qkv_bias=bias, o_bias=bias, mlp_bias=getattr(hf, "mlp_bias", False),
        windows=_read_windows(hf), activation=_read_activation(hf),
        attention_scale=getattr(hf, "query_pre_attn_scalar", hf.head_dim) ** -0.5,
        attention_softcap=getattr(hf, "attn_logit_softcapping", None),
        logits_softcap=getattr(hf, "final_logit_softcapping", None))


def _read_experts(hf: Any) -> dict:
    """Every `decoder_sparse_step`-th layer has experts, but for those that are named as dense;
    where a class knows neither, as Mixtral's, all layers have them, as wide as an MLP."""
    num_layers = hf.num_hidden_layers
    if not hasattr(hf, "num_experts"):
        return dict(moe_layers=(False,) * num_layers)
    every, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", ())
    return dict(
        moe_layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers)),
        num_experts=hf.num_experts, num_experts_per_tok=hf.num_experts_per_tok,
        moe_intermediate_size=getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        norm_topk_prob=getattr(hf, "norm_topk_prob", True))


def _read_windows(hf: Any) -> tuple[int | None, ...]:
    """The window of each layer. A class that knows no types of layers has one window for all."""
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    if not {*kinds} <= {*KINDS}:
        raise ValueError(f"config.json: layer_types={kinds!r} must name {' or '.join(KINDS)} for "
                         "each layer")
    window = getattr(hf, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_activation(hf: Any) -> str:
    """Gemma's files have both names; `hidden_activation` is the right one."""
    name = "hidden_activation" if hasattr(hf, "hidden_activation") else "hidden_act"
    if (activation := getattr(hf, name)) not in ACTIVATIONS:
        raise ValueError(f"config.json: {name}={activation!r} is not supported: choose one of "
                         f"{', '.join(ACTIVATIONS)}, or model_impl='transformers'")
    return ACTIVATIONS[activation]


def read_dtype(config: dict) -> str:
    """transformers 5 writes `dtype`, earlier versions `torch_dtype`; neither, or null, means
    float32."""
    found = (config.get(name) for name in ("dtype", "torch_dtype"))
    return str(next((one for one in found if one is not None), "float32")).removeprefix("torch.")


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
    """The entries that would change the network in a way that nothing here computes, in whichever
    family's file."""
    for name, usual, why in (
            ("use_bidirectional_attention", False, "text is generated causally"),
            ("is_causal", True, "every token would see those behind it"),
            ("per_layer_config", None, "layers would differ in more than their windows")):
        if config.get(name) not in (None, usual):
            raise ValueError(f"config.json: {name}={config[name]!r:.80} is not supported: {why}; "
                             "leave it out, or use model_impl='transformers'")
