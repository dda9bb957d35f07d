"""A folder behind several ranks: each has its share of every block, and all shares are one file.
The ranks are threads; test_block_store_processes.py has processes."""

import errno
import os
import time

import pytest
import torch
from checkpoints import SIZES, Reference, assert_same_text, save
from helpers import storage
from test_block_store_engine import LONG, SMALL, ask, num_loaded
from transformers import AutoModelForCausalLM, LlamaConfig

from nanoserve import LLM
from nanoserve.parallel import Ranks
from nanoserve_extras.block_store.block_host import HostMemory, rows_of, share_memory


@pytest.fixture
def in_threads(monkeypatch, ranks_in_threads):
    """The ranks' runners of the newest engine."""
    runners, make = {}, HostMemory.__init__

    def record(part, runner, **options):
        runners[runner.ranks.rank] = runner
        make(part, runner, **options)

    monkeypatch.setattr(HostMemory, "__init__", record)
    return runners


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """3 KV heads: over 2 ranks these are 1 and 2."""
    config = LlamaConfig(**SIZES | dict(hidden_size=48), num_attention_heads=6,
                         num_key_value_heads=3)
    return save(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("uneven"))


def files_of(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.kv")}


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_its_own_bytes_again(uneven, tmp_path, in_threads, size):
    """Shares of 1 and 2 KV heads; every rank's cache, before it holds anything, is full of NaN."""
    def run() -> tuple[dict[bytes, list[bytes]], list[int], int]:
        with LLM(uneven, **SMALL, tensor_parallel_size=size, kv_store=str(tmp_path)) as llm:
            caches = [cache for rank in range(size)
                      for cache in rows_of(in_threads[rank].kv_cache)]
            for cache in caches:
                cache.view(torch.float32).fill_(torch.nan)
            text, = ask(llm, LONG)
            blocks = {key: entry.block_id for key, entry in llm.scheduler.blocks.cached.items()}
            return {key: [bytes(cache[block_id]) for cache in caches]
                    for key, block_id in blocks.items()}, text, num_loaded(llm)

    (before, text, none), (after, again, loaded) = run(), run()
    assert none == 0 and loaded == 96 and len(before) >= 6
    assert before == after
    assert_same_text(text, *Reference(uneven).generate(LONG, 12), "uneven")
    assert again == text


def test_damage_to_one_ranks_share_is_a_miss_for_the_block(qwen3, expect, tmp_path, in_threads):
    options = SMALL | dict(tensor_parallel_size=2, kv_store=str(tmp_path))
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG)
        share = llm.runner.copier.memory.shape[1] // 2
        digest, = (digest for entry, digest in storage(llm).digest_of_entry.items()
                   if entry.tokens == LONG[48:64])
    right = files_of(tmp_path)
    data = bytearray(right[f"{digest.hex()}.kv"])
    data[-share] ^= 1  # of block 3, where rank 1's share begins
    (tmp_path / f"{digest.hex()}.kv").write_bytes(data)
    with LLM(qwen3, **options) as llm:
        expect([LONG], ask(llm, LONG))
        assert num_loaded(llm) == 48, "blocks 0 to 2"
    with LLM(qwen3, **options) as llm:
        expect([LONG], ask(llm, LONG))
        assert num_loaded(llm) == 96, "it was written anew"
    assert files_of(tmp_path).keys() == right.keys()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4)])
def test_a_folder_that_other_ranks_have_filled_brings_nothing(checkpoints, tmp_path, in_threads,
                                                              sizes):
    """(2, 4): with one KV head, of which each rank has a copy, all shares look the same."""
    folder = checkpoints["qwen3-tied"]
    texts = []
    for size, found in zip((*sizes, *sizes), (0, 0, 96, 96), strict=True):
        with LLM(folder, **SMALL, tensor_parallel_size=size, kv_store=str(tmp_path)) as llm:
            texts += ask(llm, LONG)
            assert num_loaded(llm) == found
    assert_same_text(texts[0], *Reference(folder).generate(LONG, 12), "tied")
    assert texts == texts[:1] * 4


def test_a_rank_that_saves_late_is_waited_for(qwen3, expect, tmp_path, in_threads, monkeypatch):
    """A step that only saves runs no network. Rank 0 had written the host blocks before rank 1 had
    put its share into them."""
    move, late = HostMemory.move, []

    def slow(part, host, kv_cache):
        if part.ranks.rank == 1 and not len(host["input_ids"]):
            late.append(len(host["block_moves"]) // 2)
            time.sleep(0.5)
        move(part, host, kv_cache)

    monkeypatch.setattr(HostMemory, "move", slow)
    options = SMALL | dict(tensor_parallel_size=2, kv_store=str(tmp_path))
    prompt = LONG + [1]  # of 101 + 12 tokens 112 are computed: the last one fills a block
    with LLM(qwen3, **options) as llm:
        text, = ask(llm, prompt)
    assert late == [1]
    with LLM(qwen3, **options) as llm:
        longer = prompt + text
        expect([prompt, longer], [text, *ask(llm, longer)])
        assert num_loaded(llm) == 112


def test_a_system_on_which_ranks_can_share_no_memory_is_refused_in_words(qwen3, tmp_path,
                                                                        monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="kv_store='.*tensor_parallel_size=2.*Linux"):
        LLM(qwen3, **SMALL, tensor_parallel_size=2, kv_store=str(tmp_path))


def test_memory_that_the_system_refuses_is_refused_in_words(monkeypatch):
    """An `OSError`, of which no option was named, went through to the user."""
    def fail(name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(ValueError, match="1,000 bytes.*kv_offload_bytes"):
        share_memory(Ranks(), 1000)
