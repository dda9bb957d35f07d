"""Speculative decoding: with any drafter, however bad, the text is the same, only sooner.

The oracles are independent of what they check: transformers' greedy text, the same engine without
drafts (drawn tokens, logprobs, stop strings, token for token), distributions computed by hand from
transformers' logits, and a search through the whole text for the n-gram index. Two draft models:
the model itself with noise in its weights, which is right now and then, and another one entirely.
(That wrong drafts leave no trace in blocks and prefix cache is held in test_scheduler_random.)
"""

import itertools
import random
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from guessing import NGRAM, PROMPTS, SMALL, count, start, told
from helpers import sequence
from transformers import AutoModelForCausalLM

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Step
from nanoserve_extras.drafts import guessers
from nanoserve_extras.drafts.guessers import NgramGuesser, NgramIndex, SuffixGuesser
from nanoserve_extras.drafts.speculative import Speculation

# -------------------------------------------------------------------- the rules


def test_the_index_finds_what_a_search_finds():
    """The last earlier occurrence of the longest n-gram that the text ends with, while it grows."""
    rng = random.Random(0)
    for _ in range(60):
        longest = rng.randint(1, 5)
        shortest = rng.randint(1, longest)
        index, text, found = NgramIndex(range(longest, shortest - 1, -1), {}), [], 0
        for _ in range(60):
            text += [rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 7]))]
            expected = None
            for n in range(longest, shortest - 1, -1):
                ends = [end for end in range(n, len(text)) if text[end - n:end] == text[-n:]]
                if ends:
                    expected = text, ends[-1], n
                    break
            assert index.find(text) == expected
            found += expected is not None
        assert found


def test_ngram_guesses_go_round_and_rest_after_a_miss():
    guesser = NgramGuesser(NGRAM)
    seq = sequence("0", [9, 1, 2, 3, 1, 2], SamplingParams())
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
    assert not guesser.indices


def test_suffix_looks_into_earlier_answers_and_compares_more():
    guesser = SuffixGuesser(NGRAM)
    seq = sequence("0", [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams())
    guesser.propose(seq, 5)
    seq.token_ids += [10, 11, 12, 13]
    guesser.forget(seq)
    other, end = (sequence("1", ids, SamplingParams()) for ids in ([9, 2, 3, 4], [9, 8, 10, 11]))
    assert guesser.propose(other, 9) == [5, 6, 7]  # as many as are alike
    assert guesser.propose(end, 9) == [12, 13]
    assert not guesser.propose(sequence("2", [9, 3, 4], SamplingParams()), 9)
    assert all(len(key) <= 4 or key[0] < 9 for key in guesser.follows)


def test_suffix_forgets_when_it_has_read_much(monkeypatch):
    monkeypatch.setattr(guessers, "MOST_NGRAMS", 40)
    guesser = SuffixGuesser(NGRAM)
    for i in range(20):
        seq = sequence(str(i), [i, *range(50, 60)], SamplingParams())
        guesser.propose(seq, 5)
        guesser.forget(seq)
        assert len(guesser.follows) < 80
    assert not guesser.indices


def scheduler(num_blocks: int, **options) -> Scheduler:
    return Scheduler(EngineConfig(model="none", block_size=4, **dict(
        max_num_batched_tokens=16, max_num_seqs=4) | options), num_blocks, most_drafts=16)


def test_drafts_take_only_what_is_left():
    """Not the budget that others need, not the last token, no block that isn't free; and nobody is
    preempted for them."""
    def row(num_blocks: int, max_num_tokens: int = 40, **options) -> list[int]:
        s = scheduler(num_blocks, **options)
        s.hooks.draft.append(lambda seq, most: [7] * min(most, 9))
        seqs = [sequence(str(i), [i, 1, 2], SamplingParams(), i, max_num_tokens=max_num_tokens)
                for i in range(2)]
        for seq in seqs:
            s.running.append(seq)
            seq.row, seq.num_computed_tokens = s.free_rows.pop(), 3
            seq.token_ids.append(5)
            s.blocks.allocate(seq, 4)
        step = s.schedule()
        s.add_drafts(step)
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
    s.hooks.draft.append(lambda seq, most: [7] * min(most, 9))
    s.add(sequence("0", [0, 1, 2], SamplingParams(), max_num_tokens=30))
    s.update(s.schedule(), [3])
    step = s.schedule()
    s.add_drafts(step)
    seq, = step.num_new_tokens
    assert step.num_new_tokens[seq] == 10 and len(seq.block_table) == 4  # positions 3 to 12
    s.update(step, [7, 7, 8, *[7] * 7])
    s.check()
    assert seq.token_ids == [0, 1, 2, 3, 7, 7, 8] and seq.num_computed_tokens == 6
    assert [entry.tokens for entry in s.blocks.cached.values()] == [[0, 1, 2, 3]]


def test_a_guesser_hears_of_its_own_drafts_alone():
    """Those that a grammar forces are right, whatever it would have guessed."""
    told = []
    extra = Speculation(speculative_config=dict(NGRAM))
    extra.kind = lambda asked, engine: SimpleNamespace(
        propose=lambda seq, most: [7, 8], updated=lambda step: None,
        checked=lambda seq, num_right: told.append((seq, num_right)))
    extra.attach(None)
    own, forced = sequence("1", [1]), sequence("2", [1])
    extra.draft(own, 2)
    step = Step(0, drafts={own: [7, 8], forced: [5]}, accepted={own: [7, 9], forced: [5, 6]})
    extra.updated(step, step.accepted)
    assert told == [(own, 1)]


# ------------------------------------------------------------------ the same text


@pytest.fixture(scope="module")
def engines():
    """One engine of the bundled model for each way to guess."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(start(speculative_config=config)) for name, config in dict(
            none=None, ngram=NGRAM, draft_model=SMALL).items()}


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


def goes_round(token_ids, logits):
    """A request's own function: what stood three places before comes again, as a rule."""
    logits[token_ids[-3:-2]] += 6
    return logits


PARAMS = dict(
    greedy=dict(temperature=0),
    function=dict(temperature=0, logits_processors=[goes_round]),
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


def test_in_a_full_step_the_small_network_computes_no_token_more(engines, monkeypatch):
    """A decode beside seven tokens of a prompt: it begins one token earlier only if there is room.
    """
    prompts, params = [PROMPTS[2], PROMPTS[0] * 3], SamplingParams(temperature=0, max_tokens=12)
    with start(speculative_config=SMALL, max_num_batched_tokens=8, max_num_seqs=3) as llm:
        launch, sizes = llm.runner.launch, []
        monkeypatch.setattr(llm.runner, "launch", lambda step: (
            sizes.append(step.num_tokens) or launch(step)))
        assert told(llm, prompts, params) == told(engines["none"], prompts, params)
        assert max(sizes) == 8


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
    from nanoserve.config import RequestOutputKind
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
    llm.extra(Speculation).guesser.propose = lambda seq, most: [
        rng.choice(ALLOWED) for _ in range(min(most, 3))]
    llm.extra(Speculation).guesser.checked = lambda seq, num_right: None
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


def test_a_failed_step_is_asked_for_again(engines, monkeypatch):
    llm = engines["draft_model"]
    launch = llm.runner.launch
    params = SamplingParams(temperature=0, max_tokens=12)
    for fail_at in (3, 7, 9):  # a guess, a check
        calls = itertools.count()

        def fail(step, calls=calls, fail_at=fail_at):
            if next(calls) == fail_at:
                raise RuntimeError("on fire")
            return launch(step)

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


def test_metrics_in_vllms_names(engines):
    llm = start(speculative_config=NGRAM)
    assert not [m for m in engines["none"].get_metrics() if "spec_decode" in m.name]
    output, = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=30),
                           use_tqdm=False)
    numbers = count(llm)
    assert output.metrics.num_draft_tokens == numbers["num_draft_tokens"]
    assert output.metrics.num_accepted_tokens == numbers["num_accepted_tokens"]
    per_place = numbers.pop("num_accepted_tokens_per_pos")
    assert set(numbers) == {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
    assert sum(per_place) == numbers["num_accepted_tokens"] and len(per_place) == 5
    assert llm.metrics.num_generation_tokens == 30 == (
        llm.metrics.num_steps + numbers["num_accepted_tokens"])
