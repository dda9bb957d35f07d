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


class Tokenizer(Protocol):
    """What the engine uses of a tokenizer, by transformers' names; any such object will do."""

    eos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict], *, tokenize: bool,
                            **options) -> str: ...


def load_tokenizer(folder: Path, *, optional: bool = False,
                   trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer in a folder.

    optional: None where there are no tokenizer files, as with random weights. Raises `ValueError`
    when it can't be loaded.
    """
    if optional and not any((*folder.glob("*token*"), *folder.glob("tekken.json"))):
        return None
    from transformers import AutoTokenizer  # here: a slow import, for engines with a tokenizer only
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if len(tokenizer) < 2:  # transformers makes an empty one up where there is none
            raise ValueError("it is empty: its files are missing")
        return tokenizer
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{folder}: the tokenizer can't be loaded ({error}): name another with "
                         "tokenizer=, or use skip_tokenizer_init=True and token ids") from error
