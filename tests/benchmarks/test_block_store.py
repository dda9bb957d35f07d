"""The block store's instrument: what is found is worked out by hand; times are not judged."""

import pytest

from benchmarks import block_store


@pytest.mark.full
def test_what_is_found_does_not_depend_on_the_model(capsys, monkeypatch):
    """With a tiny model. By hand: 93 blocks of 16 are in 1,500 tokens; and of turns that ask
    for 100, 200, 300 and 400 tokens the last three find 96, 192 and 288, which is 58% of 1,000."""
    tiny = block_store.roofline.MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32)
    monkeypatch.setitem(block_store.roofline.MODELS, "tiny", tiny)
    block_store.main(["--model", "tiny", "--rounds", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
            if line.startswith("|")]
    assert [row[2] for row in rows[2:5]] == ["0", "1,488", "1,488"]
    assert [row[1] for row in rows if row[0] == "1 GiB of host memory"] == ["58%"]
    assert rows[-1][0] == "bfloat16"
