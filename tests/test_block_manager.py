"""The block manager alone: allocation, sharing, and a prefix cache that never lies.

The oracles are arithmetic by hand, digests written out as numbers, and a naive twin that remembers
for every block which tokens' KV was written to it: whatever is found must hold exactly that prefix.
Blocks have 4 tokens here. No torch, no model, no scheduler: sequences are moved by hand.
"""

import os
import struct
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.block_manager import BlockManager, FreeBlocks
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Sequence

SIZE = 4


def sequence(tokens, name="s") -> Sequence:
    return Sequence(name, list(tokens), SamplingParams())


def compute(blocks: BlockManager, tokens, name="s", share=True) -> Sequence:
    """What the scheduler does for a sequence that computes all of its tokens in one step."""
    seq = sequence(tokens, name)
    if share:
        blocks.share(seq, blocks.find_prefix(seq))
    assert blocks.allocate(seq, len(seq.token_ids)), "the test's pool is too small"
    seq.num_computed_tokens = len(seq.token_ids)
    blocks.commit(seq)
    return seq


def hits(blocks: BlockManager, tokens) -> list[int]:
    return [entry.block_id for entry in blocks.find_prefix(sequence(tokens))]


# ------------------------------------------------------ handing out, taking back


@pytest.mark.parametrize("num_tokens, num_blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocation_rounds_up(num_tokens, num_blocks):
    blocks, seq = BlockManager(8, SIZE), sequence(range(9))
    assert blocks.num_blocks_for(num_tokens) == num_blocks
    assert blocks.allocate(seq, num_tokens)
    assert (len(seq.block_table), blocks.num_free_blocks) == (num_blocks, 8 - num_blocks)
    blocks.check([seq])


def test_growing_keeps_the_blocks_and_takes_no_more_than_needed():
    blocks, seq = BlockManager(8, SIZE), sequence(range(9))
    blocks.allocate(seq, 5)
    before = list(seq.block_table)
    for num_tokens, num_blocks in [(6, 2), (8, 2), (9, 3), (3, 3)]:
        assert blocks.allocate(seq, num_tokens)
        assert len(seq.block_table) == num_blocks
    assert seq.block_table[:2] == before and len(set(seq.block_table)) == 3


def test_allocation_is_all_or_nothing():
    blocks, first, second = BlockManager(3, SIZE), sequence(range(8)), sequence(range(8))
    assert blocks.allocate(first, 8)
    assert not blocks.allocate(second, 8)
    assert (second.block_table, blocks.num_free_blocks) == ([], 1)
    assert blocks.allocate(second, 4)
    assert set(first.block_table + second.block_table) == {0, 1, 2}
    blocks.check([first, second])


def test_a_freed_sequence_owns_nothing_and_its_old_table_is_left_alone():
    """Whoever compares tables by identity must see that the sequence starts anew."""
    blocks = BlockManager(4, SIZE)
    seq = compute(blocks, range(6))
    table, content = seq.block_table, list(seq.block_table)
    blocks.free(seq)
    assert seq.block_table == [] and table == content and seq.block_table is not table
    assert (seq.num_committed_blocks, seq.cache_entry, blocks.num_free_blocks) == (0, None, 4)


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


def test_sharing_into_a_table_that_is_not_empty_is_an_error():
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(5))
    with pytest.raises(AssertionError, match="already has blocks"):
        blocks.share(seq, [])


@pytest.mark.parametrize("num_tokens, fits", [(16, True), (17, False)])
def test_a_free_hit_is_not_free_for_us(num_tokens, fits):
    """Four blocks, all free, two of them hits: 16 tokens need 2 more, 17 need 3 and there are 2."""
    blocks = BlockManager(4, SIZE)
    blocks.free(compute(blocks, range(8)))
    seq = sequence(range(num_tokens))
    found = blocks.find_prefix(seq)
    assert (len(found), blocks.num_free_blocks) == (2, 4)
    assert blocks.can_admit(found, num_tokens) is fits
    blocks.share(seq, found)
    assert blocks.allocate(seq, num_tokens) is fits, "the promise must be kept, and only that one"


def test_a_hit_that_somebody_holds_costs_nothing():
    blocks = BlockManager(4, SIZE)
    owner = compute(blocks, range(8))
    assert blocks.num_free_blocks == 2
    assert blocks.can_admit(blocks.find_prefix(sequence(range(16))), 16)
    blocks.check([owner])


# ---------------------------------------------------------- the order of reuse


def order_of_reuse(blocks: BlockManager) -> list[int]:
    taker = sequence([])
    assert blocks.allocate(taker, blocks.num_free_blocks * blocks.block_size)
    return taker.block_table


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
    first, second, third = hits(blocks, range(5)) + hits(blocks, range(10, 15)) + hits(
        blocks, range(20, 25))
    seq = sequence(range(5))
    blocks.share(seq, blocks.find_prefix(seq))
    blocks.free(seq)
    assert order_of_reuse(blocks) == [second, third, first]


def test_looking_up_takes_nothing_and_renews_nothing():
    blocks = BlockManager(2, SIZE)
    for start in (0, 10):
        blocks.free(compute(blocks, range(start, start + 4)))
    before = list(blocks.free_blocks.runs)
    assert hits(blocks, range(5)) and hits(blocks, range(5))
    assert list(blocks.free_blocks.runs) == before and blocks.ref_counts == [0, 0]


# ------------------------------------------------------- neighbours


def grow(blocks, seq, num_blocks=1):
    assert blocks.allocate(seq, (len(seq.block_table) + num_blocks) * SIZE)
    return seq.block_table


def test_neighbours_go_to_one_sequence_however_sequences_take_turns():
    """Blocks that were handed out in turn lay in everybody's runs: after some hundred requests no
    row had two that were neighbours, and attention read each key's line for one block of it."""
    blocks = BlockManager(16, SIZE, in_run=4)
    first, second, third = (sequence([], name) for name in "abc")
    for _ in range(3):
        for seq in (first, second, third):
            grow(blocks, seq)
    assert [seq.block_table for seq in (first, second, third)] == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert grow(blocks, second, 3) == [4, 5, 6, 7, 12, 13], "a full run is followed by a free one"
    fourth = sequence([], "d")
    assert grow(blocks, fourth, 2) == [3, 11], "others' blanks are for all, when no run is free"
    assert grow(blocks, first) == [0, 1, 2, 14]
    blocks.check([first, second, third, fourth])


def test_what_may_be_found_is_kept_while_blanks_are_left_in_anybodys_run():
    blocks = BlockManager(8, SIZE, in_run=4)
    for start in (0, 10):  # one block that may be found, one that is blank again, and two blanks
        blocks.free(compute(blocks, range(start, start + 5)))
    taker = sequence([])
    table = grow(blocks, taker, 6)
    assert hits(blocks, range(5)) and hits(blocks, range(10, 15)) and not {0, 4} & set(table)
    assert len(grow(blocks, taker)) == 7
    assert len(hits(blocks, range(5))) + len(hits(blocks, range(10, 15))) == 1
    blocks.check([taker])


def test_a_neighbour_that_may_be_found_is_no_nearer_than_what_was_used_long_ago():
    """B begins as A did and goes on otherwise: A's fourth block lay beside the third, and was given
    up for that, and with it all that follows, while something older was left alone."""
    blocks = BlockManager(12, SIZE, in_run=4)
    blocks.free(compute(blocks, range(100, 116)))  # the oldest: run 0
    blocks.free(compute(blocks, range(32)))  # A: runs 1 and 2
    second = sequence([*range(12), 99, 99])
    blocks.share(second, blocks.find_prefix(second))
    second.num_computed_tokens = 12
    assert grow(blocks, second) == [4, 5, 6, 3]
    assert len(hits(blocks, range(33))) == 8
    assert grow(blocks, second, 3) == [4, 5, 6, 3, 2, 1, 0], "what was begun is used up"
    assert len(hits(blocks, range(33))) == 8
    blocks.check([second])


def test_a_hit_ends_the_using_up_of_its_run():
    blocks = BlockManager(8, SIZE, in_run=4)
    for start in (0, 20):
        blocks.free(compute(blocks, range(start, start + 16)))
    taker, finder = sequence([], "taker"), sequence(range(9), "finder")
    assert grow(blocks, taker) == [3]
    blocks.share(finder, blocks.find_prefix(finder))
    finder.num_computed_tokens = 8
    assert grow(blocks, taker) == [3, 7], "and not 2, beside it, which belongs to what was found"
    blocks.check([taker, finder])


def test_runs_are_reused_least_recently_used_first():
    """A hit counts as a use of its run; in a run the tail goes before the head."""
    blocks = BlockManager(12, SIZE, in_run=4)
    first, second, third = (compute(blocks, range(start, start + 16)) for start in (0, 20, 40))
    for seq in (first, second, third):
        blocks.free(seq)
    seq = sequence(range(5))
    blocks.share(seq, blocks.find_prefix(seq))
    blocks.free(seq)
    assert order_of_reuse(blocks) == [7, 6, 5, 4, 11, 10, 9, 8, 3, 2, 1, 0]


def test_a_run_of_blanks_is_taken_before_one_in_which_something_may_be_found():
    blocks = BlockManager(12, SIZE, in_run=4)
    first, second = compute(blocks, range(16)), sequence([], "b")
    grow(blocks, second, 4)
    blocks.free(second)
    blocks.free(first)
    third = sequence([], "c")
    assert set(grow(blocks, third, 4)) == {4, 5, 6, 7}, "the one that was used last, still near"
    blocks.check([third])
    blocks.free(third)
    assert blocks.reset_prefix_cache()
    blocks.check([])
    assert order_of_reuse(blocks) == list(range(12)), "as in the beginning"


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


def test_equal_blocks_at_different_places_are_different():
    """The KV of a token depends on everything before it: [5 6 7 8] as a first block is another."""
    blocks = BlockManager(8, SIZE)
    compute(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert hits(blocks, [5, 6, 7, 8, 9]) == []
    assert hits(blocks, [5, 6, 7, 8, 5, 6, 7, 8, 9]) == []
    assert len(hits(blocks, [1, 2, 3, 4, 1, 2, 3, 4, 5])) == 1


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


def test_tokens_computed_before_their_value_is_known_are_not_findable():
    """With a step in flight KV may be computed for a token the host has not seen: it has no key."""
    blocks, seq = BlockManager(8, SIZE), sequence(range(7))
    blocks.allocate(seq, 8)
    seq.num_computed_tokens = 8
    blocks.commit(seq)
    assert len(blocks.cached) == 1
    seq.token_ids.append(7)
    blocks.commit(seq)
    assert len(blocks.cached) == 2


def test_with_caching_off_nothing_is_kept_or_found():
    blocks = BlockManager(4, SIZE, enable_prefix_caching=False)
    seq = compute(blocks, range(8))
    assert not blocks.cached and hits(blocks, range(9)) == []
    blocks.free(seq)
    assert not blocks.cached and hits(blocks, range(9)) == []
    blocks.check([])


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


def test_a_chain_that_lost_its_tail_is_still_found_up_to_there():
    blocks = BlockManager(3, SIZE)
    blocks.free(compute(blocks, range(12)))
    table = hits(blocks, range(13))
    blocks.allocate(sequence(range(4)), 4)
    assert hits(blocks, range(13)) == table[:2]


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


def test_keys_grow_with_the_sequence():
    blocks, seq = BlockManager(8, SIZE), sequence([])
    for token in range(1, 10):
        seq.token_ids.append(token)
        assert len(blocks.keys(seq)) == token // SIZE
    assert [key.hex() for key in blocks.keys(seq)] == KEYS


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_keys_are_the_same_in_every_process(hash_seed):
    code = ("import sys; from nanoserve.block_manager import BlockManager as B; "
            "from nanoserve.sampling_params import SamplingParams; "
            "from nanoserve.sequence import Sequence; "
            "seq = Sequence('s', list(range(1, 10)), SamplingParams()); "
            "print(*(key.hex() for key in B(8, 4).keys(seq))); assert 'torch' not in sys.modules")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            env=os.environ | {"PYTHONHASHSEED": hash_seed})
    assert result.stdout.split() == KEYS, result.stderr


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


# ----------------------------------------------------- behind a sliding window


def held(seq: Sequence) -> list[int]:
    """What `seq` still has a reference to."""
    return seq.block_table[seq.num_released_blocks:]


@pytest.mark.parametrize("position, num_released", [
    (-5, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_what_lies_wholly_before_a_position_is_given_back(position, num_released):
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(13))
    table = list(seq.block_table)
    for _ in range(2):  # twice is once
        blocks.release(seq, position)
        assert (seq.num_released_blocks, blocks.num_free_blocks) == (num_released, 4 + num_released)
        assert seq.block_table == table, "the others must stay in their places"
        assert all(block_id in blocks.free_blocks for block_id in table[:num_released])
        blocks.check([seq])
    blocks.free(seq)
    assert (blocks.num_free_blocks, seq.num_released_blocks, seq.block_table) == (8, 0, [])
    blocks.check([])


def test_a_released_block_does_not_come_back():
    """A smaller position changes nothing: the block may be somebody else's by then."""
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(13))
    blocks.release(seq, 9)
    blocks.release(seq, 4)
    assert seq.num_released_blocks == 2
    blocks.check([seq])


def test_others_use_released_blocks_while_their_owner_runs_on():
    """4 blocks, and a sequence that grows to 9 of them, next to another one all the time."""
    blocks = BlockManager(4, SIZE)
    seq, other = compute(blocks, range(8)), None
    for length in range(9, 37):
        blocks.release(seq, length - 6)  # it sees 6 tokens: 3 blocks at most
        if other is not None:
            blocks.free(other)
        seq.token_ids.append(length)
        assert blocks.allocate(seq, length)
        assert len(held(seq)) <= 3
        other = sequence([100 + length], "other")
        assert blocks.allocate(other, 1)
        assert other.block_table[0] not in held(seq)
        seq.num_computed_tokens = length
        blocks.commit(seq)
        blocks.check([seq, other])
    assert len(seq.block_table) == 9 and len(set(seq.block_table)) <= 4
    blocks.free(seq)
    blocks.free(other)
    assert blocks.num_free_blocks == 4
    blocks.check([])


def test_a_released_block_is_found_until_it_is_reused():
    """Free and findable, like those of a sequence that has ended. Who finds one has it alone."""
    blocks = BlockManager(6, SIZE)
    seq = compute(blocks, range(13))
    blocks.release(seq, 8)
    second = compute(blocks, [*range(8), 50], "second")
    assert second.block_table[:2] == seq.block_table[:2]
    assert [blocks.ref_counts[block] for block in second.block_table] == [1, 1, 1]
    blocks.check([seq, second])
    blocks.free(seq)  # not the two that it gave back before
    assert [blocks.ref_counts[block] for block in second.block_table] == [1, 1, 1]
    blocks.check([second])
    blocks.free(second)
    assert blocks.num_free_blocks == 6


def test_a_shared_block_is_released_by_each_owner_for_itself():
    blocks = BlockManager(8, SIZE)
    owners = [compute(blocks, [*range(8), 50 + i], f"s{i}") for i in range(3)]
    head = owners[0].block_table[0]
    for i, owner in enumerate(owners):
        assert blocks.ref_counts[head] == 3 - i
        blocks.release(owner, 5)
        blocks.check(owners)
    assert head in blocks.free_blocks and hits(blocks, range(8)) == [head]


def test_a_chain_whose_head_was_reused_is_not_found_but_its_owner_goes_on():
    """The blocks that it still has, and those that it will fill, hang on a key that is gone. They
    must not be found, nor disturb the one who computes the same prefix anew."""
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, range(12))
    blocks.release(seq, 8)
    fillers = [compute(blocks, range(100 * i, 100 * i + 4), f"f{i}") for i in range(1, 8)]
    assert blocks.num_free_blocks == 0
    assert hits(blocks, range(13)) == []
    blocks.check([seq, *fillers])
    for filler in fillers:
        blocks.free(filler)
    seq.token_ids += range(12, 17)
    assert blocks.allocate(seq, 17)
    seq.num_computed_tokens = 17
    blocks.commit(seq)
    assert hits(blocks, range(17)) == []
    again = compute(blocks, range(17), "again")
    assert not set(again.block_table) & set(held(seq))
    assert hits(blocks, range(18)) == again.block_table[:4]
    blocks.check([seq, again])
    blocks.release(seq, 16)
    blocks.free(again)
    blocks.free(seq)
    assert blocks.num_free_blocks == 8
    blocks.check([])


def test_a_released_block_that_nobody_can_find_is_reused_first():
    """With caching off it holds nothing of use, and goes to the front; findable ones last."""
    for caching, expected in ((False, [0, 3, 4]), (True, [3, 4, 0])):
        blocks = BlockManager(5, SIZE, enable_prefix_caching=caching)
        seq = compute(blocks, range(12))
        assert seq.block_table == [0, 1, 2]
        blocks.release(seq, 4)
        assert order_of_reuse(blocks) == expected


# ----------------------------------------------------------------- collisions


def collide(monkeypatch, digest) -> None:
    monkeypatch.setattr(xxhash, "xxh3_128_digest", digest)


def test_equal_keys_of_different_tokens_are_no_hit(monkeypatch):
    """The key may be equal by chance, or by somebody's intent; the tokens are compared as well."""
    collide(monkeypatch, lambda data: b"always the same")
    blocks = BlockManager(8, SIZE)
    seq = compute(blocks, [1, 2, 3, 4, 9], "seq")
    assert hits(blocks, [1, 2, 3, 4, 9]) == seq.block_table[:1]
    assert hits(blocks, [5, 6, 7, 8, 9]) == []
    other = compute(blocks, [5, 6, 7, 8, 9], "other")
    assert hits(blocks, [1, 2, 3, 4, 9]) == seq.block_table[:1], "the first one stays"
    assert hits(blocks, [5, 6, 7, 8, 9]) == []
    blocks.check([seq, other])


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


@pytest.mark.parametrize("evict_first", [False, True])
def test_chains_whose_parents_collide_stay_apart(monkeypatch, evict_first):
    """Two different first blocks with one key: everything chained behind them collides too, and a
    child block matched the other chain because its own tokens were equal."""
    ones, twos = struct.pack("<4i", 1, 1, 1, 1), struct.pack("<4i", 2, 2, 2, 2)
    digest = xxhash.xxh3_128_digest
    collide(monkeypatch, lambda data: digest(ones if data == twos else data))
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


def test_a_child_that_outlived_its_parent_is_not_adopted_by_a_colliding_one(monkeypatch):
    """A child stays in the cache after its parent's entry is gone; then another chain with the
    parent's key arrives. By keys and by tokens the child fits; by identity it does not."""
    ones, twos = struct.pack("<4i", 1, 1, 1, 1), struct.pack("<4i", 2, 2, 2, 2)
    digest = xxhash.xxh3_128_digest
    collide(monkeypatch, lambda data: digest(ones if data == twos else data))
    blocks = BlockManager(5, SIZE)
    head = compute(blocks, [1, 1, 1, 1], "head")
    twin = compute(blocks, [1, 1, 1, 1, 7, 7, 7, 7], "twin", share=False)
    blocks.free(head)
    filler = compute(blocks, range(50, 62), "filler")  # reuses the head's block
    blocks.free(filler)
    compute(blocks, [2, 2, 2, 2], "heir")
    assert twin.block_table[1] in [entry.block_id for entry in blocks.cached.values()]
    assert len(hits(blocks, [2, 2, 2, 2, 7, 7, 7, 7, 9])) == 1


# ------------------------------------------------------- forgetting, and telling


def test_reset_forgets_everything_or_nothing():
    blocks = BlockManager(8, SIZE)
    owner, gone = compute(blocks, range(8)), compute(blocks, range(10, 14))
    blocks.free(gone)
    assert blocks.reset_prefix_cache() is False
    assert len(hits(blocks, range(9))) == 2 and len(hits(blocks, range(10, 15))) == 1
    blocks.free(owner)
    assert blocks.reset_prefix_cache() is True
    assert hits(blocks, range(9)) == hits(blocks, range(10, 15)) == [] and not blocks.cached
    blocks.check([])
    assert len(hits(blocks, compute(blocks, range(9)).token_ids)) == 2, "and it serves on"


def test_each_forgotten_key_is_reported_once_when_it_is_forgotten():
    blocks, told = BlockManager(4, SIZE), []
    blocks.on_evict = told.append
    seq = compute(blocks, range(16))
    keys = list(blocks.keys(seq))
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


# ------------------------------------------------------------------ the audit


def corrupt_free_list(blocks, a, b):
    blocks.free_blocks.add(a.block_table[0], blank=False)


def corrupt_lost_block(blocks, a, b):
    blocks.free_blocks.take(None)


def corrupt_blank(blocks, a, b):
    del blocks.free_blocks.blanks[5]


def corrupt_ref_count(blocks, a, b):
    blocks.ref_counts[a.block_table[0]] += 1


def corrupt_forgotten_owner(blocks, a, b):
    b.block_table.append(a.block_table[-1])


def corrupt_table(blocks, a, b):
    a.block_table.append(a.block_table[0])


def corrupt_progress(blocks, a, b):
    a.num_computed_tokens = 100


def corrupt_flight(blocks, a, b):
    a.num_inflight_tokens = 5


def corrupt_stale_map(blocks, a, b):
    blocks.entry_of[a.cache_entry.block_id] = None


def corrupt_map(blocks, a, b):
    blocks.cached.pop(a.cache_entry.key)


def corrupt_entry_block(blocks, a, b):
    a.cache_entry.block_id = b.block_table[-1]


def corrupt_entry_tokens(blocks, a, b):
    a.cache_entry.tokens.pop()


def corrupt_commits(blocks, a, b):
    b.num_committed_blocks += 1


def corrupt_early_commit(blocks, a, b):
    a.num_committed_blocks = 1


def corrupt_tokens(blocks, a, b):
    a.token_ids[5] = 99


@pytest.mark.parametrize("corrupt, message", [
    (corrupt_free_list, "block 0 is free but sequence a points at it"),
    (corrupt_lost_block, "block 5 has 0 references and must be free exactly at 0"),
    (corrupt_blank, "block 5 is free and must be blank exactly if nobody can find it"),
    (corrupt_ref_count, r"block 0 counts 2 references but is held by \['a'\]"),
    (corrupt_forgotten_owner, r"block 2 counts 1 references but is held by \['a', 'b'\]"),
    (corrupt_table, "sequence a lists a block twice"),
    (corrupt_progress, "sequence a has computed 100 tokens in blocks for 12"),
    (corrupt_flight, "sequence a has computed 14 tokens in blocks for 12"),
    (corrupt_stale_map, "the cache names block 1, which was reused since"),
    (corrupt_map, "block 1 believes it is cached, but the cache does not name it"),
    (corrupt_entry_block, "the cache names block 4, which was reused since"),
    (corrupt_entry_tokens, "block 1 is not full"),
    (corrupt_commits, "sequence b committed 2 blocks, but only 1 are full and computed"),
    (corrupt_early_commit, "block 1 of sequence a can be found before it is computed"),
    (corrupt_tokens, r"block 1 is cached as \[4, 5, 6, 7\], but sequence a keeps \[4, 99, 6, 7\]"),
], ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("container", [list, iter], ids=["list", "iterator"])
def test_the_audit_names_each_kind_of_corruption(corrupt, message, container):
    """An audit that can't fail proves nothing: each of its sentences is provoked here, and the
    sequences may come as any iterable, read once."""
    blocks = BlockManager(6, SIZE)
    a, b = compute(blocks, range(9), "a"), compute(blocks, range(50, 55), "b")
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4])
    blocks.check(container([a, b]))
    corrupt(blocks, a, b)
    with pytest.raises(AssertionError, match=message):
        blocks.check(container([a, b]))


@pytest.mark.parametrize("corrupt, message", [
    (lambda free: setattr(free, "count", 4), "the count is of all runs' blocks"),
    (lambda free: free.runs.update({9: {}}), "run 9 has no free block"),
    (lambda free: free.runs.update({9: free.runs.pop(1)}), r"run 9 lists .* another one: \[2, 3\]"),
    (lambda free: free.runs[0].move_to_end(1), "run 0: blank blocks come first"),
    (lambda free: free.blanks.update({4: None}), "a blank block is not free"),
], ids=["count", "empty", "run", "order", "blanks"])
def test_the_audit_of_free_blocks_names_each_kind_of_corruption(corrupt, message):
    free = FreeBlocks(6, 2)
    free.remove(4)
    free.remove(0)
    free.add(0, blank=False)
    free.check()
    corrupt(free)
    with pytest.raises(AssertionError, match=message):
        free.check()


# ------------------------------------------------------------ the naive twin


DIGESTS = {  # real keys, and keys that collide often, always, and for whole chains
    "real": None,
    "some": lambda data: bytes([sum(data) % 3]),
    "all": lambda data: b"same",
    "parent": lambda data: data[-8:],
}
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
OPERATIONS = st.lists(st.one_of(
    st.tuples(st.just("start"), TOKENS, st.booleans()),
    st.tuples(st.just("grow"), st.integers(0, 5), TOKENS),
    st.tuples(st.just("release"), st.integers(0, 5), st.integers(-1, 24)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("reset")),
), max_size=40)


class Twin:
    """Remembers what was written to every block: the whole prefix whose KV the block holds."""

    def __init__(self, num_blocks: int, in_run: int):
        self.blocks = BlockManager(num_blocks, block_size=2, in_run=in_run)
        self.blocks.on_evict = lambda key: setattr(self, "evicted", True)
        self.evicted = False
        self.watch()
        self.written: dict[int, tuple] = {}
        self.computed: set[tuple] = set()  # every prefix of full blocks that was ever computed
        self.live: list[Sequence] = []

    def watch(self) -> None:
        """Nothing that may be found is given up while a blank block is left."""
        take = self.blocks.free_blocks.take

        def watched(last):
            blank = {i for i, entry in enumerate(self.blocks.entry_of)
                     if entry is None and not self.blocks.ref_counts[i]}
            block_id = take(last)
            assert not blank or block_id in blank
            return block_id

        self.blocks.free_blocks.take = watched

    def write(self, seq: Sequence, start: int) -> None:
        """Compute everything from `start` on, like a step. Blocks before it are only read."""
        for end in range(start // 2 * 2 + 2, len(seq.token_ids) + 2, 2):
            self.written[seq.block_table[end // 2 - 1]] = tuple(seq.token_ids[:end])
        self.computed |= {tuple(seq.token_ids[:end])
                          for end in range(2, len(seq.token_ids) + 1, 2)}
        seq.num_computed_tokens = len(seq.token_ids)
        self.blocks.commit(seq)

    def start(self, tokens: list[int], may_share: bool) -> None:
        seq = sequence(tokens, f"s{len(self.live)}")
        found = self.blocks.find_prefix(seq) if may_share else []
        for i, entry in enumerate(found):
            assert self.written[entry.block_id] == tuple(tokens[:2 * i + 2]), "a false hit"
        if not self.blocks.can_admit(found, len(tokens)):
            return
        self.blocks.share(seq, found)
        assert self.blocks.allocate(seq, len(tokens))
        self.write(seq, 2 * len(found))
        self.live.append(seq)

    def grow(self, i: int, tokens: list[int]) -> None:
        seq = self.live[i % len(self.live)]
        if self.blocks.allocate(seq, len(seq.token_ids) + len(tokens)):
            start = len(seq.token_ids)
            seq.token_ids += tokens
            self.write(seq, start)

    def release(self, i: int, position: int) -> None:
        seq = self.live[i % len(self.live)]
        last = seq.num_computed_tokens - 1  # with a window of 2 at least
        self.blocks.release(seq, min(position, last))

    def end(self, i: int) -> None:
        self.blocks.free(self.live.pop(i % len(self.live)))

    def reset(self) -> None:
        assert self.blocks.reset_prefix_cache() is (not self.live)
        if not self.live:
            self.computed.clear()
            self.watch()

    def check(self) -> None:
        self.blocks.check(self.live)
        for seq in self.live:
            for i, block_id in enumerate(seq.block_table):
                if i < seq.num_released_blocks:
                    continue
                assert self.written[block_id] == tuple(seq.token_ids[:2 * i + 2]), (
                    "somebody wrote into a block that is in use")


@pytest.mark.parametrize("digest", DIGESTS)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 24), in_run=st.integers(1, 5),
       prompt=TOKENS)
def test_random_lives_against_the_twin(digest, operations, num_blocks, in_run, prompt):
    """Whatever happens, a hit holds the KV of exactly that prefix and nobody's block is written by
    another. As long as nothing was evicted and no keys collide, every computed prefix is found."""
    with pytest.MonkeyPatch.context() as patch:
        if DIGESTS[digest]:
            collide(patch, DIGESTS[digest])
        twin = Twin(num_blocks, in_run)
        for name, *arguments in operations:
            if twin.live or name in ("start", "reset"):
                getattr(twin, name)(*arguments)
            twin.check()
        found = twin.blocks.find_prefix(sequence(prompt))
        held = [twin.written[entry.block_id] for entry in found]
        prefixes = [tuple(prompt[:end]) for end in range(2, len(prompt), 2)]
        assert held == prefixes[:len(found)]
        if not twin.evicted and digest == "real":
            assert len(found) == sum(prefix in twin.computed for prefix in prefixes)
        while twin.live:
            twin.end(0)
        twin.check()
        assert twin.blocks.num_free_blocks == num_blocks
