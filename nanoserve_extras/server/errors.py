"""Errors for clients: every error as one object, in OpenAI's and Anthropic's form at once.

    {"type": "error", "error": {"message": ..., "type": by status, "param": a field, "code": ...}}

    pydantic's             a field of the wrong shape     400: the field, and pydantic's message
    `ValueError`           of the engine, the template    400: the field that it is about
    `BadRequest`           this server's own              the status and the field that it names
    `EngineGenerateError`  a failed step                  500; 503 where the engine is dead

Invariants: an error names the field that the client can change, by the client's name for it:
`max_tokens`, not the engine's `max_model_len`; `tools`, not the grammar that was made of them. Bad
input is never a 500. Libraries' messages pass through `words_of`, which removes addresses.

pydantic lists all errors: for a field that may be one of three types there are three.
"""

import json
import re
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from nanoserve_extras.base.messages import MediaError
from nanoserve_extras.base.words import words_of
from nanoserve_extras.server.async_llm import EngineDeadError, EngineGenerateError

TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which clients shorten a history
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
         503: "overloaded_error"}  # by status
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"},
           413: {"connection": "close"}, 429: {"retry-after": "1"}}
# Why JSON can't be read, for errors whose message is about Python.
UNREAD = {RecursionError: "it is nested too deep", UnicodeError: "it is no UTF-8",
          ValueError: "a number has thousands of digits"}
OURS = "an error of this server: its log says more"
FORMS = "response_format", "text", "output_config", "output_format"  # in three languages


class BadRequest(ValueError):
    """An error that the client can correct. param: the field, if one is to blame."""

    def __init__(self, message: str, param: str | None = None, status: int = 400,
                 code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class TooMuch(ValueError):
    """A prompt and max_tokens that don't fit together: the numbers of tokens, and the limit."""


class AsciiResponse(JSONResponse):
    """JSON in ASCII, which can hold any text, also text that UTF-8 can't encode."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


def as_json(content: Any) -> bytes:
    """Encode JSON. Raises `ValueError` for NaN and Infinity, which Python would write although
    JSON has no such numbers."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def error_body(message: str, status: int = 400, param: str | None = None,
               code: str | None = None) -> dict:
    return {"type": "error", "error": {"message": words_of(message), "type": KINDS.get(
        status, "invalid_request_error"), "param": param, "code": code}}


def status_of(error: EngineGenerateError) -> int:
    return 503 if isinstance(error, EngineDeadError) else 500


def error_response(message: str, status: int = 400, param: str | None = None,
                   code: str | None = None) -> AsciiResponse:
    return AsciiResponse(error_body(message, status, param, code), status, HEADERS.get(status))


def add_errors(app: FastAPI) -> None:
    """Add handlers that answer every error with one object."""
    @app.exception_handler(BadRequest)
    async def bad_request(http: Request, error: BadRequest):
        return error_response(str(error), error.status, error.param, error.code)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(http: Request, error: RequestValidationError):
        first, *_ = errors = error.errors()
        for one in errors:  # an error of our own validators is clearer than pydantic's
            if isinstance(told := one.get("ctx", {}).get("error"), BadRequest):
                return await bad_request(http, told)
        if first["type"] == "json_invalid":  # `loc` ends with a number then, not a field
            return error_response(f"the body is no JSON from character {first['loc'][-1]} on: "
                                  f"{first['ctx']['error']}")
        kind = http.headers.get("content-type", "none at all")
        if first["loc"] == ("body",) and "json" not in kind:
            return error_response(f"the body was not read, because its Content-Type is {kind}: "
                                  "send the header Content-Type: application/json", 415)
        said, path = wrong_shape([one | dict(loc=one["loc"][one["loc"][0] == "body":])
                                  for one in errors], error.body)
        return error_response(said, param=path[0] if path else None)

    @app.exception_handler(HTTPException)
    async def no_such_thing(http: Request, error: HTTPException):
        if isinstance(cause := error.__cause__, BadRequest):
            return await bad_request(http, cause)
        if cause:
            if coding := http.headers.get("content-encoding"):
                return error_response(f"the body is in {coding:.80} (Content-Encoding), which is "
                                      "not read here: send it as it is", 415)
            why = next((why for kind, why in UNREAD.items() if isinstance(cause, kind)), "")
            return error_response(f"the body can't be read as JSON: {why or words_of(cause):.200}")
        answer = error_response(f"{http.method} {http.url.path}: {error.detail}", error.status_code)
        if error.status_code == 405:
            found = [route.methods for route in app.routes if route.matches(http.scope)[0]
                     is Match.PARTIAL]
            answer.headers["Allow"] = ", ".join(sorted(set().union(*found)))
        return answer

    @app.exception_handler(EngineGenerateError)
    async def failed(http: Request, error: EngineGenerateError):
        return error_response(str(error), status_of(error))

    @app.exception_handler(Exception)
    async def surprise(http: Request, error: Exception):
        return error_response(OURS, 500)


def wrong_shape(errors: list[dict], body: Any) -> tuple[str, list[str]]:
    """pydantic's message about the first wrong field, and the field's path. For a union pydantic
    lists an error for each arm, by names that are in no body; the arm that fits longest is told."""
    field = errors[0]["loc"][:1]
    path, error = max(((_place(error, body), error) for error in errors
                       if error["loc"][:1] == field), key=lambda one: (
        len(one[0]), [part for part in one[1]["loc"] if isinstance(part, int)],
        not one[1]["type"].endswith("_type")))
    got = "" if error["type"] == "missing" else f", got {error['input']!r:.80}"
    return f"{'.'.join(path) or 'the body'}: {error['msg']}{got}", path


def _place(error: dict, body: Any) -> list[str]:
    """Where an error is, without names of arms: ("stop", "list[str]", 0) is ["stop", "0"]."""
    found = []
    for part in error["loc"]:
        if isinstance(part, int) if isinstance(body, list) else isinstance(body, dict) and (
                part in body or error["type"] == "missing" and part == error["loc"][-1]):
            found.append(str(part))
            body = body[part] if isinstance(body, list) else body.get(part)
    return found


@contextmanager
def bad_requests(body: BaseModel):
    """A block in which a `ValueError` becomes a `BadRequest`."""
    try:
        yield
    except BadRequest:
        raise
    except TooMuch as error:
        raise body.too_much(*error.args) from error
    except ValueError as error:
        said = str(error)
        if hasattr(body, "as_chat"):  # items are counted otherwise than a chat's messages
            said = re.sub(r"^messages\.[\w.]+: ", "", said)
        field, code = blamed_field(said, body), None
        if "maximum context length is" in said:
            code, said = TOO_LONG, f"prompt is too long: {said}"  # Claude Code shortens it then
        elif said.startswith("structured_outputs: ") and field not in (None, "structured_outputs"):
            # The grammar was made of that field here: the client doesn't know its lines.
            said = f"{field}: " + said.partition(": ")[2].splitlines()[0]
        elif isinstance(error, MediaError):
            said = body.not_shown(said)
        raise BadRequest(said, field, code=code) from error


def blamed_field(message: str, body: BaseModel) -> str | None:
    """The field with which an error message begins. If the message is about the prompt: the field
    of this body that holds the prompt."""
    first = re.match(r"\w*", message)[0]
    if first == "structured_outputs" and not getattr(body, first, None):  # made of another field
        line = re.search(r"\bat (\d+)\(", message)  # a line of the grammar
        is_tool = line and re.search(rf"^ *{line[1]} \| tool", message, re.MULTILINE)
        return next((name for name in (("tools", *FORMS) if is_tool else (*FORMS, "tools"))
                     if getattr(body, name, None)), None)
    if first in type(body).model_fields:
        return first
    if re.search(r"\b(prompt|conversation|message|image)\b", message):
        return next((name for name in ("prompt", "messages", "input", "tokens")
                     if name in body.model_fields_set), None)
    return None
