"""Sampling in all load_backends: what a filter leaves, and the token that is drawn."""

import math

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401
from test_ops import dtype, numbers, ops  # noqa: F401


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 96, 1000, 1024, 4097])
def test_argmax_is_the_first_of_the_highest(ops, dtype, vocab_size):  # noqa: F811
    """There are many ties, and all but one may be excluded."""
    logits = torch.randint(-3, 4, (20, vocab_size)).to(dtype)
    logits[1] = 1.0
    logits[2, vocab_size // 2:] = 9.0
    logits[3, :-1] = -math.inf
    expected = [max(range(vocab_size), key=lambda i: (float(row[i]), -i)) for row in logits]
    got = ops.argmax(logits)
    assert got.dtype == torch.int64 and got.tolist() == expected
    assert ops.argmax(logits[:0]).tolist() == []


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize("p", [0.4, 0.5, 0.8, 0.97])
def test_top_p_is_met_to_a_thousandth(ops, p, vocab_size):  # noqa: F811
    """Two tokens weigh 0.9995 p together, so a third one stays; or 1.0005 p, and none does."""
    ids, rows = torch.randperm(vocab_size), []
    for two in (0.9995 * p, 1.0005 * p):
        row = torch.full((vocab_size,), 0.75 * (1 - two) / (vocab_size - 3)).double()
        row[ids[:3]] = torch.tensor([0.55 * two, 0.45 * two, 0.25 * (1 - two)]).double()
        rows.append(row.log().float())
    none = torch.zeros(2)
    thresholds, last = ops.thresholds(torch.stack(rows), none + 1, none.int(), none + p, none)
    for row, floor, last_id, count in zip(rows, thresholds, last, (3, 2), strict=True):
        stays = (row > floor) | (row == floor) & (torch.arange(vocab_size) <= last_id)
        assert set(stays.nonzero()[:, 0].tolist()) == set(ids[:count].tolist())


def test_a_top_p_of_one_takes_nothing_away(ops):  # noqa: F811
    """In float32 the first token's probability is 1 already, and the last one's is 0."""
    logits = torch.tensor([[0.0, -30.0, -60.0, -200.0]]).expand(2, -1).contiguous()
    top_k, ones = torch.tensor([0, 3], dtype=torch.int32), torch.ones(2)
    for row, floor, last_id, count in zip(
            logits, *ops.thresholds(logits, ones, top_k, ones, 0 * ones), (4, 3), strict=True):
        assert ((row > floor) | (row == floor) & (torch.arange(4) <= last_id)).sum() == count


def test_zeros_of_both_signs_are_equals(ops):  # noqa: F811
    """Of four equals, .25 each, top-p .6 takes three."""
    logits, ones = torch.tensor([[0.0, -0.0, 0.0, -0.0]]), torch.ones(1)
    thresholds, last = ops.thresholds(logits, ones, ones.int() * 0, 0.6 * ones, 0 * ones)
    assert (thresholds, last) == (0, 2)


def test_draws_stay_above_the_floor(ops):  # noqa: F811
    def draws(s: int, thresholds) -> set[int]:
        return set(ops.sample_tokens(logits.expand(s, -1).contiguous(), torch.ones(s), torch.arange(
            s) * 7919 + 12345, torch.arange(s) % 13, tuple(
                one.expand(s).contiguous() for one in thresholds)).tolist())

    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, -1.0]])
    thresholds = ops.thresholds(logits, torch.ones(1), torch.tensor([3], dtype=torch.int32),
                        torch.ones(1), torch.zeros(1))
    assert draws(300, thresholds) == {1, 3, 4}
    only = torch.tensor([3.0]), torch.tensor([1], dtype=torch.int32)  # of two equals the first
    assert draws(50, only) == {1}


def test_a_draw_is_a_function_of_seed_and_position(ops):  # noqa: F811
    """Not of the row's place in the batch, nor of who else is in it."""
    logits = numbers(1, 300).expand(6, -1).contiguous()
    seeds = torch.tensor([5, -9, 5, 2 ** 62, 5, -9])
    positions = torch.tensor([3, 3, 3, 3, 4, 3])
    first = ops.sample_tokens(logits, torch.ones(6), seeds, positions).tolist()
    assert first[0] == first[2] and first[1] == first[5]
    assert len({first[0], first[1], first[3], first[4]}) > 1
    order = [4, 0, 3]
    again = ops.sample_tokens(logits[:3], torch.ones(3), seeds[order], positions[order])
    assert again.tolist() == [first[i] for i in order]


def test_rows_that_are_broken_end_nobody_else(ops):  # noqa: F811
    """A row with NaN or infinity anywhere, or with nothing but -inf, has no token, drawn or not,
    with filters or without; the others are as ever."""
    logits, at = numbers(8, 3000), torch.arange(8)
    broken, heats = [1, 2, 3, 5, 6], (torch.ones(8), torch.zeros(8))

    def choices() -> torch.Tensor:
        filters = ops.thresholds(logits, torch.ones(8), (at % 2 * 40).int(), torch.full((8,), 0.9),
                             torch.full((8,), 0.01))
        return torch.stack([ops.argmax(logits), *(
            ops.sample_tokens(logits, heat, at * 77, at, thresholds)
            for heat in heats for thresholds in (None, filters))])

    expected = choices()
    logits[1] = math.nan
    logits[2, 2999] = math.nan
    logits[3, 0] = math.inf
    logits[5] = -math.inf
    logits[6, :2000], logits[6, 1234] = -math.inf, math.nan
    expected[:, broken] = -1
    assert choices().tolist() == expected.tolist()
