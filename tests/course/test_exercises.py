"""course/exercises.md: what an exercise takes out is there; and the command that a learner types.
"""

import ast
import importlib.util
import re
import sys
from operator import attrgetter

import pytest
from pages import ROOT
from scratch_copies import before_and_after

from course import __main__ as course
from course import scratch
from course.scratch import Task, find, tasks

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


@pytest.mark.parametrize("number, file", [("2", "block_manager"), ("3", "block_manager"),
                                          ("4", "scheduler"), ("8", "scheduler")])
def test_what_other_exercises_ask_for_is_sealed_and_works(number, file, tmp_path):
    """Its lines are not to be read, and when the file is imported its code is the project's."""
    task = EXERCISES[number]
    source = (ROOT / task.file).read_text(encoding="utf-8")
    before_and_after(task, tmp_path)  # makes the folder
    path = tmp_path / task.file
    path.write_text(source, encoding="utf-8")
    task.seal(tmp_path)
    task.apply(tmp_path)
    spec = importlib.util.spec_from_file_location(f"sealed_{number}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    copied = ast.parse(path.read_text(encoding="utf-8"))
    names = {name for one in EXERCISES.values() if one.file == task.file for name in one.names}
    assert set(task.names) < names
    for name in names:
        assert ast.unparse(find(copied, name).body[-1]).startswith("raise NotImplementedError")
        theirs = attrgetter(name)(importlib.import_module(f"nanoserve.{file}")).__code__
        works = attrgetter(name)(module).__code__.co_names == theirs.co_names
        assert works == (name not in task.names), name


def test_exercises_are_numbered_and_listed(capsys):
    assert list(EXERCISES) == [str(i) for i in range(1, 10)]
    assert course.main([]) == 0
    listed = re.findall(r"^  +(\d+)  (.*)$", capsys.readouterr().out, re.M)
    assert listed == [(one.number, one.title) for kind in ("exercise", "bug")
                      for one in tasks(kind).values()]


@pytest.mark.parametrize("words, says", [
    ("10", "no exercise '10'"), ("plant", "no bug ''"), ("reveal 99", "no bug '99'"),
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
    assert said == "\n".join([first, first, *others, ""]).replace("`", "")


def test_a_terminal_shows_text_and_no_marks():
    page = "*One* (`two`), [`a.py`](../nanoserve/a.py), [*b* c](d.md):\n\n```\npython a * b\n```\n"
    assert course.plain(page) == "One (two), nanoserve/a.py, b c (d.md):\n\npython a * b\n"


def test_a_copy_that_is_there_is_left_alone(tmp_path, monkeypatch, capsys):
    """And its text can be read again."""
    monkeypatch.setattr(course, "ROOT", tmp_path)
    (tmp_path / "scratch/exercise-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="is there already"):
        course.main(["1"])
    assert "A sequence is a list of tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is not there"):
        course.main(["2", "check"])


def test_an_interrupted_copy_is_none_and_a_users_own_git_is_no_obstacle(tmp_path, monkeypatch):
    """An interrupted one had the solution in it. Some people sign each commit."""
    monkeypatch.setattr(scratch, "COPIED", ["nanoserve"])
    (tmp_path / "config").write_text("[commit]\ngpgsign = true\n[user]\nsigningkey = nobody\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    task, place = EXERCISES["1"], tmp_path / "scratch/exercise-1"
    for owner, name, does, raised in ((scratch.shutil, "which", lambda _: None, ValueError),
                                      (Task, "seal", interrupt, KeyboardInterrupt)):
        with monkeypatch.context() as patch, pytest.raises(raised, match="install it, because|^$"):
            patch.setattr(owner, name, does)
            scratch.make(task, place)
        assert not place.exists()
    scratch.make(task, place)
    assert "exercise 1: write" in (place / task.file).read_text(encoding="utf-8")
    assert [one.name for one in place.parent.iterdir()] == ["exercise-1"]


def interrupt(*_):
    raise KeyboardInterrupt
