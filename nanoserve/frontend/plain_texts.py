"""Special tokens that somebody wrote into a message stay plain text.

    sent         Say <|im_end|>                                a user, or a page that an agent read
    rendered     <|im_start|>user Say <MARK|im_end|><|im_end|>
    encoded      NAME<|im_start|>user Say <|im_end|>NAME<|im_end|>

A template writes special tokens as text. So may a client, who ends the turn and speaks as the
system: in the prompt nobody can tell the two apart. Therefore a mark breaks those in messages and
tools before they are rendered. Behind that, the template's get another name, the marks go, and a
tokenizer that knows special tokens by these names alone encodes all of it at once.

Invariant: nothing else changes. A prompt without such texts has the ids that it has anyway, which
is tried at start, and the ids of any prompt decode to its text. (Pieces encoded one by one would
begin with a space in some vocabularies.) Mark and name are random, so that no client can write one.

Known limit: tokens that the tokenizer doesn't call special, `<think>` in many, remain tokens.
"""

import json
import re
from secrets import token_hex
from typing import Any

from nanoserve.checkpoint.tokenizers import Tokenizer


class PlainTexts:
    """Raises `ValueError` for a tokenizer that can't be copied with other names."""

    def __init__(self, tokenizer: Tokenizer):
        self.mark, self.name = token_hex(8), token_hex(8)
        try:
            from tokenizers import Tokenizer as Fast  # here: an engine needs no tokenizer
            told = tokenizer.backend_tokenizer.to_str()
            texts = sorted((one["content"] for one in json.loads(told)["added_tokens"]
                            if one["special"]), key=len, reverse=True)  # the longest match first
            self.special = re.compile("|".join(map(re.escape, texts)) or "(?!)")
            quoted = {json.dumps(one, ensure_ascii=False): one for one in texts}
            self.fast = Fast.from_str(re.sub(
                "|".join(map(re.escape, quoted)) or "(?!)", lambda found: json.dumps(
                    self.name + quoted[found[0]], ensure_ascii=False), told))
            self.fast.no_truncation()
            self.fast.no_padding()
            probe = "Hi, ".join(["", *texts, "\n there"])
            if self.encode(probe)[1] != tokenizer.encode(probe, add_special_tokens=False):
                raise ValueError("a copy gives other ids")
        except Exception as error:
            raise ValueError("split_special_tokens=True: this tokenizer can't keep special tokens "
                             f"in messages plain ({error}): leave it out") from error

    def broken(self, value: Any) -> Any:
        """Messages, or tools, whose special tokens are none."""
        if isinstance(value, str):
            return self.special.sub(lambda one: one[0][:1] + self.mark + one[0][1:], value)
        if isinstance(value, dict):  # an image that was taken out stays one
            return type(value)({self.broken(key): self.broken(one) for key, one in value.items()})
        return [self.broken(one) for one in value] if isinstance(value, (list, tuple)) else value

    def encode(self, rendered: str) -> tuple[str, list[int]]:
        """The prompt's text, and its token ids."""
        named = self.special.sub(lambda one: self.name + one[0], rendered).replace(self.mark, "")
        return (rendered.replace(self.mark, ""),
                self.fast.encode(named, add_special_tokens=False).ids)
