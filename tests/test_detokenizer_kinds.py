"""Every kind of tokenizer: what is streamed is what it makes of all the tokens at once.

The oracle is the tokenizer's own `decode` of everything at once, and plain search in its text.
"""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from real_tokenizers import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    FRAGMENTS,
    SAID,
    TOKENIZERS,
    UNFINISHED,
    decode,
    encode,
    every_lossless,
    every_tokenizer,
    no_clock,
    start_of,
    stream,
    truth,
)

from nanoserve import RequestOutputKind
from nanoserve.detokenizer import PATIENCE

# ----------------------------------------------------------------- whole characters

FRAGMENT = st.sampled_from(FRAGMENTS) | st.text(max_size=2)
TEXT = st.lists(FRAGMENT, min_size=1, max_size=8).map("".join)


def cut_in_two(name: str, text: str, where: float) -> tuple[list[int], list[int]]:
    """Any text as a prompt and its continuation. The cut is made between two tokens, not within a
    character."""
    ids = encode(name, text)
    at = int(where * len(ids))
    while decode(name, ids[:at]).endswith(UNFINISHED):
        at -= 1
    return [start_of(name), *ids[:at]], ids[at:]


@every_lossless
def test_characters_are_shown_whole_or_not_at_all(name):
    """Engines that decode each token on its own print U+FFFD, the sign for a broken character, for
    every part of one; and drop the spaces that a decoder strips from whatever it is given."""
    prompt = [start_of(name), *encode(name, "Say:")]
    for fragment in FRAGMENTS:
        text = f"a{fragment} {fragment}{fragment}.".replace("▁", " ")  # SentencePiece's own space
        if name == "qwen":
            text = TOKENIZERS[name].backend_tokenizer.normalizer.normalize_str(text)
        seen, final, _ = stream(name, prompt, encode(name, text))
        assert final == (" " if name in ("llama_2", "mistral") else "") + text
        assert all(final.startswith(visible) for visible in seen)


@every_tokenizer
@no_clock
@given(text=TEXT, where=st.floats(0, 0.9))
def test_any_text(name, text, where):
    """Whatever the tokens: all that is complete is shown at once, and nothing else. Where `decode`
    sees a broken character at the end, the text before it waits. And without a stream and stop
    strings all is decoded at the end, in one piece."""
    prompt, output = cut_in_two(name, text, where)
    seen, final, _ = stream(name, prompt, output)
    expected = [""]
    for n in range(1, len(output) + 1):
        read = truth(name, prompt, output[:n])
        expected.append(expected[-1] if read.endswith(UNFINISHED) else read)
    assert seen == expected[1:]
    assert final == truth(name, prompt, output)
    if UNFINISHED not in text:
        assert not any(UNFINISHED in visible for visible in seen)
    _, unwatched, _ = stream(name, prompt, output, output_kind=RequestOutputKind.FINAL_ONLY)
    assert unwatched == final


@every_tokenizer
def test_the_words_of_a_prompt_show_where_the_output_begins(name):
    """Cut between any two tokens; the first piece has its space exactly if the whole text does."""
    text = "the gulls, the ferryman and the island didn't answer a girl ."
    ids = encode(name, text)
    for at in range(1, len(ids)):
        seen, final, _ = stream(name, ids[:at], ids[at:])
        assert decode(name, ids[:at]) + final == decode(name, ids)
        assert seen == [truth(name, ids[:at], ids[at:n]) for n in range(at + 1, len(ids) + 1)]


@every_tokenizer
@pytest.mark.parametrize("end", ["b\ufffd", "日\ufffd\ufffd\ufffd", "😀", "\U00020000"], ids=ascii)
def test_the_first_space_behind_a_broken_end_of_the_prompt(name, end):
    """A prompt that quotes U+FFFD at its end, or is cut within a character, was left out of what is
    decoded altogether; so a decoder that strips the first space of a text stripped the output's,
    and "Say: b\\ufffd" went on with "the harbour" instead of " the harbour"."""
    whole, output = encode(name, "Say: " + end), encode(name, "a the harbour 😀")[1:]
    for lost in range(4):
        prompt = [start_of(name), *whole[:len(whole) - lost]]
        _, final, _ = stream(name, prompt, output)
        assert final == truth(name, prompt, output)


# ---------------------------------------------------------------------- broken text


def token_lists(name: str):
    """Any tokens, special ones and half characters included. The last are ids that a padded
    embedding matrix can name, and the tokenizer can't."""
    size = len(TOKENIZERS[name])
    special = [i for i, token in TOKENIZERS[name].added_tokens_decoder.items()]
    return st.lists(st.integers(0, size - 1) | st.sampled_from([*special, size, size + 3]),
                    max_size=16)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "bert"])
@no_clock
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_read_as_the_tokenizer_does(name, data, skip):
    """A model may well write bytes that are no UTF-8: streaming does not change what they read."""
    prompt, output = data.draw(token_lists(name)), data.draw(token_lists(name))
    seen, final, _ = stream(name, prompt, output, skip_special_tokens=skip)
    if decode(name, prompt, skip).endswith(UNFINISHED):  # half a character: the output stands alone
        prompt = []
    assert final == truth(name, prompt, output, skip)
    assert not any(visible.endswith(UNFINISHED) for visible in seen)


def may_read(name: str, output: list[int], skip: bool) -> str:
    """The texts that tokens with bytes among them may be shown as, as a regular expression.

    The decoder reads a run of byte tokens as characters if all of it is valid, and otherwise as one
    U+FFFD a byte. A stream can't take back what it has shown while the run was valid. So a spoilt
    run may begin with characters, and goes on with U+FFFD.
    """
    tokenizer, pattern, run = TOKENIZERS[name], "", b""
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    pieces = tokenizer.convert_ids_to_tokens(output)
    pieces = [piece for i, piece in zip(output, pieces, strict=True)
              if piece is not None and not (skip and i in special)]
    for piece in [*pieces, ""]:  # the last one ends a run
        if byte := re.fullmatch(r"<0x(..)>", piece):
            run += bytes.fromhex(byte[1])
            continue
        try:
            pattern += re.escape(run.decode())
        except UnicodeDecodeError as error:
            whole = run[:error.start].decode()
            begins = [re.escape(whole[:n]) for n in range(len(whole), -1, -1)]
            pattern += f"(?:{'|'.join(begins)}){UNFINISHED}+"
        run = b""
        pattern += re.escape(piece.replace("▁", " "))
    return pattern


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@no_clock
@given(data=st.data(), skip=st.booleans())
def test_random_bytes_between_words(name, data, skip):
    """Invalid bytes never swallow the words around them, nor characters already shown."""
    character = st.sampled_from(["é", "你", "😀", "a"]).map(lambda text: [
        TOKENIZERS[name].convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()])
    byte = st.sampled_from([b"\x80", b"\xe4", b"\xf0", b"\xff"]).map(
        lambda raw: [TOKENIZERS[name].convert_tokens_to_ids(f"<0x{raw.hex().upper()}>")])
    output = sum(data.draw(st.lists(character | byte | token_lists(name), max_size=6)), [])
    prompt = [start_of(name), *encode(name, "the gulls")]
    seen, final, _ = stream(name, prompt, output, skip_special_tokens=skip)
    assert re.fullmatch(may_read(name, output, skip), final, re.S)
    assert len(output) > PATIENCE or not any(visible.endswith(UNFINISHED) for visible in seen)
    _, unwatched, _ = stream(name, prompt, output, skip_special_tokens=skip,
                             output_kind=RequestOutputKind.FINAL_ONLY)
    assert unwatched == final


@every_lossless
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_text_that_ends_in_half_a_character(name, lost):
    """Cut by the length limit, the character is shown as broken, but only once it is over."""
    prompt = [start_of(name), *encode(name, "Say:")]
    output = encode(name, "the \U00020000")  # four bytes that are in no vocabulary together
    for token_id in output[-lost:]:
        assert UNFINISHED in decode(name, [token_id])
    seen, final, _ = stream(name, prompt, output[:-lost])
    assert not any(UNFINISHED in visible for visible in seen)
    assert final.rstrip(UNFINISHED).strip() == "the" and final.endswith(UNFINISHED)
    assert final == truth(name, prompt, output[:-lost])


# --------------------------------------------------------------------- stop strings


@every_lossless
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "found"), [
    ("r 😀日", "r 😀日"),  # begins and ends in the middle of tokens
    ("😀", "😀"),
    ("\u200d👩", "\u200d👩"),  # the second of the family
    ("स्", "स्"),  # a conjunct: half of what is seen as one letter
    (["日本語", "日本", "日"], "日"),  # of those at the same place, the shortest
    (["नमस्तेx", "ते", "मस्ते!"], "ते"),  # others begin earlier, and come to nothing
    (["語", "harbour"], "harbour"),
    (["日本語,", "語x"], "日本語,"),  # two may have begun: the longer beginning is held back
    (["日語", "the  "], None),
], ids=ascii)
def test_stop_strings_of_many_bytes(name, stop, found, include):
    """They need not begin or end where a token or a character that is seen does."""
    prompt = [start_of(name), *encode(name, "Say:")]
    seen, final, stop_string = stream(name, prompt, encode(name, SAID), stop=stop,
                                      include_stop_str_in_output=include)
    before, stop_itself, _ = SAID.partition(found) if found else (SAID, "", "")
    assert final.lstrip(" ") == before + (stop_itself if include else "")
    assert stop_string == found
    assert all(before.startswith(visible.lstrip(" ")) for visible in seen)


def test_a_stop_string_that_only_the_end_reveals_is_told():
    """The last token brings the stop string and half of a character, and the output is over: the
    text is cut there, so the caller has to be told why."""
    half = TOKENIZERS["qwen"].convert_tokens_to_ids("ĠnaÃ")
    assert stream("qwen", [], [half], stop="na") == ([""], " ", "na")


def plain(name, prompt, output, stops, include) -> tuple[list[str], str, str | None]:
    """Decode everything anew for every token. Returns what may be seen, the final text, the stop.
    """
    seen, whole = [""], truth(name, prompt, output)
    for n in range(1, len(output) + 2):  # the last one is the end
        read = truth(name, prompt, output[:n])
        if read.endswith(UNFINISHED) and n <= len(output):
            seen.append(seen[-1])
            continue
        if hits := [(read.find(stop), len(stop), stop) for stop in stops if stop in read]:
            at, length, stop = min(hits)
            return seen[1:], read[:at + length if include else at], stop
        held = [n for stop in stops for n in range(len(stop)) if read.endswith(stop[:n])]
        seen.append(read[:len(read) - max(held, default=0)])
    return seen[1:-1], whole, None


@every_tokenizer
@no_clock
@given(data=st.data(), where=st.floats(0, 0.9), include=st.booleans(),
       text=TEXT.filter(lambda text: UNFINISHED not in text))
def test_stop_strings_against_plain_search(name, data, text, where, include):
    """Stop strings taken out of the text, a beginning of one, and some that do not occur."""
    prompt, output = cut_in_two(name, text, where)
    whole = truth(name, prompt, output)
    assume(whole)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        stop = whole[at:at + data.draw(st.integers(1, 5))]
        stops.append(data.draw(st.sampled_from([stop, stop, stop + "x", stop[:1], "e" + stop])))
    seen, final, stop_string = stream(name, prompt, output, stop=stops,
                                      include_stop_str_in_output=include)
    expected_seen, expected, expected_stop = plain(name, prompt, output, stops, include)
    assert (seen, final, stop_string) == (expected_seen, expected, expected_stop)
    before = final[:len(final) - len(stop_string or "")] if include else final
    assert all(before.startswith(visible) for visible in seen)
    if len(stops) == 1:
        assert before == whole.partition(stops[0])[0]
