"""The page at `/` in a real browser, and the board of what the engine does beside its chat.

Oracles: `LLM.chat` for the answer, the scheduler's own state for the board's pictures.
"""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from serving import Serving  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve.hooks import Extra  # noqa: E402
from nanoserve_extras.server import board as module  # noqa: E402
from nanoserve_extras.server.board import Board  # noqa: E402

EVIL = "<img src=x onerror='window.evil=1'><b>bold</b>"


def small() -> LLM:
    return LLM(dtype="float32", num_gpu_blocks_override=64, max_num_batched_tokens=32,
               max_num_seqs=3, max_model_len=256)


@pytest.fixture(scope="module")
def serving():
    with Serving(small()) as serving:
        yield serving


@pytest.fixture
def llm(serving) -> LLM:
    return serving.llm


class Truth(Extra):
    """What the scheduler had in each step: asked after the board."""

    def __init__(self):
        self.steps: list[tuple[int, int]] = []
        self.pictures: list[tuple[dict, list, list]] = []

    def scheduled(self, step) -> None:
        if step.num_new_tokens:
            self.steps.append((sum(
                max(0, min(start + n, seq.num_prompt_tokens) - start)
                for (seq, n), start in zip(step.num_new_tokens.items(), step.starts,
                                           strict=True)), step.num_tokens))
        scheduler = self.engine.scheduler
        self.pictures.append((self.board.read(), [seq.name for seq in scheduler.running],
                              [seq.name for seq in scheduler.waiting]))


def test_a_picture_tells_who_computes_and_who_waits_and_why(llm, monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0)
    board, truth = Board(llm), Truth()
    truth.board = board
    llm.add(truth)
    llm.reset_prefix_cache()
    try:
        prompts = ["Once upon a time there was a king " * n for n in (9, 5, 7, 2, 3)]
        assert board.read()["rows"] == []
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0),
                               use_tqdm=False)
    finally:
        llm.remove(board)
        llm.remove(truth)
    last = board.read()
    assert last["rows"] == [] and (last["running"], last["waiting"]) == (0, 0)
    assert last["steps"] == truth.steps and last["written"] == 5 * 8
    assert last["read"] == sum(len(one.prompt_token_ids) - one.num_cached_tokens
                               for one in outputs)
    waited = set()
    for picture, running, waiting in truth.pictures:
        assert [row["name"] for row in picture["rows"]] == [*running, *waiting]
        assert [row["waits"] for row in picture["rows"]] == [
            *[False] * len(running), *[True] * len(waiting)]
        for row in picture["rows"]:
            waited.add(row["why"])
            assert bool(row["why"]) or row["new"]
            assert row["done"] + row["new"] <= row["prompt"] + row["output"]
    assert {"", "has no seat: max_num_seqs=3"} < waited
    assert any(why.startswith("stands behind ") for why in waited)


def test_nobody_watches_and_nothing_is_kept(llm, monkeypatch):
    """And pictures are taken some times a second, not in each step."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    board = Board(llm)
    monkeypatch.setattr(board, "_picture", lambda step: taken.append(step) or {})
    taken: list = []
    written = 0
    try:
        for watches, seconds, steps, pictures in ((False, 0, 0, 0), (True, 0, 4, 1),
                                                  (True, 3, 0, 0)):
            taken.clear()
            board.steps.clear()
            if watches:
                board.read()
            clock.now += seconds
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0),
                         use_tqdm=False)
            assert (len(board.steps), len(taken)) == (steps, pictures)
            written += steps  # a token in each
            assert board.num_written == written
    finally:
        llm.remove(board)


def wait_for(browser, expression: str) -> None:
    deadline = time.monotonic() + 30
    while not browser.js(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.02)


def say(browser, text: str) -> None:
    """Type and press Enter, and wait for the end of the answer."""
    browser.js("document.querySelector('#text').focus()")
    browser("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        browser("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                windowsVirtualKeyCode=13)
    wait_for(browser, "!page.busy")


def greedy(llm: LLM, monkeypatch) -> Callable[[list[dict]], str]:
    """The server's defaults become greedy; returns what the model answers."""
    recommended = dict(temperature=0.0, max_tokens=24)
    monkeypatch.setattr(llm.inputs, "recommended", lambda: recommended)
    return lambda messages: llm.chat(
        messages, SamplingParams(**recommended), use_tqdm=False)[0].outputs[0].text


def test_a_chat_of_several_turns_in_a_browser(browser, serving, llm, monkeypatch):
    answer_of = greedy(llm, monkeypatch)
    browser.open(f"{serving.url}/")
    wait_for(browser, "document.querySelector('#model').value === 'tested'")
    browser.js("document.querySelector('#system').value = 'Be brief'")
    say(browser, "Tell me a story.")
    say(browser, EVIL)
    messages = [dict(role="system", content="Be brief")]
    for text in ("Tell me a story.", EVIL):
        messages.append(dict(role="user", content=text))
        messages.append(dict(role="assistant", content=answer_of(messages)))
    assert browser.js("page.messages") == messages[1:]
    turns = browser.js("[...document.querySelectorAll('.turn')].map(x => x.textContent)")
    assert turns == [one["content"] for one in messages[1:]]
    assert not browser.js("window.evil || document.querySelectorAll('#said b').length")
    assert browser.js("document.querySelectorAll('.speed').length") == 2
    wait_for(browser, "document.querySelector('#rate').textContent === 'idle'")
    assert "of 64" in browser.js("document.querySelector('#blocks').textContent")
    browser.js("document.querySelector('#anew').click()")
    assert browser.js("page.messages") == []
    # Again in the middle of an answer, of which nothing may come into the new chat.
    browser.js("document.querySelector('#text').value = 'Tell me a story.';"
               "document.querySelector('#form').requestSubmit();"
               "document.querySelector('#anew').click()")
    wait_for(browser, "!page.busy")
    assert browser.js("page.messages") == []
    assert browser.js("document.querySelectorAll('#said > *').length") == 1
    assert browser.complaints() == []
    assert all(url.startswith((serving.url, "data:", "about:")) for url in browser.requests())


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, serving):
    browser.resize(390, 844)
    try:
        browser.open(f"{serving.url}/")
        assert browser.js("document.documentElement.scrollWidth") <= 390
        assert browser.js("getComputedStyle(document.querySelector('#text')).fontSize") == "16px"
    finally:
        browser.resize(1440, 900)


def test_a_key_is_asked_for_where_the_server_wants_one(browser, monkeypatch):
    with Serving(small(), api_keys=["secret"]) as serving:
        answer_of = greedy(serving.llm, monkeypatch)
        assert serving.ask("/live")[0] == 401
        browser.open(f"{serving.url}/")
        wait_for(browser, "document.querySelector('details').open")
        assert "wants a key" in browser.js("document.querySelector('#said .wrong').textContent")
        wait_for(browser, "document.querySelector('#rows .wrong') !== null")  # the board, too
        say(browser, "Tell me a story.")  # which is not lost
        assert browser.js("document.querySelector('#text').value") == "Tell me a story."
        assert browser.js("[page.messages, document.querySelectorAll('.user').length]") == [[], 0]
        browser.js("document.querySelector('#text').value = ''")
        browser.js("document.querySelector('#key').value = 'secret'")
        browser.js("document.querySelector('#key').dispatchEvent(new Event('change'))")
        wait_for(browser, "document.querySelector('#model').value === 'tested'")
        say(browser, "Tell me a story.")
        assert browser.js("page.messages[1].content") == answer_of(
            [dict(role="user", content="Tell me a story.")])
        # All steps need the key, too, which a link doesn't send.
        browser.events.clear()
        browser.js("window.open = () => ({set location(url) { location.href = url; }})")
        browser.js("document.querySelector('#trace').click()")
        wait_for(browser, "location.protocol === 'blob:' && window.page && !page.messages")
        browser.settle()
        assert browser.js("document.querySelector('canvas').width") and not browser.complaints()


def test_thoughts_are_shown_and_are_no_part_of_the_conversation(browser, serving):
    """A stream in pieces that end anywhere, also within a letter."""
    browser.open(f"{serving.url}/")
    events = [dict(choices=[dict(delta=delta)]) for delta in (
        dict(role="assistant", reasoning_content="Hm, "), dict(reasoning_content="<b>two"),
        dict(content="Z"), dict(content="wölf"))] + [dict(choices=[])]
    data = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events)
    browser.js(f"""window.fetch = async () => new Response(new ReadableStream({{start(stream) {{
        for (const byte of new TextEncoder().encode({json.dumps(data + "data: [DONE]")}))
          stream.enqueue(new Uint8Array([byte]));
        stream.close(); }} }}))""")
    say(browser, "How many?")
    assert browser.js("page.messages") == [dict(role="user", content="How many?"),
                                           dict(role="assistant", content="Zwölf")]
    assert browser.js("[...document.querySelectorAll('.turn')].map(x => x.textContent)") == [
        "How many?", "Hm, <b>two", "Zwölf"]


def test_only_requests_on_the_board_have_numbers(browser, serving):
    """An open page must not remember what a server did all day."""
    browser.open(f"{serving.url}/")
    assert browser.js("""['a b', 'b c', '', 'c a'].map(names => {
        page.number(names.split(' ').filter(name => name).map(name => ({name})));
        return [...page.numbers.values()].join(); })""") == [
            "request 1,request 2", "request 2,request 3", "", "request 4,request 5"]


def test_a_server_that_is_gone_is_said_to_be(browser):
    with Serving(small()) as serving:
        browser.open(f"{serving.url}/")
        wait_for(browser, "document.querySelector('#rate').textContent === 'idle'")
    wait_for(browser, "document.querySelector('#rows').textContent.includes('does not answer')")
    assert browser.js("document.querySelector('#blocks').textContent") == ""


def test_the_page_behind_a_proxy_begins_at_its_folder(browser):
    with Serving(small(), root_path="/nano") as serving:
        browser.open(f"{serving.url}/nano")
        assert browser.js("location.pathname") == "/nano/"
        wait_for(browser, "document.querySelector('#model').value === 'tested'")
