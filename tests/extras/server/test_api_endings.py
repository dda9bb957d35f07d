"""Streams that end early: each says so in its own language, in the event that its clients wait for.

OpenAI's and Anthropic's clients pass over data without the name of an event; without one a cut
answer looks whole.
"""

import json
from contextlib import ExitStack

import pytest
from serving import CHAT, CHATS, COMPLETIONS, MESSAGES, RESPONSES, Serving, send

from nanoserve import LLM
from nanoserve_extras.server.answers import ChatAnswer

BODIES = {COMPLETIONS: dict(prompt="Once", max_tokens=1500),
          CHATS: dict(messages=CHAT, max_tokens=1500),
          RESPONSES: dict(input="Tell me a story.", max_output_tokens=1500, user="me"),
          MESSAGES: dict(messages=CHAT, max_tokens=1500)}


def events(data: bytes) -> list[tuple[str | None, dict]]:
    """Each event's name, if it has one, and its data."""
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        *name, text = block.split("\n")
        found.append((name[0].removeprefix("event: ") if name else None,
                      json.loads(text.removeprefix("data: "))))
    return found


def check_last(path: str, data: bytes, kind: str, words: str) -> None:
    """The last event is an error's, and no other one says that the answer has ended."""
    told = events(data)
    name, last = told[-1]
    assert not any(kind in ("message_stop", "response.completed") for kind, _ in told)
    if path == RESPONSES:
        assert name == last["type"] == "response.failed"
        assert [one["sequence_number"] for _, one in told] == list(range(len(told)))
        response, error = last["response"], last["response"]["error"]
        assert response["status"] == "failed" and response["user"] == "me"
        assert error["code"] == "server_error" and words in error["message"]
        grown = "".join(one["delta"] for kind, one in told if kind == "response.output_text.delta")
        assert grown == "".join(part["text"] for item in response["output"]
                                for part in item["content"])
        assert told[0][0] == "response.created"  # OpenAI's client counts on it
    else:
        assert name == ("error" if path == MESSAGES else None)
        assert last["type"] == "error" and last["error"]["type"] == kind
        assert words in last["error"]["message"]


def test_a_stream_that_the_servers_end_cuts():
    llm = LLM(dtype="float32", num_gpu_blocks_override=512)
    with Serving(llm) as server, ExitStack() as stack:
        open_ones = []
        for path, body in BODIES.items():
            connection = stack.enter_context(server.connection())
            send(connection, path, body | dict(stream=True, ignore_eos=True))
            answer = connection.getresponse()
            open_ones.append((path, answer, answer.readline()))
        server.server.config.timeout_graceful_shutdown = 0
        server.server.should_exit = True
        for path, answer, first in open_ones:
            data = first + answer.read()  # the engine's end may be faster than the web server's
            words = "--drain-seconds" if b"--drain-seconds" in data else "it was shut down"
            check_last(path, data, "overloaded_error", words)


@pytest.mark.parametrize("when", [0, 5])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_whose_step_fails(server, monkeypatch, path, when):
    """At its first token, or later."""
    launch, left = server.llm.runner.launch, [when]

    def broken(step):
        left[0] -= 1
        return 1 / 0 if left[0] == -1 else launch(step)
    monkeypatch.setattr(server.llm.runner, "launch", broken)
    _, data = server.ask_raw(path, BODIES[path] | dict(stream=True, ignore_eos=True))
    check_last(path, data, "api_error", "a step of the engine failed: ZeroDivisionError: division")
    assert server.ask(COMPLETIONS, dict(prompt="x", max_tokens=1))[0] == 200  # the engine goes on


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
def test_a_stream_in_which_we_are_wrong(server, monkeypatch, path, caplog):
    """It broke off in the middle of an event stream, with no word to the client."""
    news, left = ChatAnswer.news, [3]

    def broken(self, *args):
        left[0] -= 1
        return 1 / 0 if left[0] < 0 else news(self, *args)
    monkeypatch.setattr(ChatAnswer, "news", broken)
    _, data = server.ask_raw(path, BODIES[path] | dict(stream=True, ignore_eos=True))
    check_last(path, data, "api_error", "an error of this server")
