"""A file of prompts through Ray Data: the texts of one engine, in the order of the prompts.

Oracle: offline `generate` with the same seeds. What needs Ray itself runs where it is installed
(the extra test-full), with two actors on this machine.
"""

import json
import sys

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.tools import ray_batch

OPTIONS = dict(dtype="float32", num_gpu_blocks_override=64)
SAMPLING = dict(temperature=0.8, max_tokens=6, seed=40)
PROMPTS = [f"{words} {i}" for i in range(3) for words in ("Once upon a time", "The king")]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(**OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, [SamplingParams(**SAMPLING | dict(seed=40 + i))
                                         for i in range(len(PROMPTS))], use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_an_actor_gives_what_generate_gives(expected):
    """Whatever batches the prompts come in."""
    from nanoserve.llm import BUNDLED_MODEL

    engine = ray_batch.Engine(str(BUNDLED_MODEL), OPTIONS, SAMPLING)
    for places in ([0, 1, 2, 3, 4, 5], [5, 2], [3]):
        found = engine(dict(index=places, prompt=[PROMPTS[i] for i in places]))
        assert found["text"] == [expected[i] for i in places]
        assert found["index"] == places and set(found["num_tokens"]) <= set(range(1, 7))
    engine.llm.shutdown()


def test_two_actors_write_one_file_in_order(expected, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="it is one of the extra 'test-full'")
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS))
    monkeypatch.setattr(sys, "argv", [
        "ray_batch", str(tmp_path / "prompts.txt"), str(tmp_path / "texts.jsonl"), "--actors", "2",
        "--cpus", "0.5", "--batch-size", "2", "--seed", "40", "--max-tokens", "6",
        "--engine", json.dumps(OPTIONS)])
    ray_batch.main()
    ray.shutdown()
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == expected
    assert set(rows[0]) == {"prompt", "text", "finish_reason", "num_tokens"}
