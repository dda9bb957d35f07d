"""How images and sounds come in: from a file, a URL or a message to the tensors a tower takes.

    PIL image, Path, "data:image/png;base64,..."  ──read_image──► PIL image
    (samples, rate), WAV file                     ──read_sound──► samples
                                                                     │ transformers' processor
    {"pixel_values": ...}, what somebody's processor made ──────► Picture

Invariants: nothing is fetched, and no str names a file, because clients of the server send strings.
The bytes, pixels and seconds of what is decoded are bounded before. Not known here: prompts, steps.
Road not taken: rules of our own for what becomes of an image, by family; the processor knows.
"""

import base64
import hashlib
import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nanoserve.frontend.messages import Taken
from nanoserve.words.rules import in_words

MAX_BYTES, MAX_PIXELS = 20 * 2 ** 20, 50 * 10 ** 6  # of an image that is decoded here
MAX_SECONDS = 600  # of a sound
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others have decoders that few people watch
PARTS = {"image": ("image_url", "image", "image_pil", "input_image"),  # of a message
         "audio": ("audio_url", "audio", "input_audio")}


@dataclass(eq=False)
class Picture:
    """What a processor has made of an image. tensors: the arguments of `get_image_features`."""

    tensors: dict[str, torch.Tensor]
    num_tokens: int = 0  # of the prompt, that its features stand for
    written: list[int] = field(default_factory=list)  # what its one placeholder becomes, if known
    content: bytes = field(init=False)  # a hash of all that the tower gets

    def __post_init__(self):
        whole = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        self.content = whole.digest()


def from_tensors(given: Mapping, names: list[str]) -> Picture:
    """Of what a processor made. names: what the tower takes. Raises `ValueError`."""
    if names[0] not in given or not set(given) <= set(names):
        raise ValueError(f"an image or a sound that is a dict must hold {', '.join(names)}, got "
                         f"{', '.join(map(str, given))}")
    with in_words(f"an image's {', '.join(given)} must be tensors"):
        tensors = {name: torch.as_tensor(value).cpu() for name, value in given.items()}
    if not tensors[names[0]].float().isfinite().all():
        raise ValueError(f"{names[0]} must be finite numbers")
    return Picture(tensors)


def load_processor(folder: Path, hf_config: PreTrainedConfig) -> ProcessorMixin:
    """transformers' own, without its part for videos, which alone needs torchvision."""
    try:
        kind = PROCESSOR_MAPPING[type(hf_config)]
        parts = kind.get_attributes()
        if "video_processor" not in parts:
            return kind.from_pretrained(folder)

        class ForImages(kind):
            def __init__(self, *args, **options):
                super().__init__(*args, video_processor=None, **options)

            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in parts if name != "video_processor"]

        return ForImages.from_pretrained(folder)
    except Exception as error:  # transformers raises whatever its parts raise
        raise ValueError(f"{folder}: its processor can't be loaded ({error}): pass what "
                         "a processor made, see docs/vision.md") from error


def read_image(image: object):
    """A PIL image as it is, or that of a file (`Path`) or a data: URL, decoded. Raises `ValueError`
    for anything else, and for what is too large to be decoded."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError("images need Pillow: pip install 'nanoserve[vision]'") from None
    if isinstance(image, Image.Image):
        return image
    image = io.BytesIO(from_url(image)) if isinstance(image, str) else image
    if not isinstance(image, (Path, io.BytesIO)):
        raise ValueError("an image must be a PIL image, a pathlib.Path, a data: URL or what a "
                         f"processor made, got {image!r:.80}")
    with in_words(f"this is no image, or a damaged one ({', '.join(FORMATS)} are read)"):
        opened = Image.open(image, formats=FORMATS)  # reads its head alone
        if opened.width * opened.height <= MAX_PIXELS:
            return ImageOps.exif_transpose(opened).convert("RGB")
    raise ValueError(f"an image of {opened.width} x {opened.height} pixels is too large: at most "
                     f"{MAX_PIXELS:,} in all, send a smaller one")


def read_sound(sound: object, rate: int) -> np.ndarray:
    """(samples, their rate), or a WAV file (`Path`, bytes, data: URL), as (num_samples,) at `rate`.
    Raises `ValueError`."""
    sound = from_url(sound) if isinstance(sound, str) else sound
    try:
        samples, own = read_wav(sound) if isinstance(sound, (Path, bytes)) else sound
        samples = np.asarray(samples, dtype=np.float32)
        count = round(len(samples) / own * rate)
        if samples.ndim != 1 or not 0 < count <= MAX_SECONDS * rate or not np.isfinite(
                samples).all():
            raise ValueError(f"got {samples.shape} numbers, {own} a second")
    except (TypeError, ValueError, ArithmeticError, EOFError, OSError, wave.Error) as error:
        raise ValueError("a sound must be (samples, sampling_rate), finite and with one channel, or"
                         " a WAV file of 16 bits (ffmpeg -i SOUND -c:a pcm_s16le SOUND.wav makes "
                         f"one), of at most {MAX_SECONDS} seconds: {error!s:.100}") from error
    # Band-limited: what both rates can hold of the spectrum stays, and no more.
    return samples if own == rate else np.fft.irfft(np.fft.rfft(samples)[:count // 2 + 1], count
                                                    ).astype(np.float32) * (count / len(samples))


def read_wav(file: Path | bytes) -> tuple[np.ndarray, int]:
    """The mean of its channels, from -1 to 1, and their rate. Its length is known before."""
    with wave.open(str(file) if isinstance(file, Path) else io.BytesIO(file)) as opened:
        channels, width, rate, count, *_ = opened.getparams()
        if width != 2 or count > MAX_SECONDS * rate:
            raise wave.Error(f"it has {count / rate:,.0f} seconds of {8 * width} bits")
        whole = np.frombuffer(opened.readframes(count), "<i2").reshape(-1, channels)
        return whole.mean(1) / 2 ** 15, rate


def from_url(url: str) -> bytes:
    """The bytes of a data: URL."""
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"an image or a sound that is a str must be data:...;base64,..., got "
                         f"{url[:60]!r}: nothing is fetched and no file is opened for it, send the "
                         "image or the sound itself")
    if len(data) > MAX_BYTES * 4 // 3:
        raise ValueError(f"a data: URL of {len(data):,} characters is too large: at most "
                         f"{MAX_BYTES * 4 // 3:,}, send a smaller one")
    with in_words("a data: URL is no base64"):
        return base64.b64decode(data, validate=True)


def take_out(message: object, kind: str, found: list[object]) -> object:
    """A message whose images, or sounds, are taken out of its parts, and go into `found`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        name = part.get("type") if isinstance(part, dict) else None
        if name in PARTS[kind]:
            one = part.get(f"{kind}_url", part.get(name))
            if isinstance(one, Mapping):
                if not {"url", "data"} & one.keys():
                    raise ValueError(f"the message's {name} has no url, and what a processor made "
                                     "goes with its prompt_token_ids: use generate() for it")
                one = one.get("url", f"data:audio/wav;base64,{one.get('data')}")
            found.append(one)
            part = Taken(type=kind)
        parts.append(part)
    return message | {"content": parts}
