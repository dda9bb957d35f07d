"""Tiny random networks that see, pictures for them, and the oracle: transformers' `generate` with
the pixels of all pictures at once, one prompt at a time.

A picture is random pixels in the form that the network's own processor has. Its size is in patches.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from architectures import GQA
from checkpoints import byte_tokenizer
from hybrids import DELTA, HYBRIDS, VISION, WRAPPED

from benchmarks.models import (
    GEMMA4_VISION,
    IMAGE,
    KINDS,
    PIXTRAL,
    QWEN_VISION,
    WINDOWS,
    WRAPPINGS,
    randomise,
    wrap,
)

QWEN3_5 = wrap("qwen3_5", dict(
    GQA, **DELTA, head_dim=8, layer_types=["linear_attention", "full_attention"],
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 1],
                         partial_rotary_factor=0.75)), dict(
    QWEN_VISION, num_position_embeddings=16), **IMAGE)
NETWORKS: dict[str, Callable] = {
    **{name: WRAPPINGS[name] for name in (
        "qwen2.5-vl", "qwen3-vl", "smolvlm", "idefics3", "internvl", "llava")},
    "mistral3": wrap("mistral3", dict(GQA, model_type="mistral", head_dim=8, sliding_window=None),
                     PIXTRAL, image_token_index=250),
    "qwen2-vl": wrap("qwen2_vl", WRAPPINGS["qwen2-vl"]().text_config.to_dict(), dict(
        QWEN_VISION, hidden_size=32, embed_dim=16), **IMAGE),
    "qwen3.5": QWEN3_5,
    "lfm2-vl": lambda: transformers.Lfm2VlConfig(
        text_config=HYBRIDS["lfm2"]().to_dict(), vision_config=dict(VISION, patch_size=2),
        image_token_id=250, projector_hidden_size=16, downsample_factor=2),
    # Tokens of an image see each other; of 4 x 4 in a window of 13, whose last don't see the first.
    "gemma3": wrap("gemma3", dict(
        WINDOWS, query_pre_attn_scalar=24, num_hidden_layers=3, layer_types=[*KINDS, KINDS[0]]),
        dict(VISION, image_size=56, patch_size=14), mm_tokens_per_image=16, **IMAGE),
    # In its layers with a window alone. Layers that share keys, an embedding for each layer.
    "gemma4": wrap("gemma4", dict(
        WINDOWS, num_hidden_layers=5, layer_types=[*KINDS, *KINDS, KINDS[1]],
        num_kv_shared_layers=1, global_head_dim=16, num_global_key_value_heads=1,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=260,
        use_bidirectional_attention="vision"), dict(
        GEMMA4_VISION, pooling_kernel_size=2, patch_size=2, position_embedding_size=64), **IMAGE),
}
MUTUAL = ("gemma3", "gemma4")
PADDED = ("pixel_values", "pixel_attention_mask", "input_features", "input_features_mask")


def make_seeing(name: str, folder: Path) -> Path:
    config = (WRAPPINGS | WRAPPED | NETWORKS)[name]()
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    randomise(model)
    with torch.no_grad():  # words count beside pictures; Gemma makes them larger by itself
        model.get_input_embeddings().weight *= 1 if name in MUTUAL else 10
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Seer:
    """The oracle of one checkpoint; it also makes pictures and prompts for it."""

    kind, auto = "image", transformers.AutoModelForImageTextToText

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.model = self.auto.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config
        self.token_id = getattr(self.config, f"{self.kind}_token_id")

    def picture(self, height: int, width: int, seed: int) -> dict:
        """Of height x width patches, where the network takes them as they are."""
        generator = torch.Generator().manual_seed(seed)
        size = torch.tensor([[height, width]])
        vision = self.config.vision_config

        def pixels(*shape):
            return dict(pixel_values=torch.randn(shape, generator=generator))

        if self.name.startswith("qwen"):
            patch = 3 * vision.temporal_patch_size * vision.patch_size ** 2
            return pixels(height * width, patch) | dict(
                image_grid_thw=F.pad(size, (1, 0), value=1))
        if self.name == "mistral3":
            return pixels(1, 3, *(14 * size[0])) | dict(image_sizes=14 * size)
        if self.name == "lfm2-vl":
            return pixels(1, height * width, 3 * vision.patch_size ** 2) | dict(
                spatial_shapes=size, pixel_attention_mask=torch.ones(1, height * width).long())
        if self.name == "gemma4":  # four of its patches are a token; some are padding
            at = torch.cartesian_prod(torch.arange(2 * width), torch.arange(2 * height))
            at = F.pad(at, (0, 0, 0, 96 - len(at)), value=-1)
            return pixels(1, 96, 3 * vision.patch_size ** 2) | dict(image_position_ids=at[None])
        if self.name == "gemma3":
            return pixels(1, 3, 56, 56)
        # In tiles of 28 x 28; of LLaVA it is one.
        tiles = 1 if self.name == "llava" else height // 2
        return pixels(*[1] * (self.name in ("smolvlm", "idefics3")), tiles, 3, 28, 28)

    @torch.no_grad()
    def count(self, picture: dict) -> int:
        features = getattr(self.model, f"get_{self.kind}_features")(
            **picture, return_dict=True).pooler_output
        return sum(one.numel() for one in features) // self.config.text_config.hidden_size

    def prompt(self, *pictures: dict, seed: int = 0, before: int = 9, behind: int = 2) -> dict:
        """Some words, then each picture with some words behind it."""
        rng = random.Random(seed)
        ids = [rng.randrange(200) for _ in range(before)]
        for picture in pictures:
            ids += [self.token_id] * self.count(picture)
            ids += [rng.randrange(200) for _ in range(behind)]
        prompt = dict(prompt_token_ids=ids)
        return prompt | dict(multi_modal_data={self.kind: [*pictures]}) if pictures else prompt

    @torch.no_grad()
    def generate(self, prompt: dict, max_tokens: int, **options) -> tuple[list[int], list[float]]:
        """As `checkpoints.Reference.generate`. options: further ones of transformers'."""
        ids = torch.tensor([prompt["prompt_token_ids"]])
        pictures = prompt.get("multi_modal_data", {}).get(self.kind, [])
        given = {name: self.join([one[name] for one in pictures], name)
                 for name in (pictures[0] if pictures else ())}
        if pictures and (self.name in MUTUAL or hasattr(self.model.base_model, "get_rope_index")):
            kind = "token_type_ids" if self.name == "gemma3" else "mm_token_type_ids"
            given[kind] = (ids == self.token_id).int()
        out = self.model.generate(ids, max_new_tokens=max_tokens, do_sample=False, **given,
                                  return_dict_in_generate=True, output_logits=True, **options)
        best = [logits[0].topk(2).values for logits in out.logits]
        return out.sequences[0, ids.shape[1]:].tolist(), [float(b[0] - b[1]) for b in best]

    def join(self, parts: list[torch.Tensor], name: str) -> torch.Tensor:
        """The tensors of several pictures as their processor joins them, padded where need be."""
        if self.name in ("mistral3", "lfm2-vl", "qwen3-asr", "glm-asr") and name in PADDED:
            most = torch.tensor([part.shape for part in parts]).amax(0)
            parts = [F.pad(part, [n for whole, own in zip(
                most.tolist()[:0:-1], part.shape[:0:-1], strict=True) for n in (0, whole - own)])
                for part in parts]
        return torch.cat(parts, 1 if self.name in ("smolvlm", "idefics3") else 0)


# ---------------------------------------------------- networks with a processor of their own

TOKENS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
          "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_start|>", "<|image_end|>",
          "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<img>", "</img>",
          "<IMG_CONTEXT>", "<video>", "<fake_token_around_image>", "<global-img>",
          "<end_of_utterance>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
          "<|image|>", "<|image>", "<image|>")
TEMPLATE = """{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}{%
else %}{% for p in m.content %}{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{%
endfor %}{% endif %}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{%
endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"""
PLACES = {"llava": "<image>", "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>"}
WRITTEN = {"mistral3": "[IMG]", "lfm2-vl": "<image>",  # with ends of lines, and of tiles
           "gemma3": "<start_of_image>", "gemma4": "<|image|>"}
SOFT = {"gemma3": "<image_soft_token>"}  # in a place that is written otherwise
TILED = {"internvl": "<IMG_CONTEXT>", "idefics3": "<image>", "smolvlm": "<image>"}
PREPROCESSORS = {
    "internvl": dict(image_processor_type="GotOcr2ImageProcessorFast", crop_to_patches=True,
                     processor_class="InternVLProcessor", size=dict(height=28, width=28)),
    "idefics3": dict(image_processor_type="Idefics3ImageProcessor", do_image_splitting=False,
                     processor_class="Idefics3Processor", max_image_size=dict(longest_edge=28)),
    "smolvlm": dict(image_processor_type="SmolVLMImageProcessor", do_image_splitting=False,
                    processor_class="SmolVLMProcessor", max_image_size=dict(longest_edge=28)),
    "mistral3": dict(image_processor_type="PixtralImageProcessor", patch_size=14,
                     processor_class="PixtralProcessor", size=dict(longest_edge=112)),
    "lfm2-vl": dict(image_processor_type="Lfm2VlImageProcessor", encoder_patch_size=2, tile_size=16,
                    processor_class="Lfm2VlProcessor", min_image_tokens=4, max_image_tokens=16,
                    max_tiles=2),
    "llava": dict(image_processor_type="CLIPImageProcessor", processor_class="LlavaProcessor",
                  size=dict(shortest_edge=28), crop_size=dict(height=28, width=28)),
    "gemma3": dict(image_processor_type="Gemma3ImageProcessor", processor_class="Gemma3Processor",
                   size=dict(height=56, width=56)),
    "gemma4": dict(image_processor_type="Gemma4ImageProcessor", processor_class="Gemma4Processor",
                   max_soft_tokens=70, patch_size=2, pooling_kernel_size=2),
    "qwen2.5-vl": dict(image_processor_type="Qwen2VLImageProcessor", patch_size=14, merge_size=1,
                       processor_class="Qwen2_5_VLProcessor", min_pixels=784, max_pixels=6000,
                       temporal_patch_size=2)}
PROCESSORS = {"llava": dict(patch_size=14, vision_feature_select_strategy="default",
                            image_token="<image>", num_additional_image_tokens=1),
              "mistral3": dict(patch_size=14, spatial_merge_size=2),
              "internvl": dict(image_seq_length=1), "idefics3": dict(image_seq_len=1),
              "smolvlm": dict(image_seq_len=1), "gemma3": dict(image_seq_length=16),
              "gemma4": dict(image_seq_length=70, feature_extractor=dict(
                  feature_extractor_type="Gemma4AudioFeatureExtractor"))}
NAMED = {"internvl": dict(start_image_token="<img>", end_image_token="</img>",
                          context_image_token="<IMG_CONTEXT>", video_token="<video>"),
         "gemma3": dict(boi_token="<start_of_image>", eoi_token="<end_of_image>",
                        image_token="<image_soft_token>"),
         "gemma4": dict(boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>",
                        boa_token="<video>", eoa_token="<video>", audio_token="<video>")}


def make_with_processor(name: str, folder: Path) -> Path:
    """With a tokenizer that has placeholders, a chat template that writes them, and the files of
    the processor. The vocabulary is larger by the new tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS]})
    place = (PLACES | WRITTEN | TILED)[name]
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    config = NETWORKS[name]()
    config.text_config.vocab_size = config.text_config.vocab_size_per_layer_input = 290
    config.image_token_id = tokenizer.convert_tokens_to_ids(SOFT.get(name, place.removeprefix(
        "<|vision_start|>").removesuffix("<|vision_end|>")))
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    randomise(model)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 10
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(
        extra_special_tokens=NAMED.get(name, {}))))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    (folder / "processor_config.json").write_text(json.dumps(dict(
        processor_class=PREPROCESSORS[name]["processor_class"]) | PROCESSORS.get(name, {})))
    return folder
