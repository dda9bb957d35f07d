"""Whether a model pools, and how."""

from dataclasses import dataclass

from nanoserve.frontend import rules
from nanoserve.frontend.rules import Options, choice, option


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(Options):
    """runner: "auto" is what the checkpoint was made for. convert: what a generator becomes that
    pools. pooler_config: a `PoolerConfig`, or a dict with its fields."""

    runner: str = option("auto", choice("auto", "generate", "pooling"))
    convert: str = option("auto", choice("auto", "none", "embed", "classify", "reward"))
    pooler_config: object = option(None, rules.ANYTHING)

    def check_generates(self) -> None:
        """Raises `ValueError` for what has no effect on a generator."""
        for name, default in (("convert", "auto"), ("pooler_config", None)):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name}={value!r} has no effect on a generator: add "
                                 "runner='pooling', or leave it out")
