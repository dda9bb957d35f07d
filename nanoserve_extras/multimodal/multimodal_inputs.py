"""Inputs of images and sounds: from a file, a URL or a message to a tower's tensors.

    PIL image, file, data: URL             ──read_image──► RGB, as a viewer shows it
    (samples, rate), WAV file, data: URL   ──read_sound──► one channel, from -1 to 1
                                                                     │ transformers' processor
    {"pixel_values": ...}, what the user's processor made ──────► MediaItem

Invariants: nothing is fetched, and no str names a file, because clients of the server send strings.
Bytes, pixels and seconds are checked before anything is decoded. The processor decides how an image
becomes tensors; there are no rules for families here.
"""

import base64
import hashlib
import io
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nanoserve_extras.base.messages import IMAGES, MediaError, Taken
from nanoserve_extras.base.words import in_words

MAX_BYTES, MAX_PIXELS = 20 * 2 ** 20, 50 * 10 ** 6  # the most for an image that is decoded here
MAX_SECONDS = 600  # the longest sound
HEAD = 44  # bytes of a WAV file's head, which some writers count in
# Of a WAV file: (1, whole numbers; or 3, floats; how many bytes).
SAMPLES = {(1, 1): "u1", (1, 2): "<i2", (1, 3): "<i4", (1, 4): "<i4", (3, 4): "<f4", (3, 8): "<f8"}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others have decoders that few people watch
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF's, to PIL's numbers of what undoes them
PARTS = {"image": IMAGES, "audio": ("audio_url", "audio", "input_audio")}  # a message's parts


@dataclass(eq=False)
class MediaItem:
    """An image, as its processor has made it. tensors: the arguments of `get_image_features`."""

    tensors: dict[str, torch.Tensor]
    num_tokens: int | None = None  # in the prompt, once it is known
    written: list[int] = field(default_factory=list)  # replaces the one placeholder, if known
    content: bytes = field(init=False)  # a hash of all that the tower gets

    def __post_init__(self):
        whole = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        self.content = whole.digest()


def from_tensors(given: Mapping, names: list[str]) -> MediaItem:
    """An item from a processor's tensors. names: the tower's arguments. Raises `ValueError`."""
    if names[0] not in given or not set(given) <= set(names):
        raise ValueError(f"an image or a sound that is a dict must hold {', '.join(names)}, got "
                         f"{', '.join(map(str, given))}")
    with in_words(f"an image's {', '.join(given)} must be tensors"):
        tensors = {name: torch.as_tensor(value).cpu() for name, value in given.items()}
    if not tensors[names[0]].float().isfinite().all():
        raise ValueError(f"{names[0]} must be finite numbers")
    return MediaItem(tensors)


def load_processor(folder: Path, hf_config: PreTrainedConfig) -> ProcessorMixin:
    """transformers' own, without its part for videos, which alone needs torchvision."""
    with in_words(f"{folder}: its processor can't be loaded, pass what a processor made"):
        class ForImages(PROCESSOR_MAPPING[type(hf_config)]):
            left_out = "video_processor"  # while the others are loaded

            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in super().get_attributes() if name != cls.left_out]

            @classmethod
            def from_args_and_dict(cls, args: list, given: dict, **more):
                cls.left_out = None
                if "video_processor" in (names := cls.get_attributes()):
                    args.insert(names.index("video_processor"), None)
                return super().from_args_and_dict(args, given, **more)

            def check_argument_for_proper_class(self, name: str, part: object):
                return part if part is None else super().check_argument_for_proper_class(name, part)

        return ForImages.from_pretrained(folder, trust_remote_code=False)


def read_image(image: object):
    """An image in any form as a viewer shows it: its first frame, turned as EXIF says, on white.
    Returns a PIL image in RGB. Raises `ValueError` if it is no image, or too large to decode."""
    with in_words("images need Pillow: pip install 'nanoserve[vision]'", ImportError):
        from PIL import Image
    image = from_url(image) if isinstance(image, str) else image
    with in_words(f"this is no image that can be read ({', '.join(FORMATS)} are)"):
        if isinstance(image, (Path, bytes)):
            image = Image.open(image if isinstance(image, Path) else io.BytesIO(image),
                               formats=FORMATS)  # reads its head alone
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels is too large: at most "
                                 f"{MAX_PIXELS:,} in all, send a smaller one")
        if not isinstance(image, Image.Image):
            raise ValueError("an image must be a PIL image, a pathlib.Path, bytes, a data: URL or "
                             f"what a processor made, got {image!r:.80}")
        image.load()
        turn = None
        with suppress(Exception):  # unreadable EXIF data turns no picture, and hides none
            turn = TURNS.get(image.getexif().get(0x0112))
        image = image if turn is None else image.transpose(turn)
        if image.mode[0] in "IF":  # PIL would cut these off at 255
            grays = np.asarray(image)
            most = grays.max()
            if image.mode == "F" or not 0 <= grays.min() <= most < 2 ** 16 or (
                    image.mode == "I" and 0 < most < 2 ** 8):  # 8 bits, or nearly black?
                raise ValueError(f"mode {image.mode} does not define white: convert the image to L")
            clear = grays == image.info.get("transparency")
            image = Image.fromarray(np.stack((grays >> 8, ~clear * 255), -1).astype(np.uint8))  # LA
        if image.has_transparency_data:  # PIL would show the hidden colour, which is mostly black
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def read_sound(sound: object, rate: int) -> np.ndarray:
    """(samples, their rate), or a WAV file (`Path`, bytes, data: URL), as (num_samples,) at `rate`:
    float32 of a full scale of 1, the mean of the channels. Raises `ValueError`."""
    sound = from_url(sound) if isinstance(sound, str) else sound
    with in_words("a sound must be (samples from -1 to 1, or int16, rate) or a WAV file (ffmpeg -i "
                  f"SOUND -c:a pcm_s16le SOUND.wav makes one), of at most {MAX_SECONDS} seconds"):
        samples, own = read_wav(sound) if isinstance(sound, (Path, bytes)) else sound
        samples = np.asarray(samples)
        if samples.dtype.kind in "iu" and samples.itemsize < 8:  # 8 has a list of Python's
            samples = samples / 2.0 ** (8 * samples.itemsize - 1) - (samples.dtype.kind == "u")
        if samples.ndim == 2:  # (2, n), or (n, 2) as in a file
            samples = samples.mean(0 if len(samples) < samples.shape[1] > 8 else 1)
        samples = samples.astype(np.float32)
        count = round(len(samples) / own * rate) if own > 0 else 0
        if samples.ndim != 1 or not 0 < count <= MAX_SECONDS * rate or not (
                np.abs(samples) < 10).all():  # some are louder than 1, and clip
            raise ValueError(f"got {samples.shape} numbers, {own} a second: {samples!s:.50}")
    # Band-limited: what both rates can hold of the spectrum stays, and no more.
    return samples if own == rate else np.fft.irfft(np.fft.rfft(samples)[:count // 2 + 1], count
                                                    ).astype(np.float32) * (count / len(samples))


def read_wav(file: Path | bytes) -> tuple[np.ndarray, int]:
    """(num_samples, num_channels) as they are stored, and their rate. A stream does not know its
    length: it says 0, or more than any file has, and goes on to its end. A file that lacks more
    than `HEAD` bytes was cut off."""
    file = file.read_bytes() if isinstance(file, Path) else file
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise ValueError("it does not begin as one")
    at, form = 12, b""
    while (name := file[at:at + 4]) not in (b"data", b""):
        size = int.from_bytes(file[at + 4:at + 8], "little")
        form = file[at + 8:at + 8 + size] if name == b"fmt " else form
        at += 8 + size + size % 2
    size, file = int.from_bytes(file[at + 4:at + 8], "little"), file[at + 8:]
    code, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    [code] = struct.unpack_from("<H", form, 24 if code == 0xFFFE else 0)  # an extended head
    width = -(-bits // 8)
    if (code, width) not in SAMPLES or not 0 < block == channels * width:
        raise ValueError(f"it has {channels} channels of {bits} bits, code {code}: only whole "
                         "numbers (1) and floats (3) are read, no A-law (6) or mu-law (7)")
    count = min(size or len(file), len(file)) // block
    if len(file) + HEAD < size < 0x7FFF0000 or count > MAX_SECONDS * rate:
        raise ValueError(f"it has {count:,} of {size // block:,} samples, {rate:,} a second")
    whole = np.frombuffer(file, np.uint8, count * block)
    if width == 3:  # and a zero below make four
        whole = np.pad(whole.reshape(-1, 3), ((0, 0), (1, 0))).ravel()
    return whole.view(SAMPLES[code, width]).reshape(-1, channels), rate


def from_url(url: str) -> bytes:
    """The bytes of a data: URL (RFC 2397), as browsers read one: schemes have no case, and base64
    may be written in lines, with %2B, and without its padding. Also with - and _ (base64url)."""
    head, comma, data = url.strip().partition(",")
    if not comma or head[:5].lower() != "data:":
        raise ValueError(f"an image or a sound that is a str must be data:...;base64,..., got "
                         f"{url[:60]!r}: nothing is fetched and no file is opened for it, send the "
                         "image or the sound itself")
    with in_words("an image or a sound in a data: URL is no base64"):
        found = unquote_to_bytes(data.partition("#")[0])
        if re.search(r"; *base64$", head, re.IGNORECASE):
            found = found.translate(bytes.maketrans(b"-_", b"+/"), b" \t\n\f\r").rstrip(b"=")
            found = base64.b64decode(found + b"=" * (-len(found) % 4), validate=True)
    if len(found) > MAX_BYTES:
        raise ValueError(f"an image or a sound of {len(found):,} bytes in a data: URL is too "
                         f"large: at most {MAX_BYTES:,}, send a smaller one")
    return found


def take_out(message: object, kind: str, found: list[object]) -> object:
    """A message whose images, or sounds, are taken out of its parts, and go into `found`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        name = part.get("type") if isinstance(part, dict) else None
        if name in PARTS[kind]:
            one = part.get(f"{kind}_url", part.get(name, part.get("source")))  # Anthropic's
            if one is None or isinstance(one, Mapping) and not {"url", "data"} & one.keys():
                raise MediaError(f"the message's {name} has no url and no data, and no files are "
                                 "kept here: send it itself, in base64 (what a processor made goes "
                                 f"to generate(), with its prompt_token_ids), got {part!r:.80}")
            if isinstance(one, Mapping):
                form = one.get("media_type", "audio/wav")
                one = one.get("url", f"data:{form};base64,{one.get('data')}")
            found.append(one)
            part = Taken(type=kind)
        parts.append(part)
    return message | {"content": parts}
