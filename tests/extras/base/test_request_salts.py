"""A salt in front of a prompt's blocks: who does not know it finds none of them, anywhere.

Oracles: transformers' greedy text, and the counts of tokens that came from the cache. A prompt of
40 tokens has two blocks of 16 to be found; the last 8 tokens are always computed.
"""

import gc

import pytest
from small_engine import greedy, make, run, tokens

from nanoserve.sequence import CacheEntry
from nanoserve_extras.base.request import SALTED, salted

LONG = "a prompt of forty tokens, one a letter.."


def cached(llm, salts: list, text: str = LONG) -> list[int]:
    """How much of the prompt was in the cache, asked under one salt after the other."""
    return [run(llm, {"prompt": text, "cache_salt": salt}, greedy(2))[0].num_cached_tokens
            for salt in salts]


def test_a_prompt_is_found_again_only_under_its_own_salt(qwen3, expected):
    with make(qwen3) as llm:
        assert cached(llm, ["a", "b", None, "a", "b", None]) == [0, 0, 0, 32, 32, 32]
        both = [{"prompt": LONG, "cache_salt": salt} for salt in ("a", "c")]
        assert tokens(run(llm, both, greedy())) == [expected(LONG)] * 2
        llm.scheduler.check()


def test_prompts_of_two_tenants_that_arrive_together_share_no_block(qwen3):
    with make(qwen3) as llm:
        prompts = [{"prompt": LONG, "cache_salt": salt} for salt in ("a", "b", "a")]
        assert [out.num_cached_tokens for out in run(llm, prompts, greedy(2))] == [0, 0, 32]


@pytest.mark.parametrize("options", [dict(), dict(async_scheduling=True)], ids=str)
def test_a_store_behind_the_cache_keeps_tenants_apart(qwen3, tmp_path, options):
    with make(qwen3, kv_store=str(tmp_path / "blocks"), **options) as llm:
        assert cached(llm, ["a"]) == [0]
    with make(qwen3, kv_store=str(tmp_path / "blocks"), **options) as llm:
        assert cached(llm, ["b", None, "a"]) == [0, 0, 32]


def test_a_pooled_prompt_is_found_again_only_under_its_own_salt(qwen3):
    prompts = [{"prompt": LONG} | salt for salt in ({}, dict(cache_salt="a"), {}, dict(
        cache_salt="a"))]
    with make(qwen3, runner="pooling", convert="embed") as llm:
        outs = [llm.embed(prompt, use_tqdm=False)[0] for prompt in prompts]
    assert [out.num_cached_tokens for out in outs] == [0, 0, 32, 32]
    assert all(out.outputs.embedding == outs[0].outputs.embedding for out in outs[1:3])


def test_roots_are_one_object_for_each_salt_and_adapter_while_somebody_has_them():
    adapter, other = (CacheEntry(b"content", -1, [], None) for _ in range(2))
    roots = [salted(root, salt) for root in (None, adapter, other) for salt in ("a", "b")]
    assert len({id(root) for root in roots}) == 6 and len({root.key for root in roots}) == 4
    assert salted(adapter, "a") is roots[2] and salted(adapter, None) is adapter
    num_kept = len(SALTED)
    del roots
    gc.collect()
    assert len(SALTED) == num_kept - 6
