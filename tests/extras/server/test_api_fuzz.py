"""Whatever is sent, the answer is no 500: bodies of real clients, in which something is changed.

A value anywhere in a body becomes another one or is left out, and often a field is added that the
server's own `/openapi.json` lists. The engine audits its books after every step, and is idle at the
end. (schemathesis does the same more thoroughly, and by hand: docs/server.md.)
"""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import CHAT, CHATS, COMPLETIONS, Serving
from test_api_clients import BODIES, asked

from nanoserve import LLM

TEXTS = st.sampled_from(["Once upon a time", "the", "user", "5", "", "\ud800", "\x00", "a" * 300]
                        ) | st.text(max_size=12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(0, 12) | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4)
GENERATING = [(path, asked(path, **fields)) for path, fields in BODIES.values()]
POOLING = [("/v1/embeddings", dict(input=["the", "user"])), ("/v1/embeddings", dict(messages=CHAT)),
           ("/pooling", dict(input=[5, 6])), ("/v2/embed", dict(texts=["the"], truncate="END")),
           ("/score", dict(text_1="the", text_2=["user", "5"])),
           ("/rerank", dict(query="the", documents=["user", "5"], top_n=1)),
           ("/rerank", dict(query="the", texts=["user"], raw_scores=True))]


@pytest.fixture(scope="module", params=["generate", "pooling"])
def running(request):
    """A small room, so that no body keeps the machine busy for long."""
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=64, max_model_len=256,
                     max_num_seqs=8, runner=request.param),
                 max_requests=12, max_body_bytes=20_000) as server:
        yield server


def places(value) -> Iterator[tuple]:
    """All that can be replaced: what holds it, and its key or index."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from places(inner)


def other(value) -> st.SearchStrategy:
    """Often of the same type, or nearly every body would be wrong somewhere."""
    alike = {bool: st.booleans(), int: st.integers(0, 12), float: st.floats(0, 1), str: TEXTS}
    return alike.get(type(value), st.just(value)) | TEXTS | ANYTHING


@st.composite
def changed(draw, body: dict, fields: list[str]) -> dict:
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(0, 2))):
        if not (found := [*places(body)]):
            break
        holder, key = draw(st.sampled_from(found))
        holder[key] = draw(other(holder[key]))
        if draw(st.integers(0, 3)) == 3:
            del holder[key]
    if draw(st.booleans()):
        body[draw(st.sampled_from(fields))] = draw(ANYTHING | st.integers(0, 2))
    return body


def test_no_body_is_a_500(server):
    """The endpoints of the other kind of model refuse everything, which other tests look at."""
    _, document = server.ask("/openapi.json")
    schemas, statuses = document["components"]["schemas"], Counter()

    def fields(path: str) -> list[str]:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        return sorted(schemas[name]["properties"].keys() - {"model"}) + ["user", "else"]

    bodies = st.sampled_from(POOLING if server.llm.runner.pooler else GENERATING).flatmap(
        lambda one: st.tuples(st.just(one[0]), changed(one[1], fields(one[0]))))

    @settings(max_examples=120, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(bodies)
    def no_500(one):
        path, body = one
        status, data = server.ask_raw(path, body)
        statuses[status] += 1
        assert status < 500, (body, data)
        if status != 200:
            assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
        elif not body.get("stream"):
            json.loads(data)
        elif path in (COMPLETIONS, CHATS):
            assert data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data, (body, data)
        else:
            assert b"event: error" not in data, (body, data)
    no_500()
    assert statuses[200] > 30, statuses  # not everything is refused
