"""What a state beside KV asks of the scheduler, by a stand-in that keeps one at every 8th token.

The numbers are worked out by hand. Real states are in extras/test_recurrent_snapshots.py.
"""

import pytest
from scheduler_by_hand import add, alone, make, rows, run, run_step

pytestmark = pytest.mark.floor


def chunk(step, seq, start, num_new):
    end = (start + num_new) // 8 * 8
    return end - start if end > start else num_new


def make_with_states(**options):
    """Hits end where a state is kept, and so do chunks that get as far."""
    scheduler = make(**options)
    scheduler.hooks.cut.append(chunk)
    scheduler.blocks.hooks.usable.append(lambda seq, hits: hits[:len(hits) // 2 * 2])  # blocks of 4
    return scheduler


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "shortest"])
def test_a_chunk_ends_where_a_state_is_kept(scheduling_policy):
    """Of 27 tokens a budget of 10 reaches 10, then 18, then 26: 8, 16 and 24 are computed."""
    scheduler = make_with_states(budget=10, scheduling_policy=scheduling_policy)
    seq = add(scheduler, 27, 2)
    assert [rows(run_step(scheduler)) for _ in range(5)] == [{"A": n} for n in (8, 8, 8, 3, 1)]
    assert seq.output_token_ids == alone(seq)


def test_a_hit_ends_where_a_state_is_kept():
    """The first one's 13 tokens are 3 full blocks. The second may go on from 8, not from 12."""
    scheduler = make_with_states()
    add(scheduler, list(range(13)), 1), run(scheduler)
    second = add(scheduler, list(range(13)), 1)
    assert rows(run_step(scheduler)) == {"B": 5} and second.num_cached_tokens == 8


def test_a_step_that_is_empty_without_a_reason_is_named():
    """The audit of `schedule`: nothing in flight will ever change what left the step empty."""
    scheduler = make(budget=10)
    add(scheduler, 27)
    for names in ("A", "A', 'B"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler.hooks, "cut", [lambda step, seq, start, num_new: 0])
            with pytest.raises(AssertionError, match=rf"stuck: .* for \['{names}'\]"):
                scheduler.schedule()
        run_step(scheduler)  # A runs from here on
        add(scheduler, 30)


def test_who_lacks_blocks_is_asked_for_no_chunk():
    """A picture was noted there as due, for a row that did not come."""
    scheduler, asked = make(8, budget=10), []
    scheduler.hooks.cut.append(lambda step, seq, start, num_new: asked.append(seq.name) or num_new)
    add(scheduler, 20), add(scheduler, 13)
    step = run_step(scheduler)
    assert step.budget == 0 and asked == ["A"]
    step = run_step(scheduler)
    step = run_step(scheduler)
    assert step.blocked_on[1:] == ("blocks", 4) and asked == ["A", "A"]


def test_who_is_told_of_a_lost_step_may_start_its_sequences_anew():
    """A state may hold the step's tokens already, and would take them in twice."""
    scheduler, lost = make_with_states(budget=10, enable_prefix_caching=False), []
    scheduler.hooks.dropped += [lost.append, lambda step: [
        scheduler.preempt(seq) for seq in step.num_new_tokens]]
    seq = add(scheduler, 13)
    run_step(scheduler)
    assert seq.num_computed_tokens == 8
    scheduler.schedule(), scheduler.drop_in_flight()
    scheduler.check()
    assert (seq.num_computed_tokens, seq.row, scheduler.waiting) == (0, -1, [seq])
    assert [step.index for step in lost] == [1]
    run(scheduler)
    assert seq.output_token_ids == alone(seq)
