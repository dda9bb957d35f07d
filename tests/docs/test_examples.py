"""The examples of docs/pooling.md and docs/speculative.md print what stands behind them."""

from pages import block_after, read, run


def test_the_pooling_example_prints_what_is_shown():
    page = read("docs/pooling.md")
    assert run("-c", block_after(page, "\n```python")) == block_after(
        page, "<!-- printed by the pooling example -->")


def test_the_speculative_example_prints_what_is_shown():
    page = read("docs/speculative.md")
    assert run("-c", block_after(page, "\n```python")) == block_after(
        page, "<!-- printed by the speculative example -->")
