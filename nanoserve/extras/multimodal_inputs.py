"""How pictures come in: checked, counted, and matched with the placeholders of their prompt.

    {"prompt_token_ids": [...], "multi_modal_data": {"image": {"pixel_values": ..., ...}}}

A picture is what a processor of transformers' has made of an image: the arguments of the network's
`get_image_features`. Several stand in a list, in the order of the prompt's placeholders.

Invariant: a request has as many placeholders as its pictures have features, or it is refused. So no
step ever meets a picture that doesn't fit. Not known here: steps, the encoder cache.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nanoserve.frontend.inputs import InputProcessor
from nanoserve.frontend.prompts import Prompt
from nanoserve.frontend.request import Request


@dataclass(eq=False)
class Picture:
    """What a processor has made of an image. tensors: the arguments of `get_image_features`."""

    tensors: dict[str, torch.Tensor]
    num_tokens: int = 0  # of the prompt, that its features stand for
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

    def takes(self) -> list[str]: ...
    def count(self, picture: Picture) -> int: ...
    def take(self, request: Request, pictures: list[Picture]) -> None: ...


class MultimodalInputs(InputProcessor):
    """Reads prompts with images, besides all others."""

    def __init__(self, viewer: Viewer, *args):
        super().__init__(*args)
        self.viewer = viewer

    def process(self, request_id: str, prompt: Prompt, *args) -> Request:
        """As for texts; raises `ValueError` for what is no image, too large, or one too many."""
        pictures: list[Picture] = []
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            data = prompt["multi_modal_data"]
            prompt = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
            pictures = [self.read_picture(one) for one in self.images_in(data)]
        request = super().process(request_id, prompt, *args)
        self.check_places(request.prompt_token_ids, pictures)
        if pictures:
            self.viewer.take(request, pictures)
        return request

    def images_in(self, data: object) -> list:
        most = self.config.limit_mm_per_prompt["image"]
        if not isinstance(data, Mapping) or not data.keys() <= {"image"}:
            raise ValueError(f"multi_modal_data={str(data)[:80]} must be {{'image': ...}}: this "
                             "model sees images, and neither video nor sound")
        images = data["image"]
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        if len(images) > most:
            raise ValueError(f"the prompt has {len(images)} images, and limit_mm_per_prompt allows "
                             f"{most}: raise it")
        return images

    def read_picture(self, image: object) -> Picture:
        """An image in any form."""
        if not isinstance(image, Mapping):
            raise ValueError(f"an image must be what a processor made of it, got {image!r:.80}")
        return self.read_tensors(image)

    def read_tensors(self, given: Mapping) -> Picture:
        """What a processor made. How many tokens it stands for only the tower can say."""
        names = self.viewer.takes()
        if "pixel_values" not in given or not given.keys() <= set(names):
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
                             "in the places of the images")
