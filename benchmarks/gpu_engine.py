"""The engine with random weights of real shapes: throughput, one stream, where the time goes."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import torch

from benchmarks.gpu_report import MODES, ON_GPU, PUBLISHED, Report, wave_name
from nanoserve import LLM, SamplingParams
from nanoserve_extras.few_rows.few_rows import FewRows


def config_json(sizes: dict, dtype: str) -> dict:
    return dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", dtype=dtype,
        num_hidden_layers=sizes["L"], hidden_size=sizes["h"], num_attention_heads=sizes["H"],
        num_key_value_heads=sizes["K"], head_dim=sizes["D"], intermediate_size=sizes["I"],
        vocab_size=sizes["V"], tie_word_embeddings=sizes["tied"], rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=40960, hidden_act="silu", eos_token_id=1)


@contextlib.contextmanager
def started(sizes: dict, size: SimpleNamespace, **options) -> Iterator[tuple[LLM, dict]]:
    """An engine with random weights, and what its start took."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_json(sizes, size.options["dtype"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        begin = time.perf_counter()
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True,
                 **size.options | options) as engine:
            took = dict(seconds=round(time.perf_counter() - begin, 1),
                        kv_blocks=engine.scheduler.blocks.num_blocks)
            if engine.runner.graphs is not None:
                took |= dict(graphs=len(engine.runner.graphs.sizes),
                             graph_seconds=round(engine.runner.graphs.seconds, 1),
                             graph_mb=round(engine.runner.graphs.memory / 2 ** 20))
            if ON_GPU:
                free, total = torch.cuda.mem_get_info()
                took |= dict(used_gb=round((total - free) / 2 ** 30, 1),
                             peak_gb=round(torch.cuda.max_memory_allocated() / 2 ** 30, 1))
            print(took, flush=True)
            yield engine, took


def workload(size: SimpleNamespace) -> tuple[list[list[int]], list[int]]:
    """nano-vllm's bench.py, number for number: prompts, and how many tokens each is to make."""
    rng = Random(0)
    prompts = [[rng.randint(0, size.max_token_id) for _ in range(rng.randint(*size.lengths))]
               for _ in range(size.num_requests)]
    return prompts, [rng.randint(*size.lengths) for _ in range(size.num_requests)]


@contextlib.contextmanager
def observed(engine: LLM, report: Report) -> Iterator[SimpleNamespace]:
    """The steps that are scheduled, and when. Ends what takes too long."""
    seen, schedule = SimpleNamespace(steps=[], times=[]), engine.scheduler.schedule

    def scheduled():
        if report.left() < 0 and ON_GPU:
            raise TimeoutError("no time is left")
        step = schedule()
        if step.num_new_tokens:
            seen.steps.append(step)
            seen.times.append(time.perf_counter())
        return step

    engine.scheduler.schedule = scheduled
    try:
        yield seen
    finally:
        engine.scheduler.schedule = schedule


def roofline(sizes: dict, steps: list, copy: float, product: float) -> float:
    """Seconds that these steps take at the least, of numbers of 2 bytes: weights, keys and values
    are read once a step, activations 16 times a layer, or the products take longer than that."""
    L, h, H, K, D, V = (sizes[name] for name in "LhHKDV")
    p_linear = L * (h * (H + 2 * K) * D + H * D * h + 3 * h * sizes["I"])
    total = 0.0
    for step in steps:
        n, b = step.num_tokens, len(step.sampling)
        rows = list(zip(step.starts, step.num_new_tokens.values(), strict=True))
        context = sum(start + new for start, new in rows)
        pairs = sum(new * start + new * (new + 1) // 2 for start, new in rows)
        linear = max(2 * p_linear / copy, 2 * p_linear * n / product)
        head = max(2 * V * h / copy, 2 * V * h * b / product) + 4 * V * b / copy
        attention = max(context * 2 * L * K * D * 2 / copy, 4 * H * D * L * pairs / product)
        total += linear + head + attention + 16 * n * h * L / copy
    return total


def share_of_roofline(report: Report, sizes: dict, steps: list, seconds: float) -> float | None:
    limits = report.results.get("ceilings") or {}
    if "copy" not in limits:
        return None
    return round(roofline(sizes, steps, limits["copy"], limits["product"]) / seconds, 4)


def warm_up(engine: LLM, size: SimpleNamespace) -> None:
    """Prompts in chunks, decodes, and a batch that is full: whatever is compiled late is now."""
    count, length, new = size.warm_up
    rng = Random(1)
    engine.generate([[rng.randint(0, size.max_token_id) for _ in range(length)]
                     for _ in range(count)],
                    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new),
                    use_tqdm=False)
    engine.reset_prefix_cache()


def throughput(report: Report, size: SimpleNamespace, engine: LLM, sizes: dict) -> dict:
    prompts, lengths = workload(size)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    warm_up(engine, size)
    with observed(engine, report) as seen:
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made == sum(lengths), f"{made} tokens were made, {sum(lengths)} asked for"
    decodes = [step for step in seen.steps if len(step.sampling) == step.num_tokens]
    result = dict(
        output_tok_per_s=round(made / seconds, 1), seconds=round(seconds, 3),
        prompt_tokens=sum(map(len, prompts)), output_tokens=made, steps=len(seen.steps),
        decode_steps=len(decodes), preempted=sum(len(step.preempted) for step in seen.steps),
        mean_decode_batch=round(statistics.mean([step.num_tokens for step in decodes] or [0]), 1),
        of_roofline=share_of_roofline(report, sizes, seen.steps, seconds))
    print(result, flush=True)
    return result


def one_stream(report: Report, size: SimpleNamespace, engine: LLM, sizes: dict) -> dict:
    """Tokens a second of a single request, between its fifth and its last step."""
    length, new = size.stream
    prompt = [Random(2).randint(0, size.max_token_id) for _ in range(length)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new)
    engine.generate([prompt], params, use_tqdm=False)
    engine.reset_prefix_cache()
    with observed(engine, report) as seen:
        engine.generate([prompt], params, use_tqdm=False)
    seconds = seen.times[-1] - seen.times[4]
    steps = seen.steps[5:]
    result = dict(tok_per_s=round(len(steps) / seconds, 1), context=length,
                  of_roofline=share_of_roofline(report, sizes, steps, seconds))
    print(result, flush=True)
    return result


def profile(report: Report, size: SimpleNamespace, engine: LLM, show: int = 15) -> dict:
    """Decode steps of a full batch: the device's time by kernel, and how much of it is idle."""
    count, length, num_steps = size.profile
    rng, names = Random(3), [f"profile {i}" for i in range(count)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=40 + 4 * num_steps)
    with observed(engine, report) as seen:
        for name in names:
            engine.add_request(name, [rng.randint(0, size.max_token_id) for _ in range(length)],
                               params)
        for _ in range(40):  # until all of them decode
            engine.step()
            if seen.steps[-1].num_tokens == count == len(seen.steps[-1].sampling):
                break
        else:
            raise RuntimeError(f"{count} requests never decode side by side")
        for _ in range(4):
            engine.step()
        engine.runner.synchronize()
        kinds = torch.profiler.ProfilerActivity
        try:
            with torch.profiler.profile(
                    activities=[kinds.CUDA if ON_GPU else kinds.CPU]) as profiler:
                start = time.perf_counter()
                for _ in range(num_steps):
                    engine.step()
                engine.runner.synchronize()
                wall = (time.perf_counter() - start) / num_steps
        finally:
            engine.abort_request(names)
            while engine.scheduler.in_flight:
                engine.step()
            engine.reset_prefix_cache()
    events = [event for event in profiler.key_averages()
              if not ON_GPU or event.device_type == torch.autograd.DeviceType.CUDA]
    spent = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    events.sort(key=lambda event: -getattr(event, spent))
    busy = sum(getattr(event, spent) for event in events) / num_steps
    top = [dict(kernel=event.key[:90], calls=round(event.count / num_steps, 2),
                microseconds=round(getattr(event, spent) / num_steps, 1),
                share=round(getattr(event, spent) / num_steps / max(busy, 1e-9), 4))
           for event in events[:show]]
    return dict(batch=count, context=length, step_microseconds=round(wall * 1e6, 1),
                busy_microseconds=round(busy, 1), kernels=round(
                    sum(event.count for event in events) / num_steps, 1), top=top)


def measure_engine(report: Report, size: SimpleNamespace, workers: int) -> None:
    for name, sizes in size.models.items():
        report.measure(f"{name} engine", 60, engine_of, report, size, name, sizes)


def engine_of(report: Report, size: SimpleNamespace, name: str, sizes: dict) -> dict:
    with started(sizes, size) as (engine, took):
        report.measure(f"{name} throughput", 30, throughput, report, size, engine, sizes)
        report.measure(f"{name} one stream", 5, one_stream, report, size, engine, sizes)
        report.measure(f"{name} profile", 10, profile, report, size, engine)
        for model, *workload, _, _ in PUBLISHED:
            if ON_GPU and name == model:
                report.measure(wave_name(name, *workload), 25, wave, size, engine, *workload)
    report.measure(f"{name} one stream, few rows fused", 25, fused_stream, report, size, sizes)
    return took


def wave(size: SimpleNamespace, engine: LLM, count: int, into: int, out: int) -> dict:
    """`count` requests of `into` tokens that make `out` each, all at once, as others measure it."""
    rng = Random(count)
    prompts = [[rng.randint(0, size.max_token_id) for _ in range(into)] for _ in range(count)]
    engine.reset_prefix_cache()
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=out),
                    use_tqdm=False)
    seconds = time.perf_counter() - start
    return dict(output_tok_per_s=round(count * out / seconds, 1), seconds=round(seconds, 2))


def fused_stream(report: Report, size: SimpleNamespace, sizes: dict) -> dict:
    """What an extra that is off until this says that it is faster is worth."""
    with started(sizes, size, extras=[FewRows()]) as (engine, took):
        return one_stream(report, size, engine, sizes) | dict(start=took)


def measure_ablation(report: Report, size: SimpleNamespace, workers: int) -> None:
    for name, sizes in size.models.items():
        for mode, options in MODES.items():
            report.measure(f"{name} ablation {mode}", 60, ablated, report, size, sizes, options)


def ablated(report: Report, size: SimpleNamespace, sizes: dict, options: dict) -> dict:
    with started(sizes, size, **options) as (engine, took):
        return throughput(report, size, engine, sizes) | dict(start=took)
