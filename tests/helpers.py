"""What many tests need and what needs no torch."""

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

from nanoserve.config import SamplingParams
from nanoserve.hooks import Extra
from nanoserve.sequence import CoreRequest, Sequence

OF_REQUESTS = {field.name for field in dataclasses.fields(CoreRequest)}


def sequence(name: str, token_ids: list[int], params: SamplingParams | None = None,
             arrival: int = 0, **fields) -> Sequence:
    """A sequence with a request of its own, without an engine. Fields may be those of either."""
    params = params or SamplingParams()
    shared = {key: fields.pop(key) for key in OF_REQUESTS & set(fields)}
    if params.prompt_logprobs is not None and not fields.get("index"):
        fields.setdefault("num_prompt_logprobs", len(token_ids) - 1)
    return Sequence(CoreRequest(name, params, arrival, **shared), token_ids, **fields)


def assert_grows(seen: list[str]) -> None:
    """Nothing that was shown is ever taken back: so the pieces add up to the final text."""
    for shorter, longer in pairwise(seen):
        assert longer.startswith(shorter), (shorter, longer)


def write_json(path: Path, **changes) -> None:
    """Change entries of a JSON file, which may not be there yet; None removes one."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def storage(llm):
    """The `BlockStore` that keeps blocks outside an engine's KV cache."""
    from nanoserve_extras.block_store.block_store import BlockStore  # here: it imports torch
    return llm.extra(BlockStore)


def poisoned(llm, num_caches: int | None = None):
    """The engine, its KV cache NaN until it is written: reading one slot too many is then a wrong
    text and not a zero. num_caches: without those of a draft model, which may have gaps."""
    for cache in llm.runner.kv_cache[:num_caches]:
        for tensor in cache:
            tensor.fill_(math.nan)
    return llm


def watch_steps(llm) -> list:
    """The steps that are scheduled from now on."""
    steps, schedule = [], llm.scheduler.schedule
    llm.scheduler.schedule = lambda: steps.append(schedule()) or steps[-1]
    return steps


def hand_over(llm, **methods) -> Extra:
    """An extra with these methods, which the engine has from now on."""
    extra = type("Made", (Extra,), {name: staticmethod(call) for name, call in methods.items()})()
    llm.extras.append(extra)
    llm.hooks.keep(llm.extras)
    return extra


def take_away(llm, extra: Extra) -> None:
    llm.extras.remove(extra)
    llm.hooks.keep(llm.extras)
