"""A request's way in and out: from the caller's words to sequences, and from tokens to outputs.

    prompt, SamplingParams ──InputProcessor──► Request ──start──► Sequence × n ──► the engine
                                                  │                                    │
    RequestOutput ◄──────────── output ───────────┴──────── add_token ◄────────────────┘

A request is checked completely on its way in, so that the engine only ever meets requests that can
run: an error names the field, its value and the remedy, and costs nothing but itself.

Invariant: nothing here touches the engine's state. An `InputProcessor` holds a tokenizer and limits
that never change, so a server can have one of its own, with its own tokenizer, and check requests
elsewhere while one thread owns the steps. What depends on the order of arrival (ties of priority,
the seed of a request that names none) is settled in `start`, when the request is submitted.

Not known here: the queue, blocks, steps. (vLLM V1 has an input and an output processor for the two
directions; here they share a file, because a request's two ends are easiest understood together.)
"""

from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path

import xxhash
from transformers import AutoTokenizer

from nanoserve.config import EngineConfig, find_model
from nanoserve.detokenizer import Detokenizer
from nanoserve.model_config import ModelConfig
from nanoserve.sequence import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Sequence,
)

Prompt = str | dict | list[int]


def is_token_id(value: object) -> bool:
    """Whole numbers, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(eq=False)
class Request:
    """A checked request: its sequences, one a sample, and what its caller has been told."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    max_num_tokens: int  # prompt and output
    eos_ids: frozenset[int]
    tokenizer: object  # None: no text is made
    sequences: list[Sequence] = field(default_factory=list)
    detokenizers: list[Detokenizer] = field(default_factory=list)  # empty: no text is made
    num_read: list[int] = field(default_factory=list)  # tokens a sample's detokenizer has seen
    told: list[tuple[int, int]] = field(default_factory=list)  # (characters, tokens) a sample
    inbox: list[RequestOutput] | None = None  # where outputs go: to step(), or to one stream

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        """Make the sequences, one a sample, which from here on know nothing of each other: that
        they share a prompt is something the prefix cache finds out by itself.

        Each one's seed is a hash of the request's seed, or else of the engine's and the arrival, so
        that a script that is run twice writes the same text twice.
        """
        params, ids = self.params, self.prompt_token_ids
        seed = f"{engine_seed} {arrival}" if params.seed is None else params.seed
        for index in range(params.n):
            self.sequences.append(Sequence(
                self.request_id, list(ids), params, arrival, self.priority, index,
                seed=xxhash.xxh3_64_intdigest(f"{seed} {index}".encode()),
                stop_ids=self.eos_ids | frozenset(params.stop_token_ids), eos_ids=self.eos_ids,
                max_num_tokens=self.max_num_tokens))
            if params.detokenize and self.tokenizer is not None:
                self.detokenizers.append(Detokenizer(self.tokenizer, params, ids))
        self.num_read = [len(ids)] * params.n
        self.told = [(0, 0)] * params.n
        return self.sequences

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def add_token(self, seq: Sequence) -> str | None:
        """Turn what is new of `seq` into text; returns the stop string that now is in it."""
        if not self.detokenizers:
            return None
        detokenizer, stop_string = self.detokenizers[seq.index], None
        new = seq.token_ids[self.num_read[seq.index]:]
        self.num_read[seq.index] = len(seq.token_ids)
        # The token that ended it, EOS say, is no text, unless the caller wants to see it.
        if seq.finish_reason != "stop" or self.params.include_stop_str_in_output:
            stop_string = detokenizer.add(new)
        if seq.finish_reason is not None:
            stop_string = detokenizer.flush() or stop_string
        return stop_string

    def flush(self) -> None:
        """The request ends early, by an abort: text that was held back comes out as it is."""
        for detokenizer in self.detokenizers:
            detokenizer.flush()

    def output(self) -> RequestOutput:
        """What the caller gets now: all of it, or what is new since the last output (DELTA).

        While a sample runs only its `visible_text` is shown, which never shrinks; so a DELTA can be
        cut out by counting the characters that were told before.
        """
        completions = []
        for seq in self.sequences:
            text, token_ids = "", seq.output_token_ids
            if self.detokenizers:
                detokenizer = self.detokenizers[seq.index]
                done = seq.finish_reason is not None
                text = detokenizer.text if done else detokenizer.visible_text
            if self.params.output_kind is RequestOutputKind.DELTA:
                told, self.told[seq.index] = self.told[seq.index], (len(text), len(token_ids))
                text, token_ids = text[told[0]:], token_ids[told[1]:]
            completions.append(CompletionOutput(
                seq.index, text, token_ids, finish_reason=seq.finish_reason,
                stop_reason=seq.stop_reason))
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, None, completions, self.finished,
            num_cached_tokens=self.sequences[0].num_cached_tokens)


class InputProcessor:
    """Tokenises and checks. config: resolved, with the `max_model_len` that the KV cache allows."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer):
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams | None,
                priority: int = 0) -> Request:
        """Raises `ValueError` for an empty or over-long prompt, a token outside the vocabulary,
        parameters out of range, or a priority that would have no effect."""
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, got {priority!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority} has no effect with scheduling_policy='fcfs': "
                             "make the engine with scheduling_policy='priority'")
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        # A copy: making it checks the fields once more, because the caller may have changed them
        # since, and may change them again while the request runs.
        params = replace(params or self.default_sampling_params())
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a str, got {request_id!r}")
        text, ids = self.read_prompt(prompt)
        limit = self.config.max_model_len
        if len(ids) >= limit:  # with 1,024: a prompt of 1,023 leaves room for one token, 1,024 none
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_model_len is {limit}, prompt and at "
                "least one output token together: shorten the prompt, or raise max_model_len (and "
                "kv_cache_memory_bytes, if the KV cache is what limits it)")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: use stop_token_ids")
        longest = limit if params.max_tokens is None else min(limit, len(ids) + params.max_tokens)
        eos_ids = frozenset() if params.ignore_eos else frozenset(self._eos_ids())
        return Request(request_id, text, ids, params, priority, longest, eos_ids, self.tokenizer)

    def default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        names = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
                     repetition_penalty="repetition_penalty", max_new_tokens="max_tokens")
        defaults = self.model_config.generation_defaults
        try:
            return SamplingParams(**{ours: defaults[theirs] for theirs, ours in names.items()
                                     if defaults.get(theirs) is not None})
        except ValueError as error:
            raise ValueError("generation_config.json recommends what can't be used "
                             f"({error}): pass sampling_params") from error

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms -> its text, if it has one, and its token ids.

        Text gets the special tokens that the tokenizer wants in front (BOS, for Llama); ids are
        taken as they are. A dict with both keeps its text for the output and computes its ids.
        """
        text, ids = None, prompt
        if isinstance(prompt, str):
            text, ids = prompt, None
        elif isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if set(prompt) - {"prompt", "prompt_token_ids"} or (text is None and ids is None):
                raise ValueError("a prompt dict takes 'prompt' or 'prompt_token_ids', got "
                                 f"{sorted(map(str, prompt))}")
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

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """A conversation through the chat template -> a prompt dict with text and token ids."""
        tokenizer = self.tokenizer_for("chat()")
        if not isinstance(conversation, (list, tuple)) or not all(
                isinstance(message, dict) for message in conversation):
            raise ValueError("a conversation must be a list of dicts with 'role' and 'content', "
                             f"got {str(conversation)[:80]!r}")
        if not (template_options.get("chat_template") or tokenizer.chat_template):
            raise ValueError("the tokenizer has no chat template: pass chat_template=, or use "
                             "generate()")
        conversation = [message | {"content": _content(message)} for message in conversation]
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, **template_options)
        except Exception as error:  # a template is a program of its own
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        # The template has written the special tokens, BOS included.
        return {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False)}

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return self.tokenizer_for("a text prompt").encode(
                text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the tokenizer says when a str has no UTF-8 form
            raise ValueError(f"the prompt is no valid text, a lone surrogate? {text!r}") from error

    def tokenizer_for(self, what: str):
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none: use token ids, "
                             "or name one with tokenizer= (and without skip_tokenizer_init)")
        return self.tokenizer

    def _eos_ids(self) -> tuple[int, ...]:
        """generation_config.json's, else config.json's, else the tokenizer's.

        Often there are several: a chat model ends a turn with one and a document with another. The
        tokenizer names only one, and is asked last (vLLM adds its one to the others).
        """
        if self.model_config.eos_token_ids:
            return self.model_config.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos is None else (eos,)


def _content(message: dict) -> str | None:
    """A message's text. OpenAI's list of parts is joined, as vLLM does it, if all of them are text;
    a template would print anything else into the prompt without a word."""
    content = message.get("content")
    if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"a message's content must be text or text parts, got {content!r:.80}")
    return content


def load_tokenizer(config: EngineConfig, folder: Path):
    """The tokenizer beside the model, or the one that was named; None if it is not wanted, or if
    random weights come without one. Raises `ValueError` when it can't be loaded."""
    if config.skip_tokenizer_init:
        return None
    source = find_model(config.tokenizer) if config.tokenizer else folder
    if config.load_format == "dummy" and not any(source.glob("*token*")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code)
        if len(tokenizer) < 2:  # transformers makes an empty one up where there is none
            raise ValueError("it is empty: its files are missing")
        return tokenizer
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{source}: the tokenizer can't be loaded ({error}): name another with "
                         "tokenizer=, or use skip_tokenizer_init=True and token ids") from error
