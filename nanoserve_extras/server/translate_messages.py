"""`/v1/messages` and its `count_tokens`: Anthropic's API for a chat.

    roles      user, assistant; the system's text is a field of its own
    content    a text, or blocks: text, image, thinking, tool_use (a call), tool_result
    events     message_start  (content_block_start  content_block_delta ...  content_block_stop)*
               message_delta  message_stop, and ping where nothing happens for some seconds

A tool_result block becomes a chat's message with the role "tool"; a user's turn may hold several
such blocks and texts; a turn of the assistant with several calls is one message. If a conversation
ends with a turn of the assistant, the answer continues it. Templates have no mark for a result that
is an error, so its text begins with "Error". Prompt tokens from the prefix cache are counted
separately.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic's rule, until Python 3.12

from nanoserve_extras.server.errors import TOO_LONG, BadRequest
from nanoserve_extras.server.translate import (
    AnswerPart,
    Language,
    called,
    form_of,
    joined,
    texts,
    tool,
)

# Claude Code's first line differs in each request: the prefix cache would find no block after it.
BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
# Blocks in a history that only the provider can read, and those of tools that the provider runs.
HOSTED = re.compile(r"redacted_thinking|(server|mcp)_tool_use|\w+_tool_result")
STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = dict(thought=("thinking_delta", "thinking"), said=("text_delta", "text"),
              call=("input_json_delta", "partial_json"))


def arguments_of(text: str) -> dict:
    """A call's arguments; {} if max_tokens has cut them. Python reads 1e400 as Infinity, which JSON
    can't represent: it becomes the largest float."""
    most = sys.float_info.max

    def refuse(name: str):
        raise ValueError(name)

    try:
        return json.loads(text, parse_float=lambda one: max(-most, min(float(one), most)),
                          parse_constant=refuse)
    except ValueError:
        return {}


class Turn(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class CountBody(Language):
    """`POST /v1/messages/count_tokens`: how many tokens the prompt would have."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # older clients say it here

    def not_shown(self, said: str) -> str:
        """Anthropic's own words: on them Claude Code removes the image from its history."""
        return f"Could not process image: {said}"

    def as_chat(self) -> dict:
        choice, messages = self.tool_choice or {}, joined(self.turns())
        words = texts(self.messages[-1]["content"])
        goes_on = self.messages[-1]["role"] == "assistant" and bool(
            words and words[-1].get("text")) and "tool_calls" not in messages[-1]
        return dict(
            messages=messages, continue_final_message=goes_on, tool_choice=self.tool_choice,
            tools=[tool(one, one.get("input_schema")) for one in self.tools],
            response_format=form_of("output_config", (self.output_config or {}).get(
                "format", self.output_format)),
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            reasoning_effort=(self.output_config or {}).get("effort"))

    def turns(self) -> Iterator[dict]:
        system = [one | dict(text=BILLING.sub("", one["text"])) if "text" in one else one
                  for one in texts(self.system)]
        if system := [one for one in system if one.get("text") != ""]:
            yield dict(role="system", content=system)
        for message in self.messages:
            role, rest = message["role"], []
            for block in texts(message["content"]):
                kind = block.get("type")
                if kind == "tool_result":
                    if not isinstance(block.get("content"), (str, list, type(None))):
                        raise BadRequest("messages: the content of a tool_result must be a text or "
                                         f"blocks, got {block['content']!r:.80}", "messages")
                    said = [dict(type="text", text="Error:")] if block.get("is_error") else []
                    yield dict(role="tool", tool_call_id=block.get("tool_use_id"),
                               content=said + texts(block.get("content")))
                elif kind == "tool_use":
                    yield dict(role=role, content=rest, tool_calls=called(
                        block.get("id"), block.get("name"), block.get("input")))
                    rest = []
                elif not HOSTED.fullmatch(str(kind)):
                    rest.append(block)
            if rest:
                yield dict(role=role, content=rest)


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    begins_with_text = True  # `message_start` has the usage, and what was cached is known by then
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None

    def as_chat(self) -> dict:
        return super().as_chat() | dict(stop=self.stop_sequences)

    def too_much(self, count: int, limit: int, room: int) -> BadRequest:
        """Anthropic's own words: Claude Code reads the numbers, and asks again for less."""
        return BadRequest("input length and `max_tokens` exceed context limit: "
                          f"{count} + {limit} > {room}", "max_tokens", code=TOO_LONG)

    # ------------------------------------------------------------ its answer

    def whole(self, name: str, chat: dict, parts: list[AnswerPart], choice: dict) -> dict:
        return dict(id=f"msg_{name}", type="message", role="assistant", model=chat["model"],
                    content=[self._block(part) for part in parts], **self._stop(choice, parts),
                    usage=self._usage(chat))

    def _usage(self, chat: dict) -> dict:
        usage = chat["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return dict(input_tokens=usage["prompt_tokens"] - cached, cache_read_input_tokens=cached,
                    cache_creation_input_tokens=0, output_tokens=usage["completion_tokens"])

    def _stop(self, choice: dict, parts: list[AnswerPart]) -> dict:
        reason, stop = choice["finish_reason"], choice["stop_reason"]
        if reason == "stop" and isinstance(stop, str):
            return dict(stop_reason="stop_sequence", stop_sequence=stop)
        if reason == "stop" and any(part.kind == "call" for part in parts):
            reason = "tool_calls"  # also of a tool that was named
        return dict(stop_reason=reason and STOPS.get(reason, "end_turn"), stop_sequence=None)

    def _block(self, part: AnswerPart, is_empty: bool = False) -> dict:
        if part.kind == "call":
            given = {} if is_empty else arguments_of(part.text)
            return dict(type="tool_use", id=part.id, name=part.name, input=given)
        if part.kind == "thought":
            return dict(type="thinking", thinking="" if is_empty else part.text, signature="")
        return dict(type="text", text="" if is_empty else part.text)

    def begun(self, name: str, chat: dict) -> list[dict]:
        none = dict(finish_reason=None, stop_reason=None)
        return [dict(type="message_start", message=self.whole(name, chat, [], none))]

    def waiting(self, name: str, chat: dict) -> list[dict]:
        return [dict(type="ping")]

    def opened(self, part: AnswerPart) -> list[dict]:
        return [dict(type="content_block_start", index=part.index,
                     content_block=self._block(part, is_empty=True))]

    def grown(self, part: AnswerPart, text: str) -> list[dict]:
        kind, key = DELTAS[part.kind]
        return [dict(type="content_block_delta", index=part.index,
                     delta={"type": kind, key: text})]

    def ended(self, part: AnswerPart) -> list[dict]:
        return [dict(type="content_block_stop", index=part.index)]

    def over(self, name: str, chat: dict, parts: list[AnswerPart], choice: dict) -> list[dict]:
        delta = self._stop(choice, parts)
        return [dict(type="message_delta", delta=delta, usage=self._usage(chat)),
                dict(type="message_stop")]
