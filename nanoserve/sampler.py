"""Logits to tokens, the likeliest or a drawn one, and their logprobs.

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

Order, as in vLLM: constraints and penalties (`controls`), temperature, min-p, top-k, top-p.
Logprobs are the model's own, before any of these. Road not taken: Gumbel-max, one pass on a GPU but
an exponential a logit on a CPU, thirty times slower than this there.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.controls import Edits, gather_edits
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
    edits: Edits | None = None
    logprob_rows: list[int] | None = None  # rows that want logprobs ...
    logprob_rows_on_device: torch.Tensor | None = None  # (r,) ... the same on the device
    num_logprobs: int = 0  # the most that any of them asks for

    @classmethod
    def of(cls, seqs: list[Sequence], vocab_size: int, device: torch.device) -> "SamplingInputs":
        """Gather the parameters of the rows, which are about to sample their last token.

        By now that token is counted (`num_unknown_tokens`), so its position is num_tokens - 1.
        Which rows use a filter is found here, on the host: asking the device would wait for it.
        """
        params = [seq.params for seq in seqs]
        temperatures = [p.temperature for p in params]
        inputs = cls()

        def put(values: list | np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

        if rows := [i for i, seq in enumerate(seqs) if seq.has_controls]:
            inputs.edits = gather_edits([(i, seqs[i]) for i in rows], put)
            inputs.logprob_rows = [i for i in rows if params[i].logprobs is not None]
            if inputs.logprob_rows:
                inputs.logprob_rows_on_device = put(inputs.logprob_rows, torch.int64)
                inputs.num_logprobs = max(params[i].logprobs for i in inputs.logprob_rows)
        if not any(temperatures):
            return inputs
        uniform = uniforms([seq.seed for seq in seqs], [seq.num_tokens - 1 for seq in seqs])
        inputs.temperature = put(temperatures)
        inputs.uniform = put(uniform, torch.float64)
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


@dataclass
class Logprobs:
    """Log-probabilities of p tokens, each beside the k likeliest ones of its position."""

    ids: torch.Tensor  # (p,)
    values: torch.Tensor  # (p,) float32
    ranks: torch.Tensor  # (p,) 1: no other token is likelier
    top_ids: torch.Tensor  # (p, k)
    top_values: torch.Tensor  # (p, k) falling

    def tolist(self) -> list[list[tuple[int, float, int]]]:
        """For each position (token id, logprob, rank): of the token, then of the likeliest. Waits
        for the device. Equal logprobs have equal ranks: -1 -2 -2 -3 are 1 2 2 4."""
        positions = []
        for *token, top_ids, top_values in zip(
                self.ids.tolist(), self.values.tolist(), self.ranks.tolist(),
                self.top_ids.tolist(), self.top_values.tolist(), strict=True):
            entries, rank = [tuple(token)], 1
            for i, (token_id, value) in enumerate(zip(top_ids, top_values, strict=True)):
                rank = rank if i and value == top_values[i - 1] else i + 1
                entries.append((token_id, value, rank))
            positions.append(entries)
        return positions


@dataclass
class SamplerOutput:
    """What a step has to say, still on the device."""

    token_ids: torch.Tensor  # (s,) int64
    logprobs: Logprobs | None = None  # of the rows that want them ...
    logprob_rows: list[int] | None = None  # ... which are these
    prompt_logprobs: list[Logprobs] | None = None  # of `Step.prompt_logprob_positions`, in slices

    def tolist(self) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for the device. Returns the token ids, `Logprobs.tolist()` by row, and the same of
        the prompts, position by position."""
        logprobs = {} if self.logprobs is None else dict(
            zip(self.logprob_rows, self.logprobs.tolist(), strict=True))
        prompt_logprobs = [entries for part in self.prompt_logprobs or []
                           for entries in part.tolist()]
        return self.token_ids.tolist(), logprobs, prompt_logprobs


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SamplerOutput:
    """logits (s, vocab_size), which are left as they are -> tokens and logprobs of s rows."""
    output = SamplerOutput(choose(logits, inputs))
    if inputs.logprob_rows:
        rows = inputs.logprob_rows_on_device
        output.logprobs = score(
            logits.index_select(0, rows), output.token_ids[rows], inputs.num_logprobs)
        output.logprob_rows = inputs.logprob_rows
    return output


def choose(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """logits (s, vocab_size) -> token ids (s,), int64, on the same device."""
    greedy, edits = logits.argmax(-1), inputs.edits
    if edits is not None:
        edited = edits.apply(logits.index_select(0, edits.rows).float())
        greedy[edits.rows] = edited.argmax(-1)
    if inputs.temperature is None or len(logits) == 0:
        return greedy
    is_greedy = inputs.temperature == 0
    divisor = torch.where(is_greedy, 1.0, inputs.temperature)[:, None]
    scaled = logits.float() / divisor
    if edits is not None:
        scaled.index_copy_(0, edits.rows, edited / divisor[edits.rows])
    scaled = apply_filters(scaled, inputs)
    return torch.where(is_greedy, greedy, draw(scaled.softmax(-1), inputs.uniform))


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Logprobs of `token_ids` (p,) and of the `num_top` likeliest. logits: (p, vocab_size)."""
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(-1, token_ids[:, None])  # (p, 1)
    ranks = 1 + (logprobs > values).sum(-1)
    top = logprobs.topk(num_top, dim=-1)
    return Logprobs(token_ids, values[:, 0], ranks, top.indices, top.values)


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
