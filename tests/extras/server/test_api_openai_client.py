"""OpenAI's own client against a real server on the loopback: what its users will do.

Oracle: offline `generate` and `chat` of the same engine, with the same seeds.
"""

import asyncio

import pytest
from serving import CHAT, PROMPT

from nanoserve import SamplingParams

openai = pytest.importorskip("openai", reason="the client is one of the extra 'test'")

OFFLINE = dict(seed=11, temperature=1.0, top_p=0.9, max_tokens=10)
ASKED = dict(model="tested", **OFFLINE)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def told(server) -> str:
    return server.offline(**OFFLINE).outputs[0].text


def answer_of(server, **more) -> str:
    [output] = server.llm.chat(CHAT, SamplingParams(**OFFLINE | more), use_tqdm=False)
    return output.outputs[0].text


def test_completions(client, told):
    answer = client.completions.create(prompt=PROMPT, **ASKED)
    assert answer.choices[0].text == told and answer.usage.completion_tokens == 10
    pieces = list(client.completions.create(prompt=PROMPT, stream=True, **ASKED))
    assert "".join(piece.choices[0].text for piece in pieces) == told


def test_chats(client, server):
    answered = answer_of(server)
    answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **ASKED)
    assert answer.choices[0].message.content == answered
    assert len(answer.choices[0].logprobs.content) == 10
    pieces = list(client.chat.completions.create(
        messages=CHAT, stream=True, stream_options=dict(include_usage=True), **ASKED))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == answered
    assert pieces[-1].usage.total_tokens == answer.usage.total_tokens


def test_the_streaming_helper_sees_the_whole_message(client, server):
    stopped = dict(stop=" the", max_tokens=500)
    with client.chat.completions.stream(messages=CHAT, **ASKED | stopped) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == answer_of(server, **stopped)
    assert final.choices[0].finish_reason == "stop"


def test_the_asynchronous_client_side_by_side(server, told):
    async def both():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            async def streamed() -> str:
                stream = await client.completions.create(prompt=PROMPT, stream=True, **ASKED)
                return "".join([piece.choices[0].text async for piece in stream])

            async def whole() -> str:
                answer = await client.chat.completions.create(messages=CHAT, **ASKED)
                return answer.choices[0].message.content
            return await asyncio.gather(streamed(), whole(), streamed())
    assert asyncio.run(both()) == [told, answer_of(server), told]


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="tested", prompt="x", temperature=-9)
    assert caught.value.param == "temperature"
    assert [model.id for model in client.models.list()] == ["tested", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tested", messages=CHAT, max_tokens=10 ** 6)
    assert caught.value.code == "invalid_value" and caught.value.request_id
