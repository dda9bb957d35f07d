"""Why a block's key is made of its parent's key, too, and why a hit compares more than keys.

First the same 16 tokens behind two beginnings: their KV is not the same. Then keys of 16 bits, two
of which are soon equal, and the engine's own block manager with such keys.
"""

from itertools import product
from unittest import mock

import xxhash

from course.storyteller import Storyteller, attention
from nanoserve.block_manager import BlockManager
from nanoserve.config import SamplingParams
from nanoserve.sequence import CoreRequest, Sequence

SIZE = 16  # tokens in a block
PEOPLE = "king man boy girl woman fox wolf cat bird fish queen princess tailor soldier dog bear"
PLACES = "castle wood forest house tree river sea garden village town mill tower field mountain"
BEGINNING = "Once upon a time there was a {} who lived in a {} with a {}"  # 16 tokens
SAME = ". One day an old man came to the door and asked who lived there."  # 16, too
digest = xxhash.xxh3_128_digest


def weak(content: bytes) -> bytes:
    """The engine's hash, but of 16 bits in place of 128."""
    return digest(content)[:2]


def keys_of_attention(model: Storyteller, ids: list[int]) -> list:
    """The keys of the last 16 tokens in each layer."""
    found = []

    def attend(layer, q, k, v):
        found.append(k[-SIZE:])
        return attention(q, k, v)

    model(ids, range(len(ids)), attend)
    return found


def collision(encode) -> tuple[list[int], list[int], int]:
    """Two beginnings with the same weak key, and how many were tried."""
    blocks, found = BlockManager(1, SIZE), {}
    for number, words in enumerate(product(PEOPLE.split(), PLACES.split(), PEOPLE.split()), 1):
        ids = encode(BEGINNING.format(*words))
        key = blocks.keys(sequence(ids))[0]
        if key in found:
            return found[key], ids, number
        found[key] = ids
    raise AssertionError("no two keys are equal")


def sequence(ids: list[int]) -> Sequence:
    return Sequence(CoreRequest("text", SamplingParams()), list(ids))


def compute(blocks: BlockManager, ids: list[int]) -> Sequence:
    """A sequence whose blocks are full, as if a step had computed them."""
    seq = sequence(ids)
    blocks.allocate(seq, len(ids))
    seq.num_computed_tokens = len(ids)
    blocks.commit(seq)
    return seq


def show_kv(encode) -> None:
    model = Storyteller()
    ids = [encode(BEGINNING.format(*words) + SAME) for words in (
        ("king", "castle", "cat"), ("fox", "wood", "bear"))]
    one, other = (keys_of_attention(model, one) for one in ids)
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True)]
    print("the same 16 tokens behind two beginnings: their keys differ, layer by layer, by")
    print("   ", *(f"{part:.0%}" for part in apart))
    plain, chained = ([digest(bytes(str(text[start:]), "ascii")).hex()[:8] for text in ids]
                      for start in (SIZE, 0))
    print(f"a hash of the block alone:   {plain[0]} and {plain[1]}")
    print(f"of all that stands before:   {chained[0]} and {chained[1]}")


def show_collision(encode, decode) -> None:
    first, second, count = collision(encode)
    print(f"of {count} beginnings these two have the same key of 16 bits:")
    print(*(f"    {decode(ids)}" for ids in (first, second)), sep="\n")
    same = encode(SAME)
    keys = [BlockManager(1, SIZE).keys(sequence(ids + same)) for ids in (first, second)]
    print(f"and so has the block that follows both: {keys[0] == keys[1]}")
    blocks = BlockManager(4, SIZE)
    blocks.free(compute(blocks, first + same))
    asked = sequence([*second, *same, 0])
    print(f"blocks that are found by keys alone: {sum(key in blocks.cached for key in keys[1])}, "
          f"by the engine: {len(blocks.find_prefix(asked))}")

    # The second beginning takes the first one's place in the cache; what followed is still there.
    blocks = BlockManager(4, SIZE)
    head, whole = compute(blocks, first), compute(blocks, first + same)
    blocks.free(head)
    compute(blocks, [0] * SIZE)  # the last blank block
    compute(blocks, second)  # takes the block of `head`
    hits = blocks.find_prefix(asked)
    print(f"with the beginning computed anew, by keys and tokens: "
          f"{same_tokens(blocks, asked)}, by the engine: {len(hits)}")
    assert whole.block_table


def same_tokens(blocks: BlockManager, seq: Sequence) -> int:
    """The hits of a look-up that compares a block's key and its own tokens."""
    for i, key in enumerate(blocks.keys(seq)):
        entry = blocks.cached.get(key)
        if entry is None or entry.tokens != seq.token_ids[i * SIZE:(i + 1) * SIZE]:
            return i
    return len(blocks.keys(seq))


def main(tokenizer) -> None:
    show_kv(tokenizer.encode)
    with mock.patch("nanoserve.block_manager.xxhash.xxh3_128_digest", weak):
        show_collision(tokenizer.encode, tokenizer.decode)
