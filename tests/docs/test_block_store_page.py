"""docs/block-store.md tells the truth: its example prints what is shown, and its tables are those
that the command prints, but for the times."""

import re

from pages import block_after, read, run

from benchmarks import block_store

PAGE = read("docs/block-store.md")


def test_the_second_start_finds_what_the_first_one_computed():
    shown = block_after(PAGE, "printed by the example above -->")
    assert run("-c", block_after(PAGE, "\n```python")) == shown
    assert int(re.search(r"second start: (\d+)", shown)[1]) > 200


def without_times(text: str) -> list[str]:
    """The lines of its tables; a time, and what follows from it, has a decimal point."""
    return [re.sub(r"[+-]?\d+\.\d+%?", "?", line) for line in text.splitlines() if line[:1] == "|"]


def test_the_bench_prints_the_pages_tables(capsys, monkeypatch):
    """With a tiny model, and as many tokens, conversations and rows as the page says: what is found
    doesn't depend on the model. By hand: 93 blocks of 16 are in 1,500 tokens; and of turns that ask
    for 100, 200, 300 and 400 tokens the last three find 96, 192 and 288, which is 58% of 1,000."""
    tiny = block_store.roofline.MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32)
    monkeypatch.setitem(block_store.roofline.MODELS, "tiny", tiny)
    block_store.main(["--model", "tiny", "--rounds", "1"])
    table = PAGE.partition("benchmarks.block_store -->")[2].partition("<!-- end")[0]
    lines = without_times(capsys.readouterr().out)
    assert lines == without_times(table)
    assert [line.split(" | ")[2] for line in lines[2:5]] == ["0", "1,488", "1,488"]
    assert "| a pool of 1 GiB | 58% | ? |" in lines
