"""How weights are stored in memory."""

from dataclasses import dataclass

from nanoserve.frontend.rules import Options, Rule, choice, option


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Options):
    """quantization: "int8" and "int4" round any checkpoint; "dequantize" restores the numbers of a
    quantised one, which is also what `None` does."""

    quantization: str | None = option(None, Rule(
        "dequantize, int8 or int4 (a quantised checkpoint's format, fp8 say, is in its "
        "config.json: leave it out)", choice("dequantize", "int8", "int4").keep))
