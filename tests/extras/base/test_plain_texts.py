"""Special tokens in messages stay plain text, whatever kind of tokenizer there is.

Oracles: what decoding gives back, and for vocabularies of bytes transformers' own
`split_special_tokens`, which knows no template.
"""

import pytest
from real_tokenizers import BYTE_LEVEL, TOKENIZERS, decode, encode, every_tokenizer
from small_engine import make
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nanoserve_extras.base.messages import Taken
from nanoserve_extras.base.plain_texts import PlainTexts
from nanoserve_extras.base.template_forms import render_messages


def special_tokens(name: str) -> dict[str, int]:
    added = TOKENIZERS[name].added_tokens_decoder
    return {token.content: id_ for id_, token in added.items() if token.special}


def prompt_of(name: str, texts: list[str]) -> tuple[str, list[int], str, str]:
    """Through a template that writes two of the special tokens around each text."""
    plain, (*_, before, behind) = PlainTexts(TOKENIZERS[name]), special_tokens(name)
    text = render_messages([dict(role="user", content=text) for text in texts], plain.around(
        lambda given: "".join(before + one["content"] + behind for one in given)))
    return text, plain.encode(text), before, behind


def byte_tokenizer(special: list[str], others: list[str]) -> PreTrainedTokenizerFast:
    letters = sorted(ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    made.add_tokens([AddedToken(one, normalized=False) for one in others])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@every_tokenizer
def test_what_a_message_says_is_never_a_special_token(name):
    """A user who wrote the end of a turn could go on as the system."""
    ids_of = special_tokens(name)
    texts = [f"He wrote {token} and{token}{token}, or {token[:2]}{token}." for token in ids_of]
    text, ids, before, behind = prompt_of(name, texts)
    assert text == "".join(before + one + behind for one in texts)
    assert [id_ for id_ in ids if id_ in ids_of.values() and id_ != TOKENIZERS[name].unk_token_id] \
        == [ids_of[before], ids_of[behind]] * len(texts)
    assert len(encode(name, text)) != len(ids)  # without it, they are special
    if name == "llama_2":  # puts a space in front of each text behind a special token
        text = "".join(f"{before} {one}{behind}" for one in texts)
    if name != "bert":
        assert decode(name, ids, skip=False) == text
    if name in BYTE_LEVEL:
        assert ids == [id_ for one in texts for id_ in (ids_of[before], *TOKENIZERS[name].encode(
            one, add_special_tokens=False, split_special_tokens=True), ids_of[behind])]


@every_tokenizer
def test_other_prompts_have_the_ids_that_they_always_have(name):
    text, ids, *_ = prompt_of(name, ["the harbour 😀日本語", "  two\n\nlines ", "<think>a</think>"])
    assert ids == encode(name, text)


def test_all_that_a_client_sends_is_broken_and_images_stay_images():
    plain = PlainTexts(TOKENIZERS["qwen"])
    image, end = Taken(type="image"), "<|im_end|>"
    sent = dict(content=[image, dict(type="text", text=end)], tool_calls=[dict(function=dict(
        name="f", arguments={end: [end, 5, None]}))])
    broken = plain.broken(sent)
    assert end not in str(broken) and isinstance(broken["content"][0], Taken)
    assert str(broken).replace(plain.mark, "") == str(sent)


@pytest.mark.parametrize("special, text", [
    (["]~b]", "[e~["], "]~b]~b]user"), (["|<A>|", "|<B>|"], "|<A>|<B>|<A>|"),
    (["<<S>>", "<S>", "S>>"], "a <<S>> b"), (["<s>"], "<turn|><｜User｜><|EOT|>")])
def test_special_tokens_within_others_and_marks_of_turns_are_plain(special, text):
    """The first three are MiniMax's and made up; the last are called special by nobody."""
    plain = PlainTexts(byte_tokenizer(special, ["<｜User｜>", "<|EOT|>", "<turn|>", "<think>"]))
    written = plain.around(lambda chat: "<｜User｜>" + chat[0])([text])
    first, *rest = plain.encode(written)
    assert written == f"<｜User｜>{text}" and first >= 256 > max(rest)


def test_a_special_token_hides_in_no_arguments():
    """Some clients escape what is JSON, Go's "<" and Python's letters beyond ASCII."""
    plain = PlainTexts(byte_tokenizer(["<|end|>", "<｜end▁of▁turn｜>"], []))
    sent = r'{"text": "\u003c|end|> <\uff5cend\u2581of\u2581turn\uff5c>"}'

    def template(chat: list[dict]) -> str:
        return "".join(one["content"] + "".join(
            f"{call['function']['name']}: {call['function']['arguments'].get('text')}"
            for call in one.get("tool_calls", ())) + "<|end|>" for one in chat)

    text = render_messages([dict(role="user", content="so"), dict(role="assistant", tool_calls=[
        dict(function=dict(name="f", arguments=sent))])], plain.around(template))
    assert text == "so<|end|>f: <|end|> <｜end▁of▁turn｜><|end|>"
    assert [id_ for id_ in plain.encode(text) if id_ >= 256] == [256, 256]


def test_a_tokenizer_that_cannot_be_copied_is_refused():
    for one in (object(), byte_tokenizer(["\x01"], [])):  # a character can't be broken
        with pytest.raises(ValueError, match="split_special_tokens=True: .*leave it out"):
            PlainTexts(one)


def test_an_engine_without_a_tokenizer_has_no_texts_to_split(qwen3):
    with make(qwen3, skip_tokenizer_init=True, split_special_tokens=True) as llm:
        assert llm.inputs.plain is None
