"""docs/lora.md tells the truth: its example prints what is shown."""

from pages import block_after, read, run

PAGE = read("docs/lora.md")


def test_one_prompt_two_voices_one_batch():
    assert run("-c", block_after(PAGE, "\n```python")) == block_after(
        PAGE, "printed by the example above -->")
