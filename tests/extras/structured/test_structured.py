"""What a grammar allows, token by token, and what is refused before anything runs.

Oracles that know no grammar library: `regex`'s partial matching says which tokens may come next,
`jsonschema` validates texts, a softmax over the allowed logits is the distribution that is drawn
from, and the likeliest of some choices is found by trying all of them.
"""

import json
import random
import sys

import helpers
import jsonschema
import numpy as np
import pytest
import real_tokenizers as real
import regex
import torch
from checkpoints import EOS, Reference, byte_tokenizer, sample_logits
from grammars import ENDS, PADDED, TOKENIZER, padded_checkpoint, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_sampling import assert_distributed

from nanoserve import SamplingParams, StructuredOutputsParams, ops
from nanoserve.detokenizer import load_tokenizer
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.sequence import Sequence
from nanoserve_extras.structured.structured import Grammar, Grammars, from_response_format

NONE = np.array((), dtype=np.int64)


@pytest.fixture(scope="module", params=["bytes", "stories"])
def vocabulary(request):
    """A tokenizer, how many tokens its model has, and those that end a text. A byte a token, so a
    text is written in one way; or 4,096 tokens, most of them several characters long."""
    if request.param == "bytes":
        return TOKENIZER, PADDED, ENDS
    stories = load_tokenizer(BUNDLED_MODEL)
    return stories, len(stories), {stories.eos_token_id}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return padded_checkpoint(tmp_path_factory.mktemp("padded"))


def sequence(output=(), prompt=(1, 2)) -> Sequence:
    seq = helpers.sequence("r", list(prompt))
    seq.token_ids += output
    return seq


def allowed(parser: Grammar, seq: Sequence, drafts=()) -> set[int]:
    mask = parser.mask(seq, list(drafts), NONE, [])
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


# ------------------------------------------------------------- which tokens may come

PATTERNS = [r"[ab]{2,4}c?", r"(cat|car|cart)s?", r"[0-9]{2}:[0-9]{2}", r"(ab)*", r"-?[1-9][0-9]*",
            r"[a-z]+@[a-z]+[.](com|org)", r"once upon a (time|midnight)", r"(x|xy|xyz)z",
            r'"[^"\\]{0,20}"']


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_that_may_come_are_those_that_can_still_match(vocabulary, pattern):
    """With a choice, all tokens that lead on; where only one text is possible, the first token of
    the way in which the tokenizer writes it. Never a special token or padding."""
    tokenizer, vocab_size, ends = vocabulary
    grammar = Grammars(tokenizer, vocab_size).compile({"regex": pattern}, frozenset(ends))
    texts = {i: tokenizer.decode([i]) for i in {*range(len(tokenizer))} - {
        *tokenizer.added_tokens_decoder}}
    ascii_ids = {i: text for i, text in texts.items() if text and text.isascii()}
    rng = random.Random(1)
    for _ in range(4 if tokenizer is TOKENIZER else 1):
        output, text = [], ""
        for _ in range(25 if tokenizer is TOKENIZER else 8):
            expected = {i for i, more in ascii_ids.items()
                        if regex.fullmatch(pattern, text + more, partial=True)}
            seq, parser = sequence(output), grammar.fresh()
            found, forced = allowed(parser, seq), parser.forced(seq, 99)
            may_end = regex.fullmatch(pattern, text) is not None
            assert found & ends == (ends if may_end else set())
            assert found - ends <= texts.keys()
            found = {i for i in found - ends if i in ascii_ids}
            if forced:
                assert found == {forced[0]} and found <= expected
                assert not may_end and len({ascii_ids[i][0] for i in expected}) == 1
            else:
                assert found == expected, text
            if not found:
                break
            output.append(rng.choice(sorted(found)))
            text += ascii_ids[output[-1]]


def test_a_mask_for_each_position_of_the_drafts():
    """Behind every draft the mask is that of a text which has it; and then it is as if nothing had
    been read. Behind a draft that is forbidden everything may come: it is thrown away."""
    grammar = Grammars(TOKENIZER, PADDED).compile({"regex": "ab(c|d[0-9])e"}, frozenset(ENDS))
    a, b, c, d, e, five = TOKENIZER.encode("abcde5")
    seq, parser = sequence([a]), grammar.fresh()
    for drafts in ([], [b], [b, d], [b, d, five], [b, d, five, e], [b, c, e]):
        assert allowed(parser, seq, drafts) == allowed(grammar.fresh(), sequence([a, *drafts]))
    assert allowed(parser, seq, [b, e]) >= set(range(PADDED))
    assert allowed(parser, seq, [b, EOS]) >= {a, b, c}, "a text may not end there"
    assert allowed(parser, seq) == {b} and parser.forced(seq, 9) == [b]


@pytest.mark.parametrize("vocab_size", [256, 257, 259, 260, 261, 263, 264, 265])
def test_nothing_beyond_the_models_vocabulary_is_allowed(vocab_size):
    """The tokenizer has 260 tokens, and END behind them: the model may have fewer, or room."""
    grammar = Grammars(TOKENIZER, vocab_size).compile({"grammar": "start: /a*/ <pad>? /a*/"},
                                                      frozenset({255}))
    a, pad = TOKENIZER.encode("a<pad>")
    assert allowed(grammar.fresh(), sequence()) == {a, 255} | ({pad} if pad < vocab_size else set())


@pytest.mark.parametrize("name", real.BYTE_LEVEL + ["llama_2", "gemma"])
@pytest.mark.parametrize("pattern", [
    r"the [a-z ]{3,12}, [0-9]{2}[!?]", "(日本語|😀é|👩\u200d🚀) [a-z]{2}"])
def test_texts_of_real_tokenizers(name, pattern):
    """Spaces, and characters of several tokens: whatever the mask allows decodes to a match."""
    tokenizer = real.TOKENIZERS[name]
    end = tokenizer.eos_token_id
    grammar = Grammars(tokenizer, len(tokenizer) + 5).compile({"regex": pattern}, frozenset({end}))
    prompt, rng = real.encode(name, "Say:"), random.Random(6)
    for _ in range(4):
        seq, parser = sequence(prompt=prompt), grammar.fresh()
        while seq.token_ids[-1] != end:
            seq.token_ids.append(rng.choice(sorted(allowed(parser, seq))))
        text = real.truth(name, prompt, seq.output_token_ids)
        assert regex.fullmatch(pattern, text), text


@pytest.mark.parametrize("name, words", [("mistral", "reads this tokenizer's 'the café, 5' as"),
                                         ("bert", "can't read this tokenizer: .*WordPiece")])
def test_tokenizers_that_the_library_misreads_are_refused(name, words):
    """One whose spaces are written as the library doesn't expect would make texts without any."""
    with pytest.raises(ValueError, match=f"structured_outputs: llguidance {words}"):
        Grammars(real.TOKENIZERS[name], 600)


# ----------------------------------------------------------- what is drawn from it


def test_probabilities_are_renormalised_over_what_is_allowed():
    """One draw of each of 5,000 seeds: the softmax of the logits of the allowed tokens alone."""
    asked, count = {"regex": "[a-p]x"}, 5000
    grammar = Grammars(TOKENIZER, PADDED).compile(asked, frozenset(ENDS))
    logits = torch.randn(PADDED, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(structured_outputs=asked)
    seqs = [helpers.sequence("r", [1, 2], params, seed=i * 7919 + 1)
            for i in range(count)]
    for seq in seqs:
        seq.num_unknown_tokens = 1
    keep, expected = TOKENIZER.encode("abcdefghijklmnop"), np.zeros(PADDED)
    expected[keep] = logits[keep].softmax(0).numpy()
    drawn = sample_logits(logits.expand(count, -1).clone(), seqs, ops,
                          {seq: grammar.fresh() for seq in seqs}).token_ids.numpy()
    assert_distributed(drawn, expected)


def test_the_choice_is_found_by_trying_all(folder):
    """Greedy: at every token the likeliest of those with which some choice goes on, or ends."""
    choices = ["red", "reddish", "green", "blue", "a deep blue", "Blue!", "re", "été"]
    model = Reference(folder).model
    with start(folder) as llm:
        for prompt in ([5, 6, 7], [100, 3], [9] * 20):
            left, output = [(*TOKENIZER.encode(choice), None) for choice in choices], []
            while not output or output[-1] not in ENDS:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + output])).logits[0, -1]
                ways = {i for ids in left for i in (ENDS if ids[0] is None else {ids[0]})}
                output.append(max(ways, key=lambda i: float(logits[i])))
                left = [ids[1:] for ids in left if ids[0] == output[-1]]
            out, = llm.generate(prompt, SamplingParams(
                temperature=0, max_tokens=30, structured_outputs={"choice": choices}),
                use_tqdm=False)
            assert out.outputs[0].token_ids == output and out.outputs[0].text in choices


# ------------------------------------------------------------------ JSON schemas

names = st.text("abcdefgh _-ñ", min_size=1, max_size=6)
leaves = st.one_of(
    st.builds(lambda low, more: dict(type="integer", minimum=low, maximum=low + more),
              st.integers(-50, 50), st.integers(0, 200)),
    st.builds(lambda low, more: dict(type="string", minLength=low, maxLength=low + more),
              st.integers(0, 3), st.integers(0, 5)),
    st.sampled_from([dict(type="boolean"), dict(type="null"), dict(const=[1, {"a": None}]),
                     dict(type="string", pattern="^[a-f]{2}[0-9]+$", maxLength=9),
                     dict(type="string", format="date"), dict(type="number", minimum=0,
                                                              exclusiveMaximum=2)]),
    st.lists(names | st.integers(-2 ** 60, 2 ** 60) | st.booleans(), min_size=1, max_size=4).map(
        lambda values: dict(enum=values)))


def nested(inner):
    objects = st.dictionaries(names, inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.lists(st.sampled_from(sorted(properties)), unique=True).map(
            lambda required: dict(type="object", properties=properties, required=required,
                                  additionalProperties=False)))
    arrays = st.builds(lambda items, low, more: dict(
        type="array", items=items, minItems=low, maxItems=low + more), inner, st.integers(0, 2),
        st.integers(0, 2))
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(
        lambda some: dict(anyOf=some))


def test_texts_of_random_schemas_are_valid(folder):
    """Whatever ends by itself parses and validates; what max_tokens cuts says so, and it is the
    beginning of JSON. The model is noise, so it tries everything that is allowed."""
    seen = {"stop": 0, "length": 0}
    with start(folder, async_scheduling=True, num_gpu_blocks_override=24, max_num_seqs=5,
               max_num_batched_tokens=30) as llm:
        @settings(derandomize=True, deadline=None, max_examples=12,
                  suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.recursive(leaves, nested, max_leaves=5), min_size=4, max_size=4),
               st.integers(0, 99))
        def run(schemas, seed):
            params = [SamplingParams(temperature=1, seed=seed, max_tokens=120,
                                     structured_outputs={"json": schema}) for schema in schemas]
            outputs = llm.generate([[5, 6, 7, i] for i in range(4)], params, use_tqdm=False)
            for schema, output in zip(schemas, outputs, strict=True):
                text, reason = output.outputs[0].text, output.outputs[0].finish_reason
                seen[reason] += 1
                if reason == "stop":
                    jsonschema.validate(json.loads(text), schema)
                    assert json.dumps(json.loads(text), ensure_ascii=False).count(" ") <= (
                        text.count(" ") + text.count("\\u")), "one space behind , and :"
                else:
                    assert len(output.outputs[0].token_ids) == 120

        run()
    assert seen["stop"] > 35, seen


def test_any_json_object(folder):
    """Without bounds noise may go on for ever; a bias for what closes things helps it to an end."""
    closing = {TOKENIZER.encode(c)[0]: 6.0 for c in '"}]:0'} | dict.fromkeys(ENDS, 50.0)
    with start(folder) as llm:
        for seed in range(2):
            text = llm.generate([5, 6, seed], SamplingParams(
                seed=seed, max_tokens=200, logit_bias=closing,
                structured_outputs={"json_object": True}), use_tqdm=False)[0].outputs[0].text
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("grammar", [
    'start: sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/',
    '# a sum\nroot ::= number "+" number ("+" number)? ("+" number)?\nnumber ::= [1-9] [0-9]?'])
def test_a_grammar_in_larks_notation_or_in_ebnf(folder, grammar):
    with start(folder) as llm:
        for seed in range(5):
            text = llm.generate([5, 6, seed], SamplingParams(
                seed=seed, max_tokens=30, structured_outputs={"grammar": grammar}),
                use_tqdm=False)[0].outputs[0].text
            assert regex.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", text)


# ------------------------------------------------------------------- refused


CYCLE: dict = {"type": "object"}  # this one and the next ended the process
CYCLE["properties"] = {"a": CYCLE}
DEEP: dict = {}
for _ in range(20_000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize("asked, message", [
    (5, "StructuredOutputsParams or a dict"), ({}, "got none of them"),
    ({"regex": "a", "json": {}}, "got json and regex"), ({"regx": "a"}, "got regx"),
    ({"json_object": False}, "got none of them"), ({"json_object": 1}, "json_object must be True"),
    ({"json": 5}, "json must be"), ({"regex": ["a"]}, "regex must be"),
    *(({"choice": wrong}, "choice must be") for wrong in ([], ["a", ""], "ab")),
    ({"grammar": 3}, "grammar must be"), ({"regex": "(x"}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"), ({"grammar": "start: nothing"}, "nothing"),
    ({"json": "{"}, "llguidance refuses this|is no JSON schema"),
    ({"json": {"type": object}}, "json is no JSON schema"), ({"json": {"type": "foo"}}, "foo"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
    ({"json": CYCLE}, "json is no JSON schema"), ({"json": DEEP}, "json is no JSON schema"),
    ({"regex": "[^\\s\\S]"}, "no text at all"), ({"grammar": "start: start"}, "no text at all"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text at all"),
    ({"json": {"properties": {f"p{i}": {} for i in range(3000)}, "type": "object"}}, "max is 2000"),
    *(({kind: text}, "a lone surrogate") for kind, text in (
        ("regex", "\ud800"), ("grammar", '"\ud800"'), ("choice", ["a", "\ud800"]))),
    ({"grammar": 'root ::= "a"\n' * 1001}, "1,001 rules in EBNF"),
    ({"grammar": "root ::= ("}, "no EBNF"), ({"grammar": "root ::= b"}, "no EBNF: Rule 'b'")])
def test_wrong_wishes_are_refused_when_the_request_is_made(llm, asked, message):
    with pytest.raises(ValueError, match=f"(?s)structured_outputs.*{message}"):
        llm.generate(["one", "two"], [SamplingParams(), SamplingParams(structured_outputs=asked)],
                     use_tqdm=False)
    assert not llm.has_unfinished_requests()


@pytest.fixture(scope="module")
def llm(folder):
    return start(folder)


def test_a_text_that_nothing_can_end(llm):
    with pytest.raises(ValueError, match="needs a token that ends the text.*stop_token_ids"):
        llm.generate([5], SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"}),
                     use_tqdm=False)


def test_an_object_that_was_changed_is_checked_again(llm):
    asked = StructuredOutputsParams(regex="a")
    asked.choice = ["b"]
    with pytest.raises(ValueError, match="got regex and choice"):
        llm.generate([5], SamplingParams(structured_outputs=asked), use_tqdm=False)


def test_without_a_tokenizer_a_known_one_or_the_library(monkeypatch):
    for tokenizer, said in ((None, "this engine has none"), ({}, "`tokenizers`, got a dict")):
        with pytest.raises(ValueError, match=f"structured_outputs needs a tokenizer.*{said}"):
            Grammars(tokenizer, 5)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match='pip install "nanoserve\\[structured\\]"'):
        Grammars(byte_tokenizer(), 260)


@pytest.mark.parametrize("given, asked", [
    (None, None), ({"type": "text"}, None), ({"type": "json_object"}, dict(json_object=True)),
    ({"type": "json_object", "schema": {"type": "null"}}, dict(json={"type": "null"})),
    ({"type": "json_object", "schema": None}, dict(json_object=True)),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"},
                                             "strict": True}}, dict(json={"type": "null"}))])
def test_response_formats(given, asked):
    assert from_response_format(given) == (asked and StructuredOutputsParams(**asked))


@pytest.mark.parametrize("given", [
    "json", {}, {"type": "xml"}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "x"}}])
def test_wrong_response_formats(given):
    with pytest.raises(ValueError, match="response_format"):
        from_response_format(given)


def test_white_space_is_the_schemas_to_ask_for(folder):
    """By default JSON stands on one line; "x-guidance" in the schema has the last word."""
    for asked, mays in (({}, False), ({"x-guidance": {"whitespace_flexible": True}}, True)):
        grammar = Grammars(TOKENIZER, PADDED).compile(
            {"json": {"type": "object"} | asked}, frozenset(ENDS))
        brace, newline = TOKENIZER.encode("{\n")
        assert (newline in allowed(grammar, sequence([brace]))) == mays


def test_ordinary_multiples_and_long_lists_of_choices_are_served(llm):
    """20,000 rules of a parser are too many, and the text ended behind the first letter."""
    for schema in ({"multipleOf": 0.25}, {"multipleOf": 100_000}, {"multipleOf": 9973}):
        assert llm.make_request("r", "x", SamplingParams(structured_outputs={
            "json": {"type": "number"} | schema}))
    texts = {f"c{i}" for i in range(20_000)} | {'"\u00e9\u2028\x7f\n\\'}
    for seed in range(3):
        out = llm.generate("x", SamplingParams(max_tokens=20, seed=seed, structured_outputs={
            "choice": sorted(texts)}), use_tqdm=False)[0].outputs[0]
        assert out.text in texts and out.finish_reason == "stop"


def test_the_librarys_words_are_cut_to_a_readable_length(llm):
    with pytest.raises(ValueError, match="too deeply nested") as error:
        llm.make_request("r", "x", SamplingParams(structured_outputs={
            "grammar": "start: " + "(" * 50_000}))
    assert len(str(error.value)) < 700
