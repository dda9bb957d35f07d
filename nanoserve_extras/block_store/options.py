"""How much memory and disk blocks may take that the KV cache evicts."""

from dataclasses import dataclass

from nanoserve.frontend import rules
from nanoserve.frontend.rules import Options, option


@dataclass(frozen=True, kw_only=True)
class BlockStoreOptions(Options):
    """kv_offload_bytes: host memory for blocks. kv_store: a folder for them, in which they outlive
    the engine. kv_store_bytes: the most that is in this folder."""

    kv_offload_bytes: int = option(0, rules.SIZE)
    kv_store: str | None = option(None, rules.PATH)
    kv_store_bytes: int = option(8 * 2 ** 30, rules.COUNT, "kv_store")
