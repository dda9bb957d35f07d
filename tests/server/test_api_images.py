"""Images behind the door: data: URLs in messages, and nothing that is fetched or opened."""

import base64
import io
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")

from serving import NAME, Serving  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    sys.path.append(str(Path(__file__).parent.parent / "extras"))
    from seeing import make_with_processor
    llm = LLM(make_with_processor("llava", tmp_path_factory.mktemp("llava")), dtype="float32",
              num_gpu_blocks_override=32, limit_mm_per_prompt={"image": 1})
    with Serving(llm) as serving:
        yield serving


def png(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(serving, *parts, path="/v1/chat/completions", **body):
    return serving.ask(path, dict(model=NAME, temperature=0, max_tokens=8, messages=[
        dict(role="user", content=[dict(type="text", text="Hi"), *parts])]) | body)


def image_part(url: str) -> dict:
    return dict(type="image_url", image_url=dict(url=url, detail="low"))


def test_a_chat_about_an_image_is_llm_chat(serving):
    texts = []
    for color in ("red", "blue"):
        status, answer = ask(serving, image_part(png(color)))
        assert status == 200 and answer["usage"]["prompt_tokens"] > 4, answer
        texts.append(answer["choices"][0]["message"]["content"])
        [out] = serving.llm.chat([dict(role="user", content=[
            dict(type="text", text="Hi"), image_part(png(color))])],
            SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert out.outputs[0].text == texts[-1]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("url", ["http://localhost/a.png", "file:///etc/passwd", "/etc/passwd",
                                 "data:image/png;base64,AAAA", "", None])
def test_what_is_no_image_is_a_400_that_says_so(serving, url):
    status, answer = ask(serving, image_part(url))
    assert status == 400 and "image" in answer["error"]["message"]
    assert ask(serving)[0] == 200


def test_more_images_than_allowed_are_a_400(serving):
    status, answer = ask(serving, image_part(png("red")), image_part(png("blue")))
    assert status == 400 and "limit_mm_per_prompt allows 1" in answer["error"]["message"]
