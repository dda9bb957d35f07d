"""Logits to tokens: greedy, or drawn with temperature, top-k, top-p and min-p.

Invariant: **randomness is a function.** The number that decides a token is computed from the
request's seed and the token's position, by a counter-based generator (Salmon et al. 2011, "Parallel
Random Numbers: As Easy as 1, 2, 3"; here SplitMix64). There is no generator state to share, so who
else is in the batch, chunking, preemption and the order of steps can't change a draw.

A draw is an inverse CDF: one uniform number u a row, and the first token whose cumulated
probability exceeds u. Cumulating 151,936 probabilities in one go is slow and loses digits; so first
a chunk of the vocabulary is found by the sums of the chunks, then the token inside it:

    probabilities   .1 .1 | .2 .1 | .3 .2         u = .55
    chunk sums        .2      .3      .5          cumulated .2 .5 1.0  ->  third chunk, .05 into it
                                    └► .3 .5      first that exceeds .05  ->  its first token

Everything is vectorised over the batch, and rows that ask for nothing pay nothing: a batch of
greedy rows is an argmax, and the filters touch only the rows that use them.

Order, as in vLLM: temperature, min-p, top-k, top-p. Road not taken: Gumbel-max, one pass on a GPU
but an exponential a logit on a CPU, thirty times slower than this there.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.sequence import Sequence

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio, odd
MAX_CHUNK = 512


@dataclass
class SamplingInputs:
    """The sampling parameters of s rows as tensors; `None` where no row uses them."""

    temperature: torch.Tensor | None = None  # (s,) float32; None: all greedy
    uniform: torch.Tensor | None = None  # (s,) float64 in [0, 1)
    min_p: torch.Tensor | None = None  # (s,) float32
    top_k_rows: torch.Tensor | None = None  # (r,) the rows that use top-k ...
    top_k: torch.Tensor | None = None  # (r, 1) ... and their k
    max_top_k: int = 0  # on the host, because it is the shape of a result
    top_p_rows: torch.Tensor | None = None  # (r,)
    top_p: torch.Tensor | None = None  # (r, 1) float32

    @classmethod
    def of(cls, seqs: list[Sequence], vocab_size: int, device: torch.device) -> "SamplingInputs":
        """Gather the parameters of the rows, which are about to sample their last token.

        By now that token is counted (`num_unknown_tokens`), so its position is num_tokens - 1.
        Which rows use a filter is found here, on the host: asking the device would wait for it.
        """
        params = [seq.params for seq in seqs]
        temperatures = [p.temperature for p in params]
        if not any(temperatures):
            return cls()

        def put(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        uniform = uniforms([seq.seed for seq in seqs], [seq.num_tokens - 1 for seq in seqs])
        inputs = cls(put(temperatures), torch.from_numpy(uniform).to(device, non_blocking=True))
        if any(p.min_p for p in params):
            inputs.min_p = put([p.min_p for p in params])
        if rows := [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]:
            inputs.top_k_rows = put(rows, torch.int64)
            inputs.top_k = put([[params[i].top_k] for i in rows], torch.int64)
            inputs.max_top_k = max(params[i].top_k for i in rows)
        if rows := [i for i, p in enumerate(params) if p.top_p < 1]:
            inputs.top_p_rows = put(rows, torch.int64)
            inputs.top_p = put([[params[i].top_p] for i in rows])
        return inputs


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """logits (s, vocab_size) -> token ids (s,), int64, on the same device."""
    greedy = logits.argmax(-1)
    if inputs.temperature is None or len(logits) == 0:
        return greedy
    is_greedy = inputs.temperature == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, inputs.temperature)[:, None]
    scaled = apply_filters(scaled, inputs)
    return torch.where(is_greedy, greedy, draw(scaled.softmax(-1), inputs.uniform))


def apply_filters(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Set the logits of excluded tokens to -inf, in place. logits: (s, vocab_size) float32."""
    if inputs.min_p is not None:
        # p >= min_p * p_max, without computing p: logits differ from log p by a constant.
        floor = logits.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        logits.masked_fill_(logits < floor, float("-inf"))
    if inputs.top_k is not None:
        rows = logits[inputs.top_k_rows]
        best = rows.topk(inputs.max_top_k, dim=-1).values
        floor = best.gather(-1, inputs.top_k - 1)  # the k-th best; equal logits all stay
        logits[inputs.top_k_rows] = rows.masked_fill(rows < floor, float("-inf"))
    if inputs.top_p is not None:
        values, order = logits[inputs.top_p_rows].sort(dim=-1, descending=True)
        p = values.softmax(-1)
        # The mass *before* a token decides, so that the token which crosses top_p stays. Example:
        # p = .4 .3 .2 .1 and top_p = .6: before them lie 0 .4 .7 .9, the first two stay.
        drop = p.cumsum(-1) - p >= inputs.top_p
        drop[:, 0] = False  # the likeliest stays even where float32 rounds top_p to 0
        values.masked_fill_(drop, float("-inf"))
        logits[inputs.top_p_rows] = values.scatter(-1, order, values)
    return logits


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row by inverse CDF in two levels. probs: (s, vocab_size), uniform: (s,)."""
    s, vocab_size = probs.shape
    size = min(vocab_size & -vocab_size, MAX_CHUNK)  # a power of two that divides the vocabulary
    chunks = probs.view(s, -1, size)
    sums = chunks.sum(-1, dtype=torch.float64).cumsum(-1)  # (s, vocab_size / size)
    target = uniform[:, None] * sums[:, -1:]
    # The clamps are for rows of NaNs: an overflow in one request must not end the whole batch.
    chunk = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)  # (s, 1)
    before = torch.where(chunk > 0, sums.gather(-1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks[torch.arange(s, device=probs.device), chunk[:, 0]].double().cumsum(-1)
    # Rounding must not carry the target past the chunk's last token with a probability.
    target = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0 ** -40))
    token = torch.searchsorted(inside, target, right=True).clamp_(max=size - 1)
    return (chunk * size + token)[:, 0]


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """(s,) float64 in [0, 1): a function of each row's seed (64 bits) and position alone.

    40 bits are used, so that the largest number times a float64 sum stays below that sum.
    """
    state = np.array(seeds, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(
        GOLDEN)
    return (_mix64(state) >> np.uint64(24)).astype(np.float64) * 2.0 ** -40


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele et al. 2014); uint64 arithmetic wraps, as it should."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
