"""A real server on the loopback, in a thread of the test's process; and a client of few words."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from nanoserve import LLM, SamplingParams
from nanoserve.request import RequestOutput
from nanoserve_extras.server.api import create_app
from nanoserve_extras.server.async_llm import AsyncLLM
from nanoserve_extras.server.cli import listen

NAME = "tested"
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story."}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class Serving:
    """llm: what is served, audited after every step. limits: those of the guard."""

    def __init__(self, llm: LLM, **limits):
        llm.check_every_step = True
        self.llm, self.engine = llm, AsyncLLM(llm)
        self.app = create_app(self.engine, [NAME, "other-name"], **limits)
        sock = listen("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning",
                                                    timeout_graceful_shutdown=5))
        self.thread = threading.Thread(target=self.server.run, kwargs=dict(sockets=[sock]))
        self.thread.start()
        self.wait_until(lambda: self.server.started)

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = True
        self.thread.join()

    # ------------------------------------------------------------- the client

    def ask(self, path: str, body=None, method: str | None = None, **headers) -> tuple[int, dict]:
        """Status and JSON. body: what becomes JSON, or bytes as they are."""
        status, data = self.ask_raw(path, body, method, **headers)
        return status, json.loads(data)

    def ask_raw(self, path: str, body=None, method: str | None = None,
                **headers) -> tuple[int, bytes]:
        with self.connection() as connection:
            send(connection, path, body, method, **headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def refusal(self, path: str, body, status: int = 400, **kinds) -> dict:
        """The error of a body that is refused; every error has one shape."""
        found, answer = self.ask(path, body, **kinds)
        assert found == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer["error"]

    def events(self, path: str, body: dict) -> list[dict]:
        """The events of a stream, which must end as OpenAI's do."""
        status, data = self.ask_raw(path, body | {"stream": True})
        assert status == 200, data
        lines = data.decode().split("\n\n")
        assert lines[-1] == "" and lines[-2] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    # -------------------------------------------------------------- the engine

    def offline(self, prompt=PROMPT, **params) -> RequestOutput:
        """The oracle: what `generate` gives of the same engine."""
        [output] = self.llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
        return output

    def wait_for_rest(self) -> None:
        """Until nobody's place is taken and nothing runs; then all blocks must be free and the
        books right. (A request takes its place before its prompt has become tokens.)"""
        self.wait_until(lambda: self.app.num_open == 0)

        async def rest():
            while await self.engine.between_steps(self.llm.has_unfinished_requests):
                await asyncio.sleep(0.001)
        asyncio.run(asyncio.wait_for(rest(), 30))
        assert not self.engine.inboxes and not self.llm.requests
        blocks = self.llm.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks
        self.llm.scheduler.check()

    def wait_until(self, condition) -> None:
        async def true():
            while not condition():
                await asyncio.sleep(0.001)
        asyncio.run(asyncio.wait_for(true(), 30))


def send(connection: http.client.HTTPConnection, path: str, body=None, method: str | None = None,
         **headers) -> None:
    data = json.dumps(body).encode() if not isinstance(body, (bytes, type(None))) else body
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method or ("GET" if body is None else "POST"), path, data,
                       {"content-type": "application/json"} | headers)


class OnlyToken:
    """A logits processor of all requests, in vLLM's words: writes the token that one asks for."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def new_req_logits_processor(self, params):
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None
        if not isinstance(only, int):
            raise ValueError("only must be a token id")

        def write(token_ids, logits):
            logits[:only] = logits[only + 1:] = float("-inf")
            return logits
        return write
