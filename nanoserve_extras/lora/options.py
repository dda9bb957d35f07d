"""How many adapters there may be at a time, and of which size."""

from dataclasses import dataclass

from nanoserve.frontend import rules
from nanoserve.frontend.rules import Options, option


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Options):
    """max_loras: adapters in memory at the same time. max_lora_rank: the largest rank of one."""

    enable_lora: bool = option(False, rules.FLAG)
    max_loras: int = option(1, rules.COUNT, "enable_lora")
    max_lora_rank: int = option(16, rules.COUNT, "enable_lora")
