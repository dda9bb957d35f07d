"""Images in every form that they come in. The oracle makes its own pixels, by the image processor
that the checkpoint names, and writes the placeholders by hand."""

import base64
import io
import zlib
from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest
import torch
from architectures import Made
from checkpoints import assert_same_text
from seeing import PLACES, WRITTEN, Seer, make_with_processor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from nanoserve import LLM, SamplingParams
from nanoserve_extras.multimodal.multimodal import Multimodal

Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")
MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("processors"), make_with_processor)


@pytest.fixture(scope="module")
def engines(folders):
    with ExitStack() as stack:
        yield cache(lambda name, **more: stack.enter_context(LLM(
            folders[name], dtype="float32", num_gpu_blocks_override=32,
            limit_mm_per_prompt={"image": 2}, encoder_cache_tokens=60, **more)))


def photo(seed: int, height: int = 56, width: int = 70):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_url(image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def expected(folder, name: str, llm: LLM, text: str, images: list) -> tuple:
    """transformers' text. Each placeholder is written as often as its picture has features."""
    seer = Seer(name, folder)
    made = AutoImageProcessor.from_pretrained(folder)
    pictures = [dict(made(images=[image], return_tensors="pt")) for image in images]
    place = llm.tokenizer.convert_ids_to_tokens(seer.config.image_token_id)
    first, *rest = text.split(place)
    for picture, words in zip(pictures, rest, strict=True):
        first += place * seer.count(picture) + words
    ids = llm.tokenizer.encode(first)
    assert all(isinstance(one, torch.Tensor) for one in pictures[0].values())
    return seer.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}},
                         MAX_TOKENS)


@pytest.mark.parametrize("name", PLACES)
def test_images_of_all_forms_become_the_same_text(engines, folders, tmp_path, name):
    llm, images, file = engines(name), [photo(1), photo(2, 84, 28)], tmp_path / "one.png"
    images[0].save(file)
    text = f"What{PLACES[name]} is{PLACES[name]}?"
    tokens, gaps = expected(folders[name], name, llm, text, images)
    for first in (images[0], file, as_url(images[0])):
        [out] = llm.generate({"prompt": text, "multi_modal_data": {"image": [first, images[1]]}},
                             GREEDY, use_tqdm=False)
        assert_same_text(out.outputs[0].token_ids, tokens, gaps, str(first)[:20])
    assert out.prompt == text


@pytest.mark.parametrize("name", WRITTEN)
def test_processors_that_need_torchvision_are_exact_with_it(folders, name):
    """Oracle: the whole of transformers' processor, with all images of a prompt at once."""
    pytest.importorskip("torchvision", reason="docs/extras.md says how to install it")
    processor = AutoProcessor.from_pretrained(folders[name])
    model = AutoModelForImageTextToText.from_pretrained(folders[name]).eval()
    with LLM(folders[name], dtype="float32", num_gpu_blocks_override=64, max_num_batched_tokens=7,
             limit_mm_per_prompt={"image": 2}, snapshot_bytes=2**20) as llm:
        texts = []
        for images in ([photo(1)], [photo(2)], [photo(1), photo(3, 30, 40)], [photo(1)]):
            text = f"A{WRITTEN[name]} is" * len(images)
            made = processor(text=text, images=images, return_tensors="pt")
            with torch.no_grad():
                want = model.generate(**made, max_new_tokens=MAX_TOKENS, do_sample=False)
            [out] = llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY,
                                 use_tqdm=False)
            assert [*out.prompt_token_ids, *out.outputs[0].token_ids] == want[0].tolist()
            texts.append(out.outputs[0].token_ids)
        assert texts[0] != texts[1]  # they do look


@pytest.mark.parametrize("name", PLACES)
def test_a_chat_with_images_is_the_prompt_that_its_template_writes(engines, folders, name):
    llm, image = engines(name), photo(3)
    text = f"<s>system:Look.<|end|><s>user:Hi{PLACES[name]}?<|end|><s>assistant:"
    tokens, gaps = expected(folders[name], name, llm, text, [image])
    for part in (dict(type="image_url", image_url=dict(url=as_url(image))),
                 dict(type="image_url", image_url=as_url(image)),
                 dict(type="image_pil", image_pil=image), dict(type="image", image=image)):
        [out] = llm.chat([dict(role="system", content="Look."), dict(role="user", content=[
            dict(type="text", text="Hi"), part, dict(type="text", text="?")])], GREEDY,
            use_tqdm=False)
        assert_same_text(out.outputs[0].token_ids, tokens, gaps, str(part)[:40])


def test_an_image_that_the_template_does_not_show_is_named(engines):
    """Many templates show none in what a tool answers, or know texts alone."""
    part = dict(type="image", image=photo(1))
    chat = [dict(role="user", content="Look."), dict(role="tool", content=[part])]
    for template, says in (
            ("{% for m in messages %}{{ m.content if m.content is string else 'Hm' }}{% endfor %}",
             "1 images, and the chat template writes 0 placeholders"),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", "as Python does")):
        with pytest.raises(ValueError, match=says):
            engines("llava").chat(chat, GREEDY, chat_template=template)
    words = [dict(role="user", content=[part, dict(type="text", text="<image>")])]
    with pytest.raises(ValueError, match="1 images, .* 2 placeholders"):
        engines("llava").chat(words, GREEDY)
    [out] = engines("llava", split_special_tokens=True).chat(words, GREEDY, use_tqdm=False)
    assert out.prompt.count("<image>") == 2  # a text is no placeholder


def test_a_processors_tensors_have_no_place_in_a_chat(engines):
    """What stands in the prompt for them is known to that processor alone."""
    for part in (dict(type="image", image={"pixel_values": torch.zeros(1, 3, 28, 28)}),
                 dict(type="image_url", image_url={"detail": "low"})):
        with pytest.raises(ValueError, match="url.*generate"):
            engines("llava").chat([dict(role="user", content=[part])], GREEDY)


def test_one_step_does_not_encode_ten_images(engines):
    """What was encoded stays, whoever asks; what a step has begun others wait for."""
    llm = engines("llava")
    encoder, runs = llm.extra(Multimodal).encoder, []
    llm.generate({"prompt": "<image>", "multi_modal_data": {"image": photo(99)}}, GREEDY,
                 use_tqdm=False)  # the first of its shape is encoded with its request
    llm.hooks.launching.append(lambda step: runs.append(encoder.num_runs))
    before = encoder.num_runs
    prompts = [{"prompt": f"{i}<image>", "multi_modal_data": {"image": photo(100 + i)}}
               for i in range(10)]
    outs = llm.generate([*prompts, "Hi"], GREEDY, use_tqdm=False)
    llm.hooks.launching.pop()
    each = np.diff([before, *runs])
    assert sum(each) == 10 and max(each) == 4
    assert [llm.generate(one, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            for one in prompts] == [out.outputs[0].token_ids for out in outs[:10]]
    queries, hits, usage = llm.extra(Multimodal).metrics()
    assert queries.value - hits.value == encoder.num_runs and 0 < usage.value <= 1


BAD = [("http://example.org/a.png", "nothing is fetched"), ("/etc/passwd", "no file is opened"),
       ("data:image/png;base64,%%%", "no base64"), (7, "an image must be"),
       ("data:image/png;base64," + base64.b64encode(b"GIF89a?").decode(), "no image"),
       ({"pixels": 1}, "pixel_values"), ({"pixel_values": "a"}, "tensors"),
       ({"pixel_values": torch.full((1, 3, 28, 28), torch.nan)}, "finite"),
       ({"pixel_values": torch.zeros(3)}, "the tower can't read")]


@pytest.mark.parametrize(("image", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_no_image_is_named_and_nothing_is_lost(engines, image, says):
    llm = engines("llava")
    for image_or_list in (image, [photo(1), image]):
        with pytest.raises(ValueError, match=f"prompt 1: .*{says}"):
            llm.generate(["Hi", {"prompt": "<image><image>", "multi_modal_data": {
                "image": image_or_list}}], GREEDY, use_tqdm=False)
    assert len(llm.generate("Hi", GREEDY, use_tqdm=False)) == 1


def test_a_huge_image_is_refused_before_it_is_decoded(engines, monkeypatch):
    """A hundred megapixels of one colour are a file of 300 KB."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    head = (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (10_000).to_bytes(4) * 2 + b"\x08\x02\0\0\0")
    file = head + zlib.crc32(head[12:]).to_bytes(4) + b"\0\0\0\0IEND\xaeB`\x82"
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    with pytest.raises(ValueError, match="10000 x 10000 pixels"):
        engines("llava").chat([dict(role="user", content=[
            dict(type="image_url", image_url=url)])], GREEDY)


def test_placeholders_and_images_must_match(engines):
    llm, image = engines("qwen2.5-vl"), photo(1)
    large = dict(pixel_values=torch.zeros(64, 1176), image_grid_thw=torch.tensor([[1, 8, 8]]))
    for prompt, says in (
            ({"prompt_token_ids": 64 * [261], "multi_modal_data": {"image": large}},
             "64 tokens.*60"),
            ({"prompt": "Hi", "multi_modal_data": {"image": image}}, "0 placeholders"),
            ({"prompt": "<|image_pad|>"}, "1 placeholders.*0 images"),
            ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": 3 * [image]}},
             "3 images.*limit_mm_per_prompt.*2"),
            ({"prompt": "<|image_pad|>", "multi_modal_data": {"video": image}}, "is all that"),
            ({"prompt": "<|image_pad|>", "multi_modal_data": [image]}, "must be {'image'")):
        with pytest.raises(ValueError, match=says):
            llm.generate(prompt, GREEDY)
