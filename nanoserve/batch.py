"""From Python to tensors: a `Step` becomes one ragged batch of integers.

Prefill and decode share one batch. The new tokens of all rows lie one behind the other without
padding, decode rows (one token each) first; `cu_seqlens_q` says where each row starts:

    rows            A decodes    B decodes    C prefills 0..5         row r is tokens
    input_ids       [ a9       |   b4       |  c0  c1  c2  c3  c4 ]   cu_seqlens_q[r] : [r + 1]
    positions       [  9           4           0   1   2   3   4  ]
    slot_mapping    [ 41          20          64  65  66  67  68  ]   where each token's KV goes
    cu_seqlens_q    [  0           1           2                   7 ]
    seq_lens        [ 10           5           5 ]                    what each row attends to
    block_tables    [ [2, 7, 10]  [3, 5, -]   [16, 17, -] ]           of 4 tokens; - is never read

All of it travels as **one packed int32 buffer** in persistent memory (pinned where there is a GPU):
one copy to the device, and with tensor parallelism one broadcast. A header gives the sizes, so that
a rank which got nothing but the buffer can read it.

Invariant: no Python loop runs over tokens. Token ids are copied as slices of lists, what follows
from them is vectorised numpy, and the loops over rows touch integers only. Block tables are kept
from step to step, one line a running sequence (`Sequence.row`), because copying every table every
step would be the most expensive part.

Not known here: the model, the sampler's parameters, whose turn it is.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.sequence import Sequence, Step

# The header: the length of each section, in this order.
SECTIONS = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "logits_indices",
            "prompt_logprob_indices", "unknown_indices", "unknown_sources", "block_copies",
            "block_tables")
NUM_DECODES = len(SECTIONS)  # one more header entry: rows with a single new token
HEADER = len(SECTIONS) + 1
MIN_BUFFER = 2 ** 13  # a buffer's first part, which a broadcast sends before the length is known


@dataclass
class Batch:
    """The integers of one step, as views of the packed buffer. n tokens, b rows, s samples."""

    input_ids: torch.Tensor  # (n,)
    positions: torch.Tensor  # (n,)
    slot_mapping: torch.Tensor  # (n,)
    cu_seqlens_q: torch.Tensor  # (b + 1,)
    seq_lens: torch.Tensor  # (b,)
    logits_indices: torch.Tensor  # (s,) the tokens whose logits are sampled
    prompt_logprob_indices: torch.Tensor  # (p,) the tokens whose logits give prompt logprobs
    unknown_indices: torch.Tensor  # (u,) places in input_ids that the last step's samples fill ...
    unknown_sources: torch.Tensor  # (u,) ... and which of those samples
    block_copies: torch.Tensor  # (2, c) blocks to copy from and to, before anything is written
    block_tables: torch.Tensor  # (b, w) the widest row's width
    num_decodes: int  # the first rows, one new token each
    query_lens: list[int]  # (b,) the same numbers on the host, for what is computed row by row
    seq_lens_host: list[int]  # (b,)

    @classmethod
    def unpack(cls, host: np.ndarray, device: torch.Tensor) -> "Batch":
        """Cut the buffer into its sections. `host` and `device` hold the same int32 numbers."""
        views, at = {}, HEADER
        host_views = {}
        for name, length in zip(SECTIONS, host[:HEADER - 1].tolist(), strict=True):
            views[name] = device[at:at + length]
            host_views[name] = host[at:at + length]
            at += length
        num_rows = len(host_views["seq_lens"])
        views["block_copies"] = views["block_copies"].view(2, -1)
        views["block_tables"] = views["block_tables"].view(num_rows, -1) if num_rows else (
            views["block_tables"].view(0, 0))
        return cls(**views, num_decodes=int(host[NUM_DECODES]),
                   query_lens=np.diff(host_views["cu_seqlens_q"]).tolist(),
                   seq_lens_host=host_views["seq_lens"].tolist())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)


class BatchBuilder:
    """Writes steps into persistent buffers, which take turns so that one may still be in use.

    With overlap the copy of step n may not have ended when step n+1 is written. `num_buffers` is
    therefore one more than the number of steps in flight while a batch is built.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 block_size: int, device: torch.device, num_buffers: int = 2):
        self.block_size = block_size
        self.device = device
        width = -(-max_model_len // block_size)
        # Each running sequence may copy a block, which is two numbers.
        size = HEADER + 4 * max_num_batched_tokens + 7 * max_num_seqs + 1 + max_num_seqs * width
        size = max(size, MIN_BUFFER)
        pin = device.type == "cuda"
        self.buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pin)
                        for _ in range(num_buffers)]
        self.next_buffer = 0
        self.tables = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.table_sources: list[list[int] | None] = [None] * max_num_seqs
        self.table_lens = [0] * max_num_seqs
        self.last_sampling: dict[Sequence, int] = {}

    def build(self, step: Step) -> Batch:
        """Pack `step`, copy it to the device, and return the views. O(rows) in Python."""
        buffer = self.take_buffer()
        self.pack(step, buffer)
        return self.unpack(buffer)

    def take_buffer(self) -> torch.Tensor:
        """The buffer whose turn it is, to be packed here or received from rank 0."""
        buffer = self.buffers[self.next_buffer]
        self.next_buffer = (self.next_buffer + 1) % len(self.buffers)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> Batch:
        device = buffer[:packed_length(buffer)]
        if self.device.type != "cpu":
            device = device.to(self.device, non_blocking=True)
        return Batch.unpack(buffer.numpy(), device)

    def pack(self, step: Step, buffer: torch.Tensor) -> None:
        """Fill the buffer."""
        host = buffer.numpy()
        seqs, query_lens, starts, num_decodes = _decodes_first(step)
        num_rows, num_tokens = len(seqs), step.num_tokens
        cu_seqlens_q = np.zeros(num_rows + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        # A token's position is its row's start plus its place in the row. Example: a row with
        # start 32 whose tokens begin at index 7 of the batch: index 9 has position 32 - 7 + 9.
        row_of_token = np.repeat(np.arange(num_rows), query_lens)
        positions = (starts - cu_seqlens_q[:-1])[row_of_token] + np.arange(num_tokens)
        rows = self._refresh_tables(seqs)
        blocks = self.tables[rows[row_of_token], positions // self.block_size]
        width = max((len(seq.block_table) for seq in seqs), default=0)
        last_token_of = dict(zip(seqs, (cu_seqlens_q[1:] - 1).tolist(), strict=True))
        unknown, sources = self._unknown_tokens(step, last_token_of)
        sections = (
            self._input_ids(seqs, starts.tolist(), query_lens.tolist(), num_decodes),
            positions,
            blocks * self.block_size + positions % self.block_size,
            cu_seqlens_q,
            starts + query_lens,
            [last_token_of[seq] for seq in step.sampling],
            self._prompt_logprob_tokens(step, last_token_of),
            unknown,
            sources,
            np.array(step.block_copies, dtype=np.int32).T.reshape(-1),
            self.tables[rows, :width].reshape(-1),
        )
        at = HEADER
        for i, section in enumerate(sections):
            host[i] = len(section)
            if len(section):  # most steps leave some sections empty, and each write costs
                host[at:at + len(section)] = section
                at += len(section)
        host[NUM_DECODES] = num_decodes

    def _input_ids(self, seqs: list[Sequence], starts: list[int], query_lens: list[int],
                   num_decodes: int) -> list[int]:
        """Token ids of all rows; a token that is not known yet is a 0 that gets replaced."""
        ids = [seq.token_ids[start] if start < len(seq.token_ids) else 0
               for seq, start in zip(seqs[:num_decodes], starts)]
        for seq, start, n in zip(seqs[num_decodes:], starts[num_decodes:], query_lens[num_decodes:],
                                 strict=True):
            row = seq.token_ids[start:start + n]
            ids += row + [0] * (n - len(row))
        return ids

    def _prompt_logprob_tokens(self, step: Step, last_token_of: dict[Sequence, int]) -> list[int]:
        """Where the positions that give prompt logprobs stand in the batch: from the beginning of
        their row on."""
        indices: list[int] = []
        for seq, positions in step.prompt_logprob_positions.items():
            first = last_token_of[seq] - step.num_new_tokens[seq] + 1
            indices += range(first, first + len(positions))
        return indices

    def _unknown_tokens(self, step: Step, last_token_of: dict[Sequence, int]) -> tuple[list, list]:
        """Overlap: rows whose last token is still being sampled by the step before this one.

        `num_unknown_tokens` counts this step's own sample too, where it takes one: the input is
        unknown when a sample is missing *before* it.
        """
        last, self.last_sampling = self.last_sampling, {
            seq: i for i, seq in enumerate(step.sampling)}
        pairs = [(last_token_of[seq], last[seq]) for seq in step.sampling
                 if seq.num_unknown_tokens > 1]
        return [index for index, _ in pairs], [source for _, source in pairs]

    def _refresh_tables(self, seqs: list[Sequence]) -> np.ndarray:
        """Bring the persistent tables up to date; returns the row of each sequence.

        Tables only grow by their tail, and a table that starts anew is a new list object: comparing
        identity and length finds what changed.
        """
        for seq in seqs:
            row, table = seq.row, seq.block_table
            if self.table_sources[row] is not table:
                self.table_sources[row], self.table_lens[row] = table, 0
            known = self.table_lens[row]
            if known != len(table):
                self.tables[row, known:len(table)] = table[known:]
                self.table_lens[row] = len(table)
        return np.array([seq.row for seq in seqs], dtype=np.int64)


def packed_length(buffer: torch.Tensor) -> int:
    """How many numbers of a packed buffer are in use, by its header."""
    return HEADER + int(buffer.numpy()[:HEADER - 1].sum())


def _decodes_first(step: Step) -> tuple[list[Sequence], np.ndarray, np.ndarray, int]:
    """Stable partition of the rows: single tokens, then chunks."""
    seqs = list(step.num_new_tokens)
    query_lens = np.array(list(step.num_new_tokens.values()), dtype=np.int32)
    starts = np.array(step.starts, dtype=np.int32)
    num_decodes = int((query_lens == 1).sum())
    if 0 < num_decodes < len(seqs):
        order = np.argsort(query_lens > 1, kind="stable")
        seqs = [seqs[i] for i in order.tolist()]
        query_lens, starts = query_lens[order], starts[order]
    return seqs, query_lens, starts, num_decodes
