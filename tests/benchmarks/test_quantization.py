"""The comparison of small weights with what was can be made; what it says of time is not judged."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference

from benchmarks import quantization
from benchmarks.quantization import loss, measure_memory, perplexity_table, speed_table

TOKENS = [(7 * i * i + 3) % 250 for i in range(50)]


def test_the_loss_is_that_of_transformers(checkpoints):
    """Windows of 20 begin with the last token of the one before: each is predicted once."""
    model, nats = Reference(checkpoints["qwen3"]).model, 0.0
    for i in range(0, len(TOKENS) - 1, 20):
        window = torch.tensor(TOKENS[i:i + 21])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    got = loss(TOKENS, checkpoints["qwen3"], 20, dtype="float32", device="cpu")
    assert got == pytest.approx(nats / 49, rel=1e-4)


@pytest.mark.full
def test_the_tables_have_a_line_for_each_case(checkpoints, toy, monkeypatch):
    monkeypatch.setattr(quantization, "PROMPT", 40)
    lines = perplexity_table(TOKENS, checkpoints["qwen3"], 20)
    assert len(lines) == 2 + 6 and lines[2].endswith("| 100.00% |")
    lines = speed_table(toy, "float32", 1, [1, 2])
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1 row", "| 2 rows",
                                                           "| a prompt of 40"]
    found = measure_memory(str(toy), "float32", "int8")
    assert found["peak"] >= found["resident"]
