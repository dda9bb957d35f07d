"""CONTRIBUTING.md: what its recipes name is there: files, tests, words of the code."""

import re

import pytest
from pages import ROOT, read

pytestmark = pytest.mark.floor
PAGE = read("CONTRIBUTING.md")
RECIPES = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_of_a_recipe_exist_and_have_what_it_names(name):
    """Every word of code in a paragraph must stand in one of the files that it names."""
    for paragraph in re.split(r"\n(?=\d\. |\*\*|\n)", RECIPES[name]):
        quoted = re.findall(r"`([^`]+)`", paragraph)
        paths = [ROOT / part for word in quoted for part in word.split()
                 if re.match(r"(nanoserve(_extras)?|tests|docs|benchmarks)/", part)]
        for path in paths:
            assert path.exists(), f"{name}: {path.name}"
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        if "pytest" in paragraph or not texts:
            continue
        for word in quoted:
            if re.fullmatch(r"[\w.]+", word) and not word.startswith(("ops", "NAME")):
                assert any(re.search(rf"\b{word.split('.')[-1]}\b", text) for text in texts), (
                    f"{name}: `{word}` is in none of {[path.name for path in paths]}")
