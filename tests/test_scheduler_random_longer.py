"""The random workloads of the scheduler once more, with more examples than the quick tests have."""

import pytest
from test_scheduler_random import run_random_drafts, run_random_workloads


@pytest.mark.parametrize("depth", [0, 1])
def test_more_random_workloads_of_the_scheduler(depth):
    run_random_workloads(depth, 400, enough=10)


@pytest.mark.parametrize("depth", [0, 1])
def test_more_random_workloads_with_drafts(depth):
    run_random_drafts(depth, 200, enough=5)
