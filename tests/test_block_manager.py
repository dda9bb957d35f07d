"""The block manager alone: handing out blocks, taking them back, and the order of their reuse.

The oracle is arithmetic by hand. Blocks have 4 tokens here. No torch, no model, no scheduler:
sequences are moved by hand.
"""

import pytest
from blocks_by_hand import SIZE, compute, hits, order_of_reuse, sequence

from nanoserve import block_manager
from nanoserve.block_manager import BlockManager

pytestmark = pytest.mark.floor


# ------------------------------------------------------ handing out, taking back


@pytest.mark.parametrize("num_tokens, num_blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocation_rounds_up(num_tokens, num_blocks):
    blocks, seq = BlockManager(8, SIZE), sequence(range(9))
    assert blocks.num_blocks_for(num_tokens) == num_blocks
    assert blocks.allocate(seq, num_tokens)
    assert (len(seq.block_table), blocks.num_free_blocks) == (num_blocks, 8 - num_blocks)
    blocks.check([seq])


def test_allocation_is_all_or_nothing():
    blocks, first, second = BlockManager(3, SIZE), sequence(range(8)), sequence(range(8))
    assert blocks.allocate(first, 8)
    assert not blocks.allocate(second, 8)
    assert (second.block_table, blocks.num_free_blocks) == ([], 1)
    assert blocks.allocate(second, 4)
    assert set(first.block_table + second.block_table) == {0, 1, 2}
    blocks.check([first, second])


def test_a_shared_block_goes_back_with_its_last_owner():
    """Reference counts of shared blocks went wrong, and the assertion on them stood too early to
    see it (mini-sglang #44, #46, #80)."""
    blocks = BlockManager(8, SIZE)
    owners = [compute(blocks, [1, 2, 3, 4, 10 + i], name=f"s{i}") for i in range(3)]
    head = owners[0].block_table[0]
    assert [seq.block_table[0] for seq in owners] == [head] * 3
    for leaver in [owners[1], owners[0], owners[2]]:  # whoever computed it is not the last
        assert head not in blocks.free_blocks
        blocks.free(leaver)
        owners.remove(leaver)
        blocks.check(owners)
    assert head in blocks.free_blocks and blocks.num_free_blocks == 8
    assert hits(blocks, [1, 2, 3, 4, 99]) == [head]


@pytest.mark.parametrize("held, num_tokens, needed, fits", [
    (False, 16, 4, True), (False, 17, 5, False), (True, 16, 2, True), (True, 17, 3, False)])
def test_a_free_hit_is_not_free_for_us_and_one_that_is_held_is(held, num_tokens, needed, fits):
    """Four blocks, two of them hits: 16 tokens need 2 more, 17 need 3 and there are 2."""
    blocks = BlockManager(4, SIZE)
    owner, seq = compute(blocks, range(8)), sequence(range(num_tokens))
    if not held:
        blocks.free(owner)
    found = blocks.find_prefix(seq)
    assert (len(found), blocks.num_free_blocks) == (2, 2 if held else 4)
    assert blocks.num_needed(found, num_tokens) == needed
    blocks.share(seq, found)
    assert blocks.allocate(seq, num_tokens) is fits, "the promise must be kept, and only that one"


# ---------------------------------------------------------- the order of reuse


def test_blocks_that_hold_nothing_are_reused_first_then_the_oldest_tail_first():
    """Least recently used first, and of a chain its tail: a tail without its head is useless."""
    blocks = BlockManager(6, SIZE)
    old = compute(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    new = compute(blocks, [11, 12, 13, 14, 15])  # its second block is not full: never findable
    (old0, old1), (new0, partial) = old.block_table, new.block_table
    blocks.free(old)
    blocks.free(new)
    assert order_of_reuse(blocks) == [partial, 4, 5, old1, old0, new0]


def test_a_hit_makes_a_block_the_most_recently_used():
    blocks = BlockManager(3, SIZE)
    for start in (0, 10, 20):
        blocks.free(compute(blocks, range(start, start + 4)))
    third, second, first = [block for start in (20, 10, 0)  # to look one up renews nothing
                            for block in hits(blocks, range(start, start + 5))]
    seq = sequence(range(5))
    blocks.share(seq, blocks.find_prefix(seq))
    blocks.free(seq)
    assert order_of_reuse(blocks) == [second, third, first]


# ----------------------------------------------------- behind a sliding window


@pytest.mark.parametrize("window, num_released", [
    (None, 0), (19, 0), (14, 0), (11, 0), (10, 1), (7, 1), (6, 2), (3, 2), (2, 3), (1, 3)])
def test_what_lies_wholly_before_a_window_is_given_back(window, num_released):
    """The next query stands at 13: with a window of 10 it sees 4 to 13, which are blocks 1 to 3."""
    blocks = BlockManager(8, SIZE, window=window)
    seq = compute(blocks, range(13))
    table = list(seq.block_table)
    for _ in range(2):  # twice is once
        blocks.release(seq)
        assert (seq.num_released_blocks, blocks.num_free_blocks) == (num_released, 4 + num_released)
        assert seq.block_table == table, "the others must stay in their places"
        assert all(block_id in blocks.free_blocks for block_id in table[:num_released])
        blocks.check([seq])
    blocks.free(seq)
    assert (blocks.num_free_blocks, seq.num_released_blocks, seq.block_table) == (8, 0, [])
    blocks.check([])


def test_blocks_in_the_middle_are_dropped_and_those_behind_them_move_up():
    """22 tokens in 6 blocks. What was found before the drop stays findable, and nothing after it
    becomes so. Then tokens up to the 25th need one block more, the seventh of the text."""
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(22))
    old = seq.block_table
    blocks.drop(seq, [1, 3])
    blocks.drop(seq, {1, 3})  # twice is once
    assert seq.block_table == [0, 2, 4, 5] and old == [0, 1, 2, 3, 4, 5], "a new table, see batch"
    assert blocks.held(seq) == {0: 0, 2: 2, 4: 4, 5: 5} and blocks.num_free_blocks == 4
    assert hits(blocks, range(22)) == [0, 1, 2, 3, 4]
    seq.token_ids += [22, 23, 24]
    assert blocks.allocate(seq, 25) and len(seq.block_table) == 5
    seq.num_computed_tokens = 25
    blocks.commit(seq)
    assert hits(blocks, range(25)) == [0, 1, 2, 3, 4], "block 5 has not seen its whole prefix"
    blocks.drop(seq, [4])
    assert blocks.held(seq)[6] == seq.block_table[3] and 4 not in blocks.held(seq)
    blocks.check([seq])
    blocks.free(seq)
    assert (seq.block_table, seq.dropped_blocks, blocks.num_free_blocks) == ([], (), 8)
    blocks.check([])


OTHER_MASKS = {  # what is seen beside the last 3 of 13 keys, and how many of blocks of 4 go
    "the first": (lambda key: key < 1, 0), "every other block": (lambda key: key // 4 % 2 == 0, 0),
    "one in the middle": (lambda key: key == 7, 1), "none": (lambda key: False, 2)}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_what_another_mask_sees_is_kept(monkeypatch, name):
    """`visible` is changed, and nothing else. Who releases too much is found by the audit."""
    kept, num_released = OTHER_MASKS[name]
    monkeypatch.setattr(block_manager, "visible", lambda query, key, window, last: (
        key <= query and (key > query - window or kept(key))))
    blocks = BlockManager(8, SIZE, window=4)
    seq = compute(blocks, range(13))
    blocks.release(seq)
    blocks.check([seq])
    assert seq.num_released_blocks == num_released
    seq.num_released_blocks = 2
    if num_released < 2:
        with pytest.raises(AssertionError, match="which its next query sees"):
            blocks.check([seq])
