"""nanoserve: an LLM inference engine to read, run and change. Start with the README.

The names are loaded at their first use (PEP 562): the scheduler and everything that it imports run
without torch, so `import nanoserve.scheduler` must not import it.
"""

import os
from importlib import import_module

__version__ = "0.1.0"

# How often an idle OpenMP thread looks for work before it sleeps. OpenMP reads this when torch is
# loaded, so import nanoserve before torch. The default is 15 times as high: when another program
# needs a core, the threads of a step would wait longer than they compute.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# The engine's module of each public name.
_HOMES = {"LLM": "llm", "LLMEngine": "engine", "EngineConfig": "config", "SamplingParams": "config",
          "RequestOutputKind": "config", "RequestOutput": "request", "CompletionOutput": "request",
          "Logprob": "request", "ModelConfig": "model_config"}


def _homes() -> dict[str, str]:
    """The module of each public name: that of nanoserve_extras, if it is installed and has the
    name, or else the engine's."""
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
