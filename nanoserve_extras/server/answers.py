"""Answers to clients: outputs of the engine as OpenAI's objects, whole or in pieces.

                     whole, at the end             in pieces, as server-sent events
    completion       text_completion               text_completion, each with the new text
    chat             chat.completion               chat.completion.chunk: a role, then texts

A *choice* is one sample of one prompt. Choices of a request come side by side and carry their
index: with 2 prompts and n=3 prompt 1's samples are 3, 4 and 5. The two endpoints have a class
each, because almost everything differs: the names, the shape of a piece, the logprobs.

    event stream     data: {a piece}  ...  data: {usage, if asked for}  data: [DONE]

While there is no text yet, for example during a long prompt, a comment is sent every few seconds,
because proxies and clients take a silent stream for dead. With llama.cpp's `return_progress` a
piece tells how much of the prompt is computed instead. A choice begins with its first token, not
before, because clients measure the time to it.

Invariants: the pieces' texts joined are the whole text, and the last piece of a choice, and only
that, has a `finish_reason`. JSON has no -Infinity, so a logprob is at least `MIN_LOGPROB`.

Known limit: a token's `bytes` are those of its text, and so those of U+FFFD if a token is part of a
character. Answers are dicts, not pydantic models: making a model takes longer than the rest of an
event, and there is an event for each token.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import uuid4

from nanoserve.request import CompletionOutput, Logprob, Request, RequestOutput
from nanoserve_extras.server.async_llm import EngineGenerateError
from nanoserve_extras.server.errors import as_json
from nanoserve_extras.server.protocol import ChatBody, CompletionBody
from nanoserve_extras.server.tools import TurnReader

MIN_LOGPROB = -9999.0  # vLLM's
SILENCE, WITH_PROGRESS = 5.0, 1.0  # seconds that a stream may be silent
INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*)')
HALF = re.compile("[\ud800-\udbff]\\Z")  # JSON writes some characters in two halves
COMMENT = b": still at work\n\n"


def event(data: dict) -> bytes:
    """One server-sent event, in ASCII, because a text may hold characters that UTF-8 can't encode
    (surrogates)."""
    return b"data: " + as_json(data) + b"\n\n"


@dataclass
class Answer:
    """One answer in progress. body: the client's request; requests: one for each prompt, in order.
    The subclasses define the form of a choice."""

    body: Any
    requests: list[Request]
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    whole_name = piece_name = prefix = ""

    def __post_init__(self):
        self.latest: dict[str, RequestOutput] = {}  # the last output of each request
        self.scored: dict[str, list] = {request.request_id: [] for request in self.requests}
        self.num_output = 0
        self.first = {request.request_id: index * self.body.num_samples
                      for index, request in enumerate(self.requests)}

    def head(self, name: str) -> dict:
        return dict(id=self.id, object=name, created=self.created, model=self.model)

    def usage(self) -> dict:
        """The usage so far. A prompt counts once, however many samples it has. In a stream an
        output (a DELTA) has only new tokens, so they are counted as they come."""
        num_prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        num_cached = sum(output.num_cached_tokens or 0 for output in self.latest.values())
        return dict(prompt_tokens=num_prompt, completion_tokens=self.num_output,
                    total_tokens=num_prompt + self.num_output,
                    prompt_tokens_details=dict(cached_tokens=num_cached))

    def _take(self, output: RequestOutput) -> None:
        """Count an output's tokens, and keep the prompt's logprobs, which a stream brings in
        pieces."""
        self.latest[output.request_id] = output
        for sample in output.outputs:
            if sample.finish_reason == "abort" and sample.stop_reason:  # the engine's reason
                raise EngineGenerateError(sample.stop_reason)
            self.num_output += len(sample.token_ids)
        self.scored[output.request_id] += output.prompt_logprobs or []

    async def whole(self, outputs: AsyncIterator[RequestOutput]) -> dict:
        """The whole answer, when all requests have ended (their outputs are FINAL_ONLY)."""
        async for output in outputs:
            self._take(output)
        choices = [self.choice(self.first[request.request_id] + sample.index, request, sample)
                   for request in self.requests
                   for sample in self.latest[request.request_id].outputs]
        return self.head(self.whole_name) | dict(choices=choices, usage=self.usage())

    @property
    def silence(self) -> float:
        return WITH_PROGRESS if self.body.return_progress else SILENCE

    def progress(self) -> dict:
        """Progress in llama.cpp's fields: tokens of all prompts in total, from the cache, and
        processed so far."""
        cached = processed = 0
        for request in self.requests:
            count, computed = len(request.prompt_token_ids), 0
            for seq in request.sequences[:1]:  # none before the thread of steps has taken it
                cached += seq.num_cached_tokens or 0
                computed = min(count, seq.num_computed_tokens)
            processed += count if request.request_id in self.latest else computed
        begun = [one.stats.scheduled_ts for one in self.requests if one.stats.scheduled_ts]
        return dict(total=sum(len(request.prompt_token_ids) for request in self.requests),
                    cache=cached, processed=processed, time_ms=round(
                        1000 * (time.monotonic() - min(begun))) if begun else 0)

    async def pieces(self, outputs: AsyncIterator[RequestOutput | None]) -> AsyncIterator[dict]:
        """A piece for each choice with new tokens (outputs are DELTA), or after a long silence."""
        head = self.head(self.piece_name)

        def piece(data: dict) -> dict:
            if self.body.include_usage:  # as OpenAI's: in every piece, null until the last
                goes_along = self.body.stream_options.continuous_usage_stats
                data["usage"] = self.usage() if goes_along else None
            return head | data

        ended: set[int] = set()
        requests = {request.request_id: request for request in self.requests}
        async for output in outputs:
            is_first = output is not None and output.request_id not in self.latest
            if output is not None:
                self._take(output)
            if output is None or is_first and self.body.return_progress:
                yield piece(dict(choices=[], prompt_progress=self.progress()))
            if output is None:
                continue
            request = requests[output.request_id]
            for sample in self.ready(request, output):
                index = self.first[output.request_id] + sample.index
                if index in ended or not (sample.text or sample.token_ids or sample.finish_reason):
                    continue
                if sample.finish_reason is not None:
                    ended.add(index)
                for data in self.news(index, request, sample):
                    yield piece(data)
        if self.body.include_usage:
            yield head | {"choices": [], "usage": self.usage()}

    async def events(self, pieces: AsyncIterator[dict]) -> AsyncIterator[bytes]:
        """The pieces as server-sent events. An error is the last event: no [DONE] follows it."""
        piece: dict = {}
        async for piece in pieces:
            is_silence = "prompt_progress" in piece and not self.body.return_progress
            yield COMMENT if is_silence else event(piece)
        if "error" not in piece:
            yield b"data: [DONE]\n\n"

    def failed(self, error: dict) -> bytes:
        """The last event of a stream that can't go on."""
        return event(error)

    def ready(self, request: Request, output: RequestOutput) -> list[CompletionOutput]:
        """The samples of a stream's new output that can be shown now."""
        return output.outputs

    def choice(self, index: int, request: Request, sample: CompletionOutput) -> dict:
        raise NotImplementedError

    def news(self, index: int, request: Request, sample: CompletionOutput) -> list[dict]:
        """The pieces for a choice's new tokens."""
        return [dict(choices=[self.choice(index, request, sample)])]

    # ---------------------------------------------------- vLLM's additions

    def token_ids(self, sample: CompletionOutput) -> dict:
        return dict(token_ids=sample.token_ids) if self.body.return_token_ids else {}

    def of_prompt(self, request: Request) -> dict:
        """A prompt's ids and logprobs, if the client asked for them."""
        found = {}
        if self.body.return_token_ids:
            found["prompt_token_ids"] = request.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = [
                entries and {str(token_id): vars(entry) | dict(logprob=clamp(entry))
                             for token_id, entry in entries.items()}
                for entries in self.scored[request.request_id]]
        return found

    def name(self, token_id: int, entry: Logprob) -> str:
        """A token's name among logprobs."""
        as_id = self.body.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else token_text(token_id, entry)


class CompletionAnswer(Answer):
    """`/v1/completions`. With `echo` each choice begins with the prompt."""

    body: CompletionBody
    whole_name = piece_name = "text_completion"
    prefix = "cmpl"

    def __post_init__(self):
        super().__post_init__()
        self.offsets: dict[int, int] = defaultdict(int)  # where a choice's next token begins
        self.begun: set[int] = set()
        self.held: dict[str, list[CompletionOutput]] = {}  # these wait for their prompt's logprobs

    def _take(self, output: RequestOutput) -> None:
        for sample in output.outputs if self.body.only_echo else ():
            sample.text, sample.token_ids, sample.stop_reason = "", [], None
            sample.logprobs = sample.logprobs and []
            sample.finish_reason = sample.finish_reason and "length"
        super()._take(output)

    def ready(self, request, output) -> list[CompletionOutput]:
        """Only the first sample scores the prompt. Other samples that are ahead of it wait."""
        held = self.held.pop(request.request_id, []) + output.outputs
        if self.body.num_prompt_logprobs is None or output.finished or len(
                self.scored[request.request_id]) == len(request.prompt_token_ids):
            return held
        self.held[request.request_id] = held
        return []

    def choice(self, index, request, sample) -> dict:
        """A choice, or its next piece."""
        text, token_ids, logprobs = sample.text, sample.token_ids, sample.logprobs
        more = self.token_ids(sample)
        if index not in self.begun:
            self.begun.add(index)
            more |= self.of_prompt(request)
            if self.body.echo:
                text = request.prompt + text
                if logprobs is not None:
                    of_prompt = self.scored[request.request_id]
                    token_ids = request.prompt_token_ids[:len(of_prompt)] + token_ids
                    logprobs = of_prompt + logprobs
        return dict(index=index, text=text, logprobs=self._logprobs(index, token_ids, logprobs),
                    finish_reason=sample.finish_reason, stop_reason=sample.stop_reason, **more)

    def _logprobs(self, index: int, token_ids: list[int],
                  logprobs: list[dict | None] | None) -> dict | None:
        """OpenAI's older format, four lists side by side. A prompt's first token has no logprob."""
        if logprobs is None:
            return None
        found = dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entries in zip(token_ids, logprobs, strict=True):
            entry = (entries or {}).get(token_id)
            text = self.text_of(token_id) if entry is None else token_text(token_id, entry)
            as_id = self.body.return_tokens_as_token_ids
            found["tokens"].append(f"token_id:{token_id}" if as_id else text)
            found["token_logprobs"].append(None if entry is None else clamp(entry))
            found["top_logprobs"].append(None if entries is None else self._tops(entries))
            found["text_offset"].append(self.offsets[index])
            self.offsets[index] += len(text)
        return found

    def _tops(self, entries: dict[int, Logprob]) -> dict[str, float]:
        """Logprobs by text. If several tokens have the same text, the first one is kept: the
        sampled token, which is the first of `entries`, or else the likeliest."""
        tops: dict[str, float] = {}
        for token_id, entry in entries.items():
            tops.setdefault(self.name(token_id, entry), clamp(entry))
        return tops

    def text_of(self, token_id: int) -> str:
        return self.requests[0].tokenizer.decode([token_id])


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    body: ChatBody
    whole_name, piece_name = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __post_init__(self):
        super().__post_init__()
        self.readers: list[TurnReader | None] = [None] * self.body.num_samples  # one a choice
        self.written: list[list[int]] = [[] for _ in self.readers]
        self.begun: set[int] = set()
        self.custom = self.body.custom
        self.inputs: dict[int, str] = {}  # arguments of a custom call in progress, by choice

    def _take(self, output: RequestOutput) -> None:
        super()._take(output)
        for sample in output.outputs:
            self.written[sample.index] += sample.token_ids

    def usage(self) -> dict:
        decode = self.requests[0].tokenizer.decode
        count = sum(reader.count_thought(token_ids, decode) for reader, token_ids in zip(
            self.readers, self.written, strict=True) if reader)
        return super().usage() | dict(completion_tokens_details=dict(reasoning_tokens=count))

    async def whole(self, outputs: AsyncIterator[RequestOutput]) -> dict:
        return await super().whole(outputs) | self.of_prompt(self.requests[0])

    def choice(self, index, request, sample) -> dict:
        message = dict(role="assistant", refusal=None) | self._parts(index, sample)
        return dict(index=index, message=message, logprobs=self._logprobs(sample),
                    finish_reason=self._ending(index, sample), stop_reason=sample.stop_reason,
                    **self.token_ids(sample))

    def _parts(self, index: int, sample: CompletionOutput) -> dict:
        """The new parts of a message: content, a thought, calls."""
        if (reader := self.readers[index]) is None:
            return dict(content=sample.text)
        is_cut = isinstance(sample.stop_reason, str)  # by a stop string, perhaps within a call
        piece = reader.feed(sample.text, "length" if is_cut else sample.finish_reason)
        parts: dict = {}
        if piece.thought and self.body.include_reasoning is not False:
            # DeepSeek's name and vLLM's name for a thought.
            parts["reasoning_content"] = parts["reasoning"] = piece.thought
        first, calls = reader.num_calls - len(piece.calls), []
        if piece.more and index in self.inputs:
            told = one_text(self.inputs[index])
            self.inputs[index] += piece.more
            calls.append(dict(index=first - 1, custom=dict(
                input=one_text(self.inputs[index])[len(told):])))
        elif piece.more:
            calls.append(dict(index=first - 1, function=dict(arguments=piece.more)))
        for i, call in enumerate(piece.calls):
            self.inputs.pop(index, None)
            own = dict(type="function", function=vars(call))
            if call.name in self.custom:
                self.inputs[index] = call.arguments
                own = dict(type="custom", custom=dict(name=call.name, input=one_text(
                    call.arguments)))
            calls.append(dict(id=uuid4().hex[:9], **own) | (
                dict(index=first + i) if self.body.stream else {}))
        if calls:
            parts["tool_calls"] = calls
        if not piece.said and (parts or reader.state == "calls"):
            return parts if self.body.stream else dict(content=None) | parts
        return dict(content=piece.said) | parts

    def _ending(self, index: int, sample: CompletionOutput) -> str | None:
        reader, reason = self.readers[index], sample.finish_reason
        is_cut = isinstance(sample.stop_reason, str) and reader and reader.state == "calls"
        has_called = reader and reader.num_calls and not is_cut
        if has_called and reason == "stop" and not self.body.names_tool:  # OpenAI's exception
            return "tool_calls"
        return reason

    def news(self, index, request, sample) -> list[dict]:
        """As in OpenAI's streams, the first piece has the role, and the last one has no text."""
        pieces = []
        if index not in self.begun:
            self.begun.add(index)
            pieces.append(self._piece(index, dict(role="assistant", content="")))
        if sample.text or sample.token_ids or self.readers[index]:
            parts = self._parts(index, sample)
            pieces.append(self._piece(index, parts, self._logprobs(sample),
                                      **self.token_ids(sample)))
        if sample.finish_reason is not None:
            pieces.append(self._piece(index, {}, None, self._ending(index, sample),
                                      sample.stop_reason))
        told = [dict(choices=[one]) for one in pieces]
        told[0] |= self.of_prompt(request) if "role" in pieces[0]["delta"] else {}
        return told

    def _piece(self, index: int, delta: dict, logprobs: dict | None = None,
               finish_reason: str | None = None, stop_reason: int | str | None = None,
               **more) -> dict:
        return dict(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason,
                    stop_reason=stop_reason, **more)

    def _logprobs(self, sample: CompletionOutput) -> dict | None:
        """OpenAI's newer format: an object for each token."""
        if sample.logprobs is None:
            return None
        content = []
        for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
            likeliest = sorted(entries.items(), key=lambda one: one[1].rank)
            tops = [self._object(*one) for one in islice(likeliest, self.body.num_logprobs)]
            content.append(self._object(token_id, entries[token_id]) | dict(top_logprobs=tops))
        return dict(content=content, refusal=None)

    def _object(self, token_id: int, entry: Logprob) -> dict:
        text = self.name(token_id, entry)
        return dict(token=text, logprob=clamp(entry), bytes=list(text.encode("utf-8", "replace")))


def one_text(arguments: str) -> str:
    """A custom tool's input, as far as it was written. Arguments without an input are returned as
    they are."""
    if found := INPUT.match(arguments):
        return HALF.sub("", json.loads(f'"{found[1]}"', strict=False))
    return "" if '{"input":"'.startswith("".join(arguments.split())) else arguments


def token_text(token_id: int, entry: Logprob) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def clamp(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
