"""How sequences end, by themselves or by an abort, also while steps are in flight."""

import pytest
from scheduler_by_hand import (
    EOS,
    STOP,
    add,
    alone,
    chunk_in_flight,
    decode_in_flight,
    decoding,
    finish_step,
    make,
    mid_chunk,
    preempted,
    rows,
    run,
    run_step,
    two_steps_in_flight,
    waiting,
)

from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Step

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


@pytest.mark.parametrize("state", [waiting, mid_chunk, decoding, preempted, chunk_in_flight,
                                   decode_in_flight, two_steps_in_flight],
                         ids=lambda state: state.__name__)
@pytest.mark.parametrize("caching", [True, False])
def test_aborting_works_in_every_state(state, caching):
    """Every block comes back at once, also from a step in flight; nobody else notices."""
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
    assert not victim.block_table
    for step in in_flight:
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
    assert rows(step) == {"A": 1} and step.preempted == {second: first}
    run(scheduler)
    assert (first.output_token_ids, second.output_token_ids) == (alone(first), alone(second))


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


def test_blocks_come_back_before_the_last_step_that_writes_to_them():
    """Their next owner's step runs behind that one, so what it writes comes later."""
    scheduler = make()
    seq = add(scheduler, 5, 9, stop_ids=frozenset((EOS,)), eos_ids=frozenset((EOS,)))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, [EOS])
    scheduler.check()
    assert seq.finish_reason == "stop" and not seq.block_table and not scheduler.running
    assert scheduler.blocks.num_free_blocks == 64 and scheduler.has_unfinished()
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
    assert not scheduler.in_flight
    run(scheduler)
    assert [seq.output_token_ids for seq in seqs[:2]] == [alone(seq) for seq in seqs[:2]]


def test_steps_come_back_in_order_with_all_their_tokens():
    scheduler = make()
    add(scheduler, 5, 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1 .*oldest"):
        scheduler.update(second, [1])
    with pytest.raises(AssertionError, match="step 0 samples 1 tokens, got 2"):
        scheduler.update(first, [1, 2])
    scheduler.update(first, [1])
    scheduler.update(second, [1])
    with pytest.raises(AssertionError, match="not the oldest"):
        scheduler.update(second, [1])
