"""All options in one record: what is refused of the extras' own, and that none is ignored."""

import dataclasses
import re

import pytest
from clean_process import EXTRAS, PACKAGE
from config_files import Vector

from nanoserve.config import SamplingParams
from nanoserve_extras.engine_args import EngineArgs

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("options, words", [
    (dict(kv_store_bytes=100), ["kv_store_bytes=100", "without kv_store"]),
    (dict(max_lora_rank=8), ["max_lora_rank=8", "enable_lora"]),
    (dict(trace=5), ["trace must be", "got 5"]),
    (dict(device="cuda:1", pipeline_parallel_size=3), ["device='cuda:1'", "3 ranks", '"cuda"']),
], ids=str)
def test_bad_options_are_refused_with_field_value_and_remedy(options, words):
    with pytest.raises(ValueError) as error:
        EngineArgs(model="none", **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("ahead, steps", [(True, 3), (False, 1), (None, 1)])
def test_a_step_for_each_stage_needs_a_host_that_runs_ahead(ahead, steps):
    config = EngineArgs(model="none", pipeline_parallel_size=3, async_scheduling=ahead)
    assert config.steps_at_once == steps


def test_a_value_that_only_an_extra_knows_is_left_to_it():
    """Also one, a tensor say, that is neither equal to its default nor different."""
    pooler_config = Vector()
    assert EngineArgs(model="none", pooler_config=pooler_config).pooler_config is pooler_config


def test_every_option_and_control_is_read_somewhere():
    """A field that is accepted, and that no other file reads, would be ignored in silence."""
    source = "".join(path.read_text() for package in (PACKAGE, EXTRAS)
                     for path in package.rglob("*.py")
                     if path.name not in ("config.py", "engine_args.py")
                     and not path.is_relative_to(EXTRAS / "tools"))
    for record, name in ((SamplingParams, "params"), (EngineArgs, "config|asked|args|options")):
        for field in dataclasses.fields(record):
            assert re.search(rf"\b({name})\.{field.name}\b", source), field.name
