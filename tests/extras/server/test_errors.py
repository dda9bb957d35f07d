"""Libraries' errors, as clients read them. Each decoder of a body is made to print an address."""

import math
import re
from functools import partial

import pytest
from serving import CHAT, CHATS, COMPLETIONS, PROMPT

from nanoserve_extras.base.words import in_words, words_of
from nanoserve_extras.server import api
from nanoserve_extras.server.answers import event
from nanoserve_extras.server.errors import AsciiResponse
from nanoserve_extras.structured.structured import Trial

HEAP = re.compile(r"0x[0-9a-f]{6}")


def wrong(*_, kind=ValueError, **__):
    raise kind(f"cannot read {object()!r} from {object.__init__!r}, broken")


@pytest.mark.parametrize(("said", "shown"), [
    ("cannot identify image file <_io.BytesIO object at 0x7f63904cef20>",
     "cannot identify image file"), ("no <bound method A.b of <A object at 0x7f63904cef20>> here",
                                     "no <bound method A.b of> here"),
    ("at 0x7f63904cef20: <|im_end|> and 0xff", "at 0x...: <|im_end|> and 0xff"),
    ('in "/usr/lib/python3.11/site-packages/PIL/Image.py", line 5', 'in "PIL/Image.py", line 5'),
    ("out of memory\nException raised from malloc at /pytorch/c10/x.cpp:5\nframe #0: c10::Error",
     "out of memory")])
def test_an_address_and_a_librarys_inside_are_left_out(said, shown):
    assert words_of(said) == words_of(OSError(said)) == shown


def test_an_error_without_words_is_called_by_its_name():
    assert words_of(AssertionError()) == "AssertionError"
    assert words_of(KeyError("pixel_values")) == "there is no 'pixel_values'"
    with pytest.raises(ValueError) as caught, in_words("a long one"):
        raise OSError("x" * 490 + " <A object at 0x7f63904cef20>")  # not cut within the address
    assert "0x7f" not in str(caught.value)


@pytest.mark.parametrize("read", ["image", "sound"])
def test_a_decoder_of_files_shows_no_address(monkeypatch, read):
    """Pillow's own errors do: "cannot identify image file <_io.BytesIO object at 0x7f...>"."""
    Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")
    from nanoserve_extras.multimodal import multimodal_inputs as inputs
    monkeypatch.setattr(Image, "open", wrong)
    monkeypatch.setattr(inputs, "read_wav", wrong)
    with pytest.raises(ValueError, match="broken") as caught:
        inputs.read_image(b"x") if read == "image" else inputs.read_sound(b"x", 16000)
    assert not HEAP.search(str(caught.value))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_word_for_is_not_written(number):
    with pytest.raises(ValueError, match="JSON"):
        AsciiResponse(dict(a=[number]))
    with pytest.raises(ValueError, match="JSON"):
        event(dict(a=number))


TEMPLATE = "{{ raise_exception('this is broken: ' ~ messages[0].content.upper) }}"
FORM = dict(structured_outputs=dict(regex="[ab]z?"))


@pytest.mark.parametrize(("what", "path", "body", "status"), [
    ("tokenizer", COMPLETIONS, dict(prompt=PROMPT), 400), ("template", CHATS, {}, 400),
    ("template", "/v1/messages/count_tokens", {}, 400), ("grammar", CHATS, FORM, 400),
    ("grammar", COMPLETIONS, dict(prompt=PROMPT) | FORM, 400), ("JSON", CHATS, {}, 400),
    ("step", COMPLETIONS, dict(prompt=PROMPT), 500)])
def test_no_decoders_error_shows_an_address(server, monkeypatch, what, path, body, status):
    llm = server.llm
    if what == "tokenizer":
        monkeypatch.setattr(llm.inputs, "encode", wrong)
    elif what == "template":
        monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    elif what == "grammar":
        monkeypatch.setattr(Trial, "refusal", lambda *_: f"this is broken: {object()!r}")
    elif what == "JSON":
        monkeypatch.setattr(api, "read_json", partial(wrong, kind=OSError))
    else:
        monkeypatch.setattr(llm.runner, "launch", wrong)
    body = (dict(messages=CHAT) if "prompt" not in body else {}) | body
    error = server.refusal(path, body, status)
    assert "broken" in error["message"] and not HEAP.search(str(error)), error
    if what == "step":  # an error in a stream goes the same way
        _, data = server.ask_raw(path, body | dict(stream=True))
        assert b"broken" in data and not HEAP.search(data.decode())
