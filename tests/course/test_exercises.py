"""course/exercises.md: what an exercise takes out is there; and the command that a learner types.
"""

import ast
import re

import pytest
from pages import ROOT
from scratch_copies import before_and_after

from course import __main__ as course
from course.scratch import find, tasks

pytestmark = pytest.mark.floor
EXERCISES = tasks("exercise")


@pytest.mark.parametrize("number", EXERCISES)
def test_the_bodies_of_an_exercise_are_there_and_go(number, tmp_path):
    """By name: code may move within a file. Signatures and docstrings stay, all else, too."""
    task = EXERCISES[number]
    trees = tuple(map(ast.parse, before_and_after(task, tmp_path)))
    assert task.names and len(task.folded) == 3
    for name in task.names:
        whole, taken = (find(tree, name) for tree in trees)
        assert ast.get_docstring(whole) == ast.get_docstring(taken)
        assert ast.unparse(whole.args) == ast.unparse(taken.args)
        assert ast.unparse(taken.body[-1]) == (
            f"raise NotImplementedError('exercise {number}: write {name}')")
        whole.body = taken.body = []
    assert ast.dump(trees[0]) == ast.dump(trees[1])
    for file in task.checks:
        assert not file.startswith("tests/") or (ROOT / file).exists()


def test_exercises_are_numbered_and_listed(capsys):
    assert list(EXERCISES) == [str(i) for i in range(1, 9)]
    assert course.main([]) == 0
    listed = re.findall(r"^  +(\d+)  (.*)$", capsys.readouterr().out, re.M)
    assert listed == [(one.number, one.title) for kind in ("exercise", "bug")
                      for one in tasks(kind).values()]


@pytest.mark.parametrize("words, says", [
    ("9", "no exercise '9'"), ("plant", "no bug ''"), ("reveal 99", "no bug '99'"),
    ("1 hint 4", "python -m course"), ("1 check now", "python -m course"),
    ("plant 3 hint", "python -m course")])
def test_a_wrong_command_is_explained(words, says):
    with pytest.raises(ValueError, match=says):
        course.main(words.split())


def test_hints_come_in_three_steps(capsys):
    for words in (["1", "hint"], ["1", "hint", "1"], ["1", "hint", "2"], ["1", "hint", "3"]):
        course.main(words)
    said = capsys.readouterr().out
    first, *others = EXERCISES["1"].folded
    assert said == "\n".join([first, first, *others, ""])


def test_a_copy_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "ROOT", tmp_path)
    (tmp_path / "scratch/exercise-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="is there already"):
        course.main(["1"])
    with pytest.raises(ValueError, match="is not there"):
        course.main(["2", "check"])
