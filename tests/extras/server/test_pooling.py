"""A pooling model's endpoints: the same numbers as offline, in OpenAI's and vLLM's objects.

Oracle: `embed` and `score` of the same engine, which other tests hold to transformers.
"""

import base64
import struct

import pytest
import torch
from serving import Serving

from nanoserve import LLM

CHAT = [dict(role="user", content="Where is the king?"), dict(role="assistant", content="In bed.")]
TOOL = dict(type="function", function=dict(name="look", description="Look.", parameters=dict(
    type="object", properties={})))
TEXTS = ["Once upon a time", "The king", "a b c d e f g h i j"]


@pytest.fixture(scope="module")
def running():
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=160, runner="pooling"),
                 max_requests=32) as server:
        yield server


def embedded(server, texts, **kinds) -> list[list[float]]:
    return [out.outputs.embedding for out in server.llm.embed(texts, use_tqdm=False, **kinds)]


def near(rows):
    return [pytest.approx(row, abs=1e-5) for row in rows]


def test_embeddings_are_those_of_embed(server):
    status, answer = server.ask("/v1/embeddings", dict(input=TEXTS, model="tested"))
    assert status == 200 and answer["object"] == "list"
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert [one["embedding"] for one in answer["data"]] == near(embedded(server, TEXTS))
    count = sum(len(server.llm.tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"] == dict(prompt_tokens=count, total_tokens=count)


def test_inputs_come_in_four_forms_and_two_encodings(server):
    ids = server.llm.tokenizer.encode(TEXTS[0])
    [expected] = near(embedded(server, TEXTS[:1]))
    for one in (TEXTS[0], ids, [TEXTS[0]], [ids]):
        _, answer = server.ask("/v1/embeddings", dict(input=one))
        assert [item["embedding"] for item in answer["data"]] == [expected]
    _, answer = server.ask("/v1/embeddings", dict(input=ids, encoding_format="base64"))
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == expected


def test_openais_client_asks_for_base64_and_gets_numbers(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tested", input=TEXTS)
    assert [one.embedding for one in answer.data] == near(embedded(server, TEXTS))


def test_scores_are_cosines(server):
    vectors = torch.tensor(embedded(server, TEXTS))
    expected = (vectors @ vectors[0]).tolist()
    _, answer = server.ask("/score", dict(text_1=TEXTS[0], text_2=TEXTS))
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
    _, answer = server.ask("/score", dict(text_1=TEXTS, text_2=TEXTS))
    assert [one["score"] for one in answer["data"]] == pytest.approx([1, 1, 1], abs=1e-5)


def test_a_ranking_has_the_best_first(server):
    vectors = torch.tensor(embedded(server, TEXTS))
    scores = (vectors @ vectors[1]).tolist()
    best = sorted(range(3), key=lambda i: -scores[i])
    asked = dict(query=TEXTS[1], documents=TEXTS)
    _, answer = server.ask("/rerank", asked)
    assert [one["index"] for one in answer["results"]] == best
    assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i in best]
    _, answer = server.ask("/rerank", asked | dict(top_n=1, return_documents=False))
    assert answer["results"] == [dict(index=1, relevance_score=pytest.approx(1, abs=1e-5))]


OBJECTS = [{"text": text} for text in TEXTS]


# What Cohere's, Jina's, Infinity's, TEI's, litellm's and vLLM's clients send.
@pytest.mark.parametrize("path, body", [
    ("/v1/rerank", dict(documents=OBJECTS, top_n=3, return_documents=True, rank_fields=["text"])),
    ("/v1/rerank", dict(documents=TEXTS, max_chunks_per_doc=None, top_n=0)),
    ("/v2/rerank", dict(documents=TEXTS, max_tokens_per_doc=None, model="tested", top_n=100)),
    ("/rerank", dict(texts=TEXTS, raw_scores=False, return_text=True, truncate=True)),
    ("/rerank", dict(texts=TEXTS, raw_scores=True)),
    ("/score", dict(queries=TEXTS[1], documents=TEXTS)),
    ("/score", dict(text_1=TEXTS[1], text_2=OBJECTS)),
    ("/v1/score", dict(data_1=TEXTS[1], data_2=TEXTS)),
    ("/v1/score", dict(queries=TEXTS[1], items=TEXTS))])
def test_every_clients_way_has_the_same_scores(server, path, body):
    expected = {i: pytest.approx(out.outputs.score, abs=1e-5) for i, out in enumerate(
        server.llm.score(TEXTS[1], TEXTS, use_tqdm=False))}
    status, answer = server.ask(path, (dict(query=TEXTS[1]) if "rerank" in path else {}) | body)
    assert status == 200, answer
    rows = answer if "texts" in body else answer.get("results", answer.get("data"))
    assert {one["index"]: one.get("score", one.get("relevance_score")) for one in rows} == expected
    if "texts" in body:
        assert [one.get("text") for one in rows] == [
            TEXTS[one["index"]] if body.get("return_text") else None for one in rows]


def test_coheres_embeddings(server):
    asked = dict(texts=TEXTS, model="tested", input_type="search_query", truncate="END")
    _, answer = server.ask("/v2/embed", asked | dict(embedding_types=["float", "base64"]))
    vectors = answer["embeddings"]["float"]
    assert vectors == near(embedded(server, TEXTS)) and answer["texts"] == TEXTS
    assert [list(struct.unpack(f"<{len(vectors[0])}f", base64.b64decode(one)))
            for one in answer["embeddings"]["base64"]] == near(vectors)
    assert list(server.ask("/v2/embed", asked)[1]["embeddings"]) == ["float"]
    ids = server.llm.tokenizer.encode(text := "Once " + "word " * 40 + "upon")
    for cut, side, kept in (("START", "left", ids[-9:]), ("END", "right", ids[:9])):
        most, expected = dict(truncate_prompt_tokens=9), near(embedded(server, [kept]))
        _, answer = server.ask("/v2/embed", dict(texts=[text], truncate=cut) | most)
        assert answer["embeddings"]["float"] == expected
        for more in (dict(truncate=cut), dict(truncation_side=side)):
            _, answer = server.ask("/v1/embeddings", dict(input=[text]) | most | more)
            assert [one["embedding"] for one in answer["data"]] == expected
    long = asked | dict(texts=["Once " + "word " * 4000])
    _, answer = server.ask("/v2/embed", long)
    assert answer["embeddings"]["float"] == near(embedded(server, [server.llm.tokenizer.encode(
        long["texts"][0])[:server.llm.config.max_model_len]]))
    error = server.refusal("/v2/embed", long | dict(truncate="NONE"))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path, body, said", [
    *(("/v1/embeddings", body, said) for body, said in (
        (dict(input=""), "empty"), (dict(input=[]), "input"), (dict(input=[9999]), "vocabulary"),
        (dict(input="x", dimensions=3), "dimensions"), (dict(messages=[{}]), "role"),
        (dict(input="x", encoding_format="int8"), "encoding_format"),
        (dict(input="x", softmax=False), "use_activation"), (dict(), "input and messages"),
        (dict(input="x", messages=CHAT), "input and messages"),
        (dict(input="x", tools=[TOOL]), "messages"), (dict(input="x", endianness="big"), "endian"),
        (dict(input="x", truncate_prompt_tokens=99999), "truncate"),
        (dict(input="x " * 5000), "shorten"), (dict(input=["x"] * 33), "at most 32"))),
    ("/score", dict(text_1=["a", "b"], text_2=["c"]), "2 and 1 texts"),
    ("/rerank", dict(query="x", documents=[]), "documents"),
    ("/rerank", dict(query="x"), "documents and texts"),
    ("/rerank", dict(query="x", documents=["a"], texts=["b"]), "documents and texts"),
    ("/rerank", dict(query="x", documents=["x"], max_tokens_per_doc=5), "truncate_prompt_tokens"),
    ("/v2/embed", dict(texts=["x"], embedding_types=["int8"]), "embedding_types"),
    ("/v1/completions", dict(prompt="x"), "pools"),
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "x"}]), "pools")])
def test_bad_input_is_refused(server, path, body, said):
    assert said in server.refusal(path, body)["message"]


def test_a_pooling_models_own_task_is_the_default(server):
    _, answer = server.ask("/pooling", dict(input=TEXTS[:1]))
    assert [one["data"] for one in answer["data"]] == near(embedded(server, TEXTS[:1]))
    [expected] = server.llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    _, answer = server.ask("/pooling", dict(input=TEXTS[0], task="token_embed"))
    torch.testing.assert_close(torch.tensor(answer["data"][0]["data"]), expected.outputs.data)
    raw, same = (server.ask("/v1/embeddings", dict(input=TEXTS[0], input_type="query") | more)[1]
                 for more in (dict(use_activation=False), dict(normalize=False)))
    assert torch.tensor(raw["data"][0]["embedding"]).norm() != pytest.approx(1)
    assert same["data"] == raw["data"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_conversation_is_embedded_as_its_template_writes_it(server, path):
    for more in (dict(), dict(add_generation_prompt=True), dict(tools=[TOOL])):
        ids = server.llm.tokenizer.apply_chat_template(
            CHAT, return_dict=False, **dict(add_generation_prompt=False) | more)
        _, answer = server.ask(path, dict(messages=CHAT) | more)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        [vector] = (one.get("embedding", one.get("data")) for one in answer["data"])
        assert [vector] == near(embedded(server, [ids]))


def test_a_classifier_names_its_classes(checkpoints):
    with Serving(LLM(checkpoints["qwen3"], runner="pooling", convert="classify",
                     num_gpu_blocks_override=24, max_model_len=64, load_format="dummy",
                     tokenizer=str(checkpoints["qwen3"]), hf_overrides=dict(
                         id2label={"0": "sad", "1": "glad", "2": "mad"},
                         architectures=["Qwen3ForSequenceClassification"]))) as server:
        expected = [out.outputs.probs for out in server.llm.classify(["ab", "c"], use_tqdm=False)]
        _, answer = server.ask("/classify", dict(input=["ab", "c"]))
        assert [one["probs"] for one in answer["data"]] == near(expected)
        names = ["sad", "glad", "mad"]
        assert [one["label"] for one in answer["data"]] == [
            names[probs.index(max(probs))] for probs in expected]
        assert {one["num_classes"] for one in answer["data"]} == {3}
