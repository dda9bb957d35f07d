"""What may be given as prompts: texts, token ids, dicts, what a tokenizer returns, and lists.

    "Once upon a time"                      TextPrompt(prompt="Once upon a time")
    [5, 9, 31]                              TokensPrompt(prompt_token_ids=[5, 9, 31])
    tokenizer("Once upon a time")           tokenizer(["Once upon", "There was"], padding=True)

The last two are transformers' `BatchEncoding`s. A `BatchEncoding` may hold several prompts, so it
becomes a list before prompts are read one by one (`InputProcessor.read_prompt`).

Invariant: the padding of a prompt, where its attention mask is 0, is removed. A model that read it
would give another text, without an error.

`TextPrompt` and `TokensPrompt` are vLLM's names; both are dicts, as there.
"""

from collections import UserDict
from numbers import Integral
from typing import NotRequired, TypedDict

Prompt = str | dict | list[int] | UserDict


class TextPrompt(TypedDict):
    """A text, which the engine tokenizes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; the text, where there is one, is only repeated in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def is_token_id(value: object) -> bool:
    """Whether `value` is a whole number, numpy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt alone is a list of one; a list of token ids is one prompt."""
    if isinstance(prompts, UserDict):  # a `BatchEncoding`, without importing transformers for it
        return list(encoded_prompts(prompts))
    if not isinstance(prompts, (str, dict, list, tuple)):
        raise ValueError(f"prompts must be a str, a dict or a list, got {type(prompts).__name__}")
    many = isinstance(prompts, (list, tuple)) and not (prompts and is_token_id(prompts[0]))
    return list(prompts) if many else [prompts]


def conversations(messages: list) -> list:
    """One conversation alone, a list of dicts, is a list of one."""
    many = isinstance(messages, (list, tuple)) and not any(
        isinstance(message, dict) for message in messages)
    return list(messages) if many else [messages]


def one_for_each(value: object, count: int, name: str) -> list:
    """Broadcast a single value; a list must have one entry for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for each, "
                         "or a single one for all")
    return list(value)


def salt_of(prompt: Prompt) -> str | None:
    """The `cache_salt` of a prompt: its blocks are found by prompts with the same salt alone, so
    nobody else learns by the time of an answer what was asked before. Raises `ValueError`."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r:.80}: leave it "
                         "out to share the prefix cache with everybody")
    return salt


def template_of(prompt: Prompt) -> str | None:
    """The chat template that wrote a prompt, if it was no tokenizer's own."""
    return prompt.get("chat_template") if isinstance(prompt, dict) else None


def encoded_prompts(encoding: UserDict) -> list[list[int]]:
    """The prompts of a `BatchEncoding`, without padding.

    Its values are lists, numpy arrays or tensors, of one prompt (n,) or of several (prompts, n).
    Raises `ValueError` where it holds no "input_ids".
    """
    if "input_ids" not in encoding:
        raise ValueError("a prompt that a tokenizer made needs 'input_ids', got "
                         f"{sorted(map(str, encoding))}")
    ids = _as_lists(encoding["input_ids"])
    masks = _as_lists(encoding.get("attention_mask"))
    if not ids or is_token_id(ids[0]):
        ids, masks = [ids], masks and [masks]
    if not masks:
        return ids
    return [[id_ for id_, is_read in zip(*row, strict=True) if is_read]
            for row in zip(ids, masks, strict=True)]


def one_encoded_prompt(encoding: UserDict) -> list[int]:
    """The prompt of a `BatchEncoding` that stands in a list of prompts, or is added by itself."""
    prompts = encoded_prompts(encoding)
    if len(prompts) != 1:
        raise ValueError(f"a tokenizer's output with {len(prompts)} prompts stands in the place of "
                         "one: pass it by itself to generate(), or one prompt at a time")
    return prompts[0]


def _as_lists(values):
    """numpy's arrays and torch's tensors become lists; both call it `tolist`."""
    return values.tolist() if hasattr(values, "tolist") else values
