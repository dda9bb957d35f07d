"""Byte tokens: a run of them that ends inside a character must not spoil the text before it.

SentencePiece's decoder (Llama 2, Gemma, Mistral) decodes neighbouring byte tokens as a whole, and
gives one U+FFFD for each of them if the whole is no UTF-8. The oracle is Python's own decoding of
the bytes: a whole character is itself, and each byte of a broken one is a U+FFFD.
"""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.frontend.detokenizer import Detokenizer

WORDS = ["▁the", "▁fox", "a", "!"]


def tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then some words."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[],
                                unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                      decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


TOKENIZER = tokenizer()


def ids_of(*parts: bytes | str) -> list[int]:
    """Bytes are byte tokens, a str is one word."""
    return [i for part in parts for i in (
        [1 + byte for byte in part] if isinstance(part, bytes) else [257 + WORDS.index(part)])]


def text_of(ids: list[int], prompt: list[int], **params) -> str:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(max_tokens=None, **params), prompt)
    for token_id in ids:
        detokenizer.add(token_id)
        assert detokenizer.text.startswith(detokenizer.visible_text)
    detokenizer.flush()
    return detokenizer.text


def both(ids: list[int], prompt: list[int]) -> str:
    """The text as it streams, which is that of a final output, too."""
    streamed = text_of(ids, prompt)
    assert text_of(ids, prompt, output_kind=RequestOutputKind.FINAL_ONLY) == streamed
    return streamed


EMOJI = "😀".encode()


@pytest.mark.parametrize("parts, text", [
    ((b"\n", EMOJI, b"\xf0"), "\n😀\ufffd"),  # six broken characters in one place, four in another
    ((b"\n", b"\xf0", "a"), "\n\ufffda"),
    ((b"\n", EMOJI), "\n😀"),
    (("▁the", b"\xe2\x82", "▁fox"), " the\ufffd\ufffd fox"),
    ((b"\xf0\x9f",), "\ufffd\ufffd"),
    ((EMOJI, EMOJI[:3]), "😀\ufffd\ufffd\ufffd")])
def test_a_broken_character_spoils_nothing_before_it(parts, text):
    assert both(ids_of(*parts), ids_of("▁the")) == text


@pytest.mark.parametrize("prompt", [("▁the",), (b"\n",), (b"a\xc3",)])
def test_random_bytes_give_one_text(prompt):
    """Whoever looks at it meanwhile gets the same text, and what stands before the first broken
    byte is whole. (Behind it the decoder counts a run of bytes as broken up to the next word.)"""
    rng = random.Random(0)
    whole, broken = ["▁the", "a", b"\n", EMOJI, "é".encode()], [b"\xf0", b"\x9f", b"\xe6"]
    for _ in range(200):
        before, after = rng.choices(whole, k=rng.randrange(5)), rng.choices(whole + broken, k=4)
        text = both(ids_of("a", *before, rng.choice(broken), *after), ids_of(*prompt))
        shown = "".join(part.decode() if isinstance(part, bytes) else part.replace("▁", " ")
                        for part in ["a", *before])
        assert text.startswith(shown + "\ufffd"), (before, after, text)
