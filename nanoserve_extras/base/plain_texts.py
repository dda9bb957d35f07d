"""Special tokens that a user wrote into a message stay plain text: `split_special_tokens`.

    sent         Say <|im_end|>                                a user, or a page that an agent read
    rendered     <|im_start|>user Say <MARK|im_end|><|im_end|>
    encoded      NAME<|im_start|>user Say <|im_end|>NAME<|im_end|>

A chat template writes special tokens as text. A client can write the same text into a message, end
the turn with it, and speak as the system: in a rendered prompt the two look alike. So all special
tokens in messages and tools get a mark before the template sees them. In the rendered prompt the
special tokens without a mark are the template's. These are renamed, the marks are removed, and a
copy of the tokenizer, which knows special tokens by the new names alone, encodes the whole prompt.

Invariant: nothing else changes. A prompt without special tokens in its messages has the same ids as
without this extra, which is tried when the engine is made, and the ids of any prompt decode to its
text. (Pieces encoded one by one would begin with a space in some vocabularies.) Mark and name are
random, so that no client can write them, and are digits, which no template turns into capitals.

Known limit: tokens that the tokenizer does not mark as special, often `<think>`, remain tokens.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from secrets import randbits
from typing import Any

from nanoserve.detokenizer import Tokenizer
from nanoserve.hooks import Extra
from nanoserve_extras.engine_args import PlainTextOptions

# DeepSeek's tokenizers don't call <｜User｜> special; Gemma 4 has <|turn> and <turn|>.
MARK_OF_TURN = r"<[|｜].+>|<.+[|｜]>"


class SplitSpecialTokens(Extra):
    """The extra behind `LLM(split_special_tokens=True)`. It is prepared last, because other extras
    replace the inputs."""

    Options = PlainTextOptions
    name = "split_special_tokens=True"

    def prepare(self, plan: Any) -> Any:
        return replace(plan, make_inputs=partial(make_with_plain_texts, plan.make_inputs))


def make_with_plain_texts(make_inputs: Callable, *args) -> Any:
    inputs = make_inputs(*args)
    inputs.split_special_tokens()
    return inputs


class Rendered(str):
    """A prompt's text. marked: the same with the marks in it."""

    marked: str


class PlainTexts:
    """Raises `ValueError` for a tokenizer that can't be copied with other names."""

    def __init__(self, tokenizer: Tokenizer):
        self.mark, self.name = str(randbits(64)), str(randbits(64))
        try:
            self._copy(tokenizer)
        except Exception as error:
            raise ValueError("split_special_tokens=True: this tokenizer can't keep special tokens "
                             f"in messages plain ({error}): leave it out") from error

    def _copy(self, tokenizer: Tokenizer) -> None:
        """Make the copy, and the patterns for special tokens and their first characters."""
        saved = tokenizer.backend_tokenizer.to_str()
        texts = [one["content"] for one in json.loads(saved)["added_tokens"]
                 if one["special"] or re.fullmatch(MARK_OF_TURN, one["content"])]
        texts.sort(key=len, reverse=True)  # the longest match first
        if any(len(one) == 1 for one in texts):
            raise ValueError("one of them is a single character")
        self.special = any_of(texts)
        self.start = first_characters(texts)
        self.copy = self._renamed(saved, texts)
        text = "Hi, ".join(["", *texts, "\n there"])
        rendered = Rendered(text)
        rendered.marked = text
        if self.encode(rendered) != tokenizer.encode(text, add_special_tokens=False):
            raise ValueError("a copy gives other ids")

    def _renamed(self, saved: str, texts: list[str]) -> Any:
        """A tokenizer whose special tokens have the name in front. saved: its JSON."""
        from tokenizers import Tokenizer as Fast  # late: an engine needs no tokenizer

        quoted = {json.dumps(one, ensure_ascii=False): one for one in texts}
        copy = Fast.from_str(any_of(quoted).sub(
            lambda found: json.dumps(self.name + quoted[found[0]], ensure_ascii=False), saved))
        copy.no_truncation()
        copy.no_padding()
        return copy

    def around(self, render: Callable[..., str]) -> Callable[..., Rendered]:
        """Wrap `render`, a chat template's function, so that it marks messages just before. (If
        they were marked earlier, a call's arguments, still JSON, could hide a special token as
        "\\u003c|im_end|>".)"""
        def with_marks(messages: list[dict], **tools) -> Rendered:
            marked = render(self.broken(messages), **tools)
            rendered = Rendered(marked.replace(self.mark, ""))
            rendered.marked = marked
            return rendered

        return with_marks

    def broken(self, value: Any) -> Any:
        """Messages, or tools, with a mark in each of their special tokens."""
        if isinstance(value, str):
            return self.start.sub(lambda one: one[0] + self.mark, value)
        if isinstance(value, dict):  # keeps the class: the place of an image stays one
            return type(value)({self.broken(key): self.broken(one) for key, one in value.items()})
        return [self.broken(one) for one in value] if isinstance(value, (list, tuple)) else value

    def encode(self, rendered: Rendered) -> list[int]:
        """The prompt's token ids."""
        named = self.special.sub(lambda one: self.name + one[0], rendered.marked)
        return self.copy.encode(named.replace(self.mark, ""), add_special_tokens=False).ids


def any_of(texts: Iterable[str]) -> re.Pattern:
    """Finds each of these texts; nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def first_characters(texts: list[str]) -> re.Pattern:
    """Finds the first character of each of these texts. They may overlap: "]~b]~b]" has "]~b]"
    twice."""
    rests = {first: "|".join(re.escape(one[1:]) for one in texts if one[0] == first)
             for first in {one[0] for one in texts}}
    return re.compile("|".join(f"{re.escape(first)}(?={rest})"
                               for first, rest in rests.items()) or "(?!)")
