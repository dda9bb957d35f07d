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


def test_a_template_that_raises_is_explained(llm):
    with pytest.raises(ValueError, match="chat template.*not so"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False,
                 chat_template="{{ raise_exception('not so') }}")


def test_template_options_may_repeat_an_argument(llm):
    message = [{"role": "user", "content": "hi"}]
    [out] = llm.chat(message, greedy(2), use_tqdm=False,
                     chat_template_kwargs={"add_generation_prompt": False})
    assert not out.prompt.endswith("assistant:")
