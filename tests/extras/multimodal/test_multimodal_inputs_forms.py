"""One image or sound in all forms and through all doors. The oracle is arithmetic on numbers that
are written down here, and the rules of the formats: no reader but ours takes part."""

import base64
import io
import re
import struct
from urllib.parse import quote

import numpy as np
import pytest

from nanoserve_extras.multimodal.multimodal_inputs import (
    FORMATS,
    from_url,
    read_image,
    read_sound,
)

Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")
WHITE, BLACK, RED, LIGHT = (255,) * 3, (0,) * 3, (200, 30, 30), (227, 142, 142)
RGBA = np.array([[(0, 0, 0, 0), (0, 0, 0, 255), (*RED, 255), (*RED, 128)]], np.uint8)
SHOWN = [WHITE, BLACK, RED, LIGHT]  # the last one by 255 - (255 - 200) * 128 / 255
GRAYS = np.array([[0, 256, 32768, 65535]])  # of 16 bits
SHADES = [(shade,) * 3 for shade in (0, 1, 128, 255)]
PALETTED = Image.fromarray(np.array([[0, 1, 2, 1]], np.uint8), "P")
PALETTED.putpalette([*BLACK, *BLACK, *RED])


def gray(*shades: int) -> list:
    return [(shade,) * 3 for shade in shades]


L = Image.fromarray(np.array([[0, 9, 200, 255]], np.uint8))
IMAGES = {  # how a file is saved, and the pixels that a viewer shows
    "RGBA": (Image.fromarray(RGBA), {}, SHOWN),
    "LA": (Image.fromarray(RGBA[..., 2:].copy()), {}, gray(255, 0, 30, 142)),
    "P with a clear colour": (PALETTED, dict(transparency=0), [WHITE, BLACK, RED, BLACK]),
    "P with shares": (PALETTED, dict(transparency=bytes([0, 255, 128])),
                      [WHITE, BLACK, LIGHT, BLACK]),
    "L with a clear shade": (L, dict(transparency=0), gray(255, 9, 200, 255)),
    "RGB with a clear colour": (Image.fromarray(RGBA).convert("RGB"), dict(transparency=RED),
                                [BLACK, BLACK, WHITE, WHITE]),
    "1": (Image.fromarray(np.array([[0, 1, 1, 0]], bool)), {}, gray(0, 255, 255, 0)),
    "I;16": (Image.fromarray(GRAYS.astype(np.uint16)), {}, SHADES),
    "I;16 with a clear shade": (Image.fromarray(GRAYS.astype(np.uint16)), dict(transparency=256),
                                gray(0, 255, 128, 255)),
    "P": (PALETTED, {}, [BLACK, BLACK, RED, BLACK]), "L": (L, {}, gray(0, 9, 200, 255)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_what_a_viewer_shows_through_all_doors(name, tmp_path):
    image, options, shown = IMAGES[name]
    file = tmp_path / "one.png"
    image.save(file, "PNG", **options)
    data = file.read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for door in (url, data, file, Image.open(file), *([] if options else [image])):
        seen = read_image(door)
        assert seen.mode == "RGB"
        assert np.abs(np.asarray(seen)[0].astype(int) - shown).max() <= 1, str(door)[:40]


PICTURE = io.BytesIO()
Image.fromarray(RGBA).save(PICTURE, "PNG", compress_level=1)
PICTURE = PICTURE.getvalue() + bytes((1 - len(PICTURE.getvalue())) % 3)  # so that it has padding
PLAIN = base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize("url", [
    f"DATA:IMAGE/PNG;BASE64,{PLAIN}", f"data:;base64,{PLAIN}", f"data:image/png; base64,{PLAIN}",
    f"data:image/png;charset=utf-8;name=a.png;base64,{PLAIN}", f" data:image/png;base64,{PLAIN}\n",
    "data:image/png;base64," + "\r\n".join(PLAIN[i:i + 76] for i in range(0, len(PLAIN), 76)),
    f"data:image/png;base64, {PLAIN[:9]} \t{PLAIN[9:]}", f"data:image/png;base64,{PLAIN}#part",
    f"data:image/png;base64,{PLAIN.rstrip('=')}",
    f"data:image/png;base64,{base64.urlsafe_b64encode(PICTURE).decode()}",
    f"data:image/png;base64,{quote(PLAIN, safe='')}", f"data:image/png,{quote(PICTURE)}",
    f"data:,{quote(PICTURE, safe='')}"], ids=lambda one: one[:30])
def test_a_data_url_is_read_as_rfc_2397_and_browsers_do(url):
    assert "=" in PLAIN and {"+", "/"} & {*PLAIN} and from_url(url) == PICTURE


@pytest.mark.parametrize(("url", "says"), [
    ("data:image/png;base64,A", "no base64"), ("data:image/png;base64,AA!A", "no base64"),
    ("data:image/png;base64,A=AA", "no base64"), ("data:image/png;base64,\ud800", "no base64"),
    ("data:image/png;base64", "must be data:"), ("dat:image/png;base64,AAAA", "must be data:"),
    ("data:image/png;base64," + "A" * 28 * 2 ** 20, "too large")], ids=lambda one: one[:30])
def test_a_data_url_that_can_not_be_read_is_refused(url, says):
    with pytest.raises(ValueError, match=f"^an image or a sound .*{says}"):
        from_url(url)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_an_image_or_an_error_in_words(kind):
    """Cut anywhere, and with wrong bytes anywhere. What a decoder says has no address in it."""
    rng, file = np.random.default_rng(5), io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(file, kind)
    whole, refused = file.getvalue(), set()
    damaged = [whole[:end] for end in range(0, len(whole), max(1, len(whole) // 40))]
    for _ in range(80):
        one = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            one[at] = rng.integers(256)
        damaged.append(bytes(one))
    for one in damaged:
        try:
            assert read_image(one).mode == "RGB"
        except ValueError as error:
            refused.add(str(error))
    assert refused and all("no image that can be read" in one for one in refused)
    assert not [one for one in refused if re.search("0x[0-9a-f]{6}|object at|[.]py", one)]


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_photo_is_turned_as_its_camera_was_held(turn):
    """EXIF's eight orientations, by where they say that row 0 and column 0 are."""
    def mirrored(pixels):
        return pixels[:, ::-1]

    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    undo = {1: upright, 2: mirrored(upright), 3: upright[::-1, ::-1], 4: upright[::-1],
            5: upright.T, 6: np.rot90(upright), 7: upright[::-1, ::-1].T, 8: np.rot90(upright, -1)}
    stored = Image.fromarray(undo[turn].copy())
    exif = Image.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    stored.save(file, "PNG", exif=exif)
    for door in (file.getvalue(), Image.open(file)):
        assert (np.asarray(read_image(door))[..., 0] == upright).all()


SIX = bytes.fromhex("1201 0300 01000000 06000000")  # orientation 6


@pytest.mark.parametrize(("entries", "is_turned"), [
    ([SIX, bytes.fromhex("1a01 0200 04000000 61626300")], True),  # a resolution of "abc"
    ([SIX, bytes.fromhex("0001 0900 01000000 ffffffff")], True),  # a width of -1
    (None, False)], ids=["text for a number", "negative", "garbage"])
def test_what_else_is_wrong_in_a_photos_exif_hides_no_photo(entries, is_turned):
    exif = b"garbage" if entries is None else b"II*\0" + struct.pack(
        "<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    stored, file = np.arange(6, dtype=np.uint8).reshape(2, 3), io.BytesIO()
    Image.fromarray(stored).save(file, "PNG", exif=b"Exif\0\0" + exif)
    for door in (file.getvalue(), Image.open(file)):
        assert (np.asarray(read_image(door))[..., 0] == (
            np.rot90(stored, -1) if is_turned else stored)).all()


def test_of_an_animation_the_first_frame_is_shown():
    frames, file = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")], io.BytesIO()
    for kind in ("GIF", "WEBP", "PNG"):
        frames[0].save(file := io.BytesIO(), kind, save_all=True, append_images=frames[1:],
                       **dict(lossless=True) if kind == "WEBP" else {})
        for door in (file.getvalue(), Image.open(file)):
            assert read_image(door).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("image", [
    Image.fromarray(GRAYS.astype(np.int32)), Image.frombytes(
        "I;16B", (4, 1), GRAYS.astype(">u2").tobytes())], ids=["I", "I;16B"])
def test_grays_of_16_bits_keep_their_shades_in_all_modes_that_no_file_has(image):
    assert np.asarray(read_image(image))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_modes_of_other_colours_are_those_of_pil():
    image = Image.fromarray(RGBA[..., :3].copy())
    for mode in ("CMYK", "HSV", "YCbCr", "RGBX", "PA"):
        given = image.convert("P" if mode == "PA" else mode).convert(mode)
        assert read_image(given).tobytes() == given.convert("RGB").tobytes(), mode


@pytest.mark.parametrize("image", [
    Image.new("F", (4, 4)), L.convert("I"), Image.fromarray(np.full((2, 2), 65536, np.int32)),
    Image.fromarray(np.full((2, 2), -1, np.int32))], ids=["F", "of 8 bits", "too large",
                                                              "negative"])
def test_what_has_no_known_white_is_refused(image):
    with pytest.raises(ValueError, match="mode [IF].*L"):
        read_image(image)


# ------------------------------------------------------------------------------ sounds

WAVE = np.array([0, 0.5, -0.5, 0.25, -1, 0.75])  # all formats hold these as they are
INTEGERS = {1: lambda whole: (whole * 2 ** 7 + 128).astype(np.uint8).tobytes(),
            2: lambda whole: (whole * 2 ** 15).astype("<i2").tobytes(),
            3: lambda whole: b"".join(int(one * 2 ** 23).to_bytes(3, "little", signed=True)
                                      for one in whole.ravel()),
            4: lambda whole: (whole * 2 ** 31).astype("<i4").tobytes()}


def wav(width: int = 2, code: int = 1, channels: int = 1, rate: int = 16000,
        size: int | None = None, riff: int | None = None, extended: bool = False,
        before: bytes = b"", behind: bytes = b"", data: bytes | None = None) -> bytes:
    """A file by the book (Microsoft's RIFF). size, riff: what it says instead of the truth."""
    whole = np.repeat(WAVE[:, None], channels, 1)
    if data is None:
        data = INTEGERS[width](whole) if code == 1 else whole.astype(f"<f{width}").tobytes()
    head = struct.pack("<HHIIHH", 0xFFFE if extended else code, channels, rate,
                       rate * channels * width, channels * width, 8 * width)
    if extended:  # 22 bytes more: how many bits count, where the channels are, a GUID
        head += struct.pack("<HHIH14s", 22, 8 * width, 0, code,
                            bytes.fromhex("000000001000800000aa00389b71"))
    body = (b"WAVE" + before + b"fmt " + struct.pack("<I", len(head)) + head + b"data"
            + struct.pack("<I", len(data) if size is None else size) + data + behind)
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


UNKNOWN = 0xFFFFFFFF
ODD = b"LIST" + struct.pack("<I", 3) + b"odd\0"  # an odd length, and a byte that fills it up
FILES = {
    **{f"{8 * width} bits": dict(width=width) for width in INTEGERS},
    **{f"floats of {8 * width} bits": dict(width=width, code=3) for width in (4, 8)},
    **{f"extended, {width} and {code}": dict(width=width, code=code, extended=True)
       for width, code in ((2, 1), (3, 1), (4, 3))},
    "a stream by ffmpeg": dict(size=UNKNOWN, riff=UNKNOWN, before=ODD),
    "a stream of zeros": dict(size=0, riff=0),
    "a stream by sox": dict(size=0x7FFFF000, riff=0x7FFFF024),
    "24 bits in a stream": dict(width=3, size=UNKNOWN), "two channels": dict(channels=2),
    "six channels": dict(channels=6, width=3, extended=True),
    "an odd chunk in front": dict(before=ODD), "chunks behind": dict(behind=ODD),
    "an odd length": dict(width=1, data=INTEGERS[1](WAVE), behind=b"\0" + ODD),
    "a stream cut within a sample": dict(size=UNKNOWN, behind=b"\1"),
    "a file that lacks a sample": dict(size=14), "its head counted in": dict(size=12 + 44),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wav_file_of_any_coding_is_the_same_sound(name, tmp_path):
    file = wav(**FILES[name])
    (tmp_path / "said.wav").write_bytes(file)
    url = f"data:audio/wav;base64,{base64.b64encode(file).decode()}"
    for door in (file, url, tmp_path / "said.wav"):
        sound = read_sound(door, 16000)
        assert sound.dtype == np.float32 and sound.tolist() == WAVE.tolist()


@pytest.mark.parametrize(("file", "says"), [
    (wav(code=6, width=1, data=b"1"), "A-law"), (wav(code=7, width=1, data=b"1"), "code 7"),
    (wav(code=0x11, width=1, data=b"1"), "code 17"), (wav(data=b""), r"got \(0,\) numbers"),
    (wav(size=58), "it has 6 of 29 samples"), (wav(rate=0), "6 of 6 samples, 0 a second"),
    (wav(channels=0, data=b"12"), "0 channels"), (wav()[:44], r"got \(0,\) numbers"),
    (wav()[:36], "0,"), (wav()[:20], "16 bytes"), (b"RIFX" + wav()[4:], "does not begin"),
    (b"", "does not begin"), (wav(3, rate=1000, data=bytes(1801 * 1000)), "600,333 samples"),
    (wav(4, 3, data=np.float32([0, np.nan]).tobytes()), "nan"),
    (wav(4, 3, data=np.float32([0, 20000]).tobytes()), "20000")], ids=lambda one: str(one)[:14])
def test_a_wav_file_that_is_no_sound_is_named(file, says):
    with pytest.raises(ValueError, match=f"a sound .*{says}"):
        read_sound(file, 16000)


@pytest.mark.parametrize("samples", [
    WAVE, WAVE.astype(np.float32), WAVE.tolist(), (WAVE * 2 ** 15).astype(np.int16),
    (WAVE * 2 ** 15).astype(">i2"), (WAVE * 2 ** 31).astype(np.int32),
    (WAVE * 2 ** 7).astype(np.int8), (WAVE * 2 ** 7 + 128).astype(np.uint8),
    (WAVE * 2 ** 15 + 2 ** 15).astype(np.uint16), np.repeat(WAVE[:, None], 2, 1),
    (np.repeat(WAVE[:, None], 2, 1) * 2 ** 15).astype(np.int16)], ids=str)
def test_samples_of_any_dtype_are_the_same_sound(samples):
    assert read_sound((samples, 16000), 16000).tolist() == WAVE.tolist()


def test_channels_may_come_first():
    both = np.stack([np.tile(WAVE, 3), np.zeros(18)])
    assert read_sound((both, 16000), 16000).tolist() == (np.tile(WAVE, 3) / 2).tolist()
