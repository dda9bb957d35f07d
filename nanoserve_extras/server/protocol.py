"""Bodies of requests: OpenAI's, with vLLM's additions, and how each field is treated.

A body passes three checks; if one fails, the answer is a 400 that names the field:

    shape      pydantic, strict: a "5" is no number            here
    meaning    `SamplingParams`, the chat template, the prompt  where offline requests are checked
    capacity   the prompt and max_tokens must fit together      api.py

All fields of `SamplingParams` are fields of a body, new ones at once. Other fields:

    null, or a value without effect             is ignored
    would change the text (vllm.py)             400: what to do instead
    nearly the name of a field here             400: did you mean ...?
    harmless (vllm.py)                          is ignored
    unknown                                     is ignored and logged once; 400 with `--strict`

Invariant: a field that is left out, or null, has the model's own value (generation_config.json),
which is not always the default of `SamplingParams`. Without `max_tokens` a chat may use the whole
context, and a completion has 16 tokens, as OpenAI's.

The types of the `openai` package are not used: they describe what OpenAI serves, not this server.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.rules import rule_of
from nanoserve_extras.base.vllm import ROWS, nearest
from nanoserve_extras.server.errors import TOO_LONG, BadRequest

MAX_TOOLS, MAX_SCHEMAS = 128, 200_000  # OpenAI's number; characters of all schemas together
# A tool's schema describes its arguments if it has one of these keys.
SAYS = ("properties", "patternProperties", "additionalProperties", "$ref", "anyOf", "oneOf",
        "allOf")
MAX_TOP_LOGPROBS = 20  # OpenAI's bound for chat, and vLLM's for both
MAX_COMPARED = 20  # unknown fields that may be mistyped ones: each is compared with all names
ONE_TEXT = dict(type="object", properties=dict(input=dict(type="string")), required=["input"],
                additionalProperties=False)
# Names that a client may not use for a template's variables: arguments of the tokenizer's method.
NOT_FOR_TEMPLATES = {"conversation", "tools", "documents", "chat_template", "tokenize", "padding",
                     "add_generation_prompt", "continue_final_message", "truncation", "max_length",
                     "return_tensors", "return_dict", "return_assistant_tokens_mask",
                     "tokenizer_kwargs"}

TokenIds = Annotated[list[int], Field(min_length=1)]
Prompts = str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
Cut = Literal[-1] | Annotated[int, Field(ge=1)]  # so many tokens of a prompt stay; -1: all that fit
Salt = Annotated[str, Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]
Effort = Annotated[  # "auto" and "default" are the template's own, as none at all
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None, BeforeValidator(
        lambda one: None if str(one).lower() in ("", "auto", "default") else one)]
SWITCH = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def whole(value: Any, depth: int = 2) -> Any:
    """5.0 as 5, also in lists nested as deep as prompts of token ids."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if depth and isinstance(value, list) and any(isinstance(one, (float, list)) for one in value):
        return [whole(one, depth - 1) for one in value]
    return value


class Thinking(BaseModel):
    """Anthropic's and DeepSeek's `thinking`."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int | None, BeforeValidator(whole), Field(ge=0)] = None


Switch = Annotated[Thinking | None, BeforeValidator(
    lambda one: dict(type="enabled" if one else "disabled") if isinstance(one, bool) else
    one or None)]


def fail_fast(schema: Any) -> Any:
    """pydantic's own schema, changed so that a list ends at its first wrong item."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, (dict, list)):
            fail_fast(part)
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    return schema


def read_json(body: bytes) -> Any:
    """Read a body. Python also reads numbers that JSON can't represent: NaN, and Infinity, which it
    makes of 1e400. For these this raises a `BadRequest` that names the field."""
    strange: list[str] = []

    def number(text: str) -> float:
        if not isfinite(value := float(text)):
            strange.append(text)
        return value

    found = json.loads(body, parse_float=number, parse_constant=number)
    if strange:
        path = next(path for path, value in _values(found)
                    if isinstance(value, float) and not isfinite(value))
        raise BadRequest(f"{'.'.join(path) or 'the body'}: a number must be finite, got "
                         f"{strange[0]:.80}", path[0] if path else None)
    return found


def _values(found: Any) -> Iterator[tuple[list[str], Any]]:
    """Each value of a body with its path, for example ["messages", "0", "content"]."""
    ahead: list[tuple[list[str], Any]] = [([], found)]
    while ahead:
        path, value = ahead.pop()
        yield path, value
        inner = value.items() if isinstance(value, dict) else enumerate(
            value if isinstance(value, list) else ())
        ahead += reversed([([*path, str(key)], one) for key, one in inner])


def as_prompts(prompts: Any) -> list:
    """A list of prompts: a single text, or a single list of token ids, becomes a list of one."""
    many = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return prompts if many else [prompts]


class Fields(BaseModel):
    """An object that clients send. Unknown fields stay in its `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable) -> dict:
        """Stop checking a list at its first wrong item. An error for each item, times each type
        that a field may have, would block the event loop for many seconds."""
        return fail_fast(handler(source))

    @model_validator(mode="before")
    @classmethod
    def read_whole_numbers(cls, given: Any) -> Any:
        """Read 100.0 as 100: JSON has one kind of number, and some clients write it so."""
        return {name: whole(value) for name, value in given.items()} if isinstance(
            given, dict) else given

    @model_validator(mode="after")
    def pass_over_or_refuse(self) -> "Fields":
        names = [*type(self).model_fields, *(name for field in type(self).model_fields.values()
                                             for name in getattr(field.validation_alias, "choices",
                                                                 ()))]
        unknown = 0
        for name, value in list(self.model_extra.items()):
            row = ROWS.get(("body", name)) or ROWS.get(("SamplingParams", name))
            if name in names or value is None or (row and row.asks_for_nothing(value)):
                del self.model_extra[name]
            elif row is not None:
                raise BadRequest(f"{name} is not supported: {row.remedy}", name)
            elif (unknown := unknown + 1) <= MAX_COMPARED and (near := nearest(name, names)):
                raise BadRequest(f"there is no field {name}: did you mean {near}?", name)
        return self


class Body(Fields):
    """Fields and rules of all bodies."""

    prompts_in: ClassVar[tuple[str, ...]] = ()  # fields with prompts, alone or in lists
    model: str | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences the body asks for: the places that it takes (guard.py)."""
        count = sum(len(as_prompts(getattr(self, name))) for name in self.prompts_in)
        return max(1, count) * max(1, getattr(self, "n", None) or 1)

    def not_shown(self, said: str) -> str:
        """The error for an image that the model can't take, in the words of this API."""
        return said

    def too_much(self, count: int, limit: int, room: int) -> BadRequest:
        """The error for a prompt and max_tokens that don't fit together. count: the prompt's
        tokens. The error blames the larger one: on the code `TOO_LONG` and its words clients
        shorten their history, even if it has a few words only."""
        field = next((name for name in ("max_completion_tokens", "max_output_tokens")
                      if getattr(self, name, None)), "max_tokens")
        if limit > count:
            return BadRequest(f"{field} is {limit}, and a prompt of {count} tokens leaves room for "
                              f"{room - count}: ask for less", field, code="invalid_value")
        return BadRequest(
            f"this model's maximum context length is {room} tokens, but the prompt has {count} and "
            f"{field} is {limit}: shorten the prompt or ask for less", field, code=TOO_LONG)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far, in every piece
    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is added


# Clients can't set these; the last one has vLLM's name in a body, `vllm_xargs`.
OFFLINE = ("detokenize", "output_kind", "logits_processors", "extra_args")
SERVED = [one for one in fields(SamplingParams) if one.name not in OFFLINE]
OF_CHOICES = {"n", "logprobs", "prompt_logprobs"}  # one message has no place for them
# A body with all these fields, which may be left out or null. `/docs` shows the rules' texts.
Sampling = create_model("Sampling", __base__=Body, **{
    one.name: (one.type | None, Field(None, description=rule_of(one.type).must))
    for one in SERVED if one.name not in OF_CHOICES})


class Controls(Sampling):
    """The fields of all generating endpoints: those of `SamplingParams`, which are passed on
    unchanged and checked there, and the server's own."""

    logit_bias: dict[str, Any] | None = None  # JSON's keys are texts
    structured_outputs: dict[str, Any] | None = None  # vLLM's way to ask for a form
    priority: int | None = None
    cache_salt: Salt | None = None
    vllm_xargs: dict[str, Any] | None = None
    stream: bool | None = None


class GenerationBody(Controls):
    """Further fields of completions and chats."""

    n: int | None = None
    response_format: dict[str, Any] | None = None  # OpenAI's way to ask for a form
    prompt_logprobs: Logprobs | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # newer than max_tokens
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Cut | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama.cpp's: how much of a prompt is computed

    def limit(self) -> int | None:
        """The client's own limit of output tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """defaults: the model's own, with the endpoint's `max_tokens`. Raises `ValueError`."""
        given = {one.name: value for one in SERVED
                 if (value := getattr(self, one.name)) is not None}
        given["extra_args"] = self.vllm_xargs
        given["logprobs"] = self.num_logprobs  # how many of the likeliest; None: no logprobs
        given["prompt_logprobs"] = self.num_prompt_logprobs
        if (limit := self.limit()) is not None:
            given = {"min_tokens": min(defaults.min_tokens, limit)} | given | {"max_tokens": limit}
        if self.response_format is not None:
            given["structured_outputs"] = self.form()
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return replace(defaults, output_kind=kind, **given)

    def form(self) -> Any:
        """The constraint that `response_format` asks for; None for any text. Raises `ValueError`.
        """
        from nanoserve_extras.structured.structured import (
            from_response_format,  # here: it may be deleted
        )
        asked = from_response_format(self.response_format)
        if asked is not None and self.structured_outputs is not None:
            raise BadRequest("structured_outputs and a format (response_format, text.format, "
                             "output_config.format) exclude each other: leave one of them out",
                             "structured_outputs")
        return asked or self.structured_outputs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def num_samples(self) -> int:
        """The number of samples of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def check_stream(self) -> "GenerationBody":
        if self.include_usage and not self.stream:
            raise BadRequest("stream_options has a meaning only with stream=true: leave it out",
                             "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs come with a whole answer only: use stream=false",
                             "prompt_logprobs")
        return self


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. A prompt is a text or token ids, or a list of either."""

    prompts_in = ("prompt",)
    prompt: Prompts
    logprobs: Logprobs | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        """Whether the body only scores its prompt: then one token is computed and not returned."""
        return bool(self.echo) and self.max_tokens == 0 and self.max_completion_tokens is None

    def limit(self) -> int | None:
        return 1 if self.only_echo else super().limit()

    @property
    def num_prompt_logprobs(self) -> int | None:
        """With `echo` the prompt has logprobs, too."""
        is_scored = self.echo and self.prompt_logprobs is None
        return self.logprobs if is_scored else self.prompt_logprobs


class TranscriptionBody(CompletionBody):
    """`POST /v1/audio/transcriptions`, a form: the speech in a WAV file as text (docs/extras.md).
    """

    prompts_in = ()
    file: bytes
    prompt: str | None = None  # a hint
    language: str | None = None
    temperature: float = 0.0
    response_format: Literal["json", "text"] = "json"

    def form(self) -> Any:
        return self.structured_outputs


# Clients in Go write null for missing entries.
Parameters = Annotated[dict[str, Any] | None, BeforeValidator(
    lambda given: {key: value for key, value in given.items() if value is not None}
    if isinstance(given, dict) else given)]


class Function(BaseModel):
    """A tool's name and parameters. Templates may look for further entries."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    description: Any = None  # templates write entries in this order, which models know
    parameters: Parameters = None  # a JSON schema of an object


class Tool(BaseModel):
    """A function. A custom tool becomes a function with a single string; its grammar, if any, is
    only shown to the model. OpenAI's hosted tools are not supported."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function
    is_custom: Annotated[bool, Field(exclude=True)] = False

    @model_validator(mode="before")
    @classmethod
    def read_custom(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = given.get("custom") if given.get("type") == "custom" else None
        if not isinstance(own, dict):
            return given | dict(is_custom=False)
        said, form = own.get("description"), own.get("format") or {}
        form = form.get("grammar", form) if isinstance(form, dict) else {}
        if isinstance(form, dict) and "definition" in form:
            said = (f"{said or ''}\nThe grammar of its input ({form.get('syntax')}):\n"
                    f"{form['definition']}").strip()
        shown = dict(name=own.get("name"), description=said, parameters=ONE_TEXT)
        return dict(type="function", is_custom=True, function={
            key: value for key, value in shown.items() if value is not None})


class ToolChoice(BaseModel):
    """Which of the tools that are shown may be called."""

    model_config = ConfigDict(strict=True)
    mode: Literal["auto", "required"]
    names: list[str]
    is_named: bool = False  # one call, of the one tool


def as_choice(one: Any) -> Any:
    """A choice in any client's form: a word, {"type": "auto"}, a tool, or `allowed_tools` (hosted
    tools in it have no name). A chat nests the last two one level deeper. Raises `BadRequest`."""
    kind = one.get("type", "function") if isinstance(one, dict) else one
    if kind in (None, "none", "auto", "required", "any"):  # Mistral's and Anthropic's "any"
        return "required" if kind == "any" else kind
    try:
        given = one.get(kind, one) if kind == "allowed_tools" else dict(
            mode="required", tools=[one])
        names = [tool.get(tool.get("type", "function"), tool).get("name")
                 for tool in given["tools"]]
        is_named = kind != "allowed_tools"
        return ToolChoice(mode=given.get("mode", "auto"), is_named=is_named, names=[
            name for name in names if name is not None or is_named])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest("tool_choice must be none, auto, required, a tool by its name, or "
                         f"allowed_tools with a mode and tools, got {one!r:.80}",
                         "tool_choice") from error


Choice = Annotated[Literal["none", "auto", "required"] | ToolChoice | None, BeforeValidator(
    as_choice, json_schema_input_type=str | dict[str, Any] | None)]


class Conversation(Body):
    """Messages for the chat template. Their contents are checked in messages.py."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort = None
    thinking: Switch = None

    def template_options(self) -> dict[str, Any]:
        """The chat template's variables besides the messages. As in vLLM an effort switches
        thoughts on, because some templates begin none by default. The switch has two names."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs or {}
        switch = given.get("enable_thinking", given.get(
            "thinking", self.thinking and SWITCH[self.thinking.type]))
        if switch is None and effort:
            switch = effort != "none"
        asked = dict(reasoning_effort=effort, enable_thinking=switch, thinking=switch)
        asked = {name: value for name, value in asked.items() if value is not None}
        going_on = bool(self.continue_final_message)
        begin = not going_on if self.add_generation_prompt is None else self.add_generation_prompt
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        shown = dict(tools=tools) if tools and self.tool_choice != "none" else {}
        return dict(asked | given, add_generation_prompt=begin, continue_final_message=going_on,
                    **shown)

    def schemas(self) -> dict[str, dict]:
        """The schema of the arguments of each tool that may be called, by its name."""
        if self.tool_choice == "none":
            return {}
        named = getattr(self.tool_choice, "names", None)
        closed = dict(type="object", additionalProperties=False)  # for a tool without arguments
        return {one.name: one.parameters if any(map((one.parameters or {}).get, SAYS)) else closed
                for one in (tool.function for tool in self.tools or ())
                if named is None or one.name in named}

    @property
    def custom(self) -> set[str]:
        """The names of custom tools, which take a single string."""
        return {tool.function.name for tool in self.tools or () if tool.is_custom}

    @property
    def must_call(self) -> bool:
        return getattr(self.tool_choice, "mode", self.tool_choice) == "required"

    @property
    def names_tool(self) -> bool:
        """Whether the body asks for exactly one call, of a named tool."""
        return getattr(self.tool_choice, "is_named", False)

    @model_validator(mode="after")
    def check_tools(self) -> "Conversation":
        names = [tool.function.name for tool in self.tools or ()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise BadRequest(f"tools: the name {min(twice)} is there twice", "tools")
        for one in (tool.function for tool in self.tools or ()):
            if not isinstance((one.parameters or {}).get("properties", {}), dict):
                raise BadRequest(f"tools: of {one.name} the parameters' properties are no object",
                                 "tools")
        size = len(json.dumps([tool.function.parameters for tool in self.tools or ()]))
        if size > MAX_SCHEMAS:
            raise BadRequest(f"tools: their parameters have {size:,} characters, and "
                             f"{MAX_SCHEMAS:,} are the most: shorten them", "tools")
        wrong = set(getattr(self.tool_choice, "names", ())) - set(names)
        if wrong or self.must_call and not self.schemas():
            raise BadRequest(
                "tool_choice asks for a call, but among tools is no "
                f"{min(wrong, default='tool')}: {', '.join(names) or 'there are none'}",
                "tool_choice")
        return self

    @model_validator(mode="after")
    def check_template_options(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest("continue_final_message and add_generation_prompt exclude each other",
                             "continue_final_message")
        if wrong := NOT_FOR_TEMPLATES & set(self.chat_template_kwargs or ()):
            raise BadRequest(f"chat_template_kwargs takes the template's own variables, not "
                             f"{', '.join(sorted(wrong))}", "chat_template_kwargs")
        return self


class ChatBody(GenerationBody, Conversation):
    """`POST /v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls_once(self) -> bool:
        """Whether at most one call is allowed."""
        return self.names_tool or self.parallel_tool_calls is False

    @model_validator(mode="after")
    def check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return self


class TokenizeBody(Conversation):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one_is_given(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give one of prompt and messages", "prompt")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: TokenIds
