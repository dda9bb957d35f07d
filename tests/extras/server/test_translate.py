"""`/v1/responses` and `/v1/messages`: what they say is what a chat says.

Oracle: the same conversation sent to `/v1/chat/completions`.
"""

import json
import sys

import pytest
from serving import CHATS, MESSAGES, RESPONSES, Serving, send
from test_api_tools import CHAT, SCHEMAS, TOOLS

pytest.importorskip("fastapi")

from nanoserve import LLM  # noqa: E402
from nanoserve_extras.server.protocol import ChatBody  # noqa: E402
from nanoserve_extras.server.translate import Kept, ResponsesBody  # noqa: E402
from nanoserve_extras.server.translate_messages import MessagesBody  # noqa: E402

FUNCTIONS = [dict(type="function", **one["function"]) for one in TOOLS]
BLOCKS = [dict(name=name, description="A tool.", input_schema=schema)
          for name, schema in SCHEMAS.items()]
ASKED = CHAT[0]["content"]
CALL = dict(id="call_1", type="function", function=dict(name="stop", arguments="{}"))
# A conversation with all that there is, in three languages.
TOLD = [dict(role="system", content="Be kind."), *CHAT,
        dict(role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=[CALL]),
        dict(role="tool", tool_call_id="call_1", content="It stopped.")]
ITEMS = [dict(type="message", role="user", content=[dict(type="input_text", text=ASKED)]),
         dict(type="reasoning", id="rs_1", summary=[], content=[
             dict(type="reasoning_text", text="Hm.")]),
         dict(type="message", id="msg_1", role="assistant", content=[
             dict(type="output_text", text="I look.", annotations=[])]),
         dict(type="function_call", id="fc_1", call_id="call_1", name="stop", arguments="{}"),
         dict(type="function_call_output", call_id="call_1", output="It stopped.")]
TURNS = [dict(role="user", content=ASKED), dict(role="assistant", content=[
    dict(type="thinking", thinking="Hm.", signature=""), dict(type="text", text="I look."),
    dict(type="tool_use", id="call_1", name="stop", input={})]),
    dict(role="user", content=[dict(type="tool_result", tool_use_id="call_1", content=[
        dict(type="text", text="It stopped.")])])]


def events(server, path: str, body: dict) -> list[dict]:
    status, data = server.ask_raw(path, body | dict(stream=True))
    assert status == 200, data
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, text = block.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chat(server, **body) -> tuple[dict, dict]:
    _, answer = server.ask(CHATS, dict(messages=TOLD, tools=TOOLS, temperature=0) | body)
    return answer["choices"][0], answer["usage"]


def test_a_conversation_is_the_same_prompt_in_each_language(server):
    _, usage = chat(server, max_tokens=1)
    _, answer = server.ask(RESPONSES, dict(input=ITEMS, tools=FUNCTIONS, instructions="Be kind.",
                                           max_output_tokens=1))
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert answer["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    _, counted = server.ask(RESPONSES + "/input_tokens", dict(
        input=ITEMS, tools=FUNCTIONS, instructions="Be kind."))
    assert counted == dict(object="response.input_tokens", input_tokens=usage["prompt_tokens"])
    body = dict(messages=TURNS, tools=BLOCKS, system=[dict(type="text", text="Be kind.")])
    _, counted = server.ask(MESSAGES + "/count_tokens", body)
    assert counted == dict(input_tokens=usage["prompt_tokens"])
    plain, *empty = (server.ask(MESSAGES + "/count_tokens", dict(messages=TURNS[:1]) | more)[1]
                     for more in ({}, dict(system=""), dict(system=[dict(type="text", text="")])))
    assert empty == [plain] * 2


@pytest.mark.parametrize("choice", [{}, dict(tool_choice="required", parallel_tool_calls=False)])
def test_a_response_is_a_chats_answer_whole_and_streamed(server, choice):
    limit = 120 if choice else 9
    said, usage = chat(server, max_tokens=limit, **choice)
    body = dict(input=ITEMS, tools=FUNCTIONS, instructions="Be kind.", temperature=0,
                max_output_tokens=limit, metadata=dict(run="\ud800")) | choice
    _, whole = server.ask(RESPONSES, body)
    [item] = whole["output"]
    assert whole["metadata"] == dict(run="\ud800")
    assert whole["status"] == ("completed" if choice else "incomplete")
    assert whole["usage"]["output_tokens"] == usage["completion_tokens"]
    if choice:
        [call] = said["message"]["tool_calls"]
        assert (item["type"], item["name"], item["arguments"]) == (
            "function_call", call["function"]["name"], call["function"]["arguments"])
    else:
        assert item["content"][0]["text"] == said["message"]["content"]
    told = events(server, RESPONSES, body)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert [one["type"] for one in told[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added"]
    final = told[-1]["response"]
    assert told[-1]["type"] == f"response.{whole['status']}"
    deltas = [one["delta"] for one in told if one["type"].endswith(".delta")]
    assert len(deltas) > 4  # a call's arguments, too, come as they are written
    grown = "".join(deltas)
    [streamed] = final["output"]
    assert grown == (streamed["arguments"] if choice else streamed["content"][0]["text"])
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert [one | dict(status=whole["status"]) for one in done] == [streamed]
    assert {one["item_id"] for one in told if "item_id" in one} == {streamed["id"]}
    own = item.keys() - {"id", "call_id"}
    assert {key: streamed[key] for key in own} == {key: item[key] for key in own}


@pytest.mark.parametrize("choice", [{}, dict(tool_choice=dict(
    type="any", disable_parallel_tool_use=True)), dict(tool_choice=dict(type="tool", name="stop"))])
def test_a_message_is_a_chats_answer_whole_and_streamed(server, choice):
    body = dict(messages=TURNS, tools=BLOCKS, system="Be kind.", temperature=0,
                max_tokens=120 if choice else 9) | choice
    _, whole = server.ask(MESSAGES, body)
    told = events(server, MESSAGES, body)
    wants_one = choice.get("tool_choice", {}).get("disable_parallel_tool_use")
    assert (MessagesBody(**body).chat().get("parallel_tool_calls") is False) == bool(
        wants_one)
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    blocks: list[dict] = []
    for one in told:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(one["content_block"] | dict(grown=""))
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            blocks[one["index"]]["grown"] += delta.get("text", "") + delta.get("partial_json", "")
    assert sum(one["type"] == "content_block_stop" for one in told) == len(blocks)
    if choice:
        assert whole["stop_reason"] == "tool_use" == told[-2]["delta"]["stop_reason"]
        assert [(one["name"], one["input"]) for one in whole["content"]] == [
            (one["name"], json.loads(one["grown"])) for one in blocks]
    else:
        assert whole["stop_reason"] == "max_tokens"
        assert [one["text"] for one in whole["content"]] == [one["grown"] for one in blocks]
    assert sum(one["type"] == "content_block_delta" for one in told) > (
        0 if blocks[0].get("name") == "stop" else 3 if choice else 4)  # a call is shorter
    first, last, usage = told[0]["message"]["usage"], told[-2]["usage"], whole["usage"]
    assert first["cache_read_input_tokens"] > 0  # known before the end, and equal there
    assert first | dict(output_tokens=0) == last | dict(output_tokens=0)
    assert usage["output_tokens"] == told[-2]["usage"]["output_tokens"]
    _, plain = chat(server, max_tokens=1)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == plain["prompt_tokens"]


def test_forms_and_stop_strings_are_a_chats(server):
    schema = dict(type="object", properties=dict(ok=dict(type="boolean")), required=["ok"])
    form = dict(format=dict(type="json_schema", name="f", strict=True, schema=schema))
    _, answer = server.ask(RESPONSES, dict(input=ASKED, text=form, max_output_tokens=30))
    assert list(json.loads(answer["output"][0]["content"][0]["text"])) == ["ok"]
    form = dict(type="json_schema", schema=schema)
    for asked in (dict(output_config=dict(format=form, effort="low")), dict(output_format=form)):
        _, answer = server.ask(MESSAGES, dict(messages=TURNS[:1], max_tokens=30) | asked)
        assert list(json.loads(answer["content"][0]["text"])) == ["ok"]
    _, answer = server.ask(MESSAGES, dict(messages=TURNS[:1], max_tokens=200, temperature=0,
                                          stop_sequences=["a", "e"]))
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] in ("a", "e")


@pytest.mark.parametrize(("effort", "options"), [
    ("low", dict(reasoning_effort="low", enable_thinking=True)),
    ("none", dict(reasoning_effort="none", enable_thinking=False)), ("Auto", {}), (None, {})])
def test_an_effort_is_a_templates_variable_in_each_language(effort, options):
    asked = dict(effort=effort)
    for fields in (dict(messages=TOLD, reasoning_effort=effort),
                   ResponsesBody(input=ASKED, reasoning=asked).chat(),
                   MessagesBody(messages=TURNS, max_tokens=1, output_config=asked).chat()):
        found = ChatBody(**fields).template_options()
        assert {key: found[key] for key in (
            "reasoning_effort", "enable_thinking") if key in found} == options


@pytest.mark.parametrize("control", [
    dict(stop=["I", "a"]), dict(logit_bias={"5": 100}), dict(structured_outputs=dict(
        choice=["so", "no"])), dict(repetition_penalty=1.9), dict(temperature=1, seed=5),
    dict(max_tokens=3), dict(top_k=1, temperature=2)], ids=str)
def test_controls_of_a_chat_hold_in_each_language(server, control):
    """Whoever moves from a chat keeps vLLM's fields, and they were passed over without a word."""
    control = dict(temperature=0, max_tokens=8) | control
    _, answer = server.ask(CHATS, dict(messages=CHAT) | control)
    [choice] = answer["choices"]
    _, answer = server.ask(RESPONSES, dict(input=ASKED) | control)
    assert answer["output"][0]["content"][0]["text"] == choice["message"]["content"]
    _, answer = server.ask(MESSAGES, dict(messages=TURNS[:1]) | control)
    assert answer["content"][0]["text"] == choice["message"]["content"]


def test_a_templates_variables_come_in_each_language():
    given = dict(chat_template_kwargs=dict(kind="x", enable_thinking=True))
    off = dict(thinking=dict(type="disabled"))
    for body, thinks in ((ResponsesBody(input=ASKED, **given), True),
                         (MessagesBody(messages=TURNS, max_tokens=1, **off, **given), False)):
        assert body.chat()["chat_template_kwargs"] == dict(kind="x", enable_thinking=thinks)


def test_codex_shows_its_tools_in_groups(server):
    groups = [dict(type="namespace", name="group", tools=FUNCTIONS[1:]), FUNCTIONS[0]]
    _, answer = server.ask(RESPONSES, dict(input=ASKED, tools=groups, tool_choice=dict(
        type="function", name="stop"), max_output_tokens=60))
    assert [one["namespace"] for one in answer["output"]] == ["group"] * len(answer["output"])


APPLY = dict(type="custom", name="apply", description="Apply it.", format=dict(
    type="grammar", syntax="lark", definition='start: "so"'))
AS_FUNCTION = dict(type="function", function=dict(
    name="apply", description='Apply it.\nThe grammar of its input (lark):\nstart: "so"',
    parameters=dict(type="object", properties=dict(input=dict(type="string")), required=["input"],
                    additionalProperties=False)))


def test_a_custom_tool_is_a_function_of_one_text_and_back(server):
    """Codex's apply_patch: shown, called whole and streamed, and in the history."""
    said, usage = chat(server, messages=CHAT, tools=[AS_FUNCTION], tool_choice="required",
                       max_tokens=60)
    text = said["message"]["tool_calls"][0]["function"]["arguments"]
    assert text.startswith('{"input"') and said["finish_reason"] == "length"
    body = dict(input=ASKED, tools=[APPLY], max_output_tokens=60, temperature=0,
                tool_choice=dict(type="custom", name="apply"))
    _, whole = server.ask(RESPONSES, body)
    [item] = whole["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply") and "arguments" not in item
    assert item["input"] and json.dumps(item["input"])[1:-1] in text  # as far as it came
    assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]
    told = [one for one in events(server, RESPONSES, body) if one["type"].startswith(
        ("response.output_item", "response.custom", "response.function"))]
    kinds = [one["type"].removeprefix("response.") for one in told]
    assert kinds[0] == "output_item.added" and kinds[-2:] == [
        "custom_tool_call_input.done", "output_item.done"]
    assert {*kinds[1:-2]} == {"custom_tool_call_input.delta"} and len(kinds) > 8
    assert told[0]["item"]["input"] == ""
    assert "".join(one["delta"] for one in told[1:-2]) == told[-2]["input"] == (
        told[-1]["item"]["input"]) == item["input"]
    turn = dict(call_id="c", name="apply")
    [_, made, _] = ResponsesBody(tools=[APPLY], input=[
        dict(role="user", content=ASKED), dict(type="custom_tool_call", input="so", **turn),
        dict(type="custom_tool_call_output", call_id="c", output="ok")]).chat()["messages"]
    assert made["tool_calls"][0]["function"] == dict(name="apply", arguments=dict(input="so"))


@pytest.fixture
def fresh_server():
    """A server that has said nothing yet, whatever other tests have asked theirs."""
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=160)) as server:
        yield server


def test_what_a_provider_hosts_is_passed_over_and_said_once(fresh_server, capsys):
    """Codex sends web_search, and its calls in the history, with no setting but the address."""
    hosted = [dict(type="web_search"), dict(type="local_shell"), dict(type="mcp", server_label="x")]
    within = [dict(type="file_search")]
    plain = dict(input=ITEMS, tools=FUNCTIONS, max_output_tokens=1)
    searched = dict(type="web_search_call", id="w", status="completed", action=dict(query="q"))
    count = fresh_server.ask(RESPONSES, plain)[1]["usage"]["input_tokens"]
    thought = dict(type="item_reference", id="rs_5")  # Vercel's, where nobody says store: false
    for more in (dict(tools=FUNCTIONS + hosted), dict(input=[searched, *ITEMS]), dict(
            input=[thought, *ITEMS]), dict(input=[*ITEMS[:3], dict(id="rs_5"), *ITEMS[3:]]), dict(
            input=[dict(type=None, id="ws_5"), *ITEMS]), dict(
            tools=FUNCTIONS[1:] + hosted, input=[*ITEMS, dict(
                type="additional_tools", role="developer", tools=[*FUNCTIONS[:1], *hosted])]), dict(
            tools=[dict(type="namespace", name="all", tools=FUNCTIONS + within)])):
        status, answer = fresh_server.ask(RESPONSES, plain | more)
        assert status == 200 and answer["usage"]["input_tokens"] == count
        tools = more.get("tools", FUNCTIONS + hosted)
        assert answer["tools"] == tools[:-3] or answer["tools"] == [
            tools[0] | dict(tools=FUNCTIONS)]
    for kind in ("bash_20250124", "web_search_20250305"):
        status, _ = fresh_server.ask(MESSAGES, dict(messages=TURNS[:1], max_tokens=1, tools=[
            *BLOCKS, dict(type=kind, name="bash")]))
        assert status == 200
    ran = [dict(type="server_tool_use", id="s", name="web_search", input=dict(query="q")),
           dict(type="web_search_tool_result", tool_use_id="s", content=[])]
    counts = [fresh_server.ask(MESSAGES + "/count_tokens", dict(messages=[TURNS[0], dict(
        role="assistant", content=[*more, *TURNS[1]["content"]]), *TURNS[2:]]))[1]
        for more in ([], ran)]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 9
    said = capsys.readouterr().err
    for one in (*hosted, *within, dict(type="bash_20250124")):
        assert said.count(f"tools: {one['type']}'") == 1
    assert said.count("item_reference of a thought") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_earlier_answer_said_may_be_named(server, stream):
    """Vercel's SDK does so in each further step, where nobody says store: false."""
    def said(**more) -> dict:
        body = dict(input=ASKED, max_output_tokens=4, temperature=0) | more
        answer = events(server, RESPONSES, body)[-1]["response"] if stream else (
            server.ask(RESPONSES, body)[1])
        return answer["output"][0]

    def count(*items) -> tuple[int, dict]:
        return server.ask(RESPONSES + "/input_tokens", dict(input=[*ITEMS[:1], *items, *ITEMS[3:]]))

    item = said()
    whole = count(item)
    assert whole[0] == 200 and whole[1]["input_tokens"] > count()[1]["input_tokens"]
    for reference in (dict(type="item_reference", id=item["id"]), dict(id=item["id"])):
        assert count(reference) == whole
    forgotten = said(store=False)
    status, answer = count(dict(type="item_reference", id=forgotten["id"]))
    assert status == 400 and "store: false" in answer["error"]["message"]


def test_what_is_kept_of_answers_is_bounded_and_no_call():
    item = dict(id="msg_1", content=["x" * 40])
    kept = Kept(most=3 * len(json.dumps(item)))
    for i in range(9):
        kept.add([item | dict(id=f"msg_{i}"), dict(id=f"fc_{i}", call_id="c")])
    assert [*kept.items] == ["msg_6", "msg_7", "msg_8"] and kept.size == kept.most
    assert kept.find("msg_8")["id"] == "msg_8" and kept.find("msg_1") is kept.find(["x"]) is None


def test_a_response_repeats_what_was_asked(server):
    told = dict(metadata=dict(run="1"), user="me", safety_identifier="s", prompt_cache_key="k",
                service_tier="flex", max_output_tokens=2, temperature=0.5, top_p=0.75,
                presence_penalty=0.5, frequency_penalty=0.25, instructions="Be kind.",
                tools=FUNCTIONS, tool_choice="auto", parallel_tool_calls=False,
                reasoning=dict(effort="low"), text=dict(verbosity="medium"), truncation="disabled")
    _, answer = server.ask(RESPONSES, dict(input=ASKED) | told)
    want = told | dict(text=dict(verbosity="medium", format=dict(type="text")))
    assert {name: answer[name] for name in told} == want
    [*_, last] = events(server, RESPONSES, dict(input=ASKED) | told)
    assert {name: last["response"][name] for name in told} == want
    _, plain = server.ask(RESPONSES, dict(input=ASKED, max_output_tokens=1))
    assert (plain["temperature"], plain["top_p"]) == (0.8, 0.95)  # the bundled model's own


@pytest.mark.parametrize(("written", "given"), [
    ('{"a": 1.5}', {"a": 1.5}), ('{"a": -1e400, "b": 2}', {"a": -sys.float_info.max, "b": 2}),
    ('{"a": NaN}', {}), ('{"a": 1', {})])
def test_a_calls_numbers_are_some_that_json_has(written, given):
    """Python writes 1e400 as Infinity, which no client can read."""
    usage = dict(prompt_tokens=1, completion_tokens=1, prompt_tokens_details=dict(cached_tokens=0))
    call = dict(id="c", function=dict(name="f", arguments=written))
    answer = MessagesBody(messages=TURNS, max_tokens=9).answer(dict(
        model="m", usage=usage, choices=[dict(message=dict(tool_calls=[call]), stop_reason=None,
                                              finish_reason="tool_calls")]))
    assert answer["content"][0]["input"] == given
    json.dumps(answer, allow_nan=False)


def test_a_result_that_is_an_error_says_so_to_the_model():
    """Templates have no place for `is_error`, which was lost."""
    for content in ("404", [dict(type="text", text="404")]):
        block = dict(type="tool_result", tool_use_id="call_1", content=content, is_error=True)
        [message] = MessagesBody(max_tokens=1, messages=[
            dict(role="user", content=[block])]).chat()["messages"]
        assert [one["text"] for one in message["content"]] == ["Error:", "404"]


def test_claude_codes_first_line_is_left_out(server):
    """It differs in each request, and all behind it would be computed anew."""
    told, line = "You tell tales. " * 30, "x-anthropic-billing-header: cc_version=2.1; cch="
    first, *others = (server.ask(MESSAGES, dict(
        messages=TURNS[:1], max_tokens=1, system=system))[1]["usage"] for system in (
            told, f"{line}1;\n{told}", [dict(type="text", text=f"{line}2;"),
                                         dict(type="text", text=told)]))
    for usage in others:
        assert usage["input_tokens"] < 16 < usage["cache_read_input_tokens"]
        assert sum(usage.values()) == sum(first.values())


@pytest.mark.parametrize("words", ["I look at", [dict(type="thinking", thinking="Hm."), dict(
    type="text", text="I look at")]], ids=["text", "blocks"])
def test_a_message_goes_on_with_the_assistants_last_words(server, words):
    """The turn was closed, and another one begun."""
    turns = [*TURNS[:1], dict(role="assistant", content=words)]
    said = dict(role="assistant", content="I look at", reasoning_content="Hm.") if isinstance(
        words, list) else turns[1]
    choice, usage = chat(server, messages=[turns[0], said], tools=None, max_tokens=4,
                         continue_final_message=True)
    body = dict(messages=turns, temperature=0)
    _, answer = server.ask(MESSAGES, body | dict(max_tokens=4))
    assert answer["content"][0]["text"] == choice["message"]["content"]
    _, counted = server.ask(MESSAGES + "/count_tokens", body)
    assert counted == dict(input_tokens=usage["prompt_tokens"])
    for ended in ([], TURNS[1]["content"]):  # no words, and a call: nothing to go on with
        chat_body = MessagesBody(max_tokens=4, messages=[TURNS[0], dict(
            role="assistant", content=ended)]).chat()
        assert chat_body["continue_final_message"] is False


@pytest.mark.parametrize(("output", "content"), [(None, ""), (12, "12"), ({"a": 1}, '{"a": 1}')])
def test_a_result_that_is_no_text_is_read(server, output, content):
    items = [*ITEMS[:-1], ITEMS[-1] | dict(output=output)]
    _, answer = server.ask(RESPONSES, dict(input=items, max_output_tokens=1))
    _, usage = chat(server, messages=[*TOLD[1:-1], TOLD[-1] | dict(content=content)], tools=None,
                    max_tokens=1)
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]


def items(*given) -> dict:
    return dict(input=list(given))


def message(role: str, *content) -> dict:
    return dict(role=role, content=list(content))


# What is wrong, and a word of the error: the field, the item or the entry that is to blame.
JSON = dict(format=dict(type="json_object"))
WRONG = {
    RESPONSES: [
        *((field, f"{min(field)} is not supported") for field in (
            dict(n=2), dict(top_logprobs=2), dict(response_format=dict(type="json_object")),
            dict(max_completion_tokens=9))),
        (dict(text=JSON, structured_outputs=dict(choice=["so"])), "structured_outputs and a f"),
        (dict(previous_response_id="resp_1"), "previous_response_id"),
        (dict(background=True), "background"),
        (dict(include=["message.output_text.logprobs"]), "include"),
        (dict(tools=[dict(type="custom")]), "name"), (dict(tool_choice="required"), "tool_choice"),
        (dict(tools=[dict(type="namespace", tools=5)]), "another shape"),
        (dict(tools=[dict(type="namespace", tools=[FUNCTIONS[0]])]), "another shape"),
        (items(message("user"), dict(type="additional_tools", tools=5)), "another shape"),
        (items(message("user"), dict(type="additional_tools")), "another shape"),
        (items(dict(type="custom_tool_call_output", call_id="x")), "needs output"),
        (items(dict(type="function_call_output", call_id="x")), "needs output"),
        (items(dict(type="function_call", call_id="x")), "needs name"),
        (items(dict(type="function_call", name=5)), "must name"),
        (items(dict(type="item_reference", id="rs_1")), "input: none of its items"),
        (items(dict(type="item_reference", id="msg_1")), "item_reference ('msg_1')"),
        (items(dict(id="fc_1")), "store: false"), (items(dict(type=None, id="x")), "store: false"),
        (items(message("user", dict(type="input_image"))), "input_image"),
        (items(dict(role="user")), "'message' needs content"),
        (items(dict(role="user", content=5)), "content"), (items(5), "input.0: "),
        (items(dict(type="reasoning", summary=[5])), "input: "), (items(), "input: List"),
        (dict(text=dict(format=5)), "text.format"),
        (dict(text=dict(format=dict(type="json_schema", name="x"))), "schema"),
        (dict(temperature=-3), "temperature"), (dict(temperature="hot"), "temperature"),
        (dict(max_output_tokens=10 ** 6), "max_output_tokens is 1000000")],
    MESSAGES: [
        *((field, f"{min(field)} is not supported") for field in (
            dict(logprobs=True), dict(return_token_ids=True), dict(max_output_tokens=9))),
        (dict(output_config=JSON, structured_outputs=dict(choice=["so"])), "structured_outputs a"),
        (dict(messages=[message("assistant")]), "messages"),
        (dict(messages=[{}]), "messages.0.role"),
        (dict(messages=[dict(role="x", content="hi")]), "messages.0.role"),
        (dict(messages=[message("user", 5)]), "content"),
        (dict(messages=[message("user", dict(type="image"))], system="Hi"),
         "Could not process image: "), (dict(messages=[message("user", dict(
             type="tool_result", tool_use_id="x", content=[dict(type="image")]))]),
         "Could not process image: "),
        (dict(messages=[message("assistant", dict(type="tool_use"))]), "name"),
        (dict(messages=[message("user", dict(type="tool_result", content=5))]),
         "messages: the content of a tool_result"),
        (dict(tools=[dict(name="a b", input_schema={})]), "name"),
        (dict(tool_choice=dict(type="perhaps")), "tool_choice"),
        (dict(max_tokens=0), "max_tokens"),  # Claude Code reads the numbers of the next
        (dict(max_tokens=10 ** 6), "`max_tokens` exceed context limit: 20 + 1000000 > 2048")]}


@pytest.mark.parametrize(("path", "wrong", "said"), [
    (path, *row) for path, rows in WRONG.items() for row in rows])
def test_what_is_wrong_is_said(server, path, wrong, said):
    right = dict(input=ASKED) if path == RESPONSES else dict(messages=TURNS[:1], max_tokens=5)
    error = server.refusal(path, right | wrong)
    assert said in error["message"] and error["param"] in (None, *wrong)
    if "system" in wrong:  # the chat has numbers of its own: that of the system's turn is 0
        assert "messages." not in error["message"]


def test_anthropics_clients_read_our_errors(server):
    """Their object, their names of kinds, and the words by which Claude Code shortens a history."""
    for path, body, status, kind in (
            (MESSAGES, dict(messages=[]), 400, "invalid_request_error"),
            (MESSAGES, dict(messages=TURNS, max_tokens=5, model="gpt"), 404, "not_found_error"),
            (MESSAGES, b"x" * 100_001, 413, "request_too_large"),
            ("/v1/nothing", None, 404, "not_found_error")):
        with server.connection() as connection:
            send(connection, path, body)
            answer = connection.getresponse()
            told = json.loads(answer.read())
        assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    long = [dict(role="user", content="word " * 4000)]
    _, told = server.ask(MESSAGES, dict(messages=long, max_tokens=5))
    assert told["error"]["message"].startswith("prompt is too long: ")
