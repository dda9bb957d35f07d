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
        status, answer = serving.ask("/v1/completions", dict(model="three", prompt="a"))
        assert status == 404 and "one, two" in answer["error"]["message"]


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


@pytest.mark.parametrize("modules, words", [
    (["voice"], "must be NAME=FOLDER"), (["=x"], "must be NAME=FOLDER"),
    (["voice=/nowhere"], "lora_path='/nowhere'")])
def test_adapters_that_are_wrong_are_found_before_the_door_opens(voices, modules, words, capsys):
    with pytest.raises(SystemExit):
        cli.main([str(voices.base), "--port", "0", "--enable-lora", "--num-gpu-blocks-override",
                  "16", "--lora-modules", *modules])
    assert words in capsys.readouterr().err


def test_an_adapter_without_enable_lora_says_what_is_missing(voices, capsys):
    with pytest.raises(SystemExit):
        cli.main([str(voices.base), "--port", "0", "--num-gpu-blocks-override", "16",
                  "--lora-modules", f"one={voices.root / 'adapter-1'}"])
    assert "without --enable-lora" in capsys.readouterr().err


@pytest.mark.parametrize(("names", "modules"), [
    (["a"], ["b", "a"]), (["a", "b"], ["b"]), (["m"], ["a", "a"]), (["a", "a"], [])])
def test_two_models_of_one_name_are_refused_before_anything_is_loaded(names, modules, capsys):
    """An adapter named like the model answered in its place, and /v1/models had the name twice."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--port", "0", "--enable-lora", "--served-model-name", *names, "--lora-modules",
                  *(f"{name}=/nowhere" for name in modules)] if modules else
                 ["--port", "0", "--served-model-name", *names])
    assert ended.value.code == 2
    assert f"two models have the name {'b' if 'b' in names else 'a'!r}" in capsys.readouterr().err
