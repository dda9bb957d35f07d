"""Text while it streams: whole characters only, stop strings held back, and in the end the truth.

Oracles: the tokenizer's own `decode` of all ids at once, and a naive twin that decodes everything
anew after every token and looks for stop strings in the whole text.
"""

import pytest
from checkpoints import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoserve.config import SamplingParams
from nanoserve.frontend.detokenizer import Detokenizer

UNFINISHED = "\ufffd"
# How byte-level tokenizers write a byte as a character: printable ones as themselves.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTER = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}

BYTES = byte_tokenizer()
BYTE_ID = [BYTES.convert_tokens_to_ids(CHARACTER[byte]) for byte in range(256)]


def byte_ids(text: str | bytes) -> list[int]:
    raw = text.encode() if isinstance(text, str) else text
    return [BYTE_ID[byte] for byte in raw]


def stream(tokenizer, prompt: list[int], output: list[int], **params) -> list[str]:
    """What a caller sees after each token, and at last the final text."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt)
    seen = []
    for token_id in output:
        if detokenizer.add(token_id) is not None:
            break
        seen.append(detokenizer.visible_text)
    detokenizer.flush()
    return [*seen, detokenizer.text]


# --------------------------------------------------------- whole characters


def test_an_unfinished_character_at_the_end_is_flushed():
    """The length limit may fall into the middle of a character: then it reads U+FFFD, once."""
    seen = stream(BYTES, [], byte_ids("ab" + "😀")[:-1])
    assert seen == ["a", "ab", "ab", "ab", "ab", "ab" + UNFINISHED]


def test_flush_changes_nothing_the_second_time():
    detokenizer = Detokenizer(BYTES, SamplingParams(), byte_ids("p"))
    for token_id in byte_ids("aé")[:2]:
        detokenizer.add(token_id)
    for _ in range(2):
        detokenizer.flush()
        assert detokenizer.text == "a" + UNFINISHED


@pytest.mark.parametrize("half", [b"\xf0\x9f", b"abc\xf0\x9f\x98", b"\xff", b"\xe2" * 9])
def test_after_a_prompt_that_ends_in_half_a_character_the_output_stands_alone(half):
    """A prompt of token ids may be cut anywhere. What follows is neither lost nor held for ever."""
    seen = stream(BYTES, byte_ids(half), byte_ids("so, é!"))
    assert seen == ["s", "so", "so,", "so, ", "so, ", "so, é", "so, é!", "so, é!"]
    completed = stream(BYTES, byte_ids(half), byte_ids(b"\x80x"))
    assert completed[-1] == UNFINISHED + "x"


def test_a_token_costs_the_same_in_a_long_text(monkeypatch):
    """Only a window is decoded, not everything from the beginning: a few tokens at a time."""
    lengths, decode = [], BYTES.decode
    monkeypatch.setattr(BYTES, "decode", lambda ids, **kinds: (
        lengths.append(len(ids)), decode(ids, **kinds))[1])
    text = "a long text, é 😀 " * 20
    assert stream(BYTES, byte_ids("p" * 99), byte_ids(text))[-1] == text
    assert max(lengths) <= 10


# -------------------------------------------------- other kinds of tokenizer


def with_merged(*tokens: bytes) -> PreTrainedTokenizerFast:
    """A byte-level vocabulary with some longer tokens; token 256 + i is `tokens[i]`."""
    pieces = [CHARACTER[byte] for byte in range(256)]
    pieces += ["".join(CHARACTER[byte] for byte in token) for token in tokens]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_tokens_that_hold_a_letter_and_half_a_character():
    """Real vocabularies have them (GPT-2's " \\xf0\\x9f"); the letter waits for the other half."""
    tokenizer = with_merged(b"a\xf0\x9f", b"\x98\x80b")
    assert stream(tokenizer, [], [256, 257, 33, 256]) == [
        "", "a😀b", "a😀b!", "a😀b!", f"a😀b!a{UNFINISHED}"]


# -------------------------------------------------------------- stop strings


@pytest.mark.parametrize(("stop", "text", "final", "found"), [
    (["###"], "done ### more", "done ", "###"),  # over several tokens
    (["done"], "done", "", "done"),  # the whole output
    (["d"], "done", "", "d"),  # a single character, at once
    (["aab"], "aaab!", "a", "aab"),  # its beginning repeats itself
    (["abcd", "bc"], "xabcd", "xa", "bc"),  # the one that is complete first
    (["wrong", "right"], "all right wrong", "all ", "right"),  # the first in the text
    (["ß😀"], "Straß😀e", "Stra", "ß😀"),  # half characters inside
    (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    (["xyz"], "a xy", "a xy", None),  # a beginning that comes to nothing
    (["###"], "# ## #", "# ## #", None),
], ids=repr)
def test_stop_strings_by_hand(stop, text, final, found):
    for include in (False, True):
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        detokenizer = Detokenizer(BYTES, params, byte_ids("p"))
        results = []
        for token_id in byte_ids(text):
            results.append(detokenizer.add(token_id))
            if results[-1] is not None:
                break
        detokenizer.flush()
        assert results[-1] == found
        assert detokenizer.text == final + (found if include and found else "")


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    seen = stream(BYTES, byte_ids("Q: ##"), byte_ids("#a"), stop="###")
    assert seen[-1] == "#a"


def test_several_stop_strings_in_one_token():
    """The first in the text wins, not the first in the list."""
    tokenizer = with_merged(b"one, two, three")
    seen = stream(tokenizer, [], [256], stop=["three", "two", "never"])
    assert seen == ["one, "]


def test_a_stop_string_that_only_the_flush_reveals_is_told():
    """The last token brings the stop string and half of a character, and the output is over: the
    text is cut there, so the caller has to be told why."""
    detokenizer = Detokenizer(with_merged(b" X\xf0\x9f"), SamplingParams(stop="X"), [])
    assert detokenizer.add(256) is None  # waits for the other half
    assert detokenizer.flush() == "X"
    assert detokenizer.text == " "
