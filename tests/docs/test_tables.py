"""Lists and tables of the pages hold what the code has: no more, no less.

The files in the maps of README and docs/map.md are compared in tests/test_architecture.py.
"""

import re
from dataclasses import fields

import pytest
from pages import ROOT, read

from nanoserve.config import POLICIES, SamplingParams
from nanoserve.model_config import FAMILIES
from nanoserve_extras.engine_args import EngineArgs

pytestmark = pytest.mark.floor
API, MAP = read("docs/api.md"), read("docs/map.md")


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
    assert re.findall(r"^\| `(\w+)`", read("docs/scheduling.md"), re.M) == list(POLICIES)


def test_every_file_of_the_core_has_its_counterpart_in_vllm():
    lines = re.findall(r"^- \[`\w+`\]\(\.\./nanoserve/([\w/]+)\.py\): (.+)$", MAP, re.M)
    assert len(lines) > 20
    for name, said in lines:
        assert re.search(r"\(`(vllm|csrc|cmake)/.*\)$", said), name


@pytest.mark.parametrize("page, enough", [("architecture", 40), ("map", 9)])
def test_what_a_page_names_is_in_the_file(page, enough):
    """`[scheduler](...): `order`, ...`: scheduler.py must have that word."""
    behind = (r"\]\(\.\./(nanoserve(?:_extras)?/[\w/]+\.py)\)(?::| \()"
              r"\s*((?:`[\w.]+`(?:, | and )?)+)")
    found = re.findall(behind, read(f"docs/{page}.md"))
    assert len(found) >= enough
    for path, names in found:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{path} has no {name}"
