"""A pooling model's endpoints: embeddings in OpenAI's form, scores and rankings in vLLM's.

    /v1/embeddings   a vector for each input, as numbers or as base64 of float32
    /classify        probabilities of classes for each input
    /pooling         the model's result for each input, or for each of its tokens
    /score           how well two texts go together: one with many, or pair by pair
    /rerank          documents, the one that answers the query best first (Cohere's, Jina's, TEI's)
    /v2/embed        vectors, as Cohere has them

An embedding model compares two embeddings, by their cosine or as its files say, so a query that is
compared with many documents is computed once. A reranker reads query and document together, one
prompt per pair. The pooler knows which of the two a model is.

An endpoint's function checks and tokenises, and returns a coroutine that computes and may be
cancelled. So all errors of the client are found before anything is computed.

pooling/pooling.py makes the vectors. The engine's own `embed` and `score` are not used, because
they would block their thread to the end even if the client has disconnected.
"""

import base64
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import uuid4

import torch
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from nanoserve_extras.base.facts import Fact
from nanoserve_extras.pooling.pooling import PoolingParams
from nanoserve_extras.server.async_llm import AsyncLLM, EngineGenerateError
from nanoserve_extras.server.errors import BadRequest
from nanoserve_extras.server.protocol import (
    Body,
    Conversation,
    Cut,
    Messages,
    Prompts,
    as_prompts,
)

Work = Coroutine[Any, Any, Any]
Show = Callable[[list, dict], Any]  # vectors and usage to the answer
DOCUMENTS = "document", "passage", "corpus"  # names of one prompt, in sentence-transformers' order
# A text, or Cohere's {"text": ...}.
Text = Annotated[str, BeforeValidator(
    lambda one: one["text"] if isinstance(one, dict) and "text" in one else one)]


class PoolingBody(Body):
    """Fields that all bodies of a pooling model have."""

    use_activation: bool | None = None
    truncate_prompt_tokens: Cut | None = None
    truncation_side: Literal["left", "right"] | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None  # TEI's, Cohere's: what fits

    @model_validator(mode="after")
    def read_truncate(self) -> "PoolingBody":
        if self.truncate not in (None, False, "NONE"):
            self.truncate_prompt_tokens = self.truncate_prompt_tokens or -1
            self.truncation_side = {"START": "left", "END": "right"}.get(
                self.truncate, self.truncation_side)
        return self


class InputBody(PoolingBody, Conversation):
    """`POST /classify`. Input is a text or token ids, or a list of either; or a conversation."""

    prompts_in = ("input",)
    input: Prompts | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def check_one_is_given(self) -> "InputBody":
        if (self.input is None) == (self.messages is None):
            raise BadRequest("give one of input and messages", "input")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise BadRequest("tools and chat_template_kwargs go with messages", "messages")
        self.add_generation_prompt = bool(self.add_generation_prompt)  # nothing is generated
        return self


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    use_activation: bool | None = Field(
        None, validation_alias=AliasChoices("use_activation", "normalize"))
    input_type: str | None = None  # the name of the model's prompt to put in front
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TaskBody(EmbeddingBody):
    """`POST /pooling`: this model's result for a prompt, whatever its task is."""

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

    @property
    def ranked(self) -> list[str]:
        return self.documents or self.texts

    @model_validator(mode="after")
    def check_one_is_given(self) -> "RerankBody":
        if bool(self.documents) == bool(self.texts):
            raise BadRequest("give one of documents and texts", "documents")
        if self.raw_scores:
            self.use_activation = False
        return self


class EmbedBody(PoolingBody):
    """`POST /v2/embed`: Cohere's embeddings."""

    prompts_in = ("texts",)
    texts: Annotated[list[str], Field(min_length=1)]
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias="output_dimension")
    truncate: Literal["NONE", "START", "END"] = "END"


# -------------------------------------------------------------------- endpoints


@dataclass
class Job:
    """The objects that an endpoint needs. chat_template: a reranker's, for a query and a document.
    lora_request: a `LoRARequest`, if the body names an adapter as its model."""

    engine: AsyncLLM
    model: str
    chat_template: str | None = None
    lora_request: Any = None

    async def run(self, prompts: list, task: str | None, body: PoolingBody, show: Show) -> Work:
        """Raises `ValueError` if the model is a generator, or does not have this task."""
        if Fact.GENERATES in self.engine.llm.facts:
            raise ValueError("this server generates text (runner='generate'): start one with "
                             "--runner pooling")
        # Cohere's and others' kinds of input stand for the prompts that a model was trained with.
        pooler = self.engine.llm.runner.pooler
        known = {} if pooler is None else pooler.files.prompts
        kind = (getattr(body, "input_type", None) or "").removeprefix("search_")
        if kind in DOCUMENTS:
            kind = next((name for name in DOCUMENTS if name in known), kind)
        if kind and known and kind not in known and isinstance(body, EmbeddingBody):
            raise BadRequest(f"input_type={body.input_type!r:.80} is none of this model's prompts, "
                             f"which are {', '.join(known)}", "input_type")
        params = PoolingParams(task=task, dimensions=getattr(body, "dimensions", None),
                               use_activation=body.use_activation,
                               prompt_name=kind if kind in known else None,
                               truncate_prompt_tokens=body.truncate_prompt_tokens,
                               truncation_side=body.truncation_side)
        name = uuid4().hex
        return self._compute([
            await self.engine.prepare(prompt, params, f"{name}-{i}", 0, self.lora_request)
            for i, prompt in enumerate(prompts)], show)

    async def _compute(self, requests: list, show: Show) -> Any:
        found, count = {}, sum(len(request.prompt_token_ids) for request in requests)
        async with aclosing(self.engine.outputs(requests)) as outputs:
            async for output in outputs:
                if output.outputs is None:
                    raise EngineGenerateError(output.error or "the request was aborted")
                found[output.request_id] = output.outputs.data
        return show([found[request.request_id] for request in requests],
                    dict(prompt_tokens=count, total_tokens=count))

    async def scores(self, first: list[str], second: list[str], body: PoolingBody,
                     show: Show) -> Work:
        """Score pairs. show: takes a score for each pair instead of vectors."""
        pooler, inputs = self.engine.llm.runner.pooler, self.engine.llm.inputs
        if pooler is None or not pooler.reads_pairs(first, second):
            return await self.run(first + second, "embed", body, lambda vectors, usage: show(
                pooler.similarity(torch.stack(vectors[:len(first)]),
                                  torch.stack(vectors[len(first):])).tolist(), usage))
        pairs = zip(first * (len(second) // len(first)), second, strict=True)
        prompts = await self.engine.tokenize(
            lambda: [inputs.pair(*pair, self.chat_template, body) for pair in pairs])
        return await self.run(prompts, "classify", body, lambda vectors, usage: show(
            [vector.item() for vector in vectors], usage))

    def listed(self, kind: str, show: Callable[[Any], dict]) -> Show:
        """A function that makes an answer: a list with `show` applied to each result."""
        return lambda results, usage: dict(
            id=f"{kind}-{uuid4().hex}", object="list", created=int(time.time()), usage=usage,
            data=[dict(index=i) | show(result) for i, result in enumerate(results)],
            model=self.model)


async def embeddings(job: Job, body: EmbeddingBody) -> Work:
    return await job.run(as_prompts(body.input), "embed", body, job.listed(
        "embd", lambda vector: dict(
            object="embedding", embedding=encoded(vector, body.encoding_format))))


async def embed(job: Job, body: EmbedBody) -> Work:
    """Embeddings in Cohere's form."""
    def show(vectors: list[torch.Tensor], usage: dict) -> dict:
        found = {kind: [encoded(vector, kind) for vector in vectors]
                 for kind in body.embedding_types or ["float"]}
        meta = dict(api_version=dict(version="2"),
                    billed_units=dict(input_tokens=usage["prompt_tokens"]))
        return dict(id=uuid4().hex, response_type="embeddings_by_type", embeddings=found,
                    texts=body.texts, meta=meta)

    return await job.run(body.texts, "embed", body, show)


async def task(job: Job, body: TaskBody) -> Work:
    return await job.run(as_prompts(body.input), body.task, body, job.listed(
        "pool", lambda vector: dict(object="pooling", data=encoded(vector, body.encoding_format))))


async def classify(job: Job, body: InputBody) -> Work:
    def show(probs: torch.Tensor) -> dict:
        label = job.engine.llm.runner.pooler.labels.get(str(probs.argmax().item()))
        return dict(label=label, probs=probs.tolist(), num_classes=len(probs))

    return await job.run(as_prompts(body.input), "classify", body, job.listed("classify", show))


async def score(job: Job, body: ScoreBody) -> Work:
    return await job.scores(as_prompts(body.text_1), as_prompts(body.text_2), body, job.listed(
        "score", lambda value: dict(object="score", score=value)))


async def rerank(job: Job, body: RerankBody) -> Work:
    def show(scores: list[float], usage: dict) -> dict | list:
        ranked = sorted(enumerate(scores), key=lambda one: -one[1])
        if body.texts:  # TEI's
            return [dict(index=i, score=value) | (dict(text=body.texts[i]) if body.return_text
                                                  else {}) for i, value in ranked]
        results = [dict(index=i, relevance_score=value) | (
            {} if body.return_documents is False else dict(document=dict(text=body.documents[i])))
            for i, value in ranked[:body.top_n or None]]
        return dict(id=f"rerank-{uuid4().hex}", model=job.model, usage=usage, results=results)

    return await job.scores([body.query], body.ranked, body, show)


def encoded(vector: torch.Tensor, kind: str | None) -> list | str:
    """A vector as a list of numbers, or in OpenAI's base64: float32, the lowest byte first."""
    if kind != "base64":
        return vector.tolist()
    vector = vector.flatten()
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector.tolist())).decode()


SCORE, RERANK = (ScoreBody, score), (RerankBody, rerank)
ENDPOINTS = {"/v1/embeddings": (EmbeddingBody, embeddings),
             "/v2/embed": (EmbedBody, embed), "/classify": (InputBody, classify),
             "/pooling": (TaskBody, task), "/score": SCORE, "/v1/score": SCORE,
             "/rerank": RERANK, "/v1/rerank": RERANK, "/v2/rerank": RERANK}
