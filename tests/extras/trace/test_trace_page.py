"""The page of a step trace in a real browser: what it shows, and what it answers to.

Chromium runs without a window (`browser.py`). The truth is a second run of the same simulation with
a `Truth` among its extras, which writes down the scheduler's and the block manager's own state
at every step; the recorder is not asked. What is compared is what a reader would see: words in the
page, colours on the screen, and the state behind them after keys and clicks of a real hand.

The test needs Chromium and skips on a laptop without it, saying so. Where it can be installed
(root on a Debian: containers, CI) it is, and where CI is set a missing browser is a failure.
"""

import re

import pytest

from nanoserve.hooks import Extra
from nanoserve_extras.trace.recorder import page
from nanoserve_extras.trace.trace import DEMO, Arrival, Simulation, parse

DEMO_OPTIONS = (12, 9, 4, 4)
EVIL = '</script><img src=x onerror="window.evil=1"><b>bold</b>'


class Truth(Extra):
    """The state of scheduler and blocks while each step runs, and after the last one."""

    def __init__(self, simulation: Simulation):
        self.simulation, self.frames = simulation, []
        simulation.add(self)

    def scheduled(self, step) -> None:
        scheduler = self.simulation.scheduler
        self.look(tokens=step.num_tokens, running=len(scheduler.running), index=step.index,
                  waiting=len(scheduler.waiting))

    def look(self, **facts) -> None:
        blocks = self.simulation.scheduler.blocks
        holders = [sorted(i for i, seq in enumerate(self.simulation.seqs) if b in seq.block_table)
                   for b in range(blocks.num_blocks)]
        findable = [entry is not None for entry in blocks.entry_of]
        self.frames.append(facts | dict(
            holders=holders, findable=findable, used=sum(map(bool, holders)),
            cached=sum(f and not h for f, h in zip(findable, holders, strict=True))))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> (file, truth). "demo" is the README's; "busy" has all there is, over two keyframes;
    "queue" has one row; "evil" brings markup along; "empty" has no step at all."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    arrivals = [Arrival(30 + 7 * i % 40, 8 + 5 * i % 30, 16, i / 40) for i in range(20)]
    for name, requests, options in [
            ("demo", list(map(parse, DEMO)), DEMO_OPTIONS), ("busy", arrivals, (48, 26, 8, 6)),
            ("queue", [Arrival(3, 1)] * 4, (8, 10, 4, 1)),
            ("evil", [Arrival(9, 3), Arrival(5, 2)], (8, 8, 4, 4)), ("empty", [], (8, 8, 4, 4))]:
        simulation = Simulation(requests, *options)
        simulation.record(str(folder / f"{name}.html"))
        trace, truth = simulation.extras[-1], Truth(simulation)
        simulation.finish()
        truth.look(tokens=0, running=0, waiting=0, index=-1)
        if name == "evil":
            trace.requests[0][0] = trace.requests[0][3] = trace.meta["title"] = EVIL
        (folder / f"{name}.html").write_text(page(trace.stream()), encoding="utf-8")
        made[name] = (folder / f"{name}.html", truth.frames)
    assert len(made["busy"][1]) > 128
    return made


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", text)]


def shown(browser) -> dict:
    """What the page says, in words and in its state, about the step that it shows."""
    tokens, people, used, rest = browser.js(
        "[...document.querySelectorAll('#numbers div')].map(e => e.firstChild.textContent)")
    state = browser.js("""({holders: page.memory.holders.map(h => [...h].sort((a, b) => a - b)),
                            findable: [...page.memory.findable].map(Boolean)})""")
    title = browser.js("document.querySelector('#step').textContent")
    running, waiting = numbers(people)
    return state | dict(tokens=numbers(tokens)[0], running=running, waiting=waiting,
                        used=numbers(used)[0], cached=numbers(rest)[0],
                        index=-1 if title == "The end" else numbers(title)[0])


@pytest.mark.parametrize("name", ["demo", "busy"])
def test_every_step_shows_the_true_state(browser, runs, name):
    """Forward one by one with the arrow key, then to and fro across the page's keyframes."""
    path, truth = runs[name]
    browser.open(path, "#0")
    for at, facts in enumerate(truth):
        assert shown(browser) == facts, f"frame {at}"
        browser.press("ArrowRight")
    last = len(truth) - 1
    for at in [last // 2, last - 1, 1, min(64, last), min(63, last), last, 0, min(65, last)]:
        browser.js(f"page.seek({at})")
        browser.settle()
        assert shown(browser) == truth[at], f"frame {at}"


def test_keys(browser, runs):
    path, truth = runs["busy"]
    last = len(truth) - 1
    browser.open(path, "#20")
    here = "page.view.at"
    for key, shift, at in [("ArrowRight", False, 21), ("ArrowRight", True, 31),
                           ("ArrowLeft", False, 30), ("ArrowLeft", True, 20), ("End", False, last),
                           ("ArrowRight", False, last), ("Home", False, 0),
                           ("ArrowLeft", False, 0)]:
        browser.press(key, shift)
        assert browser.js(here) == at == browser.js("+document.querySelector('#slider').value")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    assert browser.js("page.view.request") == 1
    browser.press("Escape")
    assert browser.js("page.view.request") == -1
    browser.press(" ")
    while browser.js(here) < 3:
        browser.settle()
    browser.press(" ")
    stopped = browser.js(here)
    browser.js("new Promise(done => setTimeout(done, 200))")
    assert browser.js(here) == stopped


def middle_of_block(browser, block: int) -> tuple[float, float]:
    x, y = browser.corner("#map")
    cell = browser.js("page.cell")
    return (x + (block % cell["columns"] + 0.5) * cell["width"],
            y + (block // cell["columns"] + 0.5) * cell["height"])


def middle_of_cell(browser, request: int, at: int) -> tuple[float, float]:
    x, y = browser.corner("#lanes canvas")
    return (x + browser.js(f"page.xOf({at}.5)"),
            y + (request + 0.5) * browser.js("page.laneHeight") + 3)


def test_the_screen_shows_owners_shared_cached_and_free(browser, runs):
    """Pixels of the README's demo. Step 1: A has blocks 0, 1, 3, B shares 0 and 1, C has 4 and 5.
    Two owners are two colours, a shared block has both, and a free one neither."""
    browser.prefer("light")
    browser.open(runs["demo"][0], "#1")
    half = browser.js("page.cell.width") / 2

    def seen(block: int, dx: float = 0, dy: float = 0):
        x, y = middle_of_block(browser, block)
        return browser.color(x + dx * half, y + dy * half)

    a, c, free = seen(3, -.6, -.6), seen(4, -.6, -.6), seen(8, -.6, -.6)
    holders = [[0, 1], [0, 1], [1], [0], [2], [2], [], [], []]
    if runs["demo"][1][1]["holders"][2] != [1]:  # who took block 2 and who 3
        holders[2], holders[3] = [0], [1]
        a = seen(2, -.6, -.6)
    assert runs["demo"][1][1]["holders"] == holders
    assert len({a, c, free}) == 3
    assert seen(5, -.6, -.6) == c and seen(7, -.6, -.6) == free
    for shared in (0, 1):
        first, second = seen(shared, -.6, -.6), seen(shared, .6, .6)
        assert first == a and second not in (a, c, free)
    # Step 3: C was preempted; its two full blocks can still be found, and are neither C's nor free.
    assert runs["demo"][1][3]["findable"][5] and not runs["demo"][1][3]["holders"][5]
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert seen(5, -.4, -.4) not in (a, c, free)


def test_the_lanes_show_what_each_request_does(browser, runs):
    """The README's table, by the colour at the edge of each cell: prefill, decode, waiting (the
    panel shows beside a thin line), preempted, recomputed, gone."""
    browser.prefer("light")
    browser.open(runs["demo"][0], "#0")
    style = "getComputedStyle(document.documentElement)"
    kinds = {browser.js(f"{style}.getPropertyValue('--{name}')").strip(): name[0]
             for name in ("prefill", "decode", "recompute")}

    def letter(request: int, at: int) -> str:
        x, y = middle_of_cell(browser, request, at)
        red, green, blue = browser.color(x + .3 * browser.js("page.perStep()"), y + 6)
        return kinds.get(f"#{red:02x}{green:02x}{blue:02x}", ".")

    assert ["".join(letter(request, at) for at in range(7)) for request in range(3)] == [
        "pdddd..", ".pdddd.", ".pp..rd"]
    assert browser.js("[0,1,2,3,4,5,6].map(at => page.stateOf(2, at))") == [1, 3, 3, 7, 7, 4, 5]


def tip(browser, x: float, y: float) -> str:
    """What the page says where the mouse is."""
    browser.move(x, y)
    return browser.js("document.querySelector('#tip').innerText")


def test_hovering_tells_the_numbers(browser, runs):
    browser.open(runs["demo"][0], "#0")
    for request, at, said in [
            (1, 1, ["B: 12 prompt tokens", "step 1 · prefill: positions 8 to 11, 4 tokens", "8 t"]),
            (2, 3, ["C: 14 prompt tokens", "step 3 · preempted", "preempted for A"]),
            (2, 4, ["C: 14 prompt tokens", "step 4 · preempted", "needs 4 blocks, 3 are free"]),
            (0, 4, ["A: 10 prompt tokens", "step 4 · decode: position 13"])]:
        lines = tip(browser, *middle_of_cell(browser, request, at)).splitlines()
        assert len(lines) == len(said)
        assert all(one in line for one, line in zip(said, lines, strict=True))
    x, y = browser.corner("#budget")
    assert tip(browser, x + browser.js("page.xOf(5.5)"), y + 60) == (
        "Step 5\n2 recompute + 2 decode of 12 tokens\n8 blocks in use, 1 cached, 0 free")
    assert tip(browser, *middle_of_block(browser, 1)) == "Block 1\nheld by A\npositions 4 to 7"
    browser.move(5, 5)
    assert browser.js("getComputedStyle(document.querySelector('#tip')).pointerEvents") == "none"


def words(browser, selector: str) -> str:
    return browser.js(f"document.querySelector('{selector}').innerText")


def test_the_page_says_who_waits_and_why(browser, runs):
    """The README's demo, whose table says the same; and four requests on one row, of which the
    last two stand behind the second."""
    browser.open(runs["demo"][0], "#0")
    assert words(browser, "#why") == (
        "B waits for blocks that A is computing\n"
        "C needs 14 tokens at once to overtake B, 2 of the budget are left")
    browser.js("page.seek(3)")
    browser.settle()
    assert words(browser, "#news") == "C is preempted for A" and words(browser, "#why") == ""
    browser.press("ArrowRight")
    assert (words(browser, "#news"), words(browser, "#why")) == (
        "", "C needs 4 blocks, 3 are free")
    browser.js("page.select(2)")
    browser.settle()
    assert "holds 0 blocks now, and needs 4 blocks, 3 are free" in words(browser, "#card")
    browser.press("End")
    assert words(browser, "#why") == ""
    browser.open(runs["queue"][0], "#0")
    assert words(browser, "#why") == "B has no seat: max_num_seqs=1\nC, D stand behind B"
    browser.js("page.select(3)")
    browser.settle()
    assert "and stands behind B" in words(browser, "#card")


def test_remarks_lead_from_step_to_step(browser, runs):
    """The README's demo: of each kind of thing the first. `n` and a click go there, and light the
    request; behind the last comes the first."""
    browser.open(runs["demo"][0], "#0")
    remarks = words(browser, "#remarks").splitlines()
    for remark, said in zip(remarks, [
            "0: B waits", "0: C needs", "1: B hits: its first 8", "1: B computes its prompt",
            "1: C gets a chunk of 7", "3: C is preempted for A", "4: C needs 4 blocks",
            "5: C comes back, finds 12", "5: A is done"], strict=True):
        assert remark.startswith(f"step {said}")
    here = "[page.view.at, page.view.request, document.querySelector('.now').textContent]"
    for at, request, first in [(0, 1, "step 0: B"), (0, 2, "step 0: C"), (1, 1, "step 1: B")]:
        browser.press("n")
        shown = browser.js(here)
        assert shown[:2] == [at, request] and shown[2].startswith(first)
    browser.js("document.querySelector('#remarks li:last-child').click()")
    assert browser.js(here)[:2] == [5, 0]
    # No line is cut in two: the list shows whole ones, and is scrolled by whole ones.
    assert browser.js("(r => [r.clientHeight % 18, r.scrollTop > 0 && r.scrollTop % 18, "
                      "r.firstChild.offsetHeight % 18])(document.querySelector('#remarks'))"
                      ) == [0, 0, 0]
    browser.press("n")
    assert browser.js(here)[:2] == [0, 1]
    browser.open(runs["busy"][0])
    assert "takes block" in words(browser, "#remarks")


def test_positions_count_from_the_first_block_that_a_window_left_behind(browser, tmp_path):
    """A sliding window gave back block 0 of the table [0, 1, 2]: block 1 keeps positions 4 to 7,
    also on the way back from a keyframe. Block 3 was cached before the recording began."""
    step = {"i": 0, "t": 0, "d": 1}
    frames = [step | {"q": [0], "b": [[0, 0, 1]], "k": [3]}, step | {"g": [0, 1], "b": [[0, 2]]},
              *([step] * 70), {"i": -1, "t": 99, "d": 0}]
    meta = dict(title="", note="", num_blocks=4, block_size=4, budget=8, max_num_seqs=1)
    stream = dict(meta=meta, requests=[["A", 3, 0, ""]], frames=frames)
    (tmp_path / "run.html").write_text(page(stream), encoding="utf-8")
    browser.open(tmp_path / "run.html", "#71")
    for at in (71, 66, 1):
        browser.js(f"page.seek({at}), page.memory.seek({at})")
        browser.move(5, 5)
        assert tip(browser, *middle_of_block(browser, 1)).endswith("positions 4 to 7")
    assert "findable" in tip(browser, *middle_of_block(browser, 3))
    assert not browser.complaints()


def test_a_hit_that_the_store_brought_has_a_colour_of_its_own(browser, tmp_path):
    """A finds 8 tokens in the cache, B another 4 and 8 in the store."""
    step = {"i": 0, "t": 0, "d": 1}
    frames = [step | {"q": [0, 1], "h": [0, 8, 1, 12], "l": [1, 8], "b": [[0, 0, 1, 2], [1, 3, 4]],
                      "x": [[0, 1], [8, 12], [1, 1], [1, 1]]}, {"i": -1, "t": 99, "d": 0}]
    meta = dict(title="", note="", num_blocks=8, block_size=4, budget=8, max_num_seqs=2)
    requests = [["A", 9, 0, ""], ["B", 13, 0, ""]]
    (tmp_path / "run.html").write_text(
        page(dict(meta=meta, requests=requests, frames=frames)), encoding="utf-8")
    browser.prefer("light")
    browser.open(tmp_path / "run.html", "#0")
    load = browser.js("getComputedStyle(document.documentElement).getPropertyValue('--load')")
    for request, said, from_store in ((0, "8 tokens not", False), (1, "12 tokens not", True)):
        x, y = middle_of_cell(browser, request, 0)
        words = tip(browser, x, y)
        assert said in words and ("8 of them from the store" in words) == from_store
        browser.move(5, 5)
        colours = {"#" + bytes(browser.color(x, y + dy)).hex() for dy in range(-20, 1)}
        assert (load.strip() in colours) == from_store


def test_the_encoder_cache_has_a_line_of_its_own(browser, tmp_path):
    """Two images of 8 tokens in step 0, into room for 32, and one more behind it in step 2."""
    step = {"t": 0, "d": 1}
    frames = [step | {"i": 0, "q": [0], "x": [[0], [0], [20], [0]], "v": [16, 2]},
              step | {"i": 1, "x": [[0], [20], [9], [1]]}, step | {"i": 2, "v": [24, 1]},
              {"i": -1, "t": 99, "d": 0}]
    meta = dict(title="", note="", num_blocks=8, block_size=4, budget=32, max_num_seqs=2)
    for name, images in (("sees", 32), ("reads", 0)):
        (tmp_path / f"{name}.html").write_text(page(dict(
            meta=meta | dict(images=images), requests=[["A", 29, 0, ""]], frames=frames if images
            else [{key: frame[key] for key in frame if key != "v"} for frame in frames])))
    browser.open(tmp_path / "reads.html", "#0")
    low = browser.js("document.querySelector('#budget').clientHeight")
    assert "Encoded" not in words(browser, "#legend")
    browser.open(tmp_path / "sees.html", "#0")
    assert browser.js("document.querySelector('#budget').clientHeight") > low
    assert "Encoded" in words(browser, "#legend")
    assert "the tower encodes 2 images" in words(browser, "#news")
    x, y = browser.corner("#budget")
    for at, tokens in enumerate((16, 16, 24)):
        assert f"{tokens} tokens of images in the encoder cache" in tip(
            browser, x + browser.js(f"page.xOf({at}.5)"), y + 170)
    browser.move(5, 5)


def test_nothing_is_fetched_and_nothing_complains(browser, runs):
    for name, (path, _) in runs.items():
        browser.open(path)
        for key in ("ArrowRight", *"+-0tt", "ArrowUp", "ArrowUp", "ArrowDown", "End"):
            browser.press(key)
        assert browser.complaints() == [], name
        assert [url.split("#")[0] for url in browser.requests()] == [path.as_uri()], name


def test_text_stays_text(browser, runs):
    browser.open(runs["evil"][0], "#0")
    browser.press("ArrowDown")
    assert EVIL in browser.js("document.querySelector('#card').textContent")
    assert browser.js("document.querySelector('#title').textContent") == EVIL
    assert "<b>bold</b>" in tip(browser, *middle_of_cell(browser, 0, 0))
    assert browser.js("[window.evil, document.querySelectorAll('img').length]") == [None, 0]


@pytest.mark.parametrize("width", [959, 320])
def test_below_960_pixels_nothing_is_cut_off(browser, runs, width):
    """The page is as wide as the window and as high as it needs to be. Whatever has words stands
    inside the window and has room for them, but for the names in the lanes' own canvas."""
    try:
        browser.resize(width, 800)
        for name in ("busy", "demo"):
            browser.open(runs[name][0], "#1")
            assert browser.js("document.documentElement.scrollWidth") == width
            assert browser.js("""[...document.querySelectorAll(
                'header *, #scrub *, #space *, #heads *, footer *, canvas')].filter(e => {
                  const r = e.getBoundingClientRect();
                  return r.left < 0 || r.right > innerWidth + .5 ||
                    e.localName !== "canvas" && e.clientWidth && e.scrollWidth > e.clientWidth + 1;
                }).map(e => e.id || e.outerHTML)""") == []
            assert browser.js("""['#told', '#card', '#lanes', 'footer'].filter(q => {
                const e = document.querySelector(q);
                return e.scrollHeight > e.clientHeight + 1 || e.clientHeight < 20})""") == []
            assert shown(browser) == runs[name][1][1]
            assert browser.complaints() == []
    finally:
        browser.resize(1440, 900)


def test_stages_are_lanes_as_high_as_they_are_full(browser, tmp_path):
    """By hand: stage 0 computes during the first half of each step, and stage 1 for a quarter of
    its time from there on; of step 3, to its end and on for a quarter of the next."""
    simulation = Simulation(list(map(parse, DEMO)), *DEMO_OPTIONS)
    simulation.record(str(tmp_path / "it.html"))
    simulation.finish()
    stream = simulation.extras[-1].stream()
    *steps, _ = stream["frames"]
    for one in steps:
        half = one["t"] + one["d"] / 2
        one["s"] = [0, one["t"], half, 1, half, half + one["d"] / 4]
    steps[3]["s"][-1] = steps[4]["t"] + steps[4]["d"] / 4
    (tmp_path / "it.html").write_text(page(stream), encoding="utf-8")
    browser.open(tmp_path / "it.html", "#0")
    found = browser.js("page.busy.map(one => [...one])")[:-1]
    expected = [[0.5, 0.25]] * len(steps)
    expected[3], expected[4] = [0.5, 0.5], [0.5, 0.5]
    assert [pytest.approx(one, abs=1e-3) for one in expected] == found
    spent = [one["d"] for one in steps]
    whole = (sum(spent) / 4 + spent[3] / 4 + spent[4] / 4) / sum(spent)
    assert browser.js("[...page.fullness]") == pytest.approx([0.5, whole], abs=1e-3)
    x, y = browser.js("""(({x, y}) => [x + page.xOf(.5), y + 144])(
                         document.querySelector("#budget").getBoundingClientRect())""")
    green = browser.color(x, y + 18 - 3)
    assert green == browser.color(x, y + 36 - 3) != browser.color(x, y + 36 - 6)  # 7 and 3.5 high
    assert green == browser.color(x, y + 18 - 6) != browser.color(x, y + 18 - 9)
    assert not browser.complaints()
