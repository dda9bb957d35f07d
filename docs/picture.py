"""Makes the README's pictures of a step trace, from a real run of the bundled model.

    python docs/picture.py          docs/trace-light.png, docs/trace-dark.png, and docs/trace.html

Fourteen stories arrive a few steps apart, most of them with the same introduction, into a cache of
30 blocks and steps of 24 tokens: so prompts are cut into chunks, the introduction is found in the
prefix cache, and blocks run out. Everything in the picture is what the engine did. The page that it
shows is kept beside it, to be opened in a browser; git does not track it. Needs Chromium.
"""

import base64
import sys
import tempfile
from pathlib import Path

from nanoserve import LLM, SamplingParams

HERE = Path(__file__).parent
PAGE = HERE / "trace.html"
sys.path.insert(0, str(HERE.parent / "tests"))
from browser import Browser, install  # noqa: E402

INTRODUCTION = ("Once upon a time there was an old king who lived with his three daughters in a "
                "castle by the sea, and he was very sad. ")
STORIES = {
    "the eldest": "The eldest daughter said", "the second": "The second daughter said",
    "the youngest": "The youngest daughter said", "a fisherman": "One day a poor fisherman came",
    "the cook": "Now the cook had a black cat, and the cat", "a giant": "In the wood lived a giant",
    "the queen": "The queen", "a wolf": "At night a wolf came to the gate, and it said",
    "a ship": "Far out at sea there was a ship,", "the moon": "The moon looked down and"}
OTHERS = {"alice": '"What shall we do now?" said Alice to the Rabbit, who was looking at a watch.',
          "a frog": "A frog sat by the well", "a tailor": "There was a tailor who had one needle,",
          "the miller": "The miller's son had nothing in the world but a cat. One morning the cat"}
FRAME = 69  # what the pictures show: somebody waits for blocks, and another one behind


def run(path: Path) -> None:
    prompts = [(name, INTRODUCTION + text) for name, text in STORIES.items()]
    for i, other in enumerate(OTHERS.items()):
        prompts.insert(2 + 3 * i, other)
    with LLM(dtype="float32", num_gpu_blocks_override=30, max_num_batched_tokens=24,
             max_num_seqs=8, max_model_len=256, trace=str(path)) as llm:
        step = 0
        while prompts or llm.has_unfinished_requests():
            if prompts and step % 3 == 0:
                name, text = prompts.pop(0)
                llm.add_request(name, text, SamplingParams(
                    temperature=0.7, seed=step, max_tokens=20 + 9 * step % 70, ignore_eos=True))
            llm.step()
            step += 1


def main() -> None:
    run(PAGE)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(install(), Path(profile), (1440, 860))
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.open(PAGE, f"#{FRAME}")
            picture = HERE / f"trace-{scheme}.png"
            picture.write_bytes(base64.b64decode(
                browser("Page.captureScreenshot", format="png")["data"]))
            print(f"wrote {picture}")
        browser.close()


if __name__ == "__main__":
    main()
