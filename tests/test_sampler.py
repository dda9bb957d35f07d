"""Sampling is exact: the random numbers, the filters, and what is drawn.

Oracles: SplitMix64 in plain Python integers and its published outputs; the filters written once
more row by row in plain Python; the inverse CDF as a loop over exact sums; the chi-square
distribution's 99.9% points from a printed table. Seeds are fixed, so no test is a gamble: with a
correct sampler they pass always, and 1 in 1,000 seeds would have had to be chosen anew.

Filters and draws are tested in `ops` and in its compiled twin, which both use an inverse CDF. That
of the Triton kernels, which use Gumbel noise, has tests of its own.
"""

import math
import random
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import sample_logits, sampling_inputs, sampling_step
from helpers import sequence
from plain_sampling import assert_distributed, reference_probs

from nanoserve import ops
from nanoserve.config import SamplingParams
from nanoserve.sampler import SamplingInputs, put
from nanoserve.self_test import load_backend
from nanoserve.sequence import Sequence

MASK = 2 ** 64 - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15


TWINS = ["torch", "cpu"]  # the specification, and what is compiled from it


def found(name: str) -> ModuleType | None:
    """Where there is a compiler."""
    try:
        return load_backend(name)
    except ImportError:
        return None


@pytest.fixture(params=TWINS)
def twin(request):
    return found(request.param) or pytest.skip("needs a compiler")


# ------------------------------------------------------- the random numbers


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """The engine's, for seeds of 64 bits without a sign."""
    bits = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
    return ops.uniforms(bits, torch.tensor(positions)).numpy()


def splitmix64(state: int) -> int:
    """The output function in unbounded integers, masked by hand."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def seed_for(u: float) -> int:
    """The seed whose number at position 0 is u, a multiple of 2^-40: each step of SplitMix64
    backwards. What was shifted by n is shifted out again a few times over."""
    state = int(u * 2 ** 40) << 24
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = state
        for _ in range(64 // shift):
            unshifted = state ^ (unshifted >> shift)
        state = unshifted * pow(factor, -1, 2 ** 64) & MASK
    return state


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


# --------------------------------------------------------------- the filters


def asking(rows: list[SamplingParams], *, seeds=None, positions=None) -> list[Sequence]:
    """Sequences that are about to sample the token at `positions`."""
    seqs = []
    for i, params in enumerate(rows):
        seq = sequence(str(i), [0], params, seed=seeds[i] if seeds else i)
        seq.num_unknown_tokens = positions[i] if positions else 1  # num_tokens - 1 is the position
        seqs.append(seq)
    return seqs


def engine_probs(twin, logits: torch.Tensor, rows: list[SamplingParams]) -> list[list[float]]:
    """Rows through the engine's filters, temperature included."""
    _, batch = sampling_step(asking(rows))
    lowest, last_ids = twin.thresholds(logits, batch.temperature, batch.top_k, batch.top_p,
                                       batch.min_p)
    scaled, ids = logits.float() / batch.temperature[:, None], torch.arange(logits.shape[1])
    at_edge = (scaled == lowest[:, None]) & (ids <= last_ids[:, None])
    keep = (scaled > lowest[:, None]) | at_edge
    return scaled.masked_fill(~keep, -math.inf).softmax(-1).tolist()


BY_HAND = {
    # .4 .3 .2 .1: before the tokens lie 0 .4 .7 .9. The one that crosses p belongs to the smallest
    # set that holds p, and was dropped (nano-vllm #196, #260).
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
    # 1e-46 is 0 in float32: every token was masked, and NaN chose the last
    "a tiny top-p keeps one": ([.6, .4], dict(top_p=1e-46), [1, 0]),
    "min-p of 1 keeps the likeliest": ([.2, .4, .4], dict(min_p=1.0), [0, .5, .5]),
    "top-k above the vocabulary": ([.4, .6], dict(top_k=100), [.4, .6]),
    "top-k of -1 is off": ([.4, .6], dict(top_k=-1), [.4, .6]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_filters_by_hand(twin, name):
    """Worked out on paper; the plain reference of the next tests has to agree, too."""
    probs, filters, expected = BY_HAND[name]
    logits = [math.log(p) for p in probs]
    got, = engine_probs(twin, torch.tensor([logits]), [SamplingParams(**filters)])
    assert got == pytest.approx(expected, abs=1e-6)
    assert reference_probs(logits, **filters) == pytest.approx(expected, abs=1e-6)


COMBINATIONS = [
    dict(), dict(temperature=.5), dict(temperature=2.), dict(top_k=1), dict(top_k=7),
    dict(top_k=1000), dict(top_p=.3), dict(top_p=.9), dict(min_p=.02), dict(min_p=.5),
    dict(temperature=.7, top_k=12, top_p=.8), dict(temperature=1.5, min_p=.05, top_p=.7),
    dict(min_p=.01, top_k=20), dict(temperature=1.3, min_p=.03, top_k=9, top_p=.85),
]


@pytest.mark.parametrize("vocab_size", [1, 2, 13, 64, 260, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_filters_equal_the_plain_reference(twin, vocab_size, dtype):
    """All combinations in one batch, so that rows which use a filter stand beside rows which don't.
    bfloat16 has few different logits: there the ties at the edge of top-k are many."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [SamplingParams(**kinds) for kinds in COMBINATIONS]
    logits = (3 * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    got = engine_probs(twin, logits, rows)
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


@pytest.mark.parametrize("kinds, stream", [
    ({}, "seeds"), *[(kinds, ("positions", "seeds")[i % 2]) for i, kinds in enumerate(CASES)]],
    ids=str)
def test_samples_follow_the_exact_distribution(kinds, stream):
    """12,000 rows in one call: one seed at consecutive positions, as a long text draws them, or
    consecutive seeds at one position, as many requests do. (To make the rows takes longest, so a
    filter has one of the two.)"""
    logits = [math.log(p) if p else -1e9 for p in PROBS]
    counter = list(range(1, DRAWS + 1))
    where = (dict(seeds=[2024] * DRAWS, positions=counter) if stream == "positions"
             else dict(seeds=counter, positions=[17] * DRAWS))
    seqs = asking([SamplingParams(**kinds)] * DRAWS, **where)
    for twin in filter(None, map(found, TWINS)):
        tokens = sample_logits(torch.tensor([logits] * DRAWS), seqs, twin).token_ids.numpy()
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


def drawn(twin, logits: torch.Tensor, us: list[float]) -> list[int]:
    """A token a row, at temperature 1, where the rows' random numbers are `us`."""
    seeds = torch.from_numpy(np.array([seed_for(u) for u in us], dtype=np.uint64).view(np.int64))
    positions = torch.zeros(len(us), dtype=torch.int64)
    assert ops.uniforms(seeds, positions).tolist() == us
    return twin.sample_tokens(logits, torch.ones(len(us)), seeds, positions).tolist()


EDGES = [0.0, 2.0 ** -40, 1 - 2.0 ** -40]


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64, 260, 777, 1024, 1536, 151936])
def test_the_draw_is_the_inverse_cdf(twin, vocab_size):
    """Even rows, in which 1, 2, 4, ... tokens are possible, add up without rounding, in any order
    and in any parts: the draw equals the plain loop, at every boundary too. So does it in uneven
    ones, but for numbers that lie on a boundary up to rounding."""
    rng = random.Random(vocab_size)
    rows, us = [], []
    for _ in range(40 if vocab_size < 2000 else 2):  # the last is Qwen's vocabulary
        weights = [0] * vocab_size
        for _ in range(4096):  # crowded in a few places: many tokens and whole parts have nothing
            weights[int(rng.random() ** 4 * vocab_size)] += 1
        rng.shuffle(weights)
        even = [0] * vocab_size
        possible = 2 ** rng.randrange(vocab_size.bit_length())
        for token in rng.sample(range(vocab_size), possible):
            even[token] = 1
        boundary = sum(even[:rng.randrange(vocab_size + 1)]) / possible
        somewhere = rng.randrange(2 ** 40) / 2 ** 40
        for row, u in [(weights, u) for u in (*EDGES, somewhere)] + [
                (even, u) for u in (*EDGES, boundary % 1, max(boundary - 2.0 ** -40, 0))]:
            rows.append(row)
            us.append(u)
    got = drawn(twin, torch.tensor(rows, dtype=torch.float32).log(), us)
    assert got == [plain_draw(row, u) for row, u in zip(rows, us, strict=True)]


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 260, 1000, 4096, 151935, 151936])
def test_a_token_without_probability_is_never_drawn(twin, vocab_size):
    """Softmax outputs that do not add up to 1 exactly, with -inf in most places, at the beginning
    and the end above all, and numbers from the edges of [0, 1)."""
    generator = torch.Generator().manual_seed(1)
    s = 12
    logits = 4 * torch.randn(s, vocab_size, generator=generator)
    logits[torch.rand(s, vocab_size, generator=generator) < .9] = -math.inf
    logits[0, vocab_size // 3:] = logits[1, :-(vocab_size // 3) or None] = -math.inf
    logits[2] = -math.inf  # row 2: one token only
    logits[torch.arange(s), torch.randint(vocab_size, (s,), generator=generator)] = 1.0
    for u in (*EDGES, .5, 1 - 2.0 ** -39):
        tokens = torch.tensor(drawn(twin, logits, [u] * s))
        assert (logits.gather(-1, tokens[:, None]) > -math.inf).all(), u
    assert drawn(twin, logits, [0.0] * s) == (logits > -math.inf).int().argmax(-1).tolist()


# ----------------------------------------------------------------- the batch


def test_greedy_rows_stand_beside_sampled_ones(twin):
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
    together = sample_logits(logits, asking(rows), twin).token_ids.tolist()
    assert torch.equal(logits, before)
    assert together[0] == 11 and together[6] == 5
    for i, params in enumerate(rows):
        alone = sample_logits(logits[i:i + 1], asking([params], seeds=[i]), twin).token_ids
        assert together[i] == int(alone)
        if params.temperature == 0:
            assert together[i] == max(range(50), key=lambda t: logits[i, t])


def test_bfloat16_logits_are_sampled_in_float32(twin):
    """Probabilities of 8 bits would be off by a percent: the draw must see float32."""
    logits = torch.tensor([.05, .1, .15, .2, .5]).log().to(torch.bfloat16)
    rows = [SamplingParams(temperature=.7)] * DRAWS
    seqs, all_rows = asking(rows), logits.repeat(DRAWS, 1)
    tokens = sample_logits(all_rows, seqs, twin).token_ids
    assert torch.equal(tokens, sample_logits(all_rows.float(), seqs, twin).token_ids)
    assert_distributed(tokens.numpy(), reference_probs(logits.tolist(), temperature=.7))


def test_what_no_row_asks_for_costs_nothing():
    """Greedy rows are one argmax, whatever their filters; without filters nothing is sought."""
    refuses = SimpleNamespace(argmax=ops.argmax)
    greedy = asking([SamplingParams(temperature=0, top_k=5, top_p=.5)] * 3)
    assert sampling_inputs(greedy) == SamplingInputs()
    assert sample_logits(torch.eye(3, 50), greedy, refuses).token_ids.tolist() == [0, 1, 2]
    step, batch = sampling_step(asking([SamplingParams(presence_penalty=1, logprobs=3)]))
    step.network = 1  # it drafts, for rows that may ask for anything
    assert SamplingInputs.of(step, batch, {}) == SamplingInputs()
    refuses.sample_tokens = ops.sample_tokens
    sample_logits(torch.eye(2, 50), asking([SamplingParams(top_k=50), SamplingParams(top_k=-1)]),
                  refuses)
    with pytest.raises(AttributeError, match="thresholds"):
        sample_logits(torch.eye(1, 50), asking([SamplingParams(top_k=49)]), refuses)


def test_a_step_that_samples_nothing_is_legal(twin):
    """A step of nothing but unfinished chunks has no row to sample."""
    assert sample_logits(torch.empty(0, 50), [], twin).tolist() == ([], {}, [])


# --------------------------------------------------------------- at the edge


def test_what_goes_to_a_gpu_is_pinned(monkeypatch):
    """Penalties of 256 rows are megabytes; from ordinary memory their copy waits for the device."""
    log = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: log.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **kinds: log.append(kinds) or self)
    put([1, 2], torch.int64, device=torch.device("cuda"))
    assert log == ["pinned", dict(non_blocking=True)]
