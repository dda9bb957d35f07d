"""The comparison of embeddings runs."""

from nanoserve.tools import bench_pooling


def test_the_comparison_can_be_made(qwen3):
    """It checks its numbers against each other; what it says about time is not judged here."""
    assert len(bench_pooling.bench(qwen3, num_texts=5, batch_size=2, rounds=1)) == 3
