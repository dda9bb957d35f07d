"""What clients get: outputs of the engine as OpenAI's objects, whole or in pieces.

                     whole, at the end             in pieces, as server-sent events
    completion       text_completion               text_completion, each with what is new
    chat             chat.completion               chat.completion.chunk: a role, then texts

A *choice* is one sample of one prompt. Choices of a request come side by side and carry their
index: with 2 prompts and n=3 prompt 1's samples are 3, 4 and 5. The two endpoints have a class
each, because almost everything differs: the names, the shape of a piece, the logprobs.

    event stream     data: {a piece}  ...  data: {usage, if asked for}  data: [DONE]

Invariants: the pieces' texts joined are the whole text, and the last piece of a choice, and only
that, has a `finish_reason`. JSON has no -Infinity, so a logprob is at least `MIN_LOGPROB`.

Known limit: a token's `bytes` are those of its text, and so those of U+FFFD where a token is part
of a character. Not known here: HTTP, the engine. Road not taken: pydantic models for answers; they
cost more time than all the rest of a stream's event, and there is an event for each token.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from nanoserve.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from nanoserve.frontend.request import Request
from nanoserve.server.protocol import ChatBody, CompletionBody

MIN_LOGPROB = -9999.0  # vLLM's
DONE = b"data: [DONE]\n\n"


def event(data: dict) -> bytes:
    """One server-sent event. Only ASCII, because a text may hold what UTF-8 has no bytes for."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict:
    """Tokens. A prompt counts once, however many samples it has."""
    return dict(prompt_tokens=num_prompt, completion_tokens=num_output,
                total_tokens=num_prompt + num_output,
                prompt_tokens_details=dict(cached_tokens=num_cached))


@dataclass
class Answer:
    """One answer under way. body: what was asked; requests: one for each prompt, in this order.
    The subclasses say how a choice looks."""

    body: Any
    requests: list[Request]
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    whole_name = piece_name = prefix = ""

    def __post_init__(self):
        self.outputs: dict[str, RequestOutput] = {}  # the newest of each request
        self.num_output = 0
        self.first = {request.request_id: index * self.body.num_samples
                      for index, request in enumerate(self.requests)}

    def head(self, name: str) -> dict:
        return dict(id=self.id, object=name, created=self.created, model=self.model)

    def usage(self) -> dict:
        """As of now. In a stream a DELTA has only new tokens, so they are counted as they come."""
        num_cached = sum(output.num_cached_tokens or 0 for output in self.outputs.values())
        return usage(sum(len(r.prompt_token_ids) for r in self.requests), self.num_output,
                     num_cached)

    def _count(self, output: RequestOutput) -> None:
        self.outputs[output.request_id] = output
        self.num_output += sum(len(sample.token_ids) for sample in output.outputs)

    async def whole(self, outputs: AsyncIterator[RequestOutput]) -> dict:
        """All of it, when all requests have ended (their outputs are FINAL_ONLY)."""
        async for output in outputs:
            self._count(output)
        choices = [self.choice(self.first[request.request_id] + sample.index, request, sample,
                               self.outputs[request.request_id])
                   for request in self.requests
                   for sample in self.outputs[request.request_id].outputs]
        return self.head(self.whole_name) | dict(choices=choices, usage=self.usage())

    async def pieces(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[bytes]:
        """Events, one for each choice that has news (outputs are DELTA)."""
        head = self.head(self.piece_name)
        if self.body.include_usage:
            head["usage"] = None  # OpenAI's: there in every piece, and null until the last
        ended: set[int] = set()
        for data in self.openings():
            yield event(head | data)
        requests = {request.request_id: request for request in self.requests}
        async for output in outputs:
            self._count(output)
            for sample in output.outputs:
                index = self.first[output.request_id] + sample.index
                if index in ended or not (sample.text or sample.token_ids or sample.finish_reason):
                    continue
                if sample.finish_reason is not None:
                    ended.add(index)
                choice = self.piece(index, requests[output.request_id], sample)
                yield event(head | {"choices": [choice]})
        if self.body.include_usage:
            yield event(head | {"choices": [], "usage": self.usage()})
        yield DONE

    def openings(self) -> list[dict]:
        """What a stream begins with, before any token is known."""
        return []

    def choice(self, index: int, request: Request, sample: CompletionOutput,
               output: RequestOutput) -> dict:
        raise NotImplementedError

    def piece(self, index: int, request: Request, sample: CompletionOutput) -> dict:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """`/v1/completions`. With `echo` the prompt stands in front of each choice."""

    body: CompletionBody
    whole_name = piece_name = "text_completion"
    prefix = "cmpl"

    def __post_init__(self):
        super().__post_init__()
        self.offsets: dict[int, int] = {}  # characters of a choice that were shown
        self.echoed: set[int] = set()

    def choice(self, index, request, sample, output) -> dict:
        text, token_ids, logprobs = sample.text, sample.token_ids, sample.logprobs
        start = 0
        if self.body.echo:
            text = request.prompt + text
            if logprobs is not None:
                token_ids = request.prompt_token_ids + token_ids
                logprobs = output.prompt_logprobs + logprobs
            start = len(request.prompt) if logprobs is None else 0
        return self._choice(index, text, sample, self._logprobs(token_ids, logprobs, start)[0])

    def piece(self, index, request, sample) -> dict:
        text = sample.text
        if self.body.echo and index not in self.echoed:
            self.echoed.add(index)
            text = request.prompt + text
        logprobs, self.offsets[index] = self._logprobs(
            sample.token_ids, sample.logprobs, self.offsets.get(index, 0))
        return self._choice(index, text, sample, logprobs)

    def _choice(self, index: int, text: str, sample: CompletionOutput, logprobs) -> dict:
        return dict(index=index, text=text, logprobs=logprobs, finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason)

    def _logprobs(self, token_ids: list[int], logprobs: list[dict | None] | None,
                  offset: int) -> tuple[dict | None, int]:
        """OpenAI's older format, four lists side by side, and where the next token begins. A
        prompt's first token has no logprob."""
        if logprobs is None:
            return None, offset
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entries in zip(token_ids, logprobs, strict=True):
            entry = (entries or {}).get(token_id)
            tokens.append(self.text_of(token_id) if entry is None else token_text(token_id, entry))
            values.append(None if entry is None else clamp(entry))
            tops.append(None if entries is None else top_logprobs(entries))
            offsets.append(offset)
            offset += len(tokens[-1])
        return dict(tokens=tokens, token_logprobs=values, top_logprobs=tops,
                    text_offset=offsets), offset

    def text_of(self, token_id: int) -> str:
        tokenizer = self.requests[0].tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id])


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    body: ChatBody
    whole_name, piece_name = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, index, request, sample, output) -> dict:
        message = dict(role="assistant", content=sample.text, refusal=None)
        return dict(index=index, message=message, logprobs=self._logprobs(sample),
                    finish_reason=sample.finish_reason, stop_reason=sample.stop_reason)

    def openings(self) -> list[dict]:
        """The role of every choice, sent before its first token."""
        return [{"choices": [self._piece(index, dict(role="assistant", content=""))]}
                for index in range(len(self.requests) * self.body.num_samples)]

    def piece(self, index, request, sample) -> dict:
        delta = dict(content=sample.text) if sample.text or sample.token_ids else {}
        return self._piece(index, delta, self._logprobs(sample), sample.finish_reason,
                           sample.stop_reason)

    def _piece(self, index: int, delta: dict, logprobs: dict | None = None,
               finish_reason: str | None = None, stop_reason: int | str | None = None) -> dict:
        return dict(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason,
                    stop_reason=stop_reason)

    def _logprobs(self, sample: CompletionOutput) -> dict | None:
        """OpenAI's newer format: an object for each token."""
        if sample.logprobs is None:
            return None
        content = []
        for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
            likeliest = sorted(entries.items(), key=lambda one: one[1].rank)
            tops = [entry_object(*one) for one in islice(likeliest, self.body.num_logprobs())]
            content.append(entry_object(token_id, entries[token_id]) | dict(top_logprobs=tops))
        return dict(content=content, refusal=None)


def entry_object(token_id: int, entry: Logprob) -> dict:
    text = token_text(token_id, entry)
    return dict(token=text, logprob=clamp(entry), bytes=list(text.encode("utf-8", "replace")))


def token_text(token_id: int, entry: Logprob) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def top_logprobs(entries: dict[int, Logprob]) -> dict[str, float]:
    """By text. Where several tokens have one text, the first stays: the token itself, which is the
    first of `entries`, or else the likeliest."""
    tops: dict[str, float] = {}
    for token_id, entry in entries.items():
        tops.setdefault(token_text(token_id, entry), clamp(entry))
    return tops


def clamp(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
