"""The table of checkpoints on docs/models.md is what the program would write."""

import re

import pytest

from benchmarks import models


def page_rows() -> list[list[str]]:
    text = models.PAGE.read_text().split(models.BEGIN)[1].split("<!-- end")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


def test_every_checkpoint_has_a_row_and_no_text_differed():
    named = [name for row in page_rows() for name in re.findall("`(.*?)`", row[0])]
    assert sorted(named) == sorted(models.CHECKPOINTS) and len(named) >= 40
    for _, architecture, who in page_rows():
        assert re.fullmatch(r"`\w+`", architecture) and "**" not in who, architecture
        assert re.match("our decoder|transformers|refused: ", who)


@pytest.mark.parametrize("checkpoint", [
    "google/embeddinggemma-300m", pytest.param("google/gemma-4-E2B-it", marks=pytest.mark.full),
    pytest.param("Qwen/Qwen3.5-0.8B", marks=pytest.mark.full)])
def test_a_row_is_what_is_found_again(checkpoint, monkeypatch):
    """Refused, pooled, and compared; in two of the modes."""
    monkeypatch.setattr(models.verify, "MODES", [models.verify.BATCHED, models.verify.PREEMPTED])
    monkeypatch.setattr(models, "NUM_PROMPTS", 3)
    ((_, architecture, who),) = models.rows_of({checkpoint: models.CHECKPOINTS[checkpoint]})
    assert [architecture, who] in [
        row[1:] for row in page_rows() if f"`{checkpoint}`" in row[0]]
