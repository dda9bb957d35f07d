"""How a request is checked and tokenised, before the engine sees it.

    str, dict, token ids ──read_prompt──┐
    conversation ──render_chat──────────┤
    SamplingParams ──checked against the vocabulary──► process ──► Request

A request is checked completely on its way in, so that the engine only ever meets requests that can
run: an error names the field, its value and the remedy, and no other request is affected.

Invariant: an `InputProcessor` holds a tokenizer and limits that never change. So a server can check
requests elsewhere while one thread owns the steps, or have a processor and a tokenizer of its own.

What needs neither a tokenizer nor a vocabulary is checked in config.py. A prompt that is too long
is not cut, nor a value that is too large clamped, as some servers do: the caller would get an
answer to another question.
"""

import re
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral
from os.path import commonprefix
from typing import NotRequired, TypedDict

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve.messages import render_messages
from nanoserve.model_config import ModelConfig
from nanoserve.plain_texts import PlainTexts
from nanoserve.request import Request, RequestStateStats
from nanoserve.rules import in_words
from nanoserve.vllm import in_our_words

# ---------------------------------------------------------------------- prompts
# What may be given as prompts: texts, token ids, dicts, what a tokenizer returns, and lists.
#
#     "Once upon a time"                      TextPrompt(prompt="Once upon a time")
#     [5, 9, 31]                              TokensPrompt(prompt_token_ids=[5, 9, 31])
#     tokenizer("Once upon a time")           tokenizer(["Once upon", "There was"], padding=True)
#
# The last two are transformers' `BatchEncoding`s. A `BatchEncoding` may hold several prompts, so it
# becomes a list before prompts are read one by one (`InputProcessor.read_prompt`).
#
# Invariant: the padding of a prompt, where its attention mask is 0, is removed. A model that read
# it would give another text, without an error.
#
# `TextPrompt` and `TokensPrompt` are vLLM's names; both are dicts, as there.

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


# Entries of generation_config.json: those that are applied where a request says nothing; those that
# are applied to every request; those that would change texts unless they have this value; and those
# that never do. All others are said at the start (`not_applied`).
RECOMMENDED = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
                   repetition_penalty="repetition_penalty", max_new_tokens="max_tokens",
                   min_new_tokens="min_tokens", stop_strings="stop")
FORBIDDING = ("suppress_tokens", "bad_words_ids")  # of the second only words of one token
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
    "target_lookbehind|continuous_batching_config")


class InputProcessor:
    """Tokenises and checks. config: resolved, with the `max_model_len` that the KV cache allows."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig,
                 tokenizer: Tokenizer | None):
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.suppressed = [[token_id] for token_id in self._read_suppressed()]
        is_asked = config.split_special_tokens and tokenizer is not None
        self.plain = PlainTexts(tokenizer) if is_asked and not _renders_by_code(tokenizer) else None

    def check_generates(self) -> None:
        """Raises `ValueError` where requests don't become text."""

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams | None,
                priority: int = 0, lora_request: object = None) -> Request:
        """Raises `ValueError` for an empty or over-long prompt, a token outside the vocabulary,
        or parameters out of range."""
        self.check_envelope(request_id, priority)
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        # A copy: making it checks the fields once more, because the caller may have changed them
        # since, and may change them again while the request runs.
        params = replace(params or self.default_sampling_params())
        text, ids = self.read_prompt(prompt)
        self._check_length(ids)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: use stop_token_ids")
        params.stop_token_ids = [*params.stop_token_ids, *self._stops_that_are_skipped(params)]
        self._check_vocabulary(params)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) == -1:  # all; from here on a number like any other
                setattr(params, name, self.model_config.vocab_size)
        bad_word_ids = self.suppressed + self._bad_word_ids(params.bad_words or [])
        # EOS too early is no use even where it ends nothing (ignore_eos), says vLLM.
        vocab_size = self.model_config.vocab_size  # some configs name an EOS beyond it
        late_ids = frozenset(i for i in (*params.stop_token_ids, *self._eos_ids())
                             if 0 <= i < vocab_size)
        _check_something_is_left(params, vocab_size, late_ids, bad_word_ids)
        longest = self.config.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(ids) + params.max_tokens)
        eos_ids = frozenset() if params.ignore_eos else frozenset(self._eos_ids())
        return Request(request_id, text, ids, params, priority, longest, eos_ids, late_ids,
                       bad_word_ids, self.tokenizer, lora_request, salt_of(prompt),
                       chat_template=template_of(prompt),
                       stats=RequestStateStats(arrival_time=time.time()))

    def _check_length(self, ids: list[int]) -> None:
        """With 1,024: a prompt of 1,023 leaves room for one token, 1,024 for none."""
        limit = self.config.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and this model's maximum context length is "
                f"{limit} tokens, prompt and at least one output token together: shorten the "
                "prompt, or raise max_model_len (and kv_cache_memory_bytes, if the KV cache is "
                "what limits it)")

    def check_envelope(self, request_id: str, priority: int) -> None:
        """Check what every kind of request has. (As in vLLM, a priority may be said to an engine
        of another policy; no text depends on it.)"""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a str, got {request_id!r:.80}")
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, got {priority!r:.80}")

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Token ids must be in the vocabulary: on a GPU a wrong index ends the whole process."""
        size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= size:
                    raise ValueError(f"{name} names token {token_id}, which is outside the "
                                     f"vocabulary of {size} (0 to {size - 1}): leave it out")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise ValueError(f"{name}={getattr(params, name)} is more than the vocabulary has: "
                                 f"use at most {size}, or -1 for all")

    def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Each word as tokens, bare and with a space in front, which is another token for most
        tokenizers. (vLLM passes over the second where it has another number of tokens; here it is
        passed over only where it ends with the first, which bans it anyway.)"""
        found: list[list[int]] = []
        for word in words:
            what = f"bad_words={words!r}"
            bare = self._encode(word.lstrip(), what, add_special_tokens=False)
            spaced = self._encode(" " + word.lstrip(), what, add_special_tokens=False)
            if not bare or max(bare + spaced) >= self.model_config.vocab_size:
                raise ValueError(f"{what}: {word!r} is no text of the model's tokens, leave it out")
            found.append(bare)
            if spaced[-len(bare):] != bare:
                found.append(spaced)
        return found

    def recommended(self) -> dict:
        """Fields of `SamplingParams` for which generation_config.json has a value."""
        defaults = self.model_config.generation_defaults
        is_asked = self.config.generation_config == "auto"
        return {ours: defaults[theirs] for theirs, ours in RECOMMENDED.items()
                if is_asked and defaults.get(theirs) is not None}

    def default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        found = self.recommended()
        try:
            params = SamplingParams(**{"max_tokens": None} | found)
        except ValueError as error:
            raise ValueError("generation_config.json recommends what can't be used "
                             f"({error}): pass sampling_params") from error
        if "max_tokens" not in found:
            params.max_tokens = max(SamplingParams.max_tokens, params.min_tokens)
        return params

    def _read_suppressed(self) -> list[int]:
        """Tokens that no text has, whatever a request asks for: `suppress_tokens` of
        generation_config.json, and of its `bad_words_ids` those that are one token and no EOS. As
        in transformers, ids outside the vocabulary forbid nothing."""
        found = self.model_config.generation_defaults
        with in_words(f"generation_config.json: {' and '.join(FORBIDDING)} must be lists of token "
                      "ids, and of such lists", TypeError):
            ids, words = (list(found.get(name) or []) for name in FORBIDDING)
            words = [list(word) for word in words]
            ids += [word[0] for word in words if len(word) == 1 and word[0] not in self._eos_ids()]
            if any(type(i) is not int for i in ids):
                raise TypeError(f"got {ids!r:.80}")
        return [i for i in dict.fromkeys(ids) if 0 <= i < self.model_config.vocab_size]

    def not_applied(self) -> list[str]:
        """The entries of generation_config.json that would change texts, and don't, as a line."""
        entries, applied = self.model_config.generation_defaults, {*RECOMMENDED, *FORBIDDING}
        if any(len(word) != 1 for word in entries.get("bad_words_ids") or []):
            applied.remove("bad_words_ids")
        found = {name: value for name, value in entries.items()
                 if name not in applied and not WITHOUT_EFFECT.fullmatch(name)
                 and value is not None and value != [] and value != NEUTRAL.get(name, {})}
        length = found.get("max_length")
        if isinstance(length, int) and length >= self.config.max_model_len:
            del found["max_length"]
        listed = ", ".join(f"{name}={value!r:.60}" for name, value in found.items())
        return [f"generation_config.json: not applied: {listed}"] * bool(found)

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms -> its text, if it has one, and its token ids.

        Text gets the special tokens that the tokenizer wants in front (BOS, for Llama); ids are
        taken as they are. A dict with both keeps its text for the output and computes its ids.
        """
        text, ids = None, prompt
        if isinstance(prompt, str):
            text, ids = prompt, None
        elif isinstance(prompt, dict):
            text, ids = self._read_dict(prompt)
        elif isinstance(prompt, UserDict):
            ids = one_encoded_prompt(prompt)
        if ids is None:
            if not isinstance(text, str) or not text:
                raise ValueError(f"the prompt is empty or no text: {text!r}")
            ids = self._encode(text)
        if not isinstance(ids, (list, tuple)) or not all(map(is_token_id, ids)):
            raise ValueError(f"a prompt must be a str, a dict or a list of token ids, got "
                             f"{type(prompt).__name__}: {str(prompt)[:80]}")
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        vocab_size = self.model_config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise ValueError(f"token id {wrong} of the prompt is outside the vocabulary of "
                             f"{vocab_size} (0 to {vocab_size - 1})")
        return text, [int(i) for i in ids]

    def _read_dict(self, prompt: dict) -> tuple[str | None, list[int] | None]:
        """`TextPrompt`, `TokensPrompt`, or both in one."""
        try:
            known = in_our_words("a prompt", "prompt", prompt,
                                 ("prompt", "prompt_token_ids", "cache_salt", "chat_template"))
        except TypeError:  # a key that no template takes
            known = {}
        text, ids = known.get("prompt"), known.get("prompt_token_ids")
        if text is None and ids is None:
            raise ValueError("a prompt dict takes 'prompt' or 'prompt_token_ids', got "
                             f"{sorted(map(str, prompt))}")
        return text, ids

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

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """A conversation through the chat template -> a prompt dict with text and token ids."""
        tokenizer = self.tokenizer_for("chat()")
        if not isinstance(conversation, (list, tuple)) or not all(
                isinstance(message, dict) for message in conversation):
            raise ValueError("a conversation must be a list of dicts with 'role' and 'content', "
                             f"got {str(conversation)[:80]!r}")
        if _renders_by_code(tokenizer):
            return self._render_by_code(conversation, template_options)
        if not (template_options.get("chat_template") or tokenizer.chat_template):
            raise ValueError("the tokenizer has no chat template: pass chat_template=, use "
                             "generate(), or install mistral-common for a tekken.json")
        options = template_options if self.plain is None else {
            name: one if name == "chat_template" else self.plain.broken(one)
            for name, one in template_options.items()}
        render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
        text = render_messages(conversation, self.plain.around(render) if self.plain else render,
                               options.get("tools"))
        # The template has written the special tokens, BOS included.
        ids = self.plain.encode(text) if self.plain else self._encode(
            text, add_special_tokens=False)
        return {"prompt": str(text), "prompt_token_ids": ids,
                "chat_template": options.get("chat_template")}

    def _render_by_code(self, conversation: list[dict], options: dict) -> dict:
        """By Mistral's own rules (tekken.json alone), which write ids: of their text nobody could
        tell what is a special token."""
        ids_of, said = {}, {name: one for name, one in options.items() if one is not None}

        def render(messages: list[dict], **tools) -> str:
            ids = self.tokenizer.apply_chat_template(messages, return_dict=False, **said | tools)
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            ids_of[text] = ids
            return text

        text = render_messages(conversation, render, options.get("tools"))
        return {"prompt": text, "prompt_token_ids": ids_of[text]}

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
        read = read or (self._encode if self.tokenizer else lambda _: [])
        prompts = [ids, *map(read, "ab")]
        head = len(commonprefix(prompts))
        tail = len(commonprefix([prompt[head:][::-1] for prompt in prompts]))
        end, room = len(ids) - tail, most - head - tail
        if room < 1:
            raise ValueError(f"truncate_prompt_tokens: {most} tokens leave no room for the text, "
                             f"around which there are {head + tail}: ask for more")
        kept = ids[head:head + room] if side == "right" else ids[end - room:end]
        return ids[:head] + kept + ids[end:]

    def _encode(self, text: str, what: str = "a text prompt",
                add_special_tokens: bool = True) -> list[int]:
        try:
            return self.tokenizer_for(what).encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # raised by the tokenizer for a str without a UTF-8 form
            raise ValueError(f"{what} is no valid text, a lone surrogate? {text!r}") from error

    def tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none: use token ids, "
                             "or name one with tokenizer= (and without skip_tokenizer_init)")
        return self.tokenizer

    def _eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's and those of both files: all of them end a text, as in vLLM.

        Often there are several: a chat model ends a turn with one and a document with another. A
        fine-tuned one may name its turn's end in its tokenizer alone.
        """
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return (*self.model_config.eos_token_ids, *(() if eos is None else (eos,)))

    def _stops_that_are_skipped(self, params: SamplingParams) -> list[int]:
        """Stop strings that are special tokens never get into the text, so the token is what stops
        it. Raises `ValueError` for a stop string of more than such a token."""
        found: list[int] = []
        for stop in params.stop if params.skip_special_tokens else ():
            ids = self._encode(stop, "stop", add_special_tokens=False)
            shown, whole = (self.tokenizer_for("stop").decode(ids, skip_special_tokens=skip)
                            for skip in (True, False))
            if stop not in whole or stop in shown:
                continue
            if len(ids) > 1:
                raise ValueError(f"stop={stop!r} contains a special token, which the text never "
                                 "shows: use skip_special_tokens=False, or that token alone")
            found += ids
        return found


def _renders_by_code(tokenizer: Tokenizer) -> bool:
    return getattr(tokenizer, "backend", None) == "mistral_common"


def _check_something_is_left(params: SamplingParams, vocab_size: int, late_ids: frozenset[int],
                             bad_word_ids: list[list[int]]) -> None:
    """Refuse params with which all logits of a step could become -inf.

    A bad word is counted as if its last token were banned all the time, unless it contains a token
    that is not allowed. This also refuses some params that would work (two allowed tokens, each
    banned behind the other). But it is simple, and always safe.
    """
    allowed = set(params.allowed_token_ids or ())
    words = [word for word in bad_word_ids if not allowed or allowed.issuperset(word)]
    banned = {word[-1] for word in words}
    if params.min_tokens:
        banned |= late_ids
    num_left = len(allowed - banned) if allowed else vocab_size - len(banned)
    if num_left <= 0:
        raise ValueError(
            f"allowed_token_ids={str(params.allowed_token_ids):.80}, bad_words="
            f"{str(params.bad_words):.80} and min_tokens={params.min_tokens} leave no token that "
            "is always possible (min_tokens rules out EOS and stop_token_ids, a bad word its last "
            "token, generation_config.json its suppress_tokens): allow another token")


def _text_alone(prompt: Prompt) -> str | None:
    """A prompt's text, if it has one and no token ids."""
    text = prompt.get("prompt") if isinstance(prompt, dict) and len(prompt) == 1 else prompt
    return text if isinstance(text, str) else None
