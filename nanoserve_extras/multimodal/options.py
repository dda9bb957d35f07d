"""How many images and sounds a prompt may have."""

from dataclasses import dataclass
from typing import Any

from nanoserve.frontend import rules
from nanoserve.frontend.rules import Options, Rule, only_if, option


def keep_limits(limits: Any) -> dict[str, int] | None:
    """As vLLM's. `None` where a prompt may have none."""
    only_if(isinstance(limits, dict), limits)
    kept = {kind: rules.SIZE.keep(most) for kind, most in limits.items() if rules.SIZE.keep(most)}
    return only_if(kept.keys() <= {"image", "audio"}, limits) and kept or None


@dataclass(frozen=True, kw_only=True)
class MultimodalOptions(Options):
    """limit_mm_per_prompt: `None` for prompts of text alone. mm_processor_kwargs: laid over what
    the folder's files say. encoder_cache_tokens: the size of the cache of what the tower made."""

    limit_mm_per_prompt: dict | None = option(None, Rule(
        "a dict like {'image': 4} or {'audio': 1}: the most of a kind that a prompt may have "
        "(no 'video': its frames are images)",
        keep_limits))
    mm_processor_kwargs: dict | None = option(None, Rule(
        "a dict of arguments that the checkpoint's processor takes",
        lambda given: only_if(isinstance(given, dict), given) or None), "limit_mm_per_prompt")
    encoder_cache_tokens: int = option(8192, rules.COUNT, "limit_mm_per_prompt")
