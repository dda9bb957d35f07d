"""Speculative decoding: whoever guesses, and however badly, the text is the same, only sooner.

The oracles are independent of what they check: transformers' greedy text, the same engine without
drafts (drawn tokens, logprobs, stop strings, token for token), distributions computed by hand from
transformers' logits, and a search through the whole text for the n-gram index. Two draft models:
the model itself with noise in its weights, which is right now and then, and another one entirely.
(That wrong drafts leave no trace in blocks and prefix cache is held in test_random_workloads.)
"""

import itertools
import json
import random
import shutil
from collections import Counter

import pytest
import test_random_workloads as fuzz
import torch
from conftest import assert_same_text, write_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.device import attention
from nanoserve.config import EngineConfig
from nanoserve.tools.recorder import chrome_trace
from nanoserve.extras.speculative import NgramGuesser, NgramIndex, main
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

DRAFT = f"{BUNDLED_MODEL}-draft"
NGRAM = dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
SMALL = dict(method="draft_model", num_speculative_tokens=4, model=DRAFT)
PROMPTS = ["Once upon a time there was a king who", "the old man said, 'ha ha ha ha ha ha ha",
           "She went to the house and the house and the house and the"]


def start(folder=BUNDLED_MODEL, **options) -> LLM:
    options = dict(dtype="float32", device="cpu", num_gpu_blocks_override=64) | options
    llm = LLM(folder, **options)
    for cache in llm.runner.kv_cache[:len(llm.runner.model.layers)]:
        for tensor in cache:
            tensor.fill_(torch.nan)
    return llm


def told(llm: LLM, prompts, params) -> list:
    """Everything a caller is told, but for times."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(sample.index, sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason)
            for output in outputs for sample in output.outputs]


def count(llm: LLM) -> dict[str, int]:
    return {metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", None)
            or getattr(metric, "values", 0)
            for metric in llm.get_metrics() if "spec_decode" in metric.name}


@pytest.fixture(scope="module")
def noisy(checkpoints, tmp_path_factory):
    """A checkpoint like the one named, with noise in its weights: a guesser that is often right."""
    def make(name: str, noise: float = 0.15):
        folder = tmp_path_factory.mktemp("noisy") / name
        shutil.copytree(checkpoints[name], folder)
        weights = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(2)
        for key, weight in weights.items():
            if weight.dim() > 1:
                weights[key] = weight + noise * weight.std() * torch.randn(
                    weight.shape, generator=generator)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


# -------------------------------------------------------------------- the rules


@pytest.mark.parametrize("drafts, sampled, stops, expected", [
    ([5, 6, 7], [5, 6, 9, 4], (), [5, 6, 9]), ([5, 6, 7], [5, 6, 7, 4], (), [5, 6, 7, 4]),
    ([5, 6, 7], [1, 6, 7, 4], (), [1]), ([5], [5, 5], (), [5, 5]),
    ([5, 6, 7], [5, 6, 7, 4], (6,), [5, 6]), ([5, 6, 7], [5, 6, 7, 4], (4,), [5, 6, 7, 4]),
    ([5, 6, 7], [8, 6, 7, 4], (8,), [8])])
def test_what_a_row_with_drafts_comes_to(drafts, sampled, stops, expected):
    seq, other = (Sequence("0", [1], SamplingParams(), stop_ids=frozenset(stops)) for _ in "ab")
    step = Step(0, {other: 1, seq: 1 + len(drafts)}, [0, 0], [other, seq], {seq: drafts})
    assert step.outcome([3, *sampled]) == {other: [3], seq: expected}
    assert step.samples() == [other] + [seq] * (1 + len(drafts))


def test_the_index_finds_what_a_search_finds():
    """The last earlier occurrence of the longest n-gram that the text ends with, while it grows."""
    rng = random.Random(0)
    for _ in range(60):
        longest = rng.randint(1, 5)
        shortest = rng.randint(1, longest)
        index, text, found = NgramIndex(longest, shortest), [], 0
        for _ in range(60):
            text += [rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 7]))]
            expected = None
            for n in range(longest, shortest - 1, -1):
                ends = [end for end in range(n, len(text)) if text[end - n:end] == text[-n:]]
                if ends:
                    expected = ends[-1]
                    break
            assert index.find(text) == expected
            found += expected is not None
        assert found


def test_ngram_guesses_go_round_and_rest_after_a_miss():
    guesser = NgramGuesser(NGRAM)
    seq = Sequence("0", [9, 1, 2, 3, 1, 2], SamplingParams())
    assert guesser.propose(seq, 5) == [3, 1, 2, 3, 1] and guesser.propose(seq, 2) == [3, 1]
    for num_misses in range(1, 8):
        guesser.checked(seq, 0)
        rest = min(2 ** (num_misses - 1), 32)
        for i in range(rest):
            assert guesser.propose(seq, 5) == [], (num_misses, i)
            seq.token_ids.append(seq.token_ids[-3])
        assert len(guesser.propose(seq, 5)) == 5
    guesser.checked(seq, 1)
    assert guesser.propose(seq, 5)
    guesser.forget(seq)
    assert not guesser.records


def scheduler(num_blocks: int, **options) -> Scheduler:
    return Scheduler(EngineConfig(model="none", block_size=4, **dict(
        max_num_batched_tokens=16, max_num_seqs=4) | options), num_blocks)


def test_drafts_take_only_what_is_left():
    """Not the budget that others need, not the last token, no block that isn't free; and nobody is
    preempted for them."""
    def row(num_blocks: int, max_num_tokens: int = 40, **options) -> list[int]:
        s = scheduler(num_blocks, **options)
        s.propose = lambda seq, most: [7] * min(most, 9)
        seqs = [Sequence(str(i), [i, 1, 2], SamplingParams(), i, max_num_tokens=max_num_tokens)
                for i in range(2)]
        for seq in seqs:
            s.running.append(seq)
            seq.row, seq.num_computed_tokens = s.free_rows.pop(), 3
            seq.token_ids.append(5)
            s.blocks.allocate(seq, 4)
        step = s.schedule()
        s.check()
        assert not step.preempted
        return [len(step.drafts.get(seq, [])) for seq in seqs]

    assert row(20, max_num_batched_tokens=64) == [9, 9]
    assert row(20) == [9, 5]  # 16 tokens, of which each row's own two
    assert row(20, max_num_tokens=6) == [1, 1]
    assert row(20, max_num_tokens=5) == [0, 0]
    assert row(2, max_num_tokens=9) == [0, 0]  # 4 of 4 slots are taken
    assert row(3, max_num_tokens=9) == [4, 0]


def test_a_block_of_wrong_drafts_is_never_found():
    """A block was hashed while it still held unverified draft tokens (BUGS.md 8): whoever asked for
    that text would have got the KV of it, written behind a token that never was."""
    s = scheduler(8)
    s.propose = lambda seq, most: [7] * min(most, 9)
    s.add(Sequence("0", [0, 1, 2], SamplingParams(), max_num_tokens=30))
    s.update(s.schedule(), [3])
    step = s.schedule()
    seq, = step.num_new_tokens
    assert step.num_new_tokens[seq] == 10 and len(seq.block_table) == 4  # positions 3 to 12
    s.update(step, [7, 7, 8, *[7] * 7])
    s.check()
    assert seq.token_ids == [0, 1, 2, 3, 7, 7, 8] and seq.num_computed_tokens == 6
    assert [entry.tokens for entry in s.blocks.cached.values()] == [[0, 1, 2, 3]]


# ------------------------------------------------------------------ the same text


@pytest.fixture(scope="module")
def engines():
    """One engine of the bundled model for each way to guess."""
    made = {name: start(speculative_config=config) for name, config in dict(
        none=None, ngram=NGRAM, draft_model=SMALL).items()}
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_greedy_text_equals_transformers_in_fewer_steps(engines, method):
    llm = engines[method]
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    prompt = llm.tokenizer.encode(PROMPTS[2])
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False,
                                   min_new_tokens=48)[0, len(prompt):].tolist()
    before = llm.metrics.num_steps
    output, = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=48, min_tokens=48),
                           use_tqdm=False)
    assert output.outputs[0].token_ids == expected
    assert llm.metrics.num_steps - before <= (24 if method == "ngram" else 40)


PARAMS = dict(
    greedy=dict(temperature=0),
    seeded=dict(seed=1, n=2),
    filtered=dict(seed=2, n=2, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    penalties=dict(seed=3, temperature=0.5, repetition_penalty=1.2, frequency_penalty=0.3,
                   presence_penalty=0.2),
    repeating=dict(temperature=0, frequency_penalty=-1.0),
    bad_words=dict(temperature=0, bad_words=["ha ha ha", "house and", "son"]),
    # The first prompt goes on with " had a son, and had a son who was a son, and had a son, and had
    # a son": these words end in the middle of what a step brings.
    bad_inside=dict(temperature=0, bad_words=["and had a son,"]),
    stop_inside=dict(temperature=0, stop=["a son, and had a son, and"]),
    stop=dict(temperature=0, stop=["e house and the h", "a h", "king"]),
    stop_shown=dict(temperature=0, stop=["ha", "house"], include_stop_str_in_output=True,
                    min_tokens=4),
    early=dict(seed=4, temperature=0.6, min_tokens=20, stop_token_ids=list(range(240, 300))),
    allowed=dict(seed=5, allowed_token_ids=list(range(300, 310)), logit_bias={303: 2.0}))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_kind_of_request_gets_its_own_text(engines, method):
    """All at once, and token for token what they get without drafts: stop strings that end in the
    middle of an accepted draft, penalties that see the drafts in front of them."""
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    params = [SamplingParams(max_tokens=24, **fields) for fields in PARAMS.values()] * len(PROMPTS)
    before = count(engines[method])["num_accepted_tokens"]
    assert told(engines[method], prompts, params) == told(engines["none"], prompts, params)
    assert count(engines[method])["num_accepted_tokens"] - before > 20


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_logprobs_are_those_of_the_tokens(engines, method):
    params = [SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
              SamplingParams(seed=1, max_tokens=20, logprobs=0, stop=["h"])] * 3
    prompts = [prompt for prompt in PROMPTS for _ in "ab"]
    results = [engines[name].generate(prompts, params, use_tqdm=False) for name in (method, "none")]
    for ours, expected in zip(*results, strict=True):
        assert (ours.prompt_logprobs is None) == (expected.prompt_logprobs is None)
        ours, expected = ours.outputs[0], expected.outputs[0]
        assert ours.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        for one, other in zip(ours.logprobs, expected.logprobs, strict=True):
            assert list(one) == list(other)
            for token_id in one:
                assert one[token_id].rank == other[token_id].rank
                assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def test_streams_grow_by_several_tokens(engines):
    """A DELTA carries all of a step's tokens; together they are the text."""
    from nanoserve.sampling_params import RequestOutputKind
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=0, stop=["zzz"],
                            output_kind=RequestOutputKind.DELTA)
    parts = [output.outputs[0] for output in engines["ngram"].stream(PROMPTS[2], params)]
    whole, = engines["none"].generate(
        PROMPTS[2], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert sum((part.token_ids for part in parts), []) == whole.outputs[0].token_ids
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
    assert max(len(part.token_ids) for part in parts) == 6


# ----------------------------------------------------------------- the distribution

ALLOWED = [65, 70, 90]
CASES = [dict(temperature=1.3), dict(temperature=1.6, top_p=0.93, repetition_penalty=1.4),
         dict(temperature=1.5, top_k=2, frequency_penalty=0.8, presence_penalty=-0.4)]


def by_hand(model, prompt: list[int], fields: dict) -> dict[tuple[int, ...], float]:
    """The exact probability of every text of 4 tokens out of `ALLOWED`."""
    table = {}
    for text in itertools.product(ALLOWED, repeat=4):
        total = 1.0
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(text)])).logits[0, len(prompt) - 1:]
        for i, token_id in enumerate(text):
            values = {}
            for other in ALLOWED:
                value, times = float(logits[i, other]), text[:i].count(other)
                if times or other in prompt:
                    penalty = fields.get("repetition_penalty", 1.0)
                    value = value / penalty if value > 0 else value * penalty
                value -= fields.get("frequency_penalty", 0) * times
                value -= fields.get("presence_penalty", 0) * (times > 0)
                values[other] = value / fields["temperature"]
            ranked = sorted(values, key=values.get, reverse=True)[:fields.get("top_k")]
            p = torch.tensor([values[other] for other in ranked]).double().softmax(-1).tolist()
            kept = [other for j, other in enumerate(ranked)
                    if sum(p[:j]) < fields.get("top_p", 1.0)]
            mass = sum(p[:len(kept)])
            total *= p[ranked.index(token_id)] / mass if token_id in kept else 0.0
        table[text] = total
    return table


@pytest.mark.parametrize("fields", CASES, ids=["temperature", "top-p", "top-k"])
def test_drawn_texts_have_the_exact_distribution(checkpoints, noisy, fields):
    """Chi-square over all 81 texts of 4 tokens, of which 3 were guessed. The seeds are fixed, so
    this can't fail by chance; a draft that was accepted too often, or a repair that forgot the
    penalties, moves far more than the limit."""
    prompt, n = [65, 12, 200], 1500
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"], dtype=torch.float32).eval()
    exact = by_hand(model, prompt, fields)
    assert sum(exact.values()) == pytest.approx(1)
    llm = start(checkpoints["qwen3"], num_gpu_blocks_override=200, max_num_seqs=128,
                speculative_config=dict(method="ngram", num_speculative_tokens=3))
    rng = random.Random(1)
    llm.scheduler.propose = llm.drafter.guesser.propose = lambda seq, most: [
        rng.choice(ALLOWED) for _ in range(min(most, 3))]
    llm.drafter.guesser.checked = lambda seq, num_right: None
    params = SamplingParams(n=n, seed=5, max_tokens=4, ignore_eos=True, detokenize=False,
                            allowed_token_ids=ALLOWED, **fields)
    output, = llm.generate(prompt, params, use_tqdm=False)
    seen = Counter(tuple(sample.token_ids) for sample in output.outputs)
    assert all(exact[text] > 0 for text in seen)
    common = [text for text in exact if n * exact[text] >= 5]
    cells = [(seen[text], n * exact[text]) for text in common]
    rest = n - sum(expected for _, expected in cells)
    if rest >= 5:
        cells.append((n - sum(count for count, _ in cells), rest))
    chi_square = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    k = len(cells) - 1
    limit = k * (1 - 2 / (9 * k) + 3.1 * (2 / (9 * k)) ** 0.5) ** 3  # Wilson-Hilferty: p = 0.001
    assert k > 5 and chi_square < limit, (chi_square, limit)
    numbers = count(llm)
    assert 0.1 < numbers["num_accepted_tokens"] / numbers["num_draft_tokens"] < 0.9
    assert len(numbers["num_accepted_tokens_per_pos"]) == 3


# -------------------------------------------------------------- everything at once

GUESSERS = dict(
    ngram=dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
    noisy=dict(method="draft_model", num_speculative_tokens=3),
    other=dict(method="draft_model", num_speculative_tokens=2))


@pytest.mark.parametrize("name, how, max_examples, ranks", [
    ("qwen3", "ngram", 15, 1), ("qwen3", "noisy", 30, 1), ("mistral", "noisy", 15, 1),
    ("mistral", "other", 15, 1), ("qwen3", "ngram", 20, 2), ("qwen3", "noisy", 20, 2)])
def test_random_workloads_with_drafts(checkpoints, references, noisy, name, how, max_examples,
                                      ranks):
    """The engine's random workloads, their engines and their oracles, now with guesses: chunks,
    tiny pools, prefix hits, preemption, priorities, several samples, controls, logprobs, aborts.
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
        fuzz.test_random_workloads_of_the_engine(checkpoints, references, name, numbers,
                                                 max_examples, enough=1)
        used = [llm for (_, which), llm in fuzz.engines.items() if which in numbers]
        total = Counter()
        for llm in used:
            total.update({key: n for key, n in count(llm).items() if isinstance(n, int)})
        assert total["num_draft_tokens"] - total["num_accepted_tokens"] > 10, total
        assert total["num_accepted_tokens"] > 10 or how != "noisy", total
    finally:
        for key in [key for key in fuzz.engines if key[1] in numbers or key[1] == "plain"]:
            fuzz.engines.pop(key).shutdown()
        del fuzz.ENGINES[first:]


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


def test_two_ranks_guess_alike(checkpoints, noisy):
    """The draft model's layers and vocabulary are shared out as well."""
    params = [SamplingParams(temperature=0, max_tokens=8), SamplingParams(seed=1, max_tokens=8)]
    asks = [[5, 6, 7], list(range(40))], params
    asked = dict(method="draft_model", num_speculative_tokens=3, model=str(noisy("qwen3")))
    with start(checkpoints["qwen3"], speculative_config=asked) as llm:
        expected, numbers = told(llm, *asks), count(llm)
    with start(checkpoints["qwen3"], tensor_parallel_size=2, speculative_config=asked) as llm:
        assert told(llm, *asks) == expected and count(llm) == numbers


def test_a_failed_step_is_asked_for_again(engines, monkeypatch):
    llm = engines["draft_model"]
    launch, calls = llm.runner.launch, itertools.count()
    params = SamplingParams(temperature=0, max_tokens=12)
    for fail_at in (3, 7, 9):  # a guess, a check

        def fail(step):
            if next(calls) == fail_at:
                raise RuntimeError("on fire")
            return launch(step)

        calls = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "launch", fail)
            llm.add_request("it", PROMPTS[2], params)
            with pytest.raises(RuntimeError, match="on fire"):
                while True:
                    llm.step()
        while llm.has_unfinished_requests():
            output, = llm.step()
        expected, = engines["none"].generate(PROMPTS[2], params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


# ------------------------------------------------------------------ around it


def test_metrics_in_vllms_names(engines):
    llm = start(speculative_config=NGRAM)
    assert not [m for m in engines["none"].get_metrics() if "spec_decode" in m.name]
    output, = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=30),
                           use_tqdm=False)
    numbers = count(llm)
    assert set(numbers) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens",
                            "num_accepted_tokens_per_pos"}
    per_place = numbers["num_accepted_tokens_per_pos"]
    assert sum(per_place) == numbers["num_accepted_tokens"] and len(per_place) == 5
    assert per_place == sorted(per_place, reverse=True) and per_place[0] <= numbers["num_drafts"]
    assert llm.metrics.num_generation_tokens == 30 == (
        llm.metrics.num_steps + numbers["num_accepted_tokens"])


def test_the_trace_shows_drafts_and_no_recomputation(tmp_path):
    """Positions of wrong drafts are computed a second time, but nothing was taken away."""
    with start(speculative_config=SMALL, trace=str(tmp_path / "run.json")) as llm:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        rows = chrome_trace(llm.trace.stream())["traceEvents"]
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
    (dict(), "method=None is not supported: choose one of ngram, draft_model"),
    (dict(method="eagle", num_speculative_tokens=2), "method='eagle' is not supported"),
    (dict(method=["ngram"], num_speculative_tokens=2), "method=\\['ngram'\\] is not supported"),
    (dict(method="ngram"), "num_speculative_tokens is missing"),
    (dict(NGRAM, num_speculative_tokens=0), "num_speculative_tokens must be a whole number"),
    (dict(NGRAM, num_speculative_tokens=2.5), "at least 1, got 2.5"),
    (dict(NGRAM, prompt_lookup_max=True), "prompt_lookup_max must be a whole number"),
    (dict(NGRAM, prompt_lookup_max=1), "prompt_lookup_min=2 is above prompt_lookup_max=1"),
    (dict(NGRAM, model="x"), "model is nothing that method='ngram' takes: leave it out"),
    (dict(SMALL, prompt_lookup_max=3), "prompt_lookup_max is nothing that method='draft_model'"),
    (dict(method="draft_model", num_speculative_tokens=2), "model is missing: name the folder"),
    (dict(SMALL, model="/no/where"), "speculative_config: model='/no/where'"),
    (dict(SMALL), "has a vocabulary of 4096 tokens, .* one of 260: choose a draft model")])
def test_wrong_settings(qwen3, config, message):
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, device="cpu", speculative_config=config)


def test_engines_and_networks_that_have_no_text(qwen3, checkpoints, tmp_path):
    with pytest.raises(ValueError, match="speculative_config has no effect with runner='pooling'"):
        start(qwen3, runner="pooling", speculative_config=NGRAM)
    folder = shutil.copytree(checkpoints["qwen3-tied"], tmp_path / "embedder")
    write_json(folder / "config.json", architectures=["Qwen3Model"])
    with pytest.raises(ValueError, match="has no LM head, by its architecture Qwen3Model"):
        start(qwen3, speculative_config=dict(SMALL, model=str(folder)))


def test_defaults_of_the_look_up(qwen3):
    def bounds(**given):
        asked = dict(method="ngram", num_speculative_tokens=2, **given)
        config = start(qwen3, speculative_config=asked).config.speculative_config
        return config["prompt_lookup_max"], config["prompt_lookup_min"]

    assert bounds() == (5, 5) and bounds(prompt_lookup_max=3) == (3, 3)
    assert bounds(prompt_lookup_min=2) == (2, 2)
    assert bounds(prompt_lookup_max=3, prompt_lookup_min=1) == (3, 1)


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


def test_the_benchmark_runs(capsys):
    main(["--num-tokens", "8", "--rounds", "1", "--dtype", "float32"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [text, name] for text in ("greedy", "drawn") for name in ("none", "ngram", "draft_model")]
    assert "another text" not in "".join(lines)


def test_the_largest_step_has_drafts_for_all(qwen3):
    """A GPU's cache is what this step leaves: its samples are rows of logits, of which drafts make
    many."""
    llm = start(qwen3, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=12,
                speculative_config=NGRAM)
    launched, launch = [], llm.runner.launch
    llm.runner.launch = lambda step: launched.append(step) or launch(step)
    llm.runner.run_largest_step()
    step, = launched
    assert list(step.num_new_tokens.values()) == [8, 6, 6] and len(step.samples()) == 18


def test_rows_with_guesses_behind_one_beginning_attend_to_it_together(qwen3, references,
                                                                      monkeypatch):
    """Five blocks in common, some tokens of their own, up to five guesses: rows of two to six
    queries are what a group is made for. In a cache of NaN the text is transformers'."""
    cut, grouped = attention._cut_sharing, []

    def spy(*args):
        groups, rows = cut(*args)
        grouped.append(len(rows))
        return groups, rows

    monkeypatch.setattr(attention, "_cut_sharing", spy)
    common = [7, 8, 9, 10] * 20
    prompts = [common + [i, 7, 8] for i in range(20, 24)]
    llm = start(qwen3, speculative_config=NGRAM)
    llm.generate([common], SamplingParams(max_tokens=1), use_tqdm=False)
    for _, text, token_ids, *_ in told(llm, prompts, SamplingParams(temperature=0, max_tokens=20,
                                                                    ignore_eos=True)):
        assert token_ids == references("qwen3", prompts.pop(0), 20)[0]
    in_groups = [n for n in grouped if n]
    assert in_groups[0] == 4 and len(in_groups) > 1  # the prompts' own step, and steps with guesses


def test_the_largest_step_of_the_small_network_is_run_as_well(qwen3, checkpoints):
    """Nothing says that it is the smaller one in everything: a wider MLP may take more memory."""
    llm = start(qwen3, speculative_config=dict(SMALL, model=str(checkpoints["qwen3-tied"])))
    launched, launch = [], llm.runner.launch
    llm.runner.launch = lambda step: launched.append(step) or launch(step)
    llm.runner.run_largest_step()
    assert [step.by_draft_model for step in launched] == [False, True]
    assert launched[0].num_new_tokens == launched[1].num_new_tokens


def test_no_guess_is_worse_for_a_step_without_guesses(qwen3):
    """The draft model is the model. Where no block is left for a guess, or somebody is preempted, a
    row decodes without one, right behind a guess whose KV was never written: that is made up for,
    so whatever is guessed after it is right as well."""
    with start(qwen3, enable_prefix_caching=False, speculative_config=dict(
            SMALL, model=str(qwen3))) as llm:
        propose, turns = llm.scheduler.propose, itertools.count()
        llm.scheduler.propose = lambda seq, most: propose(seq, most) if next(turns) % 2 else []
        llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
                     use_tqdm=False)
        numbers = count(llm)
        assert numbers["num_accepted_tokens"] == numbers["num_draft_tokens"] > 30


@pytest.mark.parametrize("draft, window", [("mistral", 14), ("qwen3-tied", None)])
def test_blocks_are_kept_for_the_network_that_looks_back_furthest(checkpoints, draft, window):
    """Given back too early, they would hold other requests' KV: right text, worse guesses."""
    llm = start(checkpoints["mistral"], speculative_config=dict(
        SMALL, model=str(checkpoints[draft])))
    assert llm.model_config.window == 13 and llm.scheduler.window == window
