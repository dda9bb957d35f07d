"""Lists and tables of the pages hold what the code has: no more, no less.

The files in the maps of README and docs/architecture.md are compared in tests/test_architecture.py.
"""

import re
from dataclasses import fields

import pytest
from pages import ROOT, read

from nanoserve.config import POLICIES, SamplingParams
from nanoserve.model_config import FAMILIES
from nanoserve_extras.engine_args import EngineArgs

pytestmark = pytest.mark.floor
API, ARCHITECTURE = read("docs/api.md"), read("docs/architecture.md")


def test_the_options_are_all_there_with_their_defaults():
    listed = re.search(r"Options, with their defaults: (.*?`)\.", API, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default!r}`" for f in fields(EngineArgs) if f.name != "model")


def test_the_sampling_controls_are_all_there_with_their_defaults():
    listed = re.search(r"`SamplingParams`, with their defaults: (.*?`)\.", API, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default if f.name == 'output_kind' else repr(f.default)}`"
        for f in fields(SamplingParams))


def test_the_families_are_those_that_can_be_read():
    assert re.findall(r"^\| `(\w+For\w+)` \|", read("docs/models.md"), re.M) == list(FAMILIES)


def test_every_policy_has_a_row():
    section = API.split("\n## Who goes first\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == list(POLICIES)


def rows_of_files() -> list[tuple[str, list[str]]]:
    """Of each file of the engine or the extras: its path, and the cells of its row."""
    found = re.findall(r"^\| \[`\w+`\]\(\.\./([\w/]+\.py)\) \| (.*) \|$", ARCHITECTURE, re.M)
    return [(path, cells.split(" | ")) for path, cells in found]


def test_every_file_of_the_core_has_its_counterpart_in_vllm():
    rows = [cells for path, cells in rows_of_files() if path.startswith("nanoserve/")]
    assert len(rows) > 20
    for cells in rows:
        assert re.match(r"`(vllm|csrc|cmake)/", cells[2]), cells


def test_what_a_row_names_is_in_the_file():
    """Of the concepts: `schedule`, `Step.outcome` and so on; and behind a link to a file, as in the
    ten questions."""
    named = [(path, re.findall(r"`([\w.]+)`", cells[1])) for path, cells in rows_of_files()]
    behind = r"\]\(\.\./(nanoserve(?:_extras)?/[\w/]+\.py)\):\s*((?:`[\w.]+`(?:, | and )?)+)"
    named += [(path, re.findall(r"`([\w.]+)`", names))
              for path, names in re.findall(behind, ARCHITECTURE)]
    assert sum(map(len, (names for _, names in named))) > 70
    for path, names in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in (name.rpartition(".")[2] for name in names):
            assert re.search(rf"\b{name}\b", text), f"{path} has no {name}"
