"""What is computed once for several requests, and what the scheduler lets others find."""

import pytest
from helpers import sequence
from scheduler_by_hand import add, alone, computed, finish_step, make, rows, run, run_step

from nanoserve.config import SamplingParams
from nanoserve.scheduler import Scheduler

pytestmark = pytest.mark.floor


# -------------------------------------------------------- identical prefixes


@pytest.mark.parametrize("budget", [8192, 515, 100, 64])
def test_sixteen_requests_that_share_512_tokens_cost_one_prefill_of_512(budget):
    """They arrive together: one computes, the others wait for its blocks instead of computing the
    same. Each has 3 tokens of its own; the first computes 515, the other fifteen 3 each."""
    scheduler = make(num_blocks=200, budget=budget, seqs=16, block_size=16)
    seqs = [add(scheduler, [*range(512), 1000 + i, 1001 + i, 1002 + i], 1) for i in range(16)]
    steps = run(scheduler)
    assert [computed(steps, seq) for seq in seqs] == [515] + [3] * 15
    assert [seq.num_cached_tokens for seq in seqs] == [0] + [512] * 15
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


@pytest.mark.parametrize("num_prompt, caching, expected", [
    (10, True, 10 + 3 * 2),  # two blocks are shared, two tokens are each sample's own
    (8, True, 8 + 3 * 4),  # both blocks are full, but the last token must be computed
    (3, True, 4 * 3),  # nothing to share below a block
    (10, False, 4 * 10)])  # and nothing without the cache
def test_samples_of_one_prompt_share_its_full_blocks(num_prompt, caching, expected):
    scheduler = make(enable_prefix_caching=caching)
    samples = add(scheduler, num_prompt, 1, n=4)
    steps = run(scheduler)
    assert computed(steps, *samples) == expected
    assert {seq.name for seq in samples} == {"A.0", "A.1", "A.2", "A.3"}
    assert all(seq.output_token_ids == alone(seq) for seq in samples)


def test_a_fully_cached_prompt_computes_its_last_block():
    """A cached prompt of a multiple of the block size left zero tokens to compute: crash (nano-vllm
    #144, #199)."""
    scheduler = make()
    first = add(scheduler, range(8), 1)
    run(scheduler)
    again = add(scheduler, range(8), 1)
    steps = run(scheduler)
    assert (rows(steps[0]), steps[0].starts, steps[0].sampling) == ({"B": 4}, [4], [again])
    assert again.output_token_ids == first.output_token_ids == alone(first)


def test_who_sits_out_keeps_its_place_and_lets_others_pass():
    """B waits for A's prefix. Meanwhile C, with a prompt of its own, may go. Next step B hits."""
    scheduler = make()
    add(scheduler, [*range(8), 50]), add(scheduler, [*range(8), 60]), add(scheduler, 5)
    assert rows(run_step(scheduler)) == {"A": 9, "C": 5}
    assert len(scheduler.waiting) == 1
    assert rows(run_step(scheduler)) == {"A": 1, "C": 1, "B": 1}
    assert list(rows(run_step(scheduler))) == ["A", "B", "C"]
    run(scheduler)


def test_who_passes_must_fit_whole_into_the_step():
    """B waits for A's prefix; were C let in with a chunk, the rest of C would stand before B."""
    scheduler = make(budget=12)
    add(scheduler, [*range(8), 50]), add(scheduler, [*range(8), 60]), add(scheduler, 20)
    steps = run(scheduler)
    assert rows(steps[0]) == {"A": 9}
    assert rows(steps[1]) == {"A": 1, "B": 1, "C": 10}


def test_no_step_searches_a_long_queue_that_begins_alike():
    """3 rows, and 50 requests that begin like A: two sit out, and the others are not even asked."""
    scheduler = make(num_blocks=200, seqs=3)
    seqs = [add(scheduler, [*range(8), 100 + i]) for i in range(51)]
    step = run_step(scheduler)
    assert rows(step) == {"A": 9} and list(step.sitting_out) == seqs[1:3]
    run(scheduler)


def test_nobody_waits_for_the_block_that_must_be_computed_anyway():
    """The last token is always computed, so a prompt of exactly one block has nothing to gain from
    another one's: it starts at once."""
    scheduler = make()
    seqs = [add(scheduler, range(4), 2), add(scheduler, range(4), 2)]
    assert rows(run_step(scheduler)) == {"A": 4, "B": 4}
    run(scheduler)
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


def test_whoever_waits_for_an_aborted_prefix_computes_it_alone():
    scheduler = make(budget=8)
    first, second = add(scheduler, [*range(20), 50]), add(scheduler, [*range(20), 60])
    step = scheduler.schedule()
    assert rows(step) == {"A": 8}
    scheduler.finish(first, "abort")
    finish_step(scheduler, step)
    steps = run(scheduler)
    assert second.num_cached_tokens == 0 and computed(steps, second) == 21 + 3
    assert second.output_token_ids == alone(second)


def test_two_sequences_that_write_the_same_block_in_one_step():
    """Two identical prompts in the same step: the second overwrote the first one's entry in the
    hash map (nano-vllm #219). Sharing is optional, consistency is not: prompts of 3 tokens, below
    a block, decode the same tokens and fill the same block at the same time."""
    scheduler = make()
    twins = [add(scheduler, range(3), 8, name=name) for name in ("a", "b")]
    for _ in range(6):
        assert rows(run_step(scheduler)).keys() == {"a", "b"}
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    scheduler.finish(twins[0], "abort")  # its blocks are those that the cache names
    scheduler.check()
    later = add(scheduler, twins[1].token_ids[:8] + [9], 1)
    steps = run(scheduler)
    assert later.num_cached_tokens == 8 and computed(steps, later) == 1
    assert twins[1].output_token_ids == alone(twins[1])
    assert later.output_token_ids == alone(later)


# ---------------------------------------------------- what may be remembered


def findable(scheduler: Scheduler, tokens: list[int]) -> int:
    probe = sequence("probe", [*tokens, 0], SamplingParams())
    return len(scheduler.blocks.find_prefix(probe))


def test_nothing_is_findable_before_its_step_has_finished():
    """A block was entered in the cache while it still held tokens that a later check took back.
    Here a block is entered in `update`, once its KV is computed and its tokens are final: between
    `schedule` and `update` nothing is, and a sampled token, whose KV is missing, never is."""
    scheduler = make()
    seq = add(scheduler, 7, 6)
    step = scheduler.schedule()
    assert findable(scheduler, seq.token_ids) == 0
    finish_step(scheduler, step)
    assert (len(seq.token_ids), seq.num_computed_tokens) == (8, 7)
    assert findable(scheduler, seq.token_ids) == 1, "8 tokens are known, 7 computed: one block"
    step = scheduler.schedule()
    assert findable(scheduler, seq.token_ids) == 1
    finish_step(scheduler, step)
    assert findable(scheduler, seq.token_ids) == 2


def test_what_a_store_loads_is_computed_with_its_step():
    """Of 13 tokens 8 are loaded and 5 computed; until the step has ended, all are in flight."""
    scheduler = make()
    scheduler.hooks.find.append(lambda step, seq, num_hits: 2)  # blocks that follow
    seq = add(scheduler, 13)
    step = scheduler.schedule()
    assert (step.starts, rows(step), step.num_loaded) == ([8], {"A": 5}, {seq: 8})
    assert (seq.num_computed_tokens, seq.num_inflight_tokens, seq.num_cached_tokens) == (0, 13, 8)
    finish_step(scheduler, step)
    assert (seq.num_computed_tokens, seq.num_inflight_tokens) == (13, 0)
    assert seq.num_committed_blocks == 3


def test_a_chunk_of_an_aborted_request_is_not_remembered():
    """A chunk was entered in the prefix tree, and its block freed when the request was aborted: a
    corrupt prefix for ever (sglang #38319)."""
    scheduler = make(budget=8)
    seq = add(scheduler, range(20), 2)
    run_step(scheduler)
    step = scheduler.schedule()
    assert (step.starts, rows(step)) == ([8], {"A": 8})
    scheduler.finish(seq, "abort")
    scheduler.check()
    finish_step(scheduler, step)
    assert findable(scheduler, list(range(20))) == 2, "what was computed before stays true"
    again = add(scheduler, range(20), 2)
    steps = run(scheduler)
    assert computed(steps, again) == 20 - 8 + 1 and again.output_token_ids == alone(again)
