"""Text of multimodal checkpoints: token for token what transformers' whole network writes.

The oracle has all towers; the engine has none of them. Checkpoints are those of wrappings.py.
`benchmarks.models` runs every mode of `verify`; here is the one that has most of them at once.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from adapters import Adapters
from architectures import MAX_TOKENS, Made, assert_parity, texts_by
from helpers import watch_steps, write_json
from loading import greedy
from packing import FORMATS, write
from safetensors.torch import load_file, save_file
from wrappings import DIALECTS, OURS, REFUSED, SERVED, as_wrapping, make_wrapping, reference

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve_extras.base.config_files import ModelConfig

# 10 blocks of 5 hold the longest text and little more: everybody else is preempted, in chunks of 7.
# The second time prompts are found in the prefix cache.
BUSY = dict(num_gpu_blocks_override=10, block_size=5, max_num_batched_tokens=7,
            async_scheduling=True)
WHO = [pytest.param(name, "nanoserve" if name in OURS else "transformers",
                    marks=[pytest.mark.full] * name.startswith("qwen3.5")) for name in SERVED]


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


def changed(folder: Path, to: Path, tensors=lambda stored: stored, **entries) -> Path:
    """A copy with other entries of config.json, and other tensors."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        (to / file.name).write_text(file.read_text())
    write_json(to / "config.json", **entries)
    stored = tensors(load_file(folder / "model.safetensors"))
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("name, impl", WHO)
def test_text_alone_is_what_the_whole_network_writes(folders, few_prompts, texts_of, name, impl,
                                                     capsys):
    assert len({tuple(tokens) for tokens, _ in texts_of(name)}) == len(few_prompts)  # lively
    with start(folders[name], model_impl=impl, **BUSY) as llm:
        steps = watch_steps(llm)
        assert_parity(llm, few_prompts, texts_of(name), name)
        assert f"ForConditionalGeneration by {impl}" in llm.describe()
        assert ", text only, " in capsys.readouterr().err
        assert not any(words in path for path, _ in llm.runner.model.named_parameters()
                       for words in ("vis", "projector", "connector"))
        assert any(step.preempted for step in steps)


def test_auto_takes_our_decoder_where_the_text_is_of_one_of_its_families(folders):
    for name in (*SERVED, *REFUSED):
        assert ModelConfig.is_known(folders[name]) == (name in OURS), name


def test_what_is_left_out_is_said_in_bytes_and_never_read(folders, tmp_path, capsys):
    """Whatever the towers' numbers are, also in a dtype that text could not have."""
    towers = {name: torch.zeros(5_000_000, dtype=torch.int8)
              for name in load_file(folders["gemma3"] / "model.safetensors")
              if "language_model" not in name}
    changed(folders["gemma3"], tmp_path, lambda stored: stored | towers)
    for impl in ("nanoserve", "transformers"):
        start(tmp_path, model_impl=impl).shutdown()
        assert f"text only, {5e6 * len(towers) / 1e9:.2g} GB of towers left out" in (
            capsys.readouterr().err)


def test_files_whose_towers_were_stripped_serve_text(folders, few_prompts, texts_of, tmp_path):
    for name in ("llava", "glm4v"):
        folder = changed(folders[name], tmp_path / name, lambda stored: {
            key: one for key, one in stored.items() if "vis" not in key and "projector" not in key})
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
    head = torch.randn(260, 32, generator=torch.Generator().manual_seed(0))
    folder = changed(folders["gemma3"], tmp_path, lambda stored: stored | {
        "language_model.lm_head.weight": head})
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


UP = "language_model.model.layers.1.mlp.up_proj.weight"
KEYS = "layers.1.self_attn.k_proj.weight"
BOTH = ("nanoserve", "transformers")


def without_keys(stored: dict) -> dict:
    return {name: one for name, one in stored.items() if f"language_model.{KEYS}" not in name}


@pytest.mark.parametrize("name, impls, tensors, entries, words", [
    ("qwen3-vl", BOTH, lambda stored: {
        key.replace("model.language_model.layers.1", "model.layers.1"): one
        for key, one in stored.items()}, {}, r"model\. and model\.language_model\."),
    ("gemma3", ("auto", "transformers"), dict, dict(text_config=None),
     "ForConditionalGeneration.*text_config=None"),
    ("gemma4", ("auto",), dict, dict(text_config=None),
     "ForConditionalGeneration.*text_config=None"),
    # in a dialect of names transformers would take integers for floats
    ("llava", BOTH, lambda stored: stored | {UP: stored[UP].to(torch.int8)}, {}, f"{UP}.*int8"),
    ("qwen3-vl", ("auto",), without_keys, {}, f"missing.*{KEYS}"),
    ("glm4v", ("auto",), without_keys, {}, f"missing.*{KEYS}")],
    ids=["two dialects", "no text", "no text", "integers", "missing", "missing"])
def test_what_does_not_fit_is_named(folders, tmp_path, name, impls, tensors, entries, words):
    folder = changed(folders[name], tmp_path, tensors, **entries)
    for impl in impls:
        with pytest.raises(ValueError, match=words):
            start(folder, model_impl=impl)


def test_towers_that_the_config_does_not_know_are_named(folders, tmp_path):
    text = json.loads((folders["gemma3"] / "config.json").read_text())["text_config"]
    folder = changed(folders["gemma3"], tmp_path, **text | dict(
        architectures=["Gemma3ForCausalLM"], text_config=None, vision_config=None))
    for impl in ("nanoserve", "transformers"):
        with pytest.raises(ValueError, match="multi_modal_projector.*Gemma3ForCausalLM"):
            start(folder, model_impl=impl)


# -------------------------------------------------------------- what our own decoder does with them
# The oracle is the same engine on the same weights as a plain checkpoint, which other tests compare
# with transformers. Three dialects of names.


SMALL = dict(dtype="float32", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=32,
             device="cpu")


def text_of(folder, **options) -> list:
    with LLM(folder, **SMALL | options) as llm:
        return greedy(llm, 12)


@pytest.mark.parametrize("name, dialect", [
    *(("qwen3", dialect) for dialect in DIALECTS), ("llama-bias", "language_model.model.")])
def test_all_dialects_and_rounded_weights_write_what_the_plain_checkpoint_does(
        checkpoints, tmp_path, name, dialect):
    folder = as_wrapping(checkpoints[name], tmp_path / "wrapped", dialect)
    for options in ({}, dict(quantization="int8"), dict(quantization="int4")):
        assert text_of(folder, **options) == text_of(checkpoints[name], **options)


@pytest.mark.parametrize("form", ["gptq", "fp8, blocks", "pack-quantized"])
def test_quantised_files_are_unpacked(checkpoints, tmp_path, form):
    """Their entry stands in the outer config."""
    flat, dense = write(checkpoints["qwen3"], tmp_path, FORMATS[form])
    folder = as_wrapping(flat, tmp_path / "wrapped", "model.language_model.")
    assert text_of(folder) == text_of(dense)


def test_ranks_have_their_shares(checkpoints, tmp_path, ranks_in_threads):
    folder = as_wrapping(checkpoints["qwen3"], tmp_path / "wrapped", "model.")
    expected = text_of(checkpoints["qwen3"])
    assert text_of(folder, tensor_parallel_size=2) == expected


def test_adapters_in_any_dialect_change_the_text(checkpoints, tmp_path):
    """PEFT writes the names of the modules that it has adapted, which are those of its version of
    transformers and not those in the checkpoint."""
    flat = checkpoints["qwen3"]
    folder = as_wrapping(flat, tmp_path / "wrapped", "language_model.model.")
    adapter = Adapters(flat, tmp_path).write(1, ["q_proj"])
    file, expected = adapter / "adapter_model.safetensors", text_of(tmp_path / "merged-1")
    stored = load_file(file)
    assert expected != text_of(flat)
    with LLM(folder, **SMALL, enable_lora=True) as llm:
        for number, dialect in enumerate(DIALECTS, 1):
            save_file({name.replace(".model.model.", f".model.{dialect}"): tensor
                       for name, tensor in stored.items()}, file)
            output = llm.generate([list(range(20))], SamplingParams(temperature=0, max_tokens=12),
                                  lora_request=LoRARequest(str(number), number, str(adapter)))[0]
            assert output.outputs[0].token_ids == expected
