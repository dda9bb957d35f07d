"""What a request may do to its logits before a token is chosen: constraints and penalties.

A constraint says which tokens may come (`allowed_token_ids`), may not (`bad_words`; EOS and stop
tokens before `min_tokens`), or are favoured (`logit_bias`). A penalty lowers the logit of a token
that occurred before: repetition (Keskar et al. 2019, "CTRL") divides a logit, or multiplies it
where it is negative; frequency and presence are OpenAI's, and look at the output only.

    logits of a row     1.0    3.0   -2.0    0.5
    bad word: token 1   1.0   -inf   -2.0    0.5
    bias: 1 on token 3  1.0   -inf   -2.0    1.5
    penalties           0.5   -inf   -4.0    1.5     repetition 2, tokens 0 and 2 were there

All of them are lists of (row, token) pairs, so that the batch is edited in one go, and the cost of
a row grows with the tokens it names, not with the vocabulary. A grammar allows too many tokens for
that: it is a mask of one bit a token, which covers the row's other constraints, too. Functions of
the request's own (`logits_processors`) come first, and get one row at a time. They are pure, or
classes, of which each sequence gets an object.

Invariant: -inf stays -inf, and nothing becomes NaN, because biases and penalties are finite. (What
a request's own function returns may be NaN: then the row gets no token.) When a request is made,
`inputs.py` checks that some token stays possible in every row.

The lists are sent anew in every step, but Python looks only at the tokens that are new: what was
counted before stays with the sequence (`Sequence.sampler_state`). Road not taken: vLLM's tables of
counts on the device (each 156 MB for 256 rows of 151,936 tokens). Not known here: the draw.
"""

from array import array
from collections import ChainMap
from collections.abc import Callable, Sized
from copy import copy, deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch

from nanoserve.config import class_of
from nanoserve.sequence import Sequence


@dataclass
class Edits:
    """Changes to the logits of r rows before tokens are chosen. None changes nothing.

    Tokens are given as pairs, (2, n) int64: an index into `rows`, and a token id.
    """

    rows: torch.Tensor  # (r,) which of the batch's rows
    # Rows whose request has functions: index into `rows`, sequence, the output that they are given.
    processors: list[tuple[int, Sequence, list[int]]] = field(default_factory=list)
    failed: dict[Sequence, str] = field(default_factory=dict)  # why a function failed
    closed: torch.Tensor | None = None  # (c,) rows that allow only the tokens in `open`
    open: torch.Tensor | None = None  # (2, o) these tokens
    biased: torch.Tensor | None = None  # (2, b)
    biases: torch.Tensor | None = None  # (b,) float32
    banned: torch.Tensor | None = None  # (2, x)
    masks: torch.Tensor | None = None  # (r, vocab_size / 8) uint8, a bit a token: 0 rules it out
    seen: torch.Tensor | None = None  # (2, m) tokens to be penalised, each pair once
    counts: torch.Tensor | None = None  # (m,) float32, how often each is in the output
    penalties: torch.Tensor | None = None  # (r, 3) float32: repetition, frequency, presence

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edit the logits of `rows`, in place. logits: (r, vocab_size) float32."""
        for row, seq, token_ids in self.processors:
            try:
                seq.processors = seq.processors or Processors(seq)
                seq.processors.edit(token_ids, logits[row])
            except Exception as error:  # the request ends anyway; the row's token does not matter
                self.failed.setdefault(seq, f"logits_processors: {error!r}")
        if self.closed is not None:
            rows, ids = self.open
            kept = logits[rows, ids]
            logits.index_fill_(0, self.closed, float("-inf"))
            logits[rows, ids] = kept
        if self.biased is not None:
            rows, ids = self.biased
            logits[rows, ids] += self.biases
        if self.banned is not None:
            rows, ids = self.banned
            # Not a plain number: torch would copy it from pageable memory, and wait for the device.
            logits[rows, ids] = logits.new_full((), float("-inf"))
        if self.masks is not None:  # 5, or 101 in binary, allows the first of its 8 and the third
            bits = self.masks[:, :, None] >> torch.arange(8, device=logits.device).byte() & 1
            logits.masked_fill_(bits.flatten(1)[:, :logits.shape[1]] == 0, float("-inf"))
        if self.seen is not None:
            rows, ids = self.seen
            repetition, frequency, presence = self.penalties[rows].unbind(-1)  # (m,) each
            values = logits[rows, ids]
            values = torch.where(values > 0, values / repetition, values * repetition)
            values = values - frequency * self.counts - presence * (self.counts > 0)
            logits[rows, ids] = values
        return logits


class Processors:
    """The functions of a sequence. A class among them becomes an object of the sequence's own.

    An object may change itself whenever it is called. But a call may turn out not to count: its
    step is lost, or a draft before it is wrong. So each call goes to a copy of the objects that the
    call before it has left. `after` has these by the length of the output they were called with.

        output a b, drafts c d    calls for 2, 3, 4 tokens    after[1] ─copy─► after[2] ─copy─► ...
        c is wrong, e comes       a call for 3 tokens: a b e            after[2] ─copy─► after[3]
    """

    def __init__(self, seq: Sequence):
        self.seq = seq
        own = [one() for one in seq.request.processors if class_of(one)]
        self.after = {-1: own} if own else {}

    def edit(self, token_ids: list[int], logits: torch.Tensor) -> None:
        """Call all functions, and write what they return to `logits` (vocab_size,). token_ids: the
        output, and the drafts behind it."""
        length = len(token_ids)
        objects = copied(self.after[length - 1]) if self.after else []
        own = iter(objects)
        for given in self.seq.request.processors:
            function = next(own) if class_of(given) else given
            result = function(token_ids, logits)  # it may change them in place, too
            if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                raise ValueError(f"{given!r:.80} must return logits, a tensor of "
                                 f"{len(logits)} numbers, got {result!r:.80}")
            logits.copy_(result)
        if objects:
            oldest = len(self.seq.token_ids) - self.seq.num_prompt_tokens - 1
            kept = {n: one for n, one in self.after.items() if n >= oldest}
            self.after = kept | {length: objects}


def copied(objects: list) -> list:
    try:
        return deepcopy(objects)
    except Exception as error:
        raise ValueError(f"{', '.join(type(one).__name__ for one in objects)} can't be copied "
                         f"({error}): give the class a __deepcopy__") from error


class RowState:
    """What the sampler keeps about a sequence from step to step: its constraints as arrays, and the
    tokens to be penalised with their counts."""

    def __init__(self, seq: Sequence):
        params = seq.request.params
        bias = params.logit_bias or {}
        self.open_ids = np.array(params.allowed_token_ids or (), dtype=np.int64)
        self.biased_ids = np.array(list(bias), dtype=np.int64)
        self.biases = np.array(list(bias.values()), dtype=np.float32)
        self.penalties = (
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.has_penalties = self.penalties != (1, 0, 0)
        self.always_edits = bool(self.has_penalties or bias or len(self.open_ids)
                                 or seq.request.processors)
        # Only the repetition penalty covers the prompt. Counts are of the output: 0 for now.
        self.ids = array("q", set(seq.token_ids[:seq.num_prompt_tokens])
                         if params.repetition_penalty != 1 else ())
        self.counts = array("f", [0] * len(self.ids))  # exact up to 2^24
        self.index_of = {token_id: i for i, token_id in enumerate(self.ids)}
        self.num_read = seq.num_prompt_tokens

    def read(self, token_ids: list[int]) -> None:
        """Count output tokens that are new."""
        self.num_read += len(token_ids)
        for token_id in token_ids:
            index = self.index_of.setdefault(token_id, len(self.ids))
            if index == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[index] += 1

    def with_drafts(self, drafts: list[int]) -> "RowState":
        """A copy that counts `drafts` as output, which is not certain yet; `self` if none."""
        if not drafts:
            return self
        state = copy(self)
        state.ids, state.counts, state.index_of = self.ids[:], self.counts[:], self.index_of.copy()
        state.read(drafts)
        return state


def banned_ids(seq: Sequence, drafts: list[int] | tuple = ()) -> list[int]:
    """Tokens that may not come next. A word of several tokens bans its last one, and only where the
    output ends with the others: of "a b c", c is banned after "a b"."""
    num_output = seq.num_tokens - 1 - seq.num_prompt_tokens  # without the one that is sampled now
    token_ids = seq.token_ids
    if drafts:
        num_output, token_ids = num_output + len(drafts), [*seq.output_token_ids, *drafts]
    request = seq.request
    banned = list(request.late_ids) if num_output < request.params.min_tokens else []
    for *start, last in request.bad_word_ids:
        n = len(start)
        if n <= num_output and (n == 0 or token_ids[-n:] == start):
            banned.append(last)
    return banned


# The constraint of a sequence: a grammar, for example. `constraint.mask(...)` gives the tokens that
# may come next, (ceil(vocab_size / 8),) uint8, and covers the row's other constraints, too; None if
# every token may come. If several maps have the sequence, the first one counts.
Constraints = ChainMap[Sequence, object]


def gather_edits(rows: list[tuple[int, Sequence, list[int]]], constraints: Constraints,
                 put: Callable) -> Edits | None:
    """The edits of all rows with controls. rows: a row of the batch, its sequence, and the drafts
    before it, which count as output for this row. put: makes a tensor on the device."""
    gathered = Gathered()
    for row, seq, drafts in rows:
        assert not seq.request.needs_output_tokens or seq.num_unknown_tokens == 1, (
            f"sequence {seq.name} samples a token before the host has seen the one before it")
        state = seq.sampler_state = seq.sampler_state or RowState(seq)
        banned, constraint = banned_ids(seq, drafts), constraints.get(seq)
        # A row without any of these asks for logprobs alone, or has reached its min_tokens.
        if state.always_edits or banned or constraint is not None:
            gathered.add(row, seq, drafts, banned, constraint)
    return gathered.edits(put) if gathered.rows else None


class Gathered:
    """Collects the `Edits` of a step, row by row."""

    def __init__(self):
        self.rows: list[int] = []
        self.processors: list[tuple[int, Sequence, list[int]]] = []
        self.open, self.biased, self.banned, self.seen = (RowTokens() for _ in range(4))
        self.biases: list[np.ndarray] = []  # one array a row, empty for a row without
        self.counts: list[array] = []  # one array for each row in `seen`
        self.penalties: list[tuple[float, float, float]] = []  # one for each row
        self.masks: dict[int, np.ndarray] = {}  # by index into `rows`

    def add(self, row: int, seq: Sequence, drafts: list[int], banned: list[int],
            constraint: object) -> None:
        r, state = len(self.rows), seq.sampler_state  # r: the row's index into `rows`
        if state.has_penalties:
            seq.sampler_state = None  # after Ctrl-C during the count, the next step makes a new one
            state.read(seq.token_ids[state.num_read:])
            seq.sampler_state = state
            state = state.with_drafts(drafts)
            self.seen.add(r, state.ids)
            self.counts.append(state.counts)
        self.rows.append(row)
        self.penalties.append(state.penalties)
        if seq.request.processors:
            self.processors.append((r, seq, [*seq.output_token_ids, *drafts]))
        self.biased.add(r, state.biased_ids)
        self.biases.append(state.biases)
        mask = None if constraint is None else constraint.mask(seq, drafts, state.open_ids, banned)
        if mask is not None:  # it covers the open and the banned tokens, too
            self.masks[r] = mask
        else:
            self.open.add(r, state.open_ids)
            self.banned.add(r, banned)

    def edits(self, put: Callable) -> Edits:
        """All rows as tensors on the device."""
        edits = Edits(put(self.rows, torch.int64), self.processors)
        if self.open.rows:
            edits.closed, edits.open = put(self.open.rows, torch.int64), self.open.pairs(put)
        if self.biased.rows:
            edits.biased, edits.biases = self.biased.pairs(put), put(np.concatenate(self.biases))
        if self.banned.rows:
            edits.banned = self.banned.pairs(put)
        if self.masks:
            no_mask = np.full_like(next(iter(self.masks.values())), 255)
            masks = [self.masks.get(r, no_mask) for r in range(len(self.rows))]
            edits.masks = put(np.stack(masks), torch.uint8)
        if self.seen.rows:
            edits.seen, edits.counts = self.seen.pairs(put), put(np.concatenate(self.counts))
            edits.penalties = put(self.penalties)
        return edits


class RowTokens:
    """Tokens of some rows; a row without any is not among them."""

    def __init__(self):
        self.rows: list[int] = []
        self.ids: list[np.ndarray] = []

    def add(self, row: int, ids: Sized) -> None:
        if len(ids):
            self.rows.append(row)
            self.ids.append(np.asarray(ids, dtype=np.int64))

    def pairs(self, put: Callable) -> torch.Tensor:
        """(2, n): every token with its row."""
        rows = np.repeat(self.rows, [len(ids) for ids in self.ids])
        return put(np.stack([rows, np.concatenate(self.ids)]), torch.int64)
