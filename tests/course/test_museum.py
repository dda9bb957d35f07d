"""course/museum.md: every bug can be planted in today's code, and names a test that is there."""

import ast

import pytest
from pages import ROOT
from scratch_copies import before_and_after

from course import __main__ as course
from course.scratch import tasks

pytestmark = pytest.mark.floor
BUGS = tasks("bug")


@pytest.mark.parametrize("number", BUGS)
def test_a_bug_can_be_planted_and_its_test_is_there(number, tmp_path):
    """Where code has moved, the page must follow: its lines stand in its function, once."""
    bug = BUGS[number]
    before, after = map(ast.parse, before_and_after(bug, tmp_path))
    assert ast.dump(before) != ast.dump(after)
    [[file, name]] = [test.split("::") for test in bug.checks]
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_reveal_tells_the_story_and_plant_does_not(capsys):
    course.main(["reveal", "12"])
    revealed = capsys.readouterr().out
    bug = BUGS["12"]
    for words in (bug.text, "Look at the indentation", f"-{bug.old}", f"+{bug.new}", *bug.checks):
        assert words in revealed, words
    assert "```" not in revealed and "`" not in revealed
    assert "```" not in bug.text and "tests/" not in bug.text
