"""The HTTP server: OpenAI's endpoints over an `AsyncLLM`, as a FastAPI application.

    POST /v1/completions  /v1/chat/completions       a generator's, whole or as an event stream
    POST /v1/responses  /v1/messages                 a chat in other languages (translate.py)
    POST /v1/responses/input_tokens  /v1/messages/count_tokens       how long its prompt would be
    POST /v1/embeddings  /classify  /pooling  /score  /rerank  ...   a pooling model's
    POST /tokenize  /detokenize                      GET /tokenizer_info
    GET  /v1/models  /health  /ping  /load  /version  /metrics  /trace  /live  / (a page to chat)

    body ─► protocol: checked ─► AsyncLLM.prepare: tokenised ─► room? ─► AsyncLLM.outputs ─► answers
              400                   400                          429        503 if it is dead

Every error is answered with one object, in OpenAI's and Anthropic's form at once. Bad input never
gives a 500: `prepare` raises a `ValueError` for it before the answer begins.

Invariant: when a client goes away, its request is aborted (guard.py).

FastAPI is built on Starlette, and makes `/openapi.json` from the bodies' classes, which the page
`/docs` shows and from which tests are generated.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

import nanoserve
from nanoserve.config import SamplingParams
from nanoserve.progress import say
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.words import words_of
from nanoserve_extras.server import pooling, prometheus, stats
from nanoserve_extras.server.answers import Answer, ChatAnswer, CompletionAnswer
from nanoserve_extras.server.async_llm import AsyncLLM, EngineGenerateError
from nanoserve_extras.server.board import Board
from nanoserve_extras.server.errors import (
    AsciiResponse,
    BadRequest,
    TooMuch,
    add_errors,
    bad_requests,
    error_body,
    status_of,
)
from nanoserve_extras.server.guard import EventStream, Guard, unless_gone
from nanoserve_extras.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    Conversation,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    TranscriptionBody,
    as_prompts,
    read_json,
)
from nanoserve_extras.server.tool_grammar import ModelTurns
from nanoserve_extras.server.tools import TurnStops
from nanoserve_extras.server.tracer import Tracer
from nanoserve_extras.server.translate import EventWriter, Kept, Language, ResponsesBody
from nanoserve_extras.server.translate_messages import CountBody, MessagesBody
from nanoserve_extras.trace.recorder import page

PAGE = Path(__file__).with_name("page.html")
MAX_TOLD = 100  # unknown fields that are logged, each once
COMPLETION_TOKENS = 16  # OpenAI's default for a completion; a chat may fill the context


class Server:
    """The state that the endpoints share. names: the model's names for clients; answers have the
    first. chat_template: replaces the tokenizer's own. lora_requests: one for each adapter's name.
    strict: whether an unknown field is refused. bare_calls: see `ModelTurns`. also: the second
    model's server, for example an embedder's beside a generator, with its own engine."""

    def __init__(self, engine: AsyncLLM, names: list[str], chat_template: str | None = None,
                 lora_requests: dict[str, Any] | None = None, strict: bool = False,
                 bare_calls: bool = True, also: "Server | None" = None):
        self.engine, self.llm = engine, engine.llm
        self.names, self.chat_template = names, chat_template
        self.lora_requests = lora_requests or {}
        self.strict, self.also = strict, also
        self.told: set[str] = set()  # fields that were logged
        self.started = int(time.time())
        self.kept = Kept()
        self.tracer, self.board = Tracer(self.llm), Board(self.llm)
        self.turns = ModelTurns(self.llm, chat_template, bare_calls)

    def all(self) -> list["Server"]:
        """This server, and that of the second model."""
        return [self] if self.also is None else [self, self.also]

    def all_names(self) -> list[str]:
        return [name for one in self.all() for name in (*one.names, *one.lora_requests)]

    def serving(self, body: Body) -> "Server":
        """The server whose model a body names; without a name the one that can serve the body."""
        if self.also is None:
            return self
        if body.model is not None:
            return self.also if body.model in self.also.all_names() else self
        can_generate = Fact.GENERATES in self.llm.facts
        return self.also if isinstance(body, pooling.PoolingBody) is can_generate else self

    def check_model(self, name: str | None) -> None:
        names = self.all_names()
        if name is not None and name not in names:
            raise BadRequest(f"the model {name!r} does not exist: this server has "
                             f"{', '.join(names)}", "model", 404, "model_not_found")

    def check(self, body: Body) -> None:
        """Check a body's unknown fields and its model. Raises `BadRequest`."""
        if isinstance(body, Language):
            body.recall(self.kept)
        for name in body.model_extra:
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
        """The model's name in the answer: the adapter's name, or the model's first one."""
        return body.model if body.model in self.lora_requests else self.names[0]

    async def generate(self, body: GenerationBody) -> Awaitable[dict] | Response:
        """A completion or a chat. Raises `ValueError` for bad input, before the answer begins."""
        answer = await self._answer(body)
        return self._stream(answer, answer) if body.stream else self._whole(answer, dict)

    async def translate(self, body: Language) -> Awaitable[dict] | Response:
        """A chat in another API's language (translate.py)."""
        answer = await self._answer(validated(ChatBody, body.chat()))
        body.apply(answer.requests[0].params)
        if body.stream:
            return self._stream(answer, EventWriter(body, answer.head(answer.piece_name)))
        return self._whole(answer, body.answer)

    async def transcribe(self, body: TranscriptionBody) -> Awaitable[dict | Response]:
        """A transcription, by a model that takes sounds."""
        if body.stream:
            raise BadRequest("a transcription comes in one piece: leave stream out", "stream")
        return self._whole(await self._answer(body), partial(self._transcribed, body))

    def _transcribed(self, body: TranscriptionBody, answer: dict) -> dict | Response:
        text = answer["choices"][0]["text"]
        text = getattr(self.llm.inputs.processor, "extract_transcription", str)(text)
        return dict(text=text) if body.response_format == "json" else PlainTextResponse(text)

    async def _answer(self, body: GenerationBody) -> Answer:
        """An answer whose requests are checked. Raises `ValueError`."""
        is_chat = isinstance(body, ChatBody)
        kind = ChatAnswer if is_chat else CompletionAnswer
        name = f"{kind.prefix}-{uuid4().hex}"
        params = body.sampling_params(self._defaults(body))
        self.engine.check_health()  # a stream has no other status than 200 from here on
        prompts = [None] if is_chat else as_prompts(body.prompt)
        requests = [await self.engine.tokenize(self._request, body, prompt, params, f"{name}-{i}")
                    for i, prompt in enumerate(prompts)]
        answer = kind(body, requests, self.served_name(body), name)
        if isinstance(body, ChatBody):
            read = partial(self.turns.reader, body, requests[0].prompt)
            answer.readers = [read() for _ in range(body.num_samples)]
            is_watched = body.must_call or self.turns.form.thought and requests[0].params.stop
            if is_watched and answer.readers[0]:
                requests[0].make_stops = lambda params: TurnStops(params, read())
        return answer

    def _request(self, body: GenerationBody, prompt: Any, params: SamplingParams, request_id: str):
        """One prompt as a request. Raises `ValueError`."""
        if isinstance(body, ChatBody):
            self.llm.inputs.check_generates()
            prompt = self._render(body)
            params = self.turns.params(body, params, prompt["prompt"])
        if isinstance(body, TranscriptionBody):
            if not hasattr(self.llm.inputs, "transcription"):
                raise BadRequest("this model does not hear: start one that does with "
                                 "--limit-mm-per-prompt '{\"audio\": 1}'", "model")
            prompt = self.llm.inputs.transcription(body.file, body.language, body.prompt)
        if body.add_special_tokens is not None or body.truncate_prompt_tokens is not None:
            text, ids = self._read(prompt, body)
            if (count := body.truncate_prompt_tokens) is not None:
                room = max(1, self.llm.config.max_model_len - (body.limit() or 1))
                text, ids = None, self.llm.inputs.cut(ids, room if count == -1 else count, "left")
            prompt = {**(prompt if isinstance(prompt, dict) else {}),
                      "prompt": text, "prompt_token_ids": ids}
        request = self.llm.make_request(request_id, prompt, params, body.priority or 0,
                                        self.lora_requests.get(body.model))
        request.cache_salt = body.cache_salt
        count, limit = len(request.prompt_token_ids), self.llm.config.max_model_len
        if body.limit() is not None and count + body.limit() > limit:
            raise TooMuch(count, body.limit(), limit)
        if request.prompt is None and (isinstance(body, ChatBody) or getattr(body, "echo", False)):
            tokenizer = self.llm.inputs.tokenizer_for("echo")
            request.prompt = tokenizer.decode(request.prompt_token_ids)
        return request

    def _read(self, prompt: Any, body: GenerationBody | TokenizeBody) -> tuple:
        """A prompt's text, if it has one, and its token ids. Raises `ValueError`."""
        text, ids = self.llm.inputs.read_prompt(prompt)
        is_plain = isinstance(prompt, dict) and self.llm.inputs.plain
        if is_plain and body.add_special_tokens:
            raise BadRequest("add_special_tokens: with --split-special-tokens the template alone "
                             "writes special tokens: leave it out", "add_special_tokens")
        if body.add_special_tokens is not None and text is not None and not is_plain:
            ids = self.llm.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        return text, ids

    def _render(self, body: Conversation) -> dict:
        """Raises `ValueError`."""
        options = body.template_options()
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        try:
            return self.llm.inputs.render_chat(body.messages, **options)
        except TypeError as error:  # a variable has the name of an argument
            raise BadRequest(f"chat_template_kwargs: {words_of(error)}",
                             "chat_template_kwargs") from error

    def _defaults(self, body: GenerationBody):
        """The values of generation_config.json, with its limit of tokens if it has one."""
        defaults = self.llm.get_default_sampling_params()
        if "max_tokens" not in self.llm.inputs.recommended():
            defaults.max_tokens = max(
                COMPLETION_TOKENS, defaults.min_tokens) if body.prompts_in else None
        return defaults

    async def _whole(self, answer: Answer, show: Callable[[dict], Any]) -> Any:
        """Await a whole answer. show: makes the client's object of it."""
        async with aclosing(self.engine.outputs(answer.requests)) as outputs:
            return show(await answer.whole(outputs))

    def _stream(self, answer: Answer, teller: Answer | EventWriter) -> Response:
        """Stream an answer. teller: makes server-sent events of the answer's pieces."""
        return EventStream(teller.events(self._pieces(answer)), teller.failed)

    async def _pieces(self, answer: Answer) -> AsyncIterator[dict]:
        """The answer's pieces. The generator is cancelled when the client goes away; this closes
        the outputs and aborts the requests. An error in the middle becomes the last piece, because
        the status has been sent before."""
        try:
            async with aclosing(self.engine.outputs(answer.requests, answer.silence)) as outputs:
                async for piece in answer.pieces(outputs):
                    yield piece
        except EngineGenerateError as error:
            yield error_body(str(error), status_of(error))

    async def pool(self, body: pooling.PoolingBody) -> Awaitable[dict]:
        """Vectors, classes or scores of a pooling model. Raises `ValueError`."""
        if getattr(body, "messages", None):
            prompt = await self.engine.tokenize(self._render, body)
            body.input = prompt["prompt_token_ids"]
        job = pooling.Job(self.engine, self.served_name(body), self.chat_template,
                          self.lora_requests.get(body.model))
        return await dict(pooling.ENDPOINTS.values())[type(body)](job, body)

    # --------------------------------------------------------------- tokens

    async def count_tokens(self, body: Language) -> Response:
        """Raises `ValueError`."""
        chat = validated(ChatBody, body.chat())
        _, ids = await self.engine.tokenize(lambda: self._read(self._render(chat), chat))
        return AsciiResponse(body.counted(len(ids)))

    async def tokenize(self, body: TokenizeBody) -> Response:
        return AsciiResponse(await self.engine.tokenize(self._tokens, body))

    def _tokens(self, body: TokenizeBody) -> dict:
        """Raises `ValueError`."""
        tokenizer = self.llm.inputs.tokenizer_for("/tokenize")
        prompt = self._render(body) if body.messages is not None else body.prompt
        ids = self._read(prompt, body)[1]
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return dict(count=len(ids), max_model_len=self.llm.config.max_model_len, tokens=ids,
                    token_strs=strings)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Raises `ValueError`."""
        _, ids = self.llm.inputs.read_prompt(body.tokens)
        tokenizer = self.llm.inputs.tokenizer_for("/detokenize")
        return AsciiResponse(dict(prompt=await self.engine.tokenize(tokenizer.decode, ids)))

    async def tokenizer_info(self):
        """The tokenizer's settings, for clients that tokenise themselves."""
        try:
            tokenizer = self.llm.inputs.tokenizer_for("/tokenizer_info")
        except ValueError as error:
            raise BadRequest(str(error), None, 404) from error
        return dict(tokenizer_class=type(tokenizer).__name__,
                    chat_template=self.chat_template or tokenizer.chat_template,
                    **tokenizer.special_tokens_map)

    # ------------------------------------------------------ what the server is

    async def models(self):
        """The list of models. Codex reads the entry `models`, whose instructions would replace its
        own, so this list is empty."""
        return dict(object="list", models=[], data=[
            one._card(name) for one in self.all() for name in (*one.names, *one.lora_requests)])

    async def model(self, name: str):
        self.check_model(name)
        return next(one for one in self.all()
                    if name in (*one.names, *one.lora_requests))._card(name)

    def _card(self, name: str) -> dict:
        """A model in OpenAI's form, with vLLM's additions."""
        adapter = self.lora_requests.get(name)
        return dict(id=name, object="model", created=self.started, owned_by="nanoserve",
                    root=adapter.lora_path if adapter else self.llm.config.model,
                    parent=self.names[0] if adapter else None,
                    max_model_len=self.llm.config.max_model_len)

    async def load(self):
        return {"server_load": sum(len(one.llm.requests) for one in self.all())}

    async def health(self):
        for one in self.all():
            one.engine.check_health()
        return {"status": "ok"}

    async def version(self):
        return {"version": nanoserve.__version__}

    async def metrics(self):
        data = prometheus.text({one.names[0]: one.llm for one in self.all()}).encode(
            errors="replace")
        return Response(data, media_type="text/plain; version=0.0.4")

    async def trace(self):
        """The trace, read between two steps, and rendered outside of the event loop."""
        stream = await self.engine.between_steps(self.tracer.stream)
        return HTMLResponse(await asyncio.to_thread(page, stream))

    def teller(self, one: "Server") -> Callable[[str], None]:
        """A function that prints a line; with two models the line begins with the model's name."""
        return say if self.also is None else lambda text: say(f"{one.names[0]}: {text}")

    async def live(self):
        """The board's picture. With two models it is that of the chat model."""
        chats = [one for one in self.all() if Fact.GENERATES in one.llm.facts]
        return AsciiResponse((chats or [self])[0].board.read())

    async def home(self):
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ endpoints


# Each function checks its body first. Then it returns a response, or an awaitable that computes it.
POSTS = {"/v1/completions": (CompletionBody, Server.generate),
         "/v1/chat/completions": (ChatBody, Server.generate),
         "/v1/responses": (ResponsesBody, Server.translate),
         "/v1/responses/input_tokens": (ResponsesBody, Server.count_tokens),
         "/v1/messages": (MessagesBody, Server.translate),
         "/v1/messages/count_tokens": (CountBody, Server.count_tokens),
         "/tokenize": (TokenizeBody, Server.tokenize),
         "/detokenize": (DetokenizeBody, Server.detokenize)}
POSTS |= {path: (kind, Server.pool) for path, (kind, _) in pooling.ENDPOINTS.items()}
GETS = {"/tokenizer_info": Server.tokenizer_info, "/v1/models": Server.models,
        "/v1/models/{name:path}": Server.model, "/load": Server.load, "/health": Server.health,
        "/ping": Server.health, "/version": Server.version, "/metrics": Server.metrics,
        "/trace": Server.trace, "/live": Server.live, "/": Server.home}


class JsonRoute(APIRoute):
    """Reads a body's JSON by `read_json`."""

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def read(http: Request) -> Response:
            return await handle(JsonRequest(http.scope, http.receive))

        return read


class JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def create_app(engine: AsyncLLM, names: list[str], chat_template: str | None = None,
               lora_requests: dict[str, Any] | None = None, strict: bool = False,
               bare_calls: bool = True, says_stats: bool = False,
               also: tuple[AsyncLLM, list[str]] | None = None, **limits) -> Guard:
    """The whole application. The engine is shut down with it. says_stats: a line every ten seconds
    while there is work. also: a second model's engine, and its names. limits: those of `Guard`."""
    second = Server(*also, strict=strict) if also else None
    server = Server(engine, names, chat_template, lora_requests, strict, bare_calls, second)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        reporting = [asyncio.create_task(stats.report(one.engine, server.teller(one)))
                     for one in server.all() if says_stats]
        yield
        for task in reporting:
            task.cancel()
        for one in server.all():
            await asyncio.to_thread(one.engine.shutdown)

    app = FastAPI(title="nanoserve", version=nanoserve.__version__, lifespan=lifespan,
                  redoc_url=None, default_response_class=AsciiResponse)
    app.router.route_class = JsonRoute
    for path, (kind, endpoint) in POSTS.items():
        _add_post(app, server, path, kind, endpoint)
    for path, endpoint in GETS.items():
        app.get(path)(endpoint.__get__(server))
        app.head(path, include_in_schema=False)(endpoint.__get__(server))

    form = TranscriptionBody.model_json_schema(ref_template="#/components/schemas/{model}")
    form.pop("$defs")  # FastAPI has them, of the other bodies

    @app.post("/v1/audio/transcriptions", description=form.pop("description"), openapi_extra=dict(
        requestBody=dict(content={"multipart/form-data": dict(schema=form)})))
    async def transcriptions(http: Request):
        kind = http.headers.get("content-type", "none at all")
        if not kind.startswith("multipart/form-data"):
            raise BadRequest(f"the body was not read, because its Content-Type is {kind:.80}: send "
                             "a form, multipart/form-data", None, 415)
        async with http.form() as form:
            entries = {name: value if isinstance(value, str) else await value.read()
                       for name, value in form.items()
                       if value != "" or name == "file"}  # an empty text was not filled in
        body = validated(TranscriptionBody, entries, strict=False)  # a form has texts for numbers
        return await respond(server, Server.transcribe, body, http)

    add_errors(app)
    return Guard(app, **limits)


def _add_post(app: FastAPI, server: Server, path: str, kind: type[Body],
              endpoint: Callable) -> None:
    @app.post(path, summary=kind.__name__.removesuffix("Body"), description=kind.__doc__)
    async def answer(body: kind, http: Request):
        return await respond(server, endpoint, body, http)


def validated(kind: type[Body], entries: dict, strict: bool | None = None) -> Body:
    try:
        return kind.model_validate(entries, strict=strict)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=entries) from error


async def respond(server: Server, endpoint: Callable, body: Body, http: Request) -> Response:
    server.check_model(body.model)
    server = server.serving(body)
    server.check(body)
    http.scope["ticket"].widen(body.num_sequences)
    with bad_requests(body):
        work = await endpoint(server, body)
    return work if isinstance(work, Response) else await unless_gone(http, work)
