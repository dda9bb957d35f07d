"""The table of checkpoints on docs/models.md is what the program would write."""

import re

import pytest

from benchmarks import models


def rows_on_page() -> dict[str, list[str]]:
    text = models.PAGE.read_text().split(models.BEGIN)[1].split("<!-- end")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {row[0].strip("`"): row for row in rows}


def test_every_checkpoint_has_a_row_and_no_text_differed():
    rows = rows_on_page()
    assert list(rows) == list(models.CHECKPOINTS) and len(rows) >= 40
    for checkpoint, (_, architecture, who, what) in rows.items():
        assert re.fullmatch(r"`\w+`", architecture) and "**" not in what, checkpoint
        assert who in ("our decoder", "transformers", "refused")


@pytest.mark.parametrize("checkpoint", [
    "google/gemma-4-E2B-it", "Qwen/Qwen3.5-0.8B", "google/embeddinggemma-300m"])
def test_a_row_is_what_is_found_again(checkpoint, monkeypatch):
    """Refused, pooled, and compared; in two of the modes."""
    monkeypatch.setattr(models.verify, "MODES", [models.verify.BATCHED, models.verify.PREEMPTED])
    monkeypatch.setattr(models, "NUM_PROMPTS", 3)
    (row,) = models.rows_of({checkpoint: models.CHECKPOINTS[checkpoint]})
    *expected, what = rows_on_page()[checkpoint]
    assert row[:3] == expected
    assert row[3] == re.sub(r"\d+ texts, 14 modes", "6 texts, 2 modes", what).replace(
        "6 vectors", "3 vectors")
