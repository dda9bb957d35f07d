"""course/machine.md: its experiments print what is shown, and the page shows lines of them. Each
chapter ends with three questions.
"""

import re

import pytest
from pages import ROOT, block_after, read
from transformers import AutoTokenizer

from course import machine
from nanoserve.llm import BUNDLED_MODEL

PAGE = read("course/machine.md")
CHAPTERS = sorted(path.name for path in (ROOT / "course").glob("*.md"))


@pytest.mark.parametrize("part", machine.PARTS)
def test_an_experiment_prints_what_is_shown(part, capsys):
    """Launches depend on torch's version: the page has those of the newest."""
    machine.PARTS[part](AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    assert capsys.readouterr().out == block_after(PAGE, f"<!-- printed: {part} -->")


def test_the_page_shows_lines_of_the_programs():
    programs = re.split(r"^\[`(?=\w+\.py`\]\()", PAGE, flags=re.M)[1:]
    for section in programs:
        for shown in re.findall(r"^```python\n(.*?)^```", section, re.S | re.M):
            assert shown in read(f"course/{section[:section.index('`')]}")
    assert len(programs) == len(machine.PARTS)


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match="'graphs'.*ranks, recording, drafts, keys"):
        machine.main(["graphs"])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_ends_with_three_questions_whose_answers_are_folded(chapter):
    _, questions = re.split(r"^## (?:Questions|问题)\n", read(f"course/{chapter}"), flags=re.M)
    folded = re.findall(r"^<details><summary>(\d)\. .+?</summary>\n\n.+?\n\n</details>$", questions,
                        re.M | re.S)
    assert folded == ["1", "2", "3"]
