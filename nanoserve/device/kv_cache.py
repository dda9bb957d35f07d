"""Where keys and values lie in memory, and the two ways in which plain torch operators read them.

A layer's cache is blocks of `block_size` slots, one for each token, which are found through block
tables: slot = block id * block_size + offset. Neighbouring blocks are a *run*, which the block
manager mostly gives to one sequence. What order a run's numbers have is up to who reads them.
Attention multiplies a query with each key, and adds values up by their weights:

    K of a run and head (head_dim, slots)    scores = sum over d of q[d] * K[d]
    V of a run and head (slots, head_dim)    result = sum over t of weight[t] * V[t]

Stored like this both are weighted sums of lines, and a line is in one piece. `InPlace` adds them up
where they lie (torch's `embedding_bag`): for a query whose keys are its alone copying would cost
more than multiplying. `Copy` puts blocks side by side, for matrix products of many queries; what
decode rows share, a system prompt, stays copied for the next steps.

Invariant: both are made of integers on the host, once a step, and serve all layers of one shape.
The cache's lines are known here only; who attends speaks of blocks, runs and slots. Not known here:
scores, masks, whose tokens they are. The kernels read another order, see their `new_caches`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.batch import Scratch
from nanoserve.device.packing import Bags

Places = tuple[torch.Tensor, torch.Tensor]  # tokens' runs and their offsets in these
MAX_KEPT_BYTES = 2 ** 28  # of copies that are kept: of Qwen3-0.6B in bfloat16 some 2,300 tokens


def new_caches(shape: tuple[int, int, int, int], dtype: torch.dtype,
               device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's K and V caches of `shape`, (runs, slots of a run, num_kv_heads, head_dim), zeros.
    Their memory is in the order in which it is read here:

        K   run, head, dimension, slot      a dimension of a run's keys is one line
        V   head, run, slot, dimension      a value is one line

    So a head's values of neighbouring runs, as prompts mostly get them, are in one piece. With
    runs first a sum over them took a quarter longer (AMD EPYC, bfloat16); K, of which all heads
    read a run before the next one, gains nothing. It gains by wide lines: one of 64 keys takes
    little longer than one of 16, because each addition waits for the one before it. So with runs
    of 64 slots a decoding step of 10 or 16 rows takes 6% less than with runs of one block of 16.
    The price of K's lines: a new key goes to head_dim places; of runs: a row that has one block of
    them reads all. Any other order gives the same answers, but each call copies the whole cache.
    """
    num_runs, slots, num_kv_heads, head_dim = shape
    k = torch.zeros(num_runs, num_kv_heads, head_dim, slots, dtype=dtype, device=device)
    v = torch.zeros(num_kv_heads, num_runs, slots, head_dim, dtype=dtype, device=device)
    return k.permute(0, 3, 1, 2), v.permute(1, 2, 0, 3)


def places_of(slot_mapping: torch.Tensor, slots_of_run: int) -> Places:
    """Where the step's new tokens go: their slots' runs, and the offsets in these, (num_tokens,)
    in int64. slot_mapping: (num_tokens,), block id * block_size + offset.

    Once a step and not once a layer: three small operators, but each runs code that weights have
    pushed out of the core's cache: 1 to 3% of a decoding step (AMD EPYC, Qwen3-0.6B).
    """
    slots = slot_mapping.long()
    return slots // slots_of_run, slots % slots_of_run


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             places: Places) -> None:
    """Write the new tokens' keys and values to their slots.

    k, v: (num_tokens, num_kv_heads, head_dim). Caches: see `new_caches`. places: see `places_of`.
    """
    k_cache.index_put_(places, k)
    v_cache.index_put_(places, v)


def as_lines(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K (runs * num_kv_heads * head_dim, slots of a run), V (num_kv_heads * all slots, head_dim).
    Run r, head h, dimension d of K is line (r * num_kv_heads + h) * head_dim + d; head h, slot s of
    V, counted through all runs, is line h * all slots + s."""
    return (k_cache.permute(0, 2, 3, 1).reshape(-1, k_cache.shape[1]),
            v_cache.permute(2, 0, 1, 3).reshape(-1, k_cache.shape[3]))


@dataclass
class Copy:
    """Blocks of some rows, equally many of each, copied side by side to scratch memory, which
    pieces, layers and steps share, or to memory that is kept. Where to read is worked out once a
    step."""

    key_lines: torch.Tensor  # (num_kv_heads * rows * head_dim * blocks,) parts of lines, in K
    values_at: torch.Tensor  # (num_kv_heads * rows * blocks,) blocks of a head, or lines for slots
    keys: torch.Tensor  # (num_kv_heads * rows, head_dim, num_keys), a view of the scratch memory
    values: torch.Tensor  # (num_kv_heads * rows, num_keys, head_dim), another one, behind it
    num_kv_heads: int
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] | None  # see `Scratch.keep`

    @classmethod
    def of(cls, blocks: np.ndarray, block_size: int, scratch: Scratch, cache: torch.Tensor,
           slots: np.ndarray | None = None, keep: bool = False) -> "Copy":
        """blocks: (rows, blocks) ids. slots: (rows, keys) those that values are copied from, where
        not all slots of the blocks hold some. keep: for the next steps, of a single row."""
        num_runs, slots_of_run, num_kv_heads, head_dim = cache.shape
        in_run = slots_of_run // block_size  # parts of a line of K
        heads = np.arange(num_kv_heads)[:, None, None]
        first = blocks // in_run * num_kv_heads + heads  # (kv_heads, rows, blocks)
        lines = first[:, :, None] * head_dim + np.arange(head_dim)[:, None]
        lines = lines * in_run + (blocks % in_run)[:, None]
        values_at = heads * num_runs * in_run + blocks if slots is None else (
            heads * num_runs * slots_of_run + slots)
        size = 2 * lines.size * block_size
        if scratch.memory.numel() < size:
            scratch.memory = cache.new_empty(size)
        keys, values = scratch.memory[:size].view(2, num_kv_heads * len(blocks), -1)
        put = put_on(cache.device)
        return cls(put(lines.ravel().astype(index_dtype(cache))), put(values_at.ravel()),
                   keys.view(len(keys), head_dim, -1), values.view(len(keys), -1, head_dim),
                   num_kv_heads, scratch.keep(blocks[0].tolist()) if keep else None)

    def gather_keys(self, k: torch.Tensor) -> torch.Tensor:
        """k: see `as_lines`. Returns what `keys` says, valid until another copy gathers."""
        return self._gather(k, self.key_lines, self.keys, 2)

    def gather_values(self, v: torch.Tensor) -> torch.Tensor:
        """The same of `values`: apart, so that what is multiplied next is still near the core."""
        return self._gather(v, self.values_at, self.values, 1)

    def _gather(self, memory: torch.Tensor, lines: torch.Tensor, copy: torch.Tensor,
                dim: int) -> torch.Tensor:
        """Lines of `memory`, of whichever width, in `copy`; or an earlier step's copy. dim: the one
        that is as long as there are tokens."""
        found = None if self.kept is None else self.kept.get(memory.data_ptr())
        if found is not None and found[1].shape[dim] >= copy.shape[dim]:
            return found[1].narrow(dim, 0, copy.shape[dim])
        if found is not None:  # too short: its room is free
            del self.kept[memory.data_ptr()]
        keeps = self.kept is not None and MAX_KEPT_BYTES >= copy.nbytes + sum(
            kept.nbytes for _, kept in self.kept.values())
        if keeps:
            copy = torch.empty_like(copy)
        into = copy.view(len(lines), -1)
        torch.index_select(memory.view(-1, into.shape[1]), 0, lines, out=into)
        if keeps:
            self.kept[memory.data_ptr()] = memory, copy
        return copy

    def scores(self, q: torch.Tensor, k: torch.Tensor,
               out: torch.Tensor | None = None) -> torch.Tensor:
        """q: (queries, num_heads, head_dim), row by row equally many queries. Returns (KV heads,
        queries, query heads of each, keys). out: for it, the keys possibly some of its columns,
        where there is a single row."""
        keys = self.gather_keys(k)
        q = q.view(q.shape[0], self.num_kv_heads, -1, q.shape[2]).transpose(0, 1)
        out = None if out is None else out.flatten(1, 2)
        scores = torch.bmm(q.reshape(len(keys), -1, q.shape[3]), keys, out=out)
        return scores.view(*q.shape[:3], -1)

    def sums(self, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """weights: as `scores` returns them, possibly behind those of other keys. Returns the same
        with head_dim in place of keys."""
        num_keys = self.values.shape[1]
        rows = weights[..., -num_keys:].reshape(len(self.values), -1, num_keys)
        return torch.bmm(rows, self.gather_values(v)).view(*weights.shape[:3], -1)


@dataclass
class InPlace:
    """Some rows' keys and values, read where they lie: for one query each. `scores` (without `out`)
    and `sums` are as `Copy` has them.

    Threads get equally many bags each, so these should be equally much work, whatever the rows'
    lengths. K's have equally many lines; V's are sorted by KV head first, so that each of two
    threads has half of every row. Memory should be read in its own order: all heads read their keys
    of a run before anybody reads the next run, and the scores are sorted afterwards.
    """

    keys: Bags  # for each (row, run of it, query head) head_dim lines of K
    key_rows: torch.Tensor  # for each (row, run of it) the row: its query is K's weights
    bags: torch.Tensor  # for each (KV head, row, query head of it, run) its bag; in padding any
    values: Bags  # for each (KV head, row, query head of it) lines of V, without padding
    weights_at: torch.Tensor | None  # run by run where V's weights stand; None: all in order
    shape: tuple[int, int, int]  # (KV heads, rows, query heads of each): the results' first three
    slots_of_run: int

    @classmethod
    def of(cls, runs: np.ndarray, widths: np.ndarray, slots: np.ndarray, num_heads: int,
           cache: torch.Tensor, num_before: int = 0) -> "InPlace":
        """runs: (rows, width), of which the first `widths` (rows,) of each row count. slots:
        (rows, width * slots of a run) those of the values. num_before: runs' worth of other keys,
        whose weights stand before these."""
        num_runs, slots_of_run, num_kv_heads, head_dim = cache.shape
        (num_rows, width), put = runs.shape, put_on(cache.device)
        dtype = index_dtype(cache, runs.size * num_heads * max(head_dim, slots_of_run))
        heads = np.arange(num_heads).reshape(num_kv_heads, 1, -1, 1)  # KV head, -, head of it, -
        kv_heads = (heads // heads.shape[2]).astype(dtype)
        real = np.arange(width) < widths[:, None]
        first = (runs[real] * num_kv_heads).astype(dtype)[:, None] + kv_heads.ravel()
        keys = first.reshape(-1, 1) * head_dim + np.arange(head_dim, dtype=dtype)  # a bag each
        bags = (real.cumsum() - 1).reshape(num_rows, 1, width) * num_heads + heads
        slots = slots.reshape(num_rows, 1, width, slots_of_run).astype(dtype)
        # (kv_heads, rows, query heads of each, width, slots of a run)
        values = slots + (kv_heads * (num_runs * slots_of_run))[..., None]
        weights_at = np.arange(num_heads * num_rows * (num_before + width))
        weights_at = weights_at.reshape(*bags.shape[:3], -1)[..., num_before:]
        everywhere = np.broadcast_to(real[:, None], bags.shape)  # the same for all heads
        return cls(Bags.of(keys, np.full(len(keys), head_dim), put), put(np.nonzero(real)[0]),
                   put(bags.ravel()),
                   Bags.of(values[everywhere], everywhere.sum(-1).ravel() * slots_of_run, put),
                   put(weights_at[everywhere]) if num_before or not real.all() else None,
                   bags.shape[:3], slots_of_run)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = self.keys(k, q.index_select(0, self.key_rows).view(-1))
        return scores.index_select(0, self.bags).view(*self.shape, -1)

    def sums(self, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        of_own = weights.view(-1)
        if self.weights_at is not None:
            of_own = weights.view(-1, self.slots_of_run).index_select(0, self.weights_at).view(-1)
        return self.values(v, of_own).view(*self.shape, -1)


def index_dtype(cache: torch.Tensor, num_lines: int = 0) -> type:
    """The narrower, the faster they are read."""
    return np.int32 if max(cache.numel(), num_lines) < 2 ** 31 else np.int64


def put_on(device: torch.device):
    """numpy's indices and masks as tensors over there."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
