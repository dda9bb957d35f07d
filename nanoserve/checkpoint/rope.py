"""RoPE: how fast each pair of dimensions turns, and recipes for texts longer than in training.

A pair i of a head of d dimensions turns by theta^(-2i/d) radians a position (Su et al. 2021). The
first pairs turn fast and tell neighbours apart, the last ones hardly turn and tell distant
positions apart. Beyond the lengths of its training a model meets new angles of the slow pairs:

    pair       0 ............................ d/2 - 1
    turns      many in training               less than one
    stretched  not at all     a blend         by `factor`          "llama3", "yarn"

"linear" stretches all pairs alike; "llama3" blends by the number of turns, "yarn" (Peng et al.
2023) by the index. transformers computes all three. Files write a recipe in two spellings:

    transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, ..}
                     or one such object each for "full_attention" and "sliding_attention"
    before:          "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8, ..} or null

Invariant: the numbers are transformers', bit for bit. A recipe that is not known is refused by
name; "dynamic" is known and refused, because with it a token's KV would depend on the other
requests of the batch.
"""

from dataclasses import dataclass
from typing import Any

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
