"""Prompts in the forms that the plain engine does not take: a tokenizer's output, dicts with more
entries, messages of parts, and the texts of one call.
"""

from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import real_tokenizers as real
from small_engine import greedy, run

from nanoserve import LLM, TextPrompt, TokensPrompt
from nanoserve.config import EngineConfig
from nanoserve_extras.base.inputs import Inputs, as_list, encoded_prompts, one_encoded_prompt


@pytest.mark.parametrize(("prompts", "expected"), [
    (TextPrompt(prompt="Hello"), [{"prompt": "Hello"}]),
    ([TokensPrompt(prompt_token_ids=[5]), "Hello"], [{"prompt_token_ids": [5]}, "Hello"]),
    (UserDict(input_ids=[5, 9]), [[5, 9]]),
    (UserDict(input_ids=[[5, 9], [7]]), [[5, 9], [7]]),
], ids=str)
def test_one_prompt_is_a_list_of_one(prompts, expected):
    assert as_list(prompts) == expected


@pytest.mark.parametrize("kind", [list, np.array], ids=["lists", "arrays"])
def test_padding_is_taken_away_on_either_side(kind):
    encoding = UserDict(input_ids=kind([[0, 0, 5], [7, 8, 0], [1, 2, 3]]),
                        attention_mask=kind([[0, 0, 1], [1, 1, 0], [1, 1, 1]]))
    assert encoded_prompts(encoding) == [[5], [7, 8], [1, 2, 3]]


def test_a_zero_that_is_no_padding_stays():
    assert encoded_prompts(UserDict(input_ids=[0, 5, 0])) == [[0, 5, 0]]
    assert encoded_prompts(UserDict(input_ids=[0, 5], attention_mask=[1, 1])) == [[0, 5]]


def test_several_prompts_in_the_place_of_one_are_refused():
    assert one_encoded_prompt(UserDict(input_ids=[[5, 9]])) == [5, 9]
    with pytest.raises(ValueError, match="2 prompts"):
        one_encoded_prompt(UserDict(input_ids=[[5], [9]]))


def test_another_mapping_names_what_it_lacks():
    with pytest.raises(ValueError, match=r"needs 'input_ids', got \['pixels'\]"):
        as_list(UserDict(pixels=[1]))


@pytest.mark.parametrize(("prompt", "says"), [
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt")], ids=str)
def test_bad_entries_of_a_dict_are_refused(llm, prompt, says):
    with pytest.raises(ValueError, match=says):
        run(llm, prompt, greedy())


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score"])
def test_a_generator_does_no_pooling(llm, method):
    with pytest.raises(ValueError, match="runner='generate'"):
        getattr(llm, method)(*[["a", "b"]] * (2 if method == "score" else 1))
    assert method in dir(llm)



def test_content_parts_of_a_message_are_joined(llm):
    """OpenAI's form of a message: templates print a list as it is, brackets and all."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    [out] = llm.chat([{"role": "user", "content": parts}], greedy(2), use_tqdm=False)
    [plain] = llm.chat([{"role": "user", "content": "Hello\nworld"}], greedy(2), use_tqdm=False)
    assert out.prompt == plain.prompt and "type" not in out.prompt



class ByCode:
    """Like transformers' `MistralCommonBackend`: chats are ids; there is no template, and a text of
    special tokens is encoded letter by letter."""

    backend, chat_template = "mistral_common", None
    marks = {900: "[INST]", 901: "[/INST]"}

    def apply_chat_template(self, messages, return_dict, tokenize=True, **options):
        assert tokenize and not return_dict and options == dict(add_generation_prompt=True)
        return [one for message in messages for one in (900, *map(ord, message["content"]), 901)]

    def decode(self, ids, skip_special_tokens):
        return "".join(self.marks.get(one) or chr(one) for one in ids)

    def encode(self, text, add_special_tokens):
        return [*map(ord, text)]


def test_a_tokenizer_that_writes_chats_itself_gives_the_ids(llm, monkeypatch):
    """tekken.json alone: what a user writes as [/INST] is text, and the turn's end is a token."""
    monkeypatch.setattr(llm.inputs, "tokenizer", ByCode())
    prompt = llm.inputs.render_chat([{"role": "user", "content": [
        {"type": "text", "text": "a [/INST]"}]}], tools=None, add_generation_prompt=True)
    assert prompt == dict(prompt="[INST]a [/INST][/INST]",
                          prompt_token_ids=[900, *map(ord, "a [/INST]"), 901])


# ------------------------------------------------------------- texts of one call


@pytest.mark.parametrize("name", real.NAMES)
def test_a_batch_has_the_tokens_that_each_text_has_alone(name):
    """Special tokens included. Nothing is padded or cut."""
    tokenizer = real.TOKENIZERS[name]
    model = SimpleNamespace(vocab_size=1, eos_token_ids=(), generation_defaults={})
    inputs = Inputs(EngineConfig(model="."), model, tokenizer)
    texts = [real.ENGLISH[:n] for n in (1, 7, 90, 300)] + [real.OTHERS, "x"]
    assert [prompt["prompt_token_ids"] for prompt in inputs.tokenize(texts)] == [
        tokenizer.encode(text) for text in texts]


# ------------------------------------------------------------------- vLLM's habits


def test_a_misspelt_argument_is_told_the_name_that_was_meant(qwen3, llm):
    with pytest.raises(TypeError, match="max_model_length.*max_model_len"):
        LLM(qwen3, max_model_length=100)
    for method in (llm.generate, llm.stream, llm.chat):
        with pytest.raises(TypeError, match="sampling_parms.*sampling_params"):
            method("a", sampling_parms=greedy())


def test_a_batch_is_summed_up_in_one_line(llm, capsys):
    llm.generate(["Hello", "world"], greedy(), summarize=True, use_tqdm=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanoserve: 2 requests in ")
    assert llm.get_tokenizer() is llm.tokenizer
