"""Logits to tokens, the likeliest or a drawn one, and their logprobs.

    logits ─ constraints and penalties ─ temperature ─ min-p, top-k, top-p ─ draw ─► token
       │              (controls)                            (thresholds)
       └► logprobs: the model's own, before any of these

Invariant: **randomness is a function.** The number that decides a token is computed from the
request's seed and the token's position. There is no generator state to share, so a draw does not
depend on the other rows of the batch, on chunking, preemption or the order of steps.

Everything is vectorised over the batch, and what no row asks for is not computed: a batch of greedy
rows is one argmax. The arithmetic is that of `ops`, or of a backend. All three draw from the same
distribution, as functions of seed and position. But one uses an inverse CDF and another one Gumbel
noise, so the same seed may give different texts on different devices.

Not known here: the queue, text, the receiver of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch

from nanoserve.batch import Batch
from nanoserve.controls import Constraints, Edits, gather_edits
from nanoserve.sequence import NO_TOKEN, Sequence, Step

SCORED_ROWS = 64  # scored at a time: 152,000 logits each in float32, and as many logprobs, 78 MB


@dataclass
class SamplingInputs:
    """What a step's rows ask of the sampler, in addition to the numbers in the batch."""

    all_greedy: bool = True
    edits: Edits | None = None
    logprob_rows: list[int] = field(default_factory=list)  # rows that want logprobs
    num_logprobs: int = 0  # the most that any of them asks for
    prompt_targets: torch.Tensor | None = None  # (p,) the tokens to score, one a prompt position
    num_prompt_logprobs: int = 0  # the most top logprobs that any of these positions asks for

    @classmethod
    def of(cls, step: Step | None, batch: Batch, constraints: Constraints) -> "SamplingInputs":
        """Find out what the rows of a step ask for. step: None on ranks above 0, which sample
        nothing. Parameters are read on the host: reading them on the device would wait for it."""
        inputs, to_device = cls(), partial(put, device=batch.seeds.device)
        if step is None:
            return inputs
        if step.prompt_logprob_positions:
            inputs._read_prompts(step.prompt_logprob_positions, to_device)
        if not step.network:  # a draft network is always greedy
            inputs.all_greedy = not batch.host["temperature"].any()
            inputs._read_controls(step, constraints, to_device)
        return inputs

    def _read_prompts(self, positions_of: dict[Sequence, range], to_device: Callable) -> None:
        """The token after each position is the one whose logprob is wanted."""
        targets = []
        for seq, positions in positions_of.items():
            targets += seq.token_ids[positions.start + 1:positions.stop + 1]
        self.prompt_targets = to_device(targets, torch.int64)
        self.num_prompt_logprobs = max(seq.request.params.prompt_logprobs for seq in positions_of)

    def _read_controls(self, step: Step, constraints: Constraints, to_device: Callable) -> None:
        """Edits and logprobs of the rows that sample. After k drafts a sequence has k + 1 samples,
        before which 0 to k of the drafts stand."""
        seqs = step.samples()
        rows = [i for i, seq in enumerate(seqs) if seq.request.has_controls]
        if not rows:
            return
        ahead: list[list[int]] = []  # the drafts before each sample
        for seq in step.sampling:
            drafts = step.drafts.get(seq, [])
            ahead += [drafts[:i] for i in range(len(drafts) + 1)]
        self.edits = gather_edits([(i, seqs[i], ahead[i]) for i in rows], constraints, to_device)
        wanted = {i: seqs[i].request.params.logprobs for i in rows}
        self.logprob_rows = [i for i in rows if wanted[i] is not None]
        self.num_logprobs = max((wanted[i] for i in self.logprob_rows), default=0)


def put(values, dtype: torch.dtype = torch.float32, *, device: torch.device) -> torch.Tensor:
    """Queue a copy of numbers to the device. They are pinned first, because a copy from other
    memory may wait for all work queued before it. torch frees the pinned memory after the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass
class Logprobs:
    """Log-probabilities at p positions: those of a token, and of the k likeliest tokens."""

    ids: torch.Tensor  # (p, 1 + k) the token, then the likeliest
    values: torch.Tensor  # (p, 1 + k) float32, from the second on falling
    ranks: torch.Tensor  # (p,) of the token; 1: no other one is likelier

    def to_host(self) -> "Logprobs":
        """Queue the copies to the host."""
        tensors = (self.ids, self.values, self.ranks)
        return Logprobs(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def tolist(self) -> list[list[tuple[int, float, int]]]:
        """For each position a list of (token id, logprob, rank), first of the token itself, then of
        the likeliest. Waits for the device. Equal logprobs have equal ranks: -1 -2 -2 -3 are ranks
        1 2 2 4."""
        positions = []
        for ids, values, rank in zip(self.ids.tolist(), self.values.tolist(), self.ranks.tolist(),
                                     strict=True):
            entries = [(ids[0], values[0], rank)]
            for i in range(1, len(ids)):
                if i == 1 or values[i] != values[i - 1]:
                    rank = i
                entries.append((ids[i], values[i], rank))
            positions.append(entries)
        return positions


@dataclass
class SamplerOutput:
    """A step's results: on the device, and after `to_host` on their way to the host."""

    token_ids: torch.Tensor  # (s,) int64, `NO_TOKEN` for a row whose logits are no numbers
    is_kept: bool = False  # whether a graph chose the tokens, and wrote them to `last_tokens`
    # In portions of `SCORED_ROWS`: of the rows in `logprob_rows`, and in the order of positions.
    logprobs: list[Logprobs] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    failed: dict[Sequence, str] = field(default_factory=dict)  # see `controls.Edits`
    ready: torch.cuda.Event | None = None  # the copies to the host have ended

    def to_host(self) -> "SamplerOutput":
        """Queue the copy to the host right after the step, and before the next one is launched:
        otherwise the host would have to wait for both."""
        if self.token_ids.is_cuda:
            self.token_ids = self.token_ids.to("cpu", non_blocking=True)  # into pinned memory
            self.logprobs = [part.to_host() for part in self.logprobs]
            self.prompt_logprobs = [part.to_host() for part in self.prompt_logprobs]
            self.ready = torch.cuda.Event()
            self.ready.record()
        return self

    def tolist(self) -> tuple[list[int], dict[int, list], list[list]]:
        """Wait for the step. Returns the token ids, the logprobs by row, and those of prompts,
        position by position (both as `Logprobs.tolist` gives them)."""
        if self.ready is not None:
            self.ready.synchronize()
        by_row = dict(zip(self.logprob_rows, joined(self.logprobs), strict=True))
        return self.token_ids.tolist(), by_row, joined(self.prompt_logprobs)


def joined(portions: list[Logprobs]) -> list[list]:
    positions: list[list] = []
    for portion in portions:
        positions += portion.tolist()
    return positions


def sample(hidden: torch.Tensor, inputs: SamplingInputs, batch: Batch, compute_logits: Callable,
           ops: ModuleType, chosen: torch.Tensor | None = None) -> SamplerOutput:
    """All that a step's rows ask for: tokens, logprobs, and the scores of prompts.

    hidden: (s + p, hidden_size), of the tokens that sample, then of the prompt positions. Ranks
    above 0 compute their shares of all logits, for which `compute_logits` gives them None, and
    return placeholders for rank 0's tokens. ops: the backend that computes. chosen: the tokens, if
    a graph has chosen them, which it does only where no row has controls.
    """
    rows, positions = hidden.split((len(batch.logits_indices), len(batch.prompt_logprob_indices)))
    if chosen is not None:
        output = SamplerOutput(chosen, is_kept=True)
    else:
        logits = compute_logits(rows)  # (s, vocab_size)
        if logits is None:
            output = SamplerOutput(batch.logits_indices.long())
        else:
            output = SamplerOutput(choose(logits, batch, inputs, ops))
            score_samples(output, logits, inputs)
    # In portions: the logits of a whole prompt would be larger than the model.
    for start in range(0, len(positions), SCORED_ROWS):
        some = slice(start, start + SCORED_ROWS)
        logits = compute_logits(positions[some])
        if logits is not None:  # rank 0 alone has logits
            output.prompt_logprobs.append(
                score(logits, inputs.prompt_targets[some], inputs.num_prompt_logprobs))
    return output


def score_samples(output: SamplerOutput, logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Add the logprobs of the rows that want some. logits: (s, vocab_size)."""
    if inputs.edits is not None:
        output.failed = inputs.edits.failed
    if not inputs.logprob_rows:
        return
    chosen, output.logprob_rows = output.token_ids, inputs.logprob_rows
    for rows in put(inputs.logprob_rows, torch.int64, device=logits.device).split(SCORED_ROWS):
        part = score(logits[rows], chosen[rows].clamp(min=0), inputs.num_logprobs)
        output.logprobs.append(part)
        # A mask may have hidden NaN from the choice. The logprobs, taken before it, show it.
        chosen[rows] = chosen[rows].masked_fill(part.values[:, 0].isnan(), NO_TOKEN)


def choose(logits: torch.Tensor, batch: Batch, inputs: SamplingInputs,
           ops: ModuleType) -> torch.Tensor:
    """logits (s, vocab_size), which are left as they are -> token ids (s,), int64."""
    edits = inputs.edits
    if edits is not None:
        edited = edits.apply(logits.index_select(0, edits.rows))
    if inputs.all_greedy:
        greedy = ops.argmax(logits)
        if edits is not None:
            greedy[edits.rows] = ops.argmax(edited)
        return greedy
    if edits is not None:
        logits = logits.index_copy(0, edits.rows, edited)
    host, top_k = batch.host, batch.host["top_k"]
    any_filters = bool(host["min_p"].any() or (host["top_p"] < 1).any()
                       or ((top_k > 0) & (top_k < logits.shape[1])).any())
    return choose_plain(logits, batch, ops, any_filters)


def choose_plain(logits: torch.Tensor, batch: Batch, ops: ModuleType,
                 any_filters: bool = True) -> torch.Tensor:
    """`choose` without edits. Each row's parameters are read on the device, so that a CUDA graph of
    this function is right for any batch."""
    thresholds = None
    if any_filters:
        thresholds = ops.thresholds(logits, batch.temperature, batch.top_k, batch.top_p,
                                    batch.min_p)
    positions = batch.positions[batch.logits_indices].long() + 1  # the token after position 9: 10
    return ops.sample_tokens(logits, batch.temperature, batch.seeds, positions, thresholds)


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Logprobs of `token_ids` (p,) and of the `num_top` likeliest. logits: (p, vocab_size)."""
    token_ids = token_ids[:, None]  # (p, 1)
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(-1, token_ids)
    ranks = 1 + (logprobs > values).sum(-1)
    top = logprobs.topk(num_top, dim=-1)
    return Logprobs(torch.cat((token_ids, top.indices), 1), torch.cat((values, top.values), 1),
                    ranks)
