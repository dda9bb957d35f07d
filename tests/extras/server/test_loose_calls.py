"""Calls as models write them. Each text is read whole and character by character.

The forms are those that real models were seen to write, by reports to vLLM, ollama and llama.cpp.
"""

import json

import pytest
from test_tools import FORMATS, every_format, read

from nanoserve_extras.server.tools import Call, Piece, TurnReader

SCHEMAS = dict(weather=dict(type="object", properties=dict(
    city=dict(type="string"), days=dict(type="integer"))), stop={})
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
ROME, STOP = ("weather", dict(city="Rome")), ("stop", {})

OBJECTS = {  # what may stand between a format's marks, or alone
    CALL: [ROME],
    '{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}': [ROME],
    '{"name":"weather","arguments":{"city":"Rome"}}': [ROME],
    '{"arguments": {"city": "Rome"}, "name": "weather"}': [ROME],
    '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}': [ROME],
    '{"name": "weather", "parameters": {"city": "Rome"}}': [ROME],
    '{"id": "1", "type": "function", "name": "weather", "arguments": {"city": "Rome"}}': [ROME],
    '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}': [ROME],
    f'{{"tool_calls": [{CALL}]}}': [ROME],
    '{"name": "functions.weather", "arguments": {"city": "Rome"}}': [ROME],
    f"{{{CALL}}}": [ROME],
    CALL.replace("{", "{{").replace("}", "}}"): [ROME],
    f"{CALL}}}": [ROME],
    CALL[:-1]: [ROME],
    CALL[:-2]: [ROME],
    "{'name': 'weather', 'arguments': {'city': 'Rome'}}": [ROME],
    "{'name': 'weather', 'arguments': {'city': None, 'days': True,}}": [
        ("weather", dict(city=None, days=True))],
    '{"name": "weather", "arguments": {"city": "a\nb"}}': [("weather", dict(city="a\nb"))],
    '{"name": "weather", "arguments": {"city": "}} { ``` </tool_call> [\\""}}': [
        ("weather", dict(city='}} { ``` </tool_call> ["'))],
    '{"name": "weather", "arguments": {"city": "\\u00e9\\ud83d\\ude00"}}': [
        ("weather", dict(city="é😀"))],
    '{"name": "stop", "arguments": null}': [STOP],
    f'{CALL}\n{{"name": "stop", "arguments": ""}}': [ROME, STOP],
    f"[{CALL}, {CALL}]": [ROME, ROME],
    f"```json\n{CALL}\n```": [ROME],
    "<function=weather>{\"city\": \"Rome\"}</function>": [ROME],
    "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>": [("weather", dict(city="Rome", days=2))],
    "<function=weather><parameter=city>Rome</parameter></function>": [ROME],
    "[weather(city='Rome'), stop()]": [ROME, STOP]}
WRAPPED = {  # only as a whole answer
    f"```\n{CALL}\n```": [ROME], f"```tool_call\n{CALL}": [ROME],
    "```tool_code\nweather(city='Rome')\n```": [ROME],
    '```python\nweather(city="Rome", days=2)\n```': [("weather", dict(city="Rome", days=2))],
    f"```json\n{CALL}\n```\n```json\n{CALL}\n```\n": [ROME, ROME],
    f"<tools>\n{CALL}\n</tools>": [ROME], f"<TOOL_CALLS>[{CALL}]</TOOL_CALLS>": [ROME],
    f"\n\n{CALL}\n": [ROME]}
NO_CALLS = (  # alone; those of `LOST` are none between marks either
    f"{CALL}\n\nI called it.", f"Sure:\n```json\n{CALL}\n```", f"```json\n{CALL}\n```\nSo.",
    '{"name": "weather"}', '{"name": "weather", "arguments": {}, "note": "hi"}', "[1, 2]", "{}",
    "weather(city='Rome')", "```python\nimport x\nweather(city='Rome')\n```", "```\n{", "``", "[")
LOST = ('{"name": "rain", "arguments": {"city": "Rome"}}', '{"name": "weather", "arguments": [5]}',
        '{"name": "weather", "arguments": {"days": NaN}}', "not at all", "{'a': 1}",
        '{"name": "weather", "arguments": "Rome"}', '{"name": "weather", "arguments": {"city": "Ro',
        "<function=rain></function>", "[weather('Rome')]")


def both(name: str, text: str, ended: str = "stop", **options) -> Piece:
    pieces = [read(FORMATS[name].reader(SCHEMAS, "", **options), text, cuts, ended)
              for cuts in ([], range(len(text)), range(0, len(text), 3))]
    assert pieces[1:] == pieces[:1] * 2
    return pieces[0]


def calls_in(piece: Piece) -> list[tuple]:
    return [(call.name, json.loads(call.arguments)) for call in piece.calls]


@pytest.mark.parametrize("text", [*OBJECTS, *WRAPPED])
def test_an_answer_that_is_all_call_is_one(text):
    wanted = (OBJECTS | WRAPPED)[text]
    for name in ("Qwen2.5", "gpt-oss", "Llama 3.1", "Hunyuan A13B"):
        piece = both(name, text)
        assert (calls_in(piece), piece.said.strip()) == (wanted, ""), name
    thought = both("Qwen3", f"<think>\nHm.\n</think>\n\n{text}")
    assert (calls_in(thought), thought.said, thought.thought) == (wanted, "", "Hm.")
    assert both("Qwen2.5", text, bare=False) == Piece(said=text)
    assert not both("Qwen2.5", f"So: {text}").calls


@pytest.mark.parametrize("text", OBJECTS)
def test_between_a_formats_marks_every_way_to_write_a_call_is_read(text):
    marks = {"Qwen2.5": ("<tool_call>\n", "\n</tool_call>"),
             "Qwen3.5": ("</think>\n\n<tool_call>", "</tool_call>"),
             "GLM-4-MoE": ("<tool_call>\n", "\n</tool_call>"),
             "Gemma 4": ("<|tool_call>", "<tool_call|>"),
             "LFM2.5": ("<|tool_call_start|>", "<|tool_call_end|>"),
             "Command R7B": ("<|START_ACTION|>", "<|END_ACTION|>"),
             "Mistral Nemo": ("[TOOL_CALLS]", "")}
    for name, (before, behind) in marks.items():
        piece = both(name, f"{before}{text}{behind}", bare=False)
        assert (calls_in(piece), piece.said) == (OBJECTS[text], ""), name
    two = both("Qwen2.5", f"I look.\n<tool_call>\n{text}\n</tool_call>\n<tool_call>{text}")
    assert (calls_in(two), two.said) == (OBJECTS[text] * 2, "I look.")


@pytest.mark.parametrize("text", [*NO_CALLS, *LOST])
def test_what_names_no_tool_as_a_whole_is_text(text):
    assert both("Qwen2.5", text) == both("Llama 3.1", text) == Piece(said=text)
    if text in LOST:
        marked = f"<tool_call>\n{text}\n</tool_call>"
        assert both("Qwen2.5", marked) == Piece(said=marked)


@pytest.mark.parametrize(("text", "held"), [
    ('{"answer', 4), ('[{"answer', 5), ('{"id": 5, "by', 12), ("```python\nimport", 11),
    ('{"name": "Bob', 11), ('```json\n{"x', 11), ("{ x", 3), ("[1", 2), ("<b>", 3),
    ('{"name": "stop", "arguments": {}} T', 35), ('{"name": "wea", ', 14)])
def test_a_stream_waits_no_longer_than_it_may_be_a_call(text, held):
    reader, told = FORMATS["Qwen2.5"].reader(SCHEMAS, ""), ""
    for i, letter in enumerate(text):
        told += reader.feed(letter).said
        assert bool(told) == (i + 1 >= held), (told, i)


def test_arguments_outside_of_an_object_with_the_name_are_mended_too():
    head = " to=functions.weather<|channel|>commentary json<|message|>"
    for text in ('"{\\"city\\": \\"Rome\\"}"', "{'city': 'Rome'}", '{"city": "Rome"'):
        assert calls_in(both("Mistral", f"[TOOL_CALLS]weather[ARGS]{text}")) == [ROME]
        assert calls_in(both("gpt-oss", head + text)) == [ROME]


def test_a_limit_leaves_of_half_a_call_no_text_and_of_a_whole_one_a_call():
    for text in ('<tool_call>\n{"arguments": {"city": "Ro', "<tool_call>\n```js"):
        assert both("Qwen2.5", text, "length") == Piece()
    assert both("Qwen2.5", CALL[:-9], "length") == Piece(said=CALL[:-9])
    whole = both("Qwen2.5", '<tool_call>{"arguments": {}, "name": "stop"}</tool_call>', "length")
    assert calls_in(whole) == [STOP]


THINKERS = [name for name in FORMATS if FORMATS[name].thought and not FORMATS[name].message]


@pytest.mark.parametrize("name", THINKERS)
def test_a_call_at_the_end_of_a_thought_is_one_if_the_turn_ends_there(name):
    from test_tools import calls_of, tool, written
    form, tools = FORMATS[name], [tool("stop", {})]
    call = written(name, tools, tool_calls=calls_of(("stop", {})))[1]
    call = call[call.index(form.trigger):]
    begun, over = f"{form.think}\nHm.", form.thought
    for end in ("", "\n", over, f"\n{over}\n\n"):
        assert both(name, f"{begun}\n{call}{end}") == Piece("Hm.", calls=[Call("stop", "{}")])
    for end, said in ((f" So.{over}Yes.", "Yes."), (f"{over}Yes.", "Yes.")):
        piece = both(name, f"{begun} {call}{end}")
        assert piece.said == said and not piece.calls and form.trigger in piece.thought
    piece = both(name, f"{begun} {call}{over}\n\n{call}")  # it was a draft
    assert len(piece.calls) == 1 and form.trigger in piece.thought
    assert not both(name, f"{begun} {call}", "length").calls


@every_format
def test_a_name_that_was_not_offered_is_text_and_nothing_is_lost(name):
    reader = TurnReader(FORMATS[name], SCHEMAS, "")
    text = '{"name": "rain", "arguments": {"city": "Rome"}}'
    assert text in read(reader, text, range(len(text))).said + reader.unheard + read(
        TurnReader(FORMATS[name], SCHEMAS, ""), text).thought
