"""course/speed.md: the command runs, each line differs by one thing, and the page has its columns.

Nothing here is timed: what a machine is measured at is made up.
"""

import re
import xml.etree.ElementTree as ET

import pytest
from pages import ROOT, read, rows_of

from benchmarks import roofline
from course import speed
from nanoserve.sequence import visible

PAGE = read("course/speed.md")
PICTURES = sorted((ROOT / "course/pictures").glob("*.svg"))


def test_the_command_prints_what_the_page_shows(capsys, monkeypatch):
    """In small, prompts of 4 and 16 tokens. The page has the same lines, with 512 for 16."""
    monkeypatch.setattr(roofline, "measure", lambda *_: roofline.Machine(1e10, 1e12))
    speed.main(short=4, long=16, rounds=1)
    said = capsys.readouterr().out
    shown = PAGE[PAGE.index("<!-- python -m course.speed Qwen3-0.6B -->"):]
    head, _, *rows = rows_of(said)
    assert rows_of(shown)[0] == head and len(rows) == len(speed.plan(4, 16)) == 12
    for row, on_page in zip(rows, rows_of(shown)[2:], strict=False):
        assert [cell.replace("16 tokens", "512 tokens").replace("16 keys", "512 keys").replace(
            "of 16", "of 512") for cell in row[:2]] == on_page[:2]
        assert all(re.fullmatch(r"[\d,]+|", cell) for cell in row[2:4]) and row[4][-1] == "%"
    assert "5.8 M weights of 2 bytes are 12 MB" in said and "10.0 GB/s" in said


def test_each_line_changes_one_thing():
    """The number of rows, the length of a prompt, the part that counts, or an option."""
    runs = {run.name: run for run in speed.plan(32, 512)}
    for run in runs.values():
        if run.before:
            before = runs[run.before]
            changed = [run.shape.num_prompts != before.shape.num_prompts, run.part != before.part
                       or run.shape.input_len != before.shape.input_len,
                       run.options is not before.options]
            assert sum(changed) == 1, run.name


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match="'gpt-5'.*Qwen3-0.6B"):
        speed.main("gpt-5")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_can_be_read_and_has_two_schemes(picture):
    text = picture.read_text(encoding="utf-8")
    names = [element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()]
    assert names.count("title") == names.count("desc") == 1
    assert "prefers-color-scheme: dark" in text and "<script" not in text
    assert any(f"pictures/{picture.name}" in read(f"course/{page}.md")
               for page in ("from_naive", "speed"))


def test_the_mask_of_the_picture_is_the_engines():
    """The walk's step 1: A's query at 4, B's at 4 to 9, each text its own keys."""
    text = (ROOT / "course/pictures/ragged.svg").read_text(encoding="utf-8")
    for name, queries in (("a", [4]), ("b", range(4, 10))):
        expected = sum(visible(query, key, None, query) for query in queries for key in range(10))
        assert text.count(f'class="seen {name}"') == expected
