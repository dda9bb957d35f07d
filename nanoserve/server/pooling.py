"""A pooling model's endpoints: embeddings as OpenAI has them, scores and rankings as vLLM has them.

    /v1/embeddings   a vector for each input, as numbers or as base64 of float32
    /classify        probabilities of classes for each input
    /pooling         what the model makes of each input, of its tokens too
    /score           how well two texts go together: one with many, or pair by pair
    /rerank          documents, the one that answers the query best first (Cohere's, Jina's, TEI's)
    /v2/embed        vectors, as Cohere has them

An embedding model scores by the cosine of two embeddings, so a query that all documents are
compared with is computed once. A reranker reads query and document at once, as one prompt a pair.
Which of the two a model is, its pooler knows.

An endpoint's function checks and tokenises, and returns a coroutine that computes and may be
cancelled. So all errors of the client are found before any computing.

Not known here: HTTP, how vectors are made (extras/pooling.py). Road not taken: the engine's own
`embed` and `score`, which hold their thread until all is done, even if the client has gone away.
"""

import base64
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import uuid4

import torch
import torch.nn.functional as F
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from nanoserve.extras.pooling import PoolingParams
from nanoserve.server.async_llm import AsyncLLM, EngineGenerateError
from nanoserve.server.errors import BadRequest
from nanoserve.server.protocol import Body, Cut, Prompts, as_prompts

Work = Coroutine[Any, Any, dict]
# A text, or Cohere's {"text": ...}.
Text = Annotated[str, BeforeValidator(
    lambda one: one["text"] if isinstance(one, dict) and "text" in one else one)]


class PoolingBody(Body):
    """What the bodies of a pooling model have in common."""

    use_activation: bool | None = None
    truncate_prompt_tokens: Cut | None = None


class InputBody(PoolingBody):
    """`POST /classify`. Input is a text or token ids, or a list of either."""

    prompts_in = ("input",)
    input: Prompts


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TaskBody(EmbeddingBody):
    """`POST /pooling`: whatever this model makes of a prompt."""

    task: str | None = None


class ScoreBody(PoolingBody):
    """`POST /score`: how well texts go together, one with many or pair by pair."""

    prompts_in = ("text_1", "text_2")
    text_1: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("text_1", "data_1", "queries"))
    text_2: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents", "items"))


class RerankBody(PoolingBody):
    """`POST /rerank`: documents in the order in which they answer a query."""

    prompts_in = ("query", "ranked")
    query: str
    documents: Annotated[list[Text], Field(min_length=1)] | None = None
    texts: Annotated[list[Text], Field(min_length=1)] | None = None  # TEI's, as three further ones
    top_n: Annotated[int, Field(ge=0)] | None = None  # vLLM's 0: all
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None

    @property
    def ranked(self) -> list[str]:
        return self.documents or self.texts

    @model_validator(mode="after")
    def check_one_is_given(self) -> "RerankBody":
        if bool(self.documents) == bool(self.texts):
            raise BadRequest("give one of documents and texts", "documents")
        if self.raw_scores:
            self.use_activation = False
        if self.truncate:
            self.truncate_prompt_tokens = -1
        return self


class EmbedBody(PoolingBody):
    """`POST /v2/embed`: Cohere's embeddings."""

    prompts_in = ("texts",)
    texts: Annotated[list[str], Field(min_length=1)]
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias="output_dimension")
    truncate: Literal["NONE", "END"] = "END"

    @model_validator(mode="after")
    def truncate_prompts(self) -> "EmbedBody":
        self.truncate_prompt_tokens = -1 if self.truncate == "END" else None
        return self


# -------------------------------------------------------------------- endpoints


@dataclass
class Job:
    """What an endpoint works with. chat_template: of a reranker, with a query and a document.
    lora_request: a `LoRARequest`, if that is what the body names as its model."""

    engine: AsyncLLM
    model: str
    chat_template: str | None = None
    lora_request: Any = None

    async def prepare(self, prompts: list, task: str | None, body: PoolingBody,
                      prompt_name: str | None = None) -> list:
        """Raises `ValueError` if the model is a generator, or does not have this task."""
        if self.engine.llm.config.runner != "pooling":
            raise ValueError("this server generates text (runner='generate'): start one with "
                             "--runner pooling")
        params = PoolingParams(task=task, dimensions=getattr(body, "dimensions", None),
                               use_activation=body.use_activation, prompt_name=prompt_name,
                               truncate_prompt_tokens=body.truncate_prompt_tokens)
        name = uuid4().hex
        return [await self.engine.prepare(prompt, params, f"{name}-{i}", 0, self.lora_request)
                for i, prompt in enumerate(prompts)]

    async def vectors(self, requests: list) -> list[torch.Tensor]:
        """Run the requests; returns their vectors in the same order."""
        found = {}
        async with aclosing(self.engine.outputs(requests)) as outputs:
            async for output in outputs:
                if output.outputs is None:
                    raise EngineGenerateError("the request was aborted")
                found[output.request_id] = output.outputs.data
        return [found[request.request_id] for request in requests]

    async def scores(self, first: list[str], second: list[str],
                     body: PoolingBody) -> tuple[list, Coroutine[Any, Any, list[float]]]:
        """The checked requests, and a coroutine that returns a score for each pair."""
        if len(first) not in (1, len(second)):
            raise ValueError(f"text_1 and text_2 have {len(first)} and {len(second)} texts: give "
                             "one text and many, or as many of one kind as of the other")
        pooler, inputs = self.engine.llm.runner.pooler, self.engine.llm.inputs
        if pooler is None or "embed" in pooler.tasks:
            requests = await self.prepare(first + second, "embed", body)
            return requests, self._cosines(requests, len(first))
        if "classify" not in pooler.tasks or pooler.num_labels != 1:
            raise ValueError("this model has no scores: they need embeddings, or a classifier with "
                             "one class")
        pairs = zip(first * (len(second) // len(first)), second, strict=True)
        prompts = await self.engine.tokenize(
            lambda: [inputs.pair(*pair, self.chat_template, body.truncate_prompt_tokens)
                     for pair in pairs])
        requests = await self.prepare(prompts, "classify", body)
        return requests, self._classes(requests)

    async def _cosines(self, requests: list, num_first: int) -> list[float]:
        vectors = torch.stack(await self.vectors(requests))
        return F.cosine_similarity(vectors[:num_first], vectors[num_first:]).tolist()

    async def _classes(self, requests: list) -> list[float]:
        return [vector.item() for vector in await self.vectors(requests)]

    async def answer(self, kind: str, requests: list, results: Awaitable[list],
                     show: Callable[[Any], dict]) -> dict:
        """`show` makes an object of each result."""
        data = [dict(index=i) | show(result) for i, result in enumerate(await results)]
        return dict(id=f"{kind}-{uuid4().hex}", object="list", created=int(time.time()), data=data,
                    model=self.model, usage=usage(requests))


async def embeddings(job: Job, body: EmbeddingBody) -> Work:
    return await each(job, body, "embed", lambda vector: dict(
        object="embedding", embedding=encoded(vector, body.encoding_format)))


async def embed(job: Job, body: EmbedBody) -> Work:
    """Cohere's. Its kinds of input are the prompts that a model has been trained with."""
    kind = (body.input_type or "").removeprefix("search_")
    pooler = job.engine.llm.runner.pooler
    requests = await job.prepare(body.texts, "embed", body,
                                 kind if kind in getattr(pooler, "prompts", {}) else None)

    async def work() -> dict:
        vectors = await job.vectors(requests)
        found = {kind: [encoded(vector, kind) for vector in vectors]
                 for kind in body.embedding_types or ["float"]}
        meta = dict(api_version=dict(version="2"),
                    billed_units=dict(input_tokens=usage(requests)["prompt_tokens"]))
        return dict(id=uuid4().hex, response_type="embeddings_by_type", embeddings=found,
                    texts=body.texts, meta=meta)

    return work()


async def task(job: Job, body: TaskBody) -> Work:
    return await each(job, body, body.task, lambda vector: dict(
        object="pooling", data=encoded(vector, body.encoding_format)))


async def classify(job: Job, body: InputBody) -> Work:
    def named(probs: torch.Tensor) -> dict:
        label = job.engine.llm.runner.pooler.labels.get(str(probs.argmax().item()))
        return dict(label=label, probs=probs.tolist(), num_classes=len(probs))

    return await each(job, body, "classify", named)


async def each(job: Job, body: InputBody, task: str | None, show: Callable) -> Work:
    """`show` makes an object of each input's vector."""
    requests = await job.prepare(as_prompts(body.input), task, body)
    return job.answer("pool", requests, job.vectors(requests), show)


async def score(job: Job, body: ScoreBody) -> Work:
    requests, scores = await job.scores(as_prompts(body.text_1), as_prompts(body.text_2), body)
    return job.answer("score", requests, scores, lambda value: dict(object="score", score=value))


async def rerank(job: Job, body: RerankBody) -> Work:
    requests, scores = await job.scores([body.query], body.ranked, body)

    async def work() -> dict | list:
        ranked = sorted(enumerate(await scores), key=lambda one: -one[1])
        if body.texts:  # TEI's
            return [dict(index=i, score=value) | (dict(text=body.texts[i]) if body.return_text
                                                  else {}) for i, value in ranked]
        results = [dict(index=i, relevance_score=value) | (
            {} if body.return_documents is False else dict(document=dict(text=body.documents[i])))
            for i, value in ranked[:body.top_n or None]]
        return dict(id=f"rerank-{uuid4().hex}", model=job.model, usage=usage(requests),
                    results=results)

    return work()


def usage(requests: list) -> dict:
    count = sum(len(request.prompt_token_ids) for request in requests)
    return dict(prompt_tokens=count, total_tokens=count)


def encoded(vector: torch.Tensor, kind: str | None) -> list | str:
    """Numbers, or as OpenAI packs them: float32, the lowest byte first."""
    if kind != "base64":
        return vector.tolist()
    vector = vector.flatten()
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector.tolist())).decode()


SCORE, RERANK = (ScoreBody, score), (RerankBody, rerank)
ENDPOINTS = {"/v1/embeddings": (EmbeddingBody, embeddings),
             "/v2/embed": (EmbedBody, embed), "/classify": (InputBody, classify),
             "/pooling": (TaskBody, task), "/score": SCORE, "/v1/score": SCORE,
             "/rerank": RERANK, "/v1/rerank": RERANK, "/v2/rerank": RERANK}
