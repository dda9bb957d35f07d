"""The command line: `nanoserve serve [MODEL]` and its options.

    nanoserve serve                              the bundled model on http://127.0.0.1:8000
    nanoserve serve FOLDER_OR_HUB_ID --dtype float32 --no-enable-prefix-caching
    nanoserve serve --host 0.0.0.0 --api-key SECRET

Every option of the engine is an option here, by its name with dashes (arguments.py).

After SIGTERM or Ctrl-C the server takes no more connections. Running requests may finish within
`--drain-seconds`; then they are aborted, and the process ends with status 0.

The default address is 127.0.0.1: anybody could use a server that listens on all addresses without a
key.
"""

import argparse
import errno
import logging
import os
import re
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.llm import LLM
from nanoserve_extras.server.api import create_app
from nanoserve_extras.server.arguments import (
    VLLMS,
    Parser,
    add_engine_options,
    engine_options,
    json_object,
    json_or_text,
    load_chat_template,
    option_name,
    positive,
)
from nanoserve_extras.server.async_llm import AsyncLLM

KEY_VARIABLE = "NANOSERVE_API_KEY"  # an option can be read by all users of a machine (`ps`)
# An offer of HTTP/2 in a request's head, not in a body: after its first line and whole lines.
OFFER = re.compile(rb"(?i)\A(\w+ [^\r\n]+ HTTP/1\.1(?:\r\n[^\r\n]+)*?)\r\nupgrade: *h2c(?=\r\n)")


def make_parser() -> argparse.ArgumentParser:
    serve = Parser(
        prog="nanoserve serve", description="Answer OpenAI's requests over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    serve.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL",
                       help="a folder, a hub id, a GGUF file or OWNER/REPOSITORY:Q4_K_M; "
                       "the bundled model if it is left out")
    serve.add_argument("--model", dest="model_option", metavar="MODEL", help=argparse.SUPPRESS)
    door = serve.add_argument_group("server")
    door.add_argument("--host", default="127.0.0.1", help="0.0.0.0: on all addresses")
    door.add_argument("--port", type=int, default=8000, help="0: any that is free")
    door.add_argument("--root-path", default="", metavar="PATH",
                      help="what a proxy puts in front of all paths")
    door.add_argument("--allowed-origins", nargs="+", type=json_or_text, metavar="ORIGIN",
                      help="pages of these origins may ask from a browser; '*': of all")
    door.add_argument("--served-model-name", nargs="+", metavar="NAME",
                      help="what clients call the model (the first is in answers); as it is named "
                      "here if left out")
    door.add_argument("--api-key", action="append", metavar="KEY",
                      help=f"clients must send it; may be repeated. {KEY_VARIABLE} is one more")
    door.add_argument("--chat-template", metavar="FILE", help="a file with a template, or the "
                      "template; the tokenizer's own if left out")
    door.add_argument("--bare-calls", action=argparse.BooleanOptionalAction, default=True,
                      help="with tools, an answer that is nothing but JSON which names one of them "
                      "is a call, also without the chat template's marks")
    door.add_argument("--lora-modules", nargs="+", type=lora_module, default=[],
                      metavar="NAME=FOLDER", help="adapters (vLLM's JSON will do), each a model "
                      "of its own name for clients; with --enable-lora")
    door.add_argument("--strict", action="store_true", help="refuse unknown fields, "
                      "which are logged once and passed over otherwise")
    door.add_argument("--max-requests", type=positive, default=1024,
                      help="sequences that may be open, running or waiting; more get a 429")
    door.add_argument("--max-body-bytes", type=positive, metavar="BYTES", help="longer bodies get "
                      "a 413; 4 MiB if left out, and 32 MiB with images")
    door.add_argument("--drain-seconds", type=positive, default=30,
                      help="how long running requests may take when the server is told to end")
    door.add_argument("--keep-alive-seconds", type=positive, default=75,
                      help="how long an idle connection stays open; more than a balancer keeps its")
    door.add_argument("--also", metavar="MODEL", help="a second model in this server, an embedder "
                      "or reranker beside a generator, say: a folder, a hub id or a GGUF file")
    door.add_argument("--also-memory", type=share, default=0.1, metavar="SHARE",
                      help="of a GPU, which the second model gets and the first leaves")
    door.add_argument("--stats", action=argparse.BooleanOptionalAction, default=True,
                      help="a line every ten seconds while there is work")
    door.add_argument("--log-level", default="info", help="uvicorn's",
                      choices=("critical", "error", "warning", "info", "debug"))
    add_engine_options(serve.add_argument_group(
        "engine", "options of LLM(...), checked by the same rules"))
    return serve


def share(text: str) -> float:
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return float(text)


def lora_module(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if text.startswith("{"):  # vLLM's, which may also name the model
        entries = json_object(text)
        name, folder = entries.get("name"), entries.get("path")
        equals = entries.keys() <= {"name", "path", "base_model_name"}
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, or {{\"name\": ..., \"path\": "
                                         f"...}}, got {text!r}")
    return name, folder


def check_servers_own(args: argparse.Namespace) -> None:
    """Check the options of vLLM's server, and that the model is named once. Raises `ValueError`."""
    for name, row in VLLMS.items():
        if "serve" in row.takers and name in args and not row.asks_for_nothing(
                value := getattr(args, name)):
            raise ValueError(f"{option_name(name)} {value} is not supported: {row.remedy}")
    if "" in (args.api_key or ()):  # a variable of the shell that is not set, say
        raise ValueError("--api-key is empty: requests without a key would be accepted")
    if args.lora_modules and not args.enable_lora:
        raise ValueError("--lora-modules has no effect without --enable-lora: add it")
    if args.model_option is not None:
        if getattr(args, "model", args.model_option) != args.model_option:
            raise ValueError(f"two models are named, {args.model!r} and {args.model_option!r}: "
                             "name one of them")
        args.model = args.model_option


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_servers_own(args)
        template = args.chat_template and load_chat_template(args.chat_template)
        listening = listen(args.host, args.port)  # before a model is loaded for minutes
        if args.skip_tokenizer_init and args.runner != "pooling":
            raise ValueError("--skip-tokenizer-init leaves a generator without text: leave it out")
        names = args.served_model_name or [getattr(args, "model", BUNDLED_MODEL.name)]
        check_names([*names, *filter(None, [args.also]),
                     *(name for name, _ in args.lora_modules or ())])
        llm = LLM(getattr(args, "model", BUNDLED_MODEL), **leaving_room(args))
        also = load_also(args)
        with naming(args.host, args.port):  # two that start together may both be bound to it
            listening.listen()
        lora_requests = load_adapters(llm, args.lora_modules)
        keys = (args.api_key or []) + list(filter(None, [os.environ.get(KEY_VARIABLE)]))
        app = create_app(AsyncLLM(llm), names, template, lora_requests, args.strict,
                         args.bare_calls, args.stats, also, api_keys=keys, root_path=args.root_path,
                         max_requests=args.max_requests,
                         only_local=not keys and is_loopback(listening),
                         max_body_bytes=args.max_body_bytes
                         or (32 if args.limit_mm_per_prompt else 4) * 2 ** 20)
    except (ValueError, OSError) as error:
        parser.exit(2, f"nanoserve: {error}\n")
    if args.allowed_origins:  # around the guard: a browser's preflight has no key
        origins = sum([[one] if isinstance(one, str) else one for one in args.allowed_origins], [])
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
                             expose_headers=["x-request-id"])
    config = uvicorn.Config(app, http=Http1, timeout_graceful_shutdown=args.drain_seconds,
                            timeout_keep_alive=args.keep_alive_seconds, log_level=args.log_level)
    # The page at / asks for /live a few times a second.
    logging.getLogger("uvicorn.access").addFilter(lambda line: "/live" not in line.getMessage())
    run(uvicorn.Server(config), listening, greeting(names[0], listening, keys))
    return 0


def leaving_room(args: argparse.Namespace) -> dict:
    """The engine's options; on a GPU they leave memory for a second model. Raises `ValueError`."""
    options = engine_options(args)
    if args.also:
        options["gpu_memory_utilization"] -= args.also_memory
        if options["gpu_memory_utilization"] <= 0:
            raise ValueError(f"--also-memory {args.also_memory} leaves nothing of "
                             f"--gpu-memory-utilization {args.gpu_memory_utilization}: lower it")
    return options


def load_also(args: argparse.Namespace) -> tuple[AsyncLLM, list[str]] | None:
    """The second model's engine, on the same device, and its names. On a GPU its
    --gpu-memory-utilization includes the memory that the first one uses."""
    if not args.also:
        return None
    llm = LLM(args.also, device=args.device, kernels=args.kernels,
              gpu_memory_utilization=args.gpu_memory_utilization,
              trust_remote_code=args.trust_remote_code)
    return AsyncLLM(llm), [args.also]


def check_names(names: list[str]) -> None:
    """Raises `ValueError` if two models have one name: a client could get either."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models have the name {twice[0]!r}: choose another one for the "
                         "adapter (--lora-modules), or for the model (--served-model-name)")


def load_adapters(llm: LLM, modules: list[tuple[str, str]]) -> dict[str, Any]:
    """The `LoRARequest`s by their names. Each adapter is loaded once, so that errors show at
    start-up; adapters beyond `max_loras` are loaded again when a client asks for them."""
    if not modules:
        return {}
    from nanoserve_extras.lora.lora import LoRARequest  # an idea that may be deleted
    requests = {name: LoRARequest(name, i, folder) for i, (name, folder) in enumerate(modules, 1)}
    params = None
    if Fact.GENERATES not in llm.facts:
        from nanoserve_extras.pooling.pooling import PoolingParams
        params = PoolingParams()
    for request in requests.values():
        llm.make_request("", [0], params, lora_request=request)
    return requests


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises `OSError` if there is no such address, or if
    the port is taken. (The system would take port 65,536 for 0, which is any that is free.)"""
    with naming(host, port), ExitStack() as ends:
        if not 0 <= port < 2 ** 16:
            raise OSError(errno.EINVAL, "choose a port from 0 to 65535")
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = ends.enter_context(socket.socket(family, kind))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        ends.pop_all()
        return sock


@contextmanager
def naming(host: str, port: int):
    """A block in which an `OSError` gets host and port added to its message."""
    try:
        yield
    except OSError as error:
        raise OSError(f"can't listen on {host}, port {port}: {error.strerror}") from error


def is_loopback(listening: socket.socket) -> bool:
    return ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


class Http1(AutoHTTPProtocol):
    """Removes the offer of HTTP/2 from a request's head. Java's client sends it with its first
    request, and uvicorn would not read the body after it."""

    def data_received(self, data: bytes) -> None:
        super().data_received(OFFER.sub(rb"\1", data))


def greeting(name: str, listening: socket.socket, keys: list[str]) -> str:
    host, port = listening.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    who = "with a key" if keys else "without a key, for all who reach this address"
    return (f"nanoserve: serving {name} on {where} {who} | {where}/v1 for clients, {where}/docs, "
            f"{where}/trace, {where}/metrics")


def run(server: uvicorn.Server, listening: socket.socket, said: str) -> None:
    """Serve until a signal comes. uvicorn then stops serving and waits; at the end it raises the
    signal once more, which ends the process with status 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        print(said, file=sys.stderr, flush=True)  # its reader may connect, or send a signal
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
