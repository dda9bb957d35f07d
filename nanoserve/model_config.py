"""What a checkpoint is: `ModelConfig`, made from what transformers reads in `config.json`.

Nine families are one decoder with different flags, and this file makes the flags. transformers'
config classes know the spellings and the defaults of files; the rest of the engine asks "is there a
q-norm?", never "is it a Qwen3?".

    config.json            {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000, ...}
      read by              transformers' Qwen3Config, which takes the entries that it knows
      and FAMILIES[...]    adds what the family's files never say, because it is always so
      becomes              ModelConfig(qk_norm=True, windows=(None, ...), rope=Rope(...), ...)

RoPE (Su et al. 2021) turns pair i of a head of d dimensions by theta^(-2i/d) radians a position.
The first pairs turn fast and tell neighbours apart, the last ones hardly turn and tell distant
positions apart. Recipes for texts longer than in training ("llama3", "yarn": Peng et al. 2023)
stretch the slow pairs; transformers computes them.

Invariant: a feature that is not implemented is refused by name. To ignore it would give fluent but
wrong text. Not known here: tensors, options of the engine. transformers is imported when a file is
read: the import takes seconds, but a tokenizer needs it anyway. Road not taken: `AutoConfig`
chooses a class by `model_type`; here `architectures` decides, as for the network.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

# By architecture: the class of transformers that reads its files, by its model_type, and what files
# never say because it is always so.
_GEMMA = dict(norm_offset=True, scale_embedding=True, post_norms=True)
FAMILIES: dict[str, tuple[str, dict]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", dict(qkv_bias=True)),
    "MiMoForCausalLM": ("qwen2", dict(qkv_bias=True)),  # transformers has no class for it
    "Qwen3ForCausalLM": ("qwen3", dict(qk_norm=True)),
    "MixtralForCausalLM": ("mixtral", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", dict(qk_norm=True)),
    "Gemma2ForCausalLM": ("gemma2", _GEMMA),
    # Its class has the soft-cap of Gemma 2's attention, and its network does not look at it.
    "Gemma3ForCausalLM": ("gemma3_text", dict(_GEMMA, qk_norm=True, attention_softcap=None)),
}
# What a file must have: heads by default would give wrong text.
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
          "intermediate_size")
# Entries that classes take without declaring them: older names, and some that networks look for.
UNDECLARED = ("head_dim", "tie_word_embeddings", "sliding_window_pattern", "rope_theta",
              "rope_scaling", "rope_local_base_freq", "partial_rotary_factor",
              "original_max_position_embeddings")
# Entries that would change the network in ways not implemented here, with the usual value.
NOT_COMPUTED = {"use_bidirectional_attention": False, "is_causal": True, "per_layer_config": None,
                "partial_rotary_factor": 1, "quantization_config": None, "quantization": None}
# Entries that have two spellings. An override in one of them would not replace the file's entry in
# the other, so it is refused.
SPELLINGS = {"torch_dtype": "dtype", "rope_parameters": "rope_scaling",
             **dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"),
                             "rope_parameters")}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
RECIPES = ("default", "linear", "yarn", "llama3")
KINDS = ("full_attention", "sliding_attention")  # types of layers


@dataclass(frozen=True)
class Rope:
    """What is left of a recipe: numbers. They are computed once, where the file is read, so that
    ranks need no transformers."""

    frequencies: tuple[float, ...] = ()  # radians a position for each pair, (head_dim / 2,)
    scale: float = 1.0  # cos and sin times this: yarn sharpens attention


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only network, as flags and sizes. Read it with `from_folder` or `from_dict`."""

    architecture: str
    text_type: str = ""  # transformers' model_type of the text network
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
    rope_local: Rope | None = None  # RoPE of the layers with a window, where it differs
    tie_word_embeddings: bool  # the LM head is the embedding matrix
    qkv_bias: bool = False  # biases on the q, k and v projections ...
    o_bias: bool = False  # ... and on the output projection: Qwen2 has none there
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

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: dict | None = None) -> Self:
        """Read `config.json` and, where there is one, `generation_config.json`. overrides: entries
        that take the place of those in `config.json`.

        Raises `ValueError` naming the file, the architecture or the entry that is not supported.
        """
        folder, overrides = Path(folder), overrides or {}
        config = read_json(folder / "config.json", required=True)
        for name in overrides:
            if config.get(other := SPELLINGS.get(name)):
                raise ValueError(f"hf_overrides: {name}={overrides[name]!r:.80}, but {folder}/"
                                 f"config.json says {other}: override that")
        return cls.from_dict(config | overrides, read_generation(folder, overrides))

    @classmethod
    def from_dict(cls, config: dict, generation: dict | None = None) -> Self:
        """Read the contents of the two files."""
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        if name not in FAMILIES:
            raise ValueError(f"the architecture {name} is not supported: choose one of "
                             f"{', '.join(FAMILIES)}")
        for size in NEEDED:
            if config.get(size) is None:
                raise ValueError(f"config.json: {size} is missing")
        kind, flags = FAMILIES[name]
        if kind == "mistral" and config.get("layer_types"):
            kind = "ministral"  # transformers does so
        return cls.of_family(name, kind, flags, config, generation or {})

    @classmethod
    def of_family(cls, architecture: str, kind: str, flags: dict, config: dict,
                  generation: dict) -> Self:
        """Read entries with transformers' class for model_type `kind`. flags: from `FAMILIES`."""
        for name, usual in NOT_COMPUTED.items():
            if config.get(name) not in (None, usual):
                raise ValueError(f"config.json: {name}={config[name]!r:.80} is not supported: "
                                 "leave it out, or use nanoserve_extras' model_impl='transformers'")
        found = cls(architecture=architecture, text_type=kind, dtype=read_dtype(config),
                    eos_token_ids=read_eos(config, generation), generation_defaults=generation,
                    **read_by_transformers(kind, config) | flags)
        check_sizes(found)
        return found

    @property
    def window(self) -> int | None:
        """The largest window of all layers; None if some layer reads all keys."""
        return None if None in self.windows else max(filter(None, self.windows))


def check_sizes(config: ModelConfig) -> None:
    """Raises `ValueError` for sizes that are not positive, or do not fit together."""
    names = [*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"]
    if any(config.moe_layers):
        names += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    for name in names:
        if type(size := getattr(config, name)) is not int or size < 1:
            raise ValueError(f"config.json: {name} must be a whole number above 0, got {size!r}")
    for window in config.windows:
        if window is not None and window < 1:
            raise ValueError(f"config.json: sliding_window must be above 0, got {window}")
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


# ------------------------------------------------------- by transformers' classes


def read_by_transformers(kind: str, config: dict) -> dict:
    """Fields of `ModelConfig`, from what transformers' class for this model_type reads in the file.

    As in transformers, entries that only another family's class knows are ignored. Raises
    `ValueError`."""
    from transformers import CONFIG_MAPPING

    made_by: Any = CONFIG_MAPPING[kind]
    known = known_entries(made_by)
    entries = deepcopy({name: value for name, value in config.items() if name in known})
    scaling = entries.get("rope_scaling") or {}
    try:
        if "type" in scaling:  # the older name, which Gemma 3's class passes over
            scaling.setdefault("rope_type", scaling["type"])
        hf = made_by(**entries)
        hf.head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return read_network(hf) | read_experts(hf) | read_ropes(hf)
    except Exception as error:  # its checks may raise any error; it names field and value
        why = " ".join(str(error).split())  # on one line
        raise ValueError(f"config.json: transformers' {made_by.__name__} can't read it: {why:.400};"
                         " correct the entry, or give another with hf_overrides={...}") from error


def known_entries(made_by: Any) -> set[str]:
    """The entries of a network that a class of transformers' reads, under all their names."""
    from transformers import PreTrainedConfig

    known = {f.name for f in fields(made_by) if not f.name.endswith("_token_id")}
    known -= {f.name for f in fields(PreTrainedConfig)}  # dtype, labels: nothing of the network
    other_names = made_by.attribute_map  # to the class's own name
    return known | {*UNDECLARED, *other_names, *other_names.values()}


def read_ropes(hf: Any) -> dict[str, Rope]:
    """One recipe for all layers, but in Gemma 3 one for each kind of layers. The recipe of a kind
    without layers may be incomplete: the other kind's is read in its place."""
    by_kind = hf.model_type == "gemma3_text"
    names = {*hf.rope_parameters}
    kinds = names & {*KINDS}
    if kinds != (names if by_kind else set()):
        form = f"one recipe each for {' and '.join(KINDS)}" if by_kind else "one recipe"
        raise ValueError(f"rope_parameters={hf.rope_parameters!r:.200} must be {form}")
    if not by_kind:
        return dict(rope=make_rope(hf))
    every, windowed = (make_rope(hf, kind if kind in hf.layer_types else hf.layer_types[0])
                       for kind in KINDS)
    return dict(rope=every, rope_local=windowed)


def make_rope(hf: Any, kind: str | None = None) -> Rope:
    """The numbers are transformers', bit for bit. hf: its config, with a `head_dim`; kind: of
    layers, where their recipes differ. Raises `ValueError` for a recipe that is not in `RECIPES`.
    "dynamic" is left out: with it a token's KV would depend on the other requests of the batch."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    recipe = hf.rope_parameters[kind] if kind else hf.rope_parameters
    if recipe["rope_type"] not in RECIPES or recipe.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"RoPE of {recipe!r:.200} is not supported: choose one of "
                         f"{', '.join(RECIPES)}, or nanoserve_extras' model_impl='transformers'")
    if recipe["rope_theta"] <= 1:
        raise ValueError(f"rope_theta must be above 1, got {recipe['rope_theta']}")
    if recipe["rope_type"] == "default":
        exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.int64).float() / hf.head_dim
        return Rope(tuple((1.0 / recipe["rope_theta"] ** exponents).tolist()))
    frequencies, scale = ROPE_INIT_FUNCTIONS[recipe["rope_type"]](hf, layer_type=kind)
    return Rope(tuple(frequencies.tolist()), scale)


def read_network(hf: Any) -> dict:
    """The sizes, and flags that `FAMILIES` may override."""
    sizes = {name: getattr(hf, name) for name in (
        *NEEDED, "head_dim", "max_position_embeddings", "rms_norm_eps")}
    bias = getattr(hf, "attention_bias", False)
    return sizes | dict(
        num_key_value_heads=hf.num_key_value_heads or hf.num_attention_heads,
        tie_word_embeddings=getattr(hf, "tie_word_embeddings", False),
        qkv_bias=bias, o_bias=bias, mlp_bias=getattr(hf, "mlp_bias", False),
        windows=read_windows(hf), activation=read_activation(hf),
        attention_scale=getattr(hf, "query_pre_attn_scalar", hf.head_dim) ** -0.5,
        attention_softcap=getattr(hf, "attn_logit_softcapping", None),
        logits_softcap=getattr(hf, "final_logit_softcapping", None))


def read_experts(hf: Any) -> dict:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`. If a
    class knows neither entry, as Mixtral's, all layers have experts, each as wide as an MLP."""
    num_layers = hf.num_hidden_layers
    if not hasattr(hf, "num_experts"):
        return dict(moe_layers=(False,) * num_layers)
    every = getattr(hf, "decoder_sparse_step", 1)
    dense = getattr(hf, "mlp_only_layers", ())
    return dict(
        moe_layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers)),
        num_experts=hf.num_experts, num_experts_per_tok=hf.num_experts_per_tok,
        moe_intermediate_size=getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        norm_topk_prob=getattr(hf, "norm_topk_prob", True))


def read_windows(hf: Any) -> tuple[int | None, ...]:
    """The window of each layer. A class that knows no types of layers has one window for all."""
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    if not {*kinds} <= {*KINDS}:
        raise ValueError(f"layer_types={kinds!r} must name {' or '.join(KINDS)} for "
                         "each layer")
    window = getattr(hf, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_activation(hf: Any) -> str:
    """Gemma's files have both names; `hidden_activation` is the right one."""
    name = "hidden_activation" if hasattr(hf, "hidden_activation") else "hidden_act"
    if (activation := getattr(hf, name)) not in ACTIVATIONS:
        raise ValueError(f"{name}={activation!r} is not supported: choose one of "
                         f"{', '.join(ACTIVATIONS)}, or nanoserve_extras' "
                         "model_impl='transformers'")
    return ACTIVATIONS[activation]


# -------------------------------------------------------- without transformers


def read_json(path: Path, required: bool = False) -> dict:
    """{} for a missing file, unless it is required. Raises `ValueError` naming file and reason."""
    if not path.exists():
        if required:
            raise ValueError(f"{path} does not exist: a model is a folder with its {path.name}")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_dtype(config: dict) -> str:
    """transformers 5 writes `dtype`, earlier versions `torch_dtype`; neither, or null, means
    float32."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def read_generation(folder: Path, overrides: dict) -> dict:
    """`generation_config.json`, if it is there, with the EOS that the user overrides."""
    return read_json(folder / "generation_config.json") | {
        name: overrides[name] for name in ("eos_token_id",) if name in overrides}


def read_eos(config: dict, generation: dict) -> tuple[int, ...]:
    """All EOS tokens that the two files name, and no class's default. A chat model's turn often
    ends with a token that only one of the files names, and would run on without it."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        if isinstance(value, (list, tuple)):
            found += value
        elif value is not None:
            found.append(value)
    if any(type(one) is not int or one < 0 for one in found):
        raise ValueError(f"eos_token_id={found!r:.80} must be token ids: see config.json and "
                         "generation_config.json")
    return tuple(dict.fromkeys(found))
