"""A request's way in: prompts are tokenised, and all is checked, before the engine gets a request.

    conversation ──render_chat──► dict ─┐
    str, dict, token ids ───────────────┴─read_prompt──┐
    SamplingParams ──read_params───────────────────────┴─► process ──► Request

Invariant: a request is checked completely, so the engine only meets requests that can run. An error
names the field, its value and the remedy, and no other request is affected. An `InputProcessor` is
never changed, so any number of threads can use one.

What needs neither a tokenizer nor a vocabulary is checked in config.py. Known limits: a message's
content is a text, a request without parameters gets the defaults of `SamplingParams`, and a stop
string that is a special token is never found in a text without special tokens
(nanoserve_extras/base/inputs.py knows more). Road not taken: some servers cut a prompt that is too
long and clamp a value that is too large. Here both are refused, because the caller would get an
answer to another question.
"""

import time
from dataclasses import replace
from numbers import Integral

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve.model_config import ModelConfig
from nanoserve.request import Request
from nanoserve.sequence import CoreRequest

# "Once upon a time", [5, 9, 31], {"prompt": "Once upon a time"}, {"prompt_token_ids": [5, 9, 31]}
Prompt = str | dict | list[int]


class InputProcessor:
    """Makes checked requests. config: resolved, with the `max_model_len` that fits the KV cache."""

    request_class = Request  # what `process` makes; a subclass may add fields
    # Fields of `SamplingParams` that only an extra can honour; its `InputProcessor` takes them.
    refused: tuple[str, ...] = ("structured_outputs", "thinking_token_budget", "extra_args")

    def __init__(self, config: EngineConfig, model_config: ModelConfig,
                 tokenizer: Tokenizer | None):
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams | None,
                priority: int = 0) -> Request:
        """Make a request. Raises `ValueError` for an empty or over-long prompt, a token outside the
        vocabulary, or parameters out of range."""
        self.check_envelope(request_id, priority)
        text, ids = self.read_prompt(prompt)
        self._check_length(ids)
        params = self.read_params(params)
        late_ids = self._late_ids(params)
        bad_word_ids = self.bad_word_ids(params)
        self._check_something_is_left(params, late_ids, bad_word_ids)
        eos_ids = frozenset() if params.ignore_eos else frozenset(self.eos_ids)
        longest = self.config.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(ids) + params.max_tokens)
        core = CoreRequest(
            request_id, params, priority=priority, arrival_time=time.time(),
            max_num_tokens=longest, stop_ids=eos_ids.union(params.stop_token_ids), eos_ids=eos_ids,
            late_ids=late_ids, bad_word_ids=bad_word_ids)
        tokenizer = self.tokenizer if params.detokenize else None
        return self.request_class(request_id, core, params, text, ids, tokenizer)

    def check_envelope(self, request_id: str, priority: int) -> None:
        """Check the arguments that every kind of request has. (As in vLLM, a priority is accepted
        with any scheduling policy; only "priority" uses it.)"""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a str, got {request_id!r:.80}")
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, got {priority!r:.80}")

    # ------------------------------------------------------------------- prompts

    def list_prompts(self, prompts: Prompt | list[Prompt]) -> list[Prompt]:
        """A list of prompts. One prompt becomes a list of one; token ids are one prompt."""
        return as_list(prompts)

    def arguments_of(self, count: int, given: dict[str, object]) -> list[dict]:
        """The arguments of each of `count` prompts. given: by name, a value for all prompts or a
        list with one for each."""
        rows: list[dict] = [{} for _ in range(count)]
        for name, value in given.items():
            for row, own in zip(rows, one_for_each(value, count, name), strict=True):
                row[name] = own
        return rows

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt in any form (None if it has no text) and its token ids.

        Text gets the special tokens that the tokenizer wants in front (BOS, for Llama); ids are
        taken as they are. Of a dict with both, the ids are computed; the text is only for the
        output.
        """
        text, ids = None, prompt
        if isinstance(prompt, dict):
            text, ids = self.read_dict(prompt)
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if not isinstance(text, str) or not text:
                raise ValueError(f"the prompt is empty or no text: {text!r}")
            ids = self.encode(text)
        return text, self._check_ids(ids)

    def read_dict(self, prompt: dict) -> tuple[str | None, list[int] | None]:
        """The text and the token ids in a prompt dict, either of which may be missing."""
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        has_other_keys = prompt.keys() - {"prompt", "prompt_token_ids"}
        if has_other_keys or (text is None and ids is None):
            raise ValueError("a prompt dict takes 'prompt' or 'prompt_token_ids', got "
                             f"{sorted(map(str, prompt))}")
        return text, ids

    def _check_ids(self, ids: list[int]) -> list[int]:
        if not isinstance(ids, (list, tuple)) or not all(map(is_token_id, ids)):
            raise ValueError(f"a prompt must be a str, a dict or a list of token ids, got "
                             f"{type(ids).__name__}: {str(ids)[:80]}")
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        vocab_size = self.model_config.vocab_size
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token id {token_id} of the prompt is outside the vocabulary of "
                                 f"{vocab_size} (0 to {vocab_size - 1})")
        return [int(i) for i in ids]

    def _check_length(self, ids: list[int]) -> None:
        """Refuse a prompt that leaves no room for an output token. With a `max_model_len` of 1,024,
        1,023 tokens leave room for one."""
        limit = self.config.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and this model's maximum context length is "
                f"{limit} tokens, prompt and at least one output token together: shorten the "
                "prompt, or raise max_model_len (and kv_cache_memory_bytes, if the KV cache is "
                "what limits it)")

    def render_chats(self, messages: list, **template_options) -> list[dict]:
        """A prompt for each conversation. messages: one conversation, which is a list of dicts, or
        a list of conversations."""
        is_one = not isinstance(messages, (list, tuple)) or any(
            isinstance(message, dict) for message in messages)
        conversations = [messages] if is_one else messages
        return [self.render_chat(one, **template_options) for one in conversations]

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """The prompt dict that the chat template makes of a conversation: text and token ids."""
        tokenizer = self.tokenizer_for("chat()")
        if not isinstance(conversation, (list, tuple)):
            raise ValueError("a conversation must be a list of dicts with texts as 'role' and "
                             f"'content', got {conversation!r:.80}")
        for message in conversation:
            is_dict = isinstance(message, dict)
            if not is_dict or not (isinstance(message.get("role"), str)
                                   and isinstance(message.get("content"), str)):
                raise ValueError("a conversation must be a list of dicts with texts as 'role' and "
                                 f"'content' (nanoserve_extras reads more), got {message!r:.80}")
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_options)
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        # The template has already written the special tokens, BOS included.
        return {"prompt": text,
                "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def encode(self, text: str, what: str = "a text prompt",
               add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. what: a name of the text, for the error."""
        try:
            return self.tokenizer_for(what).encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # raised by the tokenizer for a str without a UTF-8 form
            raise ValueError(f"{what} is no valid text, a lone surrogate? {text!r}") from error

    def tokenizer_for(self, what: str) -> Tokenizer:
        """The tokenizer. Raises `ValueError` if there is none. what: the text that needs one."""
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none: use token ids, "
                             "or name one with tokenizer= (and without skip_tokenizer_init)")
        return self.tokenizer

    # ---------------------------------------------------------------- parameters

    def default_sampling_params(self) -> SamplingParams:
        """For a request without parameters."""
        return SamplingParams()

    def read_params(self, given: SamplingParams | None) -> SamplingParams:
        """A copy of the given parameters, checked against tokenizer and vocabulary."""
        if given is not None and not isinstance(given, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {given!r}")
        # Making the copy checks the fields once more. The caller may have changed them since, and
        # may change them again while the request runs.
        params = replace(given or self.default_sampling_params())
        for name in self.refused:
            if getattr(params, name) is not None:
                raise ValueError(f"{name}={getattr(params, name)!r:.80}: this engine has no extra "
                                 "that reads it, leave it out")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: use stop_token_ids")
        self._check_vocabulary(params)
        return params

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Token ids must be in the vocabulary: on a GPU a wrong index ends the whole process. -1
        logprobs, which are all of them, become a number like any other."""
        size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= size:
                    raise ValueError(f"{name} names token {token_id}, which is outside the "
                                     f"vocabulary of {size} (0 to {size - 1}): leave it out")
        for name in ("logprobs", "prompt_logprobs"):
            num_top = getattr(params, name)
            if num_top == -1:
                setattr(params, name, size)
            elif num_top is not None and num_top > size:
                raise ValueError(f"{name}={num_top} is more than the vocabulary has: use at most "
                                 f"{size}, or -1 for all")

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each bad word, without and with a space in front: most tokenizers have
        other tokens for the second form. (vLLM leaves that form out if it has another number of
        tokens; here it is left out only if it ends with the first form, which bans it anyway.)"""
        found: list[list[int]] = []
        for word in params.bad_words or []:
            what = f"bad_words={params.bad_words!r}"
            bare = self.encode(word.lstrip(), what, add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), what, add_special_tokens=False)
            if not bare or max(bare + spaced) >= self.model_config.vocab_size:
                raise ValueError(f"{what}: {word!r} is no text of the model's tokens, leave it out")
            found.append(bare)
            if spaced[-len(bare):] != bare:
                found.append(spaced)
        return found

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The EOS tokens of config.json, generation_config.json and the tokenizer. Each of them
        ends a text, as in vLLM.

        Often there are several: a chat model ends a turn with one and a document with another. A
        fine-tuned model may name its end of a turn in its tokenizer only.
        """
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return (*self.model_config.eos_token_ids, *(() if eos is None else (eos,)))

    def _late_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that are not allowed before `min_tokens`: stop tokens, and EOS even with
        `ignore_eos`, as in vLLM. Some configs name an EOS outside the vocabulary."""
        return frozenset(i for i in (*params.stop_token_ids, *self.eos_ids)
                         if 0 <= i < self.model_config.vocab_size)

    def _check_something_is_left(self, params: SamplingParams, late_ids: frozenset[int],
                                 bad_word_ids: list[list[int]]) -> None:
        """Refuse params with which all logits of a step could become -inf.

        A bad word counts as if its last token were banned all the time, unless it contains a token
        that is not allowed. This is simple and always safe, but it also refuses some params that
        would work (two allowed tokens, each banned after the other).
        """
        allowed = set(params.allowed_token_ids or ())
        banned = {word[-1] for word in bad_word_ids if not allowed or allowed.issuperset(word)}
        if params.min_tokens:
            banned |= late_ids
        some_left = allowed - banned if allowed else len(banned) < self.model_config.vocab_size
        if not some_left:
            raise ValueError(
                f"allowed_token_ids={str(params.allowed_token_ids):.80}, bad_words="
                f"{str(params.bad_words):.80} and min_tokens={params.min_tokens} leave no token "
                "that is always possible (min_tokens rules out EOS and stop_token_ids, a bad word "
                "its last token, generation_config.json its suppress_tokens): allow another token")


# ------------------------------------------------------------ lists of arguments


def is_token_id(value: object) -> bool:
    """Whether `value` is a whole number, numpy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """A list of prompts. One prompt becomes a list of one; a list of token ids is one prompt."""
    if not isinstance(prompts, (str, dict, list, tuple)):
        raise ValueError(f"prompts must be a str, a dict or a list, got {type(prompts).__name__}")
    is_one = isinstance(prompts, (str, dict)) or (len(prompts) > 0 and is_token_id(prompts[0]))
    return [prompts] if is_one else list(prompts)


def one_for_each(value: object, count: int, name: str) -> list:
    """A list of `count` values. A single value is repeated; a list must have `count` entries."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for each, "
                         "or a single one for all")
    return list(value)
