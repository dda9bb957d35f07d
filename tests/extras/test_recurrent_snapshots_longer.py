"""The random workloads with states once more: 1,000, for who has installed the extra test-full."""

import pytest
from test_recurrent_snapshots import run_random_states

pytest.importorskip("peft", reason="the extra 'test-full' runs it")


@pytest.mark.parametrize("depth", [0, 1])
def test_more_random_workloads_with_states(depth):
    run_random_states(depth, 500, enough=10)


@pytest.mark.parametrize("depth", [0, 1])
def test_more_random_workloads_with_states_and_drafts(depth):
    run_random_states(depth, 500, enough=10, drafts=(1, 2, 5))
