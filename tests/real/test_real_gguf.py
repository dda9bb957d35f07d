"""Published GGUF files, served: texts, tokenizers, templates, perplexity, chats, calls, schemas."""

import json
import random
from itertools import pairwise
from math import inf
from pathlib import Path
from unicodedata import normalize

import jsonschema
import pytest
import regex
from jinja2.sandbox import ImmutableSandboxedEnvironment
from serving import CHATS, Serving
from tokenizers import pre_tokenizers

from nanoserve import LLM, SamplingParams
from nanoserve.detokenizer import load_tokenizer
from nanoserve_extras.tools import verify_served
from nanoserve_extras.tools.verify import NEAR_TIE, write_reference
from nanoserve_extras.tools.verify_served import WINDOW, read_windows, reference_answers

PROMPTS = ["The capital of France is", "Once upon a time there was a fisherman who",
           "def fibonacci(n):\n    ", "Die Hauptstadt von Österreich ist", "1, 2, 3, 4, 5,",
           "Q: Why is the sky blue?\nA:"]
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
# The most by which a kind of weights may change the perplexity of TEXT.
CHANGES = {"transformers, float32": 0.0, "float32": 1e-4, "auto": 0.005, "int8": 0.02,
           "int4": 0.01, "KV int8": 0.015}


def test_greedy_texts_are_transformers_but_for_near_ties(real):
    with LLM(real.folder, dtype="float32", max_model_len=128, num_gpu_blocks_override=64) as llm:
        ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
        ends = llm.model_config.eos_token_ids
        outputs = llm.generate([{"prompt_token_ids": one} for one in ids],
                               SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    num_equal = 0
    for one, output in zip(ids, outputs, strict=True):
        text = write_reference(real.model, one, ends, 32, NEAR_TIE)
        equal, difference, near_tie = text.compare(output.outputs[0].token_ids)
        assert not difference or near_tie, difference
        num_equal += equal
    assert num_equal > 100  # of at most 192


def strings(count: int) -> list[str]:
    """Made of pieces that tokenizers are known to split in ways of their own."""
    pieces = [
        "The", " quick", "brown ", "  ", "\n", "\n\n", "\t", "\r\n", " 12345", "3.14", "0x1F",
        "don't", "I'LL", "éè", "ñandú", "über", "日本語", "한국어", "Привет", "مرحبا",
        "नमस्ते", "🙂", "👩\u200d👧", "_", "__init__", "{", "}", "();", "->", "==", "<b>", "</s",
        "http://a.b/c?d=e", "...", "—", "“", "”", "a" * 40, "\u00a0", "\u200b", "e\u0301",
        "ﬁ", "Ⅳ", "½", "    return", "CamelCase"]
    draw = random.Random(400)
    return ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(count)]


# How a text is split before its parts become tokens, by the name that a file has for it: each
# pattern splits what the one before it has left.
OTHERS = r" ?[^\s\p{L}\p{N}]+"
SPLITS = {"smollm": [r"\p{N}", r"'(?:[stmd]|re|ve|ll)| ?\p{L}+|" + OTHERS + r"|\s+(?!\S)|\s+"],
          "qwen2": [r"(?i:'(?:[stmd]|re|ve|ll))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + OTHERS
                    + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]}
COMPOSED = ["qwen2"]  # whose own tokenizers compose accents first (NFC), which no file says


class ByHand:
    """Byte pair encoding (Sennrich et al. 2016) as the file's entries have it, by a plain loop: of
    all pairs that may be joined, the first of the best. A file has ranks of pairs, or scores of
    what they become."""

    def __init__(self, entries: dict):
        self.tokens = entries["tokenizer.ggml.tokens"]
        self.ids = {token: one for one, token in enumerate(self.tokens)}
        whole = [token for token, kind in zip(
            self.tokens, entries["tokenizer.ggml.token_type"], strict=True) if kind in (3, 4)]
        self.whole = regex.compile("|".join(map(regex.escape, sorted(whole, key=len)[::-1])))
        self.is_bytes = entries["tokenizer.ggml.model"] == "gpt2"
        if self.is_bytes:
            self.splits = SPLITS[entries["tokenizer.ggml.pre"]]
            self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(
                entries["tokenizer.ggml.merges"])}
        else:
            self.scores = entries["tokenizer.ggml.scores"]

    def rank(self, pair: tuple[str, str]) -> float:
        if self.is_bytes:
            return self.ranks.get(pair, inf)
        joined = self.ids.get("".join(pair))
        return inf if joined is None else -self.scores[joined]

    def encode(self, text: str) -> list[int]:
        found, start = [], 0
        for match in [*self.whole.finditer(text), None]:
            end = match.start() if match else len(text)
            for part in self.parts(text[start:end]):
                found += self.join(part)
            if match:
                found.append(self.ids[match[0]])
                start = match.end()
        return found

    def parts(self, text: str) -> list[str]:
        if not self.is_bytes:
            return [text.replace(" ", "▁")]
        parts, spelled = [text], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for pattern in self.splits:
            parts = [piece for part in parts for piece in regex.split(f"({pattern})", part)]
        return [spelled.pre_tokenize_str(part)[0][0] for part in parts if part]

    def join(self, part: str) -> list[int]:
        pieces = list(part)
        while len(pieces) > 1:
            best, at = min((self.rank(pair), i) for i, pair in enumerate(pairwise(pieces)))
            if best == inf:
                break
            pieces[at:at + 2] = ["".join(pieces[at:at + 2])]
        return [one for piece in pieces for one in (
            [self.ids[piece]] if piece in self.ids else
            [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()])]


def test_400_strings_become_the_tokens_that_the_file_s_merges_make(real):
    ours, theirs = load_tokenizer(real.folder), ByHand(real.entries)
    for text in strings(400):
        composes = real.entries.get("tokenizer.ggml.pre") in COMPOSED
        meant = normalize("NFC", text) if composes else text
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(meant), text
        assert ours.decode(ids, clean_up_tokenization_spaces=False) == meant


CHATTED = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2 + 2?"}],
    [{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello!"},
     {"role": "user", "content": "Write a short greeting, please."}],
]


def test_a_prompt_is_what_the_file_s_own_template_says(chatting):
    """The template as jinja renders it. It is the file's: no copy of it stands here."""
    def refuse(message):
        raise ValueError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.globals["raise_exception"] = refuse
    template = world.from_string(chatting.entries["tokenizer.chat_template"])
    tokens = chatting.entries["tokenizer.ggml.tokens"]
    marks = {name: tokens[chatting.entries[f"tokenizer.ggml.{key}_token_id"]] for name, key in (
        ("bos_token", "bos"), ("eos_token", "eos"))}
    tokenizer = load_tokenizer(chatting.folder)
    for messages in CHATTED:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == template.render(messages=messages, add_generation_prompt=True, **marks)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert ids.count(tokens.index("<|im_start|>")) == prompt.count("<|im_start|>") > 1


def test_no_kind_of_weights_moves_a_text_more_than_is_normal(real, monkeypatch):
    """float32 is that of the file's very numbers; `LLM(file)` rounds them to bfloat16 or less."""
    windows = read_windows(TEXT, load_tokenizer(real.folder), 3, WINDOW)
    theirs, kinds = reference_answers(real.model, windows), verify_served.KINDS
    rows = []
    for model, some in ((real.folder, kinds[:1]), (real.file, kinds[1:])):
        monkeypatch.setattr(verify_served, "KINDS", some)
        rows += verify_served.compare_kinds(str(model), windows, theirs)
    print(verify_served.Served.HEADER, *rows, sep="\n")
    for row in rows:
        assert not row.error and not row.is_wrong, row
        assert abs(row.change) <= CHANGES[row.kind.name], row


def test_chats_end_with_an_answer(chatting):
    """In the dtype that is served, which once tied the likeliest token with noise."""
    with LLM(str(chatting.file), max_model_len=1024) as llm:
        outputs = llm.chat(CHATTED, SamplingParams(temperature=0, max_tokens=300), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert "Paris" in texts[0], texts
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}, texts
    assert not any("<|" in text for text in texts), texts


ADD = dict(name="add", description="Add two numbers.", parameters=dict(
    type="object", properties=dict(a=dict(type="number"), b=dict(type="number")),
    required=["a", "b"]))
PERSON = dict(type="object", additionalProperties=False, required=["name", "age", "hobbies"],
              properties=dict(name=dict(type="string", maxLength=20), age=dict(type="integer"),
                              hobbies=dict(type="array", items=dict(enum=["chess", "tennis"]),
                                           minItems=1, maxItems=2)))


def test_a_tool_that_must_be_called_is_called_once(chatting):
    """Over HTTP, by its name and as the only one that there is."""
    if "tools" not in chatting.entries["tokenizer.chat_template"]:
        pytest.skip(f"the template of {chatting.name} writes no tools")
    with Serving(LLM(str(chatting.file), max_model_len=1024)) as server:
        for choice in (dict(type="function", function=dict(name="add")), "required"):
            status, answer = server.ask(CHATS, dict(
                model="tested", temperature=0, max_tokens=200, tool_choice=choice,
                tools=[dict(type="function", function=ADD)],
                messages=[dict(role="user", content="What is 17 plus 25?")]))
            assert status == 200, answer
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "add"
            jsonschema.validate(json.loads(call["function"]["arguments"]), ADD["parameters"])
            assert answer["choices"][0]["finish_reason"] in ("tool_calls", "stop")


def test_a_schema_is_obeyed_to_its_end(chatting):
    with Serving(LLM(str(chatting.file), max_model_len=1024)) as server:
        status, answer = server.ask(CHATS, dict(
            model="tested", temperature=0, max_tokens=200,
            response_format=dict(type="json_schema", json_schema=dict(name="p", schema=PERSON)),
            messages=[dict(role="user", content="Describe a person, in JSON.")]))
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), PERSON)
