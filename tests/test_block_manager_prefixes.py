"""A prefix cache that never lies: what is found holds exactly the prefix that was asked for.

The oracles are arithmetic by hand and digests written out as numbers. Blocks have 4 tokens here.
"""

import struct

import pytest
import xxhash
from blocks_by_hand import SIZE, collide, compute, hits, sequence

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import CacheEntry

pytestmark = pytest.mark.floor


# ------------------------------------------------------------ finding a prefix


@pytest.mark.parametrize("num_tokens, num_hits", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2),
                                                  (13, 3), (20, 3)])
def test_a_fully_cached_prompt_leaves_a_token_to_compute(num_tokens, num_hits):
    """A prompt of exactly two cached blocks left zero tokens to compute, and no logits to sample
    from: a crash (nano-vllm #144, #199). Twelve tokens are cached here; 12 ask for 2 blocks."""
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(12))
    assert hits(blocks, range(num_tokens)) == seq.block_table[:num_hits]


@pytest.mark.parametrize("change_at, num_hits", [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_a_prompt_that_turns_off_inside_a_block_shares_only_what_lies_before(change_at, num_hits):
    """A shared prefix was trimmed, but the tail behind the cut stayed: 22 of 204 answers contained
    another user's text (vllm-mlx #380). Blocks are shared whole or not at all."""
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(12))
    other = [*range(change_at), 99, *range(change_at + 1, 13)]
    assert hits(blocks, other) == seq.block_table[:num_hits]


def test_only_computed_tokens_are_findable():
    """A block was entered before its tokens were verified. Here 12 tokens are known but only 7
    computed: one block; with 8 computed, two; a block is never entered for tokens to come."""
    blocks, seq = BlockManager(8, SIZE), sequence(range(12))
    blocks.allocate(seq, 12)
    for num_computed, num_findable in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)]:
        seq.num_computed_tokens = num_computed
        blocks.commit(seq)
        assert len(blocks.cached) == seq.num_committed_blocks == num_findable
        assert hits(blocks, range(13)) == seq.block_table[:num_findable]
        blocks.check([seq])


def test_a_reused_block_has_lost_its_old_key():
    """A block was reused while its old hash still pointed at it: a later request read another
    request's KV (nano-vllm #163). The key must be gone before the new owner can write."""
    blocks = BlockManager(3, SIZE)
    blocks.free(compute(blocks, range(8)))
    assert len(hits(blocks, range(9))) == 2, "freed, but not reused: still there"
    new = sequence(range(20, 32))
    assert blocks.allocate(new, 12)
    assert hits(blocks, range(9)) == [] and not blocks.cached
    blocks.check([new])


# ------------------------------------------------------------------- the keys

# xxh3-128 of the little-endian int32 tokens, behind the parent's key: written down once, because
# keys that change between versions or processes would make caches of two engines strangers.
KEYS = ["903ce79ac359c3eb2de5421794dd19f0", "b51e0214fc0b8c66b0445f16c5d1509d"]


def test_keys_are_the_chained_hashes_by_hand():
    keys = BlockManager(8, SIZE).keys(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    first = xxhash.xxh3_128_digest(struct.pack("<4i", 1, 2, 3, 4))
    second = xxhash.xxh3_128_digest(first + struct.pack("<4i", 5, 6, 7, 8))
    assert keys == [first, second]
    assert [key.hex() for key in keys] == KEYS


def test_equal_tokens_below_two_roots_have_two_keys_and_two_entries():
    """A root stands for an adapter, say: by its key, which leads the first block's hash, engines
    that share a store tell its blocks apart; by its identity, a look-up does."""
    blocks, roots = BlockManager(8, SIZE), [CacheEntry(key, -1, [], None) for key in (b"1", b"2")]
    for root in roots:
        seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], root=root)
        first = xxhash.xxh3_128_digest(root.key + struct.pack("<4i", 1, 2, 3, 4))
        assert blocks.keys(seq)[0] == first and blocks.find_prefix(seq) == []
        blocks.allocate(seq, 9)
        seq.num_computed_tokens = 9
        blocks.commit(seq)
    for root in roots:
        assert len(blocks.find_prefix(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], root=root))) == 2


# ----------------------------------------------------------------- duplicates


def test_identical_prompts_side_by_side_leave_one_entry():
    """Two identical prompts in one step: the second overwrote the first one's entry in the map,
    whose block was then freed under it (nano-vllm #219)."""
    blocks = BlockManager(8, SIZE)
    first = compute(blocks, range(8), "first", share=False)
    second = compute(blocks, range(8), "second", share=False)
    assert not set(first.block_table) & set(second.block_table)
    assert hits(blocks, range(9)) == first.block_table and len(blocks.cached) == 2
    blocks.check([first, second])
    blocks.free(second)  # an ordinary block: nobody could find it
    assert hits(blocks, range(9)) == first.block_table
    blocks.free(first)
    assert len(hits(blocks, range(9))) == 2
    blocks.check([])


def test_a_duplicate_goes_on_below_the_first_ones_entries():
    """The second of two twins grows longer: its third block is a child of the first one's second,
    and whoever comes later uses blocks of both."""
    blocks = BlockManager(8, SIZE)
    first = compute(blocks, range(8), "first", share=False)
    second = compute(blocks, range(12), "second", share=False)
    assert hits(blocks, range(13)) == first.block_table + second.block_table[2:]
    blocks.check([first, second])


# ----------------------------------------------------------------- collisions


def test_a_twins_children_are_not_found_below_a_parent_that_was_evicted():
    """The first twin's blocks are reused while the second still runs. The second's child is then
    without a parent; it must be missed, computed anew by the next one, and found again."""
    blocks = BlockManager(8, SIZE)
    first = compute(blocks, range(8), "first", share=False)
    second = compute(blocks, range(12), "second", share=False)  # 3 blocks are left
    blocks.free(first)
    filler = compute(blocks, range(50, 70), "filler")  # takes these 3 and both of the first
    assert blocks.num_free_blocks == 0 and hits(blocks, range(13)) == []
    blocks.free(filler)
    third = compute(blocks, range(12), "third")
    assert not set(third.block_table) & set(second.block_table)
    assert hits(blocks, range(13)) == third.block_table
    blocks.check([second, third])
    second.token_ids += range(12, 16)  # grows below its own dead chain: nobody may find that
    assert blocks.allocate(second, 16)
    second.num_computed_tokens = 16
    blocks.commit(second)
    assert hits(blocks, range(17)) == third.block_table
    blocks.check([second, third])


def ignore_the_parent(data: bytes) -> bytes:
    """Keys of first blocks are right, those of later blocks know only their own tokens."""
    return data[-4 * SIZE:]


def test_equal_tokens_below_different_parents_are_no_hit(monkeypatch):
    """Two chains whose second blocks have equal tokens *and* equal keys: the tokens of a block
    alone don't prove a prefix, the identity of the parent's entry does."""
    collide(monkeypatch, ignore_the_parent)
    blocks = BlockManager(8, SIZE)
    one = compute(blocks, [1, 1, 1, 1, 7, 7, 7, 7], "one")
    head = compute(blocks, [2, 2, 2, 2], "head")
    assert hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9]) == head.block_table
    assert hits(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 9]) == one.block_table
    two = compute(blocks, [2, 2, 2, 2, 7, 7, 7, 7], "two")
    found = [hits(blocks, [n, n, n, n, 7, 7, 7, 7, 9]) for n in (1, 2)]
    assert found[0] in (one.block_table, one.block_table[:1])  # one key names one block, whichever
    assert found[1] in (two.block_table, two.block_table[:1])
    blocks.check([one, head, two])


@pytest.fixture
def ones_are_twos(monkeypatch):
    """A first block of ones has the key of a first block of twos; and so have their children."""
    ones, twos = struct.pack("<4i", 1, 1, 1, 1), struct.pack("<4i", 2, 2, 2, 2)
    digest = xxhash.xxh3_128_digest
    collide(monkeypatch, lambda data: digest(ones if data == twos else data))


@pytest.mark.parametrize("evict_first", [False, True])
def test_chains_whose_parents_collide_stay_apart(ones_are_twos, evict_first):
    """Two different first blocks with one key: everything chained behind them collides too, and a
    child block matched the other chain because its own tokens were equal."""
    blocks = BlockManager(4, SIZE)
    one = compute(blocks, [1, 1, 1, 1, 7, 7, 7, 7], "one")
    assert hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9]) == []
    two = compute(blocks, [2, 2, 2, 2, 7, 7, 7, 7], "two")
    assert blocks.keys(one) == blocks.keys(two)
    assert hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9]) == []
    assert hits(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 9]) == one.block_table
    blocks.check([one, two])
    if evict_first:  # then the second chain may take the place, but never with the other's child
        blocks.free(one)
        blocks.free(compute(blocks, [3, 3, 3, 3, 3, 3, 3, 3]))
        blocks.free(two)
        two = compute(blocks, [2, 2, 2, 2, 7, 7, 7, 7], "two")
        assert hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9]) == two.block_table
        assert hits(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 9]) == []
        blocks.check([two])


def test_a_child_of_a_block_that_collided_is_not_entered_below_the_first_one(ones_are_twos):
    """The first chain has one block. The second's first block has the same key and no entry: its
    child, entered below the first one's, would be the next block of whoever begins with ones."""
    blocks = BlockManager(5, SIZE)
    one = compute(blocks, [1, 1, 1, 1], "one")
    two = compute(blocks, [2, 2, 2, 2, 7, 7, 7, 7], "two")
    assert hits(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 9]) == one.block_table, "7s that follow twos"
    assert hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9]) == []
    blocks.check([one, two])


# ------------------------------------------------------- forgetting, and telling


def test_a_child_that_outlived_its_parent_is_not_adopted_by_a_colliding_one(ones_are_twos):
    """A child stays in the cache after its parent's entry is gone; then another chain with the
    parent's key arrives. By keys and by tokens the child fits; by identity it does not."""
    blocks = BlockManager(5, SIZE)
    head = compute(blocks, [1, 1, 1, 1], "head")
    twin = compute(blocks, [1, 1, 1, 1, 7, 7, 7, 7], "twin", share=False)
    blocks.free(head)
    filler = compute(blocks, range(50, 62), "filler")  # reuses the head's block
    blocks.free(filler)
    compute(blocks, [2, 2, 2, 2], "heir")
    assert twin.block_table[1] in [entry.block_id for entry in blocks.cached.values()]
    assert len(hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9])) == 1


def test_each_key_is_reported_once_when_it_comes_and_when_it_is_forgotten():
    """To `committed` and `evicted`, whoever forgets it: its next owner, or a reset."""
    blocks, told, new = BlockManager(4, SIZE), [], []
    blocks.hooks.evicted.append(lambda entry: told.append(entry.key))
    blocks.hooks.committed.append(lambda entry: new.append(entry.key))
    seq = compute(blocks, range(16))
    keys = list(blocks.keys(seq))
    blocks.commit(seq)
    assert new == keys
    blocks.free(seq)
    assert told == [], "freed is not forgotten"
    taker = sequence(range(20, 28))
    blocks.allocate(taker, 8)
    assert told == [keys[3], keys[2]], "tail first"
    blocks.free(taker)
    blocks.allocate(taker, 8)
    assert told == [keys[3], keys[2]], "an empty block has nothing to report"
    blocks.free(taker)
    blocks.reset_prefix_cache()
    assert sorted(told) == sorted(keys)
