"""Answers of the server, made of outputs by hand."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from nanoserve.request import CompletionOutput, Logprob, RequestOutput
from nanoserve_extras.base.request import RequestStateStats
from nanoserve_extras.server import translate
from nanoserve_extras.server.answers import COMMENT, ChatAnswer, CompletionAnswer
from nanoserve_extras.server.protocol import ChatBody, CompletionBody
from nanoserve_extras.server.tools import Call, Piece
from nanoserve_extras.server.translate import EventWriter, ResponsesBody
from nanoserve_extras.server.translate_messages import MessagesBody


def test_of_tokens_with_one_text_the_own_or_the_likeliest_logprob_stays():
    """`top_logprobs` is keyed by text, and the last of several broken bytes took the place of all:
    of the token itself, and of likelier ones."""
    body = CompletionBody(prompt="x", logprobs=2)
    request = SimpleNamespace(request_id="0", prompt_token_ids=[5])
    answer = CompletionAnswer(body, [request], "model", "id")
    rows = [[(7, -3.0, "\ufffd"), (1, -0.5, "\ufffd"), (2, -1.0, "a"), (3, -2.0, "a")],
            [(2, -1.0, "a"), (1, -0.5, "\ufffd"), (7, -3.0, "\ufffd")],
            [(4, -0.1, None), (5, -9e9, None)]]
    sample = CompletionOutput(0, "", [row[0][0] for row in rows], logprobs=[
        {token_id: Logprob(value, None, text) for token_id, value, text in row} for row in rows])
    made = answer.news(0, request, sample)[0]["choices"][0]["logprobs"]
    assert made["tokens"] == ["\ufffd", "a", "token_id:4"]
    assert made["token_logprobs"] == [-3.0, -1.0, -0.1]
    assert made["top_logprobs"] == [{"\ufffd": -3.0, "a": -1.0}, {"a": -1.0, "\ufffd": -0.5},
                                    {"token_id:4": -0.1, "token_id:5": -9999.0}]


MESSAGES = [dict(role="user", content="Hi")]


def streamed(language, outputs: list, reader=None) -> list[bytes]:
    """The events of a stream. outputs: a text for each, or None for a silence."""
    fields = language.chat() if hasattr(language, "chat") else language.model_dump()
    half = SimpleNamespace(num_computed_tokens=4, num_cached_tokens=1)
    request = SimpleNamespace(request_id="0", prompt_token_ids=[5] * 8, sequences=[half],
                              stats=RequestStateStats(), tokenizer=SimpleNamespace(decode=str))
    answer = ChatAnswer(ChatBody(**fields), [request], "model", "id")
    answer.readers = [reader]

    async def come():
        for i, text in enumerate(outputs):
            yield text and RequestOutput("0", "", [], None, [CompletionOutput(
                0, text, [i], finish_reason="stop" if i == len(outputs) - 1 else None)], False,
                num_cached_tokens=1)

    async def read():
        is_chat = isinstance(language, ChatBody)
        teller = answer if is_chat else EventWriter(language, answer.head("chat"))
        return [one async for one in teller.events(answer.pieces(come()))]
    return asyncio.run(read())


def test_a_chat_says_that_it_is_at_work_by_a_comment_or_by_progress():
    """A comment is no event: whoever reads a stream passes it over."""
    told = streamed(ChatBody(messages=MESSAGES, stream=True), [None, None, "a", None, "b"])
    assert [one == COMMENT for one in told] == [True, True, False, False, True, *[False] * 3]
    told = streamed(ChatBody(messages=MESSAGES, stream=True, return_progress=True), [None, "a"])
    first, second = (json.loads(one[6:]) for one in told[:2])
    assert [one["prompt_progress"] for one in (first, second)] == [
        dict(total=8, cache=1, processed=count, time_ms=0) for count in (4, 8)]
    assert first["choices"] == [] and COMMENT not in told


@pytest.mark.parametrize(("body", "before", "later"), [
    (ResponsesBody(input="Hi", stream=True), ["response.created", "response.in_progress"],
     ["response.in_progress"]),
    (MessagesBody(messages=MESSAGES, max_tokens=9, stream=True), ["ping"], ["ping"])])
def test_other_languages_say_so_by_an_event_that_their_clients_count(body, before, later,
                                                                     monkeypatch):
    def kinds(told):
        return [json.loads(one)["type"] for one in re.findall(b"(?m)^data: (.+)$", b"".join(told))]
    plain = kinds(streamed(body, ["a", "b"]))
    told = kinds(streamed(body, [None, "a", None, "b"]))
    assert told[:len(before)] == before
    assert [one for one in told if one not in before] == [
        one for one in plain if one not in before]
    assert told.count(later[0]) == 2

    class Swallows:  # as what is written of a call of a custom tool
        num_calls, state = 1, "calls"

        def feed(self, text, ended):
            return Piece(calls=[Call("f", "{}")]) if ended else Piece()

        def count_thought(self, *_):
            return 0
    monkeypatch.setattr(translate, "SILENCE", -1)
    told = kinds(streamed(body, ["a", "b", "c", "d"], Swallows()))
    assert told.count(later[0]) > 2
