"""The comparison of embeddings runs."""

from benchmarks import pooling


def test_the_comparison_can_be_made(qwen3):
    """It checks its numbers against each other; what it says about time is not judged here."""
    assert len(pooling.bench(qwen3, num_texts=5, batch_size=2, rounds=1)) == 3
