"""Whatever is sent, the answer is no 500: bodies made from the server's own `/openapi.json`.

Each body is drawn from its schema; then, often, one of its values is replaced by something else, or
a field is added that nobody knows. The engine audits its books after every step, and is idle at the
end. (schemathesis does the same more thoroughly, and by hand: docs/server.md.)
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Serving

from nanoserve import LLM

NUM_CASES = 30  # of each of the five endpoints that take a body
NASTY = st.text(max_size=12) | st.sampled_from(["", "\ud800", "\x00", "a" * 300])
TEXTS = st.sampled_from(["Once upon a time", "the", "user", "5"]) | NASTY
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4)


GENERATING, POOLING = ["/v1/completions", "/v1/chat/completions"], [
    "/v1/embeddings", "/score", "/rerank"]


@pytest.fixture(scope="module", params=["generate", "pooling"])
def running(request):
    """A small room, so that no body keeps the machine busy for long."""
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=64, max_model_len=48,
                     max_num_seqs=8, runner=request.param),
                 max_requests=12, max_body_bytes=20_000) as server:
        yield server


def values(schema: dict, names: dict) -> st.SearchStrategy:
    """Values that a JSON schema allows, roughly: what is allowed too much is the server's to
    refuse. names: the schemas that others refer to."""
    if "$ref" in schema:
        return values(names[schema["$ref"].rpartition("/")[2]], names)
    if "anyOf" in schema:
        return st.one_of(*(values(one, names) for one in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object":
        return objects(schema, names)
    if kind == "array":
        return st.lists(values(schema["items"], names), min_size=schema.get("minItems", 0),
                        max_size=4)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    return {"string": TEXTS, "boolean": st.booleans(), "null": st.none(),
            "integer": st.integers(0, 12) | st.integers(low, high),
            "number": st.floats(low, high, allow_nan=False)}.get(kind, ANYTHING)


def objects(schema: dict, names: dict) -> st.SearchStrategy:
    if "properties" not in schema:
        more = schema.get("additionalProperties")
        inner = values(more, names) if isinstance(more, dict) else ANYTHING
        return st.dictionaries(TEXTS | st.integers(0, 5000).map(str), inner, max_size=3)
    properties = {name: values(one, names) for name, one in schema["properties"].items()}
    required = {name: properties[name] for name in schema.get("required", ())}
    optional = {name: one for name, one in properties.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


@st.composite
def bodies(draw, schema: dict, names: dict) -> dict:
    body = draw(objects(schema, names))
    needed = schema.get("required", ["input"])
    keep = draw(st.sets(st.sampled_from(sorted(body) or needed), max_size=2)) | set(needed)
    # Most are left out, or nearly every body would be wrong somewhere.
    body = {name: value for name, value in body.items() if name in keep}
    body.pop("model", None)  # nearly all names are unknown, and nothing more would be seen
    if "messages" in body and draw(st.integers(0, 9)):  # others are mostly refused
        body["messages"] = [{"role": "user", "content": draw(TEXTS)}]
    if "input" in schema["properties"] and ("input" in body) == ("messages" in body):
        body.pop("messages", None)  # one of both
        body.setdefault("input", draw(TEXTS))
    if "return_documents" in schema["properties"]:  # one of two names
        body.setdefault(draw(st.sampled_from(["documents", "texts"])), draw(
            st.lists(TEXTS, min_size=1, max_size=4)))
    if draw(st.integers(0, 2)) == 2:
        body[draw(st.sampled_from([*schema["properties"], "tools", "user", "else"]))] = draw(
            ANYTHING)
    return body


def test_no_body_is_a_500(server):
    """The endpoints of the other kind of model refuse everything, which other tests look at."""
    for path in POOLING if server.llm.runner.pooler else GENERATING:
        statuses = try_bodies(server, path)
        server.wait_for_rest()
        assert statuses[200] >= NUM_CASES // 8, (path, statuses)  # not everything is refused


def try_bodies(server, path: str) -> dict[int, int]:
    _, document = server.ask("/openapi.json")
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    names = document["components"]["schemas"]
    schema = names[content["schema"]["$ref"].rpartition("/")[2]]
    statuses: dict[int, int] = {}

    @settings(max_examples=NUM_CASES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(bodies(schema, names))
    def no_500(body):
        status, data = server.ask_raw(path, body)
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500, (body, data)
        if status != 200:
            assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
        elif body.get("stream"):
            assert data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data, (body, data)
        else:
            answer = json.loads(data)
            assert isinstance(answer, list) or {"choices", "data", "results"} & set(answer)  # TEI's
    no_500()
    return statuses
