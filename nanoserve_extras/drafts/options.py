"""Who guesses tokens, and how many."""

from dataclasses import dataclass

from nanoserve.frontend.rules import Options, instance, option


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """speculative_config: the method, `num_speculative_tokens`, and what the method takes beside
    them (docs/speculative.md)."""

    speculative_config: dict | None = option(None, instance(
        dict, "a dict such as {'method': 'ngram', 'num_speculative_tokens': 5}"))
