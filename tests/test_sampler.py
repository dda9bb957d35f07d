"""Sampling is exact, and a seeded request draws the same numbers whatever happens around it.

Oracles: SplitMix64 in plain Python integers and its published outputs; the filters written once
more row by row in plain Python; the inverse CDF as a loop over exact sums; the chi-square
distribution's 99.9% points from a printed table. Seeds are fixed, so no test is a gamble: with a
correct sampler they pass always, and 1 in 1,000 seeds would have had to be chosen anew.
"""

import math
import random

import numpy as np
import pytest
import torch
from conftest import Reference, sampling_batch

from nanoserve import LLM, sampler
from nanoserve.sampler import SamplingInputs, apply_filters, draw, likeliest, put, sample
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Sequence

MASK = 2 ** 64 - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15
# Degrees of freedom -> the value that chi-square exceeds once in 1,000 times.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12,
            9: 27.88, 10: 29.59, 11: 31.26, 15: 37.70, 63: 103.44}


def assert_distributed(tokens: np.ndarray, probs: list[float]) -> None:
    """Pearson's test: counts of `tokens` against n * p; a token without probability never comes."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs)
    expected = len(tokens) * np.array(probs)
    possible = expected > 0
    assert not counts[~possible].any(), f"impossible tokens {np.nonzero(counts[~possible])}"
    assert expected[possible].min() >= 5, "too few draws for the test to mean anything"
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CRITICAL[possible.sum() - 1], f"chi-square {chi_square:.1f}"


# ------------------------------------------------------- the random numbers


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """The engine's, for seeds of 64 bits without a sign."""
    bits = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
    return sampler.uniforms(bits, torch.tensor(positions)).numpy()


def splitmix64(state: int) -> int:
    """The output function in unbounded integers, masked by hand."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def test_uniforms_are_the_published_numbers_of_splitmix64():
    """Seed 1234567's first five outputs, as Rosetta Code lists them; the top 40 bits are used."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423,
                 4593380528125082431, 16408922859458223821]
    ours = uniforms([1234567] * 5, [1, 2, 3, 4, 5])
    assert ours.tolist() == [(number >> 24) / 2 ** 40 for number in published]


def test_uniforms_wrap_like_64_bit_integers():
    rng = random.Random(0)
    seeds = [0, 1, MASK, MASK, 2 ** 63] + [rng.randrange(2 ** 64) for _ in range(500)]
    positions = [0, MASK >> 33, 1, 2 ** 31, 7] + [rng.randrange(2 ** 31) for _ in range(500)]
    expected = [(splitmix64(seed + at * GOLDEN_RATIO & MASK) >> 24) / 2 ** 40
                for seed, at in zip(seeds, positions, strict=True)]
    got = uniforms(seeds, positions)
    assert got.tolist() == expected
    assert got.dtype == np.float64 and got.min() >= 0 and got.max() < 1


@pytest.mark.parametrize("stream", ["positions of one seed", "seeds at one position"])
def test_uniforms_are_even_and_independent(stream):
    """16 equal bins, and pairs of neighbours in 8 x 8 bins: neither direction shows a pattern."""
    n = 32000
    counter = list(range(1, n + 1))
    u = uniforms([42] * n, counter) if "positions" in stream else uniforms(counter, [42] * n)
    assert_distributed((u * 16).astype(int), [1 / 16] * 16)
    eighths = (u * 8).astype(int)
    assert_distributed(eighths[::2] * 8 + eighths[1::2], [1 / 64] * 64)


# --------------------------------------------------------------- the filters


def reference_probs(logits: list[float], temperature: float = 1.0, top_k: int = 0,
                    top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """One row, one rule after the other: temperature, min-p, top-k, top-p."""
    def softmax(values):
        exps = [math.exp(v - max(values)) for v in values]
        return [e / sum(exps) for e in exps]

    scaled = [value / temperature for value in logits]
    p = softmax(scaled)
    keep = [i for i in range(len(p)) if p[i] >= min_p * max(p)]
    if top_k > 0:
        kth = sorted((scaled[i] for i in keep), reverse=True)[min(top_k, len(keep)) - 1]
        keep = [i for i in keep if scaled[i] >= kth]  # equal ones at the edge all stay
    p = dict(zip(keep, softmax([scaled[i] for i in keep]), strict=True))
    mass, chosen = 0.0, []
    for i in sorted(keep, key=lambda i: -p[i]):
        if mass >= top_p:
            break
        chosen.append(i)  # the token that crosses top_p is among them
        mass += p[i]
    kept = softmax([scaled[i] for i in chosen])
    result = [0.0] * len(logits)
    for i, probability in zip(chosen, kept, strict=True):
        result[i] = probability
    return result


def inputs_for(rows: list[SamplingParams], vocab_size: int, *, seeds=None,
               positions=None) -> SamplingInputs:
    """Sampling inputs of rows that are about to sample the token at `positions`."""
    seqs = []
    for i, params in enumerate(rows):
        seq = Sequence(str(i), [0], params, seed=seeds[i] if seeds else i)
        seq.num_unknown_tokens = positions[i] if positions else 1  # num_tokens - 1 is the position
        seqs.append(seq)
    return SamplingInputs.of(seqs, sampling_batch(seqs), vocab_size)


def engine_probs(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """One row through the engine's filters, temperature included."""
    inputs = inputs_for([params], len(logits))
    scaled = logits.float()[None] / params.temperature
    return apply_filters(scaled, inputs).softmax(-1)[0].tolist()


BY_HAND = {
    # .4 .3 .2 .1: before the tokens lie 0 .4 .7 .9
    "top-p": ([.1, .2, .3, .4], dict(top_p=.6), [0, 0, 3 / 7, 4 / 7]),
    # top-p counts what top-k has left: .5 .3 become .625 .375, and the first alone reaches .6
    "top-k, then top-p": ([.1, .5, .3, .1], dict(top_k=2, top_p=.6), [0, 1, 0, 0]),
    # min-p .25 removes both .1: .625 .375 again
    "min-p, then top-p": ([.1, .5, .3, .1], dict(min_p=.25, top_p=.6), [0, 1, 0, 0]),
    # min-p compares with the likeliest: .5 * .6 = .3 stays (just), .19 does not
    "min-p": ([.19, .5, .3001, .0099], dict(min_p=.6), [0, .5 / .8001, .3001 / .8001, 0]),
    # at temperature 2 probabilities become their roots: 1/16 : 1 is 1/4 : 1, above min_p = .2
    "temperature, then min-p": ([1 / 18, 16 / 18, 1 / 18], dict(temperature=2., min_p=.2),
                                [1 / 6, 4 / 6, 1 / 6]),
    # and .8 .1 .1 at temperature .5 are squares: .64 .01 .01, so top-p .9 takes the first only
    "temperature, then top-p": ([.8, .1, .1], dict(temperature=.5, top_p=.9), [1, 0, 0]),
    "top-k keeps ties": ([.3, .2, .2, .2, .1], dict(top_k=2), [3 / 9, 2 / 9, 2 / 9, 2 / 9, 0]),
    "a tiny top-p keeps one": ([.4, .6], dict(top_p=1e-9), [0, 1]),
    "min-p of 1 keeps the likeliest": ([.2, .4, .4], dict(min_p=1.0), [0, .5, .5]),
    "top-k above the vocabulary": ([.4, .6], dict(top_k=100), [.4, .6]),
    "top-k of -1 is off": ([.4, .6], dict(top_k=-1), [.4, .6]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_filters_by_hand(name):
    """Worked out on paper; the plain reference of the next tests has to agree, too."""
    probs, filters, expected = BY_HAND[name]
    logits = [math.log(p) for p in probs]
    assert engine_probs(torch.tensor(logits), SamplingParams(**filters)) == pytest.approx(
        expected, abs=1e-6)
    assert reference_probs(logits, **filters) == pytest.approx(expected, abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_it():
    """A top-p filter dropped the token that crosses p (nano-vllm #196, #260): of .1 .2 .3 .4 with
    p = .6 only .4 was left, although .3 belongs to the smallest set that holds .6, too."""
    logits = torch.tensor([.1, .2, .3, .4]).log().repeat(2000, 1)
    rows = [SamplingParams(top_p=.6)] * 2000
    tokens = sample(logits, inputs_for(rows, 4)).token_ids.numpy()
    assert_distributed(tokens, [0, 0, 3 / 7, 4 / 7])


COMBINATIONS = [
    dict(), dict(temperature=.5), dict(temperature=2.), dict(top_k=1), dict(top_k=7),
    dict(top_k=1000), dict(top_p=.3), dict(top_p=.9), dict(min_p=.02), dict(min_p=.5),
    dict(temperature=.7, top_k=12, top_p=.8), dict(temperature=1.5, min_p=.05, top_p=.7),
    dict(min_p=.01, top_k=20), dict(temperature=1.3, min_p=.03, top_k=9, top_p=.85),
]


@pytest.mark.parametrize("vocab_size", [1, 2, 13, 64, 260])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_filters_equal_the_plain_reference(vocab_size, dtype):
    """All combinations in one batch, so that rows which use a filter stand beside rows which don't.
    bfloat16 has few different logits: there the ties at the edge of top-k are many."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [SamplingParams(**kinds) for kinds in COMBINATIONS]
    logits = (3 * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    inputs = inputs_for(rows, vocab_size)
    scaled = logits.float() / inputs.batch.temperature[:, None]
    got = apply_filters(scaled, inputs).softmax(-1).tolist()
    for row, kinds, ours in zip(logits.tolist(), COMBINATIONS, got, strict=True):
        theirs = reference_probs(row, **kinds)
        # Which of equal tokens the nucleus ends with is nobody's promise: compare sorted.
        assert sorted(ours) == pytest.approx(sorted(theirs), abs=2e-6), kinds
        if len(set(row)) == vocab_size:
            assert ours == pytest.approx(theirs, abs=2e-6), kinds


# ------------------------------------------------------------------ the draw


DRAWS = 12000
PROBS = [.02, .3, .05, .08, 0., .15, .25, .01, .04, .1]
CASES = [dict(), dict(temperature=.6), dict(temperature=1.7), dict(top_k=4), dict(top_p=.75),
         dict(min_p=.2), dict(temperature=.8, top_k=6), dict(top_k=5, top_p=.8),
         dict(temperature=1.4, min_p=.1, top_k=7, top_p=.9)]


@pytest.mark.parametrize("stream", ["positions", "seeds"])
@pytest.mark.parametrize("kinds", CASES, ids=str)
def test_samples_follow_the_exact_distribution(kinds, stream):
    """12,000 rows in one call: one seed at consecutive positions, as a long text draws them, or
    consecutive seeds at one position, as many requests do."""
    logits = [math.log(p) if p else -1e9 for p in PROBS]
    counter = list(range(1, DRAWS + 1))
    where = (dict(seeds=[2024] * DRAWS, positions=counter) if stream == "positions"
             else dict(seeds=counter, positions=[17] * DRAWS))
    inputs = inputs_for([SamplingParams(**kinds)] * DRAWS, len(PROBS), **where)
    tokens = sample(torch.tensor(logits).expand(DRAWS, -1), inputs).token_ids.numpy()
    assert_distributed(tokens, reference_probs(logits, **kinds))


def plain_draw(weights: list[int], u: float) -> int:
    """The first token whose cumulated weight exceeds u times the total, in exact integers."""
    numerator = int(u * 2 ** 40)  # u is a multiple of 2^-40
    cumulated, total = 0, sum(weights)
    for token, weight in enumerate(weights):
        cumulated += weight
        if cumulated * 2 ** 40 > numerator * total:
            return token
    raise AssertionError("u must be below 1")


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64, 260, 777, 1024, 1536])
def test_the_draw_is_the_inverse_cdf(vocab_size):
    """Probabilities that are multiples of 1/4096 add up without rounding, in any order and in any
    chunks: the two-level search must equal the plain loop, at every boundary too."""
    rng = random.Random(vocab_size)
    rows, us = [], []
    for _ in range(40):
        weights = [0] * vocab_size
        for _ in range(4096):  # crowded in a few places: many tokens and whole chunks have nothing
            weights[int(rng.random() ** 4 * vocab_size)] += 1
        rng.shuffle(weights)
        boundary = sum(weights[:rng.randrange(vocab_size + 1)]) / 4096
        for u in (0.0, 2.0 ** -40, 1 - 2.0 ** -40, rng.randrange(2 ** 40) / 2 ** 40,
                  boundary % 1, max(boundary - 2.0 ** -40, 0)):
            rows.append(weights)
            us.append(u)
    probs = torch.tensor(rows, dtype=torch.float32) / 4096
    got = draw(probs, torch.tensor(us, dtype=torch.float64)).tolist()
    assert got == [plain_draw(weights, u) for weights, u in zip(rows, us, strict=True)]


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 260, 1000, 4096, 151935, 151936])
def test_a_token_without_probability_is_never_drawn(vocab_size):
    """Softmax outputs that do not add up to 1 exactly, with -inf in most places, at the beginning
    and the end above all, and numbers from the edges of [0, 1)."""
    generator = torch.Generator().manual_seed(1)
    s = 12
    logits = 4 * torch.randn(s, vocab_size, generator=generator)
    logits[torch.rand(s, vocab_size, generator=generator) < .9] = float("-inf")
    logits[0, vocab_size // 3:] = logits[1, :-(vocab_size // 3) or None] = float("-inf")
    logits[2] = float("-inf")  # row 2: one token only
    logits[torch.arange(s), torch.randint(vocab_size, (s,), generator=generator)] = 1.0
    probs = logits.softmax(-1)
    for u in (0.0, 2.0 ** -40, .5, 1 - 2.0 ** -39, 1 - 2.0 ** -40):
        tokens = draw(probs, torch.full((s,), u, dtype=torch.float64))
        assert (probs.gather(-1, tokens[:, None]) > 0).all(), u
    assert (draw(probs, torch.zeros(s, dtype=torch.float64)) == (probs > 0).int().argmax(-1)).all()


def in_three_floats(x: float) -> list[float]:
    """A float64 as a sum of float32s, exactly: 53 bits are 24 + 24 + 5."""
    parts = []
    for _ in range(3):
        parts.append(float(np.float32(x)))
        x -= parts[-1]
    assert x == 0
    return parts


def test_rounding_between_the_two_levels_stays_in_the_chunk():
    """A chunk's sum, added up in the order that is fastest, can exceed its tokens' running sum by a
    last bit. A target in between belongs to the end of that chunk, not to whatever comes next."""
    for seed in range(1000):
        # Over 20 orders of magnitude, as in a softmax: numbers alike would add up without rounding.
        chunk = (10 * torch.randn(512, generator=torch.Generator().manual_seed(seed))).exp()
        added = float(chunk.sum(dtype=torch.float64))
        running = float(chunk.double().cumsum(-1)[-1])
        if added > running:
            break
    else:
        pytest.skip("here both sums are added up in the same order")
    probs = torch.zeros(1, 1024)
    probs[0, :512] = chunk
    probs[0, 600:603] = torch.tensor(in_three_floats(2 * running - added))
    # The total is now 2 * running: u = 1/2 aims at `running`, just below the first chunk's sum.
    assert int(draw(probs, torch.tensor([.5], dtype=torch.float64))) < 512


def test_a_large_vocabulary_is_drawn_from_evenly():
    """151,936 equal tokens (Qwen's vocabulary) in 16 stretches: no chunk is preferred."""
    n, vocab_size = 1000, 151936
    probs = torch.full((1, vocab_size), 1 / vocab_size).expand(200, -1).contiguous()
    u = torch.from_numpy(uniforms([7] * n, list(range(n))))
    tokens = torch.cat([draw(probs, part) for part in u.split(200)]).numpy()
    assert_distributed(tokens // (vocab_size // 16), [1 / 16] * 16)


# ----------------------------------------------------------------- the batch


def test_greedy_rows_stand_beside_sampled_ones():
    """A mixed batch: greedy rows take the argmax (the first of equals), sampled rows draw what they
    draw alone, and the logits are left as they were."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 50, generator=generator)
    logits[0, 11] = logits[0, 30] = 9.0
    logits[6, 5], logits[6, 7] = 8.0, 8.0
    rows = [SamplingParams(temperature=0), SamplingParams(temperature=.8, top_k=3),
            SamplingParams(temperature=1.2), SamplingParams(temperature=0, top_p=.5, top_k=2),
            SamplingParams(min_p=.3), SamplingParams(top_p=.4)] * 10
    before = logits.clone()
    together = sample(logits, inputs_for(rows, 50)).token_ids.tolist()
    assert torch.equal(logits, before)
    assert together[0] == 11 and together[6] == 5
    for i, params in enumerate(rows):
        alone = sample(logits[i:i + 1], inputs_for([params], 50, seeds=[i])).token_ids
        assert together[i] == int(alone)
        if params.temperature == 0:
            assert together[i] == max(range(50), key=lambda t: logits[i, t])


def test_bfloat16_logits_are_sampled_in_float32():
    """Probabilities of 8 bits would be off by a percent: the draw must see float32."""
    logits = torch.tensor([.05, .1, .15, .2, .5]).log().to(torch.bfloat16)
    rows = [SamplingParams(temperature=.7)] * DRAWS
    inputs = inputs_for(rows, 5)
    tokens = sample(logits.expand(DRAWS, -1), inputs).token_ids
    assert torch.equal(tokens, sample(logits.float().expand(DRAWS, -1), inputs).token_ids)
    assert_distributed(tokens.numpy(), reference_probs(logits.tolist(), temperature=.7))


def test_what_no_row_asks_for_costs_nothing():
    greedy = inputs_for([SamplingParams(temperature=0, top_k=5, top_p=.5)] * 3, 50)
    assert greedy == SamplingInputs(greedy.batch) and greedy.all_greedy
    plain = inputs_for([SamplingParams(top_k=50), SamplingParams(top_k=-1)], 50)
    assert not plain.any_filters and not plain.all_greedy


def test_a_step_that_samples_nothing_is_legal():
    """A step of nothing but unfinished chunks has no row to sample."""
    assert sample(torch.empty(0, 50), inputs_for([], 50)).tolist() == ([], {}, [])


# ---------------------------------------------------------------- the engine


MAX_TOKENS = 40
SEEDED = [SamplingParams(seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, **kinds)
          for seed, kinds in [(1, {}), (2, dict(temperature=.8, top_k=20)), (2, dict(top_p=.9)),
                              (0, dict(min_p=.05)), (-3, dict(temperature=1.3))]]


def prompt(i: int) -> list[int]:
    return random.Random(i).choices(range(256), k=18 + i)


@pytest.fixture(scope="module")
def alone(qwen3) -> list[list[int]]:
    """Each seeded request in an engine of its own."""
    texts = []
    for i, params in enumerate(SEEDED):
        with LLM(qwen3, num_gpu_blocks_override=16) as llm:
            [out] = llm.generate(prompt(i), params, use_tqdm=False)
        texts.append(out.outputs[0].token_ids)
    return texts


SURROUNDINGS = {
    "a batch": dict(),
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=7),
    "a token a step": dict(max_num_batched_tokens=1),
    "overlap": dict(async_scheduling=True),
    "a tiny pool": dict(num_gpu_blocks_override=9),
    "a tiny pool, chunks, overlap": dict(num_gpu_blocks_override=9, max_num_batched_tokens=16,
                                         max_num_seqs=16, async_scheduling=True),
    "no prefix cache": dict(enable_prefix_caching=False, seed=99),
}


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_a_seeded_request_draws_the_same_whatever_surrounds_it(qwen3, alone, where):
    """Only seed and position decide: not the batch, chunks, preemption, overlap or engine seed."""
    llm = LLM(qwen3, **dict(num_gpu_blocks_override=64) | SURROUNDINGS[where])
    steps, schedule = [], llm.scheduler.schedule
    llm.scheduler.schedule = lambda: steps.append(schedule()) or steps[-1]
    unseeded = SamplingParams(max_tokens=25, temperature=1.5)
    outs = llm.generate(
        [prompt(50), *[prompt(i) for i in range(5)], prompt(51)], [unseeded, *SEEDED, unseeded],
        use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs[1:-1]] == alone
    assert any(step.preempted for step in steps) == ("tiny pool" in where)


def test_different_seeds_and_samples_differ(qwen3):
    """Samples of one request, requests without a seed, and other seeds: all draw on their own."""
    llm = LLM(qwen3, num_gpu_blocks_override=64)
    params = [SamplingParams(n=4, seed=5), SamplingParams(seed=6), SamplingParams(),
              SamplingParams(n=3), SamplingParams()]
    outs = llm.generate([prompt(0)] * 5, params, use_tqdm=False)
    texts = [tuple(sample.token_ids) for out in outs for sample in out.outputs]
    assert len(texts) == len(set(texts)) == 10


def test_the_engine_seed_fixes_everything(qwen3):
    """Requests without a seed: the same engine seed gives the same texts, another gives others."""
    def texts(seed: int) -> list[list[int]]:
        llm = LLM(qwen3, num_gpu_blocks_override=64, seed=seed)
        outs = llm.generate([prompt(0), prompt(1)], SamplingParams(n=2), use_tqdm=False)
        return [sample.token_ids for out in outs for sample in out.outputs]

    assert texts(1) == texts(1)
    assert all(one != other for one, other in zip(texts(1), texts(2), strict=True))


def test_samples_of_a_model_follow_its_probabilities(qwen3):
    """End to end: 1,000 samples of one next token against transformers' logits, filtered by the
    plain reference. Samples that shared a random number would be far off."""
    kinds = dict(temperature=1.5, top_k=9, top_p=.95)
    llm = LLM(qwen3, num_gpu_blocks_override=256, max_num_seqs=128)
    params = SamplingParams(n=1000, max_tokens=1, seed=0, ignore_eos=True, **kinds)
    [out] = llm.generate(prompt(3), params, use_tqdm=False)
    with torch.no_grad():
        logits = Reference(qwen3).model(torch.tensor([prompt(3)])).logits[0, -1]
    tokens = np.array([sample.token_ids[0] for sample in out.outputs])
    assert_distributed(tokens, reference_probs(logits.tolist(), **kinds))


def test_sampling_never_waits_for_the_device(monkeypatch):
    """Asking a tensor for a value waits for the device, and a step must not: which rows use which
    filter is known on the host."""
    params = [SamplingParams(temperature=0), SamplingParams(top_k=3, top_p=.9, min_p=.1),
              SamplingParams(top_p=.5), SamplingParams(top_k=7),
              SamplingParams(repetition_penalty=1.5, frequency_penalty=1, presence_penalty=1),
              SamplingParams(allowed_token_ids=[4, 5], logit_bias={5: 1}, logprobs=3),
              SamplingParams(temperature=0, min_tokens=3, bad_words=["a"], logprobs=0)]
    seqs = [Sequence(str(i), [1, 2], p, num_unknown_tokens=1, late_ids=frozenset([7]),
                     bad_word_ids=[[3]] if p.bad_words else []) for i, p in enumerate(params)]

    def waits(*args, **kinds):
        raise AssertionError("this waits for the device")

    batch = sampling_batch(seqs)
    for name in ("item", "tolist", "nonzero", "__int__", "__float__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    output = sample(torch.randn(7, 64), SamplingInputs.of(seqs, batch, 64))
    assert (output.token_ids.shape, output.logprobs.top_ids.shape) == ((7,), (2, 3))


def test_what_goes_to_a_gpu_is_pinned(monkeypatch):
    """Penalties of 256 rows are megabytes; from ordinary memory their copy waits for the device."""
    log = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: log.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **kinds: log.append(kinds) or self)
    put([1, 2], torch.int64, device=torch.device("cuda"))
    assert log == ["pinned", dict(non_blocking=True)]


def test_a_top_p_that_float32_rounds_to_zero_keeps_the_likeliest():
    """1e-46 is a legal top_p and 0 in float32: every token was masked, and NaN chose the last."""
    params = SamplingParams(top_p=1e-46)
    seqs = [Sequence("a", [1], params, num_unknown_tokens=1, seed=s) for s in range(20)]
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    tokens = sample(logits, SamplingInputs.of(seqs, sampling_batch(seqs), 64)).token_ids
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 96, 1000, 1024, 4096 + 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_likeliest_is_the_first_of_the_highest(vocab_size, dtype):
    """Python's own max, which takes the first, is the oracle: there are few values and many ties,
    everything may be excluded, and infinities are numbers."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (40, vocab_size), generator=generator).to(dtype)
    logits[1] = float("-inf")
    logits[2, vocab_size // 2] = float("inf")
    logits[3, :-1] = float("-inf")
    expected = [max(range(vocab_size), key=row.__getitem__) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected
    assert likeliest(logits[:, :vocab_size]).dtype == torch.int64
    assert likeliest(logits[::2]).tolist() == expected[::2]
    assert likeliest(logits[:0]).tolist() == []


def test_the_likeliest_of_nans_is_a_token():
    """An overflow in one request must not end the others'."""
    logits = torch.zeros(3, 256)
    logits[0] = float("nan")
    logits[1, 100], logits[2, 7] = float("nan"), 1
    tokens = likeliest(logits).tolist()
    assert tokens[2] == 7 and all(0 <= token < 256 for token in tokens)
