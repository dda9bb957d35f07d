"""The scheduler alone: who computes what when, with a fake sampler instead of a model.

A sampled token is a fixed function of the tokens before it, so the right output of a request is
known without any scheduling: `alone()` below is the whole naive twin. Everything else is arithmetic
by hand. No torch; blocks have 4 tokens unless a test says otherwise, and the audit runs after every
step.
"""

import random
import zlib

import pytest

from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

EOS, STOP = 5000, 5001


def make(num_blocks=64, *, budget=64, seqs=8, block_size=4, window=None, **options) -> Scheduler:
    config = EngineConfig(model="none", max_num_batched_tokens=budget, block_size=block_size,
                          max_num_seqs=min(seqs, budget), **options)
    return Scheduler(config, num_blocks, window)


def add(scheduler, prompt, max_tokens=4, *, name=None, n=1, **fields) -> Sequence:
    """Queue a request; `prompt` is its tokens, or a length for tokens that nobody else has."""
    arrival = scheduler.arrivals = getattr(scheduler, "arrivals", -1) + 1
    if isinstance(prompt, int):
        prompt = [1000 * (arrival + 10) + i for i in range(prompt)]
    params = SamplingParams(n=n, max_tokens=max_tokens)
    samples = [Sequence(name or chr(ord("A") + arrival % 26), list(prompt), params, arrival,
                        index=index, max_num_tokens=len(prompt) + max_tokens, **fields)
               for index in range(n)]
    for seq in samples:
        scheduler.add(seq)
    return samples if n > 1 else samples[0]


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 1000


def alone(seq: Sequence) -> list[int]:
    """What the fake model says for this prompt, computed without any scheduler."""
    tokens = seq.token_ids[:seq.num_prompt_tokens]
    while len(tokens) < seq.max_num_tokens:
        tokens.append(next_token(tokens))
    return tokens[seq.num_prompt_tokens:]


def finish_step(scheduler: Scheduler, step: Step) -> list[Sequence]:
    grown = scheduler.update(step, [next_token(seq.token_ids) for seq in step.sampling])
    scheduler.check()
    return grown


def run_step(scheduler: Scheduler, look=lambda step: None) -> Step:
    step = scheduler.schedule()
    scheduler.check()
    look(step)
    if step.num_new_tokens:
        finish_step(scheduler, step)
    return step


def run(scheduler: Scheduler, look=lambda step: None) -> list[Step]:
    """Step until everything is done; `look` sees each step before it takes effect. The limit turns
    a scheduler that is stuck into a failure."""
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler, look))
        assert len(steps) < 2000, "stuck"
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "blocks were lost"
    return steps


def computed(steps: list[Step], *seqs: Sequence) -> int:
    return sum(step.num_new_tokens.get(seq, 0) for step in steps for seq in seqs)


def rows(step: Step) -> dict[str, int]:
    return {seq.name: n for seq, n in step.num_new_tokens.items()}


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
    steps = run(scheduler, lambda step: num_running.append(scheduler.num_running))
    assert max(num_running) == max(len(step.num_new_tokens) for step in steps) == 2
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


def test_a_row_belongs_to_one_running_sequence():
    scheduler = make(seqs=3)
    seqs = [add(scheduler, 5, max_tokens=2 + i) for i in range(6)]

    def look(step):
        taken = [seq.row for seq in step.num_new_tokens]
        assert len(set(taken)) == len(taken) and set(taken) <= {0, 1, 2}

    run(scheduler, look)
    assert {seq.row for seq in seqs} == {-1} and sorted(scheduler.free_rows) == [0, 1, 2]


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


def test_who_comes_later_but_matters_more_gets_the_budget_first():
    """Priority orders the running sequences, too: a decode step serves the urgent one first."""
    scheduler = make(budget=4, seqs=4, scheduling_policy="priority")
    add(scheduler, 12, priority=5)
    run_step(scheduler)
    add(scheduler, 3, priority=1)
    # All that is left of A's prompt is ahead of B's admission: the budget is given out in order.
    assert [rows(run_step(scheduler)) for _ in range(3)] == [{"A": 4}, {"A": 4}, {"A": 1, "B": 3}]
    assert list(rows(run_step(scheduler))) == ["B", "A"]


def test_arrival_breaks_ties_also_after_a_preemption():
    """A preempted sequence keeps its place: it comes back before those that arrived after it."""
    scheduler = make(num_blocks=5, seqs=2)
    add(scheduler, 7, 6), add(scheduler, 7, 6), add(scheduler, 3, 6)
    steps = run(scheduler)
    assert any(step.preempted for step in steps)
    assert first_scheduled(steps) == ["A", "B", "C"]
    last_of = {name: i for i, step in enumerate(steps) for name in rows(step)}
    assert last_of["B"] < last_of["C"]


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
    assert steps[2].preempted == [second] and rows(steps[2]) == {"A": 1}
    assert str(steps[2]) == "step 2: 1 tokens | A 8 ↦ | preempted B"
    assert (second.token_ids, second.block_table, second.row) == (tokens, [], -1)
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert scheduler.num_waiting == 1


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
    first, second = add(scheduler, 7, 7), add(scheduler, 7, 7)
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
    """In the step that preempts B, C must not take the blocks that were just given back, although
    it is more important than B, would fit, and has been waiting for a seat."""
    scheduler = make(num_blocks=4, seqs=2, scheduling_policy="priority")
    add(scheduler, 7, 5, priority=0), add(scheduler, 7, 5, priority=2)
    run_step(scheduler)
    add(scheduler, 2, 2, priority=1)
    steps = run(scheduler)
    step = next(step for step in steps if step.preempted)
    assert [seq.name for seq in step.preempted] == ["B"] and rows(step) == {"A": 1}


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
    with pytest.raises(ValueError, match=f"{num_tokens} tokens can't fit.*16 tokens.*4 blocks of 4"
                                         ".*kv_cache_memory_bytes.*max_tokens"):
        add(scheduler, num_prompt, max_tokens)
    scheduler.check()
    run(scheduler)
    assert scheduler.num_waiting == 0 and seq.output_token_ids == alone(seq)


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
    """Twenty sequences, each of which could fill the smallest pool alone; all end, with the right
    tokens, and the order of arrival is the order of the first token."""
    scheduler = make(num_blocks, budget=6, seqs=6, enable_prefix_caching=caching)
    seqs = [add(scheduler, 1 + i * 5 % 9, 17 - (1 + i * 5 % 9)) for i in range(20)]
    steps = run(scheduler)
    assert [seq.output_token_ids for seq in seqs] == [alone(seq) for seq in seqs]
    firsts = dict.fromkeys(seq for step in steps for seq in step.sampling)
    assert list(firsts) == seqs


def test_the_least_important_is_served_in_the_end():
    scheduler = make(num_blocks=6, budget=8, seqs=3, scheduling_policy="priority")
    last = add(scheduler, 6, 8, priority=9)
    seqs = [add(scheduler, 6, 8, priority=i % 3) for i in range(12)]
    run(scheduler)
    assert last.output_token_ids == alone(last)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)


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


def test_many_long_texts_run_side_by_side_behind_their_windows():
    """8 texts of 60 tokens are 120 blocks; with a window of 5 they fit into 30, and none is ever
    preempted, though each prompt asks for room for all of it when it starts."""
    scheduler = make(30, window=5, enable_prefix_caching=False)
    seqs = [add(scheduler, 8, 52) for _ in range(8)]
    most = 0

    def look(step):
        nonlocal most
        assert not step.preempted
        most = max(most, scheduler.num_running)

    run(scheduler, look)
    assert most == 8 and all(seq.output_token_ids == alone(seq) for seq in seqs)


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_behind_its_window(caching):
    """It starts again from the beginning: what it gave back before is not its own any more."""
    scheduler = make(8, window=6, enable_prefix_caching=caching)
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
    assert scheduler.blocks.num_free_blocks == 8


@pytest.mark.parametrize("in_flight", [False, True])
def test_aborted_behind_its_window(in_flight):
    """Only what it still holds goes back, and only when no step in flight reads it."""
    scheduler = make(12, window=6)
    first, second = add(scheduler, 9, 30), add(scheduler, 9, 30)
    for _ in range(12):
        run_step(scheduler)
    assert first.num_released_blocks >= 3
    step = scheduler.schedule() if in_flight else None
    before = scheduler.blocks.num_free_blocks, held(first)
    scheduler.finish(first, "abort")
    scheduler.check()
    assert scheduler.blocks.num_free_blocks == before[0] + (0 if in_flight else before[1])
    if in_flight:
        finish_step(scheduler, step)
        assert scheduler.blocks.num_free_blocks == before[0] + before[1]
    run(scheduler)
    assert second.output_token_ids == alone(second) and scheduler.blocks.num_free_blocks == 12


def test_samples_of_one_prompt_leave_their_common_blocks_one_by_one():
    scheduler = make(30, window=5)
    seqs = add(scheduler, 13, 12, n=3)
    run_step(scheduler)  # the first one's prompt
    run_step(scheduler)  # the others hit its three full blocks
    assert [seq.num_cached_tokens for seq in seqs] == [0, 12, 12]
    run(scheduler)
    assert all(seq.output_token_ids == alone(seq) for seq in seqs)
    assert scheduler.blocks.num_free_blocks == 30


def test_without_a_window_in_every_layer_nothing_is_given_back():
    scheduler = make(30)
    seq = add(scheduler, 20, 60)
    most = []
    run(scheduler, lambda step: most.append(held(seq)))
    assert max(most) == 20 and seq.num_released_blocks == 0  # 79 computed tokens


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
    assert scheduler.num_waiting == 1
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
    probe = Sequence("probe", [*tokens, 0], SamplingParams())
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


# ------------------------------------------------------------------- endings


def sample(scheduler: Scheduler, *tokens: int) -> Step:
    step = scheduler.schedule()
    scheduler.update(step, list(tokens))
    scheduler.check()
    return step


@pytest.mark.parametrize("token, reason, stop_reason", [
    (EOS, "stop", None), (STOP, "stop", STOP), (7, "length", None)])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_how_a_sequence_ends(token, reason, stop_reason, num_before):
    """EOS has no stop_reason, a stop token is its own. On the last allowed token (the fourth), a
    stop is still a stop. The token that ends a sequence belongs to its output."""
    scheduler = make()
    seq = add(scheduler, 5, 4, stop_ids=frozenset((EOS, STOP)), eos_ids=frozenset((EOS,)))
    tokens = [1] * num_before + [token] * (4 - num_before if reason == "length" else 1)
    for i in tokens:
        assert seq.finish_reason is None
        sample(scheduler, i)
    assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)
    assert seq.output_token_ids == tokens
    assert not scheduler.has_unfinished() and scheduler.blocks.num_free_blocks == 64


def test_the_first_reason_stands_but_for_a_stop_string():
    """The text is looked at after the token was counted: a stop string found in the text of the
    token that ended it otherwise is why the text ends. Nothing else is changed afterwards."""
    scheduler = make()
    cases = [("length", "stop", ("stop", "###")), ("abort", "stop", ("abort", None)),
             ("stop", "stop", ("stop", "###")), ("stop", "length", ("stop", None)),
             ("length", "abort", ("length", None)), ("stop", "abort", ("stop", None))]
    for first, second, expected in cases:
        seq = add(scheduler, 5)
        run_step(scheduler)
        scheduler.finish(seq, first)
        scheduler.finish(seq, second, "###")
        assert (seq.finish_reason, seq.stop_reason) == expected
        scheduler.check()
    assert scheduler.blocks.num_free_blocks == 64


# -------------------------------------------------------------------- aborts

# Each brings a victim into one state, among others, and returns the steps that are in flight then.


def waiting(scheduler, victim):
    return []


def step_until(scheduler, reached) -> list[Step]:
    for _ in range(50):
        if reached():
            return []
        run_step(scheduler)
    raise AssertionError("the victim never gets into the state that is to be tested")


def mid_chunk(scheduler, victim):
    return step_until(scheduler, lambda: 0 < victim.num_computed_tokens < 14)


def decoding(scheduler, victim):
    return step_until(scheduler, lambda: len(victim.output_token_ids) == 2)


def preempted(scheduler, victim):
    return step_until(scheduler, lambda: victim.num_preemptions and victim.row < 0)


def chunk_in_flight(scheduler, victim):
    mid_chunk(scheduler, victim)
    return [scheduler.schedule()]


def decode_in_flight(scheduler, victim):
    decoding(scheduler, victim)
    return [scheduler.schedule()]


def two_steps_in_flight(scheduler, victim):
    decoding(scheduler, victim)
    return [scheduler.schedule(), scheduler.schedule()]


@pytest.mark.parametrize("state", [waiting, mid_chunk, decoding, preempted, chunk_in_flight,
                                   decode_in_flight, two_steps_in_flight],
                         ids=lambda state: state.__name__)
@pytest.mark.parametrize("caching", [True, False])
def test_aborting_works_in_every_state(state, caching):
    """Every block comes back, with the last step in flight at the latest; nobody else notices."""
    num_blocks = 8 if state is preempted else 20
    scheduler = make(num_blocks, budget=6, enable_prefix_caching=caching)
    other = add(scheduler, 9, 12)
    victim = add(scheduler, 14, 12)
    late = add(scheduler, 3, 5)
    in_flight = state(scheduler, victim)
    output = list(victim.output_token_ids)
    assert all(victim in step.num_new_tokens for step in in_flight)
    for _ in range(2):  # ending it twice is harmless
        scheduler.finish(victim, "abort")
        scheduler.check()
    assert (victim.finish_reason, victim.row) == ("abort", -1)
    assert bool(victim.block_table) == bool(in_flight), "a step in flight still writes to them"
    for step in in_flight:
        assert victim.block_table
        assert victim not in finish_step(scheduler, step)
    assert not victim.block_table and victim.output_token_ids == output
    run(scheduler)
    assert (other.output_token_ids, late.output_token_ids) == (alone(other), alone(late))
    assert victim.output_token_ids == output


def test_an_empty_step_is_legal():
    """Cancelling or preempting everybody emptied the batch, and the engine crashed (voxcpm #37,
    #42)."""
    scheduler = make(num_blocks=4)
    assert scheduler.schedule().num_tokens == 0
    seqs = [add(scheduler, 7, 5), add(scheduler, 7, 5)]
    run_step(scheduler)
    for seq in seqs:
        scheduler.finish(seq, "abort")
    step = scheduler.schedule()
    scheduler.check()
    assert (str(step), step.num_new_tokens, step.sampling) == ("step 2: 0 tokens", {}, [])
    assert not scheduler.has_unfinished() and not scheduler.in_flight
    seq = add(scheduler, 7, 5)
    run(scheduler)
    assert seq.output_token_ids == alone(seq)


def test_a_step_may_stay_empty_while_another_is_in_flight():
    """A needs a block, B would have to give its own, but is being computed: nobody can go on until
    that step is back. Then B goes and A continues."""
    scheduler = make(num_blocks=4)
    first, second = add(scheduler, 8, 4), add(scheduler, 8, 4)
    in_flight = scheduler.schedule()
    empty = scheduler.schedule()
    scheduler.check()
    assert rows(in_flight) == {"A": 8, "B": 8} and not empty.num_new_tokens and not empty.preempted
    finish_step(scheduler, in_flight)
    step = run_step(scheduler)
    assert rows(step) == {"A": 1} and step.preempted == [second]
    run(scheduler)
    assert (first.output_token_ids, second.output_token_ids) == (alone(first), alone(second))


def test_a_long_queue_with_many_aborted_entries():
    """An abort in the queue leaves a dead entry behind instead of searching the heap. The dead are
    not counted as waiting, not served, and cleared away before they outnumber the living."""
    scheduler = make(seqs=4)
    seqs = [add(scheduler, 2, 1) for _ in range(1000)]
    alive = []
    for i, seq in enumerate(seqs):
        if i % 10 == 3:
            alive.append(seq)
            continue
        scheduler.finish(seq, "abort")
        num_alive = 1000 - (i + 1 - len(alive))
        assert scheduler.num_waiting == num_alive
        assert len(scheduler.waiting) <= 2 * num_alive + 64
    scheduler.check()
    steps = run(scheduler)
    assert list(dict.fromkeys(seq for step in steps for seq in step.num_new_tokens)) == alive
    assert all(seq.output_token_ids == alone(seq) for seq in alive)
    scheduler.schedule()
    assert not scheduler.waiting and scheduler.num_dead == 0, "the last dead surface and are gone"


# ---------------------------------------------------------- steps in flight


def test_a_sequence_is_scheduled_before_its_last_token_is_known():
    """Two steps in flight: the second computes the token that the first one samples, whatever it
    is. It never asks for more than that one, and stops where the length will."""
    scheduler = make()
    seq = add(scheduler, 5, 3)
    steps = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]
    assert [(step.starts, rows(step)) for step in steps] == [
        ([0], {"A": 5}), ([5], {"A": 1}), ([6], {"A": 1}), ([], {})]
    assert (seq.num_tokens, seq.num_inflight_tokens, seq.num_unknown_tokens) == (8, 7, 3)
    for step in steps[:3]:
        finish_step(scheduler, step)
    assert seq.output_token_ids == alone(seq) and not scheduler.has_unfinished()


def test_blocks_come_back_with_the_last_step_that_uses_them():
    scheduler = make()
    seq = add(scheduler, 5, 9, stop_ids=frozenset((EOS,)), eos_ids=frozenset((EOS,)))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, [EOS])
    scheduler.check()
    assert seq.finish_reason == "stop" and seq.block_table and scheduler.num_running == 0
    assert scheduler.blocks.num_free_blocks == 62 and scheduler.has_unfinished()
    assert scheduler.update(second, [123]) == {}
    scheduler.check()
    assert seq.output_token_ids == [EOS] and scheduler.blocks.num_free_blocks == 64


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_dropped_steps_are_asked_for_again(num_in_flight, num_before):
    """A step failed, or Ctrl-C came: nothing was promised, so nothing needs to be rolled back."""
    scheduler = make(num_blocks=9, budget=6)
    seqs = [add(scheduler, 9, 6), add(scheduler, 3, 6), add(scheduler, 5, 6)]
    aborted = add(scheduler, 4, 6)
    for _ in range(num_before):
        run_step(scheduler)
    for _ in range(num_in_flight):
        scheduler.schedule()
    scheduler.finish(aborted, "abort")
    scheduler.finish(seqs[2], "abort")
    scheduler.drop_in_flight()
    scheduler.check()
    assert not scheduler.in_flight and not scheduler.pending_keys and not scheduler.draining
    run(scheduler)
    assert [seq.output_token_ids for seq in seqs[:2]] == [alone(seq) for seq in seqs[:2]]


def test_steps_come_back_in_order_with_all_their_tokens():
    scheduler = make()
    add(scheduler, 5, 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1 is not the oldest step in flight"):
        scheduler.update(second, [1])
    with pytest.raises(AssertionError, match="step 0 samples 1 tokens, got 2"):
        scheduler.update(first, [1, 2])
    scheduler.update(first, [1])
    scheduler.update(second, [1])
    with pytest.raises(AssertionError, match="not the oldest"):
        scheduler.update(second, [1])


# ------------------------------------------------------------------ the audit


def set_field(name, value):
    return lambda scheduler, seq: setattr(seq, name, value)


@pytest.mark.parametrize("corrupt, message", [
    (lambda scheduler, seq: scheduler.running.reverse(), "running is out of order"),
    (lambda scheduler, seq: setattr(scheduler, "max_num_seqs", 1), "max_num_seqs is 1"),
    (set_field("row", 7), "a row is lost or taken twice"),
    (lambda scheduler, seq: scheduler.in_flight.clear(),
     "sequence A counts 1 tokens in flight, the steps 0"),
    (set_field("num_inflight_tokens", 2), "sequence A counts 2 tokens in flight, the steps 1"),
    (set_field("num_unknown_tokens", -1), "sequence A computed tokens it lacks"),
    (set_field("num_unknown_tokens", 2), "sequence A awaits 2 samples of 1 steps"),
    (lambda scheduler, seq: setattr(scheduler.waiting[0][1], "row", 3), "sequence C waits, but"),
    (lambda scheduler, seq: setattr(scheduler, "num_dead", 1), "0 dead entries.*counted 1"),
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


# -------------------------------------------------------------------- pooling


def add_pooled(scheduler: Scheduler, num_positions: int = 0) -> Sequence:
    """Queue 13 tokens, always the same, of which the first `num_positions` are to be handed out."""
    seq = Sequence("P", list(range(100, 113)), SamplingParams(), max_num_tokens=13)
    seq.num_prompt_logprobs = num_positions
    scheduler.add(seq)
    return seq


def test_a_pooled_prompt_ends_in_the_step_that_completes_it():
    """Nothing is sampled (None stands in the place of its token), its blocks are found by the next
    one, and it never gets longer than it came. Also with a step in flight."""
    for overlap in (False, True):
        scheduler = make(budget=8)
        seq = add_pooled(scheduler)
        first = scheduler.schedule()
        assert first.sampling == []
        if not overlap:
            assert scheduler.update(first, []) == {}
        second = scheduler.schedule()
        assert second.sampling == [seq] and second.num_new_tokens[seq] == 5
        if overlap:
            assert scheduler.schedule().num_new_tokens == {}  # there is nothing left to compute
            assert scheduler.update(first, []) == {}
        scheduler.check()
        assert scheduler.update(second, [None]) == {seq: []}
        scheduler.check()
        assert seq.finish_reason == "length" and len(seq.token_ids) == 13
        assert scheduler.blocks.num_free_blocks == 64 and not scheduler.has_unfinished()
        again = add_pooled(scheduler)
        step = scheduler.schedule()
        assert again.num_cached_tokens == 12 and step.num_new_tokens[again] == 1


def test_a_prompt_of_which_every_position_counts_is_not_read_from_the_cache():
    """MEAN pooling over a prefix hit was silently wrong (BUGS 36)."""
    scheduler = make(budget=8)
    add_pooled(scheduler)
    for step in (scheduler.schedule(), scheduler.schedule()):
        scheduler.update(step, [None] * len(step.sampling))
    seq = add_pooled(scheduler, num_positions=13)
    step = scheduler.schedule()
    assert step.prompt_logprob_positions == {seq: range(0, 8)} and seq.num_cached_tokens == 0
    scheduler.update(step, [])
    step = scheduler.schedule()
    assert step.prompt_logprob_positions == {seq: range(8, 13)}
    scheduler.update(step, [None])
    scheduler.check()
    assert seq.finish_reason == "length"


def test_a_pooled_prompt_needs_a_slot_for_each_token():
    """64 slots are enough for 65 tokens of which the last is sampled, but not for a prompt of 65
    that is pooled: it was let in, and preempted itself for ever."""
    def sequence(num_prompt: int, max_num_tokens: int) -> Sequence:
        return Sequence("s", [1] * num_prompt, SamplingParams(), max_num_tokens=max_num_tokens)

    make(num_blocks=16).add(sequence(64, 65))
    make(num_blocks=16).add(sequence(64, 64))
    for num_prompt, max_num_tokens in ((64, 66), (65, 65)):
        with pytest.raises(ValueError, match=f"up to {max_num_tokens} tokens can't fit.*64 tokens"):
            make(num_blocks=16).add(sequence(num_prompt, max_num_tokens))


@pytest.mark.parametrize("depth", [0, 1])
def test_pooled_prompts_are_never_preempted(depth):
    """Not in the tiniest pool: a prompt is admitted only where all of it fits, the budget then is
    its own until its last chunk, and nobody grows behind a prompt. Random arrivals, lengths, common
    beginnings, priorities, aborts, and steps that are lost."""
    seen = {"chunk": 0, "hit": 0, "waited": 0, "lost": 0}
    for number in range(300):
        rng = random.Random(number)
        block_size, num_blocks = rng.choice([1, 2, 4]), rng.randint(2, 12)
        budget = rng.randint(2, 20)
        scheduler = Scheduler(EngineConfig(
            model="none", block_size=block_size, max_num_batched_tokens=budget,
            max_num_seqs=rng.randint(1, min(4, budget)),
            enable_prefix_caching=rng.random() < 0.7,
            scheduling_policy=rng.choice(["fcfs", "priority"])), num_blocks)
        arrivals = sorted(rng.randrange(12) for _ in range(rng.randint(1, 8)))
        seqs, in_flight, now = [], [], 0
        while len(seqs) < len(arrivals) or scheduler.has_unfinished():
            while len(seqs) < len(arrivals) and arrivals[len(seqs)] <= now:
                length = rng.randint(1, num_blocks * block_size)
                seq = Sequence(str(len(seqs)), [i // 5 * rng.randrange(2) for i in range(length)],
                               SamplingParams(), len(seqs), rng.randint(0, 2),
                               max_num_tokens=length)
                seq.num_prompt_logprobs = rng.choice([0, 1, length])
                seqs.append(seq)
                scheduler.add(seq)
            if seqs and rng.random() < 0.05:
                scheduler.finish(rng.choice(seqs), "abort")
            step = scheduler.schedule()
            assert not step.preempted, number
            seen["chunk"] += len(step.num_new_tokens) - len(step.sampling)
            seen["waited"] += scheduler.num_waiting
            in_flight += [step] if step.num_new_tokens else []
            if in_flight and rng.random() < 0.1:
                scheduler.drop_in_flight()
                in_flight.clear()
                seen["lost"] += 1
            if in_flight and (len(in_flight) > depth or not step.num_new_tokens):
                done = in_flight.pop(0)
                scheduler.update(done, [None] * len(done.sampling))
            scheduler.check()
            now += 1
            assert now < 1000, "stuck"
        seen["hit"] += sum(bool(seq.num_cached_tokens) for seq in seqs)
        assert {seq.finish_reason for seq in seqs} <= {"length", "abort"}
        assert scheduler.blocks.num_free_blocks == num_blocks
    assert min(seen.values()) > 20, seen
