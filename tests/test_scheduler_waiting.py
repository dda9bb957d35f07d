"""The order of requests under each policy, and which one is preempted for which. No torch.

Oracles: `sorted` with a key that is written out here, all 720 orders of six requests, arithmetic by
hand, and `alone()` for the tokens, which no policy may change.
"""

import random
from itertools import accumulate, permutations

import pytest
from helpers import sequence
from scheduler_by_hand import add, alone, finish_step, make, rows, run, run_step

from nanoserve.config import POLICIES, Policy, SamplingParams
from nanoserve.hooks import Extra, checked
from nanoserve.sequence import Sequence

pytestmark = pytest.mark.floor

KEYS = {"fcfs": lambda seq: seq.request.arrival,
        "priority": lambda seq: (seq.request.priority, seq.request.arrival),
        "shortest": lambda seq: (seq.request.arrival_time + seq.num_prompt_tokens / 1000,
                                 seq.request.arrival)}


def sequences(count: int, seed: int = 0) -> list[Sequence]:
    rng = random.Random(seed)
    return [sequence(str(i), [0] * rng.randrange(1, 3000), SamplingParams(), arrival=i,
                     priority=rng.randrange(-2, 3), arrival_time=100 + i * rng.random() / 4)
            for i in range(count)]


# ----------------------------------------------------------------------- the queue


@pytest.mark.parametrize("policy", KEYS)
def test_the_queue_is_in_order_whatever_comes_and_goes(policy):
    """Also for those that are preempted and wait again; without those that have ended."""
    rng, inside, outside, preempted = random.Random(5), set(), sequences(300), 0
    scheduler = make(seqs=1, num_blocks=900, scheduling_policy=policy)
    for _ in range(600):
        action = rng.choice("add add end step".split())
        if action == "add" and outside:
            seq = outside.pop(rng.randrange(len(outside)))
            scheduler.add(seq)
            inside.add(seq)
        elif action == "end" and len(inside) > 3:
            seq = rng.choice(sorted(inside, key=KEYS["fcfs"]))
            scheduler.finish(seq, "abort")
            inside.remove(seq)
        elif action == "step":
            step = run_step(scheduler)
            preempted += len(step.preempted)
            inside = {seq for seq in inside if seq.finish_reason is None}
        scheduler.check()
        assert set(scheduler.waiting) | set(scheduler.running) == inside
        assert scheduler.waiting == sorted(scheduler.waiting, key=KEYS[policy])
    assert preempted or policy != "priority", "nobody made way for an urgent one"


def test_one_whose_key_has_changed_ends_and_no_other():
    """Whoever ends was looked for by its key: A ended, and C was gone."""
    for seqs in (1, 3):  # waiting, and running
        scheduler = make(seqs=seqs)
        a, b, c = (add(scheduler, 6, 9) for _ in range(3))
        run_step(scheduler)
        a.order = (9, *a.order[1:])
        scheduler.finish(a, "abort")
        assert scheduler.running + scheduler.waiting == [b, c]


class Reversed(Extra):
    """Who came last goes first, but for the time in which `later` has its name."""

    later = ""

    def order(self, seq):
        return seq.name == self.later, -seq.request.arrival


def test_an_order_that_changes_is_asked_before_each_step():
    """Those that wait and those that run. With the extra goes its order."""
    scheduler, extra = make(seqs=2), Reversed()
    a, b = add(scheduler, 6, 9), add(scheduler, 6, 9)
    scheduler.hooks.keep([extra])
    c = add(scheduler, 6, 2)
    assert rows(run_step(scheduler)) == {"C": 6, "B": 6}
    extra.later = "C"
    run_step(scheduler)
    assert scheduler.running == [b] and scheduler.waiting == [a], "C has ended"
    d = add(scheduler, 6, 9)
    extra.later = "D"
    assert rows(run_step(scheduler)) == {"B": 1, "A": 6}
    scheduler.hooks.keep([])
    scheduler.sort()
    assert scheduler.running == [a, b] and scheduler.waiting == [d]
    run(scheduler)
    assert c.output_token_ids == alone(c) and d.output_token_ids == alone(d)


def test_an_order_interrupts_if_it_says_so():
    for interrupts in (False, True):
        scheduler, extra = make(seqs=1), Reversed()
        extra.interrupts = interrupts
        scheduler.hooks.keep([extra])
        add(scheduler, 6, 9)
        run_step(scheduler)
        add(scheduler, 5, 9)
        assert rows(run_step(scheduler)) == ({"B": 5} if interrupts else {"A": 1})


def test_two_orders_are_one_too_many():
    with pytest.raises(ValueError, match="Reversed and Reversed both say who goes first: leave"):
        checked([Reversed(), Reversed()])
    with pytest.raises(ValueError, match="scheduling_policy='priority' and Reversed both say"):
        checked([Reversed()], "priority")
    assert checked([Extra()], "priority") and not checked([], "priority")


def test_a_policy_is_one_row(monkeypatch):
    monkeypatch.setitem(POLICIES, "shortest", Policy(lambda seq: -seq.num_prompt_tokens))
    scheduler = make(seqs=1, scheduling_policy="shortest")
    for n in (3, 9, 5):
        add(scheduler, n, 1)
    assert first_tokens(scheduler) == {"B": 0, "C": 1, "A": 2}


# ---------------------------------------------------------------------- shortest


def first_tokens(scheduler) -> dict[str, int]:
    """The step in which each request gets its first token."""
    steps = run(scheduler)
    return {seq.name: min(step.index for step in steps if seq in step.sampling)
            for step in steps for seq in step.sampling}


def test_shortest_is_the_best_of_all_orders_when_all_are_there():
    """Six prompts, one row, 4 tokens a step, one token to generate: a prompt of 9 takes 3 steps.
    The mean time to the first token is the least of all 720 orders."""
    lengths = [17, 4, 30, 9, 12, 1]
    waits = {order: sum(accumulate(-(-n // 4) for n in order)) for order in permutations(lengths)}
    ours = {}
    for policy in ("fcfs", "shortest"):
        scheduler = make(budget=4, seqs=1, scheduling_policy=policy)
        for n in lengths:
            add(scheduler, n, 1)
        ours[policy] = sum(step + 1 for step in first_tokens(scheduler).values())
    assert ours["fcfs"] == waits[tuple(lengths)]
    assert ours["shortest"] == min(waits.values()) < ours["fcfs"]


# ------------------------------------------------------------------- interruption


def test_one_that_is_in_flight_leaves_when_its_step_is_back():
    """With overlap A is being computed when B comes. It gets no share of the step after that, so
    that the one after that can take its row."""
    scheduler = make(seqs=2, scheduling_policy="priority")
    keeps, leaves = add(scheduler, 6, 9, priority=0), add(scheduler, 6, 9, priority=5)
    run_step(scheduler)
    flying = scheduler.schedule()
    urgent = add(scheduler, 5, 2, priority=1)
    waiting = scheduler.schedule()
    assert (rows(flying), rows(waiting)) == ({"A": 1, "B": 1}, {"A": 1})
    assert not waiting.preempted
    finish_step(scheduler, flying)
    step = scheduler.schedule()
    assert list(step.preempted) == [leaves] and rows(step) == {"C": 5, "A": 1}
    finish_step(scheduler, waiting)
    finish_step(scheduler, step)
    run(scheduler)
    for seq in (keeps, leaves, urgent):
        assert seq.output_token_ids == alone(seq)


def test_who_waits_for_a_block_that_is_being_computed_interrupts_nobody():
    """A decodes, and B's prompt is in the making. C is more urgent than A and starts like B: it
    sits that out, and hits it afterwards. Until then A keeps its row, and its share of each step.
    """
    scheduler = make(seqs=2, budget=9, scheduling_policy="priority")
    decoding, prompt = add(scheduler, 4, 9, priority=5), list(range(12))
    run_step(scheduler)
    add(scheduler, prompt, 2, priority=0)
    steps = [scheduler.schedule()]
    urgent = add(scheduler, prompt, 2, priority=1)
    steps.append(scheduler.schedule())
    assert [rows(step) for step in steps] == [{"A": 1, "B": 8}, {"A": 1, "B": 4}]
    assert not any(step.preempted for step in steps)
    for step in steps:
        finish_step(scheduler, step)
    run(scheduler)
    assert urgent.num_cached_tokens == 8 and decoding.num_preemptions == 1
    assert all(seq.output_token_ids == alone(seq) for seq in (decoding, urgent))
