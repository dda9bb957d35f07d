"""Where the layers are."""

from dataclasses import dataclass

from nanoserve.frontend.rules import Options, instance, number, option


@dataclass(frozen=True, kw_only=True)
class LayerPlanOptions(Options):
    """layer_plan: a list has how many layers each stage has, a dict how many are on disk. max_wait:
    seconds in which a server gathers prompts, so that layers are read once for all of them."""

    layer_plan: dict | list | None = option(None, instance(
        (dict, list), "how many layers each rank has, as [12, 16], or those that stay on disk, as "
        "{'disk': 8}"))
    max_wait: float = option(0.0, number(0, 3600), "layer_plan")
