"""course/walk.md: its integers are the engine's, and each function that it names is where it says.
"""

import ast
import re

import pytest
from pages import ROOT, read

from course.scratch import find
from course.walk import fill

PAGE = read("course/walk.md")
STOPS = sorted(set(re.findall(r"\[`([\w.]+)`\]\(\.\./(nanoserve/[\w/]+\.py)\)", PAGE)))


def test_the_integers_are_those_of_a_run():
    assert PAGE == fill(PAGE)


@pytest.mark.parametrize("name, file", STOPS)
def test_a_stop_is_a_function_of_its_file(name, file):
    find(ast.parse((ROOT / file).read_text()), name)
