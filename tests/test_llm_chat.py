"""Chat: the checkpoint's own template, and conversations that are none."""

import pytest
from checkpoints import BOS, END_OF_TURN, byte_tokenizer
from small_engine import MESSAGES, assert_serves, copy_of, greedy, ids_of, make, run, tokens
from tokenizers.processors import TemplateProcessing

RENDERED = "<s>user:Hi<|end|><s>assistant:Yes?<|end|><s>user:Bye<|end|>"


def test_chat_uses_the_template(llm, expected):
    [out] = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    assert out.prompt == RENDERED + "<s>assistant:"
    assert out.prompt_token_ids == [
        BOS, *ids_of("user:Hi"), END_OF_TURN, BOS, *ids_of("assistant:Yes?"), END_OF_TURN,
        BOS, *ids_of("user:Bye"), END_OF_TURN, BOS, *ids_of("assistant:")]
    assert tokens([out]) == [expected(out.prompt_token_ids)]


def test_chat_takes_many_conversations_and_options(llm):
    params = [greedy(n) for n in (2, 3)]
    outs = llm.chat([MESSAGES, MESSAGES[:1]], params, use_tqdm=False, add_generation_prompt=False)
    assert [out.prompt for out in outs] == [RENDERED, "<s>user:Hi<|end|>"]
    assert [len(ids) for ids in tokens(outs)] == [2, 3]
    [out] = llm.chat(MESSAGES[:1], greedy(), use_tqdm=False, chat_template_kwargs={"x": "!"},
                     chat_template="{{ x }}{{ messages[0].content }}")
    assert out.prompt == "!Hi"
    [out] = llm.chat(MESSAGES[:2], greedy(), use_tqdm=False, continue_final_message=True)
    assert out.prompt == "<s>user:Hi<|end|><s>assistant:Yes?"


def test_chat_does_not_double_special_tokens(qwen3, tmp_path):
    """A tokenizer that puts BOS in front of a text, and a template that has written it already."""
    folder, tokenizer = copy_of(qwen3, tmp_path), byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save_pretrained(folder)
    llm = make(folder)
    [out] = llm.chat(MESSAGES[:1], greedy(), use_tqdm=False, add_generation_prompt=False)
    assert out.prompt_token_ids == [BOS, *ids_of("user:Hi"), END_OF_TURN]
    assert run(llm, "user:Hi")[0].prompt_token_ids == [BOS, *ids_of("user:Hi")]


def test_chat_without_a_template_says_so(qwen3, tmp_path):
    folder, tokenizer = copy_of(qwen3, tmp_path), byte_tokenizer()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    llm = make(folder)
    with pytest.raises(ValueError, match="no chat template.*chat_template="):
        llm.chat(MESSAGES, greedy(), use_tqdm=False)
    [out] = llm.chat(MESSAGES[:1], greedy(), use_tqdm=False,
                     chat_template="{{ messages[0].content }}")
    assert out.prompt == "Hi"


@pytest.mark.parametrize("messages", [
    "hi", [["hi"]], ["hi"], [{"role": "user", "content": "a"}, 1],
    {"role": "user", "content": "hi"}, None])
def test_a_conversation_that_is_none_is_explained(llm, expected, messages):
    with pytest.raises(ValueError, match="conversation"):
        llm.chat(messages, greedy(2), use_tqdm=False)
    assert_serves(llm, expected)


def test_content_parts_of_a_message_are_joined(llm):
    """OpenAI's form of a message: templates print a list as it is, brackets and all."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    [out] = llm.chat([{"role": "user", "content": parts}], greedy(2), use_tqdm=False)
    [plain] = llm.chat([{"role": "user", "content": "Hello\nworld"}], greedy(2), use_tqdm=False)
    assert out.prompt == plain.prompt and "type" not in out.prompt


def test_a_template_that_raises_is_explained(llm):
    with pytest.raises(ValueError, match="chat template.*not so"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False,
                 chat_template="{{ raise_exception('not so') }}")


def test_template_options_may_repeat_an_argument(llm):
    message = [{"role": "user", "content": "hi"}]
    [out] = llm.chat(message, greedy(2), use_tqdm=False,
                     chat_template_kwargs={"add_generation_prompt": False})
    assert not out.prompt.endswith("assistant:")


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
