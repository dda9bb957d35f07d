"""Long runs of tokens without text: broken bytes, special tokens that are skipped.

Oracles: the tokenizer's own `decode` of everything at once, and the number of tokens that are
decoded, which counts the work without a clock.
"""

import time

import pytest
from helpers import assert_grows
from hypothesis import given
from hypothesis import strategies as st
from real_tokenizers import (
    BYTE_FALLBACK,
    TOKENIZERS,
    encode,
    every_lossless,
    no_clock,
    start_of,
    truth,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.detokenizer import PATIENCE, Detokenizer, StopStrings

CHARACTERS = bytes_to_unicode()
RUNS = {"FF": b"\xff", "E4 BD": b"\xe4\xbd", "F0 9F 98 FF": b"\xf0\x9f\x98\xff", "80": b"\x80",
        "FF E4 BD 80": b"\xff\xe4\xbd\x80", "skipped": b"", "a text": b"ab "}


class Counting:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.lengths = tokenizer, []

    def decode(self, ids: list[int], **kinds) -> str:
        self.lengths.append(len(ids))
        return self.tokenizer.decode(ids, **kinds)


def byte_ids(name: str, raw: bytes) -> list[int]:
    return [TOKENIZERS[name].convert_tokens_to_ids(
        f"<0x{byte:02X}>" if name in BYTE_FALLBACK else CHARACTERS[byte]) for byte in raw]


def read(name: str, prompt: list[int], output: list[int], **params):
    """What is visible after each token, the final text, and how many tokens each call decoded."""
    counting = Counting(TOKENIZERS[name])
    detokenizer, seen = Detokenizer(counting, SamplingParams(**params), prompt), []
    for token_id in output:
        detokenizer.add(token_id)
        seen.append(detokenizer.visible_text)
    detokenizer.flush()
    assert_grows([*seen, detokenizer.text])
    return seen, detokenizer.text, counting.lengths


@every_lossless
@pytest.mark.parametrize("run", RUNS)
def test_each_token_of_a_run_without_text_costs_the_same_and_is_soon_shown(name, run):
    """Each of 8,000 broken bytes, or of special tokens that are skipped, decoded the whole run
    anew: 14 seconds, which held up everybody else. And nothing was shown before the end."""
    prompt = [start_of(name), *encode(name, "Say:")]
    output = ((byte_ids(name, RUNS[run]) or [start_of(name)]) * 600)[:600]
    output += encode(name, " the 😀")
    seen, final, lengths = read(name, prompt, output)
    assert final == truth(name, prompt, output)
    assert max(lengths) < 3 * PATIENCE
    assert sum(lengths) < 3 * PATIENCE * len(output)
    for n in range(PATIENCE + 1, 600 if RUNS[run] else 0):
        assert len(seen[n]) >= len(truth(name, prompt, output[:n])) - PATIENCE - 1


@pytest.mark.parametrize("prompt", ["the", "\n"])
@pytest.mark.parametrize(("raw", "text"), [
    (b"\n\xf0\x9f\x98\x80\xf0", "\n😀\ufffd"),  # six broken ones in one place, four in another
    (b"\n\xf0", "\n\ufffd"), (b"\xf0\x9f", "\ufffd\ufffd")])
def test_a_broken_character_spoils_nothing_before_it(prompt, raw, text):
    """A decoder with byte tokens gives one U+FFFD for each of a run if the run is no UTF-8."""
    prompt, output = (byte_ids("gemma", one) for one in (prompt.encode(), raw))
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        assert read("gemma", prompt, output, output_kind=kind)[1] == text


def test_behind_a_prompt_of_half_characters_the_output_stands_alone():
    """A prompt of token ids may be cut anywhere. What follows is neither lost nor joined to it."""
    _, final, _ = read("qwen", byte_ids("qwen", b"\xe2" * 9), byte_ids("qwen", b"\x80x"))
    assert final == "\ufffdx"


@every_lossless
@no_clock
@given(data=st.data())
def test_broken_text_of_any_length_reads_as_the_tokenizer_reads_it(name, data):
    """With byte tokens a run that was spoilt stays so, however long it is: valid characters behind
    U+FFFD must not come out of a window that has forgotten what spoilt it."""
    some = st.sampled_from([b"\xff", b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x98", b"\x80"])
    character = st.sampled_from([c.encode() for c in ("é", "你", "😀")])
    raw = b"\xff" + b"".join(data.draw(st.lists(some | character, min_size=20, max_size=80)))
    output = byte_ids(name, raw) + encode(name, " the")
    prompt = [start_of(name), *encode(name, "Say:")]
    _, final, _ = read(name, prompt, output)
    _, unwatched, _ = read(name, prompt, output, output_kind=RequestOutputKind.FINAL_ONLY)
    assert final == unwatched == truth(name, prompt, output)


@pytest.mark.parametrize("name", ["qwen", "llama_3"])
@no_clock
@given(data=st.data(), skip=st.booleans())
def test_silent_tokens_between_the_bytes_of_a_character_change_nothing(name, data, skip):
    """However many special tokens that are skipped, and ids that the tokenizer can't name, stand
    between the halves of a character, it is one."""
    silent = st.sampled_from([start_of(name), len(TOKENIZERS[name]) + 3])
    runs = st.tuples(silent, st.integers(1, 60)).map(lambda run: [run[0]] * run[1])
    some = st.sampled_from(["上", "😀", "é", "a"]).map(lambda text: byte_ids(name, text.encode()))
    broken = st.sampled_from([b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98"]).map(
        lambda raw: byte_ids(name, raw * 9))
    output = []
    for piece in data.draw(st.lists(some | broken, min_size=1, max_size=6)):
        at = data.draw(st.integers(0, len(piece)))
        output += piece[:at] + data.draw(runs) + piece[at:]
    prompt = [start_of(name), *encode(name, "Say:")]
    _, final, lengths = read(name, prompt, output, skip_special_tokens=skip)
    assert final == truth(name, prompt, output, skip)
    assert max(lengths) < 3 * PATIENCE


def test_silent_tokens_end_no_character_of_byte_tokens():
    output = [*byte_ids("gemma", b"\xf0\x9f\x98"), *[start_of("gemma")] * 40]
    _, final, _ = read("gemma", encode("gemma", "Say:"), output + byte_ids("gemma", b"\x80"))
    assert final == "😀"


def test_a_text_that_is_shown_without_a_whole_character_goes_on():
    """Stop strings are told when it ends: then what may have become a mark is none."""
    told = []

    class Told(StopStrings):
        def find(self, text, new_text, is_complete):
            told.append(is_complete)

    params = SamplingParams()
    detokenizer = Detokenizer(TOKENIZERS["qwen"], params, [], Told(params))
    for token_id in byte_ids("qwen", b"\xff" * 2 * PATIENCE):
        detokenizer.add(token_id)
    assert told and not any(told)
    detokenizer.flush()
    assert told[-1]


def test_a_long_stop_string_costs_no_token_its_length():
    """Each token tried all beginnings of a stop string anew: 0.4 ms for one of 6,000 characters."""
    [letter], prompt = encode("qwen", "A"), [start_of("qwen")]

    def seconds(**params) -> float:
        start = time.process_time()
        read("qwen", prompt, [letter] * 4000, **params)
        return time.process_time() - start

    assert seconds(stop=["zA" * 3000 + "b", "A" * 3000 + "b"]) < 3 * seconds() + 0.2
