"""What our own decoder can do, it can do for the text inside a wrapping.

The oracle is the same engine on the same weights as a plain checkpoint, which other tests compare
with transformers. Three dialects of names.
"""

import json

import pytest
import torch
from loading import greedy
from packing import FORMATS, write
from safetensors.torch import load_file, save_file
from wrappings import DIALECTS, as_wrapping

from nanoserve import LLM, LoRARequest, SamplingParams

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
    tensors, merged = load_file(flat / "model.safetensors"), tmp_path / "merged"
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        a, b = (torch.randn(shape, generator=generator) * 0.3
                for shape in ((4, 64), (tensors[name].shape[0], 4)))
        tensors[name] = tensors[name] + 2 * b @ a
        pairs[name.removesuffix(".weight")] = a, b
    merged.mkdir()
    for file in flat.glob("*.json"):
        (merged / file.name).write_text(file.read_text())
    save_file(tensors, merged / "model.safetensors")
    expected = text_of(merged)
    assert expected != text_of(flat)
    with LLM(folder, **SMALL, enable_lora=True) as llm:
        for number, dialect in enumerate(DIALECTS, 1):
            adapter = tmp_path / f"adapter-{number}"
            adapter.mkdir()
            named = {name.replace("model.", dialect, 1): pair for name, pair in pairs.items()}
            save_file({f"base_model.model.{name}.lora_{letter}.weight": matrix.contiguous()
                       for name, pair in named.items()
                       for letter, matrix in zip("AB", pair, strict=True)},
                      adapter / "adapter_model.safetensors")
            (adapter / "adapter_config.json").write_text(json.dumps(dict(
                peft_type="LORA", r=4, lora_alpha=8, target_modules=["q_proj"])))
            output = llm.generate([list(range(20))], SamplingParams(temperature=0, max_tokens=12),
                                  lora_request=LoRARequest(str(number), number, str(adapter)))[0]
            assert output.outputs[0].token_ids == expected
