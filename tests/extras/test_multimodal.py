"""Texts about pictures: token for token what transformers' `generate` writes with the same pixels.

The networks, their pictures and the oracle are those of seeing.py. Larger engines had each of these
bugs: a prefix cache that was blind to pixels (vLLM #20261, #11187: same placeholders, other image,
the first one's answer), M-RoPE's positions of the wrong chunk (vLLM #10388), features matched with
the wrong placeholders (vLLM #15764).
"""

import pytest
from architectures import Made
from checkpoints import assert_same_text
from seeing import NETWORKS, Seer, make_seeing

from nanoserve import LLM, SamplingParams
from nanoserve.extras.multimodal import Multimodal

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
MODES = [
    dict(max_num_batched_tokens=7),  # chunks that end in the middle of pictures
    # 11 blocks of 5 hold the longest text and little more: everybody else is preempted.
    dict(num_gpu_blocks_override=11, block_size=5, max_num_batched_tokens=33,
         async_scheduling=True)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("seeing"), make_seeing)


@pytest.fixture(scope="session")
def seers(folders) -> dict:
    class Seers(dict):
        def __missing__(self, name):
            seer = self[name] = Seer(name, folders[name])
            seer.prompts = make_prompts(seer)
            seer.texts = [seer.generate(prompt, MAX_TOKENS) for prompt in seer.prompts]
            return seer

    return Seers()


def make_prompts(seer: Seer) -> list[dict]:
    """The same words with one picture, with another of the same size, two pictures, no picture."""
    first, other = seer.picture(4, 6, 1), seer.picture(4, 6, 2)
    return [seer.prompt(first), seer.prompt(other),
            seer.prompt(seer.picture(4, 4, 3), seer.picture(2, 6, 4)), seer.prompt()]


def start(folder, **options) -> LLM:
    return LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=64, snapshot_bytes=2**20,
                              limit_mm_per_prompt={"image": 3}) | options)


def texts_of(llm: LLM, prompts: list[dict]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]


def num_runs(llm: LLM) -> int:
    """How often a tower has run."""
    return llm.extra(Multimodal).eyes.num_runs


@pytest.mark.parametrize("name", NETWORKS)
def test_a_text_about_pictures_is_what_transformers_writes(folders, seers, name):
    seer = seers[name]
    assert seer.texts[0][0] != seer.texts[1][0]  # they do look
    for options in MODES:
        with start(folders[name], **options) as llm:
            for attempt in ("first", "cached"):
                for got, (tokens, gaps) in zip(texts_of(llm, seer.prompts), seer.texts,
                                               strict=True):
                    assert_same_text(got, tokens, gaps, f"{name}, {options}, {attempt}")
