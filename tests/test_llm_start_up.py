"""What an engine decides, says and refuses when it starts.

Every start-up error must name the field, its value and the remedy, and the remedy has to work.
"""

import pytest
import torch
from clean_process import needs_extras
from dummy_engines import assert_serves, start
from helpers import write_json

from nanoserve import LLM, self_test
from nanoserve.llm import LLM as PlainLLM


def test_an_explicit_max_model_len_above_the_models_is_refused(dummy):
    with pytest.raises(ValueError, match="max_model_len=257 .* 256 .*hf_overrides"):
        start(dummy, max_model_len=257)
    llm = start(dummy, max_model_len=257, hf_overrides=dict(max_position_embeddings=512))
    assert llm.config.max_model_len == 257
    assert_serves(llm)


def test_an_explicit_max_model_len_above_the_cache_is_refused(dummy):
    with pytest.raises(ValueError, match="max_model_len=65 .*64 tokens.*kv_cache_memory_bytes"):
        start(dummy, max_model_len=65, num_gpu_blocks_override=4)
    assert_serves(start(dummy, max_model_len=64, num_gpu_blocks_override=4))


@needs_extras
def test_one_token_is_no_room_for_an_answer(dummy):
    """Such an engine would start, and refuse every prompt."""
    with pytest.raises(ValueError, match="max_model_len=1 "):
        start(dummy, max_model_len=1)
    with pytest.raises(ValueError, match="cache of one token has no room.*raise"):
        start(dummy, num_gpu_blocks_override=1, block_size=1)
    (output,) = start(dummy, max_model_len=2).generate([[1]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    pooler = start(dummy, runner="pooling", num_gpu_blocks_override=1, block_size=1)
    assert len(pooler.embed([1], use_tqdm=False)[0].outputs.embedding) > 0  # has none to make


def test_a_dtype_that_is_too_small_is_replaced_and_said(dummy, capsys):
    llm = start(dummy, device="cpu", dtype="auto", hf_overrides=dict(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", dtype="float16"))
    assert llm.config.dtype != "float16" and "overflow in float16" in capsys.readouterr().err


def test_kernels_that_cannot_be_had_are_replaced_and_said(dummy, capsys, monkeypatch):
    load = self_test.load_backend

    def without_a_compiler(kernels: str):
        if kernels == "cpu":
            raise ImportError("there is no compiler")
        return load(kernels)

    monkeypatch.setattr(self_test, "load_backend", without_a_compiler)
    llm = start(dummy, device="cpu", kernels="auto")
    assert llm.config.kernels == "torch"
    assert "there is no compiler. kernels='torch' takes its place" in capsys.readouterr().err


def test_eight_bits_for_keys_with_biases_need_the_extras(checkpoints):
    """Which tell layers apart in which they are too wide."""
    with pytest.raises(ValueError, match="kv_cache_dtype='int8'.*biases.*nanoserve_extras"):
        PlainLLM(checkpoints["qwen2"], kv_cache_dtype="int8", num_gpu_blocks_override=4)


def test_an_open_max_model_len_is_lowered_and_said(dummy, capsys):
    llm = start(dummy, num_gpu_blocks_override=4)
    assert llm.config.max_model_len == 64
    said = capsys.readouterr().err
    assert "max_model_len is lowered from 256 to 64" in said and "kv_cache_memory_bytes" in said
    assert_serves(llm)
    with pytest.raises(ValueError, match="64 tokens.* 64 tokens"):
        llm.generate([[1] * 64], use_tqdm=False)
    assert_serves(llm)


def test_the_start_up_line_says_on_what_and_how(qwen3, capsys):
    """132 tokens/s instead of 9,500 with no warning: a slow path was taken silently (nano-vllm
    #245). The engine says its device, dtype, attention backend and graphs."""
    LLM(qwen3, num_gpu_blocks_override=40, max_num_seqs=5, dtype="bfloat16", device="cpu",
        async_scheduling=True, kernels="torch")
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    for words in ("qwen3", "cpu", "bfloat16", "torch", "640 tokens", "max_model_len 256"):
        assert words in line


@needs_extras  # which say more
@pytest.mark.parametrize("architecture, reason", [
    ("MambaForCausalLM", "its layers keep a recurrent state"),
    ("Qwen2MoeForCausalLM", "has no model of that name that writes text for 'mamba'")])
def test_an_unsupported_architecture_is_named_with_the_reason(dummy, architecture, reason):
    write_json(dummy / "config.json", architectures=[architecture], model_type="mamba")
    with pytest.raises(ValueError, match=f"{architecture}.*{reason}.*models.md"):
        start(dummy)


@needs_extras
@pytest.mark.parametrize("architectures", [[], None])
def test_a_config_without_an_architecture_is_told_the_supported_ones(dummy, architectures):
    write_json(dummy / "config.json", architectures=architectures, model_type="mamba")
    with pytest.raises(ValueError, match="mamba.*LlamaForCausalLM, .*Gemma3ForCausalLM"):
        start(dummy)


def test_a_checkpoint_in_an_unsupported_dtype_can_be_run_in_another(dummy):
    """The remedy that the message names has to work."""
    with pytest.raises(ValueError, match="dtype must be one of auto, float32.*'float64'"):
        start(dummy, hf_overrides=dict(dtype="float64"))
    assert_serves(start(dummy, hf_overrides=dict(dtype="float64"), dtype="float32"))
    assert_serves(start(dummy, dtype=torch.float32))  # torch's own spelling is welcome, too


@needs_extras
@pytest.mark.parametrize("model", [None, 5, "", "  "])
def test_a_model_that_is_no_name_is_explained(model):
    with pytest.raises(ValueError, match="model.*hub id"):
        LLM(model)


def test_hf_overrides_are_laid_over_the_file(dummy):
    llm = start(dummy, hf_overrides=dict(num_hidden_layers=1, head_dim=24, rope_theta=77.0),
                kernels="torch")
    assert len(llm.runner.model.layers) == len(llm.runner.kv_cache) == 1
    assert llm.runner.kv_cache[0][0].shape[-1] == 24
    assert llm.model_config.rope.frequencies[1] == pytest.approx(77 ** (-2 / 24))
    assert_serves(llm)
    with pytest.raises(ValueError, match="hidden_act='relu'"):
        start(dummy, hf_overrides=dict(hidden_act="relu"))
