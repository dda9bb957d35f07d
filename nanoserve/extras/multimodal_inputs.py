"""How images come in: from a file to the tensors of a tower, and the placeholders of a prompt.

    PIL image, Path, "data:image/png;base64,..."  ──read_image──► PIL image, its size checked first
                                                                      │ transformers' processor
    {"pixel_values": ..., ...}  ── what somebody's processor made ──► Picture ──► its placeholders
    conversation with image parts ──render_chat──► prompt and images, in the order of the chat

A prompt has one placeholder for each image; it becomes as many as the image has features, with what
the processor writes around them. A prompt that has all of them already is taken as it is.

Invariants: a request has as many placeholders as its pictures have features, or it is refused, so
no step meets a picture that doesn't fit. Nothing is fetched, and no str names a file: a client of
the server sends strings, and could read what it must not. What is decoded is bounded before.

Not known here: steps, the encoder cache. Road not taken: rules of our own for how many tokens an
image has, family by family; the processor says it, or the tower.
"""

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nanoserve.frontend.inputs import InputProcessor
from nanoserve.frontend.prompts import Prompt
from nanoserve.frontend.request import Request

MAX_BYTES, MAX_PIXELS = 20 * 2 ** 20, 50 * 10 ** 6  # of an image that is sent, before it is decoded
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others have decoders that few people watch
IMAGE_PARTS = ("image_url", "image", "image_pil", "input_image")  # of a chat's messages


@dataclass(eq=False)
class Picture:
    """What a processor has made of an image. tensors: the arguments of `get_image_features`."""

    tensors: dict[str, torch.Tensor]
    num_tokens: int = 0  # of the prompt, that its features stand for
    written: list[int] = field(default_factory=list)  # what its one placeholder becomes; or nothing
    content: bytes = field(init=False)  # a hash of all that the tower gets

    def __post_init__(self):
        whole = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        self.content = whole.digest()


class Viewer(Protocol):
    """What looks at pictures: `multimodal.Multimodal`."""

    token_id: int  # of a placeholder
    budget: int  # tokens that the encoder cache holds
    hf_config: PreTrainedConfig

    def takes(self) -> list[str]: ...
    def count(self, picture: Picture) -> int: ...
    def take(self, request: Request, pictures: list[Picture]) -> None: ...


class MultimodalInputs(InputProcessor):
    """Reads prompts with images, besides all others. folder: the checkpoint's."""

    def __init__(self, viewer: Viewer, folder: Path, *args):
        super().__init__(*args)
        self.viewer, self.folder = viewer, folder

    def process(self, request_id: str, prompt: Prompt, *args) -> Request:
        """As for texts; raises `ValueError` for what is no image, too large, or one too many."""
        pictures: list[Picture] = []
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            rest = dict(prompt)
            pictures = [self.read_picture(one) for one in self.images_in(
                rest.pop("multi_modal_data"))]
            text, ids = self.read_prompt(rest)
            prompt = {"prompt": text, "prompt_token_ids": self.expand(ids, pictures)}
        request = super().process(request_id, prompt, *args)
        self.check_places(request.prompt_token_ids, pictures)
        if pictures:
            self.viewer.take(request, pictures)
        return request

    def images_in(self, data: object) -> list:
        if not isinstance(data, Mapping) or set(data) != {"image"}:
            raise ValueError(f"multi_modal_data={str(data)[:80]} must be {{'image': ...}}: this "
                             "model sees images, and neither video nor sound")
        images, most = data["image"], self.config.limit_mm_per_prompt["image"]
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        if len(images) > most:
            raise ValueError(f"the prompt has {len(images)} images, and limit_mm_per_prompt allows "
                             f"{most}: raise it")
        return images

    # --------------------------------------------------------------- pictures

    def read_picture(self, image: object) -> Picture:
        """An image in any form."""
        if isinstance(image, Mapping):
            return self.read_tensors(image)
        image = read_image(image)
        made = self.processor(text=self.processor.image_token, images=[image], return_tensors="pt",
                              return_text_replacement_offsets=True)
        written = self.processor.tokenizer.encode(
            made["text_replacement_offsets"][0][0]["replacement"], add_special_tokens=False)
        return Picture({name: made[name] for name in self.viewer.takes() if name in made},
                       written.count(self.viewer.token_id), written)

    @cached_property
    def processor(self) -> ProcessorMixin:
        """transformers' own, without its part for videos, which needs torchvision."""
        kind = PROCESSOR_MAPPING[type(self.viewer.hf_config)]
        others = [name for name in kind.get_attributes() if name != "video_processor"]

        class ForImages(kind):
            def __init__(self, *args, **options):
                super().__init__(*args, video_processor=None, **options)

            @classmethod
            def get_attributes(cls) -> list[str]:
                return others

        try:
            return (kind if len(others) == len(kind.get_attributes()) else
                    ForImages).from_pretrained(self.folder)
        except Exception as error:  # transformers raises whatever its parts raise
            raise ValueError(f"{self.folder}: its processor for images can't be loaded ({error}): "
                             "pass what a processor made, see docs/vision.md") from error

    def read_tensors(self, given: Mapping) -> Picture:
        """What a processor made. How many tokens it stands for only the tower can say."""
        names = self.viewer.takes()
        if "pixel_values" not in given or not set(given) <= set(names):
            raise ValueError(f"an image that is a dict must hold {', '.join(names)}, got "
                             f"{', '.join(map(str, given))}")
        try:
            tensors = {name: torch.as_tensor(value).cpu() for name, value in given.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"an image's {', '.join(given)} must be tensors: {error}") from error
        if not tensors["pixel_values"].float().isfinite().all():
            raise ValueError("an image's pixel_values must be finite numbers")
        picture = Picture(tensors)
        try:
            picture.num_tokens = self.viewer.count(picture)
        except Exception as error:  # whatever a tower stumbles over
            raise ValueError(f"the tower can't read this image: {error!s:.200}") from error
        return picture

    # ----------------------------------------------------------- placeholders

    def expand(self, ids: list[int], pictures: list[Picture]) -> list[int]:
        """One placeholder for each image becomes what the processor writes in its place."""
        if ids.count(self.viewer.token_id) != len(pictures) or not all(
                picture.written for picture in pictures):
            return ids
        written = iter(pictures)
        return [one for id_ in ids for one in (
            next(written).written if id_ == self.viewer.token_id else [id_])]

    def check_places(self, ids: list[int], pictures: list[Picture]) -> None:
        budget, needed = self.viewer.budget, sum(one.num_tokens for one in pictures)
        for picture in pictures:
            if picture.num_tokens > budget:
                raise ValueError(f"an image of {picture.num_tokens} tokens does not fit into the "
                                 f"encoder cache of {budget}: make it smaller, or raise "
                                 "encoder_cache_tokens")
        if (found := ids.count(self.viewer.token_id)) != needed:
            raise ValueError(f"the prompt has {found} placeholders (token {self.viewer.token_id}), "
                             f"and its {len(pictures)} images stand for {needed}: write as many, "
                             "or one for each image")

    def render_chat(self, conversation: list[dict], **template_options) -> dict:
        """As for texts. Messages with images are written in parts, as such templates expect it."""
        images: list[object] = []
        messages = [with_parts(message, images) for message in conversation] if isinstance(
            conversation, (list, tuple)) and all(map(is_message, conversation)) else []
        if not images:
            return super().render_chat(conversation, **template_options)
        tokenizer = self.tokenizer_for("chat()")
        template_options.setdefault("chat_template", tokenizer.chat_template
                                    or self.processor.chat_template)
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **template_options)
        except Exception as error:  # a template is a program of its own
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        for message in messages:
            for part in message["content"]:
                if part.get("text", "").strip() not in text:
                    raise ValueError("the chat template does not write this message: "
                                     f"{str(message)[:80]}")
        return {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False),
                "multi_modal_data": {"image": images}}


# ------------------------------------------------------------------ what is sent


def is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def with_parts(message: dict, images: list[object]) -> dict:
    """A message whose content is a list of parts, without the images, which go into `images`."""
    content, parts = message.get("content"), []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            image = part.get("image_url", part.get(kind))
            images.append(image.get("url") if isinstance(image, dict) else image)
            part = {"type": "image"}
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a message's parts must be text or images, got {part!r:.80}")
        parts.append(part)
    return message | {"content": parts}


def read_image(image: object):
    """A PIL image, as it is; or that of a file (`Path`) or a data: URL, decoded. Raises
    `ValueError` for anything else, and for what is too large to be decoded."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError("images need Pillow: pip install 'nanoserve[vision]'") from None
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str):
        image = io.BytesIO(from_url(image))
    if not isinstance(image, (Path, io.BytesIO)):
        raise ValueError(f"an image must be a PIL image, a pathlib.Path, a data: URL or what a "
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
                         "nothing is fetched and no file is opened for a text, send the image "
                         "itself")
    if len(data) > MAX_BYTES * 4 // 3:
        raise ValueError(f"an image of {len(data):,} characters is too large: at most "
                         f"{MAX_BYTES * 4 // 3:,}, send a smaller one")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image's url is no base64: {error}") from error
