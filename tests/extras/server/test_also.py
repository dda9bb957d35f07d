"""Two models in one server: `nanoserve serve MODEL --also EMBEDDER`.

Oracles: each model by itself, in an engine of its own.
"""

import re

import pytest

pytest.importorskip("fastapi")

from serving import CHATS, COMPLETIONS, NAME, Serving  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve_extras.server import api, cli  # noqa: E402
from nanoserve_extras.server.async_llm import AsyncLLM  # noqa: E402

SIZE = dict(dtype="float32", num_gpu_blocks_override=64)
TEXT = "Once upon a time"
CHAT = dict(messages=[dict(role="user", content=TEXT)], temperature=0, max_tokens=4)
COMPLETION = dict(prompt=TEXT, temperature=0, max_tokens=4)


def embedder() -> LLM:
    return LLM(runner="pooling", convert="embed", **SIZE)


@pytest.fixture(scope="module")
def both():
    with Serving(LLM(**SIZE), also=(AsyncLLM(embedder()), ["embedder"])) as serving:
        yield serving


@pytest.fixture(scope="module")
def vector():
    with embedder() as llm:
        return llm.embed(TEXT, use_tqdm=False)[0].outputs.embedding


def test_a_body_goes_to_the_model_that_it_names_or_that_can_do_it(both, vector):
    [expected] = both.llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=4),
                                   use_tqdm=False)
    for named in ({}, dict(model=NAME)):
        status, answer = both.ask(COMPLETIONS, COMPLETION | named)
        assert (status, answer["model"]) == (200, NAME)
        assert answer["choices"][0]["text"] == expected.outputs[0].text
        assert both.ask(CHATS, CHAT | named)[1]["model"] == NAME
    for named in ({}, dict(model="embedder")):
        status, answer = both.ask("/v1/embeddings", dict(input=TEXT) | named)
        assert (status, answer["model"]) == (200, "embedder")
        assert answer["data"][0]["embedding"] == pytest.approx(vector, abs=1e-6)


def test_what_the_named_model_can_not_do_is_said(both):
    status, answer = both.ask("/v1/embeddings", dict(input=TEXT, model=NAME))
    assert status == 400 and "generates text" in answer["error"]["message"]
    status, answer = both.ask(CHATS, CHAT | dict(model="embedder"))
    assert status == 400 and "pooling" in answer["error"]["message"]
    status, answer = both.ask(CHATS, CHAT | dict(model="third"))
    assert status == 404 and f"{NAME}, other-name, embedder" in answer["error"]["message"]


def test_both_are_listed_counted_and_alive(both):
    listed = both.ask("/v1/models")[1]["data"]
    assert [one["id"] for one in listed] == [NAME, "other-name", "embedder"]
    assert both.ask("/v1/models/embedder")[1]["id"] == "embedder"
    assert both.ask("/health")[0] == 200
    text = both.ask_raw("/metrics")[1].decode()
    running = re.findall(r'^vllm:num_requests_running\{model_name="(\w+)"', text, re.M)
    assert running == [NAME, "embedder"]
    assert len(re.findall("^# TYPE vllm:num_requests_running ", text, re.M)) == 1


def test_the_board_is_that_of_the_model_that_chats(monkeypatch):
    """Also where it is the second one; and a line of each engine has its name."""
    lines: list[str] = []
    monkeypatch.setattr(api, "say", lines.append)
    chats = AsyncLLM(LLM(**SIZE | dict(num_gpu_blocks_override=48)))
    with Serving(embedder(), also=(chats, ["chats"])) as serving:
        assert serving.ask("/live")[1]["num_blocks"] == 48
        server = api.Server(serving.engine, ["one"], also=api.Server(chats, ["two"]))
    for one in server.all():
        server.teller(one)("3 running")
    server.also.teller(server.also)("alone")
    assert lines == ["one: 3 running", "two: 3 running", "alone"]


def test_the_first_leaves_room_on_a_gpu_and_the_second_has_the_rest():
    def options(*argv: str) -> dict:
        return cli.leaving_room(cli.make_parser().parse_args(["model", *argv]))

    assert options()["gpu_memory_utilization"] == 0.9
    assert options("--also", "e")["gpu_memory_utilization"] == pytest.approx(0.8)
    with pytest.raises(ValueError, match="also-memory 0.95 leaves nothing"):
        options("--also", "e", "--also-memory", "0.95")
    with pytest.raises(ValueError, match="two models have the name 'e'"):
        cli.check_names(["e", "e"])


def test_both_engines_end_with_the_server():
    also = AsyncLLM(embedder())
    with Serving(LLM(**SIZE), also=(also, ["embedder"])) as serving:
        pass
    assert serving.llm.runner is None and also.llm.runner is None
