"""What an engine will be made of, with what extras tell each other about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanoserve import llm as plain


@dataclass(frozen=True)
class Plan(plain.Plan):
    """As the plain engine's. Extras that write these fields need the extras' `LLM`."""

    make_pooler: Callable | None = None  # for a network that brings its own pooler
    network: str = "nanoserve"  # the author of its code
    draft_folder: Path | None = None  # a network that drafts: its KV lies in the same blocks
    notes: tuple[str, ...] = ()  # for the line at the start
