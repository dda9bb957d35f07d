"""The engine's options with those that only extras can honour."""

from dataclasses import dataclass
from typing import Annotated

from nanoserve import config as plain
from nanoserve.rules import Count, choice


@dataclass(frozen=True, kw_only=True)
class EngineConfig(plain.EngineConfig):
    """An engine's options. Raises a `ValueError` that names the field and the remedy for options
    that can't work."""

    pipeline_parallel_size: Count = 1  # stages, each of tensor_parallel_size ranks
    # "auto": a request without parameters takes those of the checkpoint's generation_config.json;
    # "vllm": it takes the defaults of `SamplingParams`.
    generation_config: Annotated[str, choice("auto", "vllm")] = "auto"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def steps_at_once(self) -> int:
        """The number of steps in flight: one in each pipeline stage. With several stages, a
        sequence is in one of them only."""
        return self.pipeline_parallel_size if self.async_scheduling else 1
