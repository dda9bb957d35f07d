"""`SamplingParams` that take vLLM's words, too: `from nanoserve import SamplingParams`."""

from nanoserve import config as plain
from nanoserve_extras.base.vllm import takes_vllms_words


@takes_vllms_words("SamplingParams", "SamplingParams")
class SamplingParams(plain.SamplingParams):
    """As the plain engine's, without a field more."""

    __doc__ = plain.SamplingParams.__doc__
    stack_level = plain.SamplingParams.stack_level + 1  # the decorator is called in between
