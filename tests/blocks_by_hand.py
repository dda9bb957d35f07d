"""Sequences that are moved by hand through a block manager with blocks of 4 tokens."""

import helpers
import xxhash

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence

SIZE = 4


def sequence(tokens, name="s", **fields) -> Sequence:
    return helpers.sequence(name, list(tokens), **fields)


def compute(blocks: BlockManager, tokens, name="s", share=True) -> Sequence:
    """What the scheduler does for a sequence that computes all of its tokens in one step."""
    seq = sequence(tokens, name)
    if share:
        blocks.share(seq, blocks.find_prefix(seq))
    assert blocks.allocate(seq, len(seq.token_ids)), "the test's cache is too small"
    seq.num_computed_tokens = len(seq.token_ids)
    blocks.commit(seq)
    return seq


def hits(blocks: BlockManager, tokens) -> list[int]:
    return [entry.block_id for entry in blocks.find_prefix(sequence(tokens))]


def order_of_reuse(blocks: BlockManager) -> list[int]:
    taker = sequence([])
    assert blocks.allocate(taker, blocks.num_free_blocks * blocks.block_size)
    return taker.block_table


def collide(monkeypatch, digest) -> None:
    monkeypatch.setattr(xxhash, "xxh3_128_digest", digest)
