"""The tokenizer of a checkpoint: transformers' own, from the model's folder or from another one.

A tokenizer turns text into token ids and back, and knows the chat template. It is read by
transformers' `AutoTokenizer`, because every family has its own file formats and a library knows
them all.

Invariant: a tokenizer that can't be loaded is an error with a remedy, never an empty one.
transformers makes up an empty tokenizer where the files are missing, and every text would then be
encoded to nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nanoserve.checkpoint.hub import find_model


class Tokenizer(Protocol):
    """What the engine uses of a tokenizer, by transformers' names; any such object will do."""

    eos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict], *, tokenize: bool,
                            **options) -> str: ...


def load_tokenizer(folder: Path, name: str | None = None, *, optional: bool = False,
                   trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer in the model's `folder`, or the one that `name` names (a folder or a hub id).

    optional: None where there are no tokenizer files, as with random weights. Raises `ValueError`
    when it can't be loaded.
    """
    source = folder if not name else find_model(
        name, "tokenizer", weights=False, code=trust_remote_code)
    if optional and not any((*source.glob("*token*"), *source.glob("tekken.json"))):
        return None
    from transformers import AutoTokenizer  # here: a slow import, for engines with a tokenizer only
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        if len(tokenizer) < 2:  # transformers makes an empty one up where there is none
            raise ValueError("it is empty: its files are missing")
        return tokenizer
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{source}: the tokenizer can't be loaded ({error}): name another with "
                         "tokenizer=, or use skip_tokenizer_init=True and token ids") from error
