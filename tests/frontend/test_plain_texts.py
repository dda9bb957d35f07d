"""Special tokens in messages stay plain text, whatever kind of tokenizer there is.

Oracles: what decoding gives back, and for vocabularies of bytes transformers' own
`split_special_tokens`, which knows no template.
"""

import pytest
from real_tokenizers import BYTE_LEVEL, TOKENIZERS, decode, encode, every_tokenizer

from nanoserve.frontend.messages import Taken, render_messages
from nanoserve.frontend.plain_texts import PlainTexts


def special_tokens(name: str) -> dict[str, int]:
    added = TOKENIZERS[name].added_tokens_decoder
    return {token.content: id_ for id_, token in added.items() if token.special}


def prompt_of(name: str, texts: list[str]) -> tuple[str, list[int], str, str]:
    """Through a template that writes two of the special tokens around each text."""
    plain, (*_, before, behind) = PlainTexts(TOKENIZERS[name]), special_tokens(name)
    chat = plain.broken([dict(role="user", content=text) for text in texts])
    rendered = render_messages(chat, lambda given: "".join(
        before + one["content"] + behind for one in given))
    return *plain.encode(rendered), before, behind


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


def test_a_tokenizer_that_cannot_be_copied_is_refused():
    with pytest.raises(ValueError, match="split_special_tokens=True: .*leave it out"):
        PlainTexts(object())
