"""Logits to tokens, the likeliest or a drawn one, and their logprobs.

    logits ─ constraints and penalties ─ temperature ─ min-p, top-k, top-p ─ draw ─► token
       │              (controls)                            (floors)
       └► logprobs: the model's own, before any of these

Invariant: **randomness is a function.** The number that decides a token is computed from the
request's seed and the token's position. There is no generator state to share, so a draw does not
depend on the other rows of the batch, on chunking, preemption or the order of steps.

Everything is vectorised over the batch, and what no row asks for is not computed: a batch of greedy
rows is one argmax. The arithmetic is the namespace's: `ops`, or a twin of it. All of them draw from
the same distribution, as functions of seed and position. But one uses an inverse CDF and another
one Gumbel noise, so the same seed may give different texts on different devices.

Not known here: the queue, text, who receives a token.
"""

from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType

import torch

from nanoserve.batch import Batch
from nanoserve.controls import Constraints, Edits, gather_edits
from nanoserve.sequence import Step


@dataclass
class SamplingInputs:
    """What s rows ask of the sampler: tensors on the device, and flags and lists on the host."""

    batch: Batch  # temperature, top_k, top_p, min_p and seed of every row
    num_samples: int = 0  # rows that are no padding
    all_greedy: bool = True
    any_filters: bool = False  # top-k, top-p or min-p
    edits: Edits | None = None
    logprob_rows: list[int] | None = None  # rows that want logprobs
    num_logprobs: int = 0  # the most that any of them asks for
    prompt_targets: torch.Tensor | None = None  # (p,) the tokens to score, one a prompt position
    num_prompt_logprobs: int = 0  # the most top logprobs that any of these positions asks for

    @classmethod
    def of(cls, step: Step, batch: Batch, vocab_size: int,
           constraints: Constraints) -> "SamplingInputs":
        """Find out what the rows of a step ask for, before they sample.

        With k drafts a sequence has k + 1 rows here (`Step.samples`), each after one draft more.
        Parameters are read on the host, because reading them from the device would wait for it. A
        draft network is always greedy.
        """
        seqs, drafts, inputs = step.samples(), step.drafts, cls(batch)
        here = partial(put, device=batch.seeds.device)
        inputs.num_samples = len(seqs)
        if positions_of := step.prompt_logprob_positions:
            inputs.prompt_targets = here([
                token_id for seq, positions in positions_of.items()
                for token_id in seq.token_ids[positions.start + 1:positions.stop + 1]], torch.int64)
            inputs.num_prompt_logprobs = max(
                seq.request.params.prompt_logprobs for seq in positions_of)
        if step.network:
            return inputs
        if rows := [i for i, seq in enumerate(seqs) if seq.request.has_controls]:
            ahead = {}  # the drafts in front of a row's token
            if drafts:
                first = {seq: i for i, seq in reversed(list(enumerate(seqs)))}
                ahead = {i: drafts[seq][:i - first[seq]] for i, seq in enumerate(seqs)
                         if seq in drafts}
            inputs.edits = gather_edits([(i, seqs[i], ahead.get(i, ())) for i in rows],
                                        constraints, here)
            wanted = {i: seqs[i].request.params.logprobs for i in rows}
            inputs.logprob_rows = [i for i in rows if wanted[i] is not None]
            if inputs.logprob_rows:
                inputs.num_logprobs = max(wanted[i] for i in inputs.logprob_rows)
        host = batch.host
        if host["temperature"].any():
            top_k = host["top_k"]
            inputs.all_greedy = False
            inputs.any_filters = bool(
                host["min_p"].any() or (host["top_p"] < 1).any()
                or ((top_k > 0) & (top_k < vocab_size)).any())
        return inputs


def put(values, dtype: torch.dtype = torch.float32, *, device: torch.device) -> torch.Tensor:
    """Queue a copy of numbers to the device. From memory that is not pinned, a copy may first wait
    for all work queued before it. torch frees the pinned memory when the copy has ended."""
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
    """A step's results: on the device, and after `to_host` on their way to the host."""

    token_ids: torch.Tensor  # (s,) int64
    logprobs: Logprobs | None = None  # of the rows that want them ...
    logprob_rows: list[int] | None = None  # ... which are these
    prompt_logprobs: list[Logprobs] | None = None  # of `Step.prompt_logprob_positions`, in slices
    ready: torch.cuda.Event | None = None  # when it has arrived

    def to_host(self) -> "SamplerOutput":
        """Queue the copy to the host right behind the step, and before the next one is launched:
        otherwise the host would have to wait for both."""
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


def sample(logits: torch.Tensor, inputs: SamplingInputs, ops: ModuleType,
           token_ids: torch.Tensor | None = None) -> SamplerOutput:
    """logits (s, vocab_size), which are left as they are -> tokens and logprobs of s rows.

    ops: the namespace that computes. token_ids: what a graph has chosen, without the edits.
    """
    if token_ids is None or inputs.edits is not None:
        token_ids = choose(logits, inputs, ops)
    output = SamplerOutput(token_ids)
    if inputs.logprob_rows:
        rows = put(inputs.logprob_rows, torch.int64, device=logits.device)
        output.logprobs = score(
            logits.index_select(0, rows), output.token_ids[rows], inputs.num_logprobs)
        output.logprob_rows = inputs.logprob_rows
    return output


def choose(logits: torch.Tensor, inputs: SamplingInputs, ops: ModuleType) -> torch.Tensor:
    """logits (s, vocab_size) -> token ids (s,), int64, on the same device."""
    edits = inputs.edits
    if edits is not None:
        edited = edits.apply(logits.index_select(0, edits.rows).float())
    if inputs.all_greedy:
        greedy = ops.argmax(logits)
        if edits is not None:
            greedy[edits.rows] = ops.argmax(edited)
        return greedy
    if edits is not None:
        logits = logits.float().index_copy(0, edits.rows, edited)
    return choose_plain(logits, inputs.batch, ops, inputs.any_filters)


def choose_plain(logits: torch.Tensor, batch: Batch, ops: ModuleType,
                    any_filters: bool = True) -> torch.Tensor:
    """`choose` without edits. Each row's parameters are read on the device, so that a CUDA graph of
    this function is right for any batch."""
    floors = None
    if any_filters:
        floors = ops.floors(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    positions = batch.positions[batch.logits_indices].long() + 1  # one behind the row's last token
    return ops.draw(logits, batch.temperature, batch.seeds, positions, floors)


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Logprobs of `token_ids` (p,) and of the `num_top` likeliest. logits: (p, vocab_size)."""
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(-1, token_ids[:, None])  # (p, 1)
    ranks = 1 + (logprobs > values).sum(-1)
    top = logprobs.topk(num_top, dim=-1)
    return Logprobs(token_ids, values[:, 0], ranks, top.indices, top.values)
