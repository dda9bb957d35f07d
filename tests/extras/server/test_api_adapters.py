"""Adapters behind the door: each is a model of its own name."""

import pytest

pytest.importorskip("fastapi")

from adapters import SMALL, Adapters  # noqa: E402
from serving import NAME, Serving  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve_extras.server import cli  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def voices(checkpoints, tmp_path_factory):
    voices = Adapters(checkpoints["qwen3"], tmp_path_factory.mktemp("voices"))
    voices.write(1), voices.write(2)
    return voices


def test_a_model_by_an_adapters_name_speaks_with_it(voices):
    with LLM(voices.base, **SMALL) as llm:
        texts = {seed: llm.generate("hello", use_tqdm=False, sampling_params=GREEDY,
                                    lora_request=voices.request(seed))[0].outputs[0].text
                 for seed in (None, 1, 2)}
    assert len(set(texts.values())) == 3
    llm = LLM(voices.base, **SMALL)
    modules = [("one", str(voices.root / "adapter-1")), ("two", str(voices.root / "adapter-2"))]
    with Serving(llm, lora_requests=cli.load_adapters(llm, modules)) as serving:
        for seed, name in ((None, NAME), (1, "one"), (2, "two"), (1, "one")):
            body = dict(model=name, prompt="hello", temperature=0, max_tokens=8)
            status, answer = serving.ask("/v1/completions", body)
            assert status == 200 and answer["model"] == name
            assert answer["choices"][0]["text"] == texts[seed], name
        status, models = serving.ask("/v1/models")
        assert [model["id"] for model in models["data"]] == [NAME, "other-name", "one", "two"]
        error = serving.refusal("/v1/completions", dict(model="three", prompt="a"), 404)
        assert "one, two" in error["message"]


def test_a_model_by_an_adapters_name_embeds_with_it(voices):
    options = SMALL | dict(runner="pooling")
    with LLM(voices.base, **options) as llm:
        vectors = {seed: llm.embed("hello", use_tqdm=False, lora_request=voices.request(seed)
                                   )[0].outputs.embedding for seed in (None, 1)}
    modules = [("one", str(voices.root / "adapter-1"))]
    llm = LLM(voices.base, **options)
    with Serving(llm, lora_requests=cli.load_adapters(llm, modules)) as serving:
        for seed, name in ((None, NAME), (1, "one")):
            status, answer = serving.ask("/v1/embeddings", dict(model=name, input="hello"))
            assert status == 200 and answer["model"] == name
            assert answer["data"][0]["embedding"] == pytest.approx(vectors[seed], abs=1e-6)
        assert vectors[None] != pytest.approx(vectors[1], abs=1e-2)


def test_an_adapter_that_is_not_there_is_found_before_the_door_opens(voices, capsys):
    with pytest.raises(SystemExit):
        cli.main([str(voices.base), "--port", "0", "--enable-lora", "--num-gpu-blocks-override",
                  "16", "--lora-modules", "voice=/nowhere"])
    assert "lora_path='/nowhere'" in capsys.readouterr().err
