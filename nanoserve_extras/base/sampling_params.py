"""`SamplingParams` that also take vLLM's names: `from nanoserve import SamplingParams`."""

from dataclasses import replace

from nanoserve import config as plain
from nanoserve_extras.base.vllm import takes_vllms_words


def with_ids(biases: dict) -> dict:
    """Biases by token ids. Keys in JSON are strings: as in vLLM's server, "5" is token 5. Raises
    `ValueError` for a token that comes twice."""
    kept: dict = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        if token_id in kept:
            raise ValueError(f"logit_bias must have each token once, got {key!r} in {biases!r:.80}")
        kept[token_id] = bias
    return kept


@takes_vllms_words("SamplingParams", "SamplingParams")
class SamplingParams(plain.SamplingParams):
    """The plain engine's class, with the same fields."""

    __doc__ = plain.SamplingParams.__doc__
    stack_level = plain.SamplingParams.stack_level + 2  # the decorator's call, and the one below

    def __post_init__(self):
        for name in ("logprobs", "prompt_logprobs"):  # True is 1
            given = getattr(self, name)
            if isinstance(given, bool):
                setattr(self, name, int(given) or None)
        if isinstance(self.logit_bias, dict):
            self.logit_bias = with_ids(self.logit_bias)
        super().__post_init__()
        for name in ("seed", "thinking_token_budget"):  # -1 is None
            if getattr(self, name) == -1:
                setattr(self, name, None)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one: the rules copy lists and dicts."""
        return replace(self)
