"""How much memory copies of recurrent states take."""

from dataclasses import dataclass

from nanoserve.frontend import rules
from nanoserve.frontend.rules import Options, option


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(Options):
    """snapshot_bytes: for states behind cached blocks. `None`: a share of the KV cache's memory."""

    snapshot_bytes: int | None = option(None, rules.SIZE)
