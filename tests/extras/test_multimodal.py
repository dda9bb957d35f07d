"""Texts about pictures: token for token what transformers' `generate` writes with the same pixels.

The networks, their pictures and the oracle are those of seeing.py. Larger engines had each of these
bugs: a prefix cache that was blind to pixels (vLLM #20261, #11187: same placeholders, other image,
the first one's answer), M-RoPE's positions of the wrong chunk (vLLM #10388), features matched with
the wrong placeholders (vLLM #15764).
"""

import pytest
from architectures import Made
from checkpoints import assert_same_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
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


def test_only_text_in_front_of_another_image_is_found_again(folders, seers):
    """vLLM's prefix cache once gave the first image's answer for any other."""
    seer = seers["llava"]
    first, other = seer.picture(4, 6, 1), seer.picture(4, 6, 2)
    prompts = [seer.prompt(one, before=22, behind=9) for one in (first, other, first)]
    with start(folders["llava"], block_size=4) as llm:
        cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens
                  for prompt in prompts]
        assert cached == [0, 20, 32]  # the image begins in the block of tokens 20 .. 23
        two = seer.prompt(first, other, before=22, behind=9)
        assert llm.generate(two, GREEDY, use_tqdm=False)[0].num_cached_tokens == 32


def test_another_dtype_or_grid_is_another_image(folders, seers):
    wide, tall = (seers["qwen2.5-vl"].picture(*size, 1) for size in ((4, 6), (6, 4)))
    assert wide["pixel_values"].equal(tall["pixel_values"])
    double = wide | dict(pixel_values=wide["pixel_values"].double())
    with start(folders["qwen2.5-vl"]) as llm:
        for picture in (wide, tall, double, dict(reversed(wide.items()))):
            texts_of(llm, [seers["qwen2.5-vl"].prompt(picture)])
        assert num_runs(llm) == 3


def test_an_image_is_encoded_once(folders, seers):
    """For all samples of all requests, in all chunks, and again when they are preempted."""
    seer = seers["qwen2.5-vl"]
    params = SamplingParams(n=3, max_tokens=20, seed=1, detokenize=False, ignore_eos=True)
    with start(folders["qwen2.5-vl"], num_gpu_blocks_override=14, block_size=5,
               max_num_batched_tokens=9, enable_prefix_caching=False) as llm:
        outs = llm.generate(seer.prompts[:2] * 2, params, use_tqdm=False)
        assert any(out.metrics.num_preemptions for out in outs)
        assert num_runs(llm) == 2
        assert len(outs[0].outputs) == 3 and outs[0].outputs[0].token_ids != (
            outs[0].outputs[1].token_ids)
        for one, other in zip(outs[:2], outs[2:], strict=True):
            assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]


def test_a_cache_too_small_for_all_images_encodes_them_anew(folders, seers):
    seer = seers["qwen3-vl"]
    with start(folders["qwen3-vl"], encoder_cache_tokens=24, max_num_batched_tokens=7) as llm:
        for got, (tokens, gaps) in zip(texts_of(llm, seer.prompts), seer.texts, strict=True):
            assert_same_text(got, tokens, gaps, "small")
        eyes = llm.extra(Multimodal).eyes
        assert eyes.num_runs > 4 and sum(map(len, eyes.held.values())) == eyes.num_tokens <= 24


def test_drafts_and_grammars_go_together_with_images(folders, seers):
    """n-grams of the prompt, placeholders among them, are guesses like any others."""
    seer = seers["llava"]
    with start(folders["llava"], speculative_config={
            "method": "ngram", "num_speculative_tokens": 4}) as llm:
        for got, (tokens, gaps) in zip(texts_of(llm, seer.prompts), seer.texts, strict=True):
            assert_same_text(got, tokens, gaps, "drafts")
        only = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[250])
        [out] = llm.generate([seer.prompts[0]], only, use_tqdm=False)
        assert out.outputs[0].token_ids == [250] * 3  # a placeholder that was written is a word


@settings(max_examples=6, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_budget_or_block_size_changes_a_text(folders, seers, data):
    draw = data.draw
    name = draw(st.sampled_from(["qwen2.5-vl", "qwen3-vl", "smolvlm"]))
    size = draw(st.integers(1, 16))
    options = dict(
        max_num_batched_tokens=draw(st.integers(4, 60)), block_size=size,
        num_gpu_blocks_override=-(-draw(st.integers(52, 120)) // size), max_num_seqs=4,
        async_scheduling=draw(st.booleans()), enable_prefix_caching=draw(st.booleans()),
        encoder_cache_tokens=draw(st.integers(24, 60)))
    seer, order = seers[name], draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    with start(folders[name], **options) as llm:
        got = texts_of(llm, [seer.prompts[i] for i in order])
        for i, text in zip(order, got, strict=True):
            assert_same_text(text, *seer.texts[i], f"{name}, {options}")
        llm.scheduler.check()


def test_who_does_not_see_is_refused_in_words(folders, checkpoints):
    for folder, options, says in (
            (folders["gemma3"], {}, "its image tokens see each other"),
            (checkpoints["qwen3"], {}, "with images .* no tower for them"),
            (folders["llava"], dict(model_impl="nanoserve"), "towers are transformers'"),
            (folders["llava"], dict(kv_store="/nowhere"), "kv_store='/nowhere' does not go"),
            (folders["llava"], dict(runner="pooling"), "pooling"),
            (folders["llava"], dict(limit_mm_per_prompt={"video": 1}), "the most of a kind"),
            (folders["llava"], dict(limit_mm_per_prompt={"image": 0}, encoder_cache_tokens=9),
             "no effect without limit_mm_per_prompt")):
        with pytest.raises(ValueError, match=says):
            start(folder, **options)
    with LLM(folders["gemma3"], dtype="float32", num_gpu_blocks_override=8) as llm:
        assert len(texts_of(llm, [{"prompt_token_ids": [1, 2]}])[0]) == MAX_TOKENS


def test_a_checkpoint_whose_towers_were_stripped_is_named(folders, tmp_path):
    for file in folders["llava"].glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(folders["llava"] / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "vision" not in name},
              tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing tensors for LlavaFor.*vision_tower"):
        start(tmp_path)


def test_update_weights_is_refused(folders):
    with start(folders["llava"]) as llm, pytest.raises(ValueError, match="with images"):
        llm.update_weights({})
