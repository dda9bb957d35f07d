"""The least time that the hardware needs for the steps that were scheduled.

Oracles: figures worked out by others for eight real models, sums done by hand or by brute force,
and transformers for the number of parameters.
"""


import pytest
import torch
from helpers import sequence
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import roofline, workloads
from benchmarks.roofline import MODELS, Machine, Work
from nanoserve.config import SamplingParams
from nanoserve.model_config import ModelConfig
from nanoserve.sequence import Step

H200 = Machine(4.3e12, 790e12)


def nano_vllm_steps(layers: int) -> list[Work]:
    """The community workload as nano-vllm schedules it: whole prompts of up to 16,384 tokens a
    step, and when all are in, decodes."""
    requests, steps = workloads.community(), []
    prompts = [len(request.prompt) for request in requests]
    while prompts:
        count = sum(1 for i in range(len(prompts)) if sum(prompts[:i + 1]) <= 16_384)
        batch, prompts = prompts[:count], prompts[count:]
        steps.append(Work(sum(batch), count, layers * sum(batch),
                          layers * sum(n * (n + 1) // 2 for n in batch)))
    for i in range(1, max(request.max_tokens for request in requests)):
        ctx = [len(r.prompt) + i for r in requests if r.max_tokens > i]
        steps.append(Work(len(ctx), len(ctx), layers * sum(ctx), layers * sum(ctx)))
    return steps


# Worked out by others, for a copy of 4.3 TB/s and 790 TFLOP/s: minimum seconds of the community
# workload, its output tokens a second, and those of a single stream at 1k of context.
PUBLISHED = {
    "Qwen3-0.6B": (3.75, 35_730, 3_284), "Qwen3-1.7B": (4.71, 28_471, 1_208),
    "Qwen3-4B": (7.67, 17_474, 525), "Qwen3-8B": (10.74, 12_478, 281),
    "Qwen3-14B": (16.8, 7_963, 153), "Qwen3-32B": (35.5, 3_773, 67),
    "Qwen3-30B-A3B": (17.6, 7_634, 695), "Llama-3.1-8B": (10.2, 13_093, 284)}


def test_the_roofline_of_eight_real_models():
    assert list(MODELS) == list(PUBLISHED)
    for name, (seconds, output_tok_s, stream_tok_s) in PUBLISHED.items():
        config = ModelConfig.from_dict(MODELS[name])
        layers = config.num_hidden_layers
        steps = nano_vllm_steps(layers)
        assert len(steps) == 9 + 1023
        total = sum(roofline.run_seconds(steps, config, H200).values())
        assert total == pytest.approx(seconds, rel=0.005), name
        assert round(133_966 / total) == output_tok_s, name
        one = roofline.step_seconds(Work(1, 1, 1024 * layers, 1024 * layers), config, H200)
        assert 1 / sum(one.values()) == pytest.approx(stream_tok_s, rel=0.005), name
        # Our own schedule, prompts and decodes in one batch, can't be far from theirs.
        if name == "Qwen3-30B-A3B":
            ours = roofline.simulate(workloads.community(), config)
            assert sum(roofline.run_seconds(ours, config, H200).values()) == pytest.approx(
                total, rel=0.01)


def test_one_step_by_hand():
    """0.6B, 4 rows at 1,000 tokens of context, on a machine of 1 GB/s and 1 GFLOP/s."""
    config = ModelConfig.from_dict(MODELS["Qwen3-0.6B"])
    slow = Machine(1e9, 1e9)
    found = roofline.step_seconds(Work(4, 4, 28 * 4000, 28 * 4000), config, slow)
    matrices = 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072)  # 440 million
    assert found == pytest.approx(dict(
        linear=2 * matrices * 4 / 1e9,  # at so few flops a byte arithmetic is slower
        head=(2 * 151_936 * 1024 * 4 + 4 * 151_936 * 4) / 1e9,
        attention=4 * 2048 * 28 * 4000 / 1e9,
        other=16 * 4 * 1024 * 28 / 1e9))
    fast = roofline.step_seconds(Work(4, 0, 28 * 4000, 28 * 4000), config, Machine(1e9, 1e15))
    assert fast == pytest.approx(dict(
        linear=2 * matrices / 1e9, head=0.0, attention=4000 * 114_688 / 1e9,
        other=16 * 4 * 1024 * 28 / 1e9))
    assert roofline.step_seconds(Work(4, 0, 0, 0), config, Machine(1e9, 1e15), itemsize=4)[
        "linear"] == pytest.approx(4 * matrices / 1e9)


def test_matrices_are_counted_as_transformers_has_them():
    for name in ("Qwen3-0.6B", "Qwen3-30B-A3B", "Llama-3.1-8B"):
        entries = dict(MODELS[name])
        config = AutoConfig.for_model(entries.pop("model_type"), **entries)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        real = sum(parameter.numel() for name, parameter in model.named_parameters()
                   if ".layers." in name and parameter.dim() > 1)
        config = ModelConfig.from_dict(MODELS[name])
        read, used = roofline.matrix_parameters(config, 10 ** 6)  # every expert is hit
        assert read == pytest.approx(real)
        assert (used < real / 8) == bool(config.num_experts)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_work_is_what_brute_force_counts(window):
    rows = [(0, 5), (4, 1), (3, 6), (0, 1), (11, 2)]  # (start, new tokens)
    step, keys, pairs = Step(0), 0, 0
    for start, num_new in rows:
        step.num_new_tokens[sequence("a", [0], SamplingParams())] = num_new
        step.starts.append(start)
        seen = [{key for key in range(at + 1) if window is None or key > at - window}
                for at in range(start, start + num_new)]
        keys += len(set.union(*seen))
        pairs += sum(map(len, seen))
    step.sampling = list(step.num_new_tokens)[:2]
    assert Work.of(step, (window, None)) == Work(
        15, 2, keys + sum(start + n for start, n in rows),
        pairs + sum(start + i + 1 for start, n in rows for i in range(n)))


def test_a_slow_product_of_torch_is_not_the_limit(monkeypatch):
    """On a CPU without AVX512-BF16 torch's product of bfloat16 takes 40 times as long as ours."""
    if roofline.compiled() is None:
        pytest.skip("needs a compiler")
    calls: list[str] = []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *given: calls.append("torch"))

    def seconds_of(work, device) -> float:
        calls.clear()
        work()
        return 100.0 if calls else 1.0

    monkeypatch.setattr(roofline, "_best", seconds_of)
    machine = roofline.measure(torch.device("cpu"), torch.bfloat16)
    assert machine.matrix_rate == 2 * 1536 ** 3


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.undo()
    machine = roofline.measure(torch.device("cpu"), torch.float32)
    assert 1e6 < machine.bandwidth < 1e14 and 1e6 < machine.matrix_rate < 1e16
