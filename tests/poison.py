"""Batches and caches for attention, where every slot that no row may read is poison."""


import torch

from nanoserve.batch import Batch

POISON = torch.tensor([float("nan"), float("inf"), float("-inf")])


def make_batch(tables, query_lens, seq_lens) -> Batch:
    """A batch as the attention sees it; decode rows must come first. Padding points at block 0."""
    width = max(map(len, tables))
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int()
    nothing = torch.zeros(0, dtype=torch.int32)
    block_tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    return Batch(
        input_ids=torch.zeros(sum(query_lens), dtype=torch.int32), positions=nothing,
        slot_mapping=nothing, cu_seqlens_q=cu_seqlens_q, logits_indices=nothing,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32), prompt_logprob_indices=nothing,
        sample_rows=nothing, seeds=nothing, temperature=nothing,
        top_k=nothing, top_p=nothing, min_p=nothing, num_unknown=0,
        block_moves=nothing,
        host=dict(block_tables=block_tables.numpy().ravel()),
        block_tables=block_tables,
        num_decodes=sum(n == 1 for n in query_lens),
        query_lens=list(query_lens), seq_lens_host=list(seq_lens))


def poisoned_cache(num_blocks, block_size, num_kv_heads, head_dim, tables, query_lens, seq_lens,
                   seed=0, window=None):
    """K and V with random numbers in every slot that a row may read, and poison everywhere else.

    A block that lies wholly before a row's first window may be somebody else's by now: poison.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    readable = set()
    for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True):
        first = max(0, seq_len - query_len + 1 - window) if window else 0  # that any query sees
        # The whole block is still the row's. A decode row does without what it doesn't see of it.
        start = first if query_len == 1 else first // block_size * block_size
        readable |= {(table[p // block_size], p % block_size) for p in range(start, seq_len)}
    caches = []
    for _ in "kv":
        cache = POISON[torch.randint(3, shape, generator=generator)]
        for slot in readable:
            cache[slot] = torch.randn(num_kv_heads, head_dim, generator=generator)
        caches.append(cache)
    return caches


def as_kernels_have_it(stored):
    """A cache in `ops`'s order of memory: of 8 bits, a block's scales go behind its numbers."""
    if stored.dtype != torch.int8:
        return stored
    from nanoserve.triton_fused import numbers_and_scales  # here: it needs triton
    cache = torch.empty_like(stored)
    numbers, scales = numbers_and_scales(cache)
    numbers.copy_(stored[..., :-4])
    scales.copy_(stored[..., -4:].contiguous().view(torch.float32)[..., 0].transpose(1, 2))
    return cache


class Launches:
    """In a kernel's place: notes the grid and every argument that isn't a tensor."""

    def __init__(self, name: str, launches: list):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append(
            (self.name, grid, [x for x in args if not isinstance(x, torch.Tensor)], kwargs))
