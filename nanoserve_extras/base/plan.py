"""The plan of an engine, with the fields by which extras add to it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanoserve import llm as plain


@dataclass(frozen=True)
class Plan(plain.Plan):
    """The plain engine's plan with more fields. Extras that set them need the extras' `LLM`."""

    make_pooler: Callable | None = None  # for a network that brings its own pooler
    network: str = "nanoserve"  # the author of its code
    draft_folder: Path | None = None  # a network that drafts: its KV lies in the same blocks
    notes: tuple[str, ...] = ()  # for the line at the start
