"""Paged attention in Triton against its plain torch twin; in the interpreter if there is no GPU.

Every launch is surrounded by poison: slots of the cache that no row may read, entries of the tables
behind a sequence's blocks, rows of padding, the outputs and scratch before they are written. A
batch's integers lie as in the engine: in one buffer, at any address, tables as wide as they can
get. The twin itself is held against a softmax in float64 by tests/test_ops.py.

The interpreter is exact about fp32 and fp16 alone: bf16 arithmetic is silently wrong there.
"""

import mmap
import random
from functools import partial

import pytest
import torch
from poison import Launches, as_kernels_have_it, make_batch, poisoned_cache
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture
from torch.testing import assert_close

from nanoserve import ops
from nanoserve.ops import paged_attention as twin

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanoserve import triton_attention as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64  # numbers on either side of an output that must stay as they were
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


class Guarded:
    """Stands in for `torch` in kernels: what `empty` and `empty_like` return is full of NaN, lies
    in the middle of something larger, and `check` looks whether that was written to."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype, device):
        whole = torch.full((torch.Size(shape).numel() + 2 * GUARD,), -77.0, dtype=dtype,
                           device=device)
        self.made.append(whole)
        return whole[GUARD:-GUARD].view(shape).fill_(torch.nan)

    def empty_like(self, like):
        return self.empty(*like.shape, dtype=like.dtype, device=like.device)

    def check(self):
        for whole in self.made:
            assert (whole[:GUARD] == -77).all() and (whole[-GUARD:] == -77).all()


@pytest.fixture
def attend(monkeypatch):
    """Runs the kernels on guarded memory, with a number of splits and a line of the table."""

    def run(*args, splits=1, long=1, arch="sm_80"):
        guarded = Guarded()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "torch", guarded)
            patch.setattr(kernels, "table_line", lambda device: arch)
            patch.setattr(kernels, "_num_splits", lambda tiles, heads, programs: (
                splits if programs == 108 * kernels.SPLIT_PROGRAMS else long))
            patch.setattr(kernels, "MIN_SPLIT_KEYS", 64)
            patch.setattr(kernels, "LONG_KEYS", 128)
            out = kernels.paged_attention(*args)
        guarded.check()
        return out

    return run


def cut_tables(rng, seq_lens, block_size, spare=1):
    """A table for each row, of blocks in no order, and how many blocks the cache needs: 0 belongs
    to nobody, and neither does what a table has allocated ahead."""
    needed = [-(-n // block_size) + rng.randrange(spare + 1) for n in seq_lens]
    blocks = rng.sample(range(1, 1 + sum(needed)), sum(needed))
    return [[blocks.pop() for _ in range(n)] for n in needed], 1 + sum(needed)


def cut(rng, query_lens, seq_lens, block_size):
    """Rows whose prefixes reach that far share blocks with a row before them, half of the time."""
    tables, num_blocks = cut_tables(rng, seq_lens, block_size)
    prefixes = [n - m for n, m in zip(seq_lens, query_lens, strict=True)]
    for row in range(1, len(tables)):
        other = rng.randrange(row)
        shared = min(prefixes[row], prefixes[other]) // block_size * rng.randrange(2)
        tables[row][:shared] = tables[other][:shared]
    return tables, query_lens, seq_lens, num_blocks


def to_device(batch, first: int = 3, spare: int = 5) -> None:
    """As the engine keeps them: slices of one buffer, tables `spare` wider than rows use. The
    numbers in between are no index of anything."""
    names, at = ("cu_seqlens_q", "seq_lens", "block_tables"), first
    num_rows, width = batch.block_tables.shape
    buffer = torch.full((first + 2 * num_rows + 1 + num_rows * (width + spare),), 10 ** 6,
                        dtype=torch.int32, device=DEVICE)
    shapes = ((num_rows + 1,), (num_rows,), (num_rows, width + spare))
    for name, shape in zip(names, shapes, strict=True):
        view = buffer[at:at + torch.Size(shape).numel()].view(shape)
        view[..., :getattr(batch, name).shape[-1]] = getattr(batch, name).to(DEVICE)
        at += view.numel()
        setattr(batch, name, view)


def assert_equals_twins(attend, tables, query_lens, seq_lens, num_blocks, heads, head_dim,
                        block_size, dtype=torch.float32, window=None, softcap=None, sinks=False,
                        image=0, seed=0, stored=None, **how):
    # The cache is the middle of a larger one. Padding of the tables points behind its end, and so
    # does what a window has left behind.
    caches = poisoned_cache(num_blocks + 8, block_size, heads[1], head_dim, tables, query_lens,
                            seq_lens, seed, window)
    plain = [ops.quantised(cache) if stored else cache.to(dtype) for cache in caches]
    k_cache, v_cache = (as_kernels_have_it(cache).to(DEVICE)[:num_blocks] for cache in plain)
    before = k_cache.clone(), v_cache.clone()
    # q, k and v come out of one product: rows of q are further apart than q is wide.
    wide = torch.full((sum(query_lens), heads[0] + 2 * heads[1], head_dim), torch.nan, dtype=dtype,
                      device=DEVICE)
    q = wide[:, :heads[0]].normal_(generator=torch.Generator(DEVICE).manual_seed(seed + 1))
    batch, scale = make_batch(tables, query_lens, seq_lens), 1.3 * head_dim ** -0.5
    sinks = torch.randn(heads[0]).mul(3) if sinks else None
    last = None if not image else torch.tensor([  # images, whose tokens see each other
        min(position - position % image + image, seq_len) - 1
        for n, seq_len in zip(query_lens, seq_lens, strict=True)
        for position in range(seq_len - n, seq_len)], dtype=torch.int32)
    expected = twin(q.cpu(), *plain, batch, scale, window, softcap, sinks, last)
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = max(0, seq_len - query_len + 1 - window) if window else 0  # that any query sees
        batch.block_tables[row, :first // block_size] = num_blocks + 3
        batch.block_tables[row, -(-seq_len // block_size):] = num_blocks + 3
    to_device(batch, first=3 + seed)
    got = attend(q, k_cache, v_cache, batch, scale, window, softcap,
                 *(one if one is None else one.to(DEVICE) for one in (sinks, last)), **how).cpu()
    assert got.dtype == dtype
    assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for cache, copy in zip((k_cache, v_cache), before, strict=True):
        assert_close(cache, copy, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------- paged attention

# (heads, head_dim, block_size): every ratio, size and block size, in mixed company
SHAPES = [((2, 2), 32, 16), ((4, 2), 64, 16), ((4, 1), 80, 32), ((5, 1), 128, 16),
          ((8, 1), 64, 64), ((4, 2), 128, 64), ((10, 2), 32, 32), ((2, 2), 80, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(  # which only rounds otherwise
    torch.float16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("heads, head_dim, block_size", SHAPES, ids=str)
def test_ragged_mixes_equal_the_twins(attend, heads, head_dim, block_size, dtype):
    """The first in a chunk of several tiles. In float16 each with one number of splits."""
    rng, number = random.Random(f"{heads} {head_dim} {block_size}"), SHAPES.index(
        (heads, head_dim, block_size))
    splits_of = (1, 2, 4) if dtype == torch.float32 else ((1, 2, 4)[number % 3],)
    for seed, splits in enumerate(splits_of):
        query_lens = [1] * rng.randrange(1, 4) + [
            rng.randrange(2, 40), rng.randrange(100, 200) if seed == 0 else rng.randrange(2, 40)]
        seq_lens = [n + rng.choice((0, 1, rng.randrange(40, 260))) for n in query_lens]
        assert_equals_twins(
            attend, *cut(rng, query_lens, seq_lens, block_size), heads, head_dim, block_size,
            dtype, seed=seed, splits=splits, arch=rng.choice(("sm_80", "sm_90")),
            window=rng.choice((None, rng.randrange(1, 150))), softcap=rng.choice((None, 3.0)),
            sinks=rng.choice((False, True)), image=rng.choice((0, 17, 70)))


HALF, INT8 = dict(dtype=torch.float16), dict(stored=torch.int8)
CHUNKS, FEW = ([1, 1, 20], [33, 150, 100]), ([1, 2, 5, 25, 3], [99, 2, 260, 90, 66])
SHORT = [1, 1, 33, 2, 16, 64, 15, 3, 31, 17, 32, 2, 33, 16, 3]


@pytest.mark.parametrize("lens, heads, head_dim, block_size, how", [
    # Decodes in tiles of 64 keys, and splits of at least 64: some have fewer tiles than splits.
    *((([1, 1], [seq_len, 70]), (4, 2), 32, 16, dict(splits=splits, sinks=seq_len % 2 == 0))
      for seq_len in (1, 63, 64, 65, 128, 129, 256, 300) for splits in (1, 2, 4)),
    *((([1, 1, 30, 40], [200, 64, 30, 290]), (4, 2), 32, 16, dict(window=window, splits=splits))
      for window in (1, 16, 63, 64, 65, 100, 1000) for splits in (1, 2)),
    *((CHUNKS, (4, 2), 48, block_size, dict(splits=2)) for block_size in (1, 5, 24, 128)),
    *((CHUNKS, *sizes, 16, dict(splits=2) | kind) for kind in ({}, HALF)
      for sizes in (((2, 1), 256), ((20, 1), 32), ((2, 2), 20))),
    # Tiles are numbered so that rows can be searched; some numbers belong to no tile.
    ((SHORT, SHORT), (8, 1), 32, 16, {}),
    # Drafts of some rows beside decodes: a tile holds all queries of a row, or part of them.
    (FEW, (8, 1), 64, 16, HALF | dict(splits=4, arch="sm_75")),
    *((FEW, (5, 1), 32, 16, dict(splits=splits, window=40, softcap=3.0, sinks=True, arch="sm_90"))
      for splits in (1, 4)),
    # A long row is split beside short ones. Its parts are of 128 keys; what a row without keys for
    # a part would have written is NaN.
    (([1] * 5, [9, 500, 128, 1, 129]), (4, 2), 32, 16, dict(long=4)),
    (([1] * 5, [9, 500, 128, 1, 129]), (4, 2), 32, 16, INT8 | dict(long=4, window=200)),
    (([1, 3, 3, 3, 3], [1, 9, 500, 128, 129]), (4, 2), 32, 16, dict(long=4, splits=2, sinks=True)),
    (([1, 2, 2, 2, 2], [1, 9, 500, 128, 129]), (4, 2), 32, 16, dict(
        long=4, window=390, softcap=3.0, image=70)),
    # Keys and values of 8 bits: scales of slots that no row may read are poison, too.
    (FEW, (4, 2), 32, 16, INT8 | dict(splits=1, window=70, arch="sm_90")),
    *((([1, 1, 20, 60], [1, 200, 150, 60]), *sizes, kind | INT8 | how) for kind in ({}, HALF)
      for *sizes, how in (((4, 2), 64, 16, dict(splits=4, arch="sm_75")),
                          ((5, 1), 128, 16, dict(window=70, sinks=True, arch="sm_80")),
                          ((4, 2), 128, 64, dict(softcap=3.0, splits=4, arch="sm_90")),
                          ((2, 1), 20, 5, dict(window=70, splits=4, softcap=3.0)))),
], ids=str)
def test_shapes_on_the_edges_of_tiles_windows_and_splits(attend, lens, heads, head_dim, block_size,
                                                         how):
    assert_equals_twins(attend, *cut(random.Random(head_dim), *lens, block_size), heads, head_dim,
                        block_size, **how)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_behind_the_tokens_of_rows_with_drafts_yields_zeros(attend, splits):
    """A graph's batch: rows of 1, 5 and 3 queries, two rows of padding, five tokens of it."""
    query_lens, seq_lens = [1, 5, 3], [200, 129, 3]
    tables, num_blocks = cut_tables(random.Random(1), seq_lens, 16)
    caches = [c.to(DEVICE) for c in poisoned_cache(num_blocks, 16, 2, 32, tables, query_lens,
                                                     seq_lens)]
    padded = make_batch(tables + [[10 ** 6]] * 2, query_lens + [0] * 2, seq_lens + [0] * 2)
    padded.num_decodes, padded.is_padded = 0, True
    small = make_batch(tables, query_lens, seq_lens)
    q = torch.full((14, 4, 32), torch.nan, device=DEVICE)
    q[:9] = torch.randn(9, 4, 32, device=DEVICE)
    to_device(padded), to_device(small)
    got = attend(q, *caches, padded, 0.2, splits=splits)
    assert torch.equal(got[9:], torch.zeros(5, 4, 32, device=DEVICE))
    assert_close(got[:9], attend(q[:9], *caches, small, 0.2), rtol=2e-5, atol=2e-5)


def test_large_scores_do_not_overflow(attend):
    """Multiples of 128 up to some 2 ** 18, which no order of adding them up rounds: of scores that
    were rounded two might be so near each other that their weights differ from the twin's."""
    tables, num_blocks = cut_tables(random.Random(0), [150, 150], 16)
    k_cache, v_cache = (c.to(DEVICE) for c in poisoned_cache(num_blocks, 16, 1, 32, tables,
                                                             [1, 150], [150, 150]))
    k_cache = k_cache.mul(8).round().div(8)
    q = torch.randn(151, 1, 32, device=DEVICE).mul(8).round().mul(1024)
    batch = make_batch(tables, [1, 150], [150, 150])
    expected = twin(q.cpu(), k_cache.cpu(), v_cache.cpu(), batch, 1.0)
    to_device(batch)
    for splits in (1, 2):
        got = attend(q, k_cache, v_cache, batch, 1.0, splits=splits)
        assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a cache that is mostly not there")
def test_a_cache_of_more_than_2_31_numbers(attend):
    """Block 2,100,000 of 1,024 numbers begins behind what 32 bits can say. 4 GB are reserved here,
    of which two blocks are ever touched."""
    memory = mmap.mmap(-1, 2_100_001 * 2048, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    cache = torch.frombuffer(memory, dtype=torch.float16).view(-1, 16, 1, 64)
    cache[[7, 2_100_000]] = torch.randn(2, 16, 1, 64).half()
    q = torch.randn(10, 2, 64).half()
    lens, few = ([1, 9], [20, 30]), cache[[7, 2_100_000]]
    expected = twin(q, few, few, make_batch([[1, 0], [0, 1]], *lens), 0.2)
    got = attend(q, cache, cache, make_batch([[2_100_000, 7], [7, 2_100_000]], *lens), 0.2)
    assert_close(got, expected, rtol=4e-3, atol=4e-3)


# ----------------------------------------------------------- graphs, splits


@pytest.mark.parametrize("splits", [1, 4])
def test_a_padded_step_equals_the_operations_on_its_rows(attend, splits):
    """From the product for q, k and v to attention's output, the cache included: 3 rows in a bucket
    of 8, and `ops` with the 3 rows alone."""
    seq_lens, weights = [40, 129, 1], 1 + 0.1 * torch.randn(2, 32, device=DEVICE)
    tables, num_blocks = cut_tables(random.Random(2), seq_lens, 16)
    caches = [c.to(DEVICE) for c in poisoned_cache(num_blocks, 16, 2, 32, tables, [1] * 3,
                                                   [n - 1 for n in seq_lens])]
    copies = [c.clone() for c in caches]
    slots = [table[(n - 1) // 16] * 16 + (n - 1) % 16
             for table, n in zip(tables, seq_lens, strict=True)]
    slots = torch.tensor(slots + [-1] * 5, dtype=torch.int32, device=DEVICE)
    qkv = torch.full((8, 8, 32), torch.nan, device=DEVICE)
    qkv[:3] = torch.randn(3, 8, 32, device=DEVICE)
    angles = torch.rand(8, 16, device=DEVICE).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def step(module, attend, rows, batch, caches):
        q = module.norm_rope_store(qkv[:rows], *weights, 1e-6, cos[:rows], sin[:rows], *caches,
                                   slots[:rows])
        return attend(q, *caches, batch, 0.2)

    small = make_batch(tables, [1] * 3, seq_lens)
    expected = step(ops, ops.paged_attention, 3, small, copies)
    padded = make_batch(tables + [[10 ** 6]] * 5, [1] * 8, seq_lens + [0] * 5)
    padded.cu_seqlens_q.fill_(-1)  # not read for decodes
    to_device(padded)
    got = step(kernels, partial(attend, splits=splits), 8, padded, caches)
    assert_close(got[:3], expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(got[3:], torch.zeros(5, 4, 32, device=DEVICE))
    for cache, copy in zip(caches, copies, strict=True):
        assert_close(cache, copy, equal_nan=True)


def test_a_launch_does_not_depend_on_lengths(monkeypatch):
    """What a graph freezes, grids and numbers, may come from shapes alone: an engine that froze a
    longest length lost half its accuracy."""
    launches = []
    monkeypatch.setattr(kernels, "INTERPRETED", False)  # with splits, as on a GPU
    for name in ("_attention_kernel", "_combine_kernel"):
        monkeypatch.setattr(kernels, name, Launches(name, launches))
    q, cache = torch.zeros(4, 4, 32), torch.zeros(20, 16, 2, 32)
    for seq_lens in ([1, 1, 1, 1], [64, 3, 5, 0], [0, 0, 0, 64]):
        batch = make_batch([[1, 2, 3, 4]] * 4, [1] * 4, seq_lens)
        kernels.paged_attention(q, cache, cache, batch, 0.2)
    for query_lens in ([1, 2, 1, 0], [4, 0, 0, 0], [0, 0, 0, 0]):  # drafts, in a graph for four
        batch = make_batch([[1, 2, 3, 4]] * 4, query_lens, [n and 60 for n in query_lens])
        batch.num_decodes, batch.is_padded = 0, True
        kernels.paged_attention(q, cache, cache, batch, 0.2)
    assert len(launches) == 12 and launches[:2] == launches[2:4] == launches[4:6]
    assert launches[6:8] == launches[8:10] == launches[10:] != launches[:2]
    launches.clear()  # rows that fill the GPU: a long one may be among them, where tables are wide
    q, batch = torch.zeros(256, 4, 32), make_batch([[1]] * 256, [1] * 256, [1] * 256)
    for width in (512, 513):
        batch.block_tables = torch.ones(256, width, dtype=torch.int32)
        kernels.paged_attention(q, cache, cache, batch, 0.2)
    assert [grid for _, grid, *_ in launches] == [(2, 256, 1), (2, 256, 4), (4, 256)]


@pytest.mark.parametrize("lens", [([1, 1, 1], [1, 64, 63]), ([1], [9])], ids=str)
def test_a_row_whose_keys_fit_the_first_split_needs_no_other_kernel(attend, monkeypatch, lens):
    """With tables for 40,960 positions any row may be long: 256 short ones went through float32 in
    memory, and through a second kernel, in each layer."""
    monkeypatch.setattr(kernels, "_combine_kernel", Launches("_combine_kernel", []))
    assert_equals_twins(attend, *cut(random.Random(1), *lens, 16), (4, 2), 32, 16, splits=4,
                        sinks=True)


@pytest.mark.parametrize("lens, heads, how", [
    (([1, 1, 1, 1], [1, 64, 300, 129]), (4, 2), dict(splits=4, sinks=True)),
    (([1, 2, 5, 3], [200, 2, 260, 66]), (4, 1), dict(splits=2, window=150, softcap=3.0)),
    (([1, 3, 3], [1, 500, 129]), (4, 2), dict(long=4, splits=2, image=70))], ids=str)
def test_the_last_program_of_a_row_joins_it_without_another_kernel(attend, monkeypatch, lens, heads,
                                                                   how):
    """Where NANOSERVE_JOIN asks for it; twice, since the counters must be zeros again."""
    monkeypatch.setattr(kernels, "JOIN", True)
    monkeypatch.setattr(kernels, "_combine_kernel", None)
    for seed in (1, 2):
        assert_equals_twins(attend, *cut(random.Random(seed), *lens, 16), heads, 32, 16, seed=seed,
                            **how)
        assert not kernels.counters(DEVICE).any()


def test_a_tile_finds_its_row_among_more_than_one_load():
    """Every 11th tile of two decodes, and of 700 rows of 1 to 9 queries."""
    lens = [1, 1, *(1 + i * 7 % 9 for i in range(700))]
    ends, expected = [sum(lens[:row]) for row in range(len(lens) + 1)], {}
    for row in range(2, len(lens)):
        begin = (ends[row] - 2) // 4 + row - 2
        expected |= {begin + n: [row, 4 * n] for n in range(-(-lens[row] // 4))}
    tiles = [*expected][::11]
    found = torch.zeros(len(tiles), 2, dtype=torch.int32, device=DEVICE)
    find_tiles[len(tiles),](torch.tensor(ends).int().to(DEVICE), torch.tensor(tiles).to(DEVICE),
                            found, 2, len(lens), BLOCK_Q=4)
    assert found.tolist() == [expected[tile] for tile in tiles]


@triton.jit
def find_tiles(ends, tiles, found, num_decodes, num_rows, BLOCK_Q: tl.constexpr):
    i = tl.program_id(0)
    tile = tl.load(tiles + i).to(tl.int32)
    row, query = kernels._find_tile(ends, tile, num_decodes, num_rows, BLOCK_Q)
    tl.store(found + 2 * i, row)
    tl.store(found + 2 * i + 1, query)


def test_the_number_of_splits(monkeypatch):
    """As many programs as fill the GPU, in powers of two: none for many rows, 32 at most."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    for multiprocessors in (20, 108, 132):
        wanted = kernels.SPLIT_PROGRAMS * multiprocessors
        assert kernels.LONG_PROGRAMS * multiprocessors >= 2 * wanted
        for rows in range(1, 600):
            for kv_heads in (1, 2, 8, 32):
                splits = kernels._num_splits(rows, kv_heads, wanted)
                assert splits in (1, 2, 4, 8, 16, 32)
                assert splits == 1 or splits * rows * kv_heads <= wanted
                assert splits == 32 or 2 * splits * rows * kv_heads > wanted
