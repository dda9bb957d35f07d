"""Offline and served are one path: each public call gives the same both ways.

The offline calls are held to transformers elsewhere; here the server is held to them, where prompts
are cut, begin with a model's own text, or are pairs.
"""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from encoders import make  # noqa: E402
from serving import Serving  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

from nanoserve import LLM, PoolingParams  # noqa: E402

TEXTS = ["the fox", "A king went into the forest.", "x " * 90]
CUT = [None, -1, 20]


def both(folder, **options):
    return Serving(LLM(folder, **dict(num_gpu_blocks_override=64, dtype="float32") | options))


def near(numbers):
    return pytest.approx(numbers, abs=1e-5)


def test_embeddings_begin_with_the_same_text_and_are_cut_alike(tmp_path):
    """`embed` put the model's default prompt in front of a text, and the server did not: other
    vectors, in silence. So did scores of embeddings, and requests that are added one by one."""
    folder = make("bert", tmp_path / "bert", is_matryoshka=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(dict(
        prompts=dict(query="search: ", passage="x: "), default_prompt_name="query")))
    with both(folder) as serving:
        llm = serving.llm
        for count in CUT:
            texts = TEXTS if count else TEXTS[:2]
            params = PoolingParams(truncate_prompt_tokens=count)
            expected = [out.outputs.embedding for out in llm.embed(
                texts, pooling_params=params, use_tqdm=False)]
            assert expected == [near(out.outputs.embedding) for out in llm.embed(
                texts, prompt_name="query", pooling_params=params, use_tqdm=False)]
            body = dict(input=texts, truncate_prompt_tokens=count)
            _, answer = serving.ask("/v1/embeddings", body)
            assert [one["embedding"] for one in answer["data"]] == [near(row) for row in expected]
            _, answer = serving.ask("/v1/embeddings", body | dict(dimensions=5))
            assert [one["embedding"] for one in answer["data"]] == [
                near(out.outputs.embedding) for out in llm.embed(texts, use_tqdm=False,
                pooling_params=PoolingParams(truncate_prompt_tokens=count, dimensions=5))]
            encoded = llm.encode(texts, params, pooling_task="embed", use_tqdm=False)
            assert [out.outputs.data.tolist() for out in encoded] == [near(x) for x in expected]
            assert asyncio.run(stream(serving, texts, params)) == [near(row) for row in expected]
            scores = [sum(map(float.__mul__, expected[0], row)) for row in expected]
            assert scores == near([out.outputs.score for out in llm.score(
                texts[0], texts, pooling_params=params, use_tqdm=False)])
            _, answer = serving.ask("/score", dict(text_1=texts[0], text_2=texts,
                                                   truncate_prompt_tokens=count))
            assert [one["score"] for one in answer["data"]] == near(scores)
        for kind, name in (("query", "query"), ("search_query", "query"), ("passage", "passage"),
                           ("document", "passage"), ("search_document", "passage")):
            [expected] = [near(out.outputs.embedding) for out in llm.embed(
                TEXTS[:1], prompt_name=name, use_tqdm=False)]
            _, answer = serving.ask("/v1/embeddings", dict(input=TEXTS[:1], input_type=kind))
            assert answer["data"][0]["embedding"] == expected
            _, answer = serving.ask("/v2/embed", dict(texts=TEXTS[:1], input_type=kind))
            assert answer["embeddings"]["float"] == [expected]
        _, answer = serving.ask("/v2/embed", dict(texts=TEXTS[:1], input_type="clustering"))
        assert answer["embeddings"]["float"] == [near(out.outputs.embedding) for out in llm.embed(
            TEXTS[:1], use_tqdm=False)]  # Cohere's clients always name a kind
        error = serving.refusal("/v1/embeddings", dict(input="x", input_type="image"))
        assert error["param"] == "input_type" and "query, passage" in error["message"]
        assert "needs texts" in serving.refusal("/v1/embeddings", dict(input=[5, 6]))["message"]


def test_an_empty_text_fails_no_batch(tmp_path):
    """It is its special tokens; "" alone and among others, embedded and compared."""
    folder = make("bert", tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 256), ("<|end|>", 258)])
    tokenizer.save_pretrained(folder)
    with both(folder) as serving:
        [expected] = [near(out.outputs.embedding) for out in serving.llm.embed(
            [[256, 258]], use_tqdm=False)]
        for texts in ("", ["the fox", "", "x"]):
            status, answer = serving.ask("/v1/embeddings", dict(input=texts))
            assert status == 200 and answer["data"][len(texts) // 2]["embedding"] == expected
        _, answer = serving.ask("/rerank", dict(query="", documents=["x", ""]))
        assert answer["results"][0]["index"] == 1
        assert answer["results"][0]["relevance_score"] == near(1)


async def stream(serving, texts, params) -> list[list[float]]:
    found = []
    for text in texts:
        async for output in serving.engine.encode(text, params):
            found.append(output.outputs.data.tolist())
    return found


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = make("bert", tmp_path_factory.mktemp("reranker"), AutoModelForSequenceClassification,
                  num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<s>", 256), ("<|end|>", 258)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("count", CUT)
def test_pairs_are_scored_ranked_and_cut_alike(reranker, count):
    with both(reranker) as serving:
        for query in ("where is the fox", "what runs through the forest at night " * 5):
            if count is None and len(query) > 99:
                continue
            asked = dict(truncate_prompt_tokens=count)
            expected = [out.outputs.score for out in serving.llm.score(
                query, TEXTS[:2], pooling_params=PoolingParams(**asked), use_tqdm=False)]
            assert expected[0] != near(expected[1])
            _, answer = serving.ask("/score", dict(text_1=query, text_2=TEXTS[:2], **asked))
            assert [one["score"] for one in answer["data"]] == near(expected)
            _, answer = serving.ask("/rerank", dict(query=query, documents=TEXTS[:2], **asked))
            assert {one["index"]: one["relevance_score"] for one in answer["results"]} == near(
                dict(enumerate(expected)))
