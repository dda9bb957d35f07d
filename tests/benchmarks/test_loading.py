"""A checkpoint is loaded piece by piece: what its loading takes is bounded."""

from pathlib import Path

import pytest

from benchmarks.loading import CHECKPOINTS, KINDS, PUBLISHED, Taken, measure

# Loads in processes of their own, of up to 10 GB.
pytestmark = [pytest.mark.full, pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")]


def test_the_bound_is_what_is_ready_two_tensors_and_a_tenth():
    assert Taken(ready=1000.0, peak=0.0, two_tensors=30.0).bound == 1130


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_more_waits_than_two_tensors(name, kind):
    """Pieces of float32 that glibc did not find again doubled what a mixture in int8 took."""
    taken = measure(CHECKPOINTS[name] | dict(num_hidden_layers=4), kind)
    assert taken.peak <= taken.bound, taken


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"])
def test_a_checkpoint_of_9_billion_numbers_is_loaded_in_4_bits_on_16_gb(name):
    """The files have 16 to 18 GB."""
    taken = measure(PUBLISHED[name], "int4")
    assert taken.peak <= taken.bound, taken
