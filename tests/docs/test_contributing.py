"""CONTRIBUTING.md: six recipes, and what each names is there: files, tests, words of the code."""

import re

import pytest
from pages import ROOT, read

pytestmark = pytest.mark.floor
PAGE = read("CONTRIBUTING.md")
RECIPES = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))


def test_there_are_six_recipes_with_a_file_a_test_and_a_command():
    assert list(RECIPES) == ["A sampling control", "A family flag", "A kernel",
                             "An eviction or scheduling policy", "An observer", "An option"]
    for name, recipe in RECIPES.items():
        assert "\n1. " in recipe and "**Test**" in recipe, name
        assert re.search(r"\*\*Run\*\*:\s.*pytest|your test", recipe, re.S), name


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_of_a_recipe_exist_and_have_what_it_names(name):
    """Every word of code in a paragraph must stand in one of the files that it names."""
    for paragraph in re.split(r"\n(?=\d\. |\*\*|\n)", RECIPES[name]):
        quoted = re.findall(r"`([^`]+)`", paragraph)
        paths = [ROOT / part for word in quoted for part in word.split()
                 if re.match(r"(nanoserve|tests|docs|benchmarks)/", part)]
        for path in paths:
            assert path.exists(), f"{name}: {path.name}"
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        if "pytest" in paragraph or not texts:
            continue
        for word in quoted:
            if re.fullmatch(r"[\w.]+", word) and not word.startswith(("ops", "NAME")):
                assert any(re.search(rf"\b{word.split('.')[-1]}\b", text) for text in texts), (
                    f"{name}: `{word}` is in none of {[path.name for path in paths]}")
