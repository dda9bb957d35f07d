"""How sequences end, by themselves or by an abort; and prompts that are only read."""

import random

import pytest
from helpers import sequence
from scheduler_by_hand import (
    EOS,
    STOP,
    add,
    alone,
    finish_step,
    make,
    rows,
    run,
    run_step,
)

from nanoserve.config import POLICIES, EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

pytestmark = pytest.mark.floor


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


@pytest.mark.parametrize("token", [EOS, STOP])
def test_a_stop_that_comes_because_a_parser_gave_up_is_called_length(token):
    """The scheduler asks where a token stops a text, and nowhere else."""
    scheduler, asked = make(), []
    given_up, whole = (add(scheduler, 5, stop_ids=frozenset((EOS, STOP))) for _ in range(2))
    scheduler.hooks.gave_up.append(lambda seq: asked.append(seq) or seq is given_up)
    sample(scheduler, 1, 1)
    assert not asked
    sample(scheduler, token, token)
    assert asked == [given_up, whole]
    assert [given_up.finish_reason, whole.finish_reason] == ["length", "stop"]
    assert given_up.stop_reason is None


def test_the_text_may_change_the_reason_but_an_abort_neither_comes_nor_goes():
    """The text is looked at after the token was counted: a stop string found in the text of the
    token that ended it otherwise is why the text ends."""
    scheduler = make()
    cases = [("length", "stop", ("stop", "###")), ("abort", "stop", ("abort", None)),
             ("stop", "stop", ("stop", "###")), ("length", "abort", ("length", None)),
             ("stop", "abort", ("stop", None))]
    for first, second, expected in cases:
        seq = add(scheduler, 5)
        run_step(scheduler)
        scheduler.finish(seq, first)
        scheduler.finish(seq, second, "###")
        assert (seq.finish_reason, seq.stop_reason) == expected
        scheduler.check()
    assert scheduler.blocks.num_free_blocks == 64


# -------------------------------------------------------------------- aborts


@pytest.mark.parametrize("end", range(4))
def test_an_order_that_changes_ends_no_other_sequence(end):
    """Least served first, say: what has been written counts. By bisection another one left."""
    class LeastServed(Scheduler):
        def order(self, seq: Sequence) -> tuple:
            return len(seq.output_token_ids), seq.request.arrival, seq.index

    config = EngineConfig(model="none", max_num_batched_tokens=64, block_size=4, max_num_seqs=2)
    scheduler = LeastServed(config, 64)
    seqs = [add(scheduler, 5) for _ in range(4)]
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [7, 7])
    seqs[0].token_ids += [1, 2]  # the key of one that runs and of one that waits are another now
    seqs[2].token_ids += [1, 2]
    scheduler.finish(seqs[end], "abort")
    assert {*scheduler.running, *scheduler.waiting} == {*seqs} - {seqs[end]}
    assert sorted(scheduler.free_rows + [seq.row for seq in scheduler.running]) == [0, 1]


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


# -------------------------------------------------- prompts that are only read


def add_pooled(scheduler: Scheduler, num_positions: int = 0) -> Sequence:
    """Queue 13 tokens, always the same, of which the first `num_positions` are to be handed out."""
    seq = sequence("P", list(range(100, 113)), max_num_tokens=13, num_prompt_logprobs=num_positions)
    scheduler.add(seq)
    return seq


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
            scheduling_policy=rng.choice([*POLICIES])), num_blocks)
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
                ended = scheduler.update(done, [None] * len(done.sampling))
                assert ended == {seq: [] for seq in done.sampling if seq.finish_reason == "length"}
            scheduler.check()
            now += 1
            assert now < 1000, "stuck"
        seen["hit"] += sum(bool(seq.num_cached_tokens) for seq in seqs)
        assert {seq.finish_reason for seq in seqs} <= {"length", "abort"}
        assert all(len(seq.token_ids) == seq.num_prompt_tokens for seq in seqs)
        assert scheduler.blocks.num_free_blocks == num_blocks
    assert min(seen.values()) > 10, seen
