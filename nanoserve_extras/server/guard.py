"""The guard around all endpoints: keys, limits for bodies and open requests, clients that leave.

    request ──► local? ──► key? ──► room? ──► body, up to a limit and in time ──► the application
                 403        401      429            413          408

The guard is an ASGI application around another one. It refuses a request before anything is read or
computed, so that a flood of requests costs little: a body is read only when there is room for its
request, and at most the limit is kept. A body that takes too long is dropped, and frees its room. A
server without a key on the loopback address refuses foreign host names, because a web page could
let its own name resolve to this server (DNS rebinding), and then send requests and read answers.

Room is counted in sequences: one for a request as long as it is open, and one more for each further
sample once its body is read (`Ticket.widen`). So a body of 100 prompts with n=10 takes a thousand
places, and frees them when its answer was sent or its client has disconnected.

When a client disconnects, its request is aborted. The web framework notices this only for a stream;
for an answer in one message `unless_gone` watches the connection, because a plain endpoint would
compute to the end.

Invariants: a client's key is compared with all keys, each in constant time, so that response times
reveal nothing about keys. A ticket is given back exactly once, also after an error.

The guard does not use the web framework's middleware class, which hides a disconnect from the
application.
"""

import asyncio
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from nanoserve_extras.server.async_llm import EngineDeadError
from nanoserve_extras.server.errors import (
    OURS,
    AsciiResponse,
    BadRequest,
    error_body,
    error_response,
)

GONE = 499  # nginx's status for a client that has closed the connection
ENDING = ("the server is told to end, and this request took longer than --drain-seconds: send it "
          "again")
PATIENCE = 16  # a body that is too long is read up to this multiple of the limit
# A body may take 10 seconds, and one more for each 10,000 bytes that have come. Apache bounds slow
# clients in this way: a fixed time would stop a long body on a slow line.
BODY_SECONDS, BODY_RATE = 10, 10_000
# Paths that need no key: they show the server's state and its API, but no prompt and no text.
OPEN_PATHS = {"/", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/openapi.json"}


class Ticket:
    """The room that one request takes: a number of the guard's `places`."""

    def __init__(self, guard: "Guard"):
        self.guard, self.places = guard, 0

    def widen(self, places: int) -> None:
        """Take `places` in all for the request. Raises `BadRequest`: 429 if there is no room now,
        400 if there never will be."""
        limit, more = self.guard.max_requests, places - self.places
        if places > limit:
            raise BadRequest(f"prompts times n must be at most {limit}, got {places}: send several "
                             "requests", "n")
        if self.guard.num_open + more > limit:
            raise BadRequest(f"{self.guard.num_open} requests are open and {limit} are the limit "
                             "(--max-requests): try again later", None, 429, "rate_limit_exceeded")
        self.guard.num_open += more
        self.places = places

    def give_back(self) -> None:
        self.guard.num_open -= self.places
        self.places = 0


class Guard:
    """app: the application to guard. api_keys: if empty, no key is needed. max_requests: sequences
    that may be open, running or waiting. max_body_bytes: the limit for one request. root_path: a
    prefix of all paths, if a proxy leaves it there. only_local: whether names of other machines in
    the header Host are refused."""

    def __init__(self, app, api_keys: list[str] = (), max_requests: int = 1024,
                 max_body_bytes: int = 4 * 2 ** 20, root_path: str = "", only_local: bool = False):
        self.app, self.root_path, self.only_local = app, root_path.rstrip("/"), only_local
        self.digests = [sha256(key.encode()).digest() for key in api_keys]
        self.max_requests, self.max_body_bytes = max_requests, max_body_bytes
        self.num_open = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        if self.root_path and path == self.root_path:  # the page's links begin at its folder
            await RedirectResponse(path + "/")(scope, receive, send)
            return
        if self.root_path and path.startswith(self.root_path + "/"):
            path = path.removeprefix(self.root_path)
        # Clients join paths with a slash too many. A key is asked for by the path as it came.
        plain = re.sub("/+", "/", path).rstrip("/") or "/"
        scope = scope | {"path": self.root_path + plain, "root_path": self.root_path}
        send = named(send, headers.get(b"x-request-id", b"")[:128] or uuid4().hex.encode())
        try:
            if self.only_local and not is_local(host := headers.get(b"host", b"").decode("latin")):
                raise BadRequest(f"this server has no key and answers to local names, not to "
                                 f"Host: {host:.80}: ask for localhost, or start it with --api-key",
                                 None, 403)
            if path not in OPEN_PATHS and not self.is_known(headers):
                raise BadRequest("this server wants a key: send the header Authorization: Bearer "
                                 "KEY", None, 401, "invalid_api_key")
            if scope["method"] == "POST":
                await self._admit(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except BadRequest as error:
            answer = error_response(str(error), error.status, error.param, error.code)
            await answer(scope, receive, send)

    def is_known(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request has a valid key. Digests are compared, since all have one length."""
        if b"x-api-key" in headers:  # Anthropic's header
            headers = {b"authorization": b"Bearer " + headers[b"x-api-key"]} | headers
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = sha256(key.strip()).digest()
        found = [hmac.compare_digest(given, digest) for digest in self.digests]
        return not self.digests or (any(found) and scheme.lower() == b"bearer")

    async def _admit(self, scope, receive, send) -> None:
        ticket = scope["ticket"] = Ticket(self)
        try:
            ticket.widen(1)
            length = dict(scope["headers"]).get(b"content-length", b"0")
            body = await self._read(receive, int(length))
            await self.app(scope, replay(body, receive), send)
        finally:
            ticket.give_back()

    async def _read(self, receive, announced: int) -> bytes:
        """Read the body. A body that is too long is read on for a while, but not kept, because a
        client that still writes would not see the answer. If the client disconnects, the body
        ends, and the application notices the disconnect itself."""
        most, start = PATIENCE * self.max_body_bytes, time.monotonic()
        body, length, more = bytearray(), announced if announced > most else 0, True
        while more and length <= most:
            try:
                async with asyncio.timeout(start + BODY_SECONDS + length / BODY_RATE
                                           - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise BadRequest(f"of the body only {length:,} bytes came in time: send it sooner",
                                 None, 408) from error
            piece, more = message.get("body", b""), message.get("more_body", False)
            length += len(piece)
            if length <= self.max_body_bytes:
                body += piece
        if length > self.max_body_bytes:
            raise BadRequest(f"the body must have at most {self.max_body_bytes:,} bytes "
                             "(--max-body-bytes): send less", None, 413)
        return bytes(body)


def is_local(host: str) -> bool:
    """Whether a name in the header Host is local or an address. An address needs no DNS, so DNS
    rebinding can't use it."""
    name = re.sub(r":\d*$", "", host.lower()).strip("[]")
    if name in ("", "localhost", "host.docker.internal") or name.endswith(".localhost"):
        return True
    with suppress(ValueError):
        return bool(ip_address(name))
    return False


def named(send, request_id: bytes):
    """A `send` that adds the request's id to the answer: the client's own, or one made here."""
    async def again(message: dict) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id),
                                  (b"request-id", request_id)]  # OpenAI's name, and Anthropic's
        await send(message)

    return again


def replay(body: bytes, receive):
    """A `receive` that returns the body in one piece, and then the messages of the real one."""
    told = False

    async def again() -> dict:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


# -------------------------------------------------- a client that goes away


class EventStream(StreamingResponse):
    """A stream that ends with an error event if the server shuts down or fails. (When a client
    disconnects, only parts of it are cancelled.) failed: writes an error as the last event, in the
    API's language."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], failed: Callable[[dict], bytes]):
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self.failed, self.is_over = failed, False

    async def __call__(self, scope, receive, send) -> None:
        async def sending(message: dict) -> None:
            await send(message)
            self.is_over = message.get("more_body") is False

        try:
            await super().__call__(scope, receive, sending)
        except asyncio.CancelledError:
            await self._end(send, ENDING, 503)
        except Exception:  # which the web server writes into its log
            await self._end(send, OURS, 500)
            raise

    async def _end(self, send, why: str, status: int) -> None:
        if self.is_over:  # all was sent just before, or the engine's end came first
            return
        last = self.failed(error_body(why, status))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_gone(http: Request, work: Awaitable[dict]) -> Response:
    """The answer, as JSON. If the client goes away before there is one, `work` is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        answer = task.result() if task.done() else Response(status_code=GONE)
        return answer if isinstance(answer, Response) else AsciiResponse(answer)
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
