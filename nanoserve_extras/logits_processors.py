"""Logits processors of all requests: `LLM(logits_processors=[...])`, and vLLM's classes of them.

    LLM(logits_processors=[Mine])              --logits-processors module:Mine
    SamplingParams(extra_args={"target": 67})  "vllm_xargs": {"target": 67}     what a request asks

An entry is a function or a class, as in `SamplingParams(logits_processors=[...])` (controls.py), or
"module:NAME", or a class of one of vLLM's two kinds, which reads `params.extra_args` of a request.
Each sequence gets an object of its own:

    AdapterLogitsProcessor    what its `new_req_logits_processor(params)` makes; None: nothing
    LogitsProcessor           an object of the class; its batch is this one sequence, in row 0

Invariant: a sequence's text does not depend on other sequences, on drafts or lost steps, because
the engine copies these objects as it copies those of `SamplingParams`. Known limits: the variables
of a closure can't be copied, so state must be kept in an object; and processors that never change
the argmax run before the temperature, where vLLM runs them after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any

import torch

from nanoserve.config import SamplingParams
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.request import Request
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.words import in_words
from nanoserve_extras.engine_args import LogitsProcessorOptions

# ---------------------------------------------------------------------- vLLM's words

RequestLogitsProcessor = Callable[..., torch.Tensor]


class MoveDirectionality(Enum):
    """How a request changes its row in vLLM's batch. Here it stays in row 0."""

    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in the batch. added: (row, params, prompt, output); the output grows."""

    batch_size: int
    removed: list[int] = field(default_factory=list)
    added: list[tuple[int, SamplingParams, list[int], list[int]]] = field(default_factory=list)
    moved: list[tuple[int, int, MoveDirectionality]] = field(default_factory=list)


class LogitsProcessor:
    """The base of classes that edit the logits of a whole batch. vllm_config: here the engine's
    `EngineConfig`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for a request that this processor can't serve."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note the rows that were added. None: no row was added, but outputs have grown."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """The base of classes that give each request a function."""

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        raise NotImplementedError


def process_dict_updates(entries: dict[int, Any], update: BatchUpdate | None,
                         new_state: Callable) -> bool:
    """Keep `entries`, row -> state, up to date. new_state: a function of (params, prompt, output)
    that returns a row's state, or None if it needs none. Returns whether anything may have
    changed."""
    for row, *request in [] if update is None else update.added:
        state = new_state(*request)
        entries.pop(row, None)
        if state is not None:
            entries[row] = state
    return update is not None


# ---------------------------------------------------------------------- one sequence's objects


class Ids(list[int]):
    """Token ids, whose deep copy is quick, because numbers need not be copied."""

    def __deepcopy__(self, memo: dict) -> "Ids":
        return Ids(self)


class Adapted:
    """The function that a vLLM adapter made for one sequence. It takes the output, or the prompt
    and the output."""

    def __init__(self, make: Callable, params: SamplingParams, prompt: list[int]):
        self.function, self.prompt = make(params), Ids(prompt)
        self.takes_prompt = len(signature(self.function).parameters) == 3

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        prompt = [self.prompt] if self.takes_prompt else []
        return self.function(*prompt, token_ids, logits)


class BatchOfOne:
    """An object of a vLLM `LogitsProcessor`, to which one sequence is the whole batch."""

    def __init__(self, make: Callable, params: SamplingParams, prompt: list[int]):
        self.processor, self.output = make(), Ids()
        self.processor.update_state(BatchUpdate(1, added=[(0, params, Ids(prompt), self.output)]))

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if token_ids:
            self.output[:] = token_ids
            self.processor.update_state(None)
        return self.processor.apply(logits[None])[0]


# ---------------------------------------------------------------------- the extra


class LogitsProcessors(Extra):
    """The extra behind `LLM(logits_processors=[...])`: puts these processors in front of each
    request's own."""

    Options = LogitsProcessorOptions
    name = "logits_processors=[...]"
    needs = frozenset([Fact.GENERATES])
    takes = ("extra_args",)

    def attach(self, engine: LLMEngine) -> None:
        """Make the objects of vLLM's classes, which take the config and the device."""
        device = engine.runner.device
        given = engine.config, device, device.type == "cuda"
        self.entries = []  # objects of vLLM's classes; other functions and classes as given
        for one in self.options.logits_processors or ():
            if is_vllms(one):
                with in_words(f"logits_processors: {one.__name__}"):
                    one = one(*given)
            self.entries.append(one)
        self.given = given

    def check(self, request: Request) -> None:
        """Add this request's functions and classes. Raises `ValueError` if a vLLM class refuses the
        parameters."""
        params, prompt = request.params, request.prompt_token_ids
        added = []
        for one in self.entries:
            if not is_vllms(type(one)):
                added.append(one)
                continue
            with in_words(f"logits_processors: {type(one).__name__}"):
                if hasattr(one, "validate_params"):
                    one.validate_params(params)
                if not hasattr(one, "new_req_logits_processor"):
                    make = partial(type(one), *self.given)
                    added.append(partial(BatchOfOne, make, params, prompt))
                elif one.new_req_logits_processor(params) is not None:
                    added.append(partial(Adapted, one.new_req_logits_processor, params, prompt))
        request.core = replace(request.core, added_processors=[
            *request.core.added_processors, *added])


def is_vllms(kind: Any) -> bool:
    """Whether `kind` is a class of one of vLLM's two kinds, whatever its base class is."""
    return isinstance(kind, type) and (hasattr(kind, "new_req_logits_processor")
                                       or hasattr(kind, "update_state"))
