"""What a schema leaves open, and patterns without a key.

Oracles: texts that are right or wrong by hand, `jsonschema`, and a model of noise, which tries
everything that is allowed.
"""

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from grammars import ENDS, TOKENIZER, padded_checkpoint, start
from helpers import sequence

from nanoserve import SamplingParams
from nanoserve_extras.structured.structured import Grammars, refusal
from nanoserve_extras.structured.structured_schema import loosened

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"a": NUMBER, "b": TEXT}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, len(TOKENIZER))


def is_text(grammars, text: str, **asked) -> bool:
    """Whether the masks let all of the text pass, and an end behind it."""
    grammar = grammars.compile(asked, frozenset(ENDS))
    seq = sequence("r", [1])
    for token_id in [*TOKENIZER.encode(text, add_special_tokens=False), min(ENDS)]:
        mask = grammar.mask(seq, [], np.array((), dtype=np.int64), [])
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        seq.token_ids.append(token_id)
    return True


MORE = {"more": {"type": "object", "properties": AB}}
PERSON = {"properties": {"a": NUMBER, "more": {"$ref": "#/$defs/more"}}, "$defs": MORE}


@pytest.mark.parametrize(("schema", "closed", "always"), [
    (dict(type="array", items=dict(properties=AB)), ['[{"x": 1}]'], ['[{"a": 1}]']),
    (PERSON, ['{"more": {"x": 1}}'], ['{"a": 1, "more": {"a": 1, "b": "c"}}']),
    (dict(patternProperties={"^x": NUMBER}), ['{"y": 1}'], ['{"x": 1, "xy": 2}', "{}"]),
    (dict(properties={"properties": NUMBER, "items": NUMBER}), ['{"a": 1}'],
     ['{"properties": 1, "items": 2}']),
    (dict(properties=AB, additionalProperties=NUMBER), [], ['{"a": 1, "x": 1}']),
    (dict(properties=AB, allOf=[{"description": "one part"}], title="x"), ['{"x": 1}'], ["{}"]),
    (dict(properties={"a": dict(allOf=[{"$ref": "#/$defs/more"}], title="x")}, **{"$defs": MORE}),
     ['{"a": {"x": 1}}'], ['{"a": {"a": 1}}']),
    (dict(properties=AB, required=["a", "x"]), [], ['{"a": 1, "x": 1}']),
    (dict(type="object"), [], ['{"a": 1}']),
    (dict(enum=[{"properties": {"a": 1}}]), [], ['{"properties": {"a": 1}}']),
    (dict(properties=AB, anyOf=[dict(required=["a"]), dict(required=["b"])]),
     ['{"a": 1, "x": 1}'], ['{"a": 1}', '{"b": "c"}']),
], ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "")
def test_an_object_that_lists_its_keys_has_no_others_unless_it_is_opened(grammars, schema, closed,
                                                                         always, recwarn):
    """A small model writes keys of its own for ever where it may: vLLM closes such objects."""
    check(grammars, schema, closed, always)
    assert not recwarn


def check(grammars, schema: dict, closed: list[str], always: list[str]) -> None:
    """All of these texts are valid; those in `closed` have other keys than the schema lists."""
    schema = dict({"type": "object"} if schema.get("type") != "array" and "enum" not in schema else
                  {}, **schema)
    for text in [*closed, *always]:
        jsonschema.validate(json.loads(text), schema)
        assert is_text(grammars, text, json=schema) == (text in always), text
        assert is_text(grammars, text, json=json.dumps(schema),
                       disable_additional_properties=False), text


@pytest.mark.parametrize(("schema", "closed", "always"), [
    (dict(properties={"c": NUMBER}, **{"$ref": "#/$defs/more", "$defs": MORE}), [],
     ['{"c": 1, "b": "c", "x": 1}']),
    (dict(properties={"a": NUMBER}, anyOf=[dict(properties={"b": TEXT}, required=["b"])]), [],
     ['{"a": 1, "b": "c"}', '{"b": "c", "x": 1}']),
    (dict(properties=AB, anyOf=[dict(required=["a"]), dict(required=["x"])]), [], ['{"x": 1}']),
    (dict(allOf=[{"$ref": "http://x/p"}, dict(properties={"c": NUMBER})],
          **{"$defs": {"p": {"$id": "http://x/p", "properties": AB}}}), [],
     ['{"b": "c", "c": 1, "x": 1}']),
    (dict(anyOf=[dict(properties=AB), dict(allOf=[
        dict(properties={"c": NUMBER}), dict(properties={"d": NUMBER}, required=["d"])])]),
     ['{"a": 1, "x": 1}'], ['{"a": 1, "b": "c"}', '{"c": 1, "d": 1, "x": 1}']),
    (dict(PERSON, properties={"more": {"$ref": "#/$defs/more"}, "also": dict(
        allOf=[{"$ref": "#/$defs/more"}, dict(properties={"c": NUMBER})])}),
     ['{"x": 1}'], ['{"more": {"x": 1}, "also": {"c": 1, "x": 1}}']),
], ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "")
def test_an_object_that_is_put_together_stays_as_asked_and_that_is_said(grammars, schema, closed,
                                                                        always):
    """Parts that are closed, each by itself, would forbid each other's keys. A definition that is a
    part somewhere is open everywhere."""
    with pytest.warns(UserWarning, match="allOf"):
        check(grammars, schema, closed, always)


def make_plain(rng: random.Random, depth: int = 2) -> tuple[dict, dict]:
    """A schema of an object, and the same closed by hand."""
    if depth and rng.random() < 0.3:
        some = [make_plain(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        key = rng.choice(("anyOf", "allOf")) if len(some) == 1 else "anyOf"
        return tuple({key: list(each)} for each in zip(*some, strict=True))
    if depth and rng.random() < 0.3:
        return tuple([make_parts(rng, depth)] * 2)
    if rng.random() < 0.2:
        return tuple([{"$ref": "#/$defs/plain"}] * 2)
    asked = {key: rng.choice([NUMBER, {"minimum": 3}, TEXT, {}])
             for key in rng.sample("abcd", rng.randint(1, 2))}
    meant = dict(asked)
    if depth and rng.random() < 0.5:
        asked["in"], meant["in"] = make_plain(rng, depth - 1)
    more = {"type": "object", "required": [key for key in asked if rng.random() < 0.3]}
    return dict(more, properties=asked), dict(more, properties=meant, additionalProperties=False)


def make_parts(rng: random.Random, depth: int) -> dict:
    """One that is put together, in which nothing is closed."""
    parts = [rng.choice([{"properties": {rng.choice("abcd"): NUMBER}}, {"$ref": "#/$defs/part"},
                         {"anyOf": [{"properties": {"a": NUMBER}}, {"required": ["b"]}]}])
             for _ in range(2)]
    return {"type": "object", "allOf": parts} if rng.random() < 0.5 else dict(
        parts[0], type="object", allOf=parts[1:], properties={"c": NUMBER})


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore:structured_outputs")
def test_what_is_closed_means_what_was_closed_by_hand(grammars, seed):
    """Against jsonschema."""
    rng = random.Random(seed)
    asked, meant = make_plain(rng)
    plain, part = {"type": "object", "properties": {"a": TEXT}}, {"properties": {"d": NUMBER}}
    closed = jsonschema.Draft202012Validator({"type": "object"} | meant | {
        "$defs": {"plain": dict(plain, additionalProperties=False), "part": part}})
    asked = {"type": "object"} | asked | {"$defs": {"plain": plain, "part": part}}
    for _ in range(30):
        value = {key: rng.choice((1, 5, "t")) for key in rng.sample("abcdx", rng.randint(0, 3))}
        if rng.random() < 0.5:
            value["in"] = {rng.choice("abcdx"): rng.choice((1, 5, "t"))}
        texts = [json.dumps(dict(some)) for some in itertools.permutations(value.items())]
        # The compiler has an order of its own.
        allowed = any(is_text(grammars, text, json=asked) for text in texts)
        assert allowed == closed.is_valid(value), (asked, value)


@pytest.mark.parametrize(("properties", "patterns", "more"), [
    ({"a": NUMBER}, {"^a$": NUMBER}, None), ({"a": NUMBER}, {"^[a]$": {"maximum": 5}}, None),
    ({"a": NUMBER, "b": NUMBER}, {"^(a|b)$": {"minimum": 3}}, None),
    ({"": NUMBER}, {"^$": {}}, None),
    ({"é": NUMBER, 'q"': TEXT}, {"^é$": {}, '^q"$': {"maxLength": 1}}, None),
    ({"a": NUMBER}, {"^a$": NUMBER, "^x": NUMBER}, "x"), ({"a": NUMBER}, {"a": NUMBER}, "ba"),
    ({"a": NUMBER}, {".*": NUMBER}, "y")], ids=repr)
@pytest.mark.parametrize("more_properties", [None, False, True])
def test_a_pattern_of_listed_keys_alone_is_no_way_on(grammars, properties, patterns, more,
                                                     more_properties):
    """The compiler takes listed keys out of a pattern. `{"a": 1, ` was allowed, and then nothing:
    the text ended there, as invalid JSON, with finish_reason "stop"."""
    schema = dict(type="object", properties=properties, patternProperties=patterns)
    if more_properties is not None:
        schema["additionalProperties"] = more_properties
    whole = {key: 4 if value is NUMBER else "x" for key, value in properties.items()}
    text = json.dumps(whole, ensure_ascii=False)
    assert is_text(grammars, text, json=schema)
    grammar, seq = grammars.compile(dict(json=schema), frozenset(ENDS)), sequence("r", [1])
    seq.token_ids += TOKENIZER.encode(text[:-1], add_special_tokens=False)
    mask = grammar.mask(seq, [], np.array((), dtype=np.int64), [])
    comma, = TOKENIZER.encode(",", add_special_tokens=False)
    assert bool(mask[comma // 8] >> comma % 8 & 1) == bool(more or more_properties)
    if more:
        assert is_text(grammars, json.dumps(whole | {more: 4}, ensure_ascii=False), json=schema)
    for key, wrong in ((key, wrong) for key in whole for wrong in (2, 99, "xyz")):
        other = whole | {key: wrong}
        assert is_text(grammars, json.dumps(other, ensure_ascii=False), json=schema) == (
            not list(jsonschema.Draft202012Validator(schema).iter_errors(other)))


def test_texts_that_stop_are_valid_and_others_say_length(tmp_path):
    schema = {"type": "object", "required": ["a"], "properties": {
        "a": {"enum": [1, 2]}, "b": {"type": "object", "properties": {"c": {"type": "boolean"}},
                                     "patternProperties": {"^c$": {}}}}}
    with start(padded_checkpoint(tmp_path)) as llm:
        outs = llm.generate([[5, 6, i] for i in range(12)], SamplingParams(
            seed=1, max_tokens=60, temperature=1.5, structured_outputs={"json": schema}))
    for out in outs:
        assert out.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(out.outputs[0].text), schema)
        assert set(json.loads(out.outputs[0].text)) <= {"a", "b"}


@pytest.mark.parametrize("schema", [
    dict(properties=5), dict(properties=["a"]), dict(patternProperties="a"), dict(allOf=5),
    dict(properties=AB, required=5), dict(properties=AB, required=[["a"]]), 5, [AB], "x",
    dict(properties={"a": NUMBER}, patternProperties={"(": NUMBER})], ids=str)
def test_what_is_no_schema_is_refused_in_words(grammars, schema):
    with pytest.raises(ValueError, match="structured_outputs: "):
        grammars.compile(dict(json=json.dumps(schema)), frozenset(ENDS))


CLOSED = dict(type="object", properties=AB, additionalProperties=False)
LIST = dict(type="array", items=NUMBER)


@pytest.mark.parametrize("schema", [
    dict(type="object", propertyNames=dict(type="string", title="a key"), maxProperties=2,
         additionalProperties=NUMBER), CLOSED | dict(propertyNames=True), LIST | dict(
             uniqueItems=False), LIST | dict(uniqueItems=True, maxItems=1),
    dict(type="object", properties=AB, unevaluatedProperties=False),
    CLOSED | dict(unevaluatedProperties=TEXT), CLOSED | dict(unevaluatedProperties={}, allOf=[{}]),
    dict(type="object", properties=AB, unevaluatedProperties=TEXT), LIST | dict(
        unevaluatedItems=False), dict(type="array", prefixItems=[NUMBER], unevaluatedItems=False),
    CLOSED | dict(dependentRequired={}, dependentSchemas={}, dependencies={}), CLOSED | dict(
        required=["b"], dependentRequired=dict(a=["b"], x=[]), dependencies=dict(a=["b"], b={})),
    dict(type="object", propertyNames=dict(type="string", enum=["a", "x"]), required=["x"],
         additionalProperties=NUMBER), dict(CLOSED, propertyNames=dict(enum=["b", "x"])),
    LIST | dict(contains=True, minItems=1), LIST | dict(contains={}, minContains=0),
    CLOSED | {"if": dict(required=["a"])}, CLOSED | {"then": False, "else": dict(required=["x"])},
    CLOSED | {"if": True, "then": {}, "else": dict(description="any")}, CLOSED | {"not": False},
    LIST | dict(minContains=3, maxContains=1), LIST | dict(contains=TEXT, minContains=0),
    LIST | dict(minItems=1.0, maxItems=2.0), dict(type="string", format="path"), dict(
        CLOSED, **{"$schema": "https://spec.openapis.org/oas/3.1/dialect/base"}),
    CLOSED | dict(properties=dict(a=NUMBER | dict(format="int64"), b=TEXT | dict(format="uuid4")))],
    ids=str)
def test_a_keyword_that_asks_for_nothing_is_passed_over(grammars, schema):
    """Each took the whole response_format down, or a required tool. Oracle: jsonschema."""
    validator = jsonschema.Draft202012Validator(schema)
    for value in ({}, {"a": 1}, {"b": "c"}, {"a": 1, "b": "c"}, {"x": 2}, {"x": "y"}, {"x": 2, "y":
                  3}, [], [1], [1, 1], [1, 2, 3], ["a"], "a", "c:\\temp", 5):
        assert is_text(grammars, json.dumps(value), json=json.dumps(schema)) == (
            validator.is_valid(value)), value
    changed = json.loads(json.dumps(schema))
    assert not list(loosened(changed, refusal))  # a required tool's


@pytest.mark.parametrize(("schema", "same"), [
    (CLOSED | dict(required=None, enum=None), CLOSED), (dict(type="object", properties=None), dict(
        type="object")), (dict(CLOSED, anyOf=None, pattern=None, format=None), CLOSED),
    (dict(CLOSED, **{"$ref": None, "$defs": None, "$schema": None}), CLOSED), (dict(
        type="array", items=None, maxItems=2, uniqueItems=None), dict(type="array", maxItems=2)),
    (dict(type="object", properties=AB, additionalProperties=None), CLOSED),
    (dict(CLOSED, properties=AB | dict(b=None)), dict(CLOSED, properties=AB | dict(b={}))),
    (dict(const=None), dict(const=None)), (dict(enum=[None, 1]), dict(enum=[None, 1]))], ids=str)
def test_null_in_the_place_of_a_keywords_value_is_none_at_all(grammars, schema, same):
    """Clients in Go write it. A value that may be null is another thing."""
    for value in ({}, {"a": 1}, {"b": None}, {"x": 1}, [], ["a", "a"], [1, 2, 3], None, 1, "a"):
        assert is_text(grammars, json.dumps(value), json=schema) == (
            jsonschema.Draft202012Validator(same).is_valid(value)), value


@pytest.mark.parametrize(("keyword", "schema"), [
    ("propertyNames", CLOSED | dict(propertyNames=dict(pattern="^a"))),
    ("uniqueItems", LIST | dict(uniqueItems=True, maxItems=2)), ("not", {"not": {}}),
    ("unevaluatedProperties", dict(allOf=[CLOSED], unevaluatedProperties=False)),
    ("dependentRequired", CLOSED | dict(dependentRequired=dict(a=["b"]))),
    ("dependentSchemas", CLOSED | dict(dependentSchemas=dict(a=False))),
    ("if", CLOSED | {"if": dict(required=["a"]), "then": dict(required=["b"])}),
    ("contains", LIST | dict(contains=TEXT)), ("minContains", LIST | dict(
        contains=NUMBER, minContains=0, maxContains=1)), ("format", TEXT | dict(format=5)),
    ("required", CLOSED | dict(required=5)), ("properties", dict(CLOSED, properties=5))])
def test_a_keyword_that_asks_for_something_is_refused_by_name(grammars, keyword, schema):
    with pytest.raises(ValueError, match=f"structured_outputs: .*{keyword}") as caught:
        grammars.compile(dict(json=schema), frozenset(ENDS))
    assert not {"iterable", "NoneType", "unhashable"} & {*str(caught.value).split()}


def test_a_definition_that_refers_to_itself_has_few_patterns(grammars):
    node = {"type": "object", "properties": {"a": {"pattern": "x"}, "next": {"$ref": "#/$defs/n"}}}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    assert is_text(grammars, '{"a": "x", "next": {}}', json=schema)
    assert not is_text(grammars, '{"a": "y"}', json=schema)
