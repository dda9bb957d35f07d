"""Prompts, conversations and parameters on their way in, without an engine."""

from types import SimpleNamespace

import pytest

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.inputs import InputProcessor, as_list

pytestmark = pytest.mark.floor


@pytest.mark.parametrize(("prompts", "expected"), [
    ("Hello", ["Hello"]), ([5, 9], [[5, 9]]), ([[5, 9], [7]], [[5, 9], [7]]),
    ({"prompt": "Hello"}, [{"prompt": "Hello"}]),
    ([{"prompt_token_ids": [5]}, "Hello"], [{"prompt_token_ids": [5]}, "Hello"]),
], ids=str)
def test_one_prompt_is_a_list_of_one(prompts, expected):
    assert as_list(prompts) == expected


class Letters:
    """A tokenizer of one character a token, with a template that shows what it is given."""

    eos_token_id, chat_template = 5, "a template"

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize, **options):
        if messages[0]["content"] == "refuse":
            raise TypeError("not so")
        return f"{[message['content'] for message in messages]} {options}"


def processor() -> InputProcessor:
    model = SimpleNamespace(vocab_size=300, eos_token_ids=(7, 999))
    return InputProcessor(EngineConfig(model=".", max_model_len=100), model, Letters())


def test_a_chat_is_a_prompt_with_the_ids_of_its_text():
    prompt = processor().render_chat([{"role": "user", "content": "Hi"}], tools=[1])
    assert prompt["prompt"] == "['Hi'] {'tools': [1]}"
    assert prompt["prompt_token_ids"] == [*map(ord, prompt["prompt"])]  # and no BOS in front


@pytest.mark.parametrize(("message", "says"), [
    ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "'content'.*nanoserve_extras"),
    ({"role": "assistant", "content": None}, "'content'"), ({"content": "a"}, "'role'"),
    ({"role": "user", "content": "refuse"}, "chat template refuses.*not so"), ("a", "list of dicts")
], ids=str)
def test_a_message_that_no_template_should_see_is_refused(message, says):
    with pytest.raises(ValueError, match=says):
        processor().render_chat([message])


def test_what_is_no_conversation_is_refused():
    for wrong in (None, 5, "Hi", dict(role="user", content="Hi")):
        with pytest.raises(ValueError, match="conversation must be a list of dicts.*got"):
            processor().render_chat(wrong)


@pytest.mark.parametrize("asked", [dict(structured_outputs=dict(regex="a")),
                                   dict(thinking_token_budget=5)], ids=str)
def test_what_only_an_extra_can_do_is_refused(asked):
    with pytest.raises(ValueError, match=f"{[*asked][0]}=.*no extra that reads it"):
        processor().process("0", [1], SamplingParams(**asked))


@pytest.mark.parametrize("prompt", [{"prompt": "a", "cache_salt": "b"}, {"text": "a"}, {}], ids=str)
def test_a_dict_has_no_other_entries(prompt):
    with pytest.raises(ValueError, match="takes 'prompt' or 'prompt_token_ids', got"):
        processor().process("0", prompt, SamplingParams())


def test_all_that_may_end_a_text_is_late_and_what_is_outside_the_vocabulary_is_not():
    params = SamplingParams(stop_token_ids=[9], min_tokens=3, max_tokens=None)
    core = processor().process("0", [1, 2], params).core
    assert (core.eos_ids, core.late_ids, core.max_num_tokens) == ({7, 999, 5}, {7, 5, 9}, 100)
    params.ignore_eos = True
    assert processor().process("0", [1, 2], params).core.eos_ids == frozenset()
