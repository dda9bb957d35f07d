"""Processors as they lie in folders: with the arguments that their files give them, with those of
another model, with code of their own. Oracle: transformers' image processor and `generate`, with
placeholders that are written by hand."""

import numpy as np
import pytest
from architectures import Made
from checkpoints import assert_same_text
from seeing import Seer, make_seeing, make_with_processor

from nanoserve import LLM, SamplingParams
from nanoserve.extras.multimodal import Multimodal

Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("processors"), make_with_processor)


def start(folder, **options) -> LLM:
    return LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=32, block_size=4,
                              limit_mm_per_prompt={"image": 2}) | options)


def photo(seed: int, height: int = 28, width: int = 56):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tower_that_fails_within_a_step_ends_one_request(folders, monkeypatch, is_async):
    """And what was computed without its features is not found again."""
    prompts = [{"prompt": f"What is it? <image>{i} and more", "multi_modal_data": {
        "image": photo(i)}} for i in range(3)]
    with start(folders["llava"], async_scheduling=is_async, max_num_batched_tokens=16,
               max_num_seqs=4) as llm:
        eyes = llm.extra(Multimodal).eyes
        encode = eyes.encode
        want = llm.generate([*prompts, "Hi"], GREEDY, use_tqdm=False)
        assert llm.reset_prefix_cache()
        bad = llm.inputs.read_picture(photo(1)).content

        def fails(picture):
            if picture.content == bad:
                raise RuntimeError("out of memory")
            return encode(picture)

        monkeypatch.setattr(eyes, "encode", fails)
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


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_two_images_without_a_token_between_them(tmp_path, name):
    """With M-RoPE transformers takes them for one, and so it has no text for them either."""
    seer = Seer(name, make_seeing(name, tmp_path / name))
    prompt = seer.prompt(seer.picture(2, 4, 1), seer.picture(4, 4, 2), behind=0)
    with start(tmp_path / name) as llm:
        if name == "llava":
            [out] = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert_same_text(out.outputs[0].token_ids, *seer.generate(prompt, 8), name)
        else:
            with pytest.raises(ValueError, match=r"runs of \[24\]: .* another token between two"):
                llm.generate(["Hi", prompt], GREEDY, use_tqdm=False)
            crossed = seer.prompt(seer.picture(4, 4, 2), seer.picture(2, 4, 1))
            crossed["multi_modal_data"]["image"].reverse()
            with pytest.raises(ValueError, match=r"runs of \[16, 8\]: put each image's together"):
                llm.generate(crossed, GREEDY, use_tqdm=False)
