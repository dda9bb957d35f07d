"""docs/api.md: every option and every sampling control, with the default that the code has."""

import re
from dataclasses import fields

import pytest
from pages import read

from nanoserve.config import EngineConfig, SamplingParams

pytestmark = pytest.mark.floor
PAGE = read("docs/api.md")


def test_the_options_are_all_there_with_their_defaults():
    listed = re.search(r"Options, with their defaults: (.*?`)\.", PAGE, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default!r}`" for f in fields(EngineConfig) if f.name != "model")


def test_the_sampling_controls_are_all_there_with_their_defaults():
    listed = re.search(r"`SamplingParams`, with their defaults: (.*?`)\.", PAGE, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default if f.name == 'output_kind' else repr(f.default)}`"
        for f in fields(SamplingParams))
