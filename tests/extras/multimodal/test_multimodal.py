"""Texts about pictures: token for token what transformers' `generate` writes with the same pixels.

The networks, their pictures and the oracle are those of seeing.py. Larger engines had each of these
bugs: a prefix cache that was blind to pixels (vLLM #20261, #11187: same placeholders, other image,
the first one's answer), M-RoPE's positions of the wrong chunk (vLLM #10388), features matched with
the wrong placeholders (vLLM #15764).
"""

import weakref
from dataclasses import replace

import pytest
import torch
from architectures import GQA, Made
from checkpoints import assert_same_text
from guessing import count
from helpers import watch_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import by_definition
from safetensors.torch import load_file, save_file
from seeing import MUTUAL, NETWORKS, Seer, make_seeing
from test_hidden_drafts import make_head

from nanoserve import LLM, SamplingParams
from nanoserve_extras.multimodal.multimodal import Multimodal
from nanoserve_extras.trace.recorder import Recorder, chrome_trace

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
# Chunks of 7 that end in the middle of pictures; 11 blocks of 5 hold the longest text and little
# more: everybody else is preempted.
BUSY = dict(num_gpu_blocks_override=11, block_size=5, max_num_batched_tokens=7,
            async_scheduling=True)


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
    if folder.name in MUTUAL and "max_num_seqs" not in options:  # 24 tokens are computed at once
        options = options | dict(max_num_batched_tokens=26, max_num_seqs=3)
    return LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=64, snapshot_bytes=2**20,
                              limit_mm_per_prompt={"image": 3}) | options)


def texts_of(llm: LLM, prompts: list[dict]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]


def num_runs(llm: LLM) -> int:
    """How often a tower has run."""
    return llm.extra(Multimodal).encoder.num_runs


@pytest.mark.parametrize("name", NETWORKS)
def test_a_text_about_pictures_is_what_transformers_writes(folders, seers, name):
    seer = seers[name]
    assert seer.texts[0][0] != seer.texts[1][0]  # they do look
    with start(folders[name], **BUSY) as llm:
        steps = watch_steps(llm)
        for attempt in ("first", "cached"):
            for got, (tokens, gaps) in zip(texts_of(llm, seer.prompts), seer.texts, strict=True):
                assert_same_text(got, tokens, gaps, f"{name}, {attempt}")
        assert any(step.preempted for step in steps)


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
    with start(folders["llava"], block_size=16) as llm:  # both begin in the first block
        pairs = [(first, other), (first, first), (other, first), (first, other)]
        assert [llm.generate(seer.prompt(*pair, before=2, behind=4), GREEDY, use_tqdm=False)[
            0].num_cached_tokens for pair in pairs] == [0, 0, 0, 16]


def test_an_image_that_no_step_could_hold_is_refused(folders, seers):
    prompt = seers["gemma3"].prompts[0]
    with start(folders["gemma3"], max_num_batched_tokens=17, max_num_seqs=3) as llm:
        with pytest.raises(ValueError, match="16 tokens is computed in one step.*=17 to 18"):
            texts_of(llm, [prompt])
        assert len(texts_of(llm, [seers["gemma3"].prompts[3]])[0]) == MAX_TOKENS


def test_an_image_whose_placeholders_stand_otherwise_is_another(folders, seers):
    """In two parts its tokens see others, and their blocks hold other numbers."""
    seer, picture = seers["gemma3"], seers["gemma3"].picture(4, 4, 1)
    ids = seer.prompt(picture)["prompt_token_ids"]
    at = ids.index(seer.token_id)
    apart = ids[:at + 12] + [7] + ids[at + 12:]
    prompts = [dict(prompt_token_ids=each, multi_modal_data={"image": [picture]})
               for each in (ids, apart, ids)]
    with start(folders["gemma3"], block_size=4) as llm:
        for prompt, found in zip(prompts, (0, 8, 24), strict=True):
            [out] = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert out.num_cached_tokens == found
            assert_same_text(out.outputs[0].token_ids, *seer.generate(prompt, 8), "apart")


@pytest.mark.parametrize("name", ["gemma3", pytest.param("llava", marks=pytest.mark.full)])
def test_blocks_of_images_come_back_from_a_folder_for_the_same_images(
        folders, seers, tmp_path, name):
    """To another engine, whose cache is empty: those of the words in front of any image, and all of
    the image that was saved. The second one's cache is so small that blocks leave it, too."""
    seer = seers[name]
    shown, other = seer.picture(4, 6, 1), seer.picture(4, 6, 2)
    prompts = [seer.prompt(one, before=20, behind=14) for one in (shown, other)]
    texts = [seer.generate(prompt, MAX_TOKENS) for prompt in prompts]
    options = dict(kv_store=str(tmp_path), kv_offload_bytes=2 ** 20)
    found = []
    for asked, blocks in (([0], 64), ([1, 0], 5), ([0, 1], 64)):
        with start(folders[name], **options, num_gpu_blocks_override=blocks) as llm:
            for i in asked:
                [out] = llm.generate(prompts[i], GREEDY, use_tqdm=False)
                assert_same_text(out.outputs[0].token_ids, *texts[i], f"{name}, {i}")
                found.append(out.num_cached_tokens)
    whole = (len(prompts[0]["prompt_token_ids"]) - 1) // 16 * 16
    assert found == [0, 16, whole, whole, whole]  # the image begins in the second block


def test_an_image_under_another_salt_is_another_prefix(folders, seers):
    seer = seers["qwen2.5-vl"]
    prompt = seer.prompt(seer.picture(4, 6, 1), before=22, behind=9)
    with start(folders["qwen2.5-vl"]) as llm:
        found = [llm.generate(prompt | salt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
                 for salt in ({}, dict(cache_salt="a"), dict(cache_salt="a"), {})]
    assert found == [False, False, True, True]


def test_another_dtype_or_grid_is_another_image(folders, seers):
    wide, tall = (seers["qwen2.5-vl"].picture(*size, 1) for size in ((4, 6), (6, 4)))
    assert wide["pixel_values"].equal(tall["pixel_values"])
    double = wide | dict(pixel_values=wide["pixel_values"].double())
    with start(folders["qwen2.5-vl"]) as llm:
        for picture in (wide, tall, double, dict(reversed(wide.items()))):
            texts_of(llm, [seers["qwen2.5-vl"].prompt(picture)])
        assert num_runs(llm) == 3


def test_an_image_is_encoded_once(folders, seers):
    """For all samples of all requests, in all chunks, and again when they are preempted. Requests
    that have ended keep no pictures, and an engine that has ended no features."""
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
        extra = llm.extra(Multimodal)
        assert not extra.shown
        held = [weakref.ref(features) for features in extra.encoder.held.values()]
    assert len(held) == 2 and all(one() is None for one in held)


@pytest.mark.parametrize("name, method", [
    ("llava", "eagle3"), ("qwen2.5-vl", "ngram"), ("gemma3", "ngram"),
    *(pytest.param(*other, marks=pytest.mark.full) for other in (
        ("llava", "ngram"), ("qwen2.5-vl", "eagle3"), ("gemma3", "eagle3")))])
def test_drafts_go_together_with_images(folders, seers, name, method, tmp_path):
    """Guesses are guesses. Of three words a text repeats itself, and not always: guesses are right
    and wrong. Oracle: transformers, which may choose among the same words."""
    seer, words = seers[name], [3, 97, 150]
    expected = [seer.generate(prompt, 24, prefix_allowed_tokens_fn=lambda *_: words)[0]
                for prompt in seer.prompts]
    options = dict(prompt_lookup_min=1) if method == "ngram" else dict(
        model=str(make_head(tmp_path / "head", words, [0, 1], **GQA | dict(
            num_hidden_layers=1, head_dim=8))))
    drafts = dict(method=method, num_speculative_tokens=4) | options
    params = replace(GREEDY, allowed_token_ids=words, max_tokens=24)
    with start(folders[name], speculative_config=drafts, max_num_batched_tokens=13) as llm:
        outs = llm.generate(seer.prompts, params, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outs] == expected
        told = count(llm)
        assert 0 < told["num_accepted_tokens"] < told["num_draft_tokens"]


def test_a_placeholder_that_was_written_is_a_word(folders, seers):
    seer = seers["qwen2.5-vl"]
    only = replace(GREEDY, allowed_token_ids=[seer.token_id])
    with start(folders["qwen2.5-vl"]) as llm:
        [out] = llm.generate(seer.prompts[0], only, use_tqdm=False)
    assert set(out.outputs[0].token_ids) == {seer.token_id}


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "gemma3"])
def test_small_weights_round_what_reads_and_not_what_sees(folders, seers, name):
    """Oracle: transformers with the decoder's matrices, and the head's, rounded by definition.
    Plain RoPE, M-RoPE, and a network whose image tokens see each other."""
    oracle = Seer(name, folders[name])
    with torch.no_grad():
        for module in (*oracle.model.get_decoder().modules(),
                       oracle.model.get_output_embeddings()):
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(by_definition(module.weight).float())
    expected = [oracle.generate(prompt, MAX_TOKENS) for prompt in seers[name].prompts]
    assert [text for text, _ in expected] != [text for text, _ in seers[name].texts]
    with start(folders[name], quantization="int8", max_num_batched_tokens=11) as llm:
        for got, (tokens, gaps) in zip(texts_of(llm, seers[name].prompts), expected, strict=True):
            assert_same_text(got, tokens, gaps, "int8")


def test_the_trace_tells_what_the_encoder_cache_holds(folders, seers, tmp_path):
    """Also with steps in flight: what was encoded for a step stands in that step's frame."""
    seer, truth = seers["llava"], {}
    with start(folders["llava"], trace=str(tmp_path / "run.json"), async_scheduling=True,
               max_num_batched_tokens=11, encoder_cache_tokens=24) as llm:
        encoder, trace = llm.extra(Multimodal).encoder, llm.extra(Recorder).trace
        llm.hooks.launching.append(lambda step: truth.setdefault(
            step.index, (encoder.num_tokens, encoder.num_runs)))
        texts_of(llm, seer.prompts * 2)
        stream = trace.stream()
    held, runs, seen = 0, 0, {}
    for frame in stream["frames"][:-1]:
        held, more = frame.get("v", (held, 0))
        runs += more
        seen[frame["i"]] = (held, runs)
    assert seen == truth and runs >= 4 and stream["meta"]["images"] == 24
    events = [one for one in chrome_trace(stream)["traceEvents"] if one["name"] == "encoder cache"]
    assert [one["args"]["tokens"] for one in events] == [
        frame["v"][0] for frame in stream["frames"] if "v" in frame]


@settings(derandomize=True, max_examples=10, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_budget_or_block_size_changes_a_text(folders, seers, data):
    draw = data.draw
    name = draw(st.sampled_from(["qwen2.5-vl", "qwen3-vl", "smolvlm", *MUTUAL]))
    size = draw(st.integers(1, 16))
    options = dict(
        max_num_batched_tokens=draw(st.integers(27 if name in MUTUAL else 4, 60)), block_size=size,
        num_gpu_blocks_override=-(-draw(st.integers(56, 120)) // size), max_num_seqs=4,
        async_scheduling=draw(st.booleans()), enable_prefix_caching=draw(st.booleans()),
        encoder_cache_tokens=draw(st.integers(24, 60)))
    seer, order = seers[name], draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    with start(folders[name], **options) as llm:
        got = texts_of(llm, [seer.prompts[i] for i in order])
        for i, text in zip(order, got, strict=True):
            assert_same_text(text, *seer.texts[i], f"{name}, {options}")
        llm.scheduler.check()
        encoder = llm.extra(Multimodal).encoder
        assert sum(map(len, encoder.held.values())) == encoder.num_tokens <= encoder.budget


def test_who_does_not_see_is_refused_in_words(folders, checkpoints):
    for folder, options, says in (
            (folders["gemma4-unified"], {}, "Gemma4Unified.* none that was tried"),
            (checkpoints["qwen3"], {}, "with images .* no tower for them"),
            (folders["llava"], dict(model_impl="nanoserve"), "towers are transformers'"),
            (folders["llava"], dict(runner="pooling"), "pooling"),
            (folders["llava"], dict(limit_mm_per_prompt={"video": 1}), "no 'video'"),
            (folders["llava"], dict(limit_mm_per_prompt={"image": 0}, encoder_cache_tokens=9),
             "encoder_cache_tokens.*limit_mm_per_prompt")):
        with pytest.raises(ValueError, match=says):
            start(folder, **options)
    with LLM(folders["gemma4-unified"], dtype="float32", num_gpu_blocks_override=8) as llm:
        assert len(texts_of(llm, [{"prompt_token_ids": [1, 2]}])[0]) == MAX_TOKENS


def test_a_checkpoint_whose_towers_were_stripped_is_named(folders, tmp_path):
    for file in folders["llava"].glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    tensors = load_file(folders["llava"] / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "vision" not in name},
              tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing.*LlavaFor.*vision_tower"):
        start(tmp_path)
