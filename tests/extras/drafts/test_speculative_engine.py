"""Guesses in the engine: everything at once, on two ranks, around it, and what is refused."""

import itertools
import json
import shutil
from collections import Counter

import engine_workloads as fuzz
import pytest
import torch
from checkpoints import assert_same_text
from guessing import NGRAM, PROMPTS, SMALL, count, start
from helpers import write_json

from nanoserve import LLM, SamplingParams
from nanoserve_extras.trace.recorder import Recorder, chrome_trace

# -------------------------------------------------------------- everything at once

GUESSERS = dict(
    ngram=dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
    suffix=dict(method="suffix", num_speculative_tokens=4),
    noisy=dict(method="draft_model", num_speculative_tokens=3),
    other=dict(method="draft_model", num_speculative_tokens=2))


@pytest.mark.parametrize("name, how, max_examples, ranks", [
    ("qwen3", "ngram", 15, 1), ("qwen3", "suffix", 15, 1), ("qwen3", "noisy", 20, 1),
    ("mistral", "noisy", 15, 1), pytest.param("mistral", "other", 15, 1, marks=pytest.mark.full),
    ("qwen3", "noisy", 16, 2)])
def test_random_workloads_with_drafts(checkpoints, references, noisy, ranks_in_threads, name, how,
                                      max_examples, ranks):
    """The engine's random workloads, their engines and their oracles, now with guesses: chunks,
    tiny caches, prefix hits, preemption, priorities, several samples, controls, logprobs, aborts.
    A draft model without a window keeps the blocks that the model's own window has left. On two
    ranks one engine meets all workloads."""
    asked = dict(GUESSERS[how])
    if asked["method"] == "draft_model":
        asked["model"] = str(noisy(name) if how == "noisy" else checkpoints["qwen3-tied"])
    first = len(fuzz.ENGINES)
    for options in (fuzz.ENGINES[0], fuzz.ENGINES[3], fuzz.ENGINES[5])[:1 if ranks > 1 else 3]:
        fuzz.ENGINES.append(dict(options, async_scheduling=False, speculative_config=asked,
                                 tensor_parallel_size=ranks))
    numbers = range(first, len(fuzz.ENGINES))
    try:
        fuzz.run_random_workloads(checkpoints, references, name, numbers, max_examples, enough=1)
        used = [llm for (_, which), llm in fuzz.engines.items() if which in numbers]
        total = Counter()
        for llm in used:
            total.update({key: n for key, n in count(llm).items() if isinstance(n, int)})
        few = 0 if how == "suffix" else 10  # it is seldom wrong, as workloads repeat prompts
        assert total["num_draft_tokens"] - total["num_accepted_tokens"] > few, total
        assert total["num_accepted_tokens"] > 10 or how != "noisy", total
    finally:
        for key in [key for key in fuzz.engines if key[1] in numbers or key[1] == "plain"]:
            fuzz.engines.pop(key).shutdown()
        del fuzz.ENGINES[first:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_drafts_without_numbers_are_wrong_and_no_more(qwen3, ranks_in_threads, ranks):
    """The second network has NaN where the first has none: the text is what it was."""
    asked = dict(method="draft_model", num_speculative_tokens=3, model=str(qwen3))
    with start(qwen3, speculative_config=asked, tensor_parallel_size=ranks) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = [out.outputs[0].token_ids for out in llm.generate(
            PROMPTS, params, use_tqdm=False)]
        before = count(llm)
        with torch.inference_mode():
            llm.runner.networks[1].embed_tokens.weight.fill_(torch.nan)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outputs] == expected
        assert {out.outputs[0].finish_reason for out in outputs} == {"length"}
        assert count(llm)["num_draft_tokens"] > before["num_draft_tokens"]


def test_a_perfect_guesser_is_always_right_through_chunks_hits_and_preemption(qwen3, references,
                                                                             prompts):
    """The draft model is the model. Whatever happens to blocks, it must always find its own KV in
    them: a gap would show as a wrong guess. (The one that is confessed aside: prompts only.)"""
    llm = start(qwen3, num_gpu_blocks_override=8, max_num_batched_tokens=32, max_num_seqs=8,
                speculative_config=dict(method="draft_model", num_speculative_tokens=3,
                                        model=str(qwen3)))
    for cache in llm.runner.kv_cache:
        for tensor in cache:
            tensor.fill_(torch.nan)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for output in outputs:
        expected, gaps = references("qwen3", output.prompt_token_ids, 12)
        assert_same_text(output.outputs[0].token_ids, expected, gaps, "perfect")
    numbers = count(llm)
    assert llm.metrics.num_preemptions and llm.metrics.num_hits
    assert numbers["num_accepted_tokens"] > 0.97 * numbers["num_draft_tokens"], numbers


# ------------------------------------------------------------------ around it


def test_the_trace_shows_drafts_and_no_recomputation(tmp_path):
    """Positions of wrong drafts are computed a second time, but nothing was taken away."""
    with start(speculative_config=SMALL, trace=str(tmp_path / "run.json")) as llm:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        rows = chrome_trace(llm.extra(Recorder).trace.stream())["traceEvents"]
        numbers = count(llm)
        count_wrong = numbers["num_draft_tokens"] - numbers["num_accepted_tokens"]
    json.loads((tmp_path / "run.json").read_text())
    assert not [row for row in rows if row["name"] == "recompute"]
    decoded = sum(row["args"]["tokens"] for row in rows if row["name"] == "decode")
    assert decoded == 29 + count_wrong


def test_overlap_is_off_and_says_so(qwen3, capsys):
    llm = start(qwen3, async_scheduling=True, speculative_config=NGRAM)
    assert "overlap is off" in capsys.readouterr().err and llm.depth == 0


@pytest.mark.parametrize("config, message", [
    ("ngram", "must be a dict"),
    (dict(), "method=None.*ngram, suffix, draft_model, eagle3"),
    (dict(method="eagle", num_speculative_tokens=2), "method='eagle'"),
    (dict(method=["ngram"], num_speculative_tokens=2), "method=\\['ngram'\\]"),
    (dict(method="ngram"), "num_speculative_tokens"),
    (dict(NGRAM, num_speculative_tokens=0), "num_speculative_tokens.*got 0"),
    (dict(NGRAM, num_speculative_tokens=2.5), "num_speculative_tokens.*got 2.5"),
    (dict(NGRAM, prompt_lookup_max=True), "prompt_lookup_max.*got True"),
    (dict(NGRAM, prompt_lookup_max=1), "prompt_lookup_min=2.*prompt_lookup_max=1"),
    (dict(NGRAM, model="x"), "model .*method='ngram'"),
    (dict(SMALL, prompt_lookup_max=3), "prompt_lookup_max .*method='draft_model'"),
    (dict(method="draft_model", num_speculative_tokens=2), "model is missing"),
    (dict(SMALL, model="/no/where"), "speculative_config: model='/no/where'"),
    (dict(SMALL), "4096 tokens.*260")])
def test_wrong_settings(qwen3, config, message):
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, device="cpu", speculative_config=config)


def test_engines_and_networks_that_have_no_text(qwen3, checkpoints, tmp_path):
    with pytest.raises(ValueError, match="speculative_config=.* runner='pool"):
        start(qwen3, runner="pooling", speculative_config=NGRAM)
    folder = shutil.copytree(checkpoints["qwen3-tied"], tmp_path / "embedder")
    for architecture, words in [("Qwen3Model", "architecture Qwen3Model"),
                                ("Gemma4AssistantForCausalLM", "guesses from .*method='ngram'")]:
        write_json(folder / "config.json", architectures=[architecture])
        with pytest.raises(ValueError, match=words):
            start(qwen3, speculative_config=dict(SMALL, model=str(folder)))


def test_a_draft_model_with_other_tokens(qwen3, tmp_path):
    """As many tokens, but others: it would guess nonsense for ever, and nothing would say why."""
    folder = shutil.copytree(qwen3, tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="are others than those of"):
        start(qwen3, speculative_config=dict(SMALL, model=str(folder)))


def test_memory_counts_both_networks(qwen3, checkpoints):
    plain, both = start(qwen3), start(qwen3, speculative_config=dict(
        SMALL, model=str(checkpoints["qwen3-tied"])))
    ours, theirs = plain.runner.block_bytes, 2 * 3 * 1 * 16 * 16 * 4  # 3 layers, 1 head of 16
    assert both.runner.block_bytes == ours + theirs
    assert sum(t.nbytes for kv in both.runner.kv_cache for t in kv) == 64 * (ours + theirs)


def test_the_largest_step_has_drafts_for_all_and_both_networks_run_it(qwen3, checkpoints):
    """A GPU's cache is what this step leaves: its samples are rows of logits, of which drafts make
    many. A smaller network may have a wider MLP, and take more memory."""
    llm = start(qwen3, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=12,
                speculative_config=dict(SMALL, model=str(checkpoints["qwen3-tied"])))
    launched, launch = [], llm.runner.launch
    llm.runner.launch = lambda step: launched.append(step) or launch(step)
    llm.runner.run_largest_step()
    assert [step.network for step in launched] == [0, 1]
    for step in launched:
        assert list(step.num_new_tokens.values()) == [10, 5, 5]
    assert len(launched[0].samples()) == 5 * 3


def test_no_guess_is_worse_for_a_step_without_guesses(qwen3):
    """The draft model is the model. Where no block is left for a guess, or somebody is preempted, a
    row decodes without one, right behind a guess whose KV was never written: that is made up for,
    so whatever is guessed after it is right as well."""
    with start(qwen3, enable_prefix_caching=False, speculative_config=dict(
            SMALL, model=str(qwen3))) as llm:
        [propose], turns = llm.scheduler.hooks.draft, itertools.count()
        llm.scheduler.hooks.draft[:] = [
            lambda seq, most: propose(seq, most) if next(turns) % 2 else []]
        llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
                     use_tqdm=False)
        numbers = count(llm)
        assert numbers["num_accepted_tokens"] == numbers["num_draft_tokens"] > 30


@pytest.mark.parametrize("draft, window", [("mistral", 14), ("qwen3-tied", None)])
def test_blocks_are_kept_for_the_network_that_looks_back_furthest(checkpoints, draft, window):
    """Given back too early, they would hold other requests' KV: right text, worse guesses."""
    llm = start(checkpoints["mistral"], speculative_config=dict(
        SMALL, model=str(checkpoints[draft])))
    assert llm.model_config.window == 13 and llm.scheduler.blocks.window == window
