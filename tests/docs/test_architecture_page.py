"""docs/architecture.md: every concept has a row, and every file and test it names is there.

The page keeps the list of its concepts in a comment at its end. A feature that arrives fills its
row; a file that moves, a function that is renamed or a test that goes away fails here.
"""

import ast
import re

import pytest
from pages import ROOT, read, rows_of

pytestmark = pytest.mark.floor
PAGE = read("docs/architecture.md")
TABLES, LIST = PAGE.split("\n<!-- The concepts that this page must speak of")
ROWS = [row for row in rows_of(TABLES) if row[0] != "concept"]


def test_every_concept_has_a_row():
    concepts = LIST.split("\n", 1)[1].removesuffix("-->\n").strip().split("\n")
    assert len(concepts) > 100 and len(set(concepts)) == len(concepts)
    assert [row[0] for row in ROWS] == concepts


def test_every_row_is_complete():
    """Three cells: without a test there is a sentence that says what stands in for it."""
    for row in ROWS:
        assert len(row) == 3, row
        concept, here, test = row
        assert here.endswith("."), concept
        assert test or here.startswith("Not "), f"{concept} has neither a test nor a reason"
        assert not test or re.fullmatch(r"\[`(tests/[\w/]+\.py)::\w+`\]\(\.\./\1\)", test), concept


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py)::", TABLES))))
def test_every_test_exists(path):
    named = re.findall(rf"`{path}::(\w+)`", TABLES)
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(named) <= there, f"{path} has no {set(named) - there}"


def test_every_file_and_what_is_named_behind_it_exist():
    """`[scheduler](...): `order`, ...`: scheduler.py must have that word."""
    paths = re.findall(r"\]\(\.\./(nanoserve/[\w/]+\.\w+)\)", TABLES) + re.findall(
        r"`(nanoserve/[\w/]+\.\w+)`", TABLES)
    assert len(paths) > 80
    assert [path for path in paths if not (ROOT / path).exists()] == []
    behind = r"\]\(\.\./(nanoserve/[\w/]+\.py)\)(?::| \()\s*((?:`[\w.]+`(?:, | and )?)+)"
    found = re.findall(behind, TABLES)
    assert len(found) > 40
    for path, names in found:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{path} has no {name}"
