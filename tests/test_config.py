"""What can be chosen and what is refused: `EngineConfig`, without torch and without an engine.

Every error must name the field, its value and the remedy.
"""

import dataclasses
import re

import pytest
from config_files import Vector, small_llama

from nanoserve.config import EngineConfig
from nanoserve.model_config import Rope

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("options, words", [
    (dict(dtype="float8"), ["dtype must be one of", "got 'float8'", "bfloat16"]),
    (dict(kv_cache_dtype="fp8"), ["kv_cache_dtype must be one of auto, int8", "got 'fp8'"]),
    (dict(load_format="gguf"), ["load_format must be one of", "got 'gguf'", "safetensors"]),
    (dict(scheduling_policy="lifo"), ["scheduling_policy must be one of fcfs, priority, shortest",
                                      "got 'lifo'"]),
    (dict(device="tpu"), ["device must be auto", "got 'tpu'", "cpu, cuda"]),
    (dict(gpu_memory_utilization=0), ["gpu_memory_utilization", "(0, 1]", "got 0"]),
    (dict(gpu_memory_utilization=1.1), ["gpu_memory_utilization", "(0, 1]", "got 1.1"]),
    (dict(gpu_memory_utilization=True), ["gpu_memory_utilization", "(0, 1]", "got True"]),
    (dict(async_scheduling="no"), ["async_scheduling", "True, False", "got 'no'"]),
    (dict(expert_parallel=2), ["expert_parallel", "True, False", "got 2"]),
    (dict(gpu_memory_utilization=float("nan")), ["gpu_memory_utilization", "(0, 1]", "got nan"]),
    (dict(hf_overrides=["x"]), ["hf_overrides", "dict", "['x']"]),
    (dict(tensor_parallel_size=0), ["tensor_parallel_size", "at least 1", "got 0"]),
    (dict(block_size=None), ["block_size", "got None"]),
    (dict(max_num_batched_tokens=8, max_num_seqs=9),
     ["max_num_batched_tokens=8", "max_num_seqs=9"]),
    (dict(device="cuda:1", tensor_parallel_size=2), ["device='cuda:1'", "2 ranks", '"cuda"']),
], ids=str)
def test_bad_options_are_refused_with_field_value_and_remedy(options, words):
    with pytest.raises(ValueError) as error:
        EngineConfig(model="none", **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", [
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "tensor_parallel_size"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "16", True], ids=repr)
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"{name} .* 1, got {re.escape(repr(value))}"):
        EngineConfig(model="none", **{name: value})


def test_a_value_that_can_not_be_compared_is_refused():
    with pytest.raises(ValueError, match="enforce_eager.*got .*Vector"):
        EngineConfig(model="none", enforce_eager=Vector())


def test_a_field_without_a_rule_can_not_exist():
    """Nor one whose value nobody checks."""
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Larger(EngineConfig):
        new_option: int = 0

    with pytest.raises(AssertionError, match="int.* has no rule"):
        Larger(model="none")


def test_configs_are_frozen():
    """What is only known later (the number of KV blocks) is never written into a config."""
    for config in (EngineConfig(model="none"), small_llama(), Rope()):
        for field in dataclasses.fields(config):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, field.name, 1)
