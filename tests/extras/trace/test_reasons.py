"""Why somebody waits: sentences worked out by hand, and a second opinion on random runs.

The second opinion does not read the scheduler's rules. It takes the sentence at its word: a copy of
the scheduler, made before the step, is given what the sentence says is missing (blocks, a row, a
larger budget), and in the copy's step that reason has to be gone.
"""

import copy
import random
import re
from collections import Counter

import pytest
from helpers import sequence
from scheduler_by_hand import add, finish_step, make, rows, run_step

from nanoserve.config import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve_extras.trace.reasons import explain, lost_blocks

pytestmark = pytest.mark.floor


def told(scheduler: Scheduler, step) -> dict[str, str]:
    """Name -> sentence, of everybody without a share of the step."""
    waits = explain(scheduler, step)
    assert not waits.of.keys() & step.num_new_tokens.keys()
    return {seq.name: waits.of.get(seq) or f"stands behind {waits.next_in_line.name}"
            for seq in scheduler.running + scheduler.waiting
            if seq not in step.num_new_tokens and seq.finish_reason is None}


COMPUTING = "waits for blocks that A is computing"
FIRST_STEPS = [
    # 10 blocks of 4: A takes 6, B asks for 5. C would fit, but the queue never jumps.
    (dict(num_blocks=10), [21, 18, 3], {"B": "needs 5 blocks, 4 are free", "C": "stands behind B"}),
    (dict(seqs=2), [3, 3, 3, 3], {"C": "has no seat: max_num_seqs=2", "D": "stands behind C"}),
    # B, C and D begin like A, and sit out, each on a row that is kept for it.
    (dict(seqs=4), [[*range(9), 90 + tail] for tail in range(4)] + [3], {
        "B": COMPUTING, "C": COMPUTING, "D": COMPUTING,
        "E": "has no seat: max_num_seqs=4, 3 of them kept for those that sit out"}),
    # A takes 10 of the budget, B sits out, C would get 2 of its 9 tokens.
    (dict(budget=12), [[*range(10)], [*range(8), 50, 51], 9], {
        "B": COMPUTING, "C": "needs 9 tokens at once to overtake B, 2 of the budget are left"}),
    (dict(budget=12, enable_chunked_prefill=False, max_model_len=12), [7, 6], {
        "B": "needs 6 tokens at once (enable_chunked_prefill=False), 5 of the budget are left"})]


@pytest.mark.parametrize("options, prompts, expected", FIRST_STEPS)
def test_who_waits_in_the_first_step(options, prompts, expected):
    scheduler = make(**options)
    for prompt in prompts:
        add(scheduler, prompt)
    assert told(scheduler, scheduler.schedule()) == expected


def test_the_budget_is_used_up_for_those_that_wait_and_those_that_run():
    """A, which is served first, needs the whole budget, and then all that B's decode leaves."""
    scheduler = make(budget=8, scheduling_policy="priority")
    add(scheduler, 12, priority=1, name="B")
    assert told(scheduler, run_step(scheduler)) == {}
    add(scheduler, 20, name="A")
    add(scheduler, 3, name="C")
    used_up = "gets no tokens: the budget of 8 is used up"
    step = scheduler.schedule()
    assert {seq.name for seq in step.num_new_tokens} == {"A"}
    assert told(scheduler, step) == {"B": used_up, "C": used_up}


def test_who_was_preempted_for_whom():
    """4 blocks: A and B hold 2 each when A needs a third. C had arrived and could have had B's."""
    scheduler = make(num_blocks=4, enable_prefix_caching=False)
    first, second = add(scheduler, 7, 5), add(scheduler, 7, 5)
    run_step(scheduler), run_step(scheduler)
    add(scheduler, 3)
    step = scheduler.schedule()
    assert step.preempted == {second: first}
    assert told(scheduler, step) == {"B": "was preempted for A", "C": "stands behind B"}


def test_the_last_in_the_order_preempts_itself():
    """3 blocks of 4: at 8 tokens A has 2 blocks and B, which needs a second one, 1."""
    scheduler = make(num_blocks=3, enable_prefix_caching=False)
    add(scheduler, 6, 6)
    last = add(scheduler, 3, 4)
    step = run_step(scheduler)
    while not step.preempted:
        step = run_step(scheduler)
    assert step.preempted == {last: last}
    assert lost_blocks(last, last) == (
        "was preempted: it needs a block, and nobody stands behind it")


def test_the_last_makes_way_when_its_step_is_back():
    """As above, but B's step is in flight: it gets no share of this one, and goes in the next."""
    scheduler = make(num_blocks=4, enable_prefix_caching=False, scheduling_policy="priority")
    add(scheduler, 7, 5), add(scheduler, 7, 5, priority=2)
    in_flight = scheduler.schedule()
    add(scheduler, 3, priority=1), add(scheduler, 3, priority=1)
    step = scheduler.schedule()
    assert told(scheduler, step) == {"B": "makes way for C when its own step ends",
                                     "C": "waits for B to make way", "D": "stands behind C"}
    finish_step(scheduler, in_flight), finish_step(scheduler, step)
    step = scheduler.schedule()
    assert [seq.name for seq in step.preempted] == ["B"] and "C" in rows(step)


def test_a_victim_whose_step_is_in_flight_is_waited_for():
    """As in test_scheduler_endings: A needs a third block while B's step still writes to B's."""
    scheduler = make(num_blocks=4)
    add(scheduler, 8, 4), add(scheduler, 8, 4)
    in_flight = scheduler.schedule()
    add(scheduler, 3)
    assert told(scheduler, scheduler.schedule()) == {
        "A": "needs 1 block, 0 are free until the step of B ends", "B": "stands behind A",
        "C": "waits: blocks ran out for A"}
    finish_step(scheduler, in_flight)


def test_a_token_that_the_host_must_see_first():
    """A's next draw depends on its last token (a penalty), and B's last token is being sampled."""
    scheduler = make()
    params = SamplingParams(max_tokens=4, repetition_penalty=1.5)
    scheduler.add(sequence("A", [1, 2, 3], params, 0, max_num_tokens=7))
    scheduler.add(sequence("B", [4, 5, 6], SamplingParams(max_tokens=1), 1, max_num_tokens=4))
    scheduler.schedule()
    waits = "waits for its token of a step in flight"
    assert told(scheduler, scheduler.schedule()) == {"A": waits, "B": waits}


def test_a_prompt_that_an_extra_leaves_nothing():
    """Steps of one row each. Nothing of B is in flight, so it waits for no token."""
    scheduler = make(budget=8)
    add(scheduler, 3), add(scheduler, 20)
    run_step(scheduler)
    scheduler.hooks.cut.append(lambda step, seq, start, n: n if len(step.num_new_tokens) < 1 else 0)
    add(scheduler, 2)
    assert set(told(scheduler, scheduler.schedule()).items()) == {
        (name, "waits for the next step: several are in flight, each with a part of all")
        for name in "BC"}


# ------------------------------------------------------------ a second opinion


def grant(scheduler: Scheduler, reason: str) -> bool:
    """Give what the sentence says is missing; False where it names no such thing."""
    if missing := re.match(r"needs (\d+) blocks?, (\d+) \w+ free$", reason):
        blocks, count = scheduler.blocks, int(missing[1]) - int(missing[2])
        assert count > 0
        for block in range(blocks.num_blocks, blocks.num_blocks + count):
            blocks.free_blocks[block] = None
            blocks.free_blocks.move_to_end(block, last=False)
        blocks.num_blocks += count
        blocks.ref_counts += [0] * count
        blocks.entry_of += [None] * count
    elif "no seat" in reason:
        assert f"max_num_seqs={scheduler.max_num_seqs}" in reason
        scheduler.free_rows += range(scheduler.max_num_seqs, scheduler.max_num_seqs + 40)
        scheduler.max_num_seqs += 40
    elif "budget" in reason:
        scheduler.max_num_batched_tokens += 1000
    else:
        return False
    return True


def check_reasons(before: Scheduler, scheduler: Scheduler, step, seen: Counter) -> None:
    for name, reason in told(scheduler, step).items():
        kind = kind_of(reason)
        assert reason != "waits", f"{name} has no reason in {step}"
        if seen[kind] < 10 and grant(other := copy.deepcopy(before), reason):
            granted = other.schedule()
            now = told(other, granted).get(name, "has its share")
            assert kind_of(now) != kind, f"{step}: {name} {reason}, then {now}"
            if kind.startswith("needs  block"):  # blocks are asked for last: all else was there
                assert now == "has its share"
        seen[kind] += 1


def kind_of(reason: str) -> str:
    """Without names and numbers."""
    return re.sub(r" [A-Z]\b|[\d,]+|(?<=block)s", "", reason)


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_sentence_says_is_missing_is_what_was_missing(depth):
    """Small caches, budgets and few rows, common beginnings, priorities; with a step in flight."""
    seen: Counter = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        scheduler = make(rng.randint(11, 16), budget=rng.randint(6, 24), seqs=rng.randint(2, 6),
                         scheduling_policy=rng.choice(["fcfs", "priority"]))
        common, in_flight = [rng.randrange(9) for _ in range(12)], []
        for _ in range(12):
            own = rng.choices(range(9, 99), k=rng.randint(1, 9))
            add(scheduler, common[:rng.choice([0, 8, 12])] + own, rng.randint(1, 20),
                priority=rng.randint(0, 2), name=chr(ord("A") + len(scheduler.waiting)))
        while scheduler.has_unfinished():
            before = copy.deepcopy(scheduler)
            step = scheduler.schedule()
            if step.num_new_tokens or step.preempted:
                check_reasons(before, scheduler, step, seen)
            in_flight += [step] if step.num_new_tokens else []
            if len(in_flight) > depth or not step.num_new_tokens:
                finish_step(scheduler, in_flight.pop(0))
    assert any("was preempted for" in kind for kind in seen) and len(seen) >= 8, seen
