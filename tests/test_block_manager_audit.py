"""The block manager's audit names what is corrupt, and random lives agree with a naive twin.

The twin remembers for every block which tokens' KV was written to it: whatever is found must hold
exactly that prefix.
"""

import pytest
from blocks_by_hand import SIZE, collide, compute, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence

pytestmark = pytest.mark.floor


# ------------------------------------------------------------------ the audit


def blocks_in_disorder(blocks, a, b):
    blocks.free(b)  # block 3 can be found, blocks 4 and 5 are blank
    b.num_computed_tokens = 0
    blocks.free_blocks.move_to_end(3, last=False)


def an_entry_cut_short(blocks, a, b):
    entry = a.cache_entry
    blocks.free(a)  # no sequence holds the block, whose tokens could be compared
    a.num_computed_tokens = 0
    entry.tokens.pop()


def a_field(name, value):
    return lambda blocks, a, b: setattr(a, name, value)


@pytest.mark.parametrize("corrupt, message", [
    (lambda blocks, a, b: blocks.free_blocks.update({0: None}),
     "block 0 is free but sequence a points at it"),
    (lambda blocks, a, b: blocks.free_blocks.popitem(last=False),
     "block 5 has 0 references and must be free exactly at 0"),
    (blocks_in_disorder, r"a findable block would be reused before a blank one: \[3, 4, 5\]"),
    (lambda blocks, a, b: blocks.ref_counts.__setitem__(0, 2),
     r"block 0 counts 2 references but is held by \['a'\]"),
    (lambda blocks, a, b: b.block_table.append(2),
     r"block 2 counts 1 references but is held by \['a', 'b'\]"),
    (lambda blocks, a, b: a.block_table.append(0), "sequence a lists a block twice"),
    (a_field("num_computed_tokens", 100), "sequence a has computed 100 tokens in blocks for 12"),
    (a_field("num_inflight_tokens", 5), "sequence a has computed 14 tokens in blocks for 12"),
    (lambda blocks, a, b: blocks.entry_of.__setitem__(1, None),
     "the cache names block 1, which was reused since"),
    (lambda blocks, a, b: blocks.cached.pop(a.cache_entry.key),
     "block 1 believes it is cached, but the cache does not name it"),
    (lambda blocks, a, b: setattr(a.cache_entry, "block_id", 4),
     "the cache names block 4, which was reused since"),
    (an_entry_cut_short, "block 1 is not full"),
    (lambda blocks, a, b: setattr(b, "num_committed_blocks", 2),
     "sequence b committed 2 blocks, but only 1 are full and computed"),
    (a_field("num_released_blocks", 2),
     "sequence a gave back position 6, which its next query sees"),
    (a_field("dropped_blocks", (2,)),
     r"sequence a dropped blocks \(2,\), but only 2 are full and computed"),
    (a_field("dropped_blocks", (0,)),
     r"block 0 is cached as \[0, 1, 2, 3\], but sequence a keeps \[4, 5, 6, 7\]"),
    (a_field("num_committed_blocks", 1),
     "block 1 of sequence a can be found before it is computed"),
    (lambda blocks, a, b: a.token_ids.__setitem__(5, 99),
     r"block 1 is cached as \[4, 5, 6, 7\], but sequence a keeps \[4, 99, 6, 7\]"),
])
@pytest.mark.parametrize("container", [list, iter], ids=["list", "iterator"])
def test_the_audit_names_each_kind_of_corruption(corrupt, message, container):
    """An audit that can't fail proves nothing: each of its sentences is provoked here, and the
    sequences may come as any iterable, read once."""
    blocks = BlockManager(6, SIZE, window=4)
    a, b = compute(blocks, range(9), "a"), compute(blocks, range(50, 55), "b")
    assert (a.block_table, b.block_table) == ([0, 1, 2], [3, 4])
    blocks.check(container([a, b]))
    corrupt(blocks, a, b)
    with pytest.raises(AssertionError, match=message):
        blocks.check(container([a, b]))


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
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.sets(st.integers(0, 6))),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("reset")),
), max_size=40)


class Twin:
    """Remembers what was written to every block: the whole prefix whose KV the block holds, and
    which blocks its tokens have not seen."""

    def __init__(self, num_blocks: int, window: int | None):
        self.blocks = BlockManager(num_blocks, block_size=2, window=window)
        self.blocks.hooks.evicted.append(lambda key: setattr(self, "evicted", True))
        self.evicted = False
        self.written: dict[int, tuple] = {}
        self.computed: set[tuple] = set()  # every prefix of full blocks that was ever computed
        self.live: list[Sequence] = []

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Nothing that may be found is given up while a blank block is left."""
        blocks, had = self.blocks, len(seq.block_table)
        findable, blank = len(blocks.cached), sum(
            entry is None and not blocks.ref_counts[i] for i, entry in enumerate(blocks.entry_of))
        fits = blocks.allocate(seq, num_tokens)
        assert findable - len(blocks.cached) == max(0, len(seq.block_table) - had - blank)
        return fits

    def write(self, seq: Sequence, start: int) -> None:
        """Compute everything from `start` on, like a step. Blocks before it are only read."""
        held = self.blocks.held(seq)
        for end in range(start // 2 * 2 + 2, len(seq.token_ids) + 2, 2):
            self.written[held[end // 2 - 1]] = (*seq.token_ids[:end], *map(str, seq.dropped_blocks))
        if not seq.dropped_blocks:
            self.computed |= {tuple(seq.token_ids[:end])
                              for end in range(2, len(seq.token_ids) + 1, 2)}
        seq.num_computed_tokens = len(seq.token_ids)
        self.blocks.commit(seq)

    def start(self, tokens: list[int], may_share: bool) -> None:
        seq = sequence(tokens, f"s{len(self.live)}")
        found = self.blocks.find_prefix(seq) if may_share else []
        for i, entry in enumerate(found):
            assert self.written[entry.block_id] == tuple(tokens[:2 * i + 2]), "a false hit"
        if self.blocks.num_needed(found, len(tokens)) > self.blocks.num_free_blocks:
            return
        self.blocks.share(seq, found)
        assert self.allocate(seq, len(tokens))
        self.write(seq, 2 * len(found))
        self.live.append(seq)

    def grow(self, i: int, tokens: list[int]) -> None:
        seq = self.live[i % len(self.live)]
        if self.allocate(seq, len(seq.token_ids) + len(tokens)):
            start = len(seq.token_ids)
            seq.token_ids += tokens
            self.write(seq, start)

    def release(self, i: int) -> None:
        self.blocks.release(self.live[i % len(self.live)])

    def drop(self, i: int, numbers: set[int]) -> None:
        seq = self.live[i % len(self.live)]
        if self.blocks.window is None:  # a window and this never come together
            self.blocks.drop(seq, [i for i in numbers if 2 * i + 2 <= seq.num_computed_tokens])

    def end(self, i: int) -> None:
        self.blocks.free(self.live.pop(i % len(self.live)))

    def reset(self) -> None:
        assert self.blocks.reset_prefix_cache() is (not self.live)
        if not self.live:
            self.computed.clear()

    def check(self) -> None:
        self.blocks.check(self.live)
        for seq in self.live:
            for i, block_id in self.blocks.held(seq).items():
                written, tokens = self.written[block_id], tuple(seq.token_ids[:2 * i + 2])
                assert written[:len(tokens)] == tokens, "somebody wrote into a block that is in use"


@pytest.mark.parametrize("digest", DIGESTS)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 24), prompt=TOKENS,
       window=st.none() | st.integers(2, 9))
def test_random_lives_against_the_twin(digest, operations, num_blocks, window, prompt):
    """Whatever happens, a hit holds the KV of exactly that prefix and nobody's block is written by
    another. As long as nothing was evicted and no keys collide, every computed prefix is found."""
    with pytest.MonkeyPatch.context() as patch:
        if DIGESTS[digest]:
            collide(patch, DIGESTS[digest])
        twin = Twin(num_blocks, window)
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
