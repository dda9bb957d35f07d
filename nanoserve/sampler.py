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
Logprobs are the model's own, before any of these.

A GPU draws by Gumbel-max instead (`kernels.sample_tokens`): one pass over the logits, but with an
exponential a logit, which on a CPU takes thirty times as long as all of this. Both follow the same
distribution and are functions of seed and position; a seed's text is another on the other device.
"""

from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType

import numpy as np
import torch

from nanoserve.batch import Batch
from nanoserve.controls import Edits, gather_edits
from nanoserve.sequence import Sequence

GOLDEN = 0x9E3779B97F4A7C15 - 2 ** 64  # SplitMix64's increment: 2^64 / golden ratio, odd; as int64
MIN_CHUNK, MAX_CHUNK = 32, 512


@dataclass
class SamplingInputs:
    """What s rows ask of the sampler, on the device; and on the host, who asks for what."""

    batch: Batch  # temperature and its like of every row
    all_greedy: bool = True
    any_min_p: bool = False
    top_k_rows: np.ndarray | None = None  # (r,) the rows that use top-k; kernels look themselves
    max_top_k: int = 0  # on the host, because it is the shape of a result
    top_p_rows: np.ndarray | None = None  # (r,)
    edits: Edits | None = None
    logprob_rows: list[int] | None = None  # rows that want logprobs ...
    logprob_rows_on_device: torch.Tensor | None = None  # (r,) ... the same on the device
    num_logprobs: int = 0  # the most that any of them asks for

    @property
    def any_filters(self) -> bool:
        return self.any_min_p or self.top_k_rows is not None or self.top_p_rows is not None

    @classmethod
    def of(cls, seqs: list[Sequence], batch: Batch, vocab_size: int,
           drafts: dict[Sequence, list[int]] | None = None) -> "SamplingInputs":
        """Look through the rows, which are about to sample their last token.

        With drafts a sequence has several rows, one behind the other (`Step.samples`): each samples
        behind one draft more. Which rows use a filter is found on the host: asking the device would
        wait for it.
        """
        inputs = cls(batch)

        here = partial(put, device=batch.seeds.device)
        if rows := [i for i, seq in enumerate(seqs) if seq.has_controls]:
            ahead = {}  # the drafts in front of a row's token
            if drafts:
                first = {seq: i for i, seq in reversed(list(enumerate(seqs)))}
                ahead = {i: drafts[seq][:i - first[seq]] for i, seq in enumerate(seqs)
                         if seq in drafts}
            inputs.edits = gather_edits([(i, seqs[i], ahead.get(i, ())) for i in rows], here)
            inputs.logprob_rows = [i for i in rows if seqs[i].params.logprobs is not None]
            if inputs.logprob_rows:
                inputs.logprob_rows_on_device = here(inputs.logprob_rows, torch.int64)
                inputs.num_logprobs = max(seqs[i].params.logprobs for i in inputs.logprob_rows)
        s, host = len(seqs), batch.host  # which may have more rows, of padding
        if not host["temperature"][:s].any():  # the bits of 0.0 are 0
            return inputs
        inputs.all_greedy = False
        inputs.any_min_p = bool(host["min_p"][:s].any())
        top_k, top_p = host["top_k"][:s], host["top_p"][:s].view("float32")
        if len(rows := ((top_k > 0) & (top_k < vocab_size)).nonzero()[0]):
            inputs.top_k_rows = rows
            inputs.max_top_k = int(top_k[rows].max())
        if len(rows := (top_p < 1).nonzero()[0]):
            inputs.top_p_rows = rows
        return inputs


def put(values, dtype: torch.dtype = torch.float32, *, device: torch.device) -> torch.Tensor:
    """Numbers on their way to the device. From memory that is not pinned a copy may first wait for
    everything that was queued before it; torch frees the pinned one when the copy has ended."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass
class Logprobs:
    """Log-probabilities of p tokens, each beside the k likeliest ones of its position."""

    ids: torch.Tensor  # (p,)
    values: torch.Tensor  # (p,) float32
    ranks: torch.Tensor  # (p,) 1: no other token is likelier
    top_ids: torch.Tensor  # (p, k)
    top_values: torch.Tensor  # (p, k) falling

    def to_host(self) -> "Logprobs":
        """All of it on its way to the host."""
        return Logprobs(*(getattr(self, f.name).to("cpu", non_blocking=True)
                          for f in fields(self)))

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
    """What a step has to say: on the device, and after `to_host` on its way from there."""

    token_ids: torch.Tensor  # (s,) int64
    logprobs: Logprobs | None = None  # of the rows that want them ...
    logprob_rows: list[int] | None = None  # ... which are these
    prompt_logprobs: list[Logprobs] | None = None  # of `Step.prompt_logprob_positions`, in slices
    ready: torch.cuda.Event | None = None  # when it has arrived

    def to_host(self) -> "SamplerOutput":
        """Queue the copy to the host right behind the step, before the next one is launched, or its
        reader would wait for that one as well."""
        if self.token_ids.is_cuda:
            self.token_ids = self.token_ids.to("cpu", non_blocking=True)  # into pinned memory
            self.logprobs = self.logprobs and self.logprobs.to_host()
            self.prompt_logprobs = [part.to_host() for part in self.prompt_logprobs or []]
            self.ready = torch.cuda.Event()
            self.ready.record()
        return self

    def tolist(self) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for the step. Returns the token ids, `Logprobs.tolist()` by row, and the same of the
        prompts, position by position."""
        if self.ready is not None:
            self.ready.synchronize()
        logprobs = {} if self.logprobs is None else dict(
            zip(self.logprob_rows, self.logprobs.tolist(), strict=True))
        prompt_logprobs = [entries for part in self.prompt_logprobs or []
                           for entries in part.tolist()]
        return self.token_ids.tolist(), logprobs, prompt_logprobs


def sample(logits: torch.Tensor, inputs: SamplingInputs, kernels: ModuleType | None = None,
           token_ids: torch.Tensor | None = None) -> SamplerOutput:
    """logits (s, vocab_size), which are left as they are -> tokens and logprobs of s rows.

    token_ids: what a graph has chosen, without knowing of edits.
    """
    if token_ids is None or inputs.edits is not None:
        token_ids = choose(logits, inputs, kernels)
    output = SamplerOutput(token_ids)
    if inputs.logprob_rows:
        rows = inputs.logprob_rows_on_device
        output.logprobs = score(
            logits.index_select(0, rows), output.token_ids[rows], inputs.num_logprobs)
        output.logprob_rows = inputs.logprob_rows
    return output


def choose(logits: torch.Tensor, inputs: SamplingInputs,
           kernels: ModuleType | None = None) -> torch.Tensor:
    """logits (s, vocab_size) -> token ids (s,), int64, on the same device."""
    batch, edits = inputs.batch, inputs.edits
    if edits is not None:
        edited = edits.apply(logits.index_select(0, edits.rows).float())
    if inputs.all_greedy or len(logits) == 0:
        greedy = likeliest(logits)
        if edits is not None:
            greedy[edits.rows] = likeliest(edited)
        return greedy
    if edits is not None:
        logits = logits.float().index_copy(0, edits.rows, edited)
    if kernels is not None:
        return choose_by_kernels(logits, batch, kernels, inputs.any_filters)
    is_greedy = batch.temperature == 0
    divisor = torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    filtered = apply_filters(logits.float() / divisor, inputs)
    drawn = draw(filtered.softmax(-1), uniforms(batch.seeds, sampled_positions(batch)))
    return torch.where(is_greedy, likeliest(logits), drawn)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`logits.argmax(-1)`, (s,) int64: the first of the highest. In two levels, as `draw` does it:
    maxima are found many numbers at a time, and only in one chunk a row the place is looked for."""
    s, vocab_size = logits.shape
    size = chunk_size(vocab_size)
    if size < MIN_CHUNK:
        return logits.argmax(-1)
    chunks = logits.reshape(s, vocab_size // size, size)
    chunk = chunks.amax(-1).argmax(-1)  # (s,)
    token = chunks[torch.arange(s, device=logits.device), chunk].argmax(-1)
    return chunk * size + token


def choose_by_kernels(logits: torch.Tensor, batch: Batch, kernels: ModuleType,
                      any_filters: bool = True) -> torch.Tensor:
    """`choose` without edits. Each row looks on the device for what it asks for, so that a graph of
    it is right for any batch."""
    floors = (None, None)
    if any_filters:
        floors = kernels.find_floors(logits, batch.temperature, batch.min_p, batch.top_k,
                                     batch.top_p)
    return kernels.sample_tokens(logits, batch.temperature, batch.seeds, sampled_positions(batch),
                                 *floors)


def sampled_positions(batch: Batch) -> torch.Tensor:
    """(s,) int64, of the tokens that are sampled: one behind the row's last one."""
    return batch.positions[batch.logits_indices].long() + 1


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Logprobs of `token_ids` (p,) and of the `num_top` likeliest. logits: (p, vocab_size)."""
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(-1, token_ids[:, None])  # (p, 1)
    ranks = 1 + (logprobs > values).sum(-1)
    top = logprobs.topk(num_top, dim=-1)
    return Logprobs(token_ids, values[:, 0], ranks, top.indices, top.values)


def apply_filters(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Set the logits of excluded tokens to -inf, in place. logits: (s, vocab_size) float32."""
    batch = inputs.batch
    if inputs.any_min_p:
        # p >= min_p * p_max, without computing p: logits differ from log p by a constant.
        floor = logits.amax(-1, keepdim=True) + batch.min_p.log()[:, None]
        logits.masked_fill_(logits < floor, float("-inf"))
    if inputs.top_k_rows is not None:
        at = put(inputs.top_k_rows, torch.int64, device=logits.device)
        rows = logits[at]
        best = rows.topk(inputs.max_top_k, dim=-1).values
        # The k-th best; equal logits all stay.
        floor = best.gather(-1, batch.top_k[at, None].long() - 1)
        logits[at] = rows.masked_fill(rows < floor, float("-inf"))
    if inputs.top_p_rows is not None:
        at = put(inputs.top_p_rows, torch.int64, device=logits.device)
        values, order = logits[at].sort(dim=-1, descending=True, stable=True)
        p = values.softmax(-1)
        # The mass *before* a token decides, so that the token which crosses top_p stays. Example:
        # p = .4 .3 .2 .1 and top_p = .6: before them lie 0 .4 .7 .9, the first two stay.
        drop = p.cumsum(-1) - p >= batch.top_p[at, None]
        drop[:, 0] = False  # the likeliest stays even where float32 rounds top_p to 0
        values.masked_fill_(drop, float("-inf"))
        logits[at] = values.scatter(-1, order, values)
    return logits


def chunk_size(vocab_size: int) -> int:
    """A power of two that divides the vocabulary: 128 of 151,936."""
    return min(vocab_size & -vocab_size, MAX_CHUNK)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row by inverse CDF in two levels. probs: (s, vocab_size), uniform: (s,)."""
    s, vocab_size = probs.shape
    size = chunk_size(vocab_size)
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


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(s,) float64 in [0, 1): a function of each row's seed (64 bits) and position alone.

    40 bits are used, so that the largest number times a float64 sum stays below that sum.
    """
    return _shift(_mix64(seeds + positions * GOLDEN), 24).double() * 2.0 ** -40


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function (Steele et al. 2014). torch's int64 wraps, as it should."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2 ** 64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2 ** 64)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, with zeros coming in from the left and not the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
