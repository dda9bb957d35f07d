"""Prompts that are only read: they end in the step that completes them."""

import random

import pytest
from helpers import sequence
from scheduler_by_hand import make

from nanoserve.config import POLICIES, EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

pytestmark = pytest.mark.floor


def add_pooled(scheduler: Scheduler, num_positions: int = 0) -> Sequence:
    """Queue 13 tokens, always the same, of which the first `num_positions` are to be handed out."""
    seq = sequence("P", list(range(100, 113)), max_num_tokens=13, num_prompt_logprobs=num_positions)
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
    def pooled(num_prompt: int, max_num_tokens: int) -> Sequence:
        return sequence("s", [1] * num_prompt, max_num_tokens=max_num_tokens)

    make(num_blocks=16).add(pooled(64, 65))
    make(num_blocks=16).add(pooled(64, 64))
    for num_prompt, max_num_tokens in ((64, 66), (65, 65)):
        with pytest.raises(ValueError, match=f" {max_num_tokens} tokens.* 64 tokens"):
            make(num_blocks=16).add(pooled(num_prompt, max_num_tokens))


@pytest.mark.parametrize("depth", [0, 1])
def test_pooled_prompts_are_preempted_for_more_urgent_ones_alone(depth):
    """Not in the tiniest pool: a prompt is admitted only where all of it fits, the budget then is
    its own until its last chunk, and nobody grows behind a prompt. Only one that is earlier in the
    policy's order may interrupt it, or take blocks that it would have needed. Random arrivals,
    lengths, common beginnings, priorities, aborts, and steps that are lost."""
    seen = {"chunk": 0, "hit": 0, "waited": 0, "lost": 0, "interrupted": 0}
    for number in range(300):
        rng = random.Random(number)
        block_size, num_blocks = rng.choice([1, 2, 4]), rng.randint(2, 12)
        budget = rng.randint(2, 20)
        scheduler = Scheduler(EngineConfig(
            model="none", block_size=block_size, max_num_batched_tokens=budget,
            max_num_seqs=rng.randint(1, min(4, budget)),
            enable_prefix_caching=rng.random() < 0.7,
            scheduling_policy=rng.choice(POLICIES)), num_blocks)
        arrivals = sorted(rng.randrange(12) for _ in range(rng.randint(1, 8)))
        seqs, in_flight, now = [], [], 0
        while len(seqs) < len(arrivals) or scheduler.has_unfinished():
            while len(seqs) < len(arrivals) and arrivals[len(seqs)] <= now:
                length = rng.randint(1, num_blocks * block_size)
                seq = sequence(str(len(seqs)), [i // 5 * rng.randrange(2) for i in range(length)],
                               arrival=len(seqs), priority=rng.randint(0, 2),
                               max_num_tokens=length,
                               num_prompt_logprobs=rng.choice([0, 1, length]))
                seqs.append(seq)
                scheduler.add(seq)
            if seqs and rng.random() < 0.05:
                scheduler.finish(rng.choice(seqs), "abort")
            step = scheduler.schedule()
            for seq in step.preempted:
                assert scheduler.config.scheduling_policy != "fcfs" and any(
                    scheduler.order(other) < scheduler.order(seq)
                    for other in scheduler.running), number
            seen["interrupted"] += len(step.preempted)
            seen["chunk"] += len(step.num_new_tokens) - len(step.sampling)
            seen["waited"] += len(scheduler.waiting)
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
    assert min(seen.values()) > 10, seen
