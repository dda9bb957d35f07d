"""docs/models.md: the families are those that can be read, and the matrix is what is printed."""

import re

from pages import block_after, read, run

from nanoserve.checkpoint.model_config import FAMILIES

PAGE = read("docs/models.md")


def test_the_families_are_those_that_can_be_read():
    assert re.findall(r"^\| `(\w+For\w+)` \|", PAGE, re.M) == list(FAMILIES)


def test_the_parity_matrix_is_real():
    shown = block_after(PAGE, "<!-- printed by: python -m nanoserve.tools.verify -->")
    command = re.search(r"`python (-m nanoserve.tools.verify nanoserve/.*?)`", PAGE)[1]
    assert run(*command.split()) == shown
