"""PagedAttention's memory half: KV memory handed out in blocks, and found again by content.

KV memory is cut into blocks of `block_size` tokens, as an operating system cuts memory into pages
(Kwon et al. 2023, "PagedAttention"). A sequence's `block_table` lists its blocks in order, so it
can grow without moving, and two sequences can share a block. Sharing is automatic: a full block's
key is a hash of its parent's key and its own tokens. Once its KV is computed the block is
*committed*: the cache has it under its key, and a sequence with the same prefix finds it.

    tokens   the cat sat on | a mat and then | it fell
    keys     A = h(root,·)  | B = h(A,·)     | (not full: no key)
    table    [ 5,             9,               2 ]          cached: {A: 5, B: 9}

    a block is     free ──allocate──► referenced ──commit──► referenced and findable
                    ▲                     │                        │ no reference is left
                    └─────────────────────┘      free, findable ◄──┘
                                                 reused oldest first: the key is forgotten *then*

Invariants (`check()` audits all of them): a block is free or referenced, never both; its reference
count is the number of tables that hold it; the cache names only committed blocks; a block that is
handed out again has lost its old key *before* its new owner can write to it.

A hash can collide, and a wrong hit is another user's text. So a hit also compares the block's
tokens and the *identity of its parent's entry*: two different chains can never be taken for one.

Not known here: torch, bytes, devices, how many blocks a sequence may have. Road not taken: a radix
tree over tokens (Zheng et al. 2023, "SGLang"), which matches at any token, not only between blocks.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

from nanoserve.hooks import Hooks
from nanoserve.sequence import CacheEntry, Sequence, visible

ROOT_KEY = b""  # parent key of a first block, unless the request has a `root` of its own


class BlockManager:
    """Hands out `num_blocks` block ids, counts references, and remembers full blocks by content."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 window: int | None = None, hooks: Hooks | None = None):
        self.hooks = hooks or Hooks()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window  # how many keys a query sees at most; None: a layer sees all
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        # *Blank* blocks, which no look-up finds, then findable ones, least recently used first. So
        # a findable block is evicted only when no blank one is free. An ordered dictionary is a
        # linked list with an index: taking, adding and removing a block are all O(1).
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[bytes, CacheEntry] = {}
        self.entry_of: list[CacheEntry | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`. With blocks of 16: 16 tokens take 1, 17 take 2."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------ finding a prefix again

    def keys(self, seq: Sequence) -> list[bytes]:
        """The chained keys of all full blocks of known tokens, extended as the sequence grows.

        xxh3 is no cryptographic hash, but the same in every process and version, so that a key can
        be compared between engines.
        """
        keys, request, size = seq.block_keys, seq.request, self.block_size
        if not self.enable_prefix_caching:
            return keys
        for start in range(len(keys) * size, len(seq.token_ids) - size + 1, size):
            parent = keys[-1] if keys else (request.root.key if request.root else ROOT_KEY)
            tokens = array("i", seq.token_ids[start:start + size]).tobytes()
            content = request.contents.get(len(keys), b"")
            keys.append(xxhash.xxh3_128_digest(parent + tokens + content))
        return keys

    def max_hits(self, seq: Sequence) -> int:
        """How many blocks of `seq` may come from the cache at all.

        At least one token is always left to compute: without it there would be no logits to sample
        from. With blocks of 16, a fully cached prompt of 32 tokens hits 1 block, not 2. And where
        every position's logits are wanted, no position may be skipped.
        """
        if not self.enable_prefix_caching or seq.needs_all_positions:
            return 0
        return (len(seq.token_ids) - 1) // self.block_size

    def next_key(self, seq: Sequence, num_hits: int) -> bytes | None:
        """The key of the block after `num_hits` hits; None if that block may not be a hit."""
        return self.keys(seq)[num_hits] if num_hits < self.max_hits(seq) else None

    def find_prefix(self, seq: Sequence) -> list[CacheEntry]:
        """Look up the longest cached prefix of `seq`. Takes no reference and changes no block.
        Extras may cut what was found (`Extra.usable`)."""
        hits: list[CacheEntry] = []
        parent, token_ids, contents = seq.request.root, seq.token_ids, seq.request.contents
        size, cached = self.block_size, self.cached
        keys = self.keys(seq)
        for i in range(self.max_hits(seq)):
            entry = cached.get(keys[i])
            if (entry is None or entry.parent is not parent
                    or entry.tokens != token_ids[i * size:(i + 1) * size]
                    or entry.content != contents.get(i, b"")):
                break
            hits.append(entry)
            parent = entry
        for cut in self.hooks.usable:
            hits = cut(seq, hits)
        return hits

    # -------------------------------------------------- the life of a table

    def num_needed(self, hits: list[CacheEntry], num_tokens: int) -> int:
        """How many free blocks a sequence of `num_tokens` takes if it starts with `hits`.

        A hit that some sequence holds takes none. A hit that no sequence holds is one of the free
        blocks, so it counts.
        """
        num_held = sum(self.ref_counts[entry.block_id] > 0 for entry in hits)
        return self.num_blocks_for(num_tokens) - num_held

    def share(self, seq: Sequence, hits: list[CacheEntry]) -> None:
        """Start `seq`'s table with the blocks of a found prefix, which are committed already."""
        assert not seq.block_table, f"sequence {seq.name} already has blocks: free them first"
        for entry in hits:
            if self.ref_counts[entry.block_id] == 0:
                del self.free_blocks[entry.block_id]
            self.ref_counts[entry.block_id] += 1
            seq.block_table.append(entry.block_id)
        seq.num_committed_blocks = len(hits)
        seq.cache_entry = hits[-1] if hits else None

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow `seq`'s table to hold `num_tokens`; all or nothing, False when blocks run out."""
        num_missing = (self.num_blocks_for(num_tokens) - len(seq.dropped_blocks)
                       - len(seq.block_table))
        if num_missing > len(self.free_blocks):
            return False
        for _ in range(num_missing):
            block_id, _ = self.free_blocks.popitem(last=False)
            self.ref_counts[block_id] = 1
            seq.block_table.append(block_id)
            self._forget(block_id)  # last, so that no block is lost if an extra fails in it
        return True

    def commit(self, seq: Sequence) -> None:
        """Make `seq`'s full blocks findable, as far as their KV is computed and their tokens final.

        When the same content is cached already (two identical prompts ran side by side) the first
        entry stays, and our copy remains an ordinary block that no look-up finds. What is computed
        after a `drop` has not seen all of its prefix, so no look-up may find it.
        """
        if not self.enable_prefix_caching or seq.dropped_blocks:
            return
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        for i in range(seq.num_committed_blocks, num_full):
            seq.num_committed_blocks = i + 1
            if i > 0 and seq.cache_entry is None:
                continue  # its parent is not in the cache, so no look-up would reach this block
            seq.cache_entry = self._enter(seq, i)

    def _enter(self, seq: Sequence, i: int) -> CacheEntry | None:
        """The entry that a look-up of `seq`'s block i finds from now on: an old one with the same
        content, or a new one. None if the key collides with other content, which stays."""
        key, block_id = self.keys(seq)[i], seq.block_table[i]
        tokens = seq.token_ids[i * self.block_size:(i + 1) * self.block_size]
        content = seq.request.contents.get(i, b"")
        parent = seq.cache_entry if i > 0 else seq.request.root
        old = self.cached.get(key)
        if old is not None:
            if old.parent is parent:
                is_same = old.tokens == tokens and old.content == content
                return old if is_same else None
            if old.tokens != tokens:
                return None
            # The old entry's parent was evicted and computed again, as another entry. So no
            # look-up can reach the old entry.
            self._forget(old.block_id)
        entry = CacheEntry(key, block_id, tokens, parent, content)
        self.cached[key] = self.entry_of[block_id] = entry
        for tell in self.hooks.committed:
            tell(entry)
        return entry

    def release(self, seq: Sequence) -> None:
        """Give back the blocks that lie wholly before the first key that the next query sees.

        The table keeps the released ids, so that later blocks keep their index; no step reads the
        released ones. With blocks of 16 and a first key of 35, blocks 0 and 1 go. Simplifications:
        a key in sight keeps all blocks after it, and a sequence is admitted only if it fits whole.
        """
        begin, query = seq.num_released_blocks, seq.num_computed_tokens
        first = next(key for key in range(begin * self.block_size, query + 1)
                     if visible(query, key, self.window, query))
        for block_id in seq.block_table[begin:first // self.block_size]:
            self._dereference(block_id)
        seq.num_released_blocks = first // self.block_size

    def drop(self, seq: Sequence, blocks: Iterable[int]) -> None:
        """Take blocks out of `seq`'s table, so that no later query sees them. blocks: their numbers
        in the text, 0 for its first tokens; those that were dropped before may be among them.

        The blocks behind them move up, and with them the *places* of their tokens. With blocks of
        16 and block 1 dropped, the token at position 40 is at place 24. Positions stay.
        """
        held = self.held(seq)
        gone = {i: block_id for i, block_id in held.items() if i in set(blocks)}
        if not gone:
            return
        # A new table, not a changed one: the batch copies a table again only if it is another list.
        seq.block_table = [block_id for i, block_id in held.items() if i not in gone]
        seq.dropped_blocks += tuple(gone)
        for block_id in reversed(gone.values()):
            self._dereference(block_id)

    def held(self, seq: Sequence) -> dict[int, int]:
        """The blocks that `seq` holds: number in its text -> block id."""
        dropped = set(seq.dropped_blocks)
        numbers = [i for i in range(len(seq.block_table) + len(dropped)) if i not in dropped]
        places = range(seq.num_released_blocks, len(seq.block_table))
        return {numbers[place]: seq.block_table[place] for place in places}

    def free(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`. Cached ones stay findable until they are reused.

        Last block first, so that a chain is forgotten from its tail: a tail without its head could
        not be found. The sequence gets a new table, so an observer that kept the old one can tell.
        `cache_entry` still says what was committed last.
        """
        for block_id in reversed(seq.block_table[seq.num_released_blocks:]):
            self._dereference(block_id)
        seq.num_released_blocks, seq.dropped_blocks = 0, ()
        seq.block_table = []
        seq.num_committed_blocks = 0

    def _dereference(self, block_id: int) -> None:
        """Drop a reference. A block without any is free: reused last, or first if it is blank."""
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_blocks[block_id] = None
            if self.entry_of[block_id] is None:
                self.free_blocks.move_to_end(block_id, last=False)

    def _forget(self, block_id: int) -> None:
        """Drop the block's cache entry, if it has one. If the block is free, it is blank then."""
        entry = self.entry_of[block_id]
        if entry is not None:
            self.entry_of[block_id] = None
            del self.cached[entry.key]
            if block_id in self.free_blocks:
                self.free_blocks.move_to_end(block_id, last=False)
            for tell in self.hooks.evicted:
                tell(entry)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block (after new weights, say). False, and no change, while any block
        is referenced: its sequence would go on to commit children of a forgotten prefix."""
        if self.num_free_blocks < self.num_blocks:
            return False
        for entry in list(self.cached.values()):
            self._forget(entry.block_id)
        self.free_blocks = OrderedDict.fromkeys(range(self.num_blocks))
        return True

    # ------------------------------------------------------------- the audit

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Audit everything against the sequences that may hold blocks. O(blocks): for tests."""
        holders: dict[int, list[str]] = {}
        for seq in sequences:
            self._check_counts(seq)
            for i, block_id in self.held(seq).items():
                holders.setdefault(block_id, []).append(seq.name)
                self._check_held(seq, i, block_id)
        for block_id, count in enumerate(self.ref_counts):
            names = holders.get(block_id, [])
            if block_id in self.free_blocks:
                assert not names, f"block {block_id} is free but sequence {names[0]} points at it"
            assert (block_id in self.free_blocks) == (count == 0), (
                f"block {block_id} has {count} references and must be free exactly at 0")
            assert count == len(names), (
                f"block {block_id} counts {count} references but is held by {names}")
            entry = self.entry_of[block_id]
            assert entry is None or self.cached.get(entry.key) is entry, (
                f"block {block_id} believes it is cached, but the cache does not name it")
        blank = [self.entry_of[block_id] is None for block_id in self.free_blocks]
        assert blank == sorted(blank, reverse=True), (
            f"a findable block would be reused before a blank one: {list(self.free_blocks)}")
        for key, entry in self.cached.items():
            assert self.entry_of[entry.block_id] is entry and entry.key == key, (
                f"the cache names block {entry.block_id}, which was reused since")
            assert len(entry.tokens) == self.block_size, f"block {entry.block_id} is not full"

    def _check_counts(self, seq: Sequence) -> None:
        """Audit what one sequence says of its blocks."""
        held = self.held(seq)
        assert len(set(held.values())) == len(held), (
            f"sequence {seq.name} lists a block twice: {held}")
        for position in range(seq.num_released_blocks * self.block_size):
            query = seq.num_computed_tokens
            assert not visible(query, position, self.window, query), (
                f"sequence {seq.name} gave back position {position}, which its next query sees")
        room = (len(seq.block_table) + len(seq.dropped_blocks)) * self.block_size
        used = seq.num_computed_tokens + seq.num_inflight_tokens
        assert used <= room, (
            f"sequence {seq.name} has computed {used} tokens in blocks for {room}")
        num_full = seq.num_computed_tokens // self.block_size
        assert seq.num_committed_blocks <= num_full, (
            f"sequence {seq.name} committed {seq.num_committed_blocks} blocks, but only "
            f"{num_full} are full and computed")
        assert all(i < num_full for i in seq.dropped_blocks), (
            f"sequence {seq.name} dropped blocks {seq.dropped_blocks}, but only {num_full} are "
            "full and computed")

    def _check_held(self, seq: Sequence, i: int, block_id: int) -> None:
        """Audit the block that holds number `i` of a sequence's text."""
        if (entry := self.entry_of[block_id]) is None:
            return
        tokens = seq.token_ids[i * self.block_size:(i + 1) * self.block_size]
        assert entry.tokens == tokens, (
            f"block {block_id} is cached as {entry.tokens}, but sequence {seq.name} "
            f"keeps {tokens} in it")
        assert i < seq.num_committed_blocks, (
            f"block {block_id} of sequence {seq.name} can be found before it is computed")
