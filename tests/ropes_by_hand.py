"""RoPE's frequencies by the papers' formulas, in Python's floats: no torch, no transformers."""

import math


def frequencies(head_dim: int, recipe: dict) -> list[float]:
    """recipe: as `rope_parameters` has it, with nothing left out but what has a usual value."""
    theta, rope_type = recipe.get("rope_theta", 1e4), recipe.get("rope_type", "default")
    factor, length = recipe.get("factor"), recipe.get("original_max_position_embeddings")

    def keep(i: int, turn: float) -> float:
        """1: the pair turns as in training; 0: it turns `factor` times as slowly."""
        if rope_type != "yarn":
            low, high = recipe["low_freq_factor"], recipe["high_freq_factor"]
            return min(max((length * turn / (2 * math.pi) - low) / (high - low), 0), 1)
        low, high = (head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
                     for turns in (recipe.get("beta_fast", 32), recipe.get("beta_slow", 1)))
        if recipe.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return 1 - min(max((i - low) / (high - low or 0.001), 0), 1)

    turns = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope_type == "default":
        return turns
    if rope_type == "linear":
        return [turn / factor for turn in turns]
    return [turn / factor * (1 - keep(i, turn)) + turn * keep(i, turn)
            for i, turn in enumerate(turns)]


def sharpness(recipe: dict) -> float:
    """What YaRN multiplies cos and sin by (Peng et al. 2023, section 3.4; DeepSeek's mscale)."""
    if recipe.get("rope_type") != "yarn":
        return 1.0
    if recipe.get("attention_factor") is not None:
        return recipe["attention_factor"]

    def of(strength: float) -> float:
        return 0.1 * strength * math.log(recipe["factor"]) + 1 if recipe["factor"] > 1 else 1.0

    whole, part = recipe.get("mscale"), recipe.get("mscale_all_dim")
    return of(whole) / of(part) if whole and part else of(1)
