"""Paged attention against a softmax written out in loops; the layers against transformers' own.

The twin below walks one query head at a time through one sequence's keys, in float64, and finds
them through the block table as the docstring of `attention` describes it. Every slot of the cache
that no row may read is poisoned with NaN and infinity: what leaks shows.
"""

import math
import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanoserve import LLM, SamplingParams, ops
from nanoserve.device import kv_cache
from nanoserve.device import attention
from nanoserve.device.attention import paged_attention
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.device.kv_cache import new_caches, places_of, store_kv
from nanoserve.layers import (
    Embedding,
    HeadNorm,
    Linear,
    Placement,
    RMSNorm,
    RotaryEmbedding,
)
from nanoserve.model import MoE
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.ops import norm_rope_store
from nanoserve.parallel.ranks import Span
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.sequence import Sequence, Step

CPU = torch.device("cpu")
HERE = Placement(torch.float32, CPU)
POISON = torch.tensor([float("nan"), float("inf"), float("-inf")])

# ------------------------------------------------------------ the naive twin


def naive_attention(q, k_cache, v_cache, tables, query_lens, seq_lens, scale, window=None,
                    softcap=None):
    """Row by row, query by query, head by head, key by key; q: (num_tokens, heads, head_dim)."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    out, at = torch.zeros(q.shape, dtype=torch.float64), 0
    for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True):
        slots = [(table[p // block_size], p % block_size) for p in range(seq_len)]
        for i in range(query_len):
            seen = slots[:seq_len - query_len + i + 1]  # causal: its own position is the last
            seen = seen[-window:] if window else seen
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // num_kv_heads)
                keys = torch.stack([k_cache[b, o, kv_head] for b, o in seen]).double()
                values = torch.stack([v_cache[b, o, kv_head] for b, o in seen]).double()
                scores = (keys @ q[at + i, head].double() * scale).tolist()
                if softcap is not None:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                weights = [math.exp(s) for s in scores]
                out[at + i, head] = sum(w / sum(weights) * v for w, v in zip(weights, values))
        at += query_len
    return out


def make_batch(tables, query_lens, seq_lens, block_size=4) -> Batch:
    """A batch as the attention sees it; decode rows must come first. Padding points at block 0."""
    width = max(map(len, tables))
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int()
    nothing = torch.zeros(0, dtype=torch.int32)
    block_tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    return Batch(
        input_ids=torch.zeros(sum(query_lens), dtype=torch.int32), positions=nothing,
        slot_mapping=nothing, cu_seqlens_q=cu_seqlens_q, logits_indices=nothing,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32), prompt_logprob_indices=nothing,
        sample_rows=nothing, block_copies=nothing, seeds=nothing, temperature=nothing,
        top_k=nothing, top_p=nothing, min_p=nothing, num_unknown=0, block_size=block_size,
        host=dict(block_tables=block_tables.numpy().ravel()), block_tables=block_tables,
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


def random_mix(rng: random.Random, block_size: int):
    """Tables, query lengths and sequence lengths of decode rows and chunks, some with a prefix,
    which half of the time they share with the longest as far as it goes.

    Block 0 belongs to nobody: it is what the padding of a table points at.
    """
    query_lens = [1] * rng.randrange(4) + [rng.randrange(2, 20) for _ in range(rng.randrange(1, 4))]
    seq_lens = [n + rng.choice((0, 1, rng.randrange(40))) for n in query_lens]
    needed = [-(-n // block_size) for n in seq_lens]
    blocks = rng.sample(range(1, 1 + sum(needed)), sum(needed))
    tables = [[blocks.pop() for _ in range(n)] for n in needed]
    longest = max(tables, key=len)
    for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True):
        if rng.random() < 0.5:  # blocks that nobody writes to in this step
            num_full = (seq_len - query_len) // block_size
            table[:num_full] = longest[:num_full]
    return tables, query_lens, seq_lens, 1 + sum(needed)


def assert_equals_twin(tables, query_lens, seq_lens, num_blocks, heads=(4, 2), head_dim=8,
                       block_size=4, dtype=torch.float32, seed=0, window=None,
                       softcap=None) -> None:
    caches = poisoned_cache(num_blocks, block_size, heads[1], head_dim, tables, query_lens,
                            seq_lens, seed, window)
    plain = [cache.to(dtype) for cache in caches]
    q = torch.randn(sum(query_lens), heads[0], head_dim,
                    generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    scale = 0.3  # not head_dim ** -0.5, which torch would take by itself
    expected = naive_attention(q, *plain, tables, query_lens, seq_lens, scale, window, softcap)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for caches in (plain, *(in_runs(plain, in_run) for in_run in (1, 3, 4))):
        before = [cache.clone() for cache in caches]
        batch = make_batch(tables, query_lens, seq_lens, block_size)
        got = paged_attention(q, *caches, batch, scale, window, softcap)
        assert got.dtype == dtype
        assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
        for cache, x in zip(caches, before, strict=True):  # attention reads; store_kv writes
            assert_close(cache, x, rtol=0, atol=0, equal_nan=True)


def in_runs(caches, in_run):
    """The same blocks in the order of memory that is the engine's, as many as that side by side;
    what the last run lacks is poison."""
    missing = -len(caches[0]) % in_run
    poison = [torch.full_like(cache[:1], torch.nan).expand(missing, -1, -1, -1) for cache in caches]
    filled = [torch.cat(pair).view(-1, in_run * caches[0].shape[1], *caches[0].shape[2:])
              for pair in zip(caches, poison)]
    return [cache.copy_(x) for cache, x in zip(new_caches(filled[0].shape, caches[0].dtype, CPU),
                                               filled)]


# ---------------------------------------------------------- paged attention


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (5, 1)], ids=str)
def test_ragged_mixes_equal_the_twin(heads, block_size):
    rng = random.Random(f"{heads} {block_size}")
    for seed in range(3):
        *rows, num_blocks = random_mix(rng, block_size)
        assert_equals_twin(*rows, num_blocks, heads, rng.choice((2, 8, 24)), block_size, seed=seed)


@pytest.mark.parametrize("query_lens, seq_lens", [
    ([1], [1]),  # the first token of all: it sees itself
    ([1, 1, 1], [4, 5, 8]),  # decoding, on both sides of a block's end
    ([4], [4]),  # a whole prompt of exactly one block
    ([3], [7]),  # a chunk after another chunk that ended inside a block
    ([4], [8]),  # a chunk after a cached block
    ([1, 1, 2, 9], [1, 13, 2, 30]),  # all of it in one step, lengths far apart
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_corners(query_lens, seq_lens, dtype):
    blocks = iter(range(1, 100))
    tables = [[next(blocks) for _ in range(-(-n // 4))] for n in seq_lens]
    assert_equals_twin(tables, query_lens, seq_lens, next(blocks), dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_windows_and_caps_of_ragged_mixes_equal_the_twin(block_size, softcap):
    """Windows of one key, two, a block and its neighbours, several blocks, and beyond the longest
    row. What lies in the blocks before a window is poison: they were given back."""
    rng = random.Random(f"{block_size} {softcap}")
    for window in sorted({1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size + 3,
                          13, 1000, None} - {0}, key=str):
        *rows, num_blocks = random_mix(rng, block_size)
        assert_equals_twin(*rows, num_blocks, rng.choice(((4, 2), (5, 1), (4, 4))),
                           block_size=block_size, window=window, softcap=softcap)


WINDOWS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 29, 30, 31]


@pytest.mark.parametrize("query_lens, seq_lens", [
    ([1], [1]), ([1], [30]),
    ([1, 1, 1, 1], [4, 5, 8, 30]),  # a group whose rows begin in different blocks
    ([1, 1, 1], [16, 17, 30]),
    ([4], [4]), ([30], [30]),  # whole prompts
    ([3], [7]), ([4], [8]), ([2], [30]), ([9], [29]),  # chunks whose queries begin in other blocks
    ([1, 1, 2, 9], [1, 13, 2, 30]),
])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_every_window_in_the_corners(query_lens, seq_lens, softcap):
    blocks = iter(range(1, 100))
    tables = [[next(blocks) for _ in range(-(-n // 4))] for n in seq_lens]
    num_blocks = next(blocks)
    for window in WINDOWS:
        assert_equals_twin(tables, query_lens, seq_lens, num_blocks, window=window, softcap=softcap)
    assert_equals_twin(tables, query_lens, seq_lens, num_blocks, dtype=torch.bfloat16, window=5,
                       softcap=softcap)


def test_decodes_in_several_pieces_keep_their_windows(monkeypatch):
    """A piece is as many rows as need little padding; with a window more of them do."""
    seq_lens = [30, 3, 17, 29, 8]
    blocks = iter(range(1, 100))
    tables = [[next(blocks) for _ in range(-(-n // 4))] for n in seq_lens]
    cache = torch.zeros(40, 4, 2, 8)
    for padded, keys, num_pieces in ((0, 200, 4), (24, 200, 2), (200, 200, 1), (200, 64, 2)):
        monkeypatch.setattr(attention, "MAX_PADDED_KEYS", padded)  # blocks of 4: 8, 1, 5, 8 and 2
        monkeypatch.setattr(attention, "MAX_KEYS", keys)
        batch = make_batch(tables, [1] * 5, seq_lens)
        assert len(attention._cut_decodes(batch, None, cache, 4)) == num_pieces
        for window in (1, 6, 8, None):
            assert_equals_twin(tables, [1] * 5, seq_lens, 40, window=window, softcap=2.0)


def test_blocks_are_found_in_their_runs():
    """The order in which a row has its blocks doesn't matter to a sum, so runs are read as they
    lie; each row's own blocks in them are counted, and no other's."""
    tables = np.array([[9, 10, 2, 0], [4, 0, 0, 0], [8, 3, 1, 2]])
    runs, widths, blocks_at = attention._runs_of(tables, np.array([0, 0, 1]), np.array([3, 1, 4]), 4)
    assert runs[0].tolist() == [0, 2] and widths.tolist() == [2, 1, 1]
    assert runs[1:, 0].tolist() == [1, 0]
    assert blocks_at[0].tolist() == [[-1, -1, 2, -1], [-1, 0, 1, -1]]
    assert blocks_at[1].tolist() == [[0, -1, -1, -1], [-1] * 4]
    assert blocks_at[2].tolist() == [[-1, 2, 3, 1], [-1] * 4]


def test_a_run_is_read_once_for_all_of_its_blocks():
    """Four blocks side by side are one bag for a head and row, and four that lie apart are four."""
    cache = torch.zeros(5, 16, 2, 8)
    for table, bags in (([4, 5, 6, 7], 1), ([7, 5, 6, 4], 1), ([3, 4, 5, 6], 2), ([0, 4, 8, 12], 4)):
        batch = make_batch([table], [1], [16])
        [piece] = attention._cut_decodes(batch, None, cache, 4)
        assert len(piece.own.keys.starts) == 4 * bags


def test_a_cap_and_a_window_matter():
    """The twin's own answers differ: otherwise the tests above would prove nothing."""
    tables, query_lens, seq_lens = [[1, 2, 3]], [3], [11]
    k, v = poisoned_cache(4, 4, 2, 8, tables, query_lens, seq_lens)
    q = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(5))
    rows = q, k, v, tables, query_lens, seq_lens, 0.3
    answers = [naive_attention(*rows, *options) for options in (
        (None, None), (5, None), (6, None), (None, 0.5), (5, 0.5))]
    for i, one in enumerate(answers):
        assert all((one - other).abs().max() > 0.01 for other in answers[:i])


def test_rows_share_the_blocks_of_a_common_prefix():
    """Two decode rows and a chunk read the same two blocks, and then each its own."""
    tables = [[5, 2, 7], [5, 2, 1], [5, 2, 3, 4]]
    assert_equals_twin(tables, [1, 1, 5], [9, 12, 13], num_blocks=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("keys", [0, 4, 2 ** 12])
def test_decodes_attend_once_to_a_beginning_they_share(monkeypatch, dtype, softcap, keys):
    """Five blocks in common, then none, part of one, one exactly, and two that another row fills;
    all rows in one piece, some, or each by itself. A row with nothing of its own but the query
    leaves the last shared block to be read as its own."""
    monkeypatch.setattr(attention, "MAX_PADDED_KEYS", keys)
    common = [9, 3, 14, 6, 1]
    tables = [common, [*common, 2], [*common, 4, 5, 7], [*common, 8, 10]]
    for seq_lens in ([20, 21, 29, 28], [19, 24, 32, 25]):
        for window in (None, 30, 7):
            assert_equals_twin(tables, [1] * 4, seq_lens, 15, dtype=dtype, softcap=softcap,
                               window=window, heads=(6, 2))
        batch = make_batch(tables, [1] * 4, seq_lens)
        pieces = attention._cut_decodes(batch, None, torch.zeros(15, 4, 2, 8), 6)
        assert len(pieces) == {0: 4, 4: 2}.get(keys, 1) and all(p.shared for p in pieces)
        pieces = attention._cut_decodes(batch, None, torch.zeros(4, 16, 2, 8), 6)
        assert all(p.shared.keys.shape[2] == 16 for p in pieces), "whole runs' worth of them"


def test_a_block_that_was_given_back_may_be_the_rows_own_again():
    """The table keeps the ids of blocks that no window reaches any more, for the others' places."""
    for window in (1, 4, 6):  # the query at position 15 sees 10 and what follows, from block 2 on
        assert_equals_twin([[5, 6, 5, 7], [2, 1, 2]], [1, 1], [16, 11], 8, window=min(window, 4))
        assert_equals_twin([[5, 6, 5, 7]], [1], [16], 8, window=window)


def test_what_is_shared_is_found_by_full_blocks_alone():
    """A block with a row's query in it stays the row's own; few in common are not worth it."""
    same, full = np.arange(8)[None].repeat(3, 0), np.array([8, 6, 7])
    assert attention._num_shared(np.concatenate((same, same[:, :1]), axis=1), full) == 6
    same[2, 4] = 99
    assert attention._num_shared(same, full) == 4
    same[1, 3] = 99
    assert attention._num_shared(same, full) == 0
    assert attention._num_shared(same[:1], full[:1]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("query_lens, seq_lens, groups", [
    ([3, 3, 3], [23, 23, 23], [3]),  # 20 shared keys and three own ones, none of them cached
    ([4, 4], [24, 28], [2]),  # whole blocks of their own, some of them cached
    ([2, 5, 7, 3], [23, 27, 35, 22], [2, 2]),  # padded queries and keys
    ([2, 3, 9, 3, 9], [22, 23, 39, 24, 40], [2, 3]),  # by length
    ([1, 1, 3, 3, 20], [21, 30, 24, 23, 20], [2]),  # beside decodes and a prompt of its own
    ([3, 3, 6], [23, 23, 14], [2]),  # two blocks are cached for the last, which keeps nobody back
    ([3], [23], []),  # nobody to share with
    ([3, 3], [19, 18], []),  # the fourth block ends behind a first query: three are too few
])
def test_chunks_attend_once_to_a_beginning_they_share(query_lens, seq_lens, groups, softcap, dtype):
    """Each with its own keys and queries, of any number; the poison behind them stays out."""
    common, blocks = [9, 3, 14, 6, 1], iter(range(15, 100))
    tables = [[*common, *(next(blocks) for _ in range(-(-n // 4) - 5))] for n in seq_lens]
    if 20 in query_lens:
        tables[query_lens.index(20)] = [next(blocks) for _ in range(5)]
    num_blocks = next(blocks)
    for window in (None, 7):
        assert_equals_twin(tables, query_lens, seq_lens, num_blocks, (6, 2), dtype=dtype,
                           softcap=softcap, window=window)
    pieces = attention._cut_chunks(make_batch(tables, query_lens, seq_lens), None,
                                   torch.zeros(num_blocks, 4, 2, 8), 6)
    own = [piece.own for piece in pieces if isinstance(piece, attention.Group)]
    assert sorted(len(copy.keys) // 2 for copy in own) == groups


def test_a_group_of_chunks_is_no_larger_than_its_scores_may_be(monkeypatch):
    """Five rows of 3 queries, 20 shared keys and 4 own ones: 24 * 6 scores a query."""
    tables = [[9, 3, 14, 6, 1, 20 + i] for i in range(5)]
    rows = tables, [3] * 5, [23] * 5
    for rows_at_most, groups in ((5, [5]), (4, [4]), (3, [3, 2]), (2, [2, 2]), (1, [])):
        monkeypatch.setattr(attention, "MAX_SCORES", rows_at_most * 3 * 24 * 6)
        pieces = attention._cut_chunks(make_batch(*rows), None, torch.zeros(30, 4, 2, 8), 6)
        assert [len(piece.own.keys) // 2 for piece in pieces
                if isinstance(piece, attention.Group)] == groups
        assert_equals_twin(*rows, 30, (6, 2))


@pytest.mark.parametrize("tile", [1, 3, 8, 128])
def test_chunks_in_tiles_of_any_size(monkeypatch, tile):
    monkeypatch.setattr(attention, "TILE", tile)
    for window in (None, 1, 5, 16):
        assert_equals_twin([[5, 2], [1, 3, 7, 4]], [6, 9], [6, 14], 8, window=window)


def test_new_caches_are_read_where_they_lie(monkeypatch):
    """In any other order in memory the whole cache would be copied for each layer."""
    k_cache, v_cache = new_caches((6, 4, 2, 8), torch.float32, CPU)
    assert k_cache.shape == v_cache.shape == (6, 4, 2, 8)
    store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8) + 1, k_cache, v_cache,
             places_of(torch.tensor([9]), 4))
    assert k_cache[2, 1].eq(1).all() and k_cache.sum() == 16  # slot 9: block 2, offset 1
    assert v_cache[2, 1].eq(2).all() and v_cache.sum() == 32
    seen = []
    monkeypatch.setattr(attention.Group, "attend", lambda self, q, k, v, *_: seen.extend((k, v)))
    paged_attention(torch.ones(1, 4, 8), k_cache, v_cache, make_batch([[2]], [1], [2]), 1.0)
    assert [lines.data_ptr() for lines in seen] == [k_cache.data_ptr(), v_cache.data_ptr()]


def test_float16_scores_do_not_overflow_before_they_are_scaled():
    """64 * 40 * 40 is 102,400, and float16 ends at 65,504."""
    caches = new_caches((2, 4, 1, 64), torch.float16, CPU)
    caches[0].fill_(40), caches[1].fill_(1)
    for num_queries in (1, 2):
        q = torch.full((num_queries, 1, 64), 40, dtype=torch.float16)
        out = paged_attention(q, *caches, make_batch([[1]], [num_queries], [3]), 2 ** -10)
        assert out.eq(1).all()


@pytest.mark.parametrize("window", [None, 2])
def test_a_key_that_is_hidden_may_be_huge(window):
    """Its scores, infinite in float16, must not reach the queries before it, nor those whose window
    has passed it: their keys and values may lie in a block that others hit."""
    caches = new_caches((4, 4, 1, 8), torch.float16, CPU)
    caches[0].fill_(1), caches[1].fill_(2)
    caches[0][2, 1] = 60_000  # position 5 of 8
    q = torch.full((8, 1, 8), 10, dtype=torch.float16)
    out = paged_attention(q, *caches, make_batch([[1, 2]], [8], [8]), 1.0, window)
    seen = [p for p in range(8) if p < 5 or window is not None and p > 6]
    assert out[seen].eq(2).all()


def test_a_key_that_is_hidden_may_be_huge_in_a_group():
    """Two rows behind four shared blocks: the last of three keys of the second's own is the one."""
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    caches = new_caches((7, 4, 1, 8), torch.float16, CPU)
    caches[0].fill_(1), caches[1].fill_(2)
    caches[0][6, 2] = 60_000
    batch = make_batch(tables, [3, 3], [19, 19])
    out = paged_attention(torch.full((6, 1, 8), 10, dtype=torch.float16), *caches, batch, 1.0)
    [group] = next(iter(batch.pieces.values()))
    assert isinstance(group, attention.Group) and out[:5].eq(2).all()


def test_a_group_copies_no_more_than_its_rows_would_one_by_one(monkeypatch):
    """Four shared blocks are no reason to pad 14 blocks to 29; nor is there room for any number of
    keys. Rows of as many own blocks as said, 3 queries each."""
    def groups(*widths: int) -> list[int]:
        blocks = iter(range(5, 1000))
        tables = [[1, 2, 3, 4, *(next(blocks) for _ in range(n))] for n in widths]
        batch = make_batch(tables, [3] * len(widths), [16 + 4 * n for n in widths])
        pieces = attention._cut_chunks(batch, None, torch.zeros(1, 4, 2, 8), 6)
        return [len(p.own.keys) // 2 for p in pieces if isinstance(p, attention.Group)]

    assert groups(29, 25) == [2] and groups(29, 24) == [] and groups(29, 25, 14) == [2]
    assert groups(29, 14, 14) == [2] and groups(10, 10, 10, 10) == [4]
    monkeypatch.setattr(attention, "MAX_OWN_KEYS", 80)  # 20 blocks
    assert groups(10, 10, 10, 10) == [2, 2] and groups(21, 21) == []


def test_families_with_a_first_block_in_common_are_groups_of_their_own():
    """Every prompt begins with the same 3 blocks, one half goes on differently from the other."""
    tables = [[1, 2, 3, *range(10 + 10 * (i % 2), 18 + 10 * (i % 2)), 30 + i] for i in range(6)]
    rows = tables, [3] * 6, [47] * 6
    pieces = attention._cut_chunks(make_batch(*rows), None, torch.zeros(40, 4, 2, 8), 6)
    assert [len(piece.own.keys) // 2 for piece in pieces] == [3, 3]
    assert [piece.shared.keys.shape[2] // 4 for piece in pieces] == [11, 11]
    assert_equals_twin(*rows, 40, (6, 2))


def test_the_next_layer_gathers_into_the_same_memory():
    """Its last contents, poison here, must not matter."""
    batch = make_batch([[1, 2], [3, 4]], [1, 3], [6, 7])
    caches = poisoned_cache(5, 4, 2, 8, [[1, 2], [3, 4]], [1, 3], [6, 7])
    q = torch.randn(4, 4, 8)
    first = paged_attention(q, *caches, batch, 0.3)
    place = batch.scratch.memory.fill_(float("nan")).data_ptr()
    assert torch.equal(paged_attention(q, *caches, batch, 0.3), first)
    assert batch.scratch.memory.data_ptr() == place


def decode_step(builder: BatchBuilder, tables: list[list[int]], seq_len: int) -> Batch:
    """A step in which rows with these blocks, and as many tokens, decode one each."""
    step = Step(0)
    for row, table in enumerate(tables):
        seq = Sequence(str(row), [1] * seq_len, SamplingParams(), row=row, block_table=table)
        step.num_new_tokens[seq] = 1
        step.starts.append(seq_len - 1)
        step.sampling.append(seq)
    return builder.build(step)


@pytest.mark.parametrize("room", [2 ** 28, 2 ** 12, 0])
@pytest.mark.parametrize("in_run", [1, 2, 4])
def test_what_rows_share_is_copied_anew_when_a_step_writes_there(monkeypatch, in_run, room):
    """Block 2 is freed, another row writes to it, and it comes to be shared again; a step that
    shares less, or more, or nothing, does no harm. Room for some of the copies gives the same."""
    monkeypatch.setattr(kv_cache, "MAX_KEPT_BYTES", room)
    generator = torch.Generator().manual_seed(0)
    shape = 20 // in_run, 4 * in_run, 2, 8
    layers = [new_caches(shape, torch.float32, CPU) for _ in range(3)]
    for cache in (cache for layer in layers for cache in layer):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    builder = BatchBuilder(4, 64, 64, 4, CPU)
    common = [3, 4, 2, 7, 5, 6]
    steps = [  # tables and length; which blocks the rows have in common, and what is written before
        ([[*common, 8], [*common, 9]], 26, None), ([[*common, 8], [*common, 9]], 27, None),
        ([[*common, 8], [*common, 9], [*common[:4], 1, 12, 13]], 28, None),
        ([[*common, 8], [*common, 9]], 28, None), ([[11, 2, 10, 14], [15, 16]], 8, 2),
        ([[*common, 8], [*common, 9]], 25, None), ([[*common, 8], [*common, 9]], 26, None),
        ([[17, 4, 2, 7, 5, 6, 8], [17, 4, 2, 7, 5, 6, 9]], 26, 17),
        ([[*common, 8], [*common, 9]], 26, None)]
    for tables, seq_len, rewritten in steps:
        batch = decode_step(builder, tables, seq_len)
        if rewritten is not None:
            write = Step(0)
            seq = Sequence("9", [1] * 4, SamplingParams(), row=3, block_table=[rewritten])
            write.num_new_tokens[seq] = 4
            write.starts.append(0)
            written = builder.build(write)
            for k_cache, v_cache in layers:
                store_kv(*torch.randn(2, 4, 2, 8, generator=generator), k_cache, v_cache,
                         places_of(written.slot_mapping, k_cache.shape[1]))
            batch = decode_step(builder, tables, seq_len)
        q = torch.randn(len(tables), 4, 8, generator=generator)
        for k_cache, v_cache in layers:
            blocks = [cache.reshape(20, 4, 2, 8) for cache in (k_cache, v_cache)]
            expected = naive_attention(q, *blocks, tables, [1] * len(tables),
                                       [seq_len] * len(tables), 0.5)
            assert_close(paged_attention(q, k_cache, v_cache, batch, 0.5), expected.float())


def test_what_rows_share_is_copied_once():
    """The second step reads the first one's copy: what lies in the cache now, unannounced, is not
    looked at. A batch without a builder, whose writes nobody tells, looks."""
    k_cache, v_cache = new_caches((20, 4, 2, 8), torch.float32, CPU)
    q, builder, tables = torch.randn(2, 4, 8), BatchBuilder(4, 64, 64, 4, CPU), [
        [3, 4, 2, 7, 8], [3, 4, 2, 7, 9]]
    k_cache.normal_(), v_cache.normal_()
    first = paged_attention(q, k_cache, v_cache, decode_step(builder, tables, 18), 0.5)
    alone = make_batch(tables, [1, 1], [18, 18])
    assert_close(paged_attention(q, k_cache, v_cache, alone, 0.5), first)
    k_cache[2], v_cache[2] = float("nan"), float("nan")
    again = paged_attention(q, k_cache, v_cache, decode_step(builder, tables, 18), 0.5)
    assert torch.equal(again, first)
    assert paged_attention(q, k_cache, v_cache, alone, 0.5).isnan().all()


def test_a_table_wider_than_the_sequence_is_not_read_to_its_end():
    """Blocks can be allocated ahead of the tokens: those behind `seq_len` hold poison."""
    assert_equals_twin([[3, 1, 2], [6, 4, 5]], [1, 2], [2, 3], num_blocks=7)


def test_a_chunk_attends_to_its_own_end_and_not_to_the_prompts():
    """Chunked prefill once took the whole prompt's length for the KV length and attended to memory
    nobody had written yet (nano-vllm #212). Here a prompt of 12 has blocks for all of it; the first
    chunk of 5 finds poison behind position 4, the second starts from position 5.
    """
    assert_equals_twin([[3, 1, 2]], [5], [5], num_blocks=4)
    assert_equals_twin([[3, 1, 2]], [4], [9], num_blocks=4)


def test_store_kv_writes_the_slots_of_the_mapping_and_nothing_else():
    k_cache, v_cache = torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 2, 6)
    k, v = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    places = places_of(torch.tensor([9, 0, 7], dtype=torch.int32), 4)
    store_kv(k, v, k_cache, v_cache, places)
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(3, 4, 2, 6)
        # Slot 9 is block 2, offset 1; slot 7 is block 1, offset 3.
        expected[2, 1], expected[0, 0], expected[1, 3] = new
        assert torch.equal(cache, expected)


# -------------------------------------------- attention inside the engine


@pytest.fixture
def greedy(qwen3):
    """Runs prompts on a new engine whose KV cache is full of NaN: (outputs, positions by step)."""

    def run(prompts, max_tokens, **options):
        llm = LLM(qwen3, **dict(num_gpu_blocks_override=64) | options)
        for k, v in llm.runner.kv_cache:
            k.fill_(float("nan")), v.fill_(float("nan"))
        positions, unpack = [], llm.runner.builder.unpack

        def recording_unpack(buffer):
            batch = unpack(buffer)
            positions.append(batch.positions.tolist())
            return batch

        llm.runner.builder.unpack = recording_unpack
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
        return outputs, positions

    return run


def test_a_decoded_token_stands_right_behind_the_last_one(greedy):
    """The decoded token's position was once off by one: wrong text and no crash (nano-vllm #67).

    A prompt of 5 takes positions 0 to 4; the token it yields is *computed* next, at position 5.
    """
    _, positions = greedy([[7, 7, 7, 7, 7]], max_tokens=4)
    assert positions == [[0, 1, 2, 3, 4], [5], [6], [7]]


def test_a_prefix_hit_reads_the_cached_keys_and_rope_goes_on(greedy, references):
    """A hit was recorded, but attention read only this pass's keys and RoPE restarted at 0; the
    demo's texts were shorter than one block, so it could not show (MinivLLM #98).

    40 tokens, two blocks of them cached: positions 32 to 39 are computed, the text is the same.
    """
    prompt = list(range(40))
    (first, second), positions = greedy([prompt, prompt], max_tokens=3)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert positions == [list(range(40)), [40], [41], list(range(32, 40)), [40], [41]]
    expected, _ = references("qwen3", prompt, 3)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected


def test_chunks_in_a_cache_of_nan_give_the_reference_text(greedy, references):
    """The whole way of nano-vllm #212: a chunk that looks past its end would meet NaN."""
    prompt = list(range(40))
    (output,), positions = greedy([prompt], max_tokens=3, max_num_batched_tokens=7)
    assert [p[0] for p in positions] == [0, 7, 14, 21, 28, 35, 40, 41]
    assert output.outputs[0].token_ids == references("qwen3", prompt, 3)[0]


# -------------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 24), (3, 4, 16)], ids=["hidden", "heads"])
def test_rms_norm_equals_transformers(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    weight = torch.linspace(0.5, 2, shape[-1]).to(dtype)
    ours = RMSNorm(shape[-1], 0.1, Placement(dtype, CPU))  # an eps that shows where it is added
    ours.weight_loader("weight", weight)
    theirs = LlamaRMSNorm(shape[-1], 0.1)
    theirs.weight.data = weight
    # bfloat16: transformers rounds once more, between the division and the weight.
    tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-2)
    assert_close(ours(x), theirs(x), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("theirs", [Gemma2RMSNorm, Gemma3RMSNorm])
def test_a_norm_around_one_equals_gemmas(theirs, dtype):
    """1 + weight in bfloat16 has 8 bits, most of them spent on the 1: Gemma computes in float32,
    and so must we, to the last bit but one."""
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    weight = torch.linspace(-0.02, 0.02, 24).to(dtype)
    ours, theirs = RMSNorm(24, 0.1, Placement(dtype, CPU), offset=True), theirs(24, 0.1)
    ours.weight_loader("weight", weight)
    ours.finish_loading()
    theirs.weight.data = weight
    assert ours(x).dtype == dtype
    tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=8e-3, atol=0)
    assert_close(ours(x), theirs(x), **tolerance)
    assert (ours(x) != theirs(x)).float().mean() < (0.01 if dtype == torch.bfloat16 else 1)


MOE_SIZES = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, vocab_size=8, max_position_embeddings=64)


def their_experts(architecture: str, seed: int, **entries):
    """transformers' block with random weights, its tensors by checkpoint name, and our config."""
    config_class, block = (
        (MixtralConfig, MixtralSparseMoeBlock) if architecture == "MixtralForCausalLM"
        else (Qwen3MoeConfig, Qwen3MoeSparseMoeBlock))
    block = block(config_class(**MOE_SIZES, **entries))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    gates, ups = block.experts.gate_up_proj.data.chunk(2, dim=1)
    experts = list(zip(gates, ups, block.experts.down_proj.data, strict=True))
    config = ModelConfig.from_dict(dict(architectures=[architecture], **MOE_SIZES, **entries))
    return block.eval(), experts, config


def load_experts(moe: MoE, block, experts) -> None:
    moe.gate.weight_loader("weight", block.gate.weight.data)
    for i, (gate, up, down) in enumerate(experts):
        moe.experts.weight_loader("gate_up_proj", gate, f"{i}.gate")
        moe.experts.weight_loader("gate_up_proj", up, f"{i}.up")
        moe.experts.weight_loader("down_proj", down, f"{i}.down")


QWEN3_MOE = dict(num_experts=5, moe_intermediate_size=10)


@pytest.mark.parametrize("architecture, entries", [
    ("MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    ("MixtralForCausalLM", dict(num_local_experts=3, num_experts_per_tok=3)),
    ("Qwen3MoeForCausalLM", dict(QWEN3_MOE, num_experts_per_tok=2, norm_topk_prob=True)),
    ("Qwen3MoeForCausalLM", dict(QWEN3_MOE, num_experts_per_tok=2, norm_topk_prob=False)),
    ("Qwen3MoeForCausalLM", dict(QWEN3_MOE, num_experts_per_tok=1, norm_topk_prob=False)),
], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_mixture_of_experts_equals_transformers(architecture, entries, dtype):
    """Also of one token, which leaves most experts without any."""
    block, experts, config = their_experts(architecture, 0, **entries)
    moe = MoE(config, Placement(dtype, CPU), expert_parallel=False)
    load_experts(moe, block, experts)
    for num_tokens in (1, 2, 33):
        x = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = block.to(dtype)(x[None])[0]
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        assert_close(moe(x), expected, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_equals_transformers(dtype):
    """In float32, and rounded once. Far positions included: in bfloat16 4,095 and 4,096 would be
    the same angle."""
    positions = torch.tensor([0, 1, 17, 4095, 4096, 100_000], dtype=torch.int32)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16,
                         rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 16, generator=generator).to(dtype)  # (num_tokens, num_heads, head_dim)
    k = torch.randn(6, 2, 16, generator=generator).to(dtype)
    theirs = LlamaRotaryEmbedding(config)(q.float(), positions[None])
    expected = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(
        *(x.float().transpose(0, 1)[None] for x in (q, k)), *theirs)]
    cos, sin = RotaryEmbedding(16, RopeConfig(theta=10000.0), CPU)(positions)
    caches = [torch.zeros(3, 2, 2, 16, dtype=dtype) for _ in "kv"]
    turned = norm_rope_store(torch.cat((q, k, k), dim=1), None, 0, cos, sin, *caches,
                             places_of(torch.arange(6), 2))
    tolerance = 1e-6 if dtype == torch.float32 else 2 ** -8  # half of the last bit
    for got, exact in zip((turned, caches[0].view(6, 2, 16)), expected, strict=True):
        assert got.dtype == dtype
        assert_close(got.float(), exact, rtol=tolerance, atol=1e-6)
    assert torch.equal(caches[1].view(6, 2, 16), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_rope_of_heads_equal_transformers(dtype):
    """Theirs is a norm and then RoPE; here the norm's weights are in cos and sin. q's differ from
    k's."""
    positions = torch.tensor([0, 1, 17, 4095, 4096, 100_000], dtype=torch.int32)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16,
                         rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, 8, 16, generator=generator).to(dtype)
    norm, exact = HeadNorm(16, 3, 1e-6, Placement(dtype, CPU), offset=False), []
    for part, heads in (("q", slice(0, 4)), ("k", slice(4, 6))):
        weight = torch.rand(16, generator=generator).add(0.5).to(dtype)
        norm.weight_loader("weight", weight, part)
        theirs = LlamaRMSNorm(16, 1e-6)
        theirs.weight.data = weight.float()
        exact.append(theirs(qkv[:, heads].float()).transpose(0, 1)[None])
    angles = LlamaRotaryEmbedding(config)(exact[0], positions[None])
    exact = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*exact, *angles)]
    cos, sin = RotaryEmbedding(16, RopeConfig(theta=10000.0), CPU)(positions)
    caches, before = [torch.zeros(3, 2, 2, 16, dtype=dtype) for _ in "kv"], qkv.clone()
    places = places_of(torch.arange(6), 2)
    q = norm_rope_store(qkv, norm.weight, 1e-6, cos, sin, *caches, places)
    assert norm_rope_store(qkv[:0], norm.weight, 1e-6, cos[:0], sin[:0], *caches,
                           places_of(torch.arange(0), 2)).shape == (0, 4, 16)
    tolerance = 1e-6 if dtype == torch.float32 else 2 ** -8  # half of the last bit
    for got, expected in zip((q, caches[0].view(6, 2, 16)), exact, strict=True):
        assert_close(got.float(), expected.float(), rtol=tolerance, atol=5e-6)
    assert torch.equal(qkv, before) and torch.equal(caches[1].view(6, 2, 16), qkv[:, 6:])


def test_indices_are_as_wide_as_they_must_be():
    """32 bits for speed; 64 where a cache, or a list of its lines, is longer than they count."""
    small, large = (torch.empty(n, device="meta") for n in (2 ** 31 - 1, 2 ** 31))
    assert kv_cache.index_dtype(small) is np.int32 and kv_cache.index_dtype(large) is np.int64
    assert kv_cache.index_dtype(small, 2 ** 31) is np.int64


def test_many_tokens_turn_in_slices(monkeypatch):
    """And become what they would in one go, each with its own position and slot."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(601, 8, 16, generator=generator)
    cos, sin = RotaryEmbedding(16, RopeConfig(), CPU)(torch.arange(601))
    weight = torch.rand(3, 1, 16, generator=generator)
    places = places_of(torch.randperm(800)[:601], 16)
    results = []
    for size in (ops.SLICE, 10 ** 6):
        monkeypatch.setattr(ops, "SLICE", size)
        caches = [torch.zeros(50, 16, 2, 16) for _ in "kv"]
        results.append((norm_rope_store(qkv, weight, 1e-6, cos, sin, *caches, places), *caches))
    assert all(map(torch.equal, *results))


def test_an_epsilon_is_float32_whatever_the_default():
    """It is made once: what another library had set at that moment must not stay in it."""
    x, weight = torch.full((1, 8), 1e-4), torch.ones(8)
    torch.set_default_dtype(torch.float16)
    try:
        got = ops.rms_norm(x, weight, 1.5e-8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(got, x / (1e-8 + 1.5e-8) ** 0.5, rtol=1e-6, atol=0)


def test_linear_puts_each_part_into_its_rows():
    """Biases as well: their loader crashed, or left them out (nano-vllm #125, #203)."""
    sizes = {"q": 4, "k": 2, "v": 2}
    linear = Linear(Span.whole(3), {part: Span.whole(n) for part, n in sizes.items()}, True, HERE)
    weights = {part: torch.randn(n, 3) for part, n in sizes.items()}
    biases = {part: torch.randn(n) for part, n in sizes.items()}
    for part in ("v", "q", "k"):  # checkpoints are in no particular order
        linear.weight_loader("weight", weights[part], part)
        linear.weight_loader("bias", biases[part], part)
    linear.finish_loading()
    x = torch.randn(5, 3)
    expected = torch.cat([x @ weights[p].T + biases[p] for p in "qkv"], dim=-1)
    assert_close(linear(x), expected)


def test_a_linear_of_one_part_needs_no_name():
    linear = Linear(Span.whole(2), {"all": Span.whole(3)}, False, HERE)
    weight = torch.randn(3, 2)
    linear.weight_loader("weight", weight)
    assert linear.bias is None and torch.equal(linear(torch.eye(2)), weight.T)


@pytest.mark.parametrize("shape, part", [((4, 4), "q"), ((2, 3), "q"), ((3, 4), "q"), ((4, 3), "k"),
                                         ((1, 3), "q"), ((4, 1), "q"), ((12,), "q")])
def test_linear_refuses_a_wrong_shape(shape, part):
    """Also one that torch would broadcast: (1, 3) into four rows copies without a complaint."""
    linear = Linear(Span.whole(3), {"q": Span.whole(4), "k": Span.whole(2)}, False, HERE)
    expected = (4, 3) if part == "q" else (2, 3)
    with pytest.raises(ValueError) as error:
        linear.weight_loader("weight", torch.zeros(shape), part)
    assert str(shape) in str(error.value) and str(expected) in str(error.value)


def test_embedding_and_norm_refuse_a_wrong_shape():
    with pytest.raises(ValueError, match=r"\(5, 4\) in the file, \(6, 4\) expected"):
        Embedding(Span.whole(6), 4, HERE).weight_loader("weight", torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"\(1,\) in the file, \(4,\) expected"):
        RMSNorm(4, 1e-6, HERE).weight_loader("weight", torch.zeros(1))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 5.0)])
def test_fused_attention_takes_whole_prompts_and_nothing_else(monkeypatch, window, softcap):
    """Where the CPU has matrix tiles, torch's own attention computes a prompt whose queries are all
    there. It knows no window, no cap and no earlier chunk. Here it is taken on every CPU."""
    monkeypatch.setattr(attention, "_is_fused_faster", lambda cache, num_queries: True)
    fused, lengths = torch.nn.functional.scaled_dot_product_attention, []

    def spy(q, *args, **options):
        lengths.append(q.shape[2])
        return fused(q, *args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    tables, query_lens, seq_lens = [[5], [2, 7, 3], [1, 9], [4, 6, 8]], [1, 9, 6, 5], [3, 9, 6, 11]
    caches = poisoned_cache(10, 4, 2, 8, tables, query_lens, seq_lens, window=window)
    q = torch.randn(21, 6, 8, generator=torch.Generator().manual_seed(1))
    batch = make_batch(tables, query_lens, seq_lens)
    got = paged_attention(q, *caches, batch, 0.3, window, softcap)
    expected = naive_attention(q, *caches, tables, query_lens, seq_lens, 0.3, window, softcap)
    assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert lengths == ([] if window or softcap else [9, 6])
