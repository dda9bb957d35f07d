"""What can be chosen, what is refused, and what the engine decides: `EngineConfig`, `ModelConfig`.

Every start-up error must name the field, its value and the remedy. What a `config.json` means is
checked against transformers: its config classes for what a file may leave out, its
`modeling_rope_utils` for the frequencies.
"""

import dataclasses
import json
import math
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import write_json
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve import LLM, SamplingParams, model_runner
from nanoserve.device import memory
from nanoserve.config import EngineConfig
from nanoserve.layers import RotaryEmbedding, rope_frequencies
from nanoserve.device.memory import free_cpu_memory
from nanoserve.checkpoint.model_config import FAMILIES, ModelConfig, RopeConfig
from nanoserve.model_runner import ModelRunner, fit_to_device, pick_device

SIZES = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
LLAMA = dict(architectures=["LlamaForCausalLM"], **SIZES)
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], **SIZES)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)


@pytest.fixture
def dummy(tmp_path) -> Path:
    """A folder with nothing but a config.json: enough for random weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def start(folder, **options) -> LLM:
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, **options)


def assert_serves(llm: LLM) -> None:
    """A short request goes through."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3, 4, 5]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


# ------------------------------------------------------- values that can't work


@pytest.mark.parametrize("options, words", [
    (dict(dtype="float8"), ["dtype='float8'", "bfloat16"]),
    (dict(load_format="gguf"), ["load_format='gguf'", "safetensors"]),
    (dict(scheduling_policy="lifo"), ["scheduling_policy='lifo'", "fcfs, priority"]),
    (dict(device="tpu"), ["device='tpu'", "cpu, cuda"]),
    (dict(gpu_memory_utilization=0), ["gpu_memory_utilization", "(0, 1]", "got 0"]),
    (dict(gpu_memory_utilization=1.1), ["gpu_memory_utilization", "(0, 1]", "got 1.1"]),
    (dict(gpu_memory_utilization=True), ["gpu_memory_utilization", "(0, 1]", "got True"]),
    (dict(async_scheduling="no"), ["async_scheduling='no'", "None, True, False"]),
    (dict(expert_parallel=2), ["expert_parallel=2", "True, False"]),
    (dict(gpu_memory_utilization=float("nan")), ["gpu_memory_utilization", "(0, 1]", "got nan"]),
    (dict(hf_overrides=["x"]), ["hf_overrides", "dict", "['x']"]),
    (dict(tensor_parallel_size=0), ["tensor_parallel_size", "at least 1", "got 0"]),
    (dict(max_num_batched_tokens=8, max_num_seqs=9),
     ["max_num_batched_tokens=8", "max_num_seqs=9", "raise the first or lower the second"]),
], ids=str)
def test_bad_options_are_refused_with_field_value_and_remedy(options, words):
    with pytest.raises(ValueError) as error:
        EngineConfig(model="none", **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", [
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "tensor_parallel_size"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "16", True], ids=repr)
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"{name} .* at least 1, got {re.escape(repr(value))}"):
        EngineConfig(model="none", **{name: value})


def test_an_unknown_keyword_is_a_type_error(dummy):
    """Engines of this kind took any keyword and ignored it: a mistyped limit was no limit."""
    with pytest.raises(TypeError, match="max_seq_num.*max_num_seqs"):
        start(dummy, max_seq_num=3)
    with pytest.raises(TypeError):
        LLM(dummy, "tokenizer")  # everything after the model is keyword-only
    assert_serves(start(dummy, max_num_seqs=3))


def test_configs_are_frozen():
    """What is only known later (the number of KV blocks) is never written into a config."""
    for config in (EngineConfig(model="none"), ModelConfig.from_dict(LLAMA), RopeConfig()):
        for field in dataclasses.fields(config):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, field.name, 1)


# ---------------------------------------------------- what the engine decides


def resolved(device="cpu", **options) -> EngineConfig:
    return EngineConfig(model="none", **options).resolved(device, ModelConfig.from_dict(LLAMA))


@pytest.mark.parametrize("device, options, num_tokens, num_seqs", [
    ("cpu", {}, 2048, 64),
    ("cuda", {}, 8192, 256),
    # An explicit budget pulls the number of sequences down with it ...
    ("cpu", dict(max_num_batched_tokens=1), 1, 1),
    ("cuda", dict(max_num_batched_tokens=100), 100, 100),
    ("cuda", dict(max_num_batched_tokens=300), 300, 256),
    # ... and an explicit number of sequences the budget up.
    ("cpu", dict(max_num_seqs=5000), 5000, 5000),
    ("cpu", dict(max_num_seqs=3), 2048, 3),
    ("cpu", dict(max_num_batched_tokens=7, max_num_seqs=7), 7, 7),
])
def test_budget_and_sequences_by_default(device, options, num_tokens, num_seqs):
    config = resolved(device, **options)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (num_tokens, num_seqs)
    assert config.device == device


def test_resolved_leaves_only_memory_and_extras_open():
    config = resolved(dtype="auto")
    open_choices = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    assert open_choices == {"tokenizer", "hf_overrides", "kv_cache_memory_bytes",
                            "num_gpu_blocks_override", "pooler_config", "speculative_config",
                            "trace"}
    assert (config.max_model_len, config.dtype) == (256, "float32")
    assert config.async_scheduling is False
    assert resolved(dtype="float16", async_scheduling=True).dtype == "float16"


def test_whole_prompts_need_a_step_that_holds_them():
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    long = ModelConfig.from_dict(LLAMA | dict(max_position_embeddings=3000))
    config = EngineConfig(model="none", enable_chunked_prefill=False).resolved("cpu", long)
    assert config.max_num_batched_tokens == 3000
    with pytest.raises(ValueError, match="enable_chunked_prefill=False.*max_num_batched_tokens=100"
                                         ".*max_model_len=256"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=100)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, dummy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match='device="cuda".*no GPU.*device="cpu"'):
        start(dummy, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (pick_device("auto"), pick_device("cpu")) == ("cuda", "cpu")


# -------------------------------------------------------------------- memory


def test_an_explicit_max_model_len_above_the_models_is_refused(dummy):
    with pytest.raises(ValueError, match="max_model_len=257 .* 256 .*hf_overrides"):
        start(dummy, max_model_len=257)
    llm = start(dummy, max_model_len=257, hf_overrides=dict(max_position_embeddings=512))
    assert llm.config.max_model_len == 257
    assert_serves(llm)


def test_an_explicit_max_model_len_above_the_cache_is_refused(dummy):
    with pytest.raises(ValueError, match="max_model_len=65 .* 64 tokens .*4 blocks of 16.*"
                                         "kv_cache_memory_bytes"):
        start(dummy, max_model_len=65, num_gpu_blocks_override=4)
    assert_serves(start(dummy, max_model_len=64, num_gpu_blocks_override=4))


def test_one_token_is_no_room_for_an_answer(dummy):
    """Such an engine would start, and refuse every prompt."""
    with pytest.raises(ValueError, match="max_model_len=1 leaves no room.*raise"):
        start(dummy, max_model_len=1)
    with pytest.raises(ValueError, match="cache of one token has no room.*raise"):
        start(dummy, num_gpu_blocks_override=1, block_size=1)
    (output,) = start(dummy, max_model_len=2).generate([[1]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    pooler = start(dummy, runner="pooling", num_gpu_blocks_override=1, block_size=1)
    assert len(pooler.embed([1], use_tqdm=False)[0].outputs.embedding) > 0  # has none to make


def test_an_open_max_model_len_is_lowered_and_said(dummy, capsys):
    llm = start(dummy, num_gpu_blocks_override=4)
    assert llm.config.max_model_len == 64
    said = capsys.readouterr().err
    assert "max_model_len is lowered from 256 to 64" in said and "kv_cache_memory_bytes" in said
    assert_serves(llm)
    with pytest.raises(ValueError, match="64 tokens and max_model_len is 64"):
        llm.generate([[1] * 64], use_tqdm=False)
    assert_serves(llm)


# A block of 16 tokens: 2 layers, K and V, 2 KV heads of 16 numbers, 4 bytes each.
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4


def test_kv_cache_memory_bytes_is_met_to_the_block(dummy):
    llm = start(dummy, kv_cache_memory_bytes=5 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert llm.scheduler.blocks.num_blocks == 5
    held = sum(t.numel() * t.element_size() for kv in llm.runner.kv_cache for t in kv)
    assert held == 5 * BLOCK_BYTES
    half = start(dummy, kv_cache_memory_bytes=5 * BLOCK_BYTES, dtype="bfloat16", block_size=8)
    assert half.scheduler.blocks.num_blocks == 20  # half the bytes a number, half the tokens


def test_a_large_cache_consists_of_whole_runs_and_a_small_one_of_no_block_too_many(dummy):
    """A run is four blocks of 16, which one sequence gets where possible. The last one of 257
    blocks is filled up; fewer than 256 are cut into runs as long as divide them."""
    for num_blocks, runs in ((257, (65, 64)), (256, (64, 64)), (255, (255, 16)), (254, (127, 32)),
                             (4, (1, 64))):
        llm = start(dummy, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES)
        assert llm.scheduler.blocks.num_blocks == num_blocks
        assert llm.runner.kv_cache[0][0].shape[:2] == runs
        assert llm.scheduler.blocks.free_blocks.in_run == 4
        assert_serves(llm)
    for block_size, in_run in ((1, 64), (5, 12), (48, 1), (64, 1), (100, 1)):
        assert EngineConfig(model="m", block_size=block_size).blocks_in_run == in_run
    assert EngineConfig(model="m", kernels="triton").blocks_in_run == 1  # they gain nothing by it


def test_no_room_for_one_block_is_refused_with_the_numbers(dummy):
    with pytest.raises(ValueError, match=f"no room for one KV block: {BLOCK_BYTES:,} bytes .* "
                                         f"{BLOCK_BYTES - 1:,} .*kv_cache_memory_bytes"):
        start(dummy, kv_cache_memory_bytes=BLOCK_BYTES - 1)
    assert_serves(start(dummy, kv_cache_memory_bytes=BLOCK_BYTES))


@pytest.mark.parametrize("free, num_blocks", [
    (40 * BLOCK_BYTES, 10),  # a quarter of what is free
    (2 ** 50, 2 ** 16 // 16),  # but no more than a small engine can use: 65,536 tokens
])
def test_a_cpus_cache_takes_a_share_of_the_free_memory(dummy, monkeypatch, free, num_blocks):
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: free)
    assert start(dummy, max_num_seqs=8).scheduler.blocks.num_blocks == num_blocks


def test_freed_memory_is_kept_for_the_next_step():
    """Resident memory before, with and after four tensors of 24 MB. Where nothing is asked of
    glibc, they are mapped, and gone from the process when they are freed."""
    script = """
import torch
from nanoserve.device.memory import keep_freed_memory

def resident():  # in pages of 4 KB
    return int(open("/proc/self/statm").read().split()[1])

if kept := keep_freed_memory():
    before = resident()
    tensors = [torch.ones(6 * 2 ** 20) for _ in range(4)]
    most = resident()
    del tensors
    assert most - before > 20000 and resident() - before > 20000, (before, most, resident())
print(kept)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(platform.libc_ver()[0] == "glibc")


def test_memory_taken_by_others_is_an_error_and_not_a_negative_number_of_blocks(dummy, monkeypatch):
    """Memory used by *other* processes made the block count negative (voxcpm #27)."""
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 0)
    with pytest.raises(ValueError, match=f"{BLOCK_BYTES:,} bytes are needed, 0 .*other programs"):
        start(dummy)
    assert_serves(start(dummy, num_gpu_blocks_override=4))  # saying the size outright still works


GIB = 2 ** 30


class FakeGpu:
    """A card of 80 GiB: what the driver and torch say about its memory before, during and after the
    largest step. All in GiB."""

    def __init__(self, others: float, weights: float, step: float):
        self.others, self.weights, self.step, self.peak, self.log = others, weights, step, None, []

    def run_largest_step(self) -> None:
        self.log.append("step")
        self.peak = self.weights + self.step

    def install(self, monkeypatch) -> None:
        """Memory that torch holds without using it is gone after empty_cache."""
        def say(name, value=None):
            def answer(*args):
                self.log.append(name)
                return value() if value else None
            monkeypatch.setattr(torch.cuda, name, answer)

        held = [0.5]  # GiB in torch's pool that nobody uses
        say("empty_cache", lambda: held.__setitem__(0, 0))
        say("reset_peak_memory_stats")
        say("synchronize")
        say("max_memory_allocated", lambda: int(self.peak * GIB))
        say("memory_reserved", lambda: int((self.weights + held[0]) * GIB))
        say("mem_get_info", lambda: (
            int((80 - self.others - self.weights - held[0]) * GIB), 80 * GIB))


def gpu_blocks(dummy, monkeypatch, gpu: FakeGpu, **options) -> int:
    """The number of blocks on a GPU that is made up."""
    config = ModelConfig.from_folder(dummy)
    engine = EngineConfig(model="none", load_format="dummy", kernels="torch", max_num_seqs=8,
                          max_model_len=256, **options).resolved("cuda", config)
    runner = ModelRunner(dataclasses.replace(engine, device="cpu"), config, dummy)
    runner.device = torch.device("cuda")
    gpu.install(monkeypatch)
    monkeypatch.setattr(runner, "run_largest_step", gpu.run_largest_step)
    monkeypatch.setattr(model_runner, "MIN_CACHE_TOKENS", 2 ** 40)  # nobody asks for less
    return runner.count_kv_blocks()


def test_a_gpus_cache_is_what_the_largest_step_leaves(dummy, monkeypatch):
    """0.9 * 80 GiB, less 3 of others, 8 of weights and 2.5 that the largest step takes for a while:
    58.5 GiB. The step is run between the two looks at torch's peak."""
    gpu = FakeGpu(others=3, weights=8, step=2.5)
    assert gpu_blocks(dummy, monkeypatch, gpu) == int(58.5 * GIB) // BLOCK_BYTES
    order = [gpu.log.index(name) for name in (
        "reset_peak_memory_stats", "step", "synchronize", "max_memory_allocated")]
    assert order == sorted(order)
    half = gpu_blocks(dummy, monkeypatch, FakeGpu(3, 8, 2.5), gpu_memory_utilization=0.5)
    assert half == int(26.5 * GIB) // BLOCK_BYTES
    assert gpu_blocks(dummy, monkeypatch, gpu, kv_cache_memory_bytes=BLOCK_BYTES * 5) == 5


def test_a_gpu_that_others_fill_is_an_error_with_the_numbers(dummy, monkeypatch):
    """Memory used by *other* processes made the block count negative (voxcpm #27)."""
    with pytest.raises(ValueError, match=r"no room .* -[\d,]+ are to be had \(gpu_memory_utilization"
                                         r"=0.9 of 80.0 GB, less 70.0 GB that others use, less 2.5 "
                                         r"GB for weights and the largest step\).*other programs"):
        gpu_blocks(dummy, monkeypatch, FakeGpu(others=70, weights=2, step=0.5))


@pytest.mark.parametrize("options, num_tokens", [
    (dict(max_num_batched_tokens=300, max_num_seqs=5, max_model_len=100), [100, 100, 98, 1, 1]),
    (dict(max_num_batched_tokens=7, max_num_seqs=7), [1] * 7),
    (dict(max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=40), [40, 40, 40]),
])
def test_the_largest_step_is_one_that_runs(dummy, monkeypatch, options, num_tokens):
    """All rows, all tokens, a prompt's logprobs, every sampling control; and it leaves nothing."""
    llm = start(dummy, **options)
    launched = []
    launch = llm.runner.launch
    monkeypatch.setattr(llm.runner, "launch", lambda step: launched.append(step) or launch(step))
    llm.runner.run_largest_step()
    step, = launched
    assert list(step.num_new_tokens.values()) == num_tokens
    assert step.sampling == list(step.num_new_tokens) and all(s.has_controls for s in step.sampling)
    assert list(map(len, step.prompt_logprob_positions.values())) == [
        n - 1 for n in num_tokens if n > 1]
    assert (llm.runner.kv_cache, llm.runner.builder, llm.runner.last_tokens) == ([], None, None)


def test_a_card_without_bfloat16_gets_float16(dummy, monkeypatch):
    """bf16 unavailable (compute capability 7.5) must still work; not tested on such a card."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old card")
    config = ModelConfig.from_folder(dummy)

    def fit(device, **options):
        asked = EngineConfig(model="none", kernels="torch", **options)
        return fit_to_device(dataclasses.replace(
            asked.resolved(device, config), dtype="bfloat16"), asked)

    fitted, said = fit("cuda")
    assert fitted.dtype == "float16" and "an old card has no bfloat16" in said[0]
    assert fit("cpu")[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match='dtype="bfloat16", but an old card.*"float16"'):
        fit("cuda", dtype="bfloat16")


def test_a_gpu_without_triton_says_so_and_works_without(dummy, monkeypatch):
    """132 tok/s instead of 9,500, and no warning (nano-vllm #245): a slow path is never silent."""
    def no_triton():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(model_runner, "import_kernels", no_triton)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    config = ModelConfig.from_folder(dummy)
    asked = EngineConfig(model="none")
    fitted, said = fit_to_device(asked.resolved("cuda", config), asked)
    assert fitted.kernels == "torch" and "No module named 'triton'" in said[0] and "slow" in said[0]
    asked = EngineConfig(model="none", kernels="triton")
    with pytest.raises(ValueError, match='kernels="triton".*No module.*install it.*"torch"'):
        fit_to_device(asked.resolved("cuda", config), asked)


def test_a_gpu_that_cannot_run_kernels_says_so(dummy, monkeypatch):
    """An old card takes plain torch's way with a warning, and an error if kernels were asked for; a
    forgotten TRITON_INTERPRET, thousands of times slower, is always one."""
    config, capability = ModelConfig.from_folder(dummy), [(7, 5)]
    interpreted = SimpleNamespace(INTERPRETED=False)
    monkeypatch.setattr(model_runner, "import_kernels", lambda: interpreted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    def fit(kernels: str):
        asked = EngineConfig(model="none", kernels=kernels)
        return fit_to_device(asked.resolved("cuda", config), asked)

    fitted, said = fit("auto")
    assert fitted.kernels == "torch" and "an old card is older" in said[0] and "slow" in said[0]
    with pytest.raises(ValueError, match='kernels="triton", but an old card .*kernels="torch"'):
        fit("triton")
    capability[0] = (8, 0)
    assert fit("triton")[0].kernels == "triton" and not fit("auto")[1]
    interpreted.INTERPRETED = True
    for kernels in ("auto", "triton"):
        with pytest.raises(ValueError, match='TRITON_INTERPRET is set.*unset it.*kernels="torch"'):
            fit(kernels)


@pytest.mark.parametrize("device, kernels, expected", [
    ("cuda", "auto", "triton"), ("cpu", "auto", "torch"), ("cuda", "torch", "torch"),
    ("cpu", "triton", "triton")])
def test_a_gpu_gets_kernels_and_overlap_unless_told_otherwise(dummy, device, kernels, expected):
    config = ModelConfig.from_folder(dummy)
    resolved = EngineConfig(model="none", kernels=kernels).resolved(device, config)
    assert (resolved.kernels, resolved.async_scheduling) == (expected, device == "cuda")
    told = EngineConfig(model="none", async_scheduling=device == "cpu").resolved(device, config)
    assert told.async_scheduling == (device == "cpu")


def meminfo(folder: Path, monkeypatch, **files: str) -> int:
    """`free_cpu_memory` on a machine whose /proc and /sys are `folder`."""
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    group = folder / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    for name, content in files.items():
        (group / name.replace("__", "/").replace("_dot_", ".")).write_text(content)
    monkeypatch.setattr(memory, "Path",
                        lambda *parts: folder.joinpath(*[part.lstrip("/") for part in parts]))
    return free_cpu_memory()


@pytest.mark.parametrize("files, expected", [
    ({}, 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="1000000\n"), 2_000_000),
    (dict(memory_dot_max="max\n", memory_dot_current="1000000\n"), 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="4000000\n"), 0),  # never negative
    ({"memory__memory_dot_limit_in_bytes": "3000000\n",
      "memory__memory_dot_usage_in_bytes": "500000\n"}, 2_500_000),
    ({"memory__memory_dot_limit_in_bytes": "9223372036854771712\n",
      "memory__memory_dot_usage_in_bytes": "500000\n"}, 8000 * 1024),
    (dict(memory_dot_max="3000000\n", memory_dot_current="2800000\n",
          memory_dot_stat="anon 700000\nfile 2100000\ninactive_file 1500000\n"), 1_700_000),
], ids=["no container", "limit", "no limit", "over the limit", "cgroup v1", "v1 no limit",
        "page cache"])
def test_a_container_counts_its_own_limit(tmp_path, monkeypatch, files, expected):
    """What a container uses includes files that were only read, such as the checkpoint: the kernel
    drops those when memory is asked for, so they are free (as `docker stats` counts it)."""
    assert meminfo(tmp_path, monkeypatch, **files) == expected


# ------------------------------------------------------------ saying what runs


def test_the_start_up_line_says_on_what_and_how(qwen3, capsys):
    """132 tokens/s instead of 9,500 with no warning: a slow path was taken silently (nano-vllm
    #245). The engine says its device, dtype, attention backend and graphs."""
    LLM(qwen3, num_gpu_blocks_override=40, max_num_seqs=5, dtype="bfloat16", device="cpu",
        async_scheduling=True)
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    for words in ("qwen3", "cpu", "bfloat16", "torch attention", "no graphs", "40 blocks of 16",
                  "640 tokens", "max_model_len 256", "2,048 tokens", "5 sequences", "overlap 1"):
        assert words in line


# -------------------------------------------------------- reading config.json


EMPTY = dict(vocab_size=260, hidden_size=256, intermediate_size=96, num_hidden_layers=30,
             num_attention_heads=32)
CONFIGS = dict(Llama=LlamaConfig, Mistral=MistralConfig, Qwen2=Qwen2Config, Qwen3=Qwen3Config,
               Mixtral=MixtralConfig, Qwen3Moe=Qwen3MoeConfig, Gemma2=Gemma2Config,
               Gemma3=Gemma3TextConfig)


def read(family: str, **entries) -> ModelConfig:
    """A config.json of that family with nothing in it but the sizes that have no default."""
    return ModelConfig.from_dict(
        dict(architectures=[f"{family}ForCausalLM"]) | EMPTY | entries)


def assert_equals_transformers(ours: ModelConfig, theirs) -> None:
    """Every entry that both sides have; theirs as the modeling files read it."""
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                  "intermediate_size", "max_position_embeddings", "rms_norm_eps",
                  "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", head_dim) ** -0.5
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logits_softcap == getattr(theirs, "final_logit_softcapping", None)
    activation = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert ours.activation == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[activation]
    assert ours.o_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    num_layers, window = theirs.num_hidden_layers, getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * num_layers
    assert ours.windows == tuple(window if t == "sliding_attention" else None for t in types)
    rope = theirs.rope_parameters
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    for mine, other in ((ours.rope, rope), (ours.rope_local, local)):
        assert (mine and mine.theta) == (other and other["rope_theta"])
        assert (mine and mine.rope_type) == (other and other["rope_type"])
    assert_equal_experts(ours, theirs)


def assert_equal_experts(ours: ModelConfig, theirs) -> None:
    """Qwen3-MoE names its dense layers; all of Mixtral's have experts, as wide as its MLP."""
    num_layers = theirs.num_hidden_layers
    if not hasattr(theirs, "num_local_experts"):
        assert (ours.num_experts, ours.moe_layers) == (0, (False,) * num_layers)
        return
    dense, step = getattr(theirs, "mlp_only_layers", []), getattr(theirs, "decoder_sparse_step", 1)
    assert ours.moe_layers == tuple(i not in dense and (i + 1) % step == 0
                                    for i in range(num_layers))
    assert ours.num_experts == theirs.num_local_experts
    assert ours.num_experts_per_tok == theirs.num_experts_per_tok
    assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.moe_intermediate_size == width


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_of_left_out_entries_are_transformers(family):
    """A config.json need not write what equals its class's default."""
    assert_equals_transformers(read(family), CONFIGS[family](**EMPTY))
    nulls = dict(head_dim=None, rope_theta=None, rms_norm_eps=None, tie_word_embeddings=None)
    assert_equals_transformers(read(family, **nulls), CONFIGS[family](**EMPTY))
    assert read("Llama", num_key_value_heads=None).num_key_value_heads == 32


def test_every_family_has_what_its_network_has():
    """What no file says, because it is always so."""
    has = {family: {flag for flag in ("qkv_bias", "qk_norm", "norm_offset", "scale_embedding",
                                      "post_norms") if getattr(read(family), flag)}
           for family in CONFIGS}
    gemma = {"norm_offset", "scale_embedding", "post_norms"}
    assert has == dict(Llama=set(), Mistral=set(), Qwen2={"qkv_bias"}, Qwen3={"qk_norm"},
                       Mixtral=set(), Qwen3Moe={"qk_norm"}, Gemma2=gemma,
                       Gemma3=gemma | {"qk_norm"})
    assert list(FAMILIES) == [f"{family}ForCausalLM" for family in CONFIGS]


@pytest.mark.parametrize("family, entries", [
    ("Mistral", dict(sliding_window=None)),  # null: no window
    ("Mistral", {}),  # absent: the class's own, 4,096
    ("Mistral", dict(sliding_window=7, head_dim=24)),
    ("Mixtral", dict(sliding_window=None)), ("Mixtral", dict(sliding_window=9)),
    ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1)),
    ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=5)),
    ("Qwen2", dict(use_sliding_window=True)),
    ("Qwen2", dict(use_sliding_window=False, sliding_window=6, max_window_layers=5)),
    ("Qwen3", dict(use_sliding_window=True, sliding_window=6, max_window_layers=0)),
    ("Qwen3Moe", dict(use_sliding_window=True, sliding_window=6)),
    ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=17,
                      norm_topk_prob=True)),
    ("Qwen3Moe", dict(num_experts=9, decoder_sparse_step=3, mlp_only_layers=[2, 11])),
    ("Qwen3Moe", dict(mlp_only_layers=None, head_dim=24)),
    ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("Gemma2", dict(attn_logit_softcapping=7.5, query_pre_attn_scalar=144, sliding_window=11)),
    ("Gemma3", dict(final_logit_softcapping=20.0, query_pre_attn_scalar=168, head_dim=128)),
    ("Gemma3", dict(layer_types=["full_attention", "sliding_attention"] * 15)),
    ("Gemma3", dict(sliding_window_pattern=4)),
    ("Gemma3", dict(rope_theta=5e5, rope_local_base_freq=2e4,
                    rope_scaling=dict(rope_type="linear", factor=8.0))),
], ids=str)
def test_what_a_file_says_is_what_transformers_reads(family, entries):
    ours, theirs = read(family, **entries), CONFIGS[family](**EMPTY, **entries)
    assert_equals_transformers(ours, theirs)


@pytest.mark.parametrize("activations", [
    dict(hidden_act="gelu", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"),
    dict(hidden_act="gelu", hidden_activation=None), dict(hidden_act="gelu")], ids=str)
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_gemmas_second_name_of_its_activation_is_the_true_one(family, activations):
    """The first files said "gelu", and meant its approximation by a tanh."""
    assert read(family, **activations).activation == "gelu_tanh"
    with pytest.raises(ValueError, match="hidden_activation='gelu'"):
        read(family, hidden_activation="gelu")


def test_gemma_3_before_transformers_5_means_the_same():
    """As the files on the hub are: a pattern, two thetas and a scaling, or lists and objects."""
    old = read("Gemma3", sliding_window=512, sliding_window_pattern=6, rope_theta=1_000_000.0,
               rope_local_base_freq=10_000.0, rope_scaling=dict(factor=8.0, rope_type="linear"))
    new = read("Gemma3", sliding_window=512, layer_types=[
        "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(30)],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1_000_000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10_000.0)))
    assert old == new
    assert old.rope == RopeConfig(1e6, "linear", factor=8.0) and old.rope_local == RopeConfig(1e4)
    assert old.windows[:7] == (512,) * 5 + (None, 512) and old.window is None


def test_the_window_of_a_model_is_its_widest_or_none():
    assert read("Mistral", sliding_window=7).window == 7
    assert read("Mistral", sliding_window=None).window is None
    assert read("Gemma2", sliding_window=7).window is None
    assert read("Gemma2", layer_types=["sliding_attention"] * 30, sliding_window=7).window == 7


def test_experts_by_either_name():
    for name in ("num_experts", "num_local_experts"):
        assert read("Qwen3Moe", **{name: 12}).num_experts == 12
        assert read("Mixtral", **{name: 12}).num_experts == 12


@pytest.mark.parametrize("family, entries, words", [
    ("Mixtral", dict(num_local_experts=2, num_experts_per_tok=3),
     "num_experts_per_tok=3 but num_local_experts=2"),
    ("Qwen3Moe", dict(num_experts=7), "num_experts_per_tok=8 but num_experts=7"),
    ("Qwen3Moe", dict(num_experts=0), "num_experts must be .* got 0"),
    ("Mixtral", dict(num_local_experts="8"), "num_local_experts .*got '8'"),
    ("Qwen3Moe", dict(decoder_sparse_step=0), "decoder_sparse_step .*got 0"),
    ("Gemma2", dict(query_pre_attn_scalar="24"), "query_pre_attn_scalar must be a number"),
    ("Gemma2", dict(attn_logit_softcapping="50"), "attn_logit_softcapping must be a number"),
    ("Gemma2", dict(hidden_activation="relu"), "hidden_activation='relu'.*gelu_pytorch_tanh"),
    ("Gemma3", dict(rope_parameters=dict(full_attention=dict(rope_type="dynamic", factor=2.0))),
     "'dynamic'.*longest sequence"),
    ("Gemma3", dict(rope_parameters=dict(sliding_attention=dict(rope_type="longrope"))),
     "'longrope'"),
    ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("Mistral", dict(sliding_window=0), "sliding_window .*got 0"),
], ids=str)
def test_what_a_family_can_not_have_is_refused_by_name(family, entries, words):
    with pytest.raises(ValueError, match=words):
        read(family, **entries)


@pytest.mark.parametrize("family, options, words", [
    ("Llama", dict(expert_parallel=True), "expert_parallel=True, but LlamaForCausalLM has no"),
    ("Qwen3Moe", dict(tensor_parallel_size=3),
     "tensor_parallel_size=3 .* 8 attention heads with 2 KV heads.*1, 2, 4, 6, 8"),
    ("Qwen3Moe", dict(tensor_parallel_size=16), "tensor_parallel_size=16 .*choose one of 1, 2"),
    ("Mistral", dict(tensor_parallel_size=5), "tensor_parallel_size=5 "),
], ids=str)
def test_ranks_that_can_not_share_a_model_are_refused(family, options, words):
    config = read(family, num_attention_heads=8, num_key_value_heads=2)
    with pytest.raises(ValueError, match=words):
        EngineConfig(model="none", **options).check_ranks(config)
    EngineConfig(model="none", tensor_parallel_size=4).check_ranks(config)


def test_ranks_are_checked_before_they_are_started(dummy):
    with pytest.raises(ValueError, match="expert_parallel=True, but LlamaForCausalLM"):
        start(dummy, expert_parallel=True)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 can't share 4 attention heads"):
        start(dummy, tensor_parallel_size=3)


@pytest.mark.parametrize("config, dtype", [
    ({}, "float32"), (dict(torch_dtype="float16"), "float16"), (dict(dtype="bfloat16"), "bfloat16"),
    (dict(dtype="torch.bfloat16", torch_dtype="float32"), "bfloat16")])
def test_both_spellings_of_the_dtype(config, dtype):
    assert ModelConfig.from_dict(LLAMA | config).dtype == dtype


@pytest.mark.parametrize("config, generation, expected", [
    (dict(eos_token_id=7), None, (7,)),
    (dict(eos_token_id=7), dict(eos_token_id=[3, 5]), (3, 5)),
    (dict(eos_token_id=[7, 8]), dict(temperature=0.5), (7, 8)),
    (dict(eos_token_id=7), dict(eos_token_id=0), (0,)),  # 0 is an id like any other
    ({}, {}, ()),
])
def test_eos_ids_come_from_generation_config_first(config, generation, expected):
    assert ModelConfig.from_dict(LLAMA | config, generation).eos_token_ids == expected


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], ["Qwen2MoeForCausalLM"], [], None])
def test_an_unsupported_architecture_is_named_with_the_supported_ones(dummy, architectures):
    write_json(dummy / "config.json", architectures=architectures, model_type="mamba")
    with pytest.raises(ValueError) as error:
        start(dummy)
    assert (architectures or ["mamba"])[0] in str(error.value)
    assert ("LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
            "MixtralForCausalLM, Qwen3MoeForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM"
            ) in str(error.value)


@pytest.mark.parametrize("config, words", [
    (dict(hidden_act="gelu"), "hidden_act='gelu'.*silu"),
    (dict(use_sliding_window=True, sliding_window=0), "sliding_window.*at least 1, got 0"),
    (dict(use_sliding_window=True, layer_types=["full_attention"]), "layer_types=.*each of 2"),
    (dict(use_sliding_window=True, layer_types=["full_attention", "chunked_attention"]),
     "layer_types=.*full_attention or sliding_attention"),
    (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
     "partial_rotary_factor=0.5"),
    (dict(quantization_config=dict(quant_method="awq")), "quantization_config.*unquantised"),
    (dict(rope_scaling=dict(type="linear")), "linear RoPE scaling lacks factor"),
    (dict(rope_scaling=dict(rope_type="yarn", factor="4")), "factor must be a number above 0, got '4'"),
    (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "'longrope'.*llama3"),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
     "'dynamic'.*longest sequence of the batch.*llama3"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0)),
     "llama3.*lacks high_freq_factor, original_max_position_embeddings"),
    (dict(rope_scaling="llama3"), "rope_scaling='llama3' must be an object"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta="x")), "rope_theta must be a number"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=0)), "factor must be a number above 0, got 0"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2, truncate="false")), "truncate must be true"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2), rope_theta=1), "rope_theta=1 must be above"),
    (dict(rope_scaling=dict(rope_type="llama3", **LLAMA3 | dict(low_freq_factor=4.0))),
     "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    (dict(rope_theta=0), "rope_theta must be a number above 0, got 0"),
    (dict(rope_parameters=[1]), "rope_parameters=.*must be an object"),
    (dict(hidden_act=["silu"]), "hidden_act=.*silu"),
    (dict(max_window_layers="3"), "max_window_layers must be a whole number of at least 0, got '3'"),
    (dict(layer_types=["chunked_attention"] * 2, sliding_window=None), "layer_types=.*must name"),
    (dict(architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=1), "mlp_only_layers=1 must be"),
    (dict(architectures=["Gemma2ForCausalLM"], query_pre_attn_scalar=0), "query_pre_attn_scalar"),
    (dict(architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=-1.0), "softcapping"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false, got 'yes'"),
    (dict(attention_bias="false"), "attention_bias must be true or false, got 'false'"),
    (dict(mlp_bias="no"), "mlp_bias must be true or false"),
    (dict(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=2), "norm_topk_prob must be true"),
    (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window="no"), "use_sliding_window must"),
    (dict(use_bidirectional_attention="false"), "use_bidirectional_attention must be true or false"),
    (dict(rms_norm_eps=-1), "rms_norm_eps must be a number above 0, got -1"),
    (dict(rms_norm_eps="x"), "rms_norm_eps must be a number above 0, got 'x'"),
    (dict(eos_token_id="</s>"), "eos_token_id='</s>' must be a token id"),
    (dict(architectures="BertModel"), "architecture BertModel is not supported"),
    (dict(num_key_value_heads=3), "num_attention_heads=4.*num_key_value_heads=3"),
    (dict(head_dim=15), "head_dim=15.*odd"),
    (dict(hidden_size=None), "hidden_size.*got None"),
    (dict(num_hidden_layers=0), "num_hidden_layers.*got 0"),
    (dict(vocab_size="many"), "vocab_size.*got 'many'"),
], ids=str)
def test_what_is_not_implemented_is_refused_by_name(config, words):
    """A feature that is silently left out gives fluent wrong text."""
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(QWEN3 | config)


def test_a_checkpoint_in_an_unsupported_dtype_can_be_run_in_another(dummy):
    """The remedy that the message names has to work."""
    with pytest.raises(ValueError, match="dtype='float64' is not supported.*with the option dtype"):
        start(dummy, hf_overrides=dict(dtype="float64"))
    assert_serves(start(dummy, hf_overrides=dict(dtype="float64"), dtype="float32"))
    assert_serves(start(dummy, dtype=torch.float32))  # torch's own spelling is welcome, too


LLAMA3_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)


@pytest.mark.parametrize("entries, overrides, rope_type, dtype", [
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
     dict(rope_scaling=dict(type="llama3", **LLAMA3_ROPE)), "llama3", "float32"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, **LLAMA3_ROPE)),
     dict(rope_scaling=None), "default", "float32"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
     dict(torch_dtype="bfloat16"), "default", "bfloat16"),
])
def test_overrides_in_the_old_spelling_win_over_the_new(dummy, entries, overrides, rope_type,
                                                        dtype):
    """A file written by transformers 5 and a user who remembers transformers 4: an override that
    was laid beside the entry it should replace changed nothing, without a word."""
    content = json.loads((dummy / "config.json").read_text()) | dict(dtype="float32") | entries
    (dummy / "config.json").write_text(json.dumps(content))
    config = ModelConfig.from_folder(dummy, overrides)
    assert (config.rope.rope_type, config.dtype) == (rope_type, dtype)


@pytest.mark.parametrize("model", [None, 5, "", "  "])
def test_a_model_that_is_no_name_is_explained(model):
    with pytest.raises(ValueError, match="model=.*name a folder or a hub id"):
        LLM(model)


def test_a_cache_that_memory_can_not_hold_is_explained(dummy):
    with pytest.raises(ValueError, match="no memory for a KV cache of .* lower .*num_gpu_blocks"):
        start(dummy, num_gpu_blocks_override=10 ** 13)
    with pytest.raises(ValueError, match="no memory for .* lower max_num_batched_tokens=1,000,000"):
        start(dummy, num_gpu_blocks_override=8, max_num_batched_tokens=10 ** 15)


def test_hf_overrides_are_laid_over_the_file(dummy):
    llm = start(dummy, hf_overrides=dict(num_hidden_layers=1, head_dim=24, rope_theta=77.0))
    assert len(llm.runner.model.layers) == len(llm.runner.kv_cache) == 1
    assert llm.runner.kv_cache[0][0].shape[-1] == 24
    assert llm.model_config.rope.theta == 77.0
    assert_serves(llm)
    with pytest.raises(ValueError, match="hidden_act='relu'"):
        start(dummy, hf_overrides=dict(hidden_act="relu"))


# ---------------------------------------------------------------------- RoPE


@pytest.mark.parametrize("old, new", [
    (dict(rope_theta=5e5), dict(rope_type="default", rope_theta=5e5)),
    (dict(rope_theta=5e5, rope_scaling=None), dict(rope_theta=5e5)),
    (dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
     dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
    (dict(rope_theta=5e5, rope_scaling=dict(type="llama3", **LLAMA3)),
     dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
], ids=["theta", "null", "llama3", "llama3 by type"])
def test_both_spellings_of_rope_mean_the_same(old, new):
    """transformers 5 writes `rope_parameters`; before it were `rope_theta` and `rope_scaling`."""
    first = ModelConfig.from_dict(LLAMA | old)
    assert first == ModelConfig.from_dict(LLAMA | dict(rope_parameters=new))
    assert first.rope.theta == 5e5
    if "llama3" in str(old):
        assert first.rope == RopeConfig(5e5, "llama3", **LLAMA3)


def test_an_override_in_the_old_spelling_wins_over_a_file_in_the_new_one(tmp_path):
    new = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | new))
    read = ModelConfig.from_folder
    assert read(tmp_path, dict(rope_theta=5e5)).rope == RopeConfig(5e5)
    scaled = read(tmp_path, dict(rope_scaling=dict(rope_type="llama3", **LLAMA3)))
    assert scaled.rope == RopeConfig(1e4, "llama3", **LLAMA3)
    assert read(tmp_path, dict(rope_parameters=dict(rope_theta=9.0))).rope == RopeConfig(9.0)


def test_a_scaling_by_override_replaces_the_files_and_keeps_its_theta(tmp_path):
    """What the file says about another kind of scaling must not leak into the new one."""
    llama3 = dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(rope_parameters=llama3)))

    def scaled(**scaling) -> RopeConfig:
        return ModelConfig.from_folder(tmp_path, dict(rope_scaling=scaling)).rope

    yarn = scaled(type="yarn", factor=4.0, original_max_position_embeddings=32)
    assert (yarn.theta, yarn.rope_type, yarn.factor) == (5e5, "yarn", 4.0)
    assert yarn.original_max_position_embeddings == 32
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    # Left out, it is max_position_embeddings (256), and not the 64 of the file's other scaling.
    assert scaled(rope_type="yarn", factor=4.0).original_max_position_embeddings == 256
    with pytest.raises(ValueError, match="linear RoPE scaling lacks factor"):
        scaled(rope_type="linear")
    (tmp_path / "config.json").write_text(json.dumps(
        LLAMA | dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=0.5))))
    with pytest.raises(ValueError, match="partial_rotary_factor=0.5"):  # still refused
        scaled(type="yarn", factor=4.0)


@pytest.mark.parametrize("entries", [
    dict(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                              sliding_attention=dict(rope_type="default", rope_theta=1e4))),
    dict(rope_theta=1e6, rope_local_base_freq=1e4)], ids=["new", "old"])
def test_old_overrides_of_gemma_3s_two_ropes(tmp_path, entries):
    (tmp_path / "config.json").write_text(json.dumps(
        dict(architectures=["Gemma3ForCausalLM"]) | EMPTY | entries))

    def ropes(**overrides) -> tuple[RopeConfig, RopeConfig]:
        config = ModelConfig.from_folder(tmp_path, overrides)
        return config.rope, config.rope_local

    assert ropes() == (RopeConfig(1e6), RopeConfig(1e4))
    assert ropes(rope_theta=7e5) == (RopeConfig(7e5), RopeConfig(1e4))
    assert ropes(rope_local_base_freq=3e4) == (RopeConfig(1e6), RopeConfig(3e4))
    linear = dict(rope_type="linear", factor=8.0)
    assert ropes(rope_scaling=linear) == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("theta, factor, low, high, original", [
    (500_000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
    (500_000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2
    (10_000.0, 4.0, 2.0, 3.0, 64),
])
def test_llama3_frequencies_equal_transformers(head_dim, theta, factor, low, high, original):
    scaling = dict(rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=low,
                   high_freq_factor=high, original_max_position_embeddings=original)
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=2 ** 17,
                         rope_parameters=scaling)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    assert attention_factor == 1.0
    rope = ModelConfig.from_dict(LLAMA | dict(rope_parameters=scaling)).rope
    frequencies = rope_frequencies(head_dim, rope)
    assert frequencies.dtype == torch.float32
    assert_close(frequencies, expected, rtol=2e-6, atol=0)
    plain = rope_frequencies(head_dim, RopeConfig(theta=theta))
    assert not torch.equal(frequencies, plain) and frequencies[0] == plain[0]


SCALINGS = {
    "linear": dict(rope_type="linear", factor=8.0),
    "linear, factor 1": dict(rope_type="linear", factor=1.0),
    "yarn": dict(rope_type="yarn", factor=4.0),
    "yarn from 32": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn from 4096": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096),
    "yarn from 131072": dict(rope_type="yarn", factor=2.0,  # every wave makes a turn
                             original_max_position_embeddings=131072),
    "yarn, not truncated": dict(rope_type="yarn", factor=4.0, truncate=False,
                                original_max_position_embeddings=64),
    "yarn, truncated": dict(rope_type="yarn", factor=4.0, truncate=True,
                            original_max_position_embeddings=64),
    "yarn, other turns": dict(rope_type="yarn", factor=4.0, beta_fast=20.0, beta_slow=2.5,
                              original_max_position_embeddings=64),
    "yarn, factor given": dict(rope_type="yarn", factor=4.0, attention_factor=0.75),
    "yarn, factor null": dict(rope_type="yarn", factor=4.0, attention_factor=None),
    "yarn, mscale": dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.6),
    "yarn, half of mscale": dict(rope_type="yarn", factor=40.0, mscale=0.7),
    "yarn, mscale 0": dict(rope_type="yarn", factor=40.0, mscale=0.7, mscale_all_dim=0),
    "yarn, factor 1": dict(rope_type="yarn", factor=1.0),
    "yarn, no width": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4),
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 24, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_and_turns_equal_transformers(scaling, head_dim, theta):
    """The frequencies, and what becomes of them: cos and sin, which yarn scales as well."""
    entries = SCALINGS[scaling] | dict(rope_theta=theta)
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=256,
                         rope_parameters=dict(entries))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[entries["rope_type"]](theirs)
    rope = ModelConfig.from_dict(LLAMA | dict(rope_parameters=entries)).rope
    assert_close(rope_frequencies(head_dim, rope), expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    positions = torch.tensor([0, 1, 31, 255])
    cos, sin = RotaryEmbedding(head_dim, rope, torch.device("cpu"))(positions)
    their_cos, their_sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    assert_close(cos[:, 0, 0], their_cos[0], rtol=1e-4, atol=1e-4)
    assert_close(sin[:, 0, 0], their_sin[0], rtol=1e-4, atol=1e-4)


def test_the_scalings_differ():
    """Otherwise an entry that is ignored would pass the test above."""
    names = [name for name in SCALINGS if name not in ("yarn, factor null", "linear, factor 1",
             "yarn, factor 1", "yarn, half of mscale", "yarn, mscale 0", "yarn, truncated")]
    ropes = [ModelConfig.from_dict(LLAMA | dict(rope_parameters=SCALINGS[n])).rope for n in names]
    found = [(*rope_frequencies(128, rope).tolist(), rope.attention_factor) for rope in ropes]
    assert len(set(found)) == len(names)


def test_gemma_3s_two_ropes_equal_transformers():
    entries = dict(rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4)))
    config = read("Gemma3", head_dim=32, **entries)
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**EMPTY, head_dim=32, **entries))
    positions = torch.tensor([0, 1, 31, 255])
    for rope, kind in ((config.rope, "full_attention"), (config.rope_local, "sliding_attention")):
        cos, sin = RotaryEmbedding(32, rope, torch.device("cpu"))(positions)
        their_cos, their_sin = theirs(torch.zeros(1), positions[None], kind)
        assert_close(cos[:, 0, 0], their_cos[0], rtol=1e-5, atol=1e-5)
        assert_close(sin[:, 0, 0], their_sin[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 24, 128])
def test_default_frequencies_equal_transformers(head_dim):
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=dict(
        rope_type="default", rope_theta=1e6))
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    assert torch.equal(rope_frequencies(head_dim, RopeConfig(theta=1e6)), expected)


def test_yarn_as_model_cards_give_it_stretches_the_longest_sequence():
    """Qwen 2.5's card adds a factor and leaves max_position_embeddings alone; vLLM reads it so."""
    qwen = QWEN3 | dict(max_position_embeddings=32768)
    yarn = dict(type="yarn", factor=4.0)
    named = yarn | dict(original_max_position_embeddings=32768)
    assert ModelConfig.from_dict(qwen | dict(rope_scaling=named)).max_position_embeddings == 131072
    assert ModelConfig.from_dict(qwen | dict(rope_scaling=yarn)).max_position_embeddings == 32768
    longer = qwen | dict(rope_scaling=named, max_position_embeddings=262144)
    assert ModelConfig.from_dict(longer).max_position_embeddings == 262144


@pytest.mark.parametrize("architecture, entries", [
    ("Qwen3MoeForCausalLM", dict(layer_types=["full_attention"] * 2)), ("MistralForCausalLM", {})])
def test_families_with_one_window_ignore_rules_for_single_layers(architecture, entries):
    """Qwen3-30B-A3B's file has max_window_layers, which transformers' class does not read."""
    config = ModelConfig.from_dict(QWEN3 | dict(
        architectures=[architecture], sliding_window=9, use_sliding_window=True, num_experts=8,
        num_experts_per_tok=2, max_window_layers=1, **entries))
    assert config.windows == (9, 9)


FULL, SLIDING = "full_attention", "sliding_attention"


def assert_read_as_by_auto_config(folder, **entries) -> ModelConfig:
    """The oracle is the class that transformers picks for a folder, which may be another one than
    the architecture's name says."""
    (folder / "config.json").write_text(json.dumps(entries))
    ours = ModelConfig.from_folder(folder)
    assert_equals_transformers(ours, AutoConfig.from_pretrained(folder))
    return ours


@pytest.mark.parametrize("types", [[SLIDING, FULL, FULL], [FULL] * 3, [SLIDING] * 3, None], ids=str)
@pytest.mark.parametrize("window", [5, None])
def test_a_mistral_whose_file_names_layer_types_is_a_ministral(tmp_path, types, window):
    """transformers makes it one when it reads the file, and so the types count."""
    ours = assert_read_as_by_auto_config(
        tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window,
        layer_types=types, **EMPTY | dict(num_hidden_layers=3, head_dim=64))
    types = types or [SLIDING] * 3
    assert ours.windows == tuple(window if kind == SLIDING else None for kind in types)


@pytest.mark.parametrize("inner", [{}, dict(original_max_position_embeddings=32)], ids=str)
@pytest.mark.parametrize("scaling", [
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)], ids=str)
def test_the_length_in_training_beside_the_ropes_object_counts_more(tmp_path, scaling, inner):
    folder_entries = LLAMA | dict(rope_parameters=scaling | inner | dict(rope_theta=1e4))
    for beside in (16, 64):
        (tmp_path / "config.json").write_text(json.dumps(
            folder_entries | dict(model_type="llama", original_max_position_embeddings=beside)))
        theirs = AutoConfig.from_pretrained(tmp_path)
        expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
        rope = ModelConfig.from_folder(tmp_path).rope
        assert rope.original_max_position_embeddings == beside
        assert_close(rope_frequencies(theirs.head_dim, rope), expected, rtol=2e-6, atol=0)
    local = dict(rope_type="default", rope_theta=1e4)  # one object for each kind: it is not read
    gemma = read("Gemma3", original_max_position_embeddings=16, rope_parameters=dict(
        sliding_attention=local, full_attention=scaling | dict(
            original_max_position_embeddings=32)))
    assert gemma.rope.original_max_position_embeddings == 32


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
def test_other_families_entries_mean_nothing(family):
    """A Llama has no softcap, whatever its file says; transformers' classes don't look."""
    entries = dict(query_pre_attn_scalar=7, attn_logit_softcapping=2.0, rope_local_base_freq=500.0,
                   final_logit_softcapping=3.0)
    assert read(family, **entries) == read(family)
    assert read("Gemma3", **entries) != read("Gemma3")


@pytest.mark.parametrize("name", ["block_size", "tensor_parallel_size"])
def test_nothing_is_not_a_number_that_the_engine_could_decide(name):
    """It passed, as it does for what is open by default, and was multiplied with later."""
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got None"):
        EngineConfig(model="m", **{name: None})
    assert EngineConfig(model="m", max_model_len=None).max_model_len is None
