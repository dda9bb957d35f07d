"""The comparison of steps with and without adapters runs."""

from benchmarks import lora


def test_the_comparison_can_be_made(qwen3):
    """What it says about time is not judged here."""
    rows = lora.measure(qwen3, rows=2, rounds=1, max_loras=2, max_lora_rank=4)
    assert [name for name, *_ in rows] == [
        "without adapters", "may have adapters, none asked", "an adapter in every row"]
    assert rows[0][2] == 1 and all(milliseconds > 0 for _, milliseconds, _ in rows)
