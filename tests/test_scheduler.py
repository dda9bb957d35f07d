"""The scheduler alone: who computes what when, with a fake sampler instead of a model.

The oracles are `alone()`, the naive twin, and arithmetic by hand. No torch.
"""

import pytest
from helpers import sequence
from scheduler_by_hand import (
    add,
    alone,
    computed,
    finish_step,
    make,
    rows,
    run,
    run_step,
    told,
)

from nanoserve.config import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

pytestmark = pytest.mark.floor


# ------------------------------------------------------------- the one budget


def test_the_picture_of_the_docstring():
    """Budget 8, prompts of 5, 9 and 4 tokens: prefilling, chunking and decoding in one batch.
    Decodes come first. An unfinished chunk samples nothing: the token sampled behind one was
    appended to the sequence (mini-sglang ef4367f)."""
    scheduler = make(budget=8)
    seqs = [add(scheduler, 5), add(scheduler, 9), add(scheduler, 4)]
    steps = run(scheduler)
    assert [str(step) for step in steps[:4]] == [
        "step 0: 8 tokens | A 0..5 ↦ | B 0..3",
        "step 1: 8 tokens | A 5 ↦ | B 3..9 ↦ | C 0",
        "step 2: 5 tokens | A 6 ↦ | B 9 ↦ | C 1..4 ↦",
        "step 3: 3 tokens | A 7 ↦ | B 10 ↦ | C 4 ↦"]
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16, 100])
@pytest.mark.parametrize("caching", [True, False])
def test_every_budget_computes_every_token_once(budget, caching):
    """A sequence of 10 + 4 tokens needs the KV of 13: the last one is sampled, never computed."""
    scheduler = make(budget=budget, seqs=min(3, budget), enable_prefix_caching=caching)
    seqs = [add(scheduler, num_prompt) for num_prompt in (10, 1, 17, 4)]
    steps = run(scheduler)
    assert max(step.num_tokens for step in steps) <= budget
    assert [computed(steps, seq) for seq in seqs] == [13, 4, 20, 7]
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


# ---------------------------------------------------------------- the stories


BEGINNING = list(range(8))  # two blocks that several prompts share
PRIORITY = dict(scheduling_policy="priority")
# Options; what is added before which step, as a prompt or (prompt, max_tokens, priority), where a
# prompt may be a length alone; and what the first steps are, in the words of `told`.
STORIES = {
    "a prompt that may not be cut is computed whole or not yet": (
        dict(budget=16, enable_chunked_prefill=False), {0: [10, 10, 3]}, ["A10", "A1 B10 C3"]),
    # With max_num_seqs=2 eight sequences ran: admission looked at the new ones only.
    "max_num_seqs counts those that run already": (
        dict(seqs=2), {0: [3, 3, 3]}, ["A3 B3", "A1 B1", "A1 B1", "A1 B1", "C3"]),
    "and those that wait for a shared prefix": (
        dict(seqs=2), {0: [[*BEGINNING, 50], [*BEGINNING, 60], [*BEGINNING, 70]]},
        ["A9", "A1 B1", "A1 B1", "A1 B1", "B1 C1"]),
    "first come, first served lets nobody pass a running prompt": (
        dict(budget=8), {0: [20], 1: [3]}, ["A8", "A8", "A4 B3", "A1 B1"]),
    # B doesn't fit beside A; C would, but came later and must not starve B.
    "the queue never jumps": (
        dict(num_blocks=6), {0: [8, 17, 2]}, ["A8", "A1", "A1", "A1", "B17 C2"]),
    # B's first chunk would fit beside A, all of B would not: the two would preempt each other.
    "admission asks for room for the whole prompt": (
        dict(num_blocks=6, budget=8), {0: [(8, 5), 17]}, ["A8", "A1", "A1", "A1", "A1", "B8"]),
    # A cached prompt of a multiple of the block size left zero tokens: crash (nano-vllm #144, #199)
    "a fully cached prompt computes its last block": (
        dict(), {0: [(BEGINNING, 1)], 1: [(BEGINNING, 1)]}, ["A8", "B4"]),
    # B waits for A's prefix, C has a prompt of its own. In the next step B hits.
    "who sits out keeps its place and lets others pass": (
        dict(), {0: [[*BEGINNING, 50], [*BEGINNING, 60], 5]}, ["A9 C5", "A1 C1 B1", "A1 B1 C1"]),
    # Were C let in with a chunk, the rest of C would stand before B.
    "who passes must fit whole into the step": (
        dict(budget=12), {0: [[*BEGINNING, 50], [*BEGINNING, 60], 20]}, ["A9", "A1 B1 C10"]),
    # The last token is always computed: from another's first block there is nothing to gain.
    "nobody waits for the block that must be computed anyway": (
        dict(), {0: [range(4), range(4)]}, ["A4 B4"]),
    # Neither C, which would fit, nor B itself takes the blocks that B has just given back.
    "nobody is admitted to the blocks that somebody waits for": (
        dict(num_blocks=4, seqs=2, **PRIORITY), {0: [(7, 5), (7, 5, 2)], 1: [(2, 2, 3)]},
        ["A7 B7", "A1 B1", "A1 -B", "A1", "A1", "B5 C2"]),
    # 1 block is left of B's, and C is the shortest: it begins when those that run have theirs.
    "nor in the step in which they ran out": (
        dict(num_blocks=4, enable_prefix_caching=False, scheduling_policy="shortest"),
        {0: [(7, 5), (7, 5)], 2: [(3, 1)]}, ["A7 B7", "A1 B1", "A1 -B", "A1 C3"]),
    "an urgent one that lacks a row takes that of the last": (
        dict(seqs=1, **PRIORITY), {0: [(6, 6, 1)], 2: [(5, 2)]}, ["A6", "A1", "B5 -A", "B1", "A4"]),
    # A, B and C hold 2 of 8 blocks each. D needs 5 for 18 tokens.
    "and of blocks as many as it needs, from the end": (
        dict(num_blocks=8, enable_prefix_caching=False, **PRIORITY),
        {0: [(7, 2, 1), (7, 2, 2), (7, 2, 3)], 1: [(18, 2)]}, ["A7 B7 C7", "A1 D18 -C -B"]),
    "nobody makes way for its equal": (
        dict(seqs=1, **PRIORITY), {0: [9], 1: [2]}, ["A9", "A1", "A1", "A1", "B2"]),
    "nor where there is room": (
        dict(seqs=2, **PRIORITY), {0: [(9, 4, 3)], 1: [2]}, ["A9", "A1 B2", "B1 A1"]),
    "nor where there are no priorities": (
        dict(seqs=1), {0: [(9, 4, 1)], 1: [2]}, ["A9", "A1", "A1", "A1", "B2"]),
    "nor for a shorter one": (
        dict(seqs=1, scheduling_policy="shortest"), {0: [9], 1: [2]},
        ["A9", "A1", "A1", "A1", "B2"]),
}


@pytest.mark.parametrize("story", STORIES)
def test_who_computes_how_many_tokens_when(story):
    options, added, expected = STORIES[story]
    scheduler, seqs, steps = make(**options), [], []
    while len(steps) < len(expected):
        for one in added.get(len(steps), ()):
            prompt, max_tokens, priority = (*(one if isinstance(one, tuple) else (one, 4)), 0)[:3]
            seqs.append(add(scheduler, prompt, max_tokens, priority=priority))
        steps.append(told(run_step(scheduler)))
    assert steps == expected
    run(scheduler)
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


# ------------------------------------------------------------------ the order


@pytest.mark.parametrize(("policy", "first", "later"), [
    ("priority", dict(priority=5), dict(priority=1)),
    ("shortest", dict(arrival_time=0.0), dict(arrival_time=0.005))])
def test_who_comes_later_but_matters_more_gets_the_budget_first(policy, first, later):
    """A running prompt of 3,000 tokens held an urgent one up until it was computed: 45 steps. Now
    prompts share the budget in the policy's order, whether they run or wait; decodes come first."""
    scheduler = make(num_blocks=1000, budget=64, scheduling_policy=policy)
    decode = add(scheduler, 3, 50, **first)
    run_step(scheduler)
    patient, step = add(scheduler, 3000, **first), run_step(scheduler)
    assert rows(step) == {"A": 1, "B": 63}
    urgent = add(scheduler, 40, 20, **later)
    assert list(rows(run_step(scheduler)).items()) == [("A", 1), ("C", 40), ("B", 23)]
    assert urgent.output_token_ids
    assert list(rows(run_step(scheduler)).items()) == [*[("C", 1), ("A", 1)][::(
        1 if policy == "priority" else -1)], ("B", 62)]
    # One that matters more, and is longer than a step, holds up no decode.
    add(scheduler, 100, **later), add(scheduler, 5, **later)
    for expected in {"priority": ({"D": 62}, {"D": 38, "E": 5, "B": 19}, {"D": 1, "E": 1, "B": 60}),
                     "shortest": ({"E": 5, "D": 57}, {"E": 1, "D": 43, "B": 18})}[policy]:
        found = rows(run_step(scheduler))
        assert found == {"A": 1, "C": 1} | expected
    run(scheduler)
    assert patient.output_token_ids == alone(patient) and decode.output_token_ids == alone(decode)


# ----------------------------------------------------------------- preemption


@pytest.mark.parametrize("policy, priorities, lengths, victims", [
    ("fcfs", (0, 0, 0), (7, 7, 7), "CB"), ("fcfs", (2, 1, 0), (7, 7, 7), "CB"),
    ("priority", (0, 0, 0), (7, 7, 7), "CB"), ("priority", (2, 1, 0), (7, 7, 7), "AB"),
    ("priority", (1, 0, 1), (7, 7, 7), "CA"), ("shortest", (0, 0, 0), (8, 5, 7), "AC")])
def test_the_victim_is_the_least_important_then_the_latest(policy, priorities, lengths, victims):
    """Three sequences fill six blocks; when the first of them grows, the last in order goes."""
    scheduler = make(num_blocks=6, scheduling_policy=policy)
    seqs = [add(scheduler, length, 9, priority=priority)
            for length, priority in zip(lengths, priorities, strict=True)]
    steps = run(scheduler)
    preempted = [seq.name for step in steps for seq in step.preempted]
    assert preempted[:2] == list(victims)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


@pytest.mark.parametrize("caching, start", [(False, 0), (True, 4)])
def test_a_victim_keeps_its_tokens_and_recomputes_what_is_not_found(caching, start):
    """It was rebuilt from its last token only, though its prompt *and* its output have lost their
    KV (nano-vllm #103, #144, #145). And its share was computed before the prefix hit was applied:
    index out of range (#207, #211, #233)."""
    scheduler = make(num_blocks=4 + caching, enable_prefix_caching=caching)
    first, second = add(scheduler, 7, 7), add(scheduler, 7, 7)
    steps = [run_step(scheduler), run_step(scheduler)]
    tokens = list(second.token_ids)
    steps.append(run_step(scheduler))
    assert str(steps[2]) == "step 2: 1 tokens | A 8 ↦ | preempted B"
    assert (second.token_ids, second.block_table, second.row) == (tokens, [], -1)
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    steps += run(scheduler)
    back = next(step for step in steps[3:] if second in step.num_new_tokens)
    assert (back.starts, told(back), back.sampling) == ([start], f"B{9 - start}", [second])
    assert computed(steps, second) == 7 + 1 + (9 - start) + 4
    assert (first.output_token_ids, second.output_token_ids) == (alone(first), alone(second))
    assert second.num_cached_tokens == 0, "finding one's own blocks again is no saving"


def test_a_newcomer_gets_no_block_while_a_step_in_flight_holds_the_others():
    """B's last chunk needs two blocks, one is free, and B is itself the last in the order: it can
    give up its own only once its step is back. C would fit into the free block until then."""
    scheduler = make(num_blocks=8, budget=12)
    seqs = [add(scheduler, 8, 6), add(scheduler, 24, 3), add(scheduler, 3, 2)]
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    assert [rows(step) for step in in_flight] == [{"A": 8, "B": 4}, {"A": 1, "B": 11}]
    in_flight.append(scheduler.schedule())
    assert rows(in_flight[2]) == {"A": 1} and not in_flight[2].preempted
    assert [seq.name for seq in scheduler.waiting] == ["C"]
    assert scheduler.blocks.num_free_blocks == 1
    for step in in_flight:
        finish_step(scheduler, step)
    run(scheduler)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


@pytest.mark.parametrize("num_prompt, max_tokens", [(1, 16), (15, 2), (16, 1), (8, 9)])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_the_only_sequence_may_fill_the_whole_cache(num_prompt, max_tokens, budget):
    """The only running sequence ran out of blocks, nothing was left to schedule, and the engine
    asserted (nano-vllm #274). 16 slots are enough for 17 tokens: the last is never computed."""
    scheduler = make(num_blocks=4, budget=budget, seqs=1)
    seq = add(scheduler, num_prompt, max_tokens)
    run(scheduler)
    assert (seq.finish_reason, seq.num_preemptions) == ("length", 0)
    assert seq.output_token_ids == alone(seq)


@pytest.mark.parametrize("num_prompt, max_tokens", [(17, 1), (10, 8), (1, 17), (500, 4)])
def test_what_can_never_fit_is_refused_and_the_rest_is_served(num_prompt, max_tokens):
    """A prompt larger than the whole cache met a bare AssertionError (nano-vllm #274)."""
    scheduler = make(num_blocks=4)
    seq = add(scheduler, 8, 4)
    run_step(scheduler)
    num_tokens = num_prompt + max_tokens
    with pytest.raises(ValueError, match=f"{num_tokens} .*16 .*kv_cache_memory_bytes.*max_tokens"):
        add(scheduler, num_prompt, max_tokens)
    scheduler.check()
    run(scheduler)
    assert len(scheduler.waiting) == 0 and seq.output_token_ids == alone(seq)


# ------------------------------------------------------------ sliding windows


def held(seq: Sequence) -> int:
    return len(seq.block_table) - seq.num_released_blocks


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("budget", [1, 6, 64])
def test_a_long_text_holds_no_more_blocks_than_its_window_sees(window, budget, caching):
    """100 tokens are 25 blocks of 4. In a step of n tokens the queries see window + n - 1 keys,
    which touch one block more than they fill; another one may be held until its block is full."""
    scheduler = make(25, budget=budget, window=window, enable_prefix_caching=caching)
    seq = add(scheduler, 20, 80)

    def look(step):
        tokens = window + step.num_tokens - 1
        assert held(seq) <= -(-tokens // 4) + 2
        assert scheduler.blocks.num_free_blocks == 25 - held(seq)

    run(scheduler, look)
    assert seq.output_token_ids == alone(seq)
    assert scheduler.blocks.num_free_blocks == 25


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


def test_no_step_searches_a_long_queue_that_begins_alike():
    """3 rows, and 50 requests that begin like A: two sit out, and the others are not even asked."""
    scheduler = make(num_blocks=200, seqs=3)
    seqs = [add(scheduler, [*range(8), 100 + i]) for i in range(51)]
    step = run_step(scheduler)
    assert rows(step) == {"A": 9} and list(step.deferred) == seqs[1:3]
    run(scheduler)


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


# ------------------------------------------------------------------ the audit


def set_field(name, value):
    return lambda scheduler, seq: setattr(seq, name, value)


@pytest.mark.parametrize("corrupt, message", [
    (lambda scheduler, seq: scheduler.running.reverse(), "running or waiting is out of order"),
    (lambda scheduler, seq: setattr(scheduler, "max_num_seqs", 1), "a row of 1 is lost or"),
    (set_field("row", 7), "a row of 2 is lost or taken twice"),
    (lambda scheduler, seq: scheduler.in_flight.clear(),
     "sequence A counts 1 tokens in flight, the steps 0"),
    (set_field("num_inflight_tokens", 2), "sequence A counts 2 tokens in flight, the steps 1"),
    (set_field("num_unknown_tokens", -1), "sequence A computed tokens it lacks"),
    (set_field("num_unknown_tokens", 2), "sequence A awaits 2 samples of 1 steps"),
    (lambda scheduler, seq: setattr(scheduler.waiting[0], "row", 3), "sequence C waits, but"),
    (lambda scheduler, seq: setattr(scheduler.waiting[0], "finish_reason", "stop"), "still queued"),
    (lambda scheduler, seq: scheduler.running.remove(seq), "block 0 counts 1 references but"),
    (set_field("num_committed_blocks", 0), "can be found before it is computed"),
    (set_field("num_committed_blocks", 2), "committed 2 blocks, but only 1 are full"),
])
def test_the_audit_names_each_kind_of_corruption(corrupt, message):
    """Two sequences run with a step in flight, one waits. What only the audit of the commits can
    see must reach it, too: it once got an iterator that had been used up."""
    scheduler = make(seqs=2)
    seq = add(scheduler, 5)
    add(scheduler, 6), add(scheduler, 7)
    run_step(scheduler)
    scheduler.schedule()
    scheduler.check()
    corrupt(scheduler, seq)
    with pytest.raises(AssertionError, match=message):
        scheduler.check()
