"""The scheduler alone: who computes what when, with a fake sampler instead of a model.

The oracles are `alone()`, the naive twin, and arithmetic by hand. No torch.
"""

import pytest
from scheduler_by_hand import add, alone, computed, finish_step, make, rows, run, run_step

from nanoserve.config import POLICIES
from nanoserve.sequence import Sequence, Step

pytestmark = pytest.mark.floor


# ------------------------------------------------------------- the one budget


def test_the_picture_of_the_docstring():
    """Budget 8, prompts of 5, 9 and 4 tokens: prefilling, chunking and decoding in one batch."""
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


def test_an_unfinished_chunk_samples_nothing():
    """The token sampled behind an unfinished chunk was appended to the sequence (mini-sglang
    ef4367f): there is no next token before the whole prompt has been read."""
    scheduler = make(budget=4)
    seq = add(scheduler, 10, max_tokens=1)
    steps = run(scheduler)
    assert [(rows(step), step.starts, len(step.sampling)) for step in steps] == [
        ({"A": 4}, [0], 0), ({"A": 4}, [4], 0), ({"A": 2}, [8], 1)]
    assert seq.output_token_ids == alone(seq) and len(seq.output_token_ids) == 1


def test_decoding_sequences_are_served_before_prompts():
    """A long prompt takes what decoding leaves: it slows nobody down who is ahead of it."""
    scheduler = make(budget=6)
    first, second = add(scheduler, 3, 8), add(scheduler, 3, 8)
    run_step(scheduler)
    add(scheduler, 20)
    for _ in range(4):
        assert rows(run_step(scheduler)) == {"A": 1, "B": 1, "C": 4}
    run(scheduler)
    assert (first.output_token_ids, second.output_token_ids) == (alone(first), alone(second))


def test_without_chunked_prefill_a_prompt_is_computed_whole_or_not_yet():
    scheduler = make(budget=16, enable_chunked_prefill=False)
    seqs = [add(scheduler, 10), add(scheduler, 10), add(scheduler, 3)]
    steps = run(scheduler)
    assert [rows(step) for step in steps[:2]] == [{"A": 10}, {"A": 1, "B": 10, "C": 3}]
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


@pytest.mark.parametrize("shared", [0, 8])
def test_max_num_seqs_counts_those_that_run_already(shared):
    """With max_num_seqs=2 eight sequences ran: admission looked at the new ones only. Sequences
    that wait for a shared prefix must not slip through either."""
    scheduler = make(seqs=2)
    prompts = [[*range(shared), 100 * i, 100 * i + 1] for i in range(1, 9)]
    seqs = [add(scheduler, prompt) for prompt in prompts]
    num_running = []
    steps = run(scheduler, lambda step: num_running.append(len(scheduler.running)))
    assert max(num_running) == max(len(step.num_new_tokens) for step in steps) == 2
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


# ------------------------------------------------------------------ the order


def first_scheduled(steps: list[Step]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in rows(step)))


@pytest.mark.parametrize("policy, order", [("fcfs", "ABCDE"), ("priority", "BDACE")])
def test_waiting_sequences_are_admitted_in_order(policy, order):
    """Lower values first, arrival breaks ties; first come first served looks at arrival alone."""
    scheduler = make(seqs=1, scheduling_policy=policy)
    seqs = [add(scheduler, 5, 2, priority=priority) for priority in (0, -1, 0, -1, 7)]
    assert first_scheduled(run(scheduler)) == list(order)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


def test_the_queue_never_jumps():
    """A is running; B doesn't fit beside it; C would, but came later and must not starve B."""
    scheduler = make(num_blocks=6)
    add(scheduler, 8, 4), add(scheduler, 17, 4), add(scheduler, 2, 4)
    steps = run(scheduler)
    assert rows(steps[0]) == {"A": 8} and rows(steps[1]) == {"A": 1}
    assert first_scheduled(steps) == ["A", "B", "C"]


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


def test_first_come_first_served_lets_nobody_pass_a_running_prompt():
    scheduler = make(num_blocks=200, budget=8, seqs=4)
    add(scheduler, 20), run_step(scheduler), add(scheduler, 3)
    assert [rows(run_step(scheduler)) for _ in range(3)] == [{"A": 8}, {"A": 4, "B": 3},
                                                             {"A": 1, "B": 1}]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_may_not_be_cut_are_whole_again_after_a_lost_step(policy):
    """With overlap two steps of prompts are lost at once, and all of their prompts run by then: the
    last was cut to what the budget left, and an encoder never answered again."""
    scheduler = make(budget=10, seqs=8, scheduling_policy=policy, enable_chunked_prefill=False)
    seqs = [add(scheduler, 6, 3, arrival_time=i / 100) for i in range(4)]
    assert [rows(scheduler.schedule()) for _ in range(2)] == [{"A": 6}, {"A": 1, "B": 6}]
    scheduler.drop_in_flight()
    steps = run(scheduler)
    assert [rows(step) for step in steps[:2]] == [{"A": 6}, {"A": 1, "B": 6}]
    assert all(set(step.sampling) == set(step.num_new_tokens) for step in steps)
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]


# ----------------------------------------------------------------- preemption


@pytest.mark.parametrize("policy, priorities, victims", [
    ("fcfs", (0, 0, 0), "CB"), ("fcfs", (2, 1, 0), "CB"), ("priority", (0, 0, 0), "CB"),
    ("priority", (2, 1, 0), "AB"), ("priority", (1, 0, 1), "CA"), ("priority", (0, 5, 1), "BC")])
def test_the_victim_is_the_least_important_then_the_latest(policy, priorities, victims):
    """Three sequences fill six blocks; when the first of them grows, the last in order goes."""
    scheduler = make(num_blocks=6, scheduling_policy=policy)
    seqs = [add(scheduler, 7, 9, priority=priority) for priority in priorities]
    steps = run(scheduler)
    preempted = [seq.name for step in steps for seq in step.preempted]
    assert preempted[:2] == list(victims)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


def test_a_victim_gives_back_its_blocks_and_keeps_its_tokens():
    scheduler = make(num_blocks=4, enable_prefix_caching=False)
    first, second = add(scheduler, 7, 5), add(scheduler, 7, 5)
    steps = [run_step(scheduler), run_step(scheduler)]
    tokens = list(second.token_ids)
    assert len(tokens) == 9 and rows(steps[1]) == {"A": 1, "B": 1}
    steps.append(run_step(scheduler))
    assert steps[2].preempted == {second: first} and rows(steps[2]) == {"A": 1}
    assert str(steps[2]) == "step 2: 1 tokens | A 8 ↦ | preempted B"
    assert (second.token_ids, second.block_table, second.row) == (tokens, [], -1)
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert len(scheduler.waiting) == 1


def test_recomputing_covers_all_tokens_not_only_the_last():
    """A preempted sequence was rebuilt from its last token only (nano-vllm #103, #144, #145): its
    prompt *and* its output have lost their KV. Here 7 + 2 tokens are computed again from 0."""
    scheduler = make(num_blocks=4, enable_prefix_caching=False)
    first, second = add(scheduler, 7, 5), add(scheduler, 7, 5)
    steps = run(scheduler)
    back = next(step for step in steps[3:] if second in step.num_new_tokens)
    assert (back.starts, rows(back), back.sampling) == ([0], {"B": 9}, [second])
    assert computed(steps, second) == 7 + 1 + 9 + 2, "prefill, a decode, all again, two decodes"
    assert (first.output_token_ids, second.output_token_ids) == (alone(first), alone(second))


def test_the_share_is_computed_after_the_hit():
    """The number of tokens to schedule was computed before the prefix hit was applied: index out of
    range after a preemption followed by a hit (nano-vllm #207, #211, #233). Here the victim finds
    one of its blocks again and asks for the rest only."""
    scheduler = make(num_blocks=5)
    _, second = add(scheduler, 7, 7), add(scheduler, 7, 7)
    steps = run(scheduler)
    assert second.num_preemptions == 1
    at = next(i for i, step in enumerate(steps) if second in step.preempted)
    back = next(step for step in steps[at:] if second in step.num_new_tokens)
    start = back.starts[list(back.num_new_tokens).index(second)]
    num_tokens_then = 7 + sum(second in step.sampling for step in steps[:at])
    assert start > 0 and start + back.num_new_tokens[second] == num_tokens_then
    assert second.output_token_ids == alone(second)
    assert second.num_cached_tokens == 0, "finding one's own blocks again is no saving"


def test_nobody_is_admitted_to_the_blocks_that_somebody_waits_for():
    """In the step that preempts B, neither C, which has been waiting for a row and would fit, nor
    B itself may take the blocks that were just given back."""
    scheduler = make(num_blocks=4, seqs=2, scheduling_policy="priority")
    add(scheduler, 7, 5, priority=0), add(scheduler, 7, 5, priority=2)
    run_step(scheduler)
    add(scheduler, 2, 2, priority=3)
    steps = run(scheduler)
    step = next(step for step in steps if step.preempted)
    assert [seq.name for seq in step.preempted] == ["B"] and rows(step) == {"A": 1}


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


def test_admission_asks_for_room_for_the_whole_prompt():
    """B's first chunk would fit beside A, all of B would not: letting it in would only make the two
    preempt each other."""
    scheduler = make(num_blocks=6, budget=8)
    add(scheduler, 8, 5), add(scheduler, 17, 4)
    steps = run(scheduler)
    assert not any(step.preempted for step in steps)
    assert [rows(step) for step in steps[:5]] == [{"A": 8}] + [{"A": 1}] * 4
    assert rows(steps[5]) == {"B": 8}


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_nothing_starves_in_a_tiny_pool(num_blocks, caching):
    """Twenty sequences, each of which could fill the smallest cache alone; all end, with the right
    tokens, and the order of arrival is the order of the first token."""
    scheduler = make(num_blocks, budget=6, seqs=6, enable_prefix_caching=caching)
    seqs = [add(scheduler, 1 + i * 5 % 9, 17 - (1 + i * 5 % 9)) for i in range(20)]
    steps = run(scheduler)
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]
    firsts = dict.fromkeys(seq for step in steps for seq in step.sampling)
    assert list(firsts) == seqs


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


@pytest.mark.parametrize("window, num_released", [(1, 2), (4, 1), (5, 1), (6, 0), (9, 0)])
def test_a_block_goes_back_when_the_next_query_is_past_it(window, num_released):
    """8 tokens are computed, in blocks of 4, and the next query stands at 8. A window of 5 shows it
    4 to 8, so 0 to 3 are not needed any more; a window of 6 shows it 3, too."""
    scheduler = make(window=window)
    seq = add(scheduler, 8)
    run_step(scheduler)
    assert seq.num_released_blocks == num_released


def test_nobody_begins_in_a_step_in_which_blocks_ran_out():
    """4 blocks: A and B hold 2 each when A needs a third. C is the shortest, and 1 block is left of
    B's; it begins in the next step, when those that run have what they need."""
    scheduler = make(4, enable_prefix_caching=False, scheduling_policy="shortest")
    add(scheduler, 7, 5), add(scheduler, 7, 5)
    run_step(scheduler), run_step(scheduler)
    add(scheduler, 3, 1)
    assert str(run_step(scheduler)) == "step 2: 1 tokens | A 8 ↦ | preempted B"
    assert rows(run_step(scheduler)) == {"A": 1, "C": 3}


def test_many_long_texts_run_side_by_side_behind_their_windows():
    """8 texts of 60 tokens are 120 blocks; with a window of 5 they fit into 30, and none is ever
    preempted, though each prompt asks for room for all of it when it starts."""
    scheduler = make(30, window=5, enable_prefix_caching=False)
    seqs = [add(scheduler, 8, 52) for _ in range(8)]
    most = 0

    def look(step):
        nonlocal most
        assert not step.preempted
        most = max(most, len(scheduler.running))

    run(scheduler, look)
    assert most == 8 and all(seq.output_token_ids == alone(seq) for seq in seqs)


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_behind_its_window(caching):
    """It starts again from the beginning: what it gave back before is not its own any more."""
    scheduler = make(7, window=6, enable_prefix_caching=caching)
    seqs = [add(scheduler, 9, 20) for _ in range(4)]
    released, had_released = {}, []

    def look(step):
        for seq in step.preempted:
            had_released.append(released[seq])
            assert (seq.num_released_blocks, seq.num_computed_tokens, seq.block_table) == (0, 0, [])
        released.update((seq, seq.num_released_blocks) for seq in seqs)

    run(scheduler, look)
    assert any(had_released), "nobody was preempted behind its window"
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)
    assert scheduler.blocks.num_free_blocks == 7


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
