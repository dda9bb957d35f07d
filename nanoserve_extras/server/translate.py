"""`/v1/responses`, and the code it shares with `/v1/messages`: two more APIs for a chat.

    Responses (OpenAI's agents, Codex)  ─┐                 ┌─ a response of items     , its events
                                         ├─ ChatBody, chat ┤
    Messages (Anthropic's, Claude Code) ─┘                 └─ a message of blocks     , its events

A body is translated to a `ChatBody`, and a chat's answer and pieces to an answer and events of this
API. So both can do exactly what a chat can. An answer is a list of parts: thoughts, texts and
calls, in the order in which the model wrote them. A stream has events for each part: that it
begins, its new text, and that it has ended.

Only an answer's thoughts and texts are kept, for a while: clients of Responses may refer to them by
id (`Kept`). Other references to an earlier answer, or to something that a provider hosts, are
refused with an error. The road not taken: with separate endpoints over the engine, as in vLLM, each
new field of a chat would have to be added to both.
"""

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from pydantic import Field, PrivateAttr, model_validator

from nanoserve.config import SamplingParams
from nanoserve_extras.server.answers import SILENCE, event
from nanoserve_extras.server.errors import BadRequest
from nanoserve_extras.server.protocol import SWITCH, Controls, Switch, whole

FUNCTIONS = None, "function", "custom", "namespace"  # other types of tools a provider hosts
ADDED = "additional_tools"  # Codex's item
NEEDED = {"message": "content", "function_call": "name", "function_call_output": "output",
          "custom_tool_call": "name", "custom_tool_call_output": "output"}  # an item must have it


@dataclass
class AnswerPart:
    """A part of an answer. kind: "thought", "said" or "call". text: for a call its arguments."""

    kind: str
    text: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    index: int = 0  # counted from 0 in a stream


def parts_of(message: dict) -> list[AnswerPart]:
    """The parts of a chat's message, or of a piece of one."""
    thought, said = message.get("reasoning_content"), message.get("content")
    found = [AnswerPart(kind, text)
             for kind, text in (("thought", thought), ("said", said)) if text]
    for call in message.get("tool_calls", ()):
        own = call.get("function") or call["custom"]
        found.append(AnswerPart("call", own.get("arguments", own.get("input")), own.get("name", ""),
                                call.get("id", "")))
    return found


class Language(Controls):
    """A body that is translated to a chat's, and whose answer is translated back. It may have
    vLLM's fields of a chat, except those for which the answer has no place.

    begins_with_text: whether an answer's first event has to wait for the first token."""

    begins_with_text: ClassVar[bool] = False

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Switch = None

    @model_validator(mode="after")
    def pass_over_hosted(self) -> "Language":
        """Treat tools that a provider hosts as unknown fields: logged once, or refused."""
        self.tools = self._own(self.tools or [])
        for group in self.tools:
            if isinstance(group.get("tools"), list):  # else it is refused later
                group["tools"] = self._own(group["tools"])
        return self

    def _own(self, tools: list) -> list:
        kept = []
        for one in tools:
            if not isinstance(one, dict) or one.get("type") in FUNCTIONS:
                kept.append(one)
            else:
                self.model_extra[f"tools: {one['type']}"] = one
        return kept

    def chat(self) -> dict:
        """The fields of a `ChatBody`. Raises `BadRequest`."""
        options = dict(include_usage=True, continuous_usage_stats=True) if self.stream else None
        given = {name: getattr(self, name) for name in Controls.model_fields}
        try:
            own = {name: value for name, value in self.as_chat().items() if value is not None}
        except (AttributeError, KeyError, TypeError) as error:
            raise BadRequest("a part of the body has another shape than it must have: look at the "
                             "tools, and at what messages hold") from error
        is_on = self.thinking and SWITCH[self.thinking.type]
        switch = {} if is_on is None else dict(enable_thinking=is_on)
        given["thinking"] = self.thinking
        variables = (self.chat_template_kwargs or {}) | switch
        return given | own | dict(stream_options=options, chat_template_kwargs=variables)

    def apply(self, params: SamplingParams) -> None:
        """Fill in the values that are used where the client named none."""
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            setattr(self, name, getattr(params, name))

    def counted(self, num_tokens: int) -> dict:
        """The answer that gives a prompt's number of tokens."""
        return dict(input_tokens=num_tokens)

    def recall(self, kept: "Kept") -> None:
        """Insert the parts of earlier answers to which the client refers by id."""

    def answer(self, chat: dict) -> dict:
        """The whole answer."""
        [choice] = chat["choices"]
        return self.whole(uuid4().hex, chat, parts_of(choice["message"]), choice)

    def failed(self, name: str, chat: dict, parts: list[AnswerPart], error: dict) -> list[dict]:
        """The last events of a stream that can't go on. error: the object of a whole answer."""
        return [error]


class Kept:
    """Thoughts and texts of the last answers, by the ids of their items, in this process's memory.
    Vercel's SDK refers to them (`item_reference`) unless store is false. An id has 122 random bits,
    so only the client that got it knows it. (A call's id has 36, but clients send calls whole.)
    most: the limit on characters of all items as JSON."""

    def __init__(self, most: int = 2 ** 24):
        self.most, self.size = most, 0
        self.items: OrderedDict[str, tuple[dict, int]] = OrderedDict()  # the oldest first

    def add(self, items: list[dict]) -> None:
        for item in items:
            if "call_id" in item:
                continue
            size = len(json.dumps(item))
            self.items[item["id"]] = item, size
            self.size += size
        while self.size > self.most:
            self.size -= self.items.popitem(last=False)[1][1]

    def find(self, id_: Any) -> dict | None:
        return self.items[id_][0] if isinstance(id_, str) and id_ in self.items else None


class EventWriter:
    """Writes a stream's events, and keeps the parts that were sent. head: the fields that all of
    the chat's pieces have."""

    def __init__(self, language: Language, head: dict):
        self.language, self.chat, self.name = language, head, uuid4().hex
        self.parts: list[AnswerPart] = []
        self.has_begun, self.spoken, self.number = False, time.monotonic(), 0

    async def events(self, pieces: AsyncIterator[dict]) -> AsyncIterator[bytes]:
        """The events for a chat's pieces. An error is the last piece."""
        last: dict = {}
        async for piece in pieces:
            if "error" in piece:
                yield self.failed(piece)
                return
            last = next((one for one in piece["choices"] if one["finish_reason"]), last)
            if told := self._news(piece):
                self.spoken = time.monotonic()
                yield self._written(told)
        ends = self.language.ended(self.parts[-1]) if self.parts else []
        yield self._written(ends + self.language.over(self.name, self.chat, self.parts, last))

    def failed(self, error: dict) -> bytes:
        """The last event of a stream that can't go on."""
        begin = [] if self.has_begun or self.language.begins_with_text else self.language.begun(
            self.name, self.chat)
        return self._written(begin + self.language.failed(
            self.name, self.chat, self.parts, error))

    def _news(self, piece: dict) -> list[dict]:
        """The events of a piece: a text goes on, or another part begins. After some seconds without
        a piece an event of this API says that the server is at work: clients with a time-out wait
        for events, and don't see comments."""
        language, told, waits = self.language, [], "prompt_progress" in piece
        self.chat = piece
        if not self.has_begun and not (waits and language.begins_with_text):
            self.has_begun, told = True, language.begun(self.name, piece)
        for part in chain(*(parts_of(choice["delta"]) for choice in piece["choices"])):
            # A call's further arguments have no name.
            if not self.parts or self.parts[-1].kind != part.kind or part.name:
                if self.parts:
                    told += language.ended(self.parts[-1])
                self.parts.append(replace(part, text="", index=len(self.parts)))
                told += language.opened(self.parts[-1])
            self.parts[-1].text += part.text
            told += language.grown(self.parts[-1], part.text)
        if not told and (waits or time.monotonic() - self.spoken > SILENCE):
            told = language.waiting(self.name, piece)
        return told

    def _written(self, told: list[dict]) -> bytes:
        """Server-sent events. Those of Responses are numbered."""
        found = b""
        for one in told:
            if one["type"].startswith("response."):
                one["sequence_number"] = self.number
            self.number += 1
            found += f"event: {one['type']}\n".encode() + event(one)
        return found


def joined(turns: Iterable[dict]) -> list[dict]:
    """A chat's messages. Consecutive items of the assistant are joined to one message."""
    found: list[dict] = []
    for turn in turns:
        if found and turn["role"] == "assistant" == found[-1]["role"]:
            for key in turn.keys() - {"role"}:
                found[-1][key] = found[-1].get(key, type(turn[key])()) + turn[key]
        else:
            found.append(turn)
    return found


def texts(content: Any) -> Any:
    """Content in a chat's form: a list of parts. Invalid parts are refused later."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


def form_of(field: str, form: Any) -> dict | None:
    """A form as `response_format`, which nests a JSON schema one level deeper. Raises `BadRequest`.
    """
    if not isinstance(form, dict | None):
        raise BadRequest(f"{field}.format must be an object with a type, got {form!r:.80}", field)
    is_schema = form is not None and form.get("type") == "json_schema"
    return dict(type="json_schema", json_schema=form) if is_schema else form


def called(id_: Any, name: Any, arguments: Any) -> list[dict]:
    if not isinstance(name, str):
        raise BadRequest(f"a call must name its function, got name={name!r:.80}")
    return [dict(id=id_, type="function", function=dict(name=name, arguments=arguments))]


def tool(one: dict, parameters: Any) -> dict:
    """A tool in a chat's form."""
    shown = dict(name=one.get("name"), description=one.get("description"), parameters=parameters)
    return dict(type="function", function={
        key: value for key, value in shown.items() if value is not None})


# -------------------------------------------------------------------- Responses


# The share of max_output_tokens that each effort allows for a thought, as OpenRouter has it.
SHARES = dict(minimal=0.1, low=0.2, medium=0.5, high=0.8, xhigh=0.95, max=0.95)


# Beginning of ids that OpenAI gives to thoughts, and to the work of a provider's own tools.
THOUGHTS, REFERENCE = "rs_", "item_reference"
UNREAD = THOUGHTS, "ws_", "fs_", "ci_", "ig_", "cu_", "mcp_", "mcpl_", "mcpr_", "lsh_"


def kind_of(item: dict) -> str:
    """An item's type, which may be left out: a message has a role, and a reference an id alone."""
    is_id = item.keys() <= {"type", "id"} and "id" in item
    return str(item.get("type") or (REFERENCE if is_id else "message"))


class ResponsesBody(Language):
    """`POST /v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    store: Any = None  # False: no item of the answer is kept
    # These are only repeated in the answer.
    metadata: dict[str, Any] | None = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None
    _kept: Kept = PrivateAttr(default_factory=Kept)

    def recall(self, kept: Kept) -> None:
        """A reference to a thought that is no longer kept is treated as an unknown field."""
        self._kept, items = kept, []
        for item in self._items():
            if kind_of(item) == REFERENCE:
                item = kept.find(item.get("id")) or item
            if kind_of(item) == REFERENCE and str(item.get("id")).startswith(THOUGHTS):
                self.model_extra[f"input: {REFERENCE} of a thought"] = item
            items.append(item)
        self.input = items

    def as_chat(self) -> dict:
        reasoning = self.reasoning or {}
        if "message.output_text.logprobs" in (self.include or ()):
            raise BadRequest("include: answers here have no place for logprobs: use "
                             "/v1/chat/completions", "include")
        if foreign := {"enabled", "exclude"} & reasoning.keys():
            raise BadRequest(f"reasoning: {min(foreign)} is not supported: say how much with effort"
                             " (none to max) or max_tokens", "reasoning")
        share, budget = SHARES.get(str(reasoning.get("effort"))), whole(reasoning.get("max_tokens"))
        if budget is None and share and self.max_output_tokens:
            budget = int(share * self.max_output_tokens)
        if budget is not None and (type(budget) is not int or budget < 0):
            raise BadRequest("reasoning: max_tokens must be a whole number of at least 0, got "
                             f"{budget!r:.80}", "reasoning")
        return dict(
            messages=self._messages(), parallel_tool_calls=self.parallel_tool_calls,
            tools=[dict(type="custom", custom=one) if one.get("type") == "custom" else
                   tool(one, one.get("parameters")) for one, _ in self._functions()],
            tool_choice=self.tool_choice, max_completion_tokens=self.max_output_tokens,
            response_format=form_of("text", (self.text or {}).get("format")),
            reasoning_effort=reasoning.get("effort"),
            thinking=None if budget is None else dict(type="auto", budget_tokens=budget))

    def _functions(self) -> list[tuple[dict, str | None]]:
        """All functions, each with its namespace: Codex sends its tools in groups, some in an item.
        """
        added = [item["tools"] for item in self._items() if item.get("type") == ADDED]
        return [(one, group["name"] if one is not group else None)
                for group in chain(self.tools, *added)
                for one in (group.get("tools", ()) if group.get("type") == "namespace"
                            else [group]) if one.get("type") in FUNCTIONS]

    def _items(self) -> list[dict]:
        given = self.input
        return [dict(role="user", content=given)] if isinstance(given, str) else given

    def _messages(self) -> list[dict]:
        """The chat's messages. Raises `BadRequest` if nothing is left for the model."""
        if not (found := joined(self.turns())):
            raise BadRequest("input: none of its items says anything to the model", "input")
        return found

    def turns(self) -> Iterator[dict]:
        if self.instructions:
            yield dict(role="system", content=self.instructions)
        for item in self._items():
            kind = kind_of(item)
            if (field := NEEDED.get(kind)) and item.get(field) is None and (
                    field != "output" or field not in item):  # a result may be null
                raise BadRequest(f"input: an item of type {kind!r} needs {field}, got {item!r:.80}",
                                 "input")
            if kind == "message":
                yield dict(role=item.get("role"), content=texts(item.get("content")))
            elif kind in NEEDED and kind.endswith("_call"):
                given = item.get("arguments") if kind == "function_call" else dict(
                    input=item.get("input"))
                yield dict(role="assistant", content=[], tool_calls=called(
                    item.get("call_id"), item.get("name"), given))
            elif kind in NEEDED:
                yield dict(role="tool", tool_call_id=item.get("call_id"),
                           content=texts(item.get("output")))
            elif kind == "reasoning":
                thought = texts(item.get("content")) or texts(item.get("summary"))
                if not all(isinstance(one, dict) and isinstance(one.get("text", ""), str)
                           for one in thought):
                    raise BadRequest("input: the content and the summary of reasoning are texts, "
                                     f"got {thought!r:.80}", "input")
                yield dict(role="assistant", content=[], reasoning_content="".join(
                    one.get("text", "") for one in thought))
            elif kind == REFERENCE:
                if not str(item.get("id")).startswith(UNREAD):
                    raise BadRequest(
                        f"input: an {REFERENCE} ({item.get('id')!r:.80}) names what is not kept "
                        "here, or no longer: send the item itself. With store: false clients do "
                        "so", "input")
            elif not kind.endswith("_call") and kind != ADDED:  # a provider's call is in its words
                raise BadRequest(f"input: an item of type {kind!r:.80} is not supported, because "
                                 "nothing is kept or hosted here: send its text", "input")

    # ------------------------------------------------------------ its answer

    def counted(self, num_tokens: int) -> dict:
        return dict(object="response.input_tokens", input_tokens=num_tokens)

    def whole(self, name: str, chat: dict, parts: list[AnswerPart], choice: dict | None) -> dict:
        """The response. choice: the chat's last choice; None: the answer is not complete."""
        cut = choice is not None and choice["finish_reason"] == "length"
        status = "in_progress" if choice is None else "incomplete" if cut else "completed"
        usage = chat.get("usage") if choice is not None else None
        format_ = dict(format=dict(type="text"))
        return dict(
            id=f"resp_{name}", object="response", created_at=chat["created"], status=status,
            error=None, model=chat["model"], output=[self._item(part, status) for part in parts],
            incomplete_details=dict(reason="max_output_tokens") if cut else None,
            instructions=self.instructions, tools=self.tools, store=False,
            metadata=self.metadata or {}, tool_choice=self.tool_choice or "auto",
            temperature=self.temperature, top_p=self.top_p,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            text=format_ | (self.text or {}), reasoning=self.reasoning, truncation="disabled",
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            max_output_tokens=self.max_output_tokens, max_tool_calls=None, top_logprobs=0,
            background=False, previous_response_id=None, user=self.user,
            safety_identifier=self.safety_identifier, prompt_cache_key=self.prompt_cache_key,
            service_tier=self.service_tier or "default",
            completed_at=int(time.time()) if status == "completed" else None,
            usage=usage and dict(
                input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"],
                total_tokens=usage["total_tokens"],
                # Zero, as in Messages, since writing to the prefix cache costs nothing.
                input_tokens_details=usage["prompt_tokens_details"] | dict(cache_write_tokens=0),
                output_tokens_details=usage["completion_tokens_details"]))

    def _item(self, part: AnswerPart, status: str = "completed") -> dict:
        content = [self._content(part)] if part.text else []
        if part.kind == "thought":
            return dict(type="reasoning", id=f"rs_{part.id}", summary=[], status=status,
                        content=content)
        if part.kind == "said":
            return dict(type="message", id=f"msg_{part.id}", role="assistant", status=status,
                        content=content)
        kind, group = self._shown.get(part.name, (None, None))
        own = dict(type="custom_tool_call", input=part.text) if kind == "custom" else \
            dict(type="function_call", arguments=part.text)
        return own | dict(id=f"fc_{part.id}", call_id=part.id, name=part.name, status=status,
                          **(dict(namespace=group) if group else {}))

    @cached_property
    def _shown(self) -> dict[str, tuple]:
        """The kind of tool and the group, by name."""
        return {one.get("name"): (one.get("type"), group) for one, group in self._functions()}

    def _written(self, part: AnswerPart) -> str:
        is_custom = "input" in self._item(part)
        return "custom_tool_call_input" if is_custom else WRITTEN[part.kind]

    def _content(self, part: AnswerPart) -> dict:
        if part.kind == "thought":
            return dict(type="reasoning_text", text=part.text)
        return dict(type="output_text", text=part.text, annotations=[], logprobs=[])

    def answer(self, chat: dict) -> dict:
        return self._keep(super().answer(chat))

    def _keep(self, response: dict) -> dict:
        """Keep the items of a response that has ended."""
        if self.store is not False:
            self._kept.add(response["output"])
        return response

    def begun(self, name: str, chat: dict) -> list[dict]:
        response = self.whole(name, chat, [], None)
        return [dict(type=f"response.{kind}", response=response)
                for kind in ("created", "in_progress")]

    def waiting(self, name: str, chat: dict) -> list[dict]:
        """The event for a long silence. OpenAI's own `keepalive` is undocumented, and some clients
        stop at it."""
        return self.begun(name, chat)[1:]

    def _at(self, one: AnswerPart, kind: str, **more) -> dict:
        """An event about a part that does not contain the whole item."""
        where = {} if one.kind == "call" else dict(content_index=0)
        if kind.startswith("output_text."):
            where["logprobs"] = []
        return dict(type=f"response.{kind}", output_index=one.index, **where, **more,
                    item_id=self._item(one)["id"])

    def opened(self, part: AnswerPart) -> list[dict]:
        item = dict(type="response.output_item.added", output_index=part.index,
                    item=self._item(part, "in_progress"))
        if part.kind == "call":
            return [item]
        return [item, self._at(part, "content_part.added", part=self._content(part))]

    def grown(self, part: AnswerPart, text: str) -> list[dict]:
        return [self._at(part, f"{self._written(part)}.delta", delta=text)]

    def ended(self, part: AnswerPart) -> list[dict]:
        done = f"{self._written(part)}.done"
        item = dict(type="response.output_item.done", output_index=part.index,
                    item=self._item(part))
        if "input" in item["item"]:
            return [self._at(part, done, input=part.text), item]
        if part.kind == "call":
            return [self._at(part, done, arguments=part.text, name=part.name), item]
        return [self._at(part, done, text=part.text),
                self._at(part, "content_part.done", part=self._content(part)), item]

    def over(self, name: str, chat: dict, parts: list[AnswerPart], choice: dict) -> list[dict]:
        response = self._keep(self.whole(name, chat, parts, choice))
        return [dict(type=f"response.{response['status']}", response=response)]

    def failed(self, name: str, chat: dict, parts: list[AnswerPart], error: dict) -> list[dict]:
        """The event for which Codex and OpenAI's client wait; they ignore others."""
        response = self.whole(name, chat, parts, None) | dict(
            status="failed", output=[self._item(part, "incomplete") for part in parts],
            error=dict(code="server_error", message=error["error"]["message"]))
        return [dict(type="response.failed", response=response)]


WRITTEN = dict(thought="reasoning_text", said="output_text", call="function_call_arguments")
