"""The format of calls and thoughts, derived from a template, and what is read with it.

Oracles: the template itself (what it writes must come back equal), and texts written by hand.
"""

import json
from functools import partial

import pytest
from chat_templates import ENDS, NEMOTRON_2, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from nanoserve import SamplingParams
from nanoserve.detokenizer import Detokenizer
from nanoserve_extras.base.template_forms import render_messages
from nanoserve_extras.server.loose_calls import Call
from nanoserve_extras.server.tool_format import derive
from nanoserve_extras.server.tool_schemas import kinds_of
from nanoserve_extras.server.tools import Piece, TurnReader, TurnStops

ASKED = [{"role": "user", "content": "What now?"}]
TYPES = {"string": st.text(max_size=12) | st.sampled_from(
    ["</tool_call>", 'a "b" \'c\'', "\n\n x ", "</think>", "\\n", "日本, ü)]", "{'a': 1}", "5",
     "null"]),
    "integer": st.integers(-10**6, 10**6), "boolean": st.booleans(),
    "number": st.integers(-99, 99) | st.floats(-1e6, 1e6).filter(lambda x: x % 1)}
NESTED = st.recursive(st.none() | st.booleans() | st.integers(-99, 99) | TYPES["string"],
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
                          st.text("abc_", min_size=1, max_size=4), inner, max_size=2), max_leaves=5)


def renderer(template: str):
    def once(messages, **options):
        return render_jinja_template([messages], chat_template=template, bos_token="<s>",
                                     **options)[0][0]
    return lambda messages, **options: render_messages(messages, partial(once, **options))


FORMATS = {name: derive(renderer(template), list(ENDS)) for name, template in TEMPLATES.items()}
every_format = pytest.mark.parametrize("name", FORMATS)


def written(name: str, tools: list = (), **turn) -> tuple[str, str]:
    """The prompt, and what the template writes behind it, up to the token that ends it."""
    render = renderer(TEMPLATES[name])
    whole = render([*ASKED, {"role": "assistant", "content": ""} | turn], tools=tools)
    header, begun = FORMATS[name].header, render(ASKED, tools=tools, add_generation_prompt=True)
    at = whole.index(header, whole.index("now?") + 4) + len(header or "[/INST]")
    if whole.startswith(begun):
        at = len(begun)
    prompt, text = whole[:at], whole[at:]
    for end in ENDS:
        text = text.partition(end)[0]
    return prompt, text


def tool(name: str, schema: dict) -> dict:
    return {"type": "function", "function": dict(name=name, parameters=schema)}


def calls_of(*calls: tuple[str, dict]) -> list[dict]:
    return [{"id": f"used{i:05}", "type": "function", "function": dict(
        name=name, arguments=arguments)} for i, (name, arguments) in enumerate(calls)]


def read(reader: TurnReader, text: str, cuts: list[int] = (), ended: str = "stop") -> Piece:
    """The text in pieces, joined again."""
    whole, ends = Piece(), [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    for i, piece in enumerate(pieces):
        news = reader.feed(piece, ended if i == len(pieces) - 1 else None)
        if news.more:
            whole.calls[-1].arguments += news.more
        whole = Piece(whole.thought + news.thought, whole.said + news.said,
                      whole.calls + news.calls)
    return whole


@st.composite
def called(draw) -> tuple[dict, dict]:
    """A schema, and arguments that it allows."""
    names = draw(st.lists(st.text("abc_xyz", min_size=1, max_size=6), max_size=3, unique=True))
    kinds = {name: draw(st.sampled_from([*TYPES, "object", "array"])) for name in names}
    arguments = {}
    for name, kind in kinds.items():
        if draw(st.booleans()):
            arguments[name] = draw({**TYPES, "array": st.lists(NESTED, max_size=2),
                                    "object": st.dictionaries(st.text(
                                        "abc_", min_size=1, max_size=4), NESTED, max_size=2)}[kind])
    return dict(type="object", properties={name: dict(type=kind) for name, kind in kinds.items()},
                required=list(arguments)), arguments


NO_ARGUMENTS = dict(type="object", properties={}, required=[])


def is_plain(name: str, value) -> bool:
    """Whether the format has an unambiguous way to write the value. Between markers a text can't
    hold the marker; Python's lists are not JSON's in LFM's."""
    form, text = FORMATS[name], json.dumps(value, ensure_ascii=False)
    if form.is_json:
        return True
    held = [mark.strip() for mark in (form.close, form.text[1], form.value[1], *(
        ["<|\"|>"] if form.is_marked else []))]
    if any(mark and mark in text for mark in held) or "\\r" in text or "\\u" in text:
        return False
    if name.startswith("LFM") and isinstance(value, (list, float, bool)):
        return not any(mark in text for mark in "'\"") and "\\" not in text
    return name != "LFM2.5" or not isinstance(value, str) or not set(value) & set("'=,)")


def test_a_template_without_calls_gives_no_warning_before_there_is_a_call(recwarn):
    """A start warned of made-up calls, and nothing was said when real ones were lost."""
    render = renderer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert derive(render, []).why.endswith("it does not write them") and not list(recwarn)
    render([*ASKED, dict(role="assistant", content="", tool_calls=calls_of(("f", {})))])
    assert "does not write all calls" in str(recwarn.pop(UserWarning).message)


@every_format
def test_every_template_of_today_is_derived_and_proved(name):
    assert FORMATS[name].why == ""
    assert bool(FORMATS[name].between) == (name not in ("gpt-oss", "Llama 3.1"))


@every_format
@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data())
def test_calls_come_back_as_the_template_wrote_them(name, data):
    many = 1 if not FORMATS[name].between else data.draw(st.integers(1, 2))
    drawn = [data.draw(called()) for _ in range(many)]
    for _, arguments in drawn:
        for key in [key for key, value in arguments.items() if not is_plain(name, value)]:
            del arguments[key]
    names = ["get_it", "get"][:many]
    schemas = {"get": NO_ARGUMENTS}  # a name that another one begins with
    schemas |= {name: schema for name, (schema, _) in zip(names, drawn, strict=True)}
    calls = [(name, arguments) for name, (_, arguments) in zip(names, drawn, strict=True)]
    prompt, text = written(name, [tool(*one) for one in schemas.items()],
                           tool_calls=calls_of(*calls))
    cuts = data.draw(st.lists(st.integers(0, 500), max_size=9) | st.just(range(len(text))))
    kept, ended = data.draw(st.booleans()), data.draw(st.sampled_from(["stop", "length"]))
    reader = TurnReader(FORMATS[name], schemas, prompt, kept=kept)
    piece = read(reader, text, cuts, "stop" if name == "gpt-oss" else ended)
    assert [(call.name, json.loads(call.arguments)) for call in piece.calls] == calls
    assert piece.said.strip() == ""


@every_format
@settings(derandomize=True, max_examples=12, deadline=None)
@given(data=st.data())
def test_streamed_arguments_are_the_whole_ones_whatever_a_text_ends_with(name, data):
    """A text that ends as the mark behind it begins was told twice where a grammar keeps a call to
    its format: each file that an agent wrote had a line too many."""
    form = FORMATS[name]
    ends = sorted({mark[:end] for mark in (*form.text, *form.value, form.then, form.close)
                   for end in range(len(mark) + 1)} | {"", "\n\n", "\r\n"})
    texts = st.tuples(st.text("a<\n\"", max_size=3), st.sampled_from(ends)).map("".join)
    arguments = {key: value for key in ("path", "content")
                 if is_plain(name, value := data.draw(texts, label=key))}
    schema = dict(properties=dict(path=dict(type="string"), content=dict(type="string")))
    prompt, text = written(name, [tool("f", schema)], tool_calls=calls_of(("f", arguments)))
    cuts = data.draw(st.lists(st.integers(0, 500), max_size=5))
    for kept in (False, True):
        whole, *streamed = (read(form.reader(dict(f=schema), prompt, kept=kept), text, at)
                            for at in ([], cuts, range(len(text))))
        assert [json.loads(call.arguments) for call in whole.calls] == [arguments]
        assert streamed == [whole, whole]


@every_format
@settings(derandomize=True, max_examples=12, deadline=None)
@given(text=st.text("ab <>\n{[t/", min_size=1, max_size=20).map(lambda text: f"x{text}x"),
       thought=st.text("ab <>\n{[t/", max_size=20).map(lambda text: f"y{text}y"),
       cuts=st.lists(st.integers(0, 99), max_size=9), with_tools=st.booleans())
def test_thoughts_and_answers_come_back(name, text, thought, cuts, with_tools):
    form = FORMATS[name]
    prompt, whole = written(name, content=text, reasoning_content=thought)
    piece = read(TurnReader(form, {"get": {}} if with_tools else {}, prompt), whole, cuts)
    assert piece == Piece(thought if form.thought else "", text, [])


@every_format
@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data())
def test_a_broken_text_is_read_alike_whole_and_character_by_character(name, data):
    """Calls are those of tools, with arguments that are JSON, whatever was written."""
    schema = dict(properties=dict(city=dict(type="string"), deep=dict(type="object")))
    calls = [("get", dict(city="Rome", deep=dict(of=[1, "x"]))), ("stop", {})]
    form, schemas = FORMATS[name], dict(get=schema, stop={})
    prompt, text = written(name, [tool(*one) for one in schemas.items()],
                           tool_calls=calls_of(*calls[:2 if form.between else 1]))
    for _ in range(data.draw(st.integers(1, 3))):
        at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = text[:at] + data.draw(st.sampled_from(
            [*form.literals, "{", "<", '"', "[[", "\n"])) + text[max(at, min(end, at + 20)):]
    pieces = [read(form.reader(schemas, prompt), text, cuts) for cuts in ([], range(len(text)))]
    assert pieces[0] == pieces[1]
    for call in pieces[0].calls:
        assert call.name in schemas and isinstance(json.loads(call.arguments), dict)


def test_a_call_is_never_shown_and_text_around_it_is():
    reader = TurnReader(FORMATS["Qwen2.5"], {"add": {}}, "")
    told = [reader.feed(character) for character in
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"x": "</tool_call>"}}\n'
            '</tool_call>\n<tool_call> {"name":"add","arguments":{}} </tool_call>\nDone < 5']
    told.append(reader.feed("", "stop"))
    assert "".join(piece.said for piece in told) == "Let me see.Done < 5"
    assert [call for piece in told for call in piece.calls] == [
        Call("add", '{"x": "</tool_call>"}'), Call("add", "{}")]


def test_what_turns_out_to_be_no_call_is_an_answer():
    for text in ("<tool_call>\nnot at all", '<tool_call>\n{"name": "unknown", "arguments": {}}\n'
                 "</tool_call>", "a <tool_ca", '<tool_call>\n{"name": "add", "arguments": [5]}\n'
                 '</tool_call>', '<tool_call>\n{"name": "add", "arguments": {"x": NaN}}\n'):
        reader = TurnReader(FORMATS["Qwen2.5"], {"add": {}}, "")
        assert read(reader, text, [3, 9]) == Piece("", text)


def test_a_call_that_is_cut_shows_its_arguments_as_far_as_they_came():
    begun = '<tool_call>\n{"name": "add", "arguments": {"x": "ab'
    form, xml = FORMATS["Qwen2.5"], FORMATS["Qwen3.5"]
    assert read(TurnReader(form, {"add": {}}, ""), begun, [5], "length") == Piece(
        calls=[Call("add", '{"x": "ab')])
    assert read(TurnReader(form, {"add": {}}, ""), begun[:25], [5], "length") == Piece()
    assert read(TurnReader(form, {"add": {}}, ""), begun + '"}}\n</to', [5], "length") == Piece(
        calls=[Call("add", '{"x": "ab"}')])
    schema = dict(properties=dict(x=dict(type="integer"), y=dict(type="string")))
    text = ("</think>\n\n<tool_call>\n<function=add>\n<parameter=x>\n5\n</parameter>\n<parameter=y>"
            "\nab")
    assert read(TurnReader(xml, {"add": schema}, ""), text, [5], "length") == Piece(
        calls=[Call("add", '{"x": 5, "y": "ab')])


@every_format
def test_arguments_are_told_as_they_are_written_where_a_grammar_keeps_to_the_format(name):
    """Character by character: no call waits for its end, and nothing that was told is taken back.
    Where values stand between markers, a text is told as it grows and others when they are whole.
    """
    form, deep = FORMATS[name], dict(of=[1, "x"])
    schema = dict(properties=dict(city=dict(type="string"), deep=dict(type="object")))
    arguments = dict(city='Old "Rome" <b>' * 20, deep=deep)
    if name.startswith("LFM"):
        arguments = dict(city="Old Rome " * 20)
    prompt, text = written(name, [tool("get", schema)], tool_calls=calls_of(("get", arguments)))
    reader, told, pieces = form.reader(dict(get=schema), prompt, kept=True), "", []
    for i, letter in enumerate(text):
        piece = reader.feed(letter, "stop" if i == len(text) - 1 else None)
        told += piece.more + "".join(call.arguments for call in piece.calls)
        pieces.append(len(told))
        if i % 10 == 0:  # a whole answer that is cut there says the same
            whole = read(form.reader(dict(get=schema), prompt, kept=True), text[:i + 1], [],
                         "length")
            assert "".join(call.arguments for call in whole.calls).startswith(told)
    assert json.loads(told) == arguments and reader.num_calls == 1
    begun = sum(0 < count < len(told) for count in pieces)
    assert begun > 200 or not form.is_raw or not form.is_json and form.text == ("", "")


HEADERS = [
    " to=functions.add<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.add<|constrain|>json <|message|>",
    " to=functions.add<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.add json<|message|>",
    "<|channel|>commentary to=functions.add<|message|>",
    "<|channel|>commentary to=functions.add code<|message|>",
    "<|channel|>analysis to=functions.add <|constrain|>json<|message|>",
    " to=functions.add<|channel|>analysis code<|message|>"]
MESSAGES = [
    (["analysis<|message|>Hm.", "commentary<|message|>I look.",
      'commentary to=functions.add <|constrain|>json<|message|>{"x": 1}'],
     Piece("Hm.", "I look.", [Call("add", '{"x": 1}')])),
    (["analysis<|message|>Hm.", "commentary<|message|>First.", "final<|message|>Then."],
     Piece("Hm.", "First.\n\nThen.")),
    (["analysis<|message|>Hm.", "analysis<|message|>So.", "final<|message|>Yes."],
     Piece("Hm.\n\nSo.", "Yes.")),
    (["commentary<|message|>I look.", "analysis<|message|>Hm.", "final<|message|>Yes."],
     Piece("Hm.", "I look.\n\nYes.")),
    (['final <|constrain|>json<|message|>{"k": 1}'], Piece("", '{"k": 1}'))]


@pytest.mark.parametrize("header", HEADERS)
def test_gpt_oss_may_name_channel_tool_and_kind_in_any_order(header):
    """As openai_harmony's description has it; the template writes one of these. The token that ends
    the turn is not in the text."""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for cuts in ([], [40, 70], range(200)):
        assert read(TurnReader(FORMATS["gpt-oss"], {"add": {}}, ""), f'{thought}{header}{{"x": 1}}',
                    cuts) == Piece("Hm.", "", [Call("add", '{"x": 1}')])


@pytest.mark.parametrize(("messages", "piece"), [
    *MESSAGES,
    (['commentary to=functions.add<|message|>{}', 'commentary to=functions.add<|message|>{"x": 1}',
      "final<|message|>Yes."], Piece("", "Yes.", [Call("add", "{}"), Call("add", '{"x": 1}')])),
    (['commentary to=functions.other<|message|>{"y": 2}'], Piece("", '{"y": 2}')),
    (["analysis to=python code<|message|>print(1)", "final<|message|>Yes."],
     Piece("print(1)", "Yes."))])
def test_of_gpt_oss_messages_nothing_is_lost_and_no_mark_is_shown(messages, piece):
    text = "<|end|><|start|>assistant".join(f"<|channel|>{message}" for message in messages)
    for end in ("", "<|end|>"):
        for cuts in ([], range(len(text) + 9), range(0, len(text), 7)):
            reader = TurnReader(FORMATS["gpt-oss"], {"add": {}}, FORMATS["gpt-oss"].header)
            assert read(reader, text + end, cuts) == piece
        letters = list(text + end)  # each a token
        count = reader.count_thought(letters, "".join)
        assert count == len(piece.thought.replace("\n\n", ""))


def test_a_model_may_leave_a_calls_id_out():
    for name, text in (
            ("Mistral Nemo", '[TOOL_CALLS][{"name": "a", "arguments": {}%s}, {"name": "b", '
             '"arguments": {}}]'),
            ("Mistral Small 3.2", "[TOOL_CALLS]a%s[ARGS]{}[TOOL_CALLS]b[ARGS]{}")):
        for id_ in ("", ', "id": "x-1"' if "Nemo" in name else "[CALL_ID]x-1"):
            reader = TurnReader(FORMATS[name], dict(a={}, b={}), "")
            assert read(reader, text % id_, [20, 31]) == Piece(
                calls=[Call("a", "{}"), Call("b", "{}")])


XML, HERMES = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(("name", "prompt", "text", "ended", "piece"), [
    ("Qwen3.5", XML, "Hm.\n</think>\n\nYes.", "stop", Piece("Hm.", "Yes.")),
    ("Qwen3.5", XML, "Hm. Hm.", "length", Piece("Hm. Hm.")),
    ("Qwen3.5", XML + "\n</think>\n\n", "Yes.", "stop", Piece("", "Yes.")),
    ("Qwen3", HERMES, "<think>\nHm.\n</think>\n\nYes.", "stop", Piece("Hm.", "Yes.")),
    ("Qwen3", HERMES + "<think>\n\n</think>\n\n", "Yes.", "stop", Piece("", "Yes.")),
    ("Qwen3", HERMES, "Yes.", "stop", Piece("", "Yes."))])
def test_the_prompt_may_have_begun_or_ended_the_thought(name, prompt, text, ended, piece):
    assert read(TurnReader(FORMATS[name], {}, prompt), text, ended=ended) == piece


def test_a_history_may_leave_out_the_thought_that_the_prompt_begins():
    form, header = derive(renderer(NEMOTRON_2), list(ENDS)), "<|turn>assistant\n<think>\n"
    call = '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>'
    for text, said, calls in (("Yes.", "Yes.", []), (call, "", [Call("add", "{}")])):
        assert read(form.reader({"add": {}}, header), f"Hm.\n</think>\n\n{text}") == Piece(
            "Hm.", said, calls)


def test_an_answer_without_its_marker_is_an_answer():
    for name in ("Hunyuan A13B", "gpt-oss", "Command R7B"):
        for text in ("助手Yes.", "<|x|>", "a to=functions.get x to=", "[{<tool_calls>[ b",
                     FORMATS[name].say[:1]):
            assert read(TurnReader(FORMATS[name], {"add": {}}, ""), text, [1, 3]) == Piece("", text)
        piece = read(TurnReader(FORMATS[name], {}, ""), "Yes. It", [3], ended="length")
        assert piece.said == "Yes. It"
        for count in range(len(FORMATS[name].say)):  # what a limit cuts was going to be a marker
            begun = FORMATS[name].say[:count]
            assert read(TurnReader(FORMATS[name], {}, ""), begun, ended="length") == Piece()


def test_a_call_that_begins_as_an_answer_is_told_from_it_by_its_name():
    """Llama's calls have no marker, and JSON may hold what looks like one."""
    reader = TurnReader(FORMATS["Llama 3.1"], {"add": {}}, "")
    text = '[{"name": "Bob"}, {"name": "add", "at": 5}, ' + "5, " * 40
    assert reader.feed(text).said[:20] == text[:20]  # no longer held back
    assert read(TurnReader(FORMATS["Llama 3.1"], {"add": {}}, ""), text, [20]).said == text
    assert read(TurnReader(FORMATS["Qwen2.5"], {"add": {}}, ""), "<tool_call>x" + "y" * 99, [20],
                "length") == Piece("", "<tool_call>x" + "y" * 99)


@pytest.mark.parametrize(("template", "why"), [
    ("{% for m in messages %}{{ m.content }}{{ m.tool_calls.x.y }}{% endfor %}",
     "has no attribute"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "does not write them"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<call>"
     "{{ c.function.name }} {{ c.function.arguments | tojson | upper }}</call>{% endfor %}\n"
     "{% endfor %}", "neither JSON nor between markers"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<call>"
     "{{ c.function.name }}{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v | trim }}"
     "</>{% endfor %}</call>{% endfor %}\n{% endfor %}", "does not come back")])
def test_a_template_that_loses_something_is_refused_with_the_reason(template, why):
    assert why in derive(renderer(template), []).why


# ------------------------------------------------------------------ stop strings


class Letters:
    """A tokenizer of one character a token: so marks come in many pieces."""

    def decode(self, ids: list[int], **_) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].thought])
@settings(derandomize=True, max_examples=20, deadline=None)
@given(stop=st.lists(st.sampled_from(["Q:", "<", "\n", "\n\n", "think", "</", "assistant", "final",
                                      "s", ">", "so <b>", " b", "|"]), min_size=1, max_size=2,
                     unique=True),
       thought=st.sampled_from(["", "Q: <b> so", "s\n\nfinal <"]),
       said=st.sampled_from(["<b> so\n\nb Q: a", "so <b>", "a < b|", "a", "tho </b"]),
       includes=st.booleans())
def test_stop_strings_hold_in_the_answer_and_not_in_the_thought(name, stop, thought, said,
                                                                includes):
    """Oracle: the one that is complete first in the answer alone."""
    prompt, text = written(name, content=said, **(dict(reasoning_content=thought) if thought
                                                  else {}))
    found = [(said.index(one), one) for one in stop if one in said]
    at, first = min(found, default=(len(said), ""), key=lambda one: (one[0] + len(one[1]), *one))
    want = said[:at] + first * includes
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes, max_tokens=None)
    detokenizer = Detokenizer(
        Letters(), params, [], TurnStops(params, TurnReader(FORMATS[name], {}, prompt)))
    seen = [""]
    for letter in text:
        if not detokenizer.is_over:
            detokenizer.add(ord(letter))
        seen.append(detokenizer.visible_text)
    detokenizer.flush()
    ended = detokenizer.stop_string
    assert all(later.startswith(before) for before, later in zip(
        seen, [*seen[1:], detokenizer.text], strict=True) if not ended)
    assert detokenizer.text.startswith(seen[-1]) or ended
    reader = TurnReader(FORMATS[name], {}, prompt)
    piece = reader.feed(detokenizer.text, "stop")
    assert (piece.said, ended or "") == (want, first), (text, detokenizer.text)
    assert piece.thought == TurnReader(FORMATS[name], {}, prompt).feed(text, "stop").thought


def test_the_types_of_definitions_that_refer_to_each_other_many_times():
    """300^6 ways lead to the last one."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 300} for i in range(6)}
    for last, kinds in (({"type": ["null", "string", "any"]}, {"null", "string"}), ({}, set())):
        assert kinds_of({"$ref": "#/$defs/d0"}, {"$defs": defs | dict(d6=last)}) == kinds
    assert kinds_of({"$ref": "#/$defs/d0"}, {"$defs": {"d0": {"oneOf": [{"$ref": "#/$defs/d0"}, {
        "const": 5}]}}}) == {"integer"}
