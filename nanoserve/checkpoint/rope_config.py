"""The settings of RoPE: how positions become angles, and recipes for texts longer than in training.

Checkpoints come with recipes to stretch RoPE's waves; rope_frequencies.py says why. Files write
these recipes in two spellings:

    transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, ..}
                     or one such object each for "full_attention" and "sliding_attention"
    before:          "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8, ..} or null

Both become a `RopeConfig`, which is all that rope_frequencies.py sees. Invariant: a recipe
that is not known is refused by name; "dynamic" is known and refused, because with it a token's KV
would depend on the other requests of the batch.

Not known here: torch, and the rest of config.json.
"""

import math
from dataclasses import dataclass

# The recipes, and the entries that each needs.
NEEDED = {"default": (), "linear": ("factor",), "yarn": ("factor",),
          "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                     "original_max_position_embeddings")}
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
           "beta_fast", "beta_slow", "attention_factor")


@dataclass(frozen=True)
class RopeConfig:
    """What a recipe needs; rope_frequencies.py follows it. yarn also scales cos and sin by
    `attention_factor`."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192  # llama3 and yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_ropes(config: dict) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of all layers, and of those with a window where the file tells them apart (Gemma 3).

    config: config.json's entries without nulls, and the family's defaults. Raises `ValueError`
    naming the recipe or the entry that is not supported.
    """
    entries, local = _rope_entries(config), None
    if "rope_local_base_freq" in config:  # in the family's defaults, so always for Gemma 3
        local = {"rope_theta": config["rope_local_base_freq"]}
    kinds = "full_attention" in entries or "sliding_attention" in entries
    if local is not None and config.get("rope_parameters") and not kinds:
        raise ValueError(f"config.json: rope_parameters={config['rope_parameters']!r:.80} must "
                         "have an object for full_attention and one for sliding_attention")
    # Also transformers reads it here: beside such objects.
    truncate = entries.get("truncate") is None or read_flag(entries, "truncate", True)
    if kinds:
        local = (local or {}) | (entries.get("sliding_attention") or {})
        entries = entries.get("full_attention") or {}
    return (_read_rope(config, entries, truncate),
            None if local is None else _read_rope(config, local, truncate))


def _rope_entries(config: dict) -> dict:
    """What the file's object says, by either name; both together where an override adds one."""
    entries: dict = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(f"config.json: {name}={config[name]!r} must be an object")
        entries |= config.get(name) or {}
    # Beside a single object, this top-level entry wins over the object's; see transformers'
    # `standardize_rope_params`. Beside one object for each kind of layer it is not read.
    name = "original_max_position_embeddings"
    if name in config and not {"full_attention", "sliding_attention"} & set(entries):
        entries[name] = config[name]
    return entries


def _read_rope(config: dict, entries: dict, truncate: bool) -> RopeConfig:
    if not isinstance(entries, dict):
        raise ValueError(f"config.json: RoPE of a kind of layers, {entries!r:.80}, must be an "
                         "object")
    entries = {name: value for name, value in entries.items() if value is not None}
    rope_type = entries.get("rope_type", entries.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in NEEDED:
        reason = ("its angles depend on the longest sequence of the batch, and text must not; "
                  if rope_type == "dynamic" else "")
        raise ValueError(f"config.json: RoPE scaling {rope_type!r} is not supported: {reason}"
                         f"choose one of {', '.join(NEEDED)}, or model_impl='transformers'")
    partial = entries.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if partial != 1:
        raise ValueError(f"config.json: partial_rotary_factor={partial!r} is not supported: only 1 "
                         "is, but by model_impl='transformers'")
    theta = read_number(entries, "rope_theta", config.get("rope_theta", 10000.0))
    if missing := [name for name in NEEDED[rope_type] if name not in entries]:
        raise ValueError(f"config.json: {rope_type} RoPE scaling lacks {', '.join(missing)}")
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "yarn":
        entries = _yarn_defaults(config, entries)
    rope = RopeConfig(
        theta, rope_type, truncate=truncate,
        **{name: read_number(entries, name) for name in NUMBERS if name in entries})
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(f"config.json: low_freq_factor={rope.low_freq_factor} must be below "
                         f"high_freq_factor={rope.high_freq_factor}")
    if rope_type == "yarn" and theta <= 1:
        raise ValueError(f"config.json: rope_theta={theta} must be above 1 for yarn")
    return rope


def _yarn_defaults(config: dict, entries: dict) -> dict:
    """YaRN (Peng et al. 2023) sharpens attention the more it stretches: by 0.1 ln(factor) + 1."""
    def sharpness(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1 if factor > 1 else 1.0

    factor = read_number(entries, "factor")
    whole, part = entries.get("mscale"), entries.get("mscale_all_dim")
    sharp = sharpness(whole) / sharpness(part) if whole and part else sharpness(1)
    return {"attention_factor": sharp, "original_max_position_embeddings":
            config["max_position_embeddings"]} | entries


def stretched_length(config: dict, rope: RopeConfig) -> int:
    """The longest sequence. YaRN's recipe as model cards give it names the length in training and
    the factor, and leaves max_position_embeddings as it was: 32,768 times 4 is 131,072."""
    length = config["max_position_embeddings"]
    if rope.rope_type == "yarn" and "original_max_position_embeddings" in _rope_entries(config):
        length = max(length, int(rope.original_max_position_embeddings * rope.factor))
    return length


def override_new_spelling(config: dict, overrides: dict) -> None:
    """Overrides in the old spelling win over a file in the new; rope_scaling replaces a recipe."""
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
        new["rope_type"] = new.get("rope_type", new.get("type", "default"))
        old = {k: v for k, v in old.items() if k in ("rope_theta", "partial_rotary_factor")}
    if "rope_theta" in overrides:
        new["rope_theta"] = overrides["rope_theta"]
    if "rope_local_base_freq" in overrides:
        local = local | dict(rope_theta=overrides["rope_local_base_freq"])
    new = old | new
    config["rope_parameters"] = dict(full_attention=new, sliding_attention=local) if both else new


def read_number(config: dict, name: str, default: float | None = None) -> float:
    """A number above 0, as all numbers must be that are read by this function."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name} must be a number above 0, got {value!r}")
    return value


def read_flag(config: dict, name: str, default: bool) -> bool:
    """True or false, or 1 or 0; and not "no", which Python would take for true."""
    value = config.get(name, default)
    if value not in (True, False):
        raise ValueError(f"config.json: {name} must be true or false, got {value!r}")
    return bool(value)
