"""nanoserve: an LLM inference engine to read, run and change. Start with the README.

The names are loaded when they are first used (PEP 562), so that `import nanoserve.scheduler` does
not import torch: the scheduler and everything that it imports run without torch.
"""

import os
from importlib import import_module

__version__ = "0.1.0"

# How often an idle OpenMP thread looks for work before it sleeps. torch's library reads this when
# it is loaded, so import nanoserve before torch. The default is 15 times as many: where another
# program needs a core, a step's threads would wait longer than they compute.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_HOMES = {"LLM": "llm", "LLMEngine": "engine", "EngineConfig": "config", "SamplingParams": "config",
          "RequestOutputKind": "config", "RequestOutput": "request", "CompletionOutput": "request",
          "Logprob": "request", "ModelConfig": "model_config"}


def _homes() -> dict[str, str]:
    """The module of each name: the extras' one, if they are there and have it, or the engine's."""
    homes = {name: f"nanoserve.{module}" for name, module in _HOMES.items()}
    try:
        import nanoserve_extras
    except ModuleNotFoundError:
        return homes
    return homes | {name: f"nanoserve_extras.{module}"
                    for name, module in nanoserve_extras.NAMES.items()}


def __getattr__(name: str):
    homes = _homes()
    if name == "__all__":
        return [*homes]
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_homes()])
