"""The grammar of calls: what it lets through, and what comes of it.

Oracles: the templates (what they write is let through), the reader and jsonschema (whatever a
grammar lets a random model write is a call, or an answer, that is right).
"""

import json
import random
import re

import numpy as np
import pytest
from chat_templates import TEMPLATES
from jsonschema import validate
from test_tools import (
    FORMATS,
    HEADERS,
    MESSAGES,
    calls_of,
    every_format,
    read,
    tool,
    written,
)

from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.server.tool_grammar import ToolGrammar
from nanoserve_extras.server.tools import Piece, TurnReader
from nanoserve_extras.structured.structured import Grammars, StructuredOutputsParams
from nanoserve_extras.structured.structured_trial import Trial

pytest.importorskip("llguidance")
DEEP = dict(type="object", properties=dict(of=dict(type="string", maxLength=3),
                                           ok=dict(type="boolean")), required=["of", "ok"])
SCHEMAS = {
    "get": dict(type="object", properties=dict(
        city=dict(type="string", maxLength=5), days=dict(type="integer", minimum=0, maximum=9),
        unit=dict(enum=["C", "F", None])), required=["city", "unit"]),
    "get_all": dict(type="object", properties=dict(
        deep={"$ref": "#/$defs/deep"}, tags=dict(type="array", items=dict(enum=["a", "b c"]),
                                                 maxItems=2)),
        required=["deep"], additionalProperties=False, **{"$defs": dict(deep=DEEP)}),
    "stop": dict(type="object", additionalProperties=False)}
ANSWER = dict(type="object", properties=dict(yes=dict(type="boolean")), required=["yes"])


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    marks = set(re.findall(r"<\|[^<>|]+\|?>|<\w+\|>|<\|\"\|>|<｜[^<>]+｜>|\[[A-Z_]+\]",
                           "".join(TEMPLATES.values())))
    tokenizer.add_special_tokens(dict(
        additional_special_tokens=[*sorted(marks), "<|constrain|>"]))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def special(tokenizer) -> dict[str, int]:
    return {one.content: i for i, one in tokenizer.added_tokens_decoder.items()}


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, len(tokenizer))


def matcher(grammars, special, name: str, prompt: str = "", required=False, one=False, answer=None,
            schemas: dict | None = None):
    start = TurnReader(FORMATS[name], SCHEMAS if schemas is None else schemas, prompt)
    text = ToolGrammar(FORMATS[name], start.schemas, special).text(start, required, one, answer)
    return grammars.compile(StructuredOutputsParams(grammar=text),
                            frozenset([0])).compiled.deep_copy()


@every_format
def test_what_the_template_writes_is_let_through(name, grammars, special, tokenizer):
    calls = [("get", dict(city="Rome", days=3, unit="C")), ("stop", {}),
             ("get_all", dict(deep=dict(of="x", ok=True), tags=["a", "b c"]))]
    if name.startswith("LFM"):  # which writes lists as Python does
        calls[2][1]["deep"] = dict(of="x", ok=False)
        del calls[2][1]["tags"]
    calls = calls if FORMATS[name].between else calls[:1]
    prompt, text = written(name, [tool(*one) for one in SCHEMAS.items()],
                           tool_calls=calls_of(*calls))
    if TurnReader(FORMATS[name], {}, prompt).state == "thinks":
        text = "Hm." + text
    ids = tokenizer.encode(text, add_special_tokens=False)
    for options in (dict(required=True), dict(), dict(answer=ANSWER)):
        one = matcher(grammars, special, name, prompt, **options)
        assert one.try_consume_tokens(ids) == len(ids), text
        assert one.is_accepting()


def random_text(one, tokenizer, rng: random.Random, begun: str = "") -> str:
    """What a model without a mind of its own writes, kept to the grammar."""
    ids = tokenizer.encode(begun, add_special_tokens=False)
    assert one.try_consume_tokens(ids) == len(ids)
    for _ in range(300):
        allowed = np.unpackbits(np.frombuffer(one.compute_bitmask(), dtype=np.uint8),
                                bitorder="little")[:len(tokenizer) + 1].nonzero()[0].tolist()
        assert not one.is_error() and allowed, one.get_error()
        if one.is_accepting() and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(ids)
        marks = [token for token in allowed if token > 4095 and token < len(tokenizer)]
        ids.append(rng.choice(marks if marks and rng.random() < 0.5 else [
            token for token in allowed if token < len(tokenizer)]))
        assert one.consume_token(ids[-1])
    return ""


@every_format
def test_whatever_the_grammar_lets_through_is_a_valid_call(name, grammars, special, tokenizer):
    rng, form, seen = random.Random(5), FORMATS[name], set()
    header = form.header if form.header else ""
    compiled = matcher(grammars, special, name, header, required=True)
    for number in range(200):
        text = random_text(compiled.deep_copy(), tokenizer, rng)
        piece = read(TurnReader(form, SCHEMAS, header), text, [3, 20])
        assert (piece.calls and not piece.said) or not text, text
        for call in piece.calls:
            validate(json.loads(call.arguments), SCHEMAS[call.name])
            seen.add(call.name)
        if number > 7 and seen == set(SCHEMAS):
            return
    raise AssertionError(f"only {seen} are called")


ADD = dict(add=dict(type="object", properties=dict(x=dict(type="integer"))))


def test_gpt_oss_may_write_what_is_read(grammars, special, tokenizer):
    """Heads in any order, texts before a call and several thoughts: where calls were kept to what
    the template writes, it could write none of these. A tool that isn't there can't be called."""
    joint = "<|end|><|start|>assistant"
    auto, must = (matcher(grammars, special, "gpt-oss", "<|start|>assistant", schemas=ADD,
                          required=required) for required in (False, True))

    def takes(grammar, text: str) -> bool:
        ids, grammar = tokenizer.encode(text, add_special_tokens=False), grammar.deep_copy()
        return grammar.try_consume_tokens(ids) == len(ids) and grammar.is_accepting()

    for header in HEADERS:
        for thoughts in range(3):
            text = f"<|channel|>analysis<|message|>Hm.{joint}" * thoughts + header + '{"x": 1}'
            assert takes(auto, text) and takes(must, text), text
            for other in ("sub", "add2", "add.x"):
                other = text.replace("functions.add", f"functions.{other}")
                assert not takes(auto, other) and not takes(must, other), other
    for messages, piece in MESSAGES:
        text = joint.join(f"<|channel|>{message}" for message in messages)
        assert takes(auto, text) and not takes(must, text), text
        assert not takes(auto, text.replace('{"x": 1}', '{"x": "y"}')) or not piece.calls


@every_format
def test_behind_the_trigger_no_name_is_invented(name, grammars, special, tokenizer):
    form = FORMATS[name]
    thought = "Hm." + form.thought if not form.think and form.thought else ""
    said = form.say + "Let me see." if not form.say else ""
    one = matcher(grammars, special, name, form.header, one=True)
    text = thought + said + (form.gap if form.say else "") + form.open
    rng = random.Random(3)
    for _ in range(3):
        piece = read(TurnReader(form, SCHEMAS, form.header), random_text(
            one.deep_copy(), tokenizer, rng, text))
        assert [call.name in SCHEMAS for call in piece.calls] == [True] or not piece.calls
    assert not one.deep_copy().try_consume_tokens(tokenizer.encode(
        text + "zzz", add_special_tokens=False)) == len(tokenizer.encode(text + "zzz"))
    said = tokenizer.encode(thought + form.say + "No call.", add_special_tokens=False)
    assert one.try_consume_tokens(said) == len(said) and one.is_accepting()


@every_format
@pytest.mark.parametrize("with_tools", [False, True])
def test_an_answer_has_its_form_behind_the_thought(name, with_tools, grammars, special, tokenizer):
    form, rng = FORMATS[name], random.Random(8)
    schemas = SCHEMAS if with_tools else {}
    one = matcher(grammars, special, name, form.header, answer=ANSWER, schemas=schemas)
    for _ in range(4):
        text = random_text(one.deep_copy(), tokenizer, rng)
        piece = read(TurnReader(form, schemas, form.header), text)
        if text and not piece.calls:
            assert piece.said, text
            validate(json.loads(piece.said), ANSWER)
    text = (("Hm." + form.thought) if form.thought and not form.think else "") + form.say
    ids = tokenizer.encode(text + '{"yes": true}', add_special_tokens=False)
    assert one.try_consume_tokens(ids) == len(ids) and one.is_accepting()
    thought = "Hm." if form.thought and not form.think else ""
    assert read(TurnReader(form, schemas, form.header), tokenizer.decode(ids)) == Piece(
        thought, '{"yes": true}', [])


@pytest.mark.parametrize(("name", "more", "said"), [
    ("Qwen3.5", dict(pattern="^[a-z]+$"), "f: 'x' has pattern"),
    ("Qwen2.5", dict(type="object", propertyNames=dict(minLength=2)), "f: 'x'.*propertyNames")])
def test_what_can_not_be_kept_to_is_refused_only_where_a_call_is_required(name, more, said,
                                                                          grammars, special):
    """Claude Code sends `propertyNames` with every request."""
    schemas = dict(f=dict(type="object", properties=dict(x=dict(type="string") | more)))
    assert matcher(grammars, special, name, schemas=schemas)
    with pytest.raises(ValueError, match=said):
        matcher(grammars, special, name, required=True, schemas=schemas)


def test_a_schema_that_grows_without_end_meets_a_bound():
    """Each refers twice to the next: 2^12 places in all, in a format that writes out each."""
    defs = {f"d{i}": dict(type="object", properties=dict.fromkeys(
        "ab", {"$ref": f"#/$defs/d{i + 1}"})) for i in range(12)} | dict(d12={})
    schema = {"$ref": "#/$defs/d0", "$defs": defs, "properties": dict(x={"$ref": "#/$defs/d0"})}
    reader = TurnReader(FORMATS["Gemma 4"], dict(f=schema), "")
    with pytest.raises(ValueError, match="shorten"):
        ToolGrammar(FORMATS["Gemma 4"], dict(f=schema), {}).text(reader, True, False, None)


ANY_BUT_NO_TEXT = dict(minLength=4, maxLength=3)


def lets_through(name, grammars, special, tokenizer, schema: dict, arguments: dict,
                 **options) -> bool:
    """Whether the grammar takes the call that the template writes; it must be read back, too."""
    prompt, text = written(name, [tool("f", schema)], tool_calls=calls_of(("f", arguments)))
    text = "Hm." + text if TurnReader(FORMATS[name], {}, prompt).state == "thinks" else text
    one = matcher(grammars, special, name, prompt, schemas=dict(f=schema), **options)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if one.try_consume_tokens(ids) < len(ids) or not one.is_accepting():
        return False
    [call] = read(TurnReader(FORMATS[name], dict(f=schema), prompt), text).calls
    assert json.loads(call.arguments) == arguments
    return True


@every_format
def test_of_a_schema_what_can_not_be_kept_to_is_any_value_and_the_rest_holds(
        name, grammars, special, tokenizer):
    """In `auto`. Where a call is required, the error names the tool and the key."""
    for wrong in (dict(type="string", pattern=r"^(?!a).*$", minLength=2), dict(type="any"),
                  dict(type="string", pattern=r"\bfoo\b"), {"$ref": "https://example.com/x"},
                  {"$ref": "#/$defs/none"}, dict(enum=[]), dict(enum=5), dict(type="string",
                  pattern=r"(a)\1"), {"$ref": "#/$defs/wrong"}, ANY_BUT_NO_TEXT):
        schema = dict(type="object", required=["x", "n"], properties=dict(
            n=dict(type="integer", minimum=0, maximum=5), x=wrong),
            **({"$defs": dict(wrong=dict(type="string", maxLength=9, pattern="(?=b)"))}
               if "wrong" in str(wrong) else {}))
        ways = [lets_through(name, grammars, special, tokenizer, schema, dict(n=n, x="zq"))
                for n in (3, 7)]
        assert ways == [wrong != ANY_BUT_NO_TEXT or not FORMATS[name].is_json, False], wrong
        if wrong == {"$ref": "#/$defs/wrong"}:
            assert not lets_through(name, grammars, special, tokenizer, schema,
                                    dict(n=3, x="longer than 9"))
        elif wrong != ANY_BUT_NO_TEXT:
            with pytest.raises(ValueError, match="tools: f: 'x'"):
                matcher(grammars, special, name, required=True, schemas=dict(f=schema))


A, B = (dict(type="object", required=[key], properties={key: dict(enum=[key])}) for key in "ab")
NO_PROPERTIES = [  # a schema, and arguments: those that it allows come first
    ({"$ref": "#/$defs/A", "$defs": dict(A=A)}, dict(a="a"), {}, dict(a="b")),
    (dict(type="object", anyOf=[{**A, "type": "object"}, B]), dict(b="b"), {}, dict(b="a")),
    (dict(oneOf=[dict(type="object", required=["k"], properties=dict(k=dict(const=one)))
                 for one in ("x", "yz")]), dict(k="yz"), dict(k="y"), {}),
    (dict(allOf=[A, B]), dict(a="a", b="b"), dict(a="a"), {}),
    (dict(anyOf=[dict(allOf=[A, {"$ref": "#/$defs/B"}]), dict(type="null")], **{
        "$defs": dict(B=B)}), dict(a="a", b="b"), {}, dict(b="b")),
    (dict(type="object", additionalProperties=dict(enum=["v"])), dict(zq="v", k="v"), dict(zq="w"))]


@every_format
@pytest.mark.parametrize(("schema", "right", "wrong"), [(s, r, w) for s, r, *w in NO_PROPERTIES])
def test_a_schema_without_properties_at_its_top_is_kept_to(schema, right, wrong, name, grammars,
                                                           special, tokenizer):
    for options in (dict(), dict(required=True)):
        assert lets_through(name, grammars, special, tokenizer, schema, right, **options)
        for arguments in wrong:
            assert not lets_through(name, grammars, special, tokenizer, schema, arguments,
                                    **options)


@every_format
def test_keys_come_in_the_order_in_which_the_template_writes_them(name, grammars, special,
                                                                  tokenizer):
    """In the schema's, or as `dictsort` has it: an upper-case letter among the others."""
    inner = dict(type="object", properties={key: dict(type="integer") for key in "zAm"})
    schema = dict(type="object", required=["B", "a", "c"], additionalProperties=False,
                  properties=dict(B=dict(type="integer"), a=dict(type="string"), c=inner))
    arguments = dict(B=1, a="x", c={} if name.startswith("LFM") else dict(z=1, A=2, m=3))
    for options in (dict(), dict(required=True)):
        assert lets_through(name, grammars, special, tokenizer, schema, arguments, **options)
    assert FORMATS[name].is_sorted == (name == "Gemma 4")


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3.5", "Gemma 4"])
def test_a_reference_leads_to_any_place_of_a_schema(name, grammars, special, tokenizer):
    """zod's lead to where a part stands first. With values between markers no tool was usable."""
    bill = dict(type="object", properties=dict(k=dict(enum=["x"])), required=["k"])
    places = ("#/properties/bill", "#/$defs/a~1b", "#/properties/order/$defs/Z")
    order = {"type": "object", "$defs": dict(Z=bill), "required": ["a", "b", "c"], "properties": {
        key: {"$ref": ref} for key, ref in zip("abc", places, strict=True)}}
    schema = {"type": "object", "properties": dict(bill=bill, order=order), "required": ["order"],
              "$defs": {"a/b": bill}}
    right = dict.fromkeys("abc", dict(k="x"))
    for options in (dict(), dict(required=True)):
        assert lets_through(name, grammars, special, tokenizer, schema, dict(order=right),
                            **options)
        for key in "abc":
            assert not lets_through(name, grammars, special, tokenizer, schema, dict(
                order=right | {key: dict(k="y")}), **options)
    if FORMATS[name].is_marked:
        with pytest.raises(ValueError, match="tools: f: it refers to itself"):
            matcher(grammars, special, name, required=True, schemas=dict(f=dict(
                type="object", properties=dict(of={"$ref": "#"}))))


def test_many_schemas_that_take_long_have_one_time_for_all(grammars, special, monkeypatch):
    """In `auto` what is left then is any value; 128 tools could hold the tokenizer for minutes."""
    tried = []

    def refusal(self, grammar: str) -> str:
        tried.append(grammar)
        self.seconds += 2
        return ""

    monkeypatch.setattr(Trial, "refusal", refusal)
    schemas = {f"f{i}": dict(type="object", properties=dict(x=dict(enum=[i]))) for i in range(9)}
    start = TurnReader(FORMATS["Qwen2.5"], schemas, "")
    assert ToolGrammar(start.form, schemas, special).text(start, False, False, None).count(
        '"enum"') == 2 == len(tried)
    with pytest.raises(ValueError, match="tools: f2: .*too long"):
        ToolGrammar(start.form, schemas, special).text(start, True, False, None)
