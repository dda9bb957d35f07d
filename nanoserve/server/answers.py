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
        return self.head(self.whole_name) | dict(choices=choices, usage=self.usage(),
                                                 **self.beside_choices())

    async def pieces(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[bytes]:
        """Events, one for each choice that has news (outputs are DELTA)."""
        head = self.head(self.piece_name)
        if self.body.include_usage:
            head["usage"] = None  # OpenAI's: there in every piece, and null until the last
        ended: set[int] = set()
        for data in self.openings():
            if self.body.counts_as_it_goes:
                head["usage"] = self.usage()
            yield event(head | data)
        requests = {request.request_id: request for request in self.requests}
        async for output in outputs:
            self._count(output)
            request = requests[output.request_id]
            for sample in self.ready(request, output):
                index = self.first[output.request_id] + sample.index
                if index in ended or not (sample.text or sample.token_ids or sample.finish_reason):
                    continue
                if sample.finish_reason is not None:
                    ended.add(index)
                if self.body.counts_as_it_goes:
                    head["usage"] = self.usage()
                for choice in self.news(index, request, sample):
                    yield event(head | {"choices": [choice]})
        if self.body.include_usage:
            yield event(head | {"choices": [], "usage": self.usage()})
        yield DONE

    def openings(self) -> list[dict]:
        """What a stream begins with, before any token is known."""
        return []

    def ready(self, request: Request, output: RequestOutput) -> list[CompletionOutput]:
        """What of a stream's new output can be shown now."""
        return output.outputs

    def beside_choices(self) -> dict:
        """What stands beside the choices of a whole answer."""
        return {}

    def choice(self, index: int, request: Request, sample: CompletionOutput,
               output: RequestOutput) -> dict:
        raise NotImplementedError

    def news(self, index: int, request: Request, sample: CompletionOutput) -> list[dict]:
        """The pieces that tell a choice's news."""
        raise NotImplementedError

    # ---------------------------------------------------- vLLM's additions

    def token_ids(self, sample: CompletionOutput) -> dict:
        return dict(token_ids=sample.token_ids) if self.body.return_token_ids else {}

    def of_prompt(self, request: Request, output: RequestOutput | None = None) -> dict:
        """A prompt's ids and logprobs, where they are asked for."""
        found = {}
        if self.body.return_token_ids:
            found["prompt_token_ids"] = request.prompt_token_ids
        if output is not None and self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = [
                entries and {str(token_id): vars(entry) | dict(logprob=clamp(entry))
                             for token_id, entry in entries.items()}
                for entries in output.prompt_logprobs]
        return found

    def name(self, token_id: int, entry: Logprob) -> str:
        """What a token is called among logprobs."""
        as_id = self.body.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else token_text(token_id, entry)


class CompletionAnswer(Answer):
    """`/v1/completions`. With `echo` the prompt stands in front of each choice."""

    body: CompletionBody
    whole_name = piece_name = "text_completion"
    prefix = "cmpl"

    def __post_init__(self):
        super().__post_init__()
        self.offsets: dict[int, int] = {}  # characters of a choice that were shown
        self.begun: set[int] = set()
        # Of streams with echo and logprobs: a prompt's own, and what waits for them.
        self.scored: dict[str, list] = {request.request_id: [] for request in self.requests}
        self.held: dict[str, list[CompletionOutput]] = {}

    def _count(self, output: RequestOutput) -> None:
        for sample in output.outputs if self.body.only_echo else ():
            sample.text, sample.token_ids, sample.stop_reason = "", [], None
            sample.logprobs = sample.logprobs and []
            sample.finish_reason = sample.finish_reason and "length"
        super()._count(output)

    def ready(self, request, output) -> list[CompletionOutput]:
        """Only the first sample scores the prompt, and others may be ahead of it: they wait."""
        if not self.body.scores_prompt:
            return output.outputs
        scored = self.scored[request.request_id]
        scored += output.prompt_logprobs
        held = self.held.pop(request.request_id, []) + output.outputs
        if output.finished or len(scored) == len(request.prompt_token_ids):
            return held
        self.held[request.request_id] = held
        return []

    def choice(self, index, request, sample, output) -> dict:
        return self._choice(index, request, sample, output.prompt_logprobs, output)

    def news(self, index, request, sample) -> list[dict]:
        return [self._choice(index, request, sample, self.scored[request.request_id])]

    def _choice(self, index: int, request: Request, sample: CompletionOutput,
                of_prompt: list | None, output: RequestOutput | None = None) -> dict:
        """A choice, or its next piece. of_prompt: logprobs."""
        text, token_ids, logprobs = sample.text, sample.token_ids, sample.logprobs
        more = self.token_ids(sample)
        if index not in self.begun:
            self.begun.add(index)
            more |= self.of_prompt(request, output)
            if self.body.echo:
                text = request.prompt + text
                if logprobs is not None:
                    token_ids = request.prompt_token_ids[:len(of_prompt)] + token_ids
                    logprobs = of_prompt + logprobs
        found, self.offsets[index] = self._logprobs(token_ids, logprobs, self.offsets.get(index, 0))
        return dict(index=index, text=text, logprobs=found, finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason, **more)

    def _logprobs(self, token_ids: list[int], logprobs: list[dict | None] | None,
                  offset: int) -> tuple[dict | None, int]:
        """OpenAI's older format, four lists side by side, and where the next token begins. A
        prompt's first token has no logprob."""
        if logprobs is None:
            return None, offset
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entries in zip(token_ids, logprobs, strict=True):
            entry = (entries or {}).get(token_id)
            text = self.text_of(token_id) if entry is None else token_text(token_id, entry)
            as_id = self.body.return_tokens_as_token_ids
            tokens.append(f"token_id:{token_id}" if as_id else text)
            values.append(None if entry is None else clamp(entry))
            tops.append(None if entries is None else self._tops(entries))
            offsets.append(offset)
            offset += len(text)
        return dict(tokens=tokens, token_logprobs=values, top_logprobs=tops,
                    text_offset=offsets), offset

    def _tops(self, entries: dict[int, Logprob]) -> dict[str, float]:
        """By text. Where several tokens have one text, the first stays: the token itself, which is
        the first of `entries`, or else the likeliest."""
        tops: dict[str, float] = {}
        for token_id, entry in entries.items():
            tops.setdefault(self.name(token_id, entry), clamp(entry))
        return tops

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
                    finish_reason=sample.finish_reason, stop_reason=sample.stop_reason,
                    **self.token_ids(sample))

    def beside_choices(self) -> dict:
        [request] = self.requests
        return self.of_prompt(request, self.outputs[request.request_id])

    def openings(self) -> list[dict]:
        """The role of every choice, sent before its first token."""
        return [{"choices": [self._piece(index, dict(role="assistant", content=""))],
                 **self.of_prompt(self.requests[0])} for index in range(self.body.num_samples)]

    def news(self, index, request, sample) -> list[dict]:
        """As OpenAI's, the end is a piece without text."""
        pieces = []
        if sample.text or sample.token_ids:
            pieces.append(self._piece(index, dict(content=sample.text), self._logprobs(sample),
                                      **self.token_ids(sample)))
        if sample.finish_reason is not None:
            pieces.append(self._piece(index, {}, None, sample.finish_reason, sample.stop_reason))
        return pieces

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
            tops = [self._object(*one) for one in islice(likeliest, self.body.num_logprobs())]
            content.append(self._object(token_id, entries[token_id]) | dict(top_logprobs=tops))
        return dict(content=content, refusal=None)

    def _object(self, token_id: int, entry: Logprob) -> dict:
        text = self.name(token_id, entry)
        return dict(token=text, logprob=clamp(entry), bytes=list(text.encode("utf-8", "replace")))


def token_text(token_id: int, entry: Logprob) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def clamp(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)
