"""How images come in: from a file, a URL or a chat's message to the tensors that a tower takes.

    PIL image, Path, "data:image/png;base64,..."  ──read_image──► PIL image
                                                                     │ transformers' processor
    {"pixel_values": ...}, what somebody's processor made ──────► Picture

Invariants: nothing is fetched, and no str names a file, because clients of the server send strings.
The bytes and pixels of what is decoded are bounded before. Not known here: prompts, steps. Road not
taken: rules of our own for what becomes of an image, family by family; the processor knows.
"""

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nanoserve.frontend.messages import Taken

MAX_BYTES, MAX_PIXELS = 20 * 2 ** 20, 50 * 10 ** 6  # of an image that is decoded here
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others have decoders that few people watch
PARTS = ("image_url", "image", "image_pil", "input_image")  # of a message, with an image


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
    if "pixel_values" not in given or not set(given) <= set(names):
        raise ValueError(f"an image that is a dict must hold {', '.join(names)}, got "
                         f"{', '.join(map(str, given))}")
    try:
        tensors = {name: torch.as_tensor(value).cpu() for name, value in given.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"an image's {', '.join(given)} must be tensors: {error}") from error
    if not tensors["pixel_values"].float().isfinite().all():
        raise ValueError("an image's pixel_values must be finite numbers")
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
        raise ValueError(f"{folder}: its processor for images can't be loaded ({error}): pass what "
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
    try:
        opened = Image.open(image, formats=FORMATS)  # reads its head alone
        if opened.width * opened.height <= MAX_PIXELS:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # whatever a decoder stumbles over
        raise ValueError(f"this is no image, or a damaged one ({', '.join(FORMATS)} are read): "
                         f"{error!s:.100}") from error
    raise ValueError(f"an image of {opened.width} x {opened.height} pixels is too large: at most "
                     f"{MAX_PIXELS:,} in all, send a smaller one")


def from_url(url: str) -> bytes:
    """The bytes of a data: URL."""
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"an image's url must be data:image/...;base64,..., got {url[:60]!r}: "
                         "nothing is fetched and no file is opened for a text, send the image")
    if len(data) > MAX_BYTES * 4 // 3:
        raise ValueError(f"an image of {len(data):,} characters is too large: at most "
                         f"{MAX_BYTES * 4 // 3:,}, send a smaller one")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"an image's url is no base64: {error}") from error


def take_out(message: object, images: list[object]) -> object:
    """A message whose images are taken out of its parts, and go into `images`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in PARTS:
            image = part.get("image_url", part.get(kind))
            images.append(image.get("url") if isinstance(image, dict) else image)
            part = Taken(type="image")
        parts.append(part)
    return message | {"content": parts}
