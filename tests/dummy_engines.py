"""Engines with random weights, made from nothing but a config.json."""

from nanoserve import LLM, SamplingParams


def start(folder, **options) -> LLM:
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, **options)


def assert_serves(llm: LLM) -> None:
    """A short request goes through."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3, 4, 5]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
