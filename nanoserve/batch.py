"""From Python to tensors: a `Step` becomes one ragged batch of integers.

Prefill and decode share one batch. The new tokens of all rows lie one after the other without
padding, decode rows (one token each) first; `cu_seqlens_q` says where each row starts:

    rows            A decodes    B decodes    C prefills 0 to 4       row r is tokens
    input_ids       [ a9       |   b4       |  c0  c1  c2  c3  c4 ]   cu_seqlens_q[r] : [r + 1]
    positions       [  9           4           0   1   2   3   4  ]
    slot_mapping    [ 41          20          64  65  66  67  68  ]   where each token's KV goes
    cu_seqlens_q    [  0           1           2                   7 ]
    seq_lens        [ 10           5           5 ]                    what each row attends to
    block_tables    [ [2, 7, 10]  [3, 5, -]   [16, 17, -] ]           of 4 tokens; - is never read

All of it travels as **one int32 buffer** in persistent memory (pinned where there is a GPU): one
copy to the device, and with tensor parallelism one broadcast. Floats and 64-bit seeds travel as
their bits. A header gives the sizes, so a rank needs nothing but the buffer.

With overlap a row's input may not be known yet, because the step before is still sampling it. The
buffer then holds -1 - r, where r is the row's `Sequence.row`, and the device puts r's last sample
in its place.

Invariant: no Python loop runs over tokens. Token ids are slices of lists; positions and slots are
vectorised numpy. Block tables and sampling parameters are kept from step to step, at index
`Sequence.row` of persistent arrays: to copy every table in every step would be the largest cost.

Not known here: the model, how a token is chosen, which sequences are scheduled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.sequence import Sequence, Step, visible

MAX_MOVES = 2 ** 12  # blocks that a step saves, or loads, at most
AGAIN = "again"  # padding that repeats the last number


class Section(NamedTuple):
    """Numbers of one kind, which lie together in the buffer."""

    per: str  # "token", "row", ...: the section has a number for each of them
    padding: int | str | None  # the number that padding gets; None: the section is not padded
    dtype: np.dtype
    torch_dtype: torch.dtype


def section(per: str, padding: int | str | None, dtype: str = "int32") -> Any:
    """A field that is a section."""
    return field(metadata={"section": Section(per, padding, np.dtype(dtype),
                                              getattr(torch, dtype))})


@dataclass
class Batch:
    """One step's numbers, as views of the buffer. b rows.

    This is **the table of sections**: the buffer's size, writing and reading follow from it. Seeds
    lead, because a number of 64 bits must begin at an even index. In a step that samples after each
    of its tokens, the lengths of the sections down to `sample_rows` depend on nothing but the
    numbers of rows and of tokens, so a CUDA graph finds each section at its old address. For a
    graph a batch is padded to the numbers of rows and tokens that were recorded: padding attends to
    nothing (seq_len 0, or after the last row's tokens) and writes nothing (slot -1).
    """

    # The parameters of each sample: see SamplingParams.
    seeds: torch.Tensor = section("params", 0, "int64")
    temperature: torch.Tensor = section("params", 0, "float32")
    top_k: torch.Tensor = section("params", 0)
    top_p: torch.Tensor = section("params", 1, "float32")
    min_p: torch.Tensor = section("params", 0, "float32")
    # What is computed.
    input_ids: torch.Tensor = section("token", 0)  # -1 - r: the newest sample of `Sequence.row` r
    positions: torch.Tensor = section("token", 0)
    slot_mapping: torch.Tensor = section("token", -1)
    cu_seqlens_q: torch.Tensor = section("start", AGAIN)  # (b + 1,)
    seq_lens: torch.Tensor = section("row", 0)
    logits_indices: torch.Tensor = section("sample", 0)  # the tokens whose logits are sampled
    sample_rows: torch.Tensor = section("sample", -1)  # the `Sequence.row` of each sample
    prompt_logprob_indices: torch.Tensor = section("token", None)  # tokens that score a prompt
    block_tables: torch.Tensor = section("block", 0)  # (b, w) w: blocks of the longest table
    block_moves: torch.Tensor = section("move", None)  # copies to and from host memory
    host: dict[str, np.ndarray]  # the sections above by name, in the host's memory
    num_decodes: int  # how many rows, the first ones, have one new token each
    num_unknown: int  # how many inputs are below zero
    query_lens: list[int]  # (b,) read by what computes row by row
    seq_lens_host: list[int]  # (b,)
    network: int = 0  # see `Step`
    graph: tuple[int, ...] = ()  # the `graphs.Size` that is replayed, on all ranks
    has_controls: bool = False  # if a graph runs: some row's logits are edited or scored after it
    is_greedy: bool = False  # if a graph runs: each row takes its likeliest token
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # see `Step.sections`
    is_padded: bool = False  # a graph's rows have any number of tokens: padding may follow
    prepared: dict[int, Any] = field(default_factory=dict, init=False)  # a backend's, see cpu.py

    @classmethod
    def views(cls, host: np.ndarray, device: torch.Tensor,
              sections: dict[str, Section]) -> "Batch":
        """Cut the buffer into its sections. `host` and `device` hold the same int32 numbers."""
        end, lengths, header = read_header(host, len(sections))
        places = pairwise(accumulate(lengths, initial=HEADER))
        numbers = by_name([host[start:stop] for start, stop in places], sections, "dtype")
        tensors = by_name(device[HEADER:end].split(lengths), sections, "torch_dtype")
        extra = {name: tensors.pop(name) for name in sections if name not in SECTIONS}
        num_rows = len(numbers["seq_lens"])
        tensors["block_tables"] = tensors["block_tables"].view(num_rows, -1 if num_rows else 0)
        query_lens = np.diff(numbers["cu_seqlens_q"])
        return cls(**tensors, **header, host=numbers, extra=extra,
                   num_decodes=int(np.count_nonzero(query_lens <= 1)),  # 0 in rows of padding
                   num_unknown=int(np.count_nonzero(numbers["input_ids"] < 0)),
                   query_lens=query_lens.tolist(), seq_lens_host=numbers["seq_lens"].tolist())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def mask(self, row: int, window: int | None, last: torch.Tensor | None) -> torch.Tensor:
        """Which keys the row's queries see, (query_len, seq_len) of bool. last: (query_len,), the
        last position that each query sees; None: the query's own. See `sequence.visible`."""
        keys = torch.arange(self.seq_lens_host[row], device=self.seq_lens.device)
        queries = keys[-self.query_lens[row]:, None]
        return visible(queries, keys, window, queries if last is None else last[:, None])


SECTIONS = {one.name: one.metadata["section"] for one in fields(Batch) if one.metadata}
# The buffer begins with a header: where the last section ends, the network, `has_controls`,
# `is_greedy`, the graph's `Size` or zeros, and the length of each section.
HEADER = 32  # numbers of the header; even, because the 64-bit seeds follow it
GRAPH = 5  # numbers of a `Size`
LENGTHS = 4 + GRAPH  # where the sections' lengths begin
PARAMS = np.dtype([(name, one.dtype) for name, one in SECTIONS.items() if one.per == "params"])


def read_header(host: np.ndarray, count: int) -> tuple[int, list[int], dict[str, Any]]:
    """Where the last section ends, how long each of `count` sections is, and fields of `Batch`."""
    end, network, has_controls, is_greedy, *graph = host[:LENGTHS].tolist()
    return end, host[LENGTHS:][:count].tolist(), dict(
        network=network, graph=tuple(graph) if graph[0] else (), has_controls=bool(has_controls),
        is_greedy=bool(is_greedy))


def by_name(parts: Iterable, sections: dict[str, Section], dtype: str) -> dict[str, Any]:
    """The sections of a buffer, each in its dtype: numpy's `dtype`, or `torch_dtype`. parts: the
    int32 numbers of each section."""
    return {name: part if one.torch_dtype is torch.int32 else part.view(getattr(one, dtype))
            for (name, one), part in zip(sections.items(), parts, strict=True)}


def sections_with(extra: Iterable[str]) -> dict[str, Section]:
    """All sections. Those of extras come before `prompt_logprob_indices`, the first section whose
    length varies, so a graph finds them at their old address."""
    own, at = list(SECTIONS.items()), list(SECTIONS).index("prompt_logprob_indices")
    added = [(name, Section("row", 0, np.dtype("int32"), torch.int32)) for name in extra]
    assert LENGTHS + len(own) + len(added) <= HEADER, (
        f"the header has no room for the extras' sections {', '.join(extra)}")
    return dict([*own[:at], *added, *own[at:]])


def with_padding(values: Any, count: int, one: Section) -> np.ndarray:
    """A section's numbers, padded to `count` of them."""
    padded = np.empty(count, dtype=one.dtype)
    padded[:len(values)] = values
    padded[len(values):] = padded[len(values) - 1] if one.padding is AGAIN else one.padding
    return padded


class BatchBuilder:
    """Writes steps into persistent buffers, which are used in turn: with overlap the copy of step n
    may not have ended when step n+1 is written.

    staged: the numbers are copied to one fixed buffer on the device; on a CPU only a stand-in for
    graphs needs it. num_drafts: the most drafts of a row, each of which is one more sample.
    num_buffers: one more than steps in flight while a batch is built, 2 at least. extra: the names
    of sections that extras fill, see `RankParts.sections`.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
                 block_size: int, device: torch.device, staged: bool = False, num_drafts: int = 0,
                 num_buffers: int = 2, extra: dict[str, bool] | None = None):
        self.block_size, self.extra = block_size, extra or {}
        self.sections = sections_with(self.extra)
        width = -(-max_model_len // block_size)
        num_samples = max_num_seqs + min(max_num_seqs * num_drafts, max_num_batched_tokens)
        self.most_samples = min(num_samples, max_num_batched_tokens)  # each is a computed token
        most = {"token": max_num_batched_tokens, "row": max_num_seqs,
                "start": max_num_seqs + 1,  # each row's, and the end of the last
                "block": max_num_seqs * width,
                "sample": num_samples, "params": num_samples,
                "move": 4 * MAX_MOVES}  # saves and loads, of two numbers each
        size = HEADER + sum(most[one.per] * one.dtype.itemsize // 4
                            for one in self.sections.values())
        self._make_buffers(size, max(2, num_buffers), device, staged)
        # Kept from step to step, at index `Sequence.row`.
        self.tables = np.zeros((max_num_seqs, width), dtype=np.int32)
        self.table_sources: list[list[int] | None] = [None] * max_num_seqs
        self.table_lens = [0] * max_num_seqs
        self.dropped = np.zeros(max_num_seqs, dtype=np.int32)  # tokens that are not in the table
        self.params = np.zeros(max_num_seqs, dtype=PARAMS)

    def _make_buffers(self, size: int, count: int, device: torch.device, staged: bool) -> None:
        pin = device.type == "cuda"
        self.buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(count)]
        self.copied = [torch.cuda.Event() if pin else None for _ in self.buffers]
        self.device_buffer = None
        if pin or staged:
            self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.turn = -1

    def build(self, step: Step, size: Any = None) -> Batch:
        """Write `step`, copy it to the device, and return the views. O(rows) in Python."""
        buffer = self.take_buffer()
        self.write(step, buffer, size)
        return self.read(buffer)

    def take_buffer(self) -> torch.Tensor:
        """The buffer whose turn it is, to be written here or received from rank 0."""
        self.turn = (self.turn + 1) % len(self.buffers)
        if self.copied[self.turn] is not None:
            self.copied[self.turn].synchronize()
        return self.buffers[self.turn]

    def read(self, buffer: torch.Tensor) -> Batch:
        """Views of a written buffer, or of its copy on the device, whose addresses stay the same.

        The copy is queued after the last step, which reads the same device memory.
        """
        device = buffer
        if self.device_buffer is not None:
            length = int(buffer[0])
            device = self.device_buffer[:length].copy_(buffer[:length], non_blocking=True)
            if self.copied[self.turn] is not None:
                self.copied[self.turn].record()
        return Batch.views(buffer.numpy(), device, self.sections)

    def write(self, step: Step, buffer: torch.Tensor, size: Any = None) -> None:
        """Fill the buffer. size: the `graphs.Size` to which a graph's step is padded."""
        numbers, host = self._numbers(step), buffer.numpy()
        has_controls = is_greedy = False
        if size is not None:  # nothing but graphs reads the two flags
            has_controls, is_greedy = flags(step, numbers["temperature"])
            self._pad(numbers, size)
        end, lengths = HEADER, []
        for name, one in self.sections.items():
            values = numbers.get(name, ())
            length = len(values) * one.dtype.itemsize // 4
            if length:  # most steps leave some sections empty, and each write costs
                host[end:end + length].view(one.dtype)[:] = values
            end += length
            lengths.append(length)
        host[:LENGTHS] = [end, step.network, has_controls, is_greedy, *(size or [0] * GRAPH)]
        host[LENGTHS:][:len(lengths)] = lengths

    def _pad(self, numbers: dict[str, Any], size: Any) -> None:
        """Bring the sections to the lengths that a graph of this size has recorded."""
        num_rows = max(1, len(numbers["seq_lens"]))
        width = max(1, len(numbers["block_tables"]) // num_rows)  # the longest table's
        counts = dict(row=size.rows, start=size.rows + 1, block=size.rows * width,
                      token=size.tokens, sample=size.tokens, params=size.tokens)
        for name, one in self.sections.items():
            if one.padding is not None and (name in SECTIONS or size.extra):
                numbers[name] = with_padding(numbers.get(name, ()), counts[one.per], one)

    def _numbers(self, step: Step) -> dict[str, Any]:
        """What is in each section."""
        seqs, starts, query_lens = rows_of(step)
        cu_seqlens_q = np.zeros(len(seqs) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        rows = self._refresh_rows(seqs)
        places = starts - self.dropped[rows]  # each row's first token, in its table
        positions, slots = self._tokens(rows, starts, places, query_lens, cu_seqlens_q)
        last_token_of = dict(zip(seqs, (cu_seqlens_q[1:] - 1).tolist(), strict=True))
        width = max([len(seq.block_table) for seq in seqs], default=1)
        numbers = self._sampling(step, last_token_of)
        for name, numbers_of in step.sections.items():
            numbers[name] = [numbers_of[seq] for seq in seqs]
        return numbers | {
            "input_ids": _input_ids(step, seqs, starts.tolist(), query_lens.tolist()),
            "positions": positions,
            "slot_mapping": slots,
            "cu_seqlens_q": cu_seqlens_q,
            "seq_lens": places + query_lens,
            "prompt_logprob_indices": _prompt_logprob_tokens(step, last_token_of),
            "block_tables": self.tables[rows, :width].reshape(-1),
            "block_moves": np.ravel(step.block_moves)}

    def _sampling(self, step: Step, last_token_of: dict[Sequence, int]) -> dict[str, Any]:
        """Which tokens are sampled from, for which rows, and with which parameters."""
        rows = np.array([seq.row for seq in step.samples()], dtype=np.int64)
        params = self.params.take(rows)
        numbers = {name: params[name] for name in PARAMS.names}
        return numbers | {"logits_indices": _sampled_tokens(step, last_token_of),
                          "sample_rows": rows}

    def _tokens(self, rows: np.ndarray, starts: np.ndarray, places: np.ndarray,
                query_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each token's position and slot, (num_tokens,). rows: the `Sequence.row` of each row;
        starts, places: the position and the place of its first token.

        Example: a row starts at position 32, and its tokens begin at index 7 of the batch: index 9
        has position 32 + (9 - 7).
        """
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        in_row = np.arange(len(row_of_token)) - cu_seqlens_q[row_of_token]
        positions, places = starts[row_of_token] + in_row, places[row_of_token] + in_row
        blocks = self.tables[rows[row_of_token], places // self.block_size]
        return positions, blocks * self.block_size + places % self.block_size

    def _refresh_rows(self, seqs: list[Sequence]) -> np.ndarray:
        """Bring the persistent arrays up to date; returns the `Sequence.row` of each sequence.

        A block table only grows at its end. When a sequence starts again, or another one takes its
        row, the table is a new list object. So the list's identity and length show every change.
        """
        for seq in seqs:
            row, table = seq.row, seq.block_table
            if self.table_sources[row] is not table:
                params = seq.request.params
                self.params[row] = (  # in the order of `PARAMS`
                    np.uint64(seq.seed).view(np.int64), params.temperature,
                    min(max(params.top_k, 0), np.iinfo(np.int32).max), params.top_p, params.min_p)
                self.dropped[row] = len(seq.dropped_blocks) * self.block_size
                self.table_lens[row] = 0
                self.table_sources[row] = table  # noted last: Ctrl-C may come before
            known = self.table_lens[row]
            if known != len(table):
                self.tables[row, known:len(table)] = table[known:]
                self.table_lens[row] = len(table)
        return np.array([seq.row for seq in seqs], dtype=np.int64)


def rows_of(step: Step) -> tuple[list[Sequence], np.ndarray, np.ndarray]:
    """The sequences in the batch's order, the position of each one's first new token, and how many
    new tokens it has. Rows of one token come first, then chunks; otherwise the order is the step's.
    """
    seqs = list(step.num_new_tokens)
    query_lens = np.array(list(step.num_new_tokens.values()), dtype=np.int32)
    starts = np.array(step.starts, dtype=np.int32)
    is_chunk = query_lens > 1
    if is_chunk.any() and not is_chunk.all():
        order = np.argsort(is_chunk, kind="stable")
        seqs, starts, query_lens = [seqs[i] for i in order], starts[order], query_lens[order]
    return seqs, starts, query_lens


def flags(step: Step, temperature: np.ndarray) -> tuple[bool, bool]:
    """`Batch.has_controls` and `Batch.is_greedy`."""
    if step.network:
        return False, True
    has_controls = any(seq.request.has_controls for seq in step.sampling)
    return has_controls, not has_controls and not temperature.any()


def _input_ids(step: Step, seqs: list[Sequence], starts: list[int],
               query_lens: list[int]) -> np.ndarray:
    """Token ids of all rows. A decode's id may be unknown; those of a chunk never are, because a
    preempted sequence waits until they are known. A row's drafts follow its known ids."""
    if step.shift:
        starts = [start + step.shift for start in starts]
    num_decodes = query_lens.count(1)
    ids = [seq.token_ids[start] if start < len(seq.token_ids) else -1 - seq.row
           for seq, start in zip(seqs[:num_decodes], starts, strict=False)]
    for seq, start, n in zip(seqs[num_decodes:], starts[num_decodes:], query_lens[num_decodes:],
                             strict=True):
        drafts = step.drafts.get(seq, [])
        assert start + n <= len(seq.token_ids) + len(drafts), (
            f"{seq.name}: a chunk with an unknown token")
        ids += seq.token_ids[start:start + n] + drafts
    return np.array(ids, dtype=np.int32)


def _sampled_tokens(step: Step, last_token_of: dict[Sequence, int]) -> list[int]:
    """Indices in the batch of the tokens whose logits are sampled: a row's last token, or with k
    drafts its last k + 1."""
    samples = step.samples()
    if samples is step.sampling:
        return [last_token_of[seq] for seq in samples]
    indices: list[int] = []
    for seq in step.sampling:
        last = last_token_of[seq]
        indices += range(last - len(step.drafts.get(seq, ())), last + 1)
    return indices


def _prompt_logprob_tokens(step: Step, last_token_of: dict[Sequence, int]) -> list[int]:
    """Indices in the batch of the tokens that give prompt logprobs: the first ones of their row."""
    indices: list[int] = []
    for seq, positions in step.prompt_logprob_positions.items():
        first = last_token_of[seq] - step.num_new_tokens[seq] + 1
        indices += range(first, first + len(positions))
    return indices
