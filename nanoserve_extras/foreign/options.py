"""Whose network runs a checkpoint."""

from dataclasses import dataclass

from nanoserve.frontend.rules import Options, choice, option


@dataclass(frozen=True, kw_only=True)
class ForeignOptions(Options):
    """model_impl: "auto" is nanoserve's own network if it has one, else transformers'."""

    model_impl: str = option("auto", choice("auto", "nanoserve", "transformers"))
