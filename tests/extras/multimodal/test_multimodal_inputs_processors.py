"""Processors as they lie in folders: with the arguments that their files give them, with those of
another model, with code of their own. Oracle: transformers' image processor and `generate`, with
placeholders that are written by hand."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from architectures import Made
from checkpoints import assert_same_text, byte_tokenizer
from hearing import make_hearing
from seeing import NAMED, NETWORKS, PLACES, TILED, TOKENS, Seer, make_seeing, make_with_processor
from small_engine import drain

from nanoserve import LLM, SamplingParams
from nanoserve.detokenizer import load_tokenizer
from nanoserve_extras.multimodal.multimodal import Multimodal
from nanoserve_extras.multimodal.multimodal_inputs import load_processor
from nanoserve_extras.tools.verify import load_reference

Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")
GREEDY = SamplingParams(temperature=0, max_tokens=8)
AROUND = {"internvl": ("<img>", "</img>"), **dict.fromkeys(("idefics3", "smolvlm"), (
    "<fake_token_around_image><global-img>", "<fake_token_around_image>"))}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("processors"), make_with_processor)


def start(folder, **options) -> LLM:
    return LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=32, block_size=4,
                              limit_mm_per_prompt={"image": 2}) | options)


def photo(seed: int, height: int = 28, width: int = 56):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def change(folder, there, name: str, **entries):
    """A copy of the folder, in one of whose files some entries are others."""
    shutil.copytree(folder, there)
    file = there / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return there


@pytest.mark.parametrize("name", TILED)
def test_the_files_arguments_count(folders, tmp_path, name):
    """How many tokens a tile is stands in processor_config.json alone: here 1, by default 256 and
    169. A folder with another model's number refuses images, and nobody else suffers."""
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor asks for it")
    seer, place, image = Seer(name, folders[name]), TILED[name], photo(1)
    made = transformers.AutoImageProcessor.from_pretrained(folders[name])(
        images=[image], return_tensors="pt")
    picture = {key: made[key] for key in ("pixel_values", "pixel_attention_mask") if key in made}
    first, last = AROUND[name]
    ids = load_tokenizer(folders[name]).encode(f"A{first}{place * seer.count(picture)}{last}B")
    text = seer.generate(dict(prompt_token_ids=ids, multi_modal_data={"image": [picture]}), 8)
    prompt = {"prompt": f"A{place}B", "multi_modal_data": {"image": image}}
    with start(folders[name]) as llm:
        [out] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert out.prompt_token_ids == ids
        assert_same_text(out.outputs[0].token_ids, *text, name)
        [alone] = llm.generate("Hi", GREEDY, use_tqdm=False)
    other = change(folders[name], tmp_path / name, "processor_config.json",
                   image_seq_length=3, image_seq_len=3)
    with start(other) as llm:
        llm.add_request("text", "Hi", GREEDY)
        llm.step()
        for _ in range(2):  # it is not forgotten
            with pytest.raises(ValueError, match=r"(9|3) placeholders for (3|1) features"):
                llm.add_request("image", prompt, GREEDY)
        assert drain(llm)["text"][-1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("name, place, breaks", [
    ("gemma3", "<start_of_image>", "\n"), ("gemma3", "<start_of_image>", " "),
    ("gemma4", "<|image|>", "\n")])
def test_a_place_that_is_another_token_among_line_breaks(folders, tmp_path, name, place, breaks):
    """What a processor writes joins the text before that is cut into tokens: line breaks at its
    ends are one token with those around it. A prompt that has all of it already stays as it is."""
    folder, image = shutil.copytree(folders[name], tmp_path / name), photo(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["\n\n\n"])  # as many as the place and its neighbour have
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(
        extra_special_tokens=NAMED[name])))
    config = transformers.AutoConfig.from_pretrained(folder)
    processor, seer = load_processor(folder, config), Seer(name, folder)
    text = f"A{breaks}{place}{breaks}B"
    made = processor(images=[image], text=text, return_tensors="pt")
    picture = {key: made[key] for key in ("pixel_values", "image_position_ids") if key in made}
    ids = made["input_ids"][0].tolist()
    want = seer.generate(dict(prompt_token_ids=ids, multi_modal_data={"image": [picture]}), 8)
    with start(folder, max_num_batched_tokens=80, max_num_seqs=2) as llm:
        for prompt in ({"prompt": text}, {"prompt_token_ids": ids}):
            [out] = llm.generate(prompt | {"multi_modal_data": {"image": image}}, GREEDY,
                                 use_tqdm=False)
            assert out.prompt_token_ids == ids
            assert_same_text(out.outputs[0].token_ids, *want, name)
        [out] = llm.chat([{"role": "user", "content": [
            {"type": "image", "image": image}, {"type": "text", "text": "x"}]}], GREEDY,
            use_tqdm=False)
        assert out.prompt_token_ids.count(config.image_token_id) == seer.count(picture)


def test_arguments_that_are_laid_over_the_files(folders):
    """Oracle: transformers' image processor with them, whose tensors are handed over."""
    folder, image, size = folders["qwen2.5-vl"], photo(1, 84, 112), dict(
        shortest_edge=784, longest_edge=4704)
    made = transformers.AutoImageProcessor.from_pretrained(folder)(
        images=[image], size=size, return_tensors="pt")
    picture = {key: made[key] for key in ("pixel_values", "image_grid_thw")}
    place, token = PLACES["qwen2.5-vl"], "<|image_pad|>"
    many = place.replace(token, token * int(made["image_grid_thw"].prod()))  # merge_size is 1
    texts = []
    for options, where, shown in (
            (dict(mm_processor_kwargs=dict(size=size)), place, image), ({}, many, picture),
            (dict(mm_processor_kwargs=dict(min_pixels=784, max_pixels=4704)), place, image),
            ({}, place, image)):
        with start(folder, num_gpu_blocks_override=64, **options) as llm:
            [out] = llm.generate({"prompt": f"A{where}B", "multi_modal_data": {"image": shown}},
                                 GREEDY, use_tqdm=False)
            texts.append((out.prompt_token_ids, out.outputs[0].token_ids))
    assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) < len(texts[3][0])
    with pytest.raises(ValueError, match="mm_processor_kwargs: this model's processor takes no max_"
                                         "pixel: choose of .*max_pixels"):
        start(folder, mm_processor_kwargs=dict(max_pixel=9))
    with pytest.raises(ValueError, match="mm_processor_kwargs"):
        LLM(mm_processor_kwargs=dict(max_pixels=9))  # without limit_mm_per_prompt


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tower_that_fails_within_a_step_ends_one_request(folders, monkeypatch, is_async):
    """And what was computed without its features is not found again."""
    prompts = [{"prompt": f"What is it? <image>{i} and more", "multi_modal_data": {
        "image": photo(i)}} for i in range(3)]
    with start(folders["llava"], async_scheduling=is_async, max_num_batched_tokens=16,
               max_num_seqs=4) as llm:
        encoder = llm.extra(Multimodal).encoder
        encode = encoder.encode
        want = llm.generate([*prompts, "Hi"], GREEDY, use_tqdm=False)
        assert llm.reset_prefix_cache()
        bad = llm.inputs.read_picture(photo(1)).content

        def fails(picture):
            if picture.content == bad:
                raise RuntimeError("out of memory")
            return encode(picture)

        monkeypatch.setattr(encoder, "encode", fails)
        outs = llm.generate([*prompts, "Hi"], GREEDY, use_tqdm=False)
        ends = [out.outputs[0].finish_reason for out in outs]
        assert ends == ["length", "abort", "length", "length"]
        assert outs[1].outputs[0].token_ids == []
        assert outs[1].outputs[0].stop_reason.endswith(
            "the tower can't read this image: out of memory")
        monkeypatch.undo()
        again = llm.generate(prompts[1], GREEDY, use_tqdm=False)
        for i, out in ((0, outs[0]), (1, again[0]), (2, outs[2]), (3, outs[3])):
            assert out.outputs[0].token_ids == want[i].outputs[0].token_ids
        llm.scheduler.check()


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl", "gemma3"])
def test_two_images_without_a_token_between_them(tmp_path, name):
    """With M-RoPE transformers takes them for one, and so it has no text for them either."""
    seer = Seer(name, make_seeing(name, tmp_path / name))
    prompt = seer.prompt(seer.picture(2, 4, 1), seer.picture(4, 4, 2), behind=0)
    with start(tmp_path / name) as llm:
        if name == "llava":
            [out] = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert_same_text(out.outputs[0].token_ids, *seer.generate(prompt, 8), name)
        elif name == "gemma3":
            with pytest.raises(ValueError, match="between the placeholders of two images"):
                llm.generate(prompt, GREEDY, use_tqdm=False)
        else:
            with pytest.raises(ValueError, match=r"\[24\]"):
                llm.generate(["Hi", prompt], GREEDY, use_tqdm=False)
            crossed = seer.prompt(seer.picture(4, 4, 2), seer.picture(2, 4, 1))
            crossed["multi_modal_data"]["image"].reverse()
            with pytest.raises(ValueError, match=r"\[16, 8\]"):
                llm.generate(crossed, GREEDY, use_tqdm=False)


CODE = "import pathlib\npathlib.Path({!r}).touch()\nclass Own: pass\n"
FILES = {"AutoImageProcessor": ("preprocessor_config.json", "image_processor_type"),
         "AutoFeatureExtractor": ("preprocessor_config.json", "feature_extractor_type"),
         "AutoTokenizer": ("tokenizer_config.json", "tokenizer_class"),
         "AutoProcessor": ("processor_config.json", "processor_class"),
         "AutoConfig": ("config.json", "model_type"),
         "AutoModelForImageTextToText": ("config.json", "model_type")}


@pytest.mark.parametrize("auto", FILES)
def test_no_code_of_a_folder_runs_and_nobody_is_asked(folders, tmp_path, monkeypatch, auto):
    """transformers asks on the terminal where an argument is left out, and takes a y."""
    (name, entry), ran, asked = FILES[auto], tmp_path / "ran", []
    source = folders["llava"]
    if auto == "AutoFeatureExtractor":
        source = make_hearing("qwen3-asr", tmp_path / "hears")
    folder = change(source, tmp_path / "own", name, auto_map={auto: (
        ["own.Own", None] if auto == "AutoTokenizer" else "own.Own")},
        **{entry: "Own"})
    (folder / "own.py").write_text(CODE.format(str(ran)))
    monkeypatch.setattr("builtins.input", lambda *args: asked.append(args) or "y")
    config = transformers.AutoConfig.from_pretrained(source)
    for load in (lambda: load_processor(folder, config), lambda: load_tokenizer(folder),
                 lambda: load_reference(folder)):
        try:
            load()
        except ValueError as error:
            assert "can't" in str(error)
    assert not ran.exists() and not asked


# ------------------------------------------------- made and saved by transformers' own classes

MEAN, STD = dict(image_mean=[0.5] * 3), dict(image_std=[0.5] * 3)
PUBLISHED = {  # the arguments of these models, from memory; all but LLaVA have a part for videos
    # HuggingFaceTB/SmolVLM2-2.2B-Instruct
    "smolvlm": (transformers.SmolVLMProcessor, dict(image_seq_len=81), "SmolVLMImageProcessor",
                dict(do_image_splitting=True, max_image_size=dict(longest_edge=384),
                     size=dict(longest_edge=1536), **MEAN, **STD)),
    # OpenGVLab/InternVL3-1B-hf
    "internvl": (transformers.InternVLProcessor, dict(image_seq_length=256),
                 "GotOcr2ImageProcessor", dict(
        crop_to_patches=True, min_patches=1, max_patches=12, size=dict(height=448, width=448))),
    # llava-hf/llava-1.5-7b-hf
    "llava": (transformers.LlavaProcessor, dict(
        patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
        "CLIPImageProcessor", dict(size=dict(shortest_edge=336),
                                   crop_size=dict(height=336, width=336))),
    # Qwen/Qwen2.5-VL-3B-Instruct
    "qwen2.5-vl": (transformers.Qwen2_5_VLProcessor, {}, "Qwen2VLImageProcessor", dict(
        min_pixels=3136, max_pixels=12845056, patch_size=14, merge_size=2)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_saved_processor_is_loaded_with_all_its_arguments(name, tmp_path):
    """Without its part for videos it makes the same of an image."""
    pytest.importorskip("torchvision", reason="docs/extras.md says how to install it")
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor asks for it")
    kind, arguments, image_kind, options = PUBLISHED[name]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [
        *TOKENS, *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5))]})
    for role, token in (("start_image", "<img>"), ("end_image", "</img>"), ("video", "<video>"),
                        ("context_image", "<IMG_CONTEXT>")) if name == "internvl" else ():
        tokenizer._set_model_specific_special_tokens({f"{role}_token": token})
    parts = dict(image_processor=getattr(transformers, image_kind)(**options), tokenizer=tokenizer)
    if "video_processor" in kind.get_attributes():
        video_kind = {"smolvlm": "SmolVLM", "internvl": "InternVL"}.get(name, "Qwen2VL")
        parts["video_processor"] = getattr(transformers, f"{video_kind}VideoProcessor")()
    kind(**parts, **arguments).save_pretrained(tmp_path)
    whole = kind.from_pretrained(tmp_path)
    ours = load_processor(tmp_path, NETWORKS[name]())
    for image in (photo(1, 300, 500), photo(2, 700, 200)):
        want, got = (one(images=[image], text=whole.image_token, return_tensors="pt")
                     for one in (whole, ours))
        assert want.keys() == got.keys() and len(want["input_ids"][0]) > 9
        assert all(torch.equal(torch.as_tensor(want[key]), torch.as_tensor(got[key]))
                   for key in want)
    for key, value in arguments.items():
        assert getattr(ours, key) == value
