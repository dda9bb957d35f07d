"""A roofline: the least time in which this hardware can do the steps that were scheduled.

    python -m benchmarks.roofline                         all built-in models on an H200
    python -m benchmarks.roofline --bandwidth 0.034 --rate 0.465           and on a laptop

A step reads the weights it uses and the keys and values it attends to, and it multiplies and adds;
it can't be faster than the slower of the two (Williams et al. 2009, "Roofline"). With n tokens, b
rows of logits, ctx keys of each row, w bytes a number, BW bytes/s and MM flop/s:

    linear     max(w * P / BW, 2 * P * n / MM)         P: parameters of the layers' matrices
    head       max(w * V*h / BW, 2 * V*h * b / MM) + 4 * V*b / BW            (none where b is 0)
    attention  max(sum(ctx) * KV bytes / BW, 4 * H*D * pairs / MM)     pairs: of query and key
    other      8 * w * n * h * L / BW                  the residual stream, norms, activations

Of E experts only those that are hit are read, E * (1 - (1 - k/E)^n) of them on average, and each
token computes k. A sliding window shortens ctx. The sum over all steps is the minimum time, and its
share of the real time is what `bench.py` prints (`Watch`).

Invariant: the minimum is that of the steps as they were scheduled: it judges their execution only.
A better schedule (a prefix computed once) has a smaller minimum. BW and MM are measured on the same
machine (on a CPU before and after a run), not taken from a datasheet. Known limits: on a GPU a
copy writes as much as it reads, so work that only reads may pass 100%; one device is assumed for
any number of ranks; and the formula counts the last layer for all tokens, though most prompt tokens
need only keys and values there (`Decoder.forward`).
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from benchmarks.workloads import Request, community
from nanoserve import LLM
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.hooks import Extra
from nanoserve.model_config import ModelConfig
from nanoserve.scheduler import Scheduler
from nanoserve.self_test import load_backend
from nanoserve.sequence import CoreRequest, Sequence, Step

PARTS = ("linear", "head", "attention", "other")


def _qwen3(layers: int, hidden: int, heads: int, inner: int, tied: bool, **more) -> dict:
    return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=layers,
                hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
                intermediate_size=inner, vocab_size=151_936, max_position_embeddings=40_960,
                rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=tied,
                torch_dtype="bfloat16") | more


# The config.json of real models, as far as it matters for speed.
MODELS: dict[str, dict] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 9728, True),
    "Qwen3-8B": _qwen3(36, 4096, 32, 12288, False),
    "Qwen3-14B": _qwen3(40, 5120, 40, 17408, False),
    "Qwen3-32B": _qwen3(64, 5120, 64, 25600, False),
    "Qwen3-30B-A3B": _qwen3(
        48, 2048, 32, 6144, False, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True),
    "Llama-3.1-8B": _qwen3(
        32, 4096, 32, 14336, False, architectures=["LlamaForCausalLM"], model_type="llama",
        vocab_size=128_256, max_position_embeddings=131_072, rope_theta=5e5, rms_norm_eps=1e-5,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                          high_freq_factor=4.0, original_max_position_embeddings=8192)),
}


def built_in(name: str) -> str | None:
    """The built-in model of this name, in whatever case it is written."""
    return next((known for known in MODELS if known.lower() == name.lower()), None)


def write_config(name: str, folder: Path) -> Path:
    """A folder that every engine can load with random weights."""
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return folder


# ------------------------------------------------------------ what was done


@dataclass
class Work:
    """What a step has to do at least: tokens, rows of logits, and attention over all layers."""

    num_tokens: int
    num_rows: int
    num_keys: int  # that are read: once a row and layer
    num_pairs: int  # of a query and a key that it sees

    @classmethod
    def of(cls, step: Step, windows: tuple[int | None, ...]) -> "Work":
        num_new = np.fromiter(step.num_new_tokens.values(), np.int64)
        start = np.asarray(step.starts, np.int64)
        end = start + num_new
        keys = pairs = 0
        for window, num_layers in Counter(windows).items():
            # Two queries at positions 7 and 8 with a window of 4 read keys 4..8: 5 of the 9.
            read = end if window is None else np.minimum(end, num_new + window - 1)
            keys += num_layers * int(read.sum())
            pairs += num_layers * int((_seen(end, window) - _seen(start, window)).sum())
        return cls(int(num_new.sum()), len(step.sampling), keys, pairs)


def _seen(end: np.ndarray, window: int | None) -> np.ndarray:
    """Keys seen by all queries before `end`: 1 + 2 + 3 for 3; from the window's width on it stays
    at that, 1 + 2 + 2 for a window of 2."""
    ramp = end if window is None else np.minimum(end, window)
    return ramp * (ramp + 1) // 2 + (end - ramp) * ramp


# ------------------------------------------------------------ what it takes


@dataclass(frozen=True)
class Machine:
    """The two numbers that all of the formulas need. Measured, they are what this machine gives
    now, while other programs use it, too."""

    bandwidth: float  # bytes a second, read and written together
    matrix_rate: float  # flop a second, in the model's dtype

    def or_better(self, again: "Machine") -> "Machine":
        """The better number of each. Other programs may have slowed down one whole measurement,
        and against it a run could pass 100%. With the better one, shares can be too small, but not
        too large."""
        return Machine(max(self.bandwidth, again.bandwidth),
                       max(self.matrix_rate, again.matrix_rate))


def step_seconds(work: Work, config: ModelConfig, machine: Machine,
                 itemsize: int = 2) -> dict[str, float]:
    """The least seconds of one step by part, as the module's docstring has them; itemsize: bytes a
    number.

    Matrices and attention take memory's time or arithmetic's, whichever is longer; "other" is
    memory's alone. Parts are added up, since they need each other's results. Of sampling only 4
    bytes a logit are counted, with the head: written and read once in 16 bits.
    """
    bandwidth, rate, n = machine.bandwidth, machine.matrix_rate, work.num_tokens
    hidden, logits = config.hidden_size, config.vocab_size * work.num_rows
    read, used = matrix_parameters(config, n)
    query_width = config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_key_value_heads * config.head_dim  # of a layer: a key and a value
    return dict(
        linear=max(itemsize * read / bandwidth, 2 * used * n / rate),
        head=0.0 if work.num_rows == 0 else 4 * logits / bandwidth + max(
            itemsize * config.vocab_size * hidden / bandwidth, 2 * logits * hidden / rate),
        attention=max(work.num_keys * kv_width * itemsize / bandwidth,
                      4 * query_width * work.num_pairs / rate),
        other=8 * itemsize * n * hidden * config.num_hidden_layers / bandwidth)


def matrix_parameters(config: ModelConfig, num_tokens: int) -> tuple[float, float]:
    """(how many the layers' matrices have that a step of n tokens reads, how many a token uses).

    They differ only in a mixture of experts. There one token reads what it uses, and a few hundred
    together read nearly every expert, though each uses no more than before.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    read = used = config.num_hidden_layers * attention
    dense = 3 * hidden * config.intermediate_size
    for has_experts in config.moe_layers:
        if not has_experts:
            read, used = read + dense, used + dense
            continue
        expert, router = 3 * hidden * config.moe_intermediate_size, hidden * config.num_experts
        count, chosen = config.num_experts, config.num_experts_per_tok
        num_hit = count * (1 - (1 - chosen / count) ** num_tokens)
        read, used = read + num_hit * expert + router, used + chosen * expert + router
    return read, used


def run_seconds(steps: Iterable[Work], config: ModelConfig, machine: Machine,
                itemsize: int = 2) -> dict[str, float]:
    """The same for all steps together."""
    total = dict.fromkeys(PARTS, 0.0)
    for work in steps:
        for part, seconds in step_seconds(work, config, machine, itemsize).items():
            total[part] += seconds
    return total


def simulate(requests: list[Request], config: ModelConfig, max_num_seqs: int = 256,
             max_num_batched_tokens: int = 16_384) -> list[Work]:
    """The steps in which the real scheduler would serve these requests, submitted at once."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    engine = EngineConfig(model="none", max_model_len=longest, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens)
    scheduler = Scheduler(engine, num_blocks=max_num_seqs * (longest // engine.block_size + 1))
    for i, request in enumerate(requests):
        core = CoreRequest(str(i), SamplingParams(), arrival=i,
                           max_num_tokens=len(request.prompt) + request.max_tokens)
        scheduler.add(Sequence(core, list(request.prompt)))
    steps = []
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        steps.append(Work.of(step, config.windows))
        scheduler.update(step, [0] * len(step.sampling))
    return steps


# ------------------------------------------------------------ what there is


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time large copies and products; the best of several, because disturbances only ever make a
    run longer, and the best of all ways to do them, because any of them shows what the machine can
    do. Torch has no fast product of bfloat16 on a CPU without AVX512-BF16, for example.
    """
    on_gpu = device.type == "cuda"
    source = torch.ones(2 ** (30 if on_gpu else 27), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    size = 8192 if on_gpu else 1536
    a = torch.randn(size, size, device=device)  # zeros take less power, and are faster
    b = torch.randn(size, size, device=device)
    flops, rates = 2 * size ** 3, []
    for kind in {dtype, dtype if on_gpu else torch.float32}:
        x, y = a.to(kind), b.to(kind)
        rates.append(flops / _best(lambda: x @ y, device))  # noqa: B023 - called at once
    if (ours := None if on_gpu else compiled()) is not None:
        x, weight = a.to(dtype), ours.prepack(b.to(dtype))
        rates.append(flops / _best(lambda: ours.linear(x, weight), device))
        row = torch.ones(1, 2 ** 11, dtype=dtype)
        weight = ours.prepack(row.expand(2 ** 15, -1))  # 128 MB in 16 bits, read for one row
        seconds = _best(lambda: ours.linear(row, weight), device)
        bandwidth = max(bandwidth, weight.memory.nbytes / seconds)
    return Machine(bandwidth, max(rates))


def compiled() -> ModuleType | None:
    """The engine's own products on a CPU; None where there is no compiler."""
    try:
        return load_backend("cpu")
    except ImportError:
        return None


class Watch(Extra):
    """Watches one engine from now on: it keeps the steps, whose least time is worked out
    after the run."""

    def __init__(self, llm: LLM):
        self.config, self.device = llm.model_config, llm.runner.device
        self.dtype = getattr(torch, llm.config.dtype)
        self.steps: list[Step] = []
        llm.add(self)

    def scheduled(self, step: Step) -> None:
        if step.num_new_tokens:
            self.steps.append(step)

    def share(self, seconds: float) -> str:
        """Of a run that took so long, in words. Measures the machine: call it when the engine has
        given back its memory."""
        machine = measure(self.device, self.dtype)
        steps = [Work.of(step, self.config.windows) for step in self.steps]
        least = sum(run_seconds(steps, self.config, machine, self.dtype.itemsize).values())
        return (f"{least / seconds:.1%}, as the steps took {seconds:.2f} s and need {least:.2f} "
                f"(copy {machine.bandwidth / 1e9:,.1f} GB/s, matrix product "
                f"{machine.matrix_rate / 1e9:,.0f} GFLOP/s)")


def _best(work, device: torch.device, budget: float = 0.5) -> float:
    """Seconds of the fastest of at least three goes, and more while there is time."""
    best, deadline, num_goes = float("inf"), time.perf_counter() + budget, 0
    while num_goes < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, num_goes = min(best, time.perf_counter() - start), num_goes + 1
    return best


def main() -> None:
    """The community workload's minimum for each model, and one stream's with 1,024 keys."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s; default: 4.3")
    parser.add_argument("--rate", type=float, default=790, help="TFLOP/s; default: 790")
    args = parser.parse_args()
    if min(args.bandwidth, args.rate) <= 0:
        parser.error("--bandwidth and --rate must be above 0")
    machine = Machine(args.bandwidth * 1e12, args.rate * 1e12)
    requests = community()
    num_out = sum(request.max_tokens for request in requests)
    steps: dict[int, list[Work]] = {}  # by number of layers, which is all that differs
    print(f"{'model':15}{'minimum s':>11}{'output tok/s':>14}{'one stream tok/s':>18}")
    for name, entries in MODELS.items():
        config = ModelConfig.from_dict(entries)
        layers = config.num_hidden_layers
        if layers not in steps:
            steps[layers] = simulate(requests, config)
        seconds = sum(run_seconds(steps[layers], config, machine).values())
        stream = sum(step_seconds(Work(1, 1, 1024 * layers, 1024 * layers), config,
                                  machine).values())
        print(f"{name:15}{seconds:11.2f}{num_out / seconds:14,.0f}{1 / stream:18,.0f}")


if __name__ == "__main__":
    main()
