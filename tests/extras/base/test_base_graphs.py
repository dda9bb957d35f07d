"""The sizes of recordings for steps with drafts, and of two networks (recorded: test_graphs.py)."""

from dataclasses import replace

import pytest
import torch

from nanoserve.graphs import DecodeGraphs, Size
from nanoserve.sequence import Step
from nanoserve_extras.base.graphs import all_sizes, with_sections


def decodes(rows) -> Step:
    """Each of these computes one token, the one at position 4, and samples the next."""
    rows = list(rows)
    return Step(0, dict.fromkeys(rows, 1), [4] * len(rows), rows)


def of_sizes(max_num_seqs: int, num_networks: int = 1, num_drafts: int = 0,
             most_samples: int = 2048) -> DecodeGraphs:
    """Without recordings."""
    return DecodeGraphs(all_sizes(max_num_seqs, num_networks, num_drafts, most_samples),
                        torch.empty(0))


@pytest.mark.parametrize("num_drafts, most_samples", [(0, 40), (1, 80), (4, 200), (20, 600)])
def test_any_row_may_have_some_drafts_beside_any_number_of_others(num_drafts, most_samples):
    """Without a drafter a grammar forces tokens. Nothing is larger than the buffers."""
    graphs, most = of_sizes(40, 1, num_drafts, most_samples), num_drafts or 15
    for num_rows in range(1, 41):
        assert graphs.size_for(decodes(range(num_rows))).rows >= num_rows
        for num_new in range(1, min(most, 15, most_samples - num_rows) + 1):
            step = decodes(range(num_rows))
            step.drafts[0], step.num_new_tokens[0] = [7] * num_new, 1 + num_new
            size = graphs.size_for(step)
            assert size.rows >= num_rows and size.tokens >= num_rows + num_new
            assert size.tokens <= most_samples and size.rows <= 40
            assert size.drafts and size.tokens < 2 * num_rows + 32, "more padding than work"
    assert all(size.tokens <= 256 for size in graphs.sizes)
    if num_drafts == 4:  # as many as there can be, of each row
        step = decodes(range(30))
        for row in range(30):
            step.drafts[row], step.num_new_tokens[row] = [7] * 4, 5
        assert graphs.size_for(step) == Size(32, 160, drafts=True)


def test_a_draft_network_reads_what_the_first_has_checked():
    """Drafts take fewer sizes than decodes."""
    assert len(of_sizes(256).sizes) == 20 + 9
    graphs, step = of_sizes(8, 2, 3), decodes("abc")
    assert graphs.size_for(step) == Size(4, 4)
    assert graphs.size_for(replace(step, network=1)) == Size(4, 4, network=1)
    longer = replace(step, num_new_tokens=dict(a=1, b=1, c=2))
    assert graphs.size_for(longer) is None
    assert graphs.size_for(replace(longer, drafts=dict(c=[7]))) == Size(4, 16, True)
    assert graphs.size_for(replace(longer, drafts=dict(c=[7]), network=1)) == Size(4, 16, True, 1)
    assert of_sizes(8).size_for(replace(step, network=1)) is None


def test_steps_with_sections_are_recordings_of_their_own():
    """Only these, where an extra fills its section in every step; never of a draft network."""
    one, other = Size(4, 4), Size(4, 4, extra=True)
    assert with_sections(one, {}) == [one]
    assert with_sections(one, dict(adapter=False)) == [one, other]
    assert with_sections(one, dict(adapter=False, state=True)) == [other]
    assert with_sections(one._replace(network=1), dict(state=True)) == [one._replace(network=1)]
