"""Prompts in all the forms that users send: the plain engine's `InputProcessor`, extended.

    nanoserve.inputs.InputProcessor    here
    list_prompts                       a tokenizer's output (`BatchEncoding`); texts in one call
    read_dict                          vLLM's entries: cache_salt, and names without effect
    render_chat                        odd messages (messages.py), plain special tokens
                                       (plain_texts.py), tokenizers that write chats by code
    process                            adapters, salts, times (request.py)
    read_params                        stop strings that are special tokens
    default_sampling_params            generation_config.json (generation_config.py)
    cut                                prompts that are too long, if the user wants them truncated

Invariant: the padding of a prompt, where its attention mask is 0, is removed. A model that read the
padding would write another text, without an error.
"""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from os.path import commonprefix
from typing import NotRequired, TypedDict

from nanoserve import inputs as plain
from nanoserve.config import SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve.inputs import InputProcessor, is_token_id
from nanoserve.model_config import ModelConfig
from nanoserve.progress import say
from nanoserve_extras.base.engine_config import EngineConfig
from nanoserve_extras.base.generation_config import (
    not_applied,
    params_of,
    read_suppressed,
    recommended,
)
from nanoserve_extras.base.plain_texts import PlainTexts
from nanoserve_extras.base.request import Request
from nanoserve_extras.base.template_forms import render_messages
from nanoserve_extras.base.vllm import in_our_words

Prompt = str | dict | list[int] | UserDict


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
    refused = ()

    def __init__(self, config: EngineConfig, model_config: ModelConfig,
                 tokenizer: Tokenizer | None):
        super().__init__(config, model_config, tokenizer)
        self.plain: PlainTexts | None = None  # by default special tokens in messages are tokens
        entries = model_config.generation_defaults
        self.suppressed = read_suppressed(entries, self.eos_ids, model_config.vocab_size)
        say(*not_applied(entries, config.max_model_len))

    def split_special_tokens(self) -> None:
        """From here on special tokens in messages are plain text. Raises `ValueError`."""
        if self.tokenizer is not None and not renders_by_code(self.tokenizer):
            self.plain = PlainTexts(self.tokenizer)

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams | None,
                priority: int = 0, lora_request: object = None) -> Request:
        """Raises `ValueError` as `InputProcessor` does, and for a wrong salt."""
        request = super().process(request_id, prompt, params, priority)
        assert isinstance(request, Request)
        request.lora_request = lora_request
        request.cache_salt, request.chat_template = salt_of(prompt), template_of(prompt)
        return request

    def check_generates(self) -> None:
        """Raises `ValueError` if the model writes no text; a subclass serves such models."""

    # ------------------------------------------------------------------- prompts

    def list_prompts(self, prompts: Prompt | list[Prompt]) -> list[Prompt]:
        """Also takes a tokenizer's output; all texts are tokenised in one call."""
        return self.tokenize(as_list(prompts))

    def tokenize(self, prompts: list[Prompt]) -> list[Prompt]:
        """The same prompts, with token ids added to texts. All texts are tokenised in one call, for
        which the library uses threads, and equal texts once. A wrong prompt raises no error here,
        but later, when it is read by itself and the error can name it."""
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

    def check_template(self, template_options: dict) -> None:
        """Raises `ValueError` if neither the caller nor the tokenizer has a chat template."""
        tokenizer = self.tokenizer_for("chat()")
        if not (template_options.get("chat_template") or tokenizer.chat_template):
            raise ValueError("the tokenizer has no chat template, as that of a base model, "
                             "which continues texts: pass chat_template= (--chat-template FILE), "
                             "use generate(), or install mistral-common for a tekken.json")

    def _render_by_code(self, tokenizer: Tokenizer, conversation: list[dict],
                        options: dict) -> dict:
        """A conversation by Mistral's own rules (tekken.json alone). They give token ids: in their
        text special tokens can't be told from a user's own words."""
        ids_of, said = {}, {name: one for name, one in options.items() if one is not None}

        def render(messages: list[dict], **tools) -> str:
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **said | tools)
            text = tokenizer.decode(ids, skip_special_tokens=False)
            ids_of[text] = ids
            return text

        text = render_messages(conversation, render, options.get("tools"))
        return {"prompt": text, "prompt_token_ids": ids_of[text]}

    # ---------------------------------------------------------------- parameters

    def recommended(self) -> dict:
        """Fields of `SamplingParams` for which generation_config.json has a value."""
        if self.config.generation_config != "auto":
            return {}
        return recommended(self.model_config.generation_defaults)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of generation_config.json, else the defaults of `SamplingParams`."""
        return params_of(self.recommended())

    def read_params(self, given: SamplingParams | None) -> SamplingParams:
        """The parameters, with token ids for those stop strings that are special tokens."""
        params = super().read_params(given)
        params.stop_token_ids = [*params.stop_token_ids, *self._stops_that_are_skipped(params)]
        return params

    def _stops_that_are_skipped(self, params: SamplingParams) -> list[int]:
        """The ids of the stop strings that are special tokens, such as "<|im_end|>". With
        `skip_special_tokens` they never appear in the text, so they must become stop tokens. Raises
        `ValueError` for a stop string of such a token and other text."""
        found: list[int] = []
        for stop in params.stop if params.skip_special_tokens else ():
            ids = self.encode(stop, "stop", add_special_tokens=False)
            shown = self.tokenizer.decode(ids, skip_special_tokens=True)
            whole = self.tokenizer.decode(ids, skip_special_tokens=False)
            if stop not in whole or stop in shown:
                continue
            if len(ids) > 1:
                raise ValueError(f"stop={stop!r} contains a special token, which the text never "
                                 "shows: use skip_special_tokens=False, or that token alone")
            found += ids
        return found

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        return self.suppressed + super().bad_word_ids(params)

    # ------------------------------------------------------------------- the rest

    def cut(self, ids: list[int], count: int | None, side: str,
            read: Callable[[str], list[int]] | None = None) -> list[int]:
        """Truncate a prompt to at most `count` tokens (-1: as many as fit) at one `side` of its
        text. The template, [CLS] and [SEP] stay: all tokens that the prompts of other texts have at
        their ends, too. read: makes a prompt of a text; None: the tokenizer. Raises `ValueError`.
        """
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


# ---------------------------------------------------------------------- prompts
# transformers' tokenizers return a `BatchEncoding`, which may hold several prompts:
#
#     tokenizer("Once upon a time")           tokenizer(["Once upon", "There was"], padding=True)


def as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """As nanoserve.inputs.as_list; a `BatchEncoding` becomes the list of its prompts."""
    if isinstance(prompts, UserDict):  # a `BatchEncoding` is one; importing transformers is slow
        return list(encoded_prompts(prompts))
    return plain.as_list(prompts)


def check_conversation(messages: object) -> None:
    """Raises `ValueError` for anything but a list of dicts."""
    if not isinstance(messages, (list, tuple)) or not all(
            isinstance(message, dict) for message in messages):
        raise ValueError("a conversation must be a list of dicts with 'role' and 'content', got "
                         f"{str(messages)[:80]!r}")


def encoded_prompts(encoding: UserDict) -> list[list[int]]:
    """The prompts of a `BatchEncoding`, without padding.

    Its values are lists, numpy arrays or tensors, of one prompt (n,) or of several (prompts, n).
    Raises `ValueError` if it has no "input_ids".
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
    """The prompt of a `BatchEncoding` that is one item of a list of prompts, or is one request's.
    """
    prompts = encoded_prompts(encoding)
    if len(prompts) != 1:
        raise ValueError(f"a tokenizer's output with {len(prompts)} prompts stands in the place of "
                         "one: pass it by itself to generate(), or one prompt at a time")
    return prompts[0]


def salt_of(prompt: Prompt) -> str | None:
    """The `cache_salt` of a prompt: its blocks are found only by prompts with the same salt, so
    response times do not tell other users what was asked before. Raises `ValueError`."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt must be a text that is not empty, got {salt!r:.80}: leave it "
                         "out to share the prefix cache with all requests")
    return salt


def template_of(prompt: Prompt) -> str | None:
    """The chat template that wrote a prompt, if it was not the tokenizer's own."""
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
