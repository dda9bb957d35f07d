"""Prompts in all the forms that people send: the plain engine's `InputProcessor`, with more.

    nanoserve.inputs.InputProcessor    here
    requests_of                        a tokenizer's output (`BatchEncoding`); texts in one call
    read_dict                          vLLM's entries: cache_salt, and words that ask for nothing
    render_chat                        odd messages (messages.py), plain special tokens
                                       (plain_texts.py), tokenizers that write chats by code
    process                            salts, times (request.py)
    cut                                for who asks that long prompts are cut
    not_applied                        what of generation_config.json has no effect

Invariant: the padding of a prompt, where its attention mask is 0, is removed. A model that read it
would give another text, without an error.
"""

import re
from collections import UserDict
from collections.abc import Callable
from functools import partial
from os.path import commonprefix
from typing import NotRequired, TypedDict

from nanoserve import inputs as plain
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve.inputs import InputProcessor, check_conversation, is_token_id
from nanoserve.model_config import ModelConfig
from nanoserve.progress import say
from nanoserve_extras.base.plain_texts import PlainTexts
from nanoserve_extras.base.request import Request
from nanoserve_extras.base.template_forms import render_messages
from nanoserve_extras.base.vllm import in_our_words

Prompt = str | dict | list[int] | UserDict

# Entries of generation_config.json that are not applied: those that change texts unless they have
# this value, and those that never do.
NEUTRAL = dict(
    do_sample=True, max_length=20, min_length=0, no_repeat_ngram_size=0, epsilon_cutoff=0,
    encoder_no_repeat_ngram_size=0, eta_cutoff=0, diversity_penalty=0, penalty_alpha=0, num_beams=1,
    num_beam_groups=1, num_return_sequences=1, typical_p=1, encoder_repetition_penalty=1,
    length_penalty=1, guidance_scale=1, early_stopping=False, remove_invalid_values=False,
    token_healing=False)
WITHOUT_EFFECT = re.compile(
    "_.*|transformers_version|(bos|eos|pad|decoder_start)_token_id|.*cache.*|return_dict.*|output_.*|"
    "renormalize_logits|.*compile.*|is_assistant|(num_)?assistant_.*|prompt_lookup.*|use_mtp|"
    "max_matching_ngram_size|speculation_type|trust_remote_code|low_memory|prefill_chunk_size|"
    "target_lookbehind|continuous_batching_config|suppress_tokens")


class TextPrompt(TypedDict):
    """A text, which the engine tokenizes. (vLLM's name; a dict, as there.)"""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; the text, where there is one, is only repeated in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class Inputs(InputProcessor):
    """As `InputProcessor`, for more kinds of prompts and messages."""

    request_class = Request

    def __init__(self, config: EngineConfig, model_config: ModelConfig,
                 tokenizer: Tokenizer | None):
        super().__init__(config, model_config, tokenizer)
        self.plain: PlainTexts | None = None  # by default a special token in a message is one
        say(*self.not_applied())

    def split_special_tokens(self) -> None:
        """From here on those in messages are plain text. Raises `ValueError`."""
        if self.tokenizer is not None and not renders_by_code(self.tokenizer):
            self.plain = PlainTexts(self.tokenizer)

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams | None,
                priority: int = 0, lora_request: object = None) -> Request:
        """Raises `ValueError` as `InputProcessor` does, and for a wrong salt."""
        request = super().process(request_id, prompt, params, priority, lora_request)
        assert isinstance(request, Request)
        request.cache_salt, request.chat_template = salt_of(prompt), template_of(prompt)
        return request

    # ------------------------------------------------------------------- prompts

    def requests_of(self, prompts: Prompt | list[Prompt], **given: object) -> list[dict]:
        """Of a tokenizer's output, too; all texts are tokenised in one call."""
        return super().requests_of(self.tokenize(as_list(prompts)), **given)

    def tokenize(self, prompts: list[Prompt]) -> list[Prompt]:
        """The same prompts, with token ids added to texts: in one call, for which the library has
        threads, and equal texts once. A wrong prompt raises no error here but where it is read by
        itself, so that the error can name it."""
        texts = [_text_alone(prompt) for prompt in prompts]
        different = list(dict.fromkeys(filter(None, texts)))
        if len(different) < 2 or not callable(self.tokenizer):
            return prompts
        try:
            ids_of = dict(zip(different, self.tokenizer(different)["input_ids"], strict=True))
        except Exception:  # one of them is no valid text
            return prompts
        return [{"prompt": text, "prompt_token_ids": ids_of[text]} if text else prompt
                for text, prompt in zip(texts, prompts, strict=True)]

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        return super().read_prompt(
            one_encoded_prompt(prompt) if isinstance(prompt, UserDict) else prompt)

    def read_dict(self, prompt: dict) -> tuple[str | None, list[int] | None]:
        entries, more = ("prompt", "prompt_token_ids"), ("cache_salt", "chat_template")
        try:
            said = in_our_words("a prompt", "prompt", prompt, entries + more)
        except TypeError:  # a key that no prompt has
            said = prompt
        return super().read_dict({key: one for key, one in said.items() if key not in more})

    # --------------------------------------------------------------------- chats

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """A conversation through the chat template -> a prompt dict with text and token ids."""
        tokenizer = self.tokenizer_for("chat()")
        check_conversation(conversation)
        if renders_by_code(tokenizer):
            return self._render_by_code(tokenizer, conversation, template_options)
        self.check_template(template_options)
        options = template_options if self.plain is None else {
            name: one if name == "chat_template" else self.plain.broken(one)
            for name, one in template_options.items()}
        render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
        text = render_messages(conversation, self.plain.around(render) if self.plain else render,
                               options.get("tools"))
        # The template has written the special tokens, BOS included.
        ids = self.plain.encode(text) if self.plain else self.encode(
            text, add_special_tokens=False)
        return {"prompt": str(text), "prompt_token_ids": ids,
                "chat_template": options.get("chat_template")}

    def _render_by_code(self, tokenizer: Tokenizer, conversation: list[dict],
                        options: dict) -> dict:
        """By Mistral's own rules (tekken.json alone), which write ids: in their text special tokens
        can't be told from what a user wrote."""
        ids_of, said = {}, {name: one for name, one in options.items() if one is not None}

        def render(messages: list[dict], **tools) -> str:
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **said | tools)
            text = tokenizer.decode(ids, skip_special_tokens=False)
            ids_of[text] = ids
            return text

        text = render_messages(conversation, render, options.get("tools"))
        return {"prompt": text, "prompt_token_ids": ids_of[text]}

    # ------------------------------------------------------------------- the rest

    def cut(self, ids: list[int], count: int | None, side: str,
            read: Callable[[str], list[int]] | None = None) -> list[int]:
        """A prompt of `count` tokens at most (-1: as many as fit), whose text gives way at the
        `side`. A template, [CLS] and [SEP] stay: all that prompts of other texts have at their ends
        as well. read: makes a prompt of a text; None: the tokenizer. Raises `ValueError`."""
        limit = self.config.max_model_len
        if count is not None and count > limit:
            raise ValueError(f"truncate_prompt_tokens={count} is more than max_model_len={limit}")
        most = limit if count == -1 else count
        if most is None or len(ids) <= most:
            return ids
        read = read or (self.encode if self.tokenizer else lambda _: [])
        prompts = [ids, *map(read, "ab")]
        head = len(commonprefix(prompts))
        tail = len(commonprefix([prompt[head:][::-1] for prompt in prompts]))
        end, room = len(ids) - tail, most - head - tail
        if room < 1:
            raise ValueError(f"truncate_prompt_tokens: {most} tokens leave no room for the text, "
                             f"around which there are {head + tail}: ask for more")
        kept = ids[head:head + room] if side == "right" else ids[end - room:end]
        return ids[:head] + kept + ids[end:]

    def not_applied(self) -> list[str]:
        """The entries of generation_config.json that would change texts, and don't, as a line."""
        found = {name: value for name, value in self.model_config.generation_defaults.items()
                 if name not in plain.RECOMMENDED and not WITHOUT_EFFECT.fullmatch(name)
                 and value is not None and value != [] and value != NEUTRAL.get(name, {})}
        length = found.get("max_length")
        if isinstance(length, int) and length >= self.config.max_model_len:
            del found["max_length"]
        if all(len(word) == 1 for word in found.get("bad_words_ids", [])):
            found.pop("bad_words_ids", None)
        entries = ", ".join(f"{name}={value!r:.60}" for name, value in found.items())
        return [f"generation_config.json: not applied: {entries}"] * bool(found)


# ---------------------------------------------------------------------- prompts
# transformers' tokenizers return a `BatchEncoding`, which may hold several prompts:
#
#     tokenizer("Once upon a time")           tokenizer(["Once upon", "There was"], padding=True)


def as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """As nanoserve.inputs.as_list; a `BatchEncoding` is the list of its prompts."""
    if isinstance(prompts, UserDict):  # its class, without importing transformers for it
        return list(encoded_prompts(prompts))
    return plain.as_list(prompts)


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


def salt_of(prompt: Prompt) -> str | None:
    """The `cache_salt` of a prompt: its blocks are found by prompts with the same salt alone, so
    the time of an answer tells nobody else what was asked before. Raises `ValueError`."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r:.80}: leave it "
                         "out to share the prefix cache with everybody")
    return salt


def template_of(prompt: Prompt) -> str | None:
    """The chat template that wrote a prompt, if it was no tokenizer's own."""
    return prompt.get("chat_template") if isinstance(prompt, dict) else None


def renders_by_code(tokenizer: Tokenizer | None) -> bool:
    return getattr(tokenizer, "backend", None) == "mistral_common"


def _as_lists(values):
    """numpy's arrays and torch's tensors become lists; both call it `tolist`."""
    return values.tolist() if hasattr(values, "tolist") else values


def _text_alone(prompt: Prompt) -> str | None:
    """A prompt's text, if it has one and no token ids."""
    text = prompt.get("prompt") if isinstance(prompt, dict) and len(prompt) == 1 else prompt
    return text if isinstance(text, str) else None
