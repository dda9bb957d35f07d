"""Text of multimodal checkpoints: token for token what transformers' whole network writes.

The oracle has all towers; the engine has none of them. Checkpoints are those of wrappings.py.
`benchmarks.models` runs every mode of `verify`; here is the one that has most of them at once.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from architectures import MAX_TOKENS, Made, assert_parity, texts_by
from helpers import watch_steps, write_json
from safetensors.torch import load_file, save_file
from wrappings import OURS, REFUSED, SERVED, make_wrapping, reference

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig

# 10 blocks of 5 hold the longest text and little more: everybody else is preempted, in chunks of 7.
# The second time prompts are found in the prefix cache.
BUSY = dict(num_gpu_blocks_override=10, block_size=5, max_num_batched_tokens=7,
            async_scheduling=True)
WHO = [pytest.param(name, "nanoserve" if name in OURS else "transformers",
                    marks=[pytest.mark.full] * (name == "qwen3.5-moe")) for name in SERVED]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("wrappings"), make_wrapping)


@pytest.fixture(scope="session")
def few_prompts() -> list[list[int]]:
    """Around blocks and windows, two with a common beginning."""
    rng = random.Random(0)
    shared, *own = ([rng.randrange(250) for _ in range(n)] for n in (20, 1, 16, 11, 5))
    return [*own[:2], shared + own[2], shared + own[3]]


@pytest.fixture(scope="session")
def texts_of(folders, few_prompts):
    return texts_by(folders, few_prompts, reference)


def start(folder, **options) -> LLM:
    return LLM(folder, **dict(num_gpu_blocks_override=24, dtype="float32") | options)


@pytest.mark.parametrize("name, impl", WHO)
def test_text_alone_is_what_the_whole_network_writes(folders, few_prompts, texts_of, name, impl,
                                                     capsys):
    assert len({tuple(tokens) for tokens, _ in texts_of(name)}) == len(few_prompts)  # lively
    with start(folders[name], model_impl=impl, **BUSY) as llm:
        steps = watch_steps(llm)
        assert_parity(llm, few_prompts, texts_of(name), name)
        said = capsys.readouterr().err
        assert f"ForConditionalGeneration by {impl}" in said and ", text only, " in said
        assert not any(words in path for path, _ in llm.runner.model.named_parameters()
                       for words in ("vis", "projector", "connector"))
        assert any(step.preempted for step in steps)


def test_auto_takes_our_decoder_where_the_text_is_of_one_of_its_families(folders):
    for name in (*SERVED, *REFUSED):
        assert ModelConfig.is_known(folders[name]) == (name in OURS), name


def test_what_is_left_out_is_said_in_bytes_and_never_read(folders, tmp_path, capsys):
    """Whatever the towers' numbers are, also in a dtype that text could not have."""
    tensors = load_file(folders["gemma3"] / "model.safetensors")
    towers = {name: torch.zeros(5_000_000, dtype=torch.int8) for name in tensors
              if "language_model" not in name}
    for file in folders["gemma3"].glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    save_file(tensors | towers, tmp_path / "model.safetensors")
    for impl in ("nanoserve", "transformers"):
        start(tmp_path, model_impl=impl).shutdown()
        assert f"text only, {5e6 * len(towers) / 1e9:.2g} GB of towers left out" in (
            capsys.readouterr().err)


def test_files_whose_towers_were_stripped_serve_text(folders, few_prompts, texts_of, tmp_path):
    for name in ("llava", "glm4v"):
        folder = tmp_path / name
        folder.mkdir()
        for file in folders[name].glob("*.json"):
            (folder / file.name).write_text(file.read_text())
        tensors = load_file(folders[name] / "model.safetensors")
        save_file({key: tensor for key, tensor in tensors.items()
                   if "vis" not in key and "projector" not in key}, folder / "model.safetensors")
        for impl in ("auto", "transformers"):
            with start(folder, model_impl=impl) as llm:
                assert_parity(llm, few_prompts, texts_of(name), name)


def test_random_weights_need_a_config_alone(folders, tmp_path):
    for name, impl in (("glm4v", "auto"), ("gemma3n", "auto"), ("qwen3-vl", "nanoserve")):
        (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
        with start(tmp_path, load_format="dummy", skip_tokenizer_init=True,
                   model_impl=impl) as llm:
            output = llm.generate([[1, 2, 3]], SamplingParams(
                temperature=0, max_tokens=3, ignore_eos=True, detokenize=False))[0].outputs[0]
            assert len(output.token_ids) == 3


def test_a_head_that_is_stored_counts_unless_all_say_that_it_is_the_embedding(
        folders, few_prompts, tmp_path):
    """Mistral Small 3.1 has one and says nothing, and its class that the head is the embedding.
    Where a file says so without a word against it, one of the two was trained and would be lost:
    each network and each door refuses that, as for a model without towers."""
    folder = changed(folders["gemma3"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = torch.randn(260, 32, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {"language_model.lm_head.weight": head}, folder / "model.safetensors",
              {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for impl in ("nanoserve", "transformers"):
        with pytest.raises(ValueError, match="lm_head.weight.*false"):
            start(folder, model_impl=impl)
    texts = None
    for outer, inner in ((None, None), (False, True), (True, False)):
        for part, says in ((config, outer), (config["text_config"], inner)):
            part.pop("tie_word_embeddings", None)
            part |= {} if says is None else dict(tie_word_embeddings=says)
        (folder / "config.json").write_text(json.dumps(config))
        oracle = None if texts else reference(folder)
        texts = texts or [oracle.generate(prompt, MAX_TOKENS) for prompt in few_prompts]
        for impl in ("nanoserve", "transformers"):
            with start(folder, model_impl=impl) as llm:
                assert_parity(llm, few_prompts, texts, impl)


def test_overrides_reach_the_text(folders):
    for impl in ("nanoserve", "transformers"):
        for overrides in (dict(max_position_embeddings=64),
                          dict(text_config=dict(max_position_embeddings=64))):
            with start(folders["llava"], model_impl=impl, hf_overrides=overrides) as llm:
                assert llm.config.max_model_len == 64


# ----------------------------------------------------------------- bad input


def changed(folder: Path, to: Path, rename=lambda name: name, **entries) -> Path:
    for file in folder.glob("*.json"):
        (to / file.name).write_text(file.read_text())
    write_json(to / "config.json", **entries)
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def test_names_of_two_dialects_are_refused_before_weights_are_read(folders, tmp_path):
    folder = changed(folders["qwen3-vl"], tmp_path, lambda name: name.replace(
        "model.language_model.layers.1", "model.layers.1"))
    for impl in ("nanoserve", "transformers"):
        with pytest.raises(ValueError, match=r"model\. and model\.language_model\."):
            start(folder, model_impl=impl)


def test_a_wrapping_without_a_text_part_is_named(folders, tmp_path):
    for name, impl in (("gemma3", "auto"), ("gemma3", "transformers"), ("gemma4", "auto")):
        folder = tmp_path / f"{name}-{impl}"
        folder.mkdir()
        changed(folders[name], folder, text_config=None)
        with pytest.raises(ValueError, match="ForConditionalGeneration.*text_config=None"):
            start(folder, model_impl=impl)


def test_towers_that_the_config_does_not_know_are_named(folders, tmp_path):
    text = json.loads((folders["gemma3"] / "config.json").read_text())["text_config"]
    folder = changed(folders["gemma3"], tmp_path, **text | dict(
        architectures=["Gemma3ForCausalLM"], text_config=None, vision_config=None))
    for impl in ("nanoserve", "transformers"):
        with pytest.raises(ValueError, match="multi_modal_projector.*Gemma3ForCausalLM"):
            start(folder, model_impl=impl)


def test_integers_in_the_place_of_weights_are_named(folders, tmp_path):
    """In a dialect of names transformers would take them for floats."""
    folder = changed(folders["llava"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    for impl in ("nanoserve", "transformers"):
        with pytest.raises(ValueError, match=f"{name}.*int8"):
            start(folder, model_impl=impl)


def test_missing_tensors_of_the_text_are_named(folders, tmp_path):
    for name in ("qwen3-vl", "glm4v"):
        folder = tmp_path / name
        folder.mkdir()
        changed(folders[name], folder)
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.language_model.layers.1.self_attn.k_proj.weight"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match="missing.*layers.1.self_attn.k_proj.weight"):
            start(folder)
