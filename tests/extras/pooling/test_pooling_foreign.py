"""Embeddings by transformers' decoders: no fact speaks against them, so they are not refused."""

import pytest
import torch
import transformers
from architectures import GQA, make
from hybrids import HYBRIDS

from nanoserve import LLM

PROMPTS = [[5, 6, 7], list(range(40, 73)), list(range(40, 61))]


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_decoders_of_transformers_embed_as_transformers(kind, tmp_path):
    """Whole prompts, chunks of them, and a prefix that is found again. OLMo 3 is not ours."""
    config = HYBRIDS["qwen3.5"]() if kind == "hybrid" else transformers.Olmo3Config(**GQA)
    folder = make(config, tmp_path / kind)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, runner="pooling", dtype="float32", max_num_batched_tokens=8, block_size=4,
             num_gpu_blocks_override=64) as llm:
        for _ in range(2):
            for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
                with torch.inference_mode():
                    hidden = network.model(torch.tensor([prompt])).last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(hidden, dim=0)
                found = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_engine_pools_that_is_handed_the_extra(qwen3):
    from nanoserve_extras.pooling.pooling import Pooling

    with LLM(qwen3, dtype="float32", runner="pooling") as asked, LLM(
            qwen3, dtype="float32", extras=[Pooling()]) as handed:
        [one], [other] = (llm.embed([[5, 6, 7]], use_tqdm=False) for llm in (asked, handed))
    assert one.outputs.embedding == other.outputs.embedding


def test_classes_are_refused_by_the_name_of_the_option(tmp_path):
    folder = make(HYBRIDS["qwen3.5"](), tmp_path / "model")
    with pytest.raises(ValueError, match="convert='embed'"):
        LLM(folder, runner="pooling", convert="classify")
