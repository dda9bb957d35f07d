"""Engines that guess, and what they tell."""

from helpers import poisoned

from nanoserve import LLM
from nanoserve.llm import BUNDLED_MODEL

DRAFT = f"{BUNDLED_MODEL}-draft"
NGRAM = dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
SMALL = dict(method="draft_model", num_speculative_tokens=4, model=DRAFT)
PROMPTS = ["Once upon a time there was a king who", "the old man said, 'ha ha ha ha ha ha ha",
           "She went to the house and the house and the house and the"]


def start(folder=BUNDLED_MODEL, **options) -> LLM:
    options = dict(dtype="float32", device="cpu", num_gpu_blocks_override=64) | options
    llm = LLM(folder, **options)
    return poisoned(llm, len(llm.runner.model.layers))


def told(llm: LLM, prompts, params) -> list:
    """Everything a caller is told, but for times."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(sample.index, sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason)
            for output in outputs for sample in output.outputs]


def count(llm: LLM) -> dict[str, int]:
    return {metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", None)
            or getattr(metric, "values", 0)
            for metric in llm.get_metrics() if "spec_decode" in metric.name}
