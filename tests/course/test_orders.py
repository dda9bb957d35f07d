"""course/orders.py: who goes first under orders that change. The figures are in docs/api.md.

Oracle: arithmetic by hand.
"""

from types import SimpleNamespace

import pytest
from scheduler_by_hand import add, alone, make, rows, run, run_step

from course.orders import FairShare, FeedbackQueue

pytestmark = pytest.mark.floor


def test_short_answers_are_done_before_a_long_one_goes_on():
    """A has fallen to level 1 (10 * 26 tokens) when B arrives, and goes on when B has fallen, too:
    among equals it is the first."""
    scheduler = make(seqs=1, num_blocks=64)
    scheduler.hooks.keep([FeedbackQueue()])
    a = add(scheduler, 6, 90)
    for _ in range(26):
        assert rows(run_step(scheduler)).keys() == {"A"}
    b = add(scheduler, 8, 40)
    steps = [rows(step) for step in run(scheduler)]
    assert [*steps[0]] == ["B"] and [*steps[25]] == ["A"] and "B" in steps[50]
    assert a.output_token_ids == alone(a) and b.output_token_ids == alone(b)


def test_the_user_who_got_least_is_next_and_earns_nothing_while_away():
    scheduler, fair = make(seqs=1), FairShare()
    scheduler.hooks.keep([fair])

    def ask(user: int, num_prompt: int) -> str:
        seq = add(scheduler, num_prompt, 1, priority=user)
        fair.added(SimpleNamespace(sequences=[seq]))
        return seq.name

    def serve(count: int) -> str:
        """The names of the next ones; each takes a step."""
        order = ""
        for _ in range(count):
            step = run_step(scheduler)
            fair.updated(step, {})
            fair.ended([*step.num_new_tokens])
            order += "".join(rows(step))
        return order

    assert "".join(ask(0, 10) for _ in range(4)) + ask(1, 3) + ask(1, 4) + ask(1, 30) == "ABCDEFG"
    assert serve(5) == "AEFGB", "of user 0 10 tokens, of user 1 3, then 7, then 37"
    assert ask(2, 5) + ask(2, 30) == "HI"
    assert serve(4) == "CHID", "user 2 begins at user 0's 20, behind its C and before its D"
