"""Images behind the door, in three languages: as base64 in messages and in what tools answer, and
nothing that is fetched or opened. Oracle: `LLM`, with prompts written by hand."""

import base64
import io

import pytest

pytest.importorskip("fastapi")
Image = pytest.importorskip("PIL.Image", reason="the extra 'vision' brings Pillow")

from serving import CHATS, MESSAGES, NAME, RESPONSES, Serving  # noqa: E402

from nanoserve import LLM  # noqa: E402
from nanoserve_extras.multimodal.multimodal import Multimodal  # noqa: E402


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    from seeing import make_with_processor
    llm = LLM(make_with_processor("llava", tmp_path_factory.mktemp("llava")), dtype="float32",
              num_gpu_blocks_override=32, limit_mm_per_prompt={"image": 1})
    with Serving(llm) as serving:
        yield serving


def png(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


HI, LIMIT = "Hi", 8
PATHS = dict(chat=CHATS, responses=RESPONSES, messages=MESSAGES)


def image_part(language: str, url: str) -> dict:
    """As OpenAI's and Anthropic's clients write it."""
    if language == "chat":
        return dict(type="image_url", image_url=dict(url=url, detail="low"))
    if language == "responses":
        return dict(type="input_image", image_url=url, detail="auto", file_id=None)
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = dict(type="base64", media_type=kind, data=data) if data else dict(type="url", url=url)
    return dict(type="image", source=source, cache_control=dict(type="ephemeral"))


def body_of(language: str, *parts, seen: dict | None = None) -> dict:
    """A question with images. seen: a tool is called then, and answers with a text and this one."""
    text = dict(type="input_text" if language == "responses" else "text", text=HI)
    turns = [dict(role="user", content=[text, *parts])]
    if seen and language == "chat":
        call = dict(id="c1", type="function", function=dict(name="look", arguments="{}"))
        turns += [dict(role="assistant", content=None, tool_calls=[call]),
                  dict(role="tool", tool_call_id="c1", content=[text, seen])]
    elif seen and language == "responses":
        turns += [dict(type="function_call", call_id="c1", name="look", arguments="{}"),
                  dict(type="function_call_output", call_id="c1", output=[text, seen])]
    elif seen:
        turns += [dict(role="assistant", content=[
            dict(type="tool_use", id="c1", name="look", input={})]),
            dict(role="user", content=[
                dict(type="tool_result", tool_use_id="c1", content=[text, seen])])]
    limit = "max_output_tokens" if language == "responses" else "max_tokens"
    return {"input" if language == "responses" else "messages": turns, "model": NAME,
            "temperature": 0, limit: LIMIT}


def text_of(language: str, answer: dict) -> tuple[str, int]:
    """What was said, and how many tokens the prompt had."""
    if language == "chat":
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    [part] = answer["output"] if language == "responses" else [answer]
    usage = answer["usage"]
    return part["content"][0]["text"], usage["input_tokens"] + usage.get(
        "cache_read_input_tokens", 0)


def expected(serving, prompt: str, *images: str) -> tuple[str, int]:
    out = serving.offline({"prompt": prompt, "multi_modal_data": {"image": [*images]}},
                          temperature=0, max_tokens=LIMIT)
    return out.outputs[0].text, len(out.prompt_token_ids)


@pytest.mark.parametrize("language", PATHS)
def test_a_question_about_an_image_is_the_templates_prompt(serving, language):
    told = [expected(serving, "<s>user:Hi<image><|end|><s>assistant:", png(color))
            for color in ("red", "blue")]
    assert told[0][0] != told[1][0]
    for color, one in zip(("red", "blue"), told, strict=True):
        status, answer = serving.ask(PATHS[language], body_of(language, image_part(
            language, png(color))))
        assert status == 200 and text_of(language, answer) == one, answer


@pytest.mark.parametrize("language", PATHS)
def test_an_image_in_a_tools_answer_is_where_the_template_puts_it(serving, language):
    told = expected(serving, '<s>user:Hi<|end|><s>assistant:<call>{"name": "look", "arguments": {}}'
                    "</call><|end|><s>tool:Hi<image><|end|><s>assistant:", png("red"))
    body = body_of(language, seen=image_part(language, png("red")))
    status, answer = serving.ask(PATHS[language], body)
    assert status == 200 and text_of(language, answer) == told, answer


@pytest.mark.parametrize("language", PATHS)
def test_a_tower_that_fails_is_an_error_and_no_empty_answer(serving, monkeypatch, language):
    """Whatever the language's word for an end is: the client must not take it for a turn's."""
    encoder = serving.llm.extra(Multimodal).encoder
    expected(serving, "<image>", png("red"))  # the first of its shape would be refused: a 400
    monkeypatch.setattr(encoder, "encode", lambda picture: 1 / 0)
    color = {"chat": "green", "responses": "navy", "messages": "gray"}[language]
    body = body_of(language, image_part(language, png(color)))
    error = serving.refusal(PATHS[language], body, 500)
    assert "can't read this image: division" in error["message"]
    _, data = serving.ask_raw(PATHS[language], body | dict(stream=True))
    assert b"can't read this image: division" in data.splitlines()[-2]
    monkeypatch.undo()
    assert serving.ask(PATHS[language], body)[0] == 200


def test_an_image_is_counted_as_what_it_stands_for(serving):
    body = body_of("messages", image_part("messages", png("red")))
    _, answer = serving.ask(PATHS["messages"], body)
    _, counted = serving.ask("/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == text_of("messages", answer)[1] > 20
    for more in (dict(), dict(add_special_tokens=False)):
        body = body_of("chat", image_part("chat", png("red"))) | more
        status, answer = serving.ask(PATHS["chat"], body)
        assert status == 200 and text_of("chat", answer)[1] == counted["input_tokens"]


@pytest.mark.parametrize("language", PATHS)
@pytest.mark.parametrize("url", ["http://localhost/a.png", "file:///etc/passwd", "/etc/passwd",
                                 "data:image/png;base64,AAAA", "", None])
def test_what_is_no_image_is_a_400_that_says_so(serving, url, language):
    part = image_part(language, url or "")
    if url is None:
        part = {key: None if key in ("image_url", "source") else one for key, one in part.items()}
    field = "input" if language == "responses" else "messages"
    for body in (body_of(language, part), body_of(language, seen=part)):
        error = serving.refusal(PATHS[language], body)
        assert error["param"] == field and "image" in error["message"]
        # Claude Code takes the image out at these words, and goes on.
        is_anthropics = error["message"].startswith("Could not process image: ")
        assert is_anthropics == (language == "messages")
    assert serving.ask(PATHS[language], body_of(language))[0] == 200


def test_more_images_than_allowed_are_a_400(serving):
    for language in PATHS:
        parts = [image_part(language, png(color)) for color in ("red", "blue")]
        error = serving.refusal(PATHS[language], body_of(language, *parts))
        assert "limit_mm_per_prompt allows 1" in error["message"]
        assert error["message"].startswith("Could not") == (language == "messages")


def test_a_file_or_a_document_is_refused_by_name(serving):
    for language, part, says in (
            ("messages", dict(type="image", source=dict(type="file", file_id="f")), "file_id"),
            ("messages", dict(type="document", source=dict(type="base64", data="")), "document"),
            ("responses", dict(type="input_file", file_data="data:application/pdf;base64,"),
             "input_file"),
            ("responses", dict(type="input_image", file_id="file-1", detail="auto"), "no files"),
            ("chat", dict(type="file", file=dict(file_id="f")), "file")):
        error = serving.refusal(PATHS[language], body_of(language, part))["message"]
        assert says in error and error.startswith("Could") == (says == "file_id")
