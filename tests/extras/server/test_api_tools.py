"""Tools and thoughts over HTTP: by OpenAI's own client, and by bodies that are wrong.

The bundled model can't call a tool by itself: a grammar makes it. So what `auto` reads is told by
an engine that has been given its words.
"""

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from chat_templates import TEMPLATES
from jsonschema import validate
from serving import CHATS
from test_tools import FORMATS, read

from nanoserve import SamplingParams
from nanoserve.request import CompletionOutput, RequestOutput
from nanoserve_extras.server import tool_grammar
from nanoserve_extras.server.answers import ChatAnswer, one_text
from nanoserve_extras.server.errors import BadRequest
from nanoserve_extras.server.protocol import MAX_SCHEMAS, MAX_TOOLS, ChatBody
from nanoserve_extras.server.tool_grammar import ModelTurns
from nanoserve_extras.server.tools import Piece
from nanoserve_extras.structured import structured

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

WEATHER = dict(type="object", properties=dict(
    city=dict(type="string", maxLength=8), days=dict(type="integer", minimum=0, maximum=9)),
    required=["city", "days"], additionalProperties=False)
STOP = dict(type="object", properties={}, additionalProperties=False)
SCHEMAS = dict(weather=WEATHER, stop=STOP)
TOOLS = [dict(type="function", function=dict(name=name, description="A tool.", parameters=schema))
         for name, schema in SCHEMAS.items()]
CHAT = [{"role": "user", "content": "What is the weather in Paris?"}]
BODY = dict(messages=CHAT, tools=TOOLS, max_tokens=120, temperature=1.0, seed=5)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions


def named(name: str) -> dict:
    return dict(type="function", function=dict(name=name))


def allowed(mode: str, *names: str) -> dict:
    return dict(type="allowed_tools", allowed_tools=dict(mode=mode, tools=list(map(named, names))))


# How clients of OpenAI's two languages, of Anthropic's and of Mistral's say it.
@pytest.mark.parametrize(("choice", "must", "names"), [
    ("any", True, "weather stop"), (dict(type="any"), True, "weather stop"),
    (dict(type="required"), True, "weather stop"), (dict(type="auto"), False, "weather stop"),
    (dict(type="none"), False, ""), (dict(type=None), False, "weather stop"),
    (named("stop"), True, "stop"), (dict(function=dict(name="stop")), True, "stop"),
    (dict(type="function", name="stop"), True, "stop"), (dict(name="stop"), True, "stop"),
    (dict(type="tool", name="stop"), True, "stop"),
    (dict(type="custom", name="stop"), True, "stop"),
    (allowed("auto", "stop"), False, "stop"),
    (allowed("required", "stop", "weather"), True, "weather stop"),
    (dict(type="allowed_tools", mode="required", tools=[
        dict(type="function", name="stop"), dict(type="web_search")]), True, "stop"),
    (dict(type="allowed_tools", tools=[dict(type="mcp", server_label="x")]), False, "")])
def test_a_choice_of_tools_is_read_in_every_form(choice, must, names):
    body = ChatBody(**BODY, tool_choice=choice)
    assert (body.must_call, " ".join(body.schemas())) == (must, names)
    shown = body.template_options().get("tools", [])  # of allowed tools all are shown
    assert len(shown) == (0 if choice == dict(type="none") else 2)


@pytest.mark.parametrize("choice", ["required", named("stop"), named("weather")])
def test_a_call_that_is_asked_for_is_always_valid(client, choice):
    answer = client.create(model="tested", tool_choice=choice, n=3, **BODY)
    for one in answer.choices:
        assert one.message.content is None
        if choice == "required":
            assert one.finish_reason == "tool_calls" and one.message.tool_calls
        else:  # one call, and then the end
            assert one.finish_reason == "stop"
            [call] = one.message.tool_calls
            assert call.function.name == choice["function"]["name"]
        for call in one.message.tool_calls:
            validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    ids = [call.id for one in answer.choices for call in one.message.tool_calls]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() for one in ids)  # what Mistral's templates want


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_made_before_ends_a_turn_that_must_call(server, stream):
    """A real model wrote one call five times, up to max_tokens: the grammar lets it."""
    asked = BODY | dict(tool_choice="required", tools=TOOLS[1:], temperature=0.0)
    told = server.events(CHATS, asked) if stream else [server.ask(CHATS, asked)[1]]
    choices = [one["choices"][0] for one in told]
    calls = [call["function"] for one in choices for call in (
        one["delta" if stream else "message"].get("tool_calls", ()))]
    assert calls == [dict(name="stop", arguments="{}")]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("tool_calls", None)
    reader = FORMATS["Qwen2.5"].reader(SCHEMAS, "", must=True)
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>\n'
             for name, given in (("stop", "{}"), ("weather", '{"city": "Rome", "days": 1}'),
                                 ("weather", '{"city": "Rom", "days": 1}'), ("stop", "{}"))]
    for i, text in enumerate(texts):
        assert not reader.is_over
        piece = read(reader, text, range(len(text)), None)
        assert [call.name for call in piece.calls] == ["stop", "weather", "weather"][i:i + 1]
    assert reader.span("more", False)[2] == len("".join(texts)) + len("more")
    assert reader.feed("more") == Piece()


def test_streamed_and_whole_are_the_same(client):
    asked = dict(model="tested", tool_choice="required", **BODY)
    whole = client.create(**asked).choices[0].message.tool_calls
    with client.stream(**asked) as stream:
        told = stream.get_final_completion().choices[0]
    assert told.finish_reason == "tool_calls" and not told.message.content
    assert [one.function.to_dict() | {"parsed_arguments": None} for one in whole] == [
        one.function.to_dict() | {"parsed_arguments": None} for one in told.message.tool_calls]
    one = dict(tool_choice=dict(type="function", function=dict(name="weather")))
    pieces = [piece.choices[0].delta for piece in client.create(stream=True, **asked | one)]
    assert not any(piece.content for piece in pieces)
    assert sum(bool(piece.tool_calls) for piece in pieces) > 4  # arguments come as they are written


def test_pydantic_models_as_tools_and_as_forms(client):
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        city: str = Field(max_length=8)
        sunny: bool

    tool = openai.pydantic_function_tool(Weather)
    answer = client.parse(model="tested", tool_choice="required", **BODY | dict(tools=[tool]))
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    answer = client.parse(model="tested", response_format=Weather, **BODY | dict(tools=[tool]))
    message = answer.choices[0].message
    assert isinstance(message.parsed, Weather) or message.tool_calls


APPLY = dict(type="custom", custom=dict(name="apply", description="Apply.", format=dict(
    type="grammar", grammar=dict(syntax="lark", definition='start: "so"'))))


def test_a_custom_tool_has_one_text_whole_streamed_and_sent_back(client, server):
    asked = BODY | dict(tools=[APPLY, *TOOLS], model="tested", parallel_tool_calls=False)
    asked |= dict(tool_choice=dict(type="custom", custom=dict(name="apply")), max_tokens=60)
    message = client.create(**asked).choices[0].message
    [call] = message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "apply") and len(call.custom.input) > 20
    pieces = [one for event in server.events(CHATS, asked)
              for one in event["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["type"] == "custom" and len(pieces) > 4
    assert "".join(one["custom"]["input"] for one in pieces) == call.custom.input
    asked["messages"] = [*CHAT, message.to_dict(), dict(
        role="tool", tool_call_id=call.id, content="ok")]
    _, told = server.ask("/tokenize", {key: asked[key] for key in ("messages", "tools")})
    prompt = server.llm.tokenizer.decode(told["tokens"])
    assert json.dumps(dict(input=call.custom.input), ensure_ascii=False) in prompt
    assert 'Apply.\\nThe grammar of its input (lark):\\nstart: \\"so\\"' in prompt


def test_a_text_grows_as_its_json_is_written():
    for text in ("so", "", 'a "b"\n\\c\t', "\U0001f600é\u2028", "x\\"):
        for written in (json.dumps(dict(input=text)), json.dumps(dict(input=text),
                                                                 ensure_ascii=False)):
            told = [one_text(written[:end]) for end in range(len(written) + 1)]
            assert told[-1] == text
            assert all(after.startswith(before) for before, after in pairwise(told))
    assert one_text('{"other": 1}') == '{"other": 1}'


def test_one_call_where_only_one_is_wanted(client):
    asked = BODY | dict(tool_choice="required", parallel_tool_calls=False, n=4)
    for choice in client.create(model="tested", **asked).choices:
        assert len(choice.message.tool_calls) == 1


def test_a_call_that_max_tokens_cuts_says_length(server):
    for limit in (3, 14, 30, 36):
        _, answer = server.ask(CHATS, BODY | dict(tool_choice=named("weather"), max_tokens=limit))
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]
        cut = "".join(call["function"]["arguments"] for call in choice["message"].get(
            "tool_calls", ()))
        assert '{"city": "'.startswith(cut[:10])


def test_a_result_goes_back_through_the_template(server):
    call = dict(id="call_1", type="function", function=dict(name="stop", arguments='{"x": 5}'))
    chat = [*CHAT, dict(role="assistant", content=None, refusal=None, tool_calls=[call]),
            dict(role="tool", tool_call_id="call_1", content="It was stopped.")]
    status, read = server.ask("/tokenize", dict(messages=chat, tools=TOOLS))
    text = server.llm.tokenizer.decode(read["tokens"])
    assert status == 200 and '<tool_call>\n{"name": "stop", "arguments": {"x": 5}}' in text
    assert "It was stopped." in text and '"name": "weather"' in text
    _, read = server.ask("/tokenize", dict(messages=chat, tools=TOOLS, tool_choice="none"))
    assert '"name": "weather"' not in server.llm.tokenizer.decode(read["tokens"])


def test_none_and_auto_leave_the_answer_to_the_model(server):
    odd = [function(name=f"f{i}", parameters=dict(properties=value)) for i, value in enumerate((
        None, dict(x=dict(type="spoon")), dict(x=dict(pattern="(?=a)"))))]
    for choice in ("none", "auto", None):
        status, answer = server.ask(CHATS, BODY | dict(tool_choice=choice, max_tokens=8,
                                                      tools=TOOLS + odd))
        [choice] = answer["choices"]
        assert status == 200 and choice["message"]["content"]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "length"


def function(**more) -> dict:
    return dict(type="function", function=dict(name="f") | more)


def takes(properties, **more) -> dict:
    """A call of this tool is required."""
    return dict(tool_choice="required", tools=[function(parameters=dict(
        properties=properties, **more))])


@pytest.mark.parametrize(("wrong", "param", "said"), [
    (dict(tools=[function(), function()]), "tools", "there twice"),
    (dict(tools=[function(name="a b")]), "tools", "name"),
    (dict(tools=[dict(type="web_search")]), "tools", "'function'"),
    (dict(tools=[function(name=f"f{i}") for i in range(MAX_TOOLS + 1)]), "tools", "128"),
    (dict(tools=[function(parameters=dict(properties={"x" * (MAX_SCHEMAS - 20): {}}))]), "tools",
     "are the most"),
    (dict(tools=[function(parameters=dict(properties=5))]), "tools", "properties"),
    (takes(dict(x=dict(type="spoon"))), "tools", "tools: f: 'x': "),
    (takes(dict(x={}), required=["x", {}]), "tools", "tools: f: "),
    (dict(tool_choice=named("unknown")), "tool_choice", "weather, stop"),
    (dict(tool_choice="required", tools=None), "tool_choice", "there are none"),
    *((dict(tool_choice=wrong), "tool_choice", "must be none, auto, required") for wrong in (
        "sometimes", 5, ["auto"], dict(type="function"), dict(type="web_search"), dict(type=[]),
        dict(type="allowed_tools", mode="none", tools=[]), dict(type="allowed_tools"),
        dict(type="allowed_tools", tools=[5]), dict(type="allowed_tools", tools=[dict(name=5)]))),
    (dict(tool_choice=allowed("auto", "stop", "unknown")), "tool_choice", "no unknown: weather"),
    (dict(tool_choice=allowed("required")), "tool_choice", "no tool: weather, stop"),
    (dict(structured_outputs=dict(regex="a+")), "structured_outputs", "only json")])
def test_what_is_wrong_is_said(server, monkeypatch, wrong, param, said):
    monkeypatch.setattr(server.app, "max_body_bytes", 10 ** 6)
    error = server.refusal(CHATS, BODY | wrong)
    assert error["param"] == param and said in error["message"]


def told(body: ChatBody, template: str, words: list[str], ended: str = "stop",
         stream: bool = False, stopped: str | None = None):
    """What a client gets of a model that writes these words."""
    request = SimpleNamespace(
        request_id="0", prompt_token_ids=[1], prompt="",
        tokenizer=SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids)))
    answer = ChatAnswer(body, [request], "model", "id")
    answer.readers = [FORMATS[template].reader(
        body.schemas(), "", body.parallel_tool_calls is False) for _ in range(body.num_samples)]

    async def outputs():
        for i, word in enumerate(words if body.stream else ["".join(words)]):
            last = i == len(words) - 1 or not body.stream
            token_ids = [i] if body.stream else list(range(len(words)))
            yield RequestOutput("0", "", [1], None, [CompletionOutput(
                0, word, token_ids, finish_reason=ended if last else None,
                stop_reason=stopped if last else None)], last)

    async def pieces():
        return [piece async for piece in answer.pieces(outputs())]
    return asyncio.run(pieces() if body.stream else answer.whole(outputs()))


WORDS = list("I will look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
             "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function="
             "stop>\n</function>\n</tool_call>")
CALLS = [("weather", dict(city="Rome", days=2)), ("stop", {})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [None, False])
def test_thought_answer_and_calls_of_one_text(stream, parallel):
    """Of calls that nobody wants the first stays."""
    body = ChatBody(**BODY, stream=stream, parallel_tool_calls=parallel)
    expected = CALLS[:1] if parallel is False else CALLS
    words = ["It ", "asks.\n</thi", "nk>\n", "\n", *WORDS]
    got = told(body, "Qwen3.5", words)
    if stream:
        choices = [event["choices"][0] for event in got]
        deltas = [choice["delta"] for choice in choices]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == list(range(len(expected)))
        message = {key: "".join(delta.get(key) or "" for delta in deltas)
                   for key in ("content", "reasoning_content", "reasoning")}
    else:
        choices, message = got["choices"], got["choices"][0]["message"]
        calls = message["tool_calls"]
    assert message["content"] == "I will look."
    assert message["reasoning_content"] == message["reasoning"] == "It asks."  # vLLM's name, too
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in calls] == expected
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "words", "count"), [
    ("Qwen3.5", ["It ", "asks", ".\n", "</thi", "nk>", "\n", "Yes"], 3),  # begun by the prompt
    ("Qwen3", ["<think>", "\n", "It ", "asks", "</think>", "Yes", "."], 3),
    ("Qwen3", ["<th", "ink>", "It ", "asks"], 2), ("Qwen3", ["Yes", "."], 0),
    ("Qwen3.5", ["</think>", "Yes"], 0), ("Qwen2.5", ["Yes", "."], 0)])
def test_the_tokens_of_a_thought_are_counted(template, words, count, stream):
    """Each word is a token here; marks are no thought."""
    options = dict(include_usage=True, continuous_usage_stats=True) if stream else None
    body = ChatBody(messages=CHAT, stream=stream, stream_options=options)
    got = told(body, template, words, "length")
    usage = got[-1]["usage"] if stream else got["usage"]
    assert usage["completion_tokens"] == len(words)
    assert usage["completion_tokens_details"] == dict(reasoning_tokens=count)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_all_call_is_one_unless_that_is_switched_off(server, stream):
    """Nor where a form is asked for, or a call; a text around it is none of them."""
    words = ["```json\n{", '"name": "stop", "arguments"', ": {}}", "\n```"]
    got = told(ChatBody(**BODY, stream=stream), "Qwen2.5", words)
    choices = [one["choices"][0] for one in got] if stream else got["choices"]
    messages = [one["delta" if stream else "message"] for one in choices]
    [call] = [call for one in messages for call in one.get("tool_calls", ())]
    assert call["function"] == dict(name="stop", arguments="{}")
    assert not any(one.get("content") for one in messages)
    assert choices[-1]["finish_reason"] == "tool_calls"
    for bare, more in ((True, {}), (False, {}), (True, dict(tool_choice="required")),
                       (True, dict(response_format=dict(type="json_object")))):
        turns = ModelTurns(server.llm, bare_calls=bare)
        reader = turns.reader(ChatBody(**BODY, **more), turns.form.header)
        assert bool(reader.bare) == (bare and not more)


def test_a_thought_that_the_prompt_has_ended_has_no_tokens():
    """As with `enable_thinking: false`: no mark is in the text."""
    form, words = FORMATS["Qwen3"], ["Yes", ".", " Sure"]
    reader = form.reader({}, form.header + "<think>\n\n</think>\n\n")
    assert reader.feed("".join(words), "stop").said == "Yes. Sure"
    assert reader.count_thought([0, 1, 2], lambda ids: "".join(words[i] for i in ids)) == 0


def test_a_thought_may_be_left_out_and_may_never_end():
    body = ChatBody(**BODY, include_reasoning=False)
    message = told(body, "Qwen3.5", ["Hm.</think>Yes."])["choices"][0]["message"]
    assert message == dict(role="assistant", refusal=None, content="Yes.")
    choice = told(ChatBody(**BODY), "Qwen3.5", ["Hm. Hm."], "length")["choices"][0]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] == "Hm. Hm."


def test_a_stop_string_within_a_call_cuts_it(server):
    for stop in ("</tool", "\n"):
        _, answer = server.ask(CHATS, BODY | dict(tool_choice=named("stop"), stop=[stop]))
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop" and not choice["message"]["content"]
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == ["{}"] * (stop == "</tool")
    body = ChatBody(**BODY)
    for name in ("stop", "unknown"):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        [choice] = told(body, "Qwen2.5", [text, " So"], stopped="So")["choices"]
        assert choice["finish_reason"] == ("tool_calls" if name == "stop" else "stop")


def test_what_a_thinking_model_is_kept_to(server):
    """JSON comes behind the thought; what is no JSON begins at once, and is all answer."""
    turns, header = ModelTurns(server.llm, TEMPLATES["Qwen3.5"]), "<|im_start|>assistant\n<think>\n"
    for form, thinks in ((dict(json_object=True), True), (dict(json='{"type": "object"}'), True),
                         (dict(regex="a+"), False), (dict(choice=["a"]), False)):
        body = ChatBody(messages=CHAT, structured_outputs=form)
        params = turns.params(body, SamplingParams(structured_outputs=form), header)
        assert ("grammar" in params.structured_outputs) == thinks
        assert (turns.reader(body, header) is not None) == thinks
    free = turns.params(ChatBody(messages=CHAT), SamplingParams(), header)
    assert free.structured_outputs is None


def test_without_the_library_auto_is_read_and_required_is_refused(server, monkeypatch):
    def missing():
        raise ValueError("structured_outputs needs the library llguidance: pip install it")
    monkeypatch.setattr(tool_grammar, "find_spec", lambda name: None)
    monkeypatch.setattr(structured.Grammars, "compile", lambda *_: missing())
    assert server.ask(CHATS, BODY | dict(max_tokens=3))[0] == 200
    error = server.refusal(CHATS, BODY | dict(tool_choice="required"))
    assert error["param"] == "tools" and "pip install" in error["message"]


def test_a_template_without_calls_has_its_tools_refused(server):
    turns = ModelTurns(server.llm, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadRequest, match="does not write them") as caught:
        turns.params(ChatBody(**BODY), SamplingParams(), "")
    assert caught.value.param == "tools"


MANY = "{%% for i in range(99999) %%}{%% for j in range(99999) %%}%s{%% endfor %%}{%% endfor %%}"


@pytest.mark.parametrize("template", [
    "{% if tools %}" + MANY % "" + "{% endif %}", "{{ 'a' * 20_000 }}", "{{ 'a' * 10**10 }}",
    "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"])
def test_a_template_without_end_is_refused_and_the_server_goes_on(server, monkeypatch, template):
    """It comes with the model, and was rendered at the start without a bound."""
    monkeypatch.setattr(tool_grammar, "CPU_SECONDS", 1)
    monkeypatch.setattr(tool_grammar, "MOST_TEXT", 10_000)
    before = server.llm.tokenizer.apply_chat_template
    with pytest.raises(ValueError, match="chat template takes more than .*--chat-template"):
        tool_grammar.ModelTurns(server.llm, template + TEMPLATES["Qwen3"])
    assert server.llm.tokenizer.apply_chat_template == before
    assert server.ask(CHATS, BODY | dict(max_tokens=3))[0] == 200


def test_offline_tools_are_shown_to_the_template_and_calls_are_read(server):
    llm, text = server.llm, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    params = SamplingParams(max_tokens=60, structured_outputs=dict(choice=[text]))
    [output] = llm.chat(CHAT, params, use_tqdm=False, tools=TOOLS)
    assert output.prompt == llm.tokenizer.apply_chat_template(
        CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    [sample] = output.outputs
    reader = ModelTurns(llm).form.reader(SCHEMAS, output.prompt)
    piece = reader.feed(sample.text, sample.finish_reason)
    assert [call.name for call in piece.calls] == ["stop"] and piece.said == ""
