"""Triton kernels that choose a token of each row: `sample_tokens`; `thresholds`, where filters cut.

Each has its specification in `ops`. A row of 150,000 logits is read in chunks by many programs, and
no logit is sorted or written back:

    logits ──► argmax(logits / temperature + Gumbel noise)      a random number for each logit
    logits ──► bisection for the number from which on the weight reaches k, or p ──► thresholds

Invariants: nothing waits for the device, and the same call gives the same bits.
Random numbers are SplitMix64's, which takes three multiplications a logit; Philox takes forty.
"""

import torch
import triton
import triton.language as tl

from nanoserve.ops import Thresholds
from nanoserve.triton_fused import FMA

SAMPLE_CHUNK, SAMPLE_BLOCK = 8192, 2048  # logits a program looks at, and how many at a time
FILTER_BLOCK = 16384  # logits at a time, 32 a lane: a program alone must have many loads in flight
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64's increment, as in ops.py
NO_ID = tl.constexpr(2 ** 31 - 1)


@triton.jit
def _stir(x):
    """SplitMix64's output function for uint64, but for its last step, x ^ (x >> 31)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 27)) * 0x94D049BB133111EB


@triton.jit
def _exponential(key, ids):
    """-log(1 - u) for each token id, u in (0, 1) from 32 bits of (key, id) alone.

    The winner of 150,000 tokens has a u of about 1e-5. float32 keeps all bits of u, but only seven
    in 1 - u. So a series replaces the log for small u: u + u^2/2 + u^3/3 + u^4/4.
    """
    bits = (_stir(key + ids.to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)
    bits ^= bits >> 31  # the last step, for the upper half
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0 ** -32, 1 - 2.0 ** -24)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return tl.where(u < 1 / 64, series, -tl.log(1 - u))


@triton.jit
def _scaled(logits, ids, vocab_size, heat):
    """logits times 1 / temperature; -0 becomes 0, which equals it."""
    x = tl.load(logits + ids, ids < vocab_size, float("-inf")).to(tl.float32)
    return x * tl.div_rn(1.0, tl.where(heat == 0, 1.0, heat)) + 0.0


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "positions", "thresholds",
                                            "last_ids"])
def _sample_kernel(logits, temperature, seeds, positions, thresholds, last_ids, scores, tokens,
                   stride, vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The best score in a chunk of a row, and the lowest id that has it; -1 if it is no number.

    A score is x - log(e), x the scaled logit and -log(e) Gumbel noise. x - log(e) > y - log(d) is
    exp(x - y) * d > e: so each lane compares its tokens without a log, and takes one at the end.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    key = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    key = _stir(key + tl.load(positions + row).to(tl.uint64) * GOLDEN)
    key ^= key >> 31
    best, best_e = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 1, tl.float32)
    best_id = chunk * CHUNK + tl.arange(0, BLOCK)
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, vocab_size), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _scaled(logits + row * stride, ids, vocab_size, heat)
        x = tl.where(x != x, float("inf"), x)  # NaN wins, as in torch.argmax
        if heat == 0:
            better = x > best
        else:
            if thresholds is not None:
                floor, last_id = tl.load(thresholds + row), tl.load(last_ids + row)
                x = tl.where((x < floor) | ((x == floor) & (ids > last_id)), float("-inf"), x)
            e = _exponential(key, ids)
            better = tl.exp(x - best) * best_e > e
            best_e = tl.where(better, e, best_e)
        best, best_id = tl.where(better, x, best), tl.where(better, ids, best_id)
    best -= tl.log(best_e)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(scores + at, top)
    best_id = tl.min(tl.where(best == top, best_id, NO_ID), 0)
    tl.store(tokens + at, tl.where(tl.abs(top) < float("inf"), best_id, -1).to(tl.int64))


def sample_tokens(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
         positions: torch.Tensor, thresholds: Thresholds | None = None) -> torch.Tensor:
    """`ops.sample_tokens`, by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014):
    argmax(logits / temperature + Gumbel noise) is distributed like their softmax.

    Ties go to the lowest id. Greedy rows are those of `ops`, token for token. Drawn ones are only
    distributed alike: an inverse CDF takes one random number a row where this takes one a logit, so
    a seed gives another token on a CPU. (The tests compute the same bits in plain torch.)
    """
    s, vocab_size = logits.shape
    lowest, last = thresholds or (None, None)
    chunks = triton.cdiv(vocab_size, SAMPLE_CHUNK)
    scores = torch.empty(s, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(s, chunks, dtype=torch.int64, device=logits.device)
    _sample_kernel[s, chunks](logits, temperature, seeds, positions, lowest, last, scores,
                              tokens, logits.stride(0), vocab_size, SAMPLE_CHUNK, SAMPLE_BLOCK,
                              num_warps=8, **FMA)
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]  # the first of equal chunks


@triton.jit
def _weigh(logits, vocab_size, heat, middle, top, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """One pass over a row. Of the numbers from `middle` on: their weight, which is their count or
    the sum of exp(x - top), and the smallest; and the largest one below `middle`."""
    weight, above, below = 0.0, float("inf"), float("-inf")
    for start in range(0, vocab_size, BLOCK):
        x = _scaled(logits, start + tl.arange(0, BLOCK), vocab_size, heat)
        if COUNT:
            weight += tl.sum(tl.where(x >= middle, 1.0, 0.0), 0)
        else:
            weight += tl.sum(tl.where(x >= middle, tl.exp(x - top), 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(x >= middle, x, float("inf")), 0))
        below = tl.maximum(below, tl.max(tl.where(x < middle, x, float("-inf")), 0))
    return weight, above, below


@triton.jit
def _between(low, high):
    """The middle of the floats in (low, high]; the float after `low` if both are equal.

    Taken as integers, floats' bits are in order if all but the sign of negative ones is flipped.
    """
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    low, high = low ^ ((low >> 31) & 0x7FFFFFFF), high ^ ((high >> 31) & 0x7FFFFFFF)
    middle = (low & high) + ((low ^ high) >> 1) + 1  # the mean rounded down, plus 1: no overflow
    return (middle ^ ((middle >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(logits, vocab_size, heat, low, top, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number of the row from which on the weight reaches `target`; `low` if none does.

    Bisection, one pass over the row a step. Its ends move to numbers of the row, so it takes about
    log2(vocab_size) steps, and never more than 32.
    """
    high = top
    while low < high:
        middle = _between(low, high)
        weight, above, below = _weigh(logits, vocab_size, heat, middle, top, COUNT, BLOCK)
        low = tl.where(weight >= target, above, low)
        below = tl.maximum(below, low)
        high = tl.where(weight > target, high, tl.where(weight == target, above, below))
    return low


@triton.jit(do_not_specialize_on_alignment=["temperature", "log_min_p", "top_k", "top_p"])
def _find_thresholds_kernel(logits, temperature, log_min_p, top_k, top_p, thresholds, last_ids,
                            stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat, floor = tl.load(temperature + row), tl.load(log_min_p + row)
    k, p = tl.load(top_k + row).to(tl.float32), tl.load(top_p + row)  # exact up to 2^24
    has_k, last_id = (k > 0) & (k < vocab_size), vocab_size
    if (heat != 0) & (has_k | (p < 1) | (floor > float("-inf"))):
        logits += row * stride
        _, _, top = _weigh(logits, vocab_size, heat, float("inf"), 0.0, True, BLOCK)
        floor += top
        if has_k:
            floor = _search(logits, vocab_size, heat, floor, top, k, True, BLOCK)
        if p < 1:
            mass, _, _ = _weigh(logits, vocab_size, heat, floor, top, False, BLOCK)
            floor = _search(logits, vocab_size, heat, floor, top, p * mass, False, BLOCK)
            # Of equals at the floor only as many stay as it takes to reach p, the lowest ids.
            above, _, _ = _weigh(logits, vocab_size, heat, _between(floor, floor), top, False,
                                 BLOCK)
            needed = tl.maximum(tl.ceil((p * mass - above) / tl.exp(floor - top)), 1.0)
            count = 0
            for start in range(0, vocab_size, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                equal = (_scaled(logits, ids, vocab_size, heat) == floor).to(tl.int32)
                rank = count + tl.cumsum(equal, 0)
                reached = (equal == 1) & (rank >= needed)
                last_id = tl.minimum(last_id, tl.min(tl.where(reached, ids, NO_ID), 0))
                count += tl.sum(equal, 0)
    tl.store(thresholds + row, floor)
    tl.store(last_ids + row, last_id)


def thresholds(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
           top_p: torch.Tensor, min_p: torch.Tensor) -> Thresholds:
    """`ops.thresholds`. The programs of greedy rows and of rows without a filter return at once.

    Known limit: a row is searched by one program, in about 20 passes for top-k and as many for
    top-p. The row stays in the L2 cache.
    """
    s, vocab_size = logits.shape
    lowest = torch.empty(s, dtype=torch.float32, device=logits.device)
    last = torch.empty(s, dtype=torch.int32, device=logits.device)
    _find_thresholds_kernel[s,](logits, temperature, min_p.log(), top_k, top_p, lowest, last,
                            logits.stride(0), vocab_size, FILTER_BLOCK, num_warps=16,
                            **FMA)
    return lowest, last
