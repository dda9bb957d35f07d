"""The HTTP server: OpenAI's endpoints over an `AsyncLLM`, as a FastAPI application.

    POST /v1/completions  /v1/chat/completions       a generator's, whole or as an event stream
    POST /v1/embeddings  /classify  /pooling  /score  /rerank  ...   a pooling model's
    POST /tokenize  /detokenize                      GET /tokenizer_info
    GET  /v1/models  /health  /ping  /load  /version  /metrics  /trace

    body ─► protocol: checked ─► AsyncLLM.prepare: tokenised ─► room? ─► AsyncLLM.outputs ─► answers
              400                   400                          429        503 if it is dead

Every error is answered with OpenAI's error object, and bad input is never a 500: whatever is wrong
with it, `prepare` raises a `ValueError` before the answer begins.

Invariant: when a client goes away, its request is aborted. The web framework notices this only for
a stream. For an answer in one message `unless_gone` watches the connection, because a plain
endpoint would compute to the end.

Not known here: the command line, keys and limits (guard.py). Road not taken: Starlette alone, on
which FastAPI is built; FastAPI makes `/openapi.json` from the bodies' classes, which the page
`/docs` shows and from which tests are generated.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

import nanoserve
from nanoserve.config import SamplingParams
from nanoserve.frontend.metrics import say
from nanoserve.server import pooling
from nanoserve.server.answers import Answer, ChatAnswer, CompletionAnswer, event
from nanoserve.server.async_llm import AsyncLLM, EngineDeadError, EngineGenerateError
from nanoserve.server.guard import Guard
from nanoserve.server.prometheus import Collector
from nanoserve.server.protocol import (
    BadRequest,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    InputBody,
    RerankBody,
    ScoreBody,
    TaskBody,
    TokenizeBody,
    as_prompts,
    blamed_field,
    error_body,
)
from nanoserve.server.tracer import Tracer, page

POOLING = {"/v1/embeddings": (EmbeddingBody, pooling.embeddings),
           "/classify": (InputBody, pooling.classify), "/pooling": (TaskBody, pooling.task)}
POOLING |= dict.fromkeys(("/score", "/v1/score"), (ScoreBody, pooling.score))
POOLING |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankBody, pooling.rerank))
GONE = 499  # nginx's status for a client that has closed the connection
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which clients shorten a history
ENDING = ("the server is told to end, and this request took longer than --drain-seconds: send it "
          "again")
MAX_TOLD = 100  # unknown fields that are logged, each once
COMPLETION_TOKENS = 16  # OpenAI's default for a completion; a chat fills what room there is


class Server:
    """What the endpoints share. names: the model's names for clients; answers have the first.
    chat_template: replaces the tokenizer's own. lora_requests: one for each further
    name. strict: whether a field that nobody knows is refused."""

    def __init__(self, engine: AsyncLLM, names: list[str], chat_template: str | None = None,
                 lora_requests: dict[str, Any] | None = None, strict: bool = False):
        self.engine, self.llm = engine, engine.llm
        self.names, self.chat_template = names, chat_template
        self.lora_requests = lora_requests or {}
        self.strict = strict
        self.told: set[str] = set()  # fields that were logged
        self.started = int(time.time())
        self.collector = Collector(self.llm, names[0])
        self.tracer = Tracer(self.llm)

    def check_model(self, name: str | None) -> None:
        names = [*self.names, *self.lora_requests]
        if name is not None and name not in names:
            raise BadRequest(f"the model {name!r} does not exist: this server has "
                             f"{', '.join(names)}", "model", 404, "model_not_found")

    def check(self, body: Body) -> None:
        """Its unknown fields and its model."""
        for name in body.unknown:
            if self.strict:
                raise BadRequest(f"there is no field {name} (--strict): leave it out", name)
            if name not in self.told and len(self.told) < MAX_TOLD:
                self.told.add(name)
                say(f"a client sends the field {name!r:.80}, which is passed over (--strict "
                    "refuses it)")
        self.check_model(body.model)
        if getattr(body, "priority", None) and self.llm.config.scheduling_policy != "priority":
            raise BadRequest(f"priority={body.priority} has no effect here: start the server with "
                             "--scheduling-policy priority", "priority")

    def served_name(self, body: Body) -> str:
        """What the answer says: the adapter's name, or the model's first one."""
        return body.model if body.model in self.lora_requests else self.names[0]

    async def generate(self, body: GenerationBody, http: Request) -> Response:
        """A completion or a chat."""
        self.check(body)
        kind = ChatAnswer if isinstance(body, ChatBody) else CompletionAnswer
        name = f"{kind.prefix}-{uuid4().hex}"
        prompts = [None] if isinstance(body, ChatBody) else as_prompts(body.prompt)
        with bad_requests(body):
            params = body.sampling_params(self._defaults(body))
        http.scope["ticket"].widen(len(prompts) * params.n)
        requests = [await self._prepare(body, prompt, params, f"{name}-{i}")
                    for i, prompt in enumerate(prompts)]
        answer = kind(body, requests, self.served_name(body), name)
        if body.stream:
            self.engine.check_health()  # from here on there is no other status than 200
            return EventStream(self._events(answer), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})
        return await unless_gone(http, self._whole(answer))

    async def _prepare(self, body: GenerationBody, prompt: Any, params: SamplingParams,
                       request_id: str):
        """One prompt as a request. Raises `BadRequest` for all that can be wrong with it."""
        with bad_requests(body):
            if isinstance(body, ChatBody):
                self.llm.inputs.check_generates()
                prompt = await self.engine.tokenize(self._render, body)
            if body.add_special_tokens is not None or body.truncate_prompt_tokens is not None:
                prompt = await self.engine.tokenize(self._shaped, prompt, body)
            request = await self.engine.prepare(prompt, params, request_id, body.priority or 0,
                                                self.lora_requests.get(body.model))
            count, limit = len(request.prompt_token_ids), self.llm.config.max_model_len
            if body.limit() is not None and count + body.limit() > limit:
                raise BadRequest(
                    f"this model's maximum context length is {limit} tokens, but the prompt has "
                    f"{count} and max_tokens is {body.limit()}: shorten the prompt or ask for less",
                    "max_tokens", code=TOO_LONG)
            if request.prompt is None and getattr(body, "echo", False):
                request.prompt = await self.engine.tokenize(
                    self.llm.tokenizer.decode, request.prompt_token_ids)
        return request

    def _shaped(self, prompt: Any, body: GenerationBody) -> dict:
        """The prompt's tokens as the body wants them. Raises `ValueError`."""
        text, ids = self.llm.inputs.read_prompt(prompt)
        if body.add_special_tokens is not None and text is not None:
            ids = self.llm.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        if (count := body.truncate_prompt_tokens) is not None:
            room = max(1, self.llm.config.max_model_len - (body.limit() or 1))
            text, ids = None, ids[-(room if count == -1 else count):]
        return {"prompt": text, "prompt_token_ids": ids}

    def _render(self, body: ChatBody) -> dict:
        """Raises `ValueError`."""
        options = body.template_options()
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        try:
            return self.llm.inputs.render_chat(body.conversation(), **options)
        except TypeError as error:  # a variable has the name of an argument
            raise BadRequest(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error

    def _defaults(self, body: GenerationBody):
        """The values of generation_config.json, with its limit of tokens if it has one."""
        defaults = self.llm.get_default_sampling_params()
        if "max_new_tokens" not in self.llm.model_config.generation_defaults:
            defaults.max_tokens = None if isinstance(body, ChatBody) else COMPLETION_TOKENS
        return defaults

    async def _whole(self, answer: Answer) -> dict:
        async with aclosing(self.engine.outputs(answer.requests)) as outputs:
            return await answer.whole(outputs)

    async def _events(self, answer: Answer):
        """Cancelled when the client goes away, which closes the outputs and aborts. An error that
        comes in the middle is the last event; the status has been sent long before."""
        try:
            async with aclosing(self.engine.outputs(answer.requests)) as outputs:
                async for piece in answer.pieces(outputs):
                    yield piece
        except EngineGenerateError as error:
            yield event(error_body(str(error), "server_error"))

    # --------------------------------------------------------------- tokens

    def tokens(self, body: TokenizeBody) -> dict:
        """`/tokenize`. Raises `ValueError`."""
        chat, tokenizer = body.as_chat(), self.llm.inputs.tokenizer_for("/tokenize")
        prompt = self._render(chat) if chat else body.prompt
        text, ids = self.llm.inputs.read_prompt(prompt)
        if body.add_special_tokens is not None:
            ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return dict(count=len(ids), max_model_len=self.llm.config.max_model_len, tokens=ids,
                    token_strs=strings)

    def text_of(self, body: DetokenizeBody) -> dict:
        """`/detokenize`. Raises `ValueError`."""
        _, ids = self.llm.inputs.read_prompt(body.tokens)
        return dict(prompt=self.llm.inputs.tokenizer_for("/detokenize").decode(ids))

    def tokenizer_info(self) -> dict:
        """What a client needs to know that tokenises by itself."""
        tokenizer = self.llm.inputs.tokenizer_for("/tokenizer_info")
        return dict(tokenizer_class=type(tokenizer).__name__,
                    chat_template=self.chat_template or tokenizer.chat_template,
                    **tokenizer.special_tokens_map)

    def card(self, name: str) -> dict:
        """A model as OpenAI's clients see it, with vLLM's additions."""
        adapter = self.lora_requests.get(name)
        return dict(id=name, object="model", created=self.started, owned_by="nanoserve",
                    root=adapter.lora_path if adapter else self.llm.config.model,
                    parent=self.names[0] if adapter else None,
                    max_model_len=self.llm.config.max_model_len)

    async def trace_page(self) -> str:
        """Read between two steps, and written off the event loop."""
        stream = await self.engine.between_steps(self.tracer.stream)
        return await asyncio.to_thread(page, stream)


# ------------------------------------------------------------------ endpoints


def create_app(engine: AsyncLLM, names: list[str], chat_template: str | None = None,
               lora_requests: dict[str, Any] | None = None, strict: bool = False,
               **limits) -> Guard:
    """The whole application. The engine is shut down with it. limits: those of `Guard`."""
    server = Server(engine, names, chat_template, lora_requests, strict)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await asyncio.to_thread(engine.shutdown)

    app = FastAPI(title="nanoserve", version=nanoserve.__version__, lifespan=lifespan,
                  redoc_url=None)
    _add_endpoints(app, server)
    _add_errors(app)
    return Guard(app, **limits)


def _add_endpoints(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request):
        return await server.generate(body, http)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request):
        return await server.generate(body, http)

    def add_pooling(path: str, kind: type[Body], endpoint: Callable) -> None:
        @app.post(path)
        async def answer(body: kind, http: Request):
            return await pooled(endpoint, body, http)

    for path, (kind, endpoint) in POOLING.items():
        add_pooling(path, kind, endpoint)

    async def pooled(endpoint, body: Body, http: Request) -> Response:
        server.check(body)
        with bad_requests(body):
            job = pooling.Job(server.engine, server.served_name(body), server.chat_template,
                              server.lora_requests.get(body.model))
            http.scope["ticket"].widen(pooling.num_prompts(body))
            work = await endpoint(job, body)
        return await unless_gone(http, work)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody):
        server.check(body)
        with bad_requests(body):
            return AsciiResponse(await server.engine.tokenize(server.tokens, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody):
        server.check(body)
        with bad_requests(body):
            return AsciiResponse(await server.engine.tokenize(server.text_of, body))

    @app.get("/tokenizer_info")
    async def tokenizer_info():
        try:
            return AsciiResponse(server.tokenizer_info())
        except ValueError as error:
            raise BadRequest(str(error), None, 404) from error

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": list(map(server.card, [
            *server.names, *server.lora_requests]))}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        server.check_model(name)
        return server.card(name)

    @app.get("/load")
    async def load():
        return {"server_load": len(server.llm.requests)}

    @app.get("/ping")
    @app.post("/ping")
    @app.get("/health")
    async def health():
        server.engine.check_health()
        return {"status": "ok"}

    @app.get("/version")
    async def version():
        return {"version": nanoserve.__version__}

    @app.get("/metrics", response_class=Response)
    async def metrics():
        return Response(server.collector.text(), media_type="text/plain; version=0.0.4")

    @app.get("/trace", response_class=HTMLResponse)
    async def trace():
        return await server.trace_page()


def _add_errors(app: FastAPI) -> None:
    """Every error as OpenAI's object."""
    @app.exception_handler(BadRequest)
    async def bad_request(http: Request, error: BadRequest):
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
        return error_response(error.status, str(error), kind, error.param, error.code)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def wrong_shape(http: Request, error: RequestValidationError | ValidationError):
        first, *_ = errors = error.errors()
        for one in errors:  # one of our own, out of a validator, says more than pydantic's
            if isinstance(told := one.get("ctx", {}).get("error"), BadRequest):
                return await bad_request(http, told)
        if first["type"] == "json_invalid":  # its place is a number, and no field
            return error_response(400, "the body is no JSON from character "
                                  f"{first['loc'][-1]} on: {first['ctx']['error']}")
        kind = http.headers.get("content-type", "none at all")
        if first["loc"] == ("body",) and "json" not in kind:
            return error_response(415, "the body was not read, because its Content-Type is "
                                  f"{kind}: send the header Content-Type: application/json")
        path = [str(part) for part in first["loc"] if part != "body"]
        return error_response(400, f"{'.'.join(path) or 'the body'}: {first['msg']}",
                              param=path[0] if path else None)

    @app.exception_handler(HTTPException)
    async def no_such_thing(http: Request, error: HTTPException):
        return error_response(error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    @app.exception_handler(EngineDeadError)
    async def dead(http: Request, error: EngineDeadError):
        return error_response(503, str(error), "service_unavailable")

    @app.exception_handler(EngineGenerateError)
    async def failed(http: Request, error: EngineGenerateError):
        return error_response(500, str(error), "server_error")

    @app.exception_handler(Exception)
    async def surprise(http: Request, error: Exception):
        return error_response(500, "an error of this server: its log says more", "server_error")


class AsciiResponse(JSONResponse):
    """JSON in ASCII, which can hold any text, also one that UTF-8 can't encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(status: int, message: str, kind: str = "invalid_request_error",
                   param: str | None = None, code: str | None = None) -> Response:
    return AsciiResponse(error_body(message, kind, param, code), status)


# ---------------------------------------------------------------------- helpers


@contextmanager
def bad_requests(body: Body):
    """Turns a `ValueError` inside into a `BadRequest`."""
    try:
        yield
    except (BadRequest, ValidationError):
        raise
    except ValueError as error:
        said = str(error)
        code = TOO_LONG if "maximum context length is" in said else None
        raise BadRequest(said, blamed_field(said, body), code=code) from error


class EventStream(StreamingResponse):
    """Ends with an error where the server is ending. (A client that goes away cancels parts of it
    only.)"""

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            last = event(error_body(ENDING, "service_unavailable"))
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_gone(http: Request, work: Awaitable[dict]) -> Response:
    """The answer, as JSON. If the client goes away before there is one, `work` is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return AsciiResponse(task.result()) if task.done() else Response(status_code=GONE)
    except asyncio.CancelledError as error:  # the client is still there: the server is ending
        raise EngineDeadError(ENDING) from error
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(http: Request) -> None:
    """The body has been read, so the only message that still comes is the disconnect."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def load_chat_template(name: str) -> str:
    """A file, or the template itself. Raises `ValueError`."""
    if "{" in name:
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template must be a file or a template, got {name!r} ({error})"
                         ) from error
