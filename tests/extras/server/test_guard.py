"""The guard before the endpoints: keys, and limits for bodies and for open requests.

The application behind the guard is one of three lines, and messages are handed over by hand: no
model, no port. That a key's comparison takes constant time is hmac's promise, which is looked for.
"""

import asyncio
import hmac
import json

import pytest

pytest.importorskip("pydantic")

from nanoserve_extras.server import guard as module  # noqa: E402
from nanoserve_extras.server.guard import OPEN_PATHS, Guard  # noqa: E402


class Echo:
    """Answers with the body it got; `hold` keeps requests open."""

    def __init__(self, hold: asyncio.Event | None = None):
        self.hold, self.bodies = hold, []

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive()).get("body"))
        if self.hold:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(app, path="/v1/completions", pieces=(b"body",), method="POST", **headers):
    """Status, the error and the headers of one request, whose body comes in pieces."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent, left = [], iter(messages)

    async def receive():
        return next(left, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)
    scope = {"type": "http", "path": path, "method": method,
             "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]).get("error"), dict(sent[0]["headers"])


def run(*args, **kinds):
    return asyncio.run(ask(*args, **kinds))


@pytest.mark.parametrize("header, status", [
    ("Bearer right", 200), ("bearer right", 200), ("Bearer second", 200), ("Bearer wrong", 401),
    ("Bearer", 401), ("Basic right", 401), ("right", 401), ("Bearer right2", 401),
    ("Bearer r\u00efght", 401), ("Bearer right second", 401)])
def test_a_key_is_asked_for(header, status):
    app = Guard(Echo(), api_keys=["right", "second"])
    found, error, headers = run(app, authorization=header)
    assert found == status
    if status == 401:
        assert error["code"] == "invalid_api_key" and "Bearer" in error["message"]
        assert headers[b"www-authenticate"] == b"Bearer" and app.app.bodies == []


def test_no_key_is_a_wrong_key_and_some_paths_need_none():
    app = Guard(Echo(), api_keys=["right"])
    for path in ("/v1/completions", "/trace", "/v1/models"):
        assert run(app, path, method="GET")[0] == 401 and run(Guard(Echo()), path)[0] == 200
    for path in OPEN_PATHS:
        assert run(app, path, method="GET")[0] == 200


def test_every_key_is_compared_in_constant_time(monkeypatch):
    """hmac's function, with digests of one length, once for each key, whichever is right."""
    seen = []

    def compare(a, b):
        seen.append((len(a), len(b)))
        return hmac.compare_digest(a, b)
    monkeypatch.setattr(module, "hmac", type("", (), dict(compare_digest=staticmethod(compare))))
    for key in ("first", "third", "a much longer key that is wrong"):
        seen.clear()
        run(Guard(Echo(), api_keys=["first", "second", "third"]), authorization=f"Bearer {key}")
        assert seen == [(32, 32)] * 3


def test_bodies_have_a_limit_whatever_they_claim():
    app = Guard(Echo(), max_body_bytes=100)
    assert run(app, pieces=[b"x" * 50] * 2)[0] == 200 and app.app.bodies == [b"x" * 100]
    for length in ({}, {"content-length": "3"}, {"content-length": "102"}):
        status, error, _ = run(app, pieces=[b"x" * 51] * 2, **length)
        assert status == 413 and "100 bytes" in error["message"]
    assert run(app, pieces=[b"x" * 60] * 1000)[0] == 413  # no end of it is waited for, ...
    assert run(app, pieces=[], **{"content-length": "10000"})[0] == 413  # ... and no beginning
    assert len(app.app.bodies) == 1 and app.num_open == 0


def test_a_body_that_does_not_come_gives_its_place_back(monkeypatch):
    """No time is left, so whatever is not there yet comes too late; what is there is read."""
    monkeypatch.setattr(module, "BODY_SECONDS", -1)
    monkeypatch.setattr(module, "BODY_RATE", 10 ** 9)
    app, sent = Guard(Echo()), []

    async def receive():
        if not sent:
            sent.append({"type": "http.request", "body": b"{", "more_body": True})
            return sent[0]
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
    asyncio.run(app({"type": "http", "path": "/v1/completions", "method": "POST",
                     "headers": [(b"content-length", b"999")]}, receive, send))
    assert sent[1]["status"] == 408 and (b"connection", b"close") in sent[1]["headers"]
    assert "only 1 bytes" in json.loads(sent[2]["body"])["error"]["message"]
    assert app.num_open == 0 and app.app.bodies == [] and run(app)[0] == 200


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200),
    ("app.localhost:1", 200), ("192.168.1.7:80", 200), ("host.docker.internal:8000", 200),
    ("evil.example", 403), ("localhost.evil.example:8000", 403), ("127.0.0.1.evil.example", 403),
    ("evil.example:127", 403), ("xlocalhost", 403), ("r\u00e9.example", 403)])
def test_a_page_whose_name_leads_here_is_refused_on_every_path(host, status):
    for path, method in (("/v1/completions", "POST"), ("/trace", "GET"), ("/health", "GET")):
        found, error, _ = run(Guard(Echo(), only_local=True), path, method=method, host=host)
        assert found == status and (status == 200 or "--api-key" in error["message"])
        assert run(Guard(Echo()), path, method=method, host=host)[0] == 200


def test_a_flood_is_told_to_come_back():
    async def flood():
        app = Guard(Echo(asyncio.Event()), max_requests=3)
        waiting = [asyncio.create_task(ask(app)) for _ in range(3)]
        await asyncio.sleep(0)
        status, error, headers = await ask(app)
        assert status == 429 and "--max-requests" in error["message"]
        assert headers[b"retry-after"] == b"1" and len(app.app.bodies) == 3
        waiting[0].cancel()
        app.app.hold.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [one[0] for one in done[1:]] == [200, 200]
        assert app.num_open == 0 and (await ask(app))[0] == 200
    asyncio.run(flood())
