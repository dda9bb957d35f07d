"""bench.py: what it asks, what it computes from what it sees, and that every way to run it works.

No test here times anything or judges a time. Oracles: nano-vllm's own lines for the community
workload; PERFORMANCE figures worked out by others for eight real models; sums done by hand or by
brute force; transformers for the number of parameters.
"""

import argparse
import contextlib
import json
import math
import random
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bench
from nanoserve import LLM
from nanoserve.tools import peers
from nanoserve.tools import meter
from nanoserve.tools import roofline
from nanoserve.tools import workloads
from nanoserve.tools.roofline import MODELS, Machine, Work
from nanoserve.tools.workloads import SMALL, Request
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Sequence, Step

sys.path.insert(0, str(Path(bench.__file__).parent / "docs"))
import benchmark  # noqa: E402

H200 = Machine(4.3e12, 790e12)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """What the machine can do is measured in one test only; here it takes time for nothing."""
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: Machine(3e10, 4e11))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Shapes without weights, as a user's own config.json would be."""
    folder = tmp_path_factory.mktemp("toy")
    config = MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, vocab_size=300, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(capsys, toy, *args) -> tuple[int, str, str]:
    code = bench.main(["--model", str(toy), "--set", "device=cpu", "--set",
                       "num_gpu_blocks_override=400", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------ what is asked


def test_the_community_workload_is_nano_vllms_number_by_number():
    random.seed(0)  # what follows is copied from its bench.py
    prompt_token_ids = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))]
                        for _ in range(256)]
    max_tokens = [random.randint(100, 1024) for _ in range(256)]
    requests = workloads.generate(workloads.LARGE["batch"], 151_936)
    assert [request.prompt for request in requests] == prompt_token_ids
    assert [request.max_tokens for request in requests] == max_tokens
    assert sum(map(len, prompt_token_ids)) == 142_827 and sum(max_tokens) == 133_966


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workloads_have_the_shape_they_say(name):
    shape = SMALL[name]
    requests = workloads.generate(shape, 300)
    assert requests == workloads.generate(shape, 300)
    assert requests != workloads.generate(shape, 300, seed=1)
    assert len(requests) == shape.num_prompts
    assert all(0 <= token < 300 for request in requests for token in request.prompt)
    assert all(shape.output_len[0] <= r.max_tokens <= shape.output_len[1] for r in requests)
    long = requests[3::4] if shape.long_every else []
    assert all(len(request.prompt) == shape.long_len for request in long)
    usual = [request for request in requests if request not in long]
    low, high = (shape.shared_len + length for length in shape.input_len)
    assert all(low <= len(request.prompt) <= high for request in usual)
    assert len({tuple(request.prompt[:shape.shared_len]) for request in usual}) == 1
    assert len({tuple(request.prompt) for request in requests}) == len(requests)
    if shape.period:
        assert all(r.prompt[shape.period:] == r.prompt[:-shape.period] for r in requests)


def test_poisson_arrivals_are_independent_of_each_other():
    requests = [Request([i], 1) for i in range(5000)]
    timed = workloads.poisson(requests, rate=8.0, seed=3)
    assert [r.prompt for r in timed] == [r.prompt for r in requests]
    gaps = [b.arrival - a.arrival for a, b in zip(timed, timed[1:])]
    assert min(gaps) > 0
    # Exponential: mean 1 / 8, and e^-1 of all gaps are longer than that.
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)
    assert timed == workloads.poisson(requests, rate=8.0, seed=3)


def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("seconds,prompt,output,shared\n1.5,20,4,16\n0.25,18,3,16\n")
    requests = workloads.replay(path, 300)
    assert [(r.arrival, len(r.prompt), r.max_tokens) for r in requests] == [
        (0.25, 18, 3), (1.5, 20, 4)]
    assert requests[0].prompt[:16] == requests[1].prompt[:16]


@pytest.mark.parametrize("text, says", [
    ("", "holds no requests"), ("0.5,10\n", "request 1"), ("0,5,3\n1,x,3\n", "request 2"),
    ("0,5,3\n-1,4,3\n", "request 2"), ("0,0,3\n", "request 1"), ("nan,1,3\n", "nan"),
    ("0,4,1\ninf,4,1\n", "inf"), ("when,prompt,output\n0,1,2\n", "header")])
def test_a_bad_trace_is_refused(tmp_path, toy, capsys, text, says):
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    with pytest.raises(SystemExit):
        run(capsys, toy, "--trace", str(path))
    assert says in capsys.readouterr().err


# ------------------------------------------------------------ what is computed


def test_spread_and_summary_by_hand():
    assert workloads.spread([]) is None
    values = [float(i) for i in range(1, 101)]
    random.Random(0).shuffle(values)
    assert workloads.spread(values) == dict(mean=50.5, p50=50, p90=90, p99=99)
    assert workloads.spread([3.0]) == dict(mean=3, p50=3, p90=3, p99=3)
    summary = workloads.summarize(4.0, 30, [[1.0, 1.5, 3.0], [2.0]])
    assert summary["inter_token"] == dict(mean=1.0, p50=0.5, p90=1.5, p99=1.5)
    assert summary["ttft"]["mean"] == 1.5 and summary["end_to_end"]["p99"] == 3.0
    assert (summary["num_output_tokens"], summary["requests_s"]) == (4, 0.5)
    assert (summary["output_tok_s"], summary["total_tok_s"]) == (1.0, 8.5)
    assert summary["decode_tok_s"] == 1.0  # two tokens behind a first one, in 2.0 seconds
    ends_only = workloads.summarize(4.0, 30, [[1.0, 3.0], [2.0, 2.0]], num_tokens=[3, 1])
    assert ends_only.pop("inter_token") is None
    assert ends_only == {k: v for k, v in summary.items() if k != "inter_token"}
    assert workloads.summarize(1.0, 3, [])["ttft"] is None


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
        if name in ("Qwen3-0.6B", "Qwen3-30B-A3B"):
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


def test_the_experts_that_are_hit():
    """Of 4 experts with 2 a token, drawn at random: simulated."""
    config = ModelConfig.from_dict(MODELS["Qwen3-30B-A3B"] | dict(
        num_experts=4, num_experts_per_tok=2, num_hidden_layers=1))
    rng = random.Random(0)
    expert = 3 * 2048 * 768
    rest = roofline.matrix_parameters(config, 1)[0] - 2 * expert
    for n in (1, 2, 3, 8):
        hit = sum(len({e for _ in range(n) for e in rng.sample(range(4), 2)})
                  for _ in range(4000)) / 4000
        assert (roofline.matrix_parameters(config, n)[0] - rest) / expert == pytest.approx(
            hit, rel=0.02)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_work_is_what_brute_force_counts(window):
    rows = [(0, 5), (4, 1), (3, 6), (0, 1), (11, 2)]  # (start, new tokens)
    step, keys, pairs = Step(0), 0, 0
    for start, num_new in rows:
        step.num_new_tokens[Sequence("a", [0], SamplingParams())] = num_new
        step.starts.append(start)
        seen = [{key for key in range(at + 1) if window is None or key > at - window}
                for at in range(start, start + num_new)]
        keys += len(set.union(*seen))
        pairs += sum(map(len, seen))
    step.sampling = list(step.num_new_tokens)[:2]
    assert Work.of(step, (window, None)) == Work(
        15, 2, keys + sum(start + n for start, n in rows),
        pairs + sum(start + i + 1 for start, n in rows for i in range(n)))


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.undo()
    machine = roofline.measure(torch.device("cpu"), torch.float32)
    assert 1e6 < machine.bandwidth < 1e14 and 1e6 < machine.matrix_rate < 1e16


@pytest.mark.parametrize("machine, model, count", [
    (Machine(1e12, 1e14), "Qwen3-0.6B", 16), (Machine(3e10, 1.5e11), "Qwen3-0.6B", None),
    (Machine(1e9, 1e10), "storyteller", 16)])
def test_without_a_model_a_cpu_gets_what_it_can_do(monkeypatch, machine, model, count):
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: machine)
    with bench.Bench(bench.make_parser().parse_args(["--set", "device=cpu"])) as found:
        assert found.folder.name == model
        assert len(found.requests) == count if count else 4 <= len(found.requests) < 16


# ------------------------------------------------------------ that it runs


FIELDS = {"machine", "model", "workload", "engine", "result", "interrupted", "roofline",
          "peak_memory_bytes"}


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_workload_runs(name, toy, tmp_path, capsys):
    path = tmp_path / "out.json"
    code, out, err = run(capsys, toy, "--workload", name, "--output-len", "2", "5",
                         "--output-json", str(path))
    assert code == 0
    result = json.loads(path.read_text())
    assert set(result) == FIELDS
    requests = workloads.generate(bench.replace(SMALL[name], output_len=(2, 5)), 300)
    assert result["workload"]["num_prompt_tokens"] == sum(len(r.prompt) for r in requests)
    found, line = result["result"], result["roofline"]
    assert found["num_output_tokens"] == sum(r.max_tokens for r in requests)
    assert found["num_requests"] == len(requests)
    assert all(set(found[key]) == {"mean", "p50", "p90", "p99"}
               for key in ("ttft", "inter_token", "end_to_end"))
    assert set(line["minimum_seconds"]) == set(roofline.PARTS)
    parts = line["measured_seconds"]
    assert all(parts[part] > 0 for part in (*roofline.PARTS, "sampling", "host", "schedule"))
    assert sum(seconds for part, seconds in parts.items() if part not in (
        "schedule", "build", "update")) == pytest.approx(found["seconds"])
    assert result["engine"]["num_kv_blocks"] == 400
    assert re.search(r"^Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output "
                     r"tokens/s$", out, re.M)
    assert "% of the roofline" in out and "KV blocks of 16" in out


def test_a_disturbed_measurement_of_the_machine_does_not_judge_a_run(toy, tmp_path, capsys,
                                                                     monkeypatch):
    """Before the run the matrix rate is halved by somebody else, behind it the bandwidth: the
    share is of the better ones, as both are what the machine can do."""
    least = []
    for machines in ([Machine(3e10, 2e11), Machine(1.5e10, 4e11)], [Machine(3e10, 4e11)] * 2):
        found = iter(machines)
        monkeypatch.setattr(roofline, "measure", lambda device, dtype, found=found: next(found))
        path = tmp_path / "out.json"
        code, out, _ = run(capsys, toy, "--dtype", "float32", "--output-json", str(path))
        result = json.loads(path.read_text())
        line = result["roofline"]
        assert code == 0 and (line["bandwidth"], line["matrix_rate"]) == (3e10, 4e11)
        assert "of the roofline (30.0 GB/s and 400 GFLOP/s, the best that was measured)" in out
        assert next(found, None) is None
        least.append(line["minimum_seconds"])
        assert line["share"] == pytest.approx(sum(least[-1].values()) / result["result"]["seconds"])
    assert least[0] == least[1]


def test_beside_peers_each_run_has_a_machine_of_its_own(toy, monkeypatch):
    """It gets slower, and the second run is not judged by what it could do in the first."""
    args = ["--model", str(toy), "--dtype", "float32", "--set", "num_gpu_blocks_override=400"]
    with bench.Bench(bench.make_parser().parse_args(args)) as one, (
            one.make_engine(one.requests)) as llm:
        found = []
        for machine in (Machine(3e10, 4e11), Machine(2e10, 1e11)):
            monkeypatch.setattr(roofline, "measure", lambda device, dtype, m=machine: m)
            line = one.run_beside_peers(llm, one.requests[:2], "")["roofline"]
            found.append(Machine(line["bandwidth"], line["matrix_rate"]))
    assert found == [Machine(3e10, 4e11), Machine(2e10, 1e11)]


def test_ctrl_c_behind_a_run_loses_nothing_of_it(toy, tmp_path, capsys, monkeypatch):
    def measure(device, dtype):
        if measured:
            raise KeyboardInterrupt
        measured.append(device)
        return Machine(3e10, 4e11)

    measured, path = [], tmp_path / "out.json"
    monkeypatch.setattr(roofline, "measure", measure)
    code, out, _ = run(capsys, toy, "--dtype", "float32", "--output-json", str(path))
    result = json.loads(path.read_text())
    assert code == 130 and result["interrupted"] and "Throughput: " in out
    assert result["result"]["num_requests"] == 16 and result["roofline"]["bandwidth"] == 3e10


def test_peak_memory_is_the_runs_and_not_the_measurements(toy, capsys, monkeypatch):
    """What is measured behind the run takes memory, too."""
    done = []
    monkeypatch.setattr(bench, "peak_memory", lambda device: done.append("peak") or {})
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: done.append("measure") or (
        Machine(3e10, 4e11)))
    assert run(capsys, toy, "--dtype", "float32")[0] == 0
    assert done == ["measure", "peak", "measure"]


def test_the_steps_are_those_of_the_scheduler(toy):
    """What the meter has seen is what a simulation of the same scheduler does."""
    requests = workloads.generate(bench.replace(SMALL["batch"], output_len=(2, 9)), 300)
    with LLM(toy, device="cpu", load_format="dummy", skip_tokenizer_init=True,
             max_num_batched_tokens=300, max_num_seqs=8, max_model_len=400,
             num_gpu_blocks_override=400) as llm:
        _, seen = meter.serve(llm, requests)
        assert llm.observers == [llm.metrics]
        steps = [Work.of(step, llm.model_config.windows) for step in seen.steps]
    assert steps == roofline.simulate(requests, llm.model_config, 8, 300)


def test_a_clock_starts_when_the_request_arrives(toy, monkeypatch):
    """Each step takes a second here. B arrives in the middle of the first one and is served by the
    second, C while nobody is there."""
    class Clock:
        now = 100.0
        perf_counter = staticmethod(time.perf_counter)

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(meter, "clock", clock)
    requests = [Request([1], 1, 9.25), Request([1, 2], 2, 0.5), Request([1, 2, 3], 1, 0.0)]
    with LLM(toy, device="cpu", load_format="dummy", skip_tokenizer_init=True,
             num_gpu_blocks_override=9) as llm:
        launch = llm.runner.launch

        def slow(step):
            clock.now += 1
            return launch(step)

        llm.runner.launch = slow
        result, _ = meter.serve(llm, requests)
    assert result["ttft"] == dict(mean=3.5 / 3, p50=1.0, p90=1.5, p99=1.5)
    assert result["end_to_end"]["p99"] == 2.5
    assert result["seconds"] == 10.25


def test_arrivals_and_a_profile(toy, tmp_path, capsys):
    path = tmp_path / "profile.json"
    code, out, _ = run(capsys, toy, "--num-prompts", "3", "--input-len", "5", "--output-len", "4",
                       "--request-rate", "200", "--profile", str(path))
    assert code == 0 and "200.0 a second" in out
    assert json.loads(path.read_text())["traceEvents"]


def test_ctrl_c_prints_what_was_measured(toy, tmp_path, capsys, monkeypatch):
    step, calls = LLM.step, []

    def interrupted(llm):
        calls.append(llm)
        if len(calls) == 25:  # some of them are the warm-up's
            raise KeyboardInterrupt
        return step(llm)

    monkeypatch.setattr(LLM, "step", interrupted)
    path = tmp_path / "out.json"
    code, out, err = run(capsys, toy, "--num-prompts", "4", "--output-json", str(path))
    result = json.loads(path.read_text())
    assert code == 130 and result["interrupted"] and "interrupted" in err and "Throughput" in out
    assert 0 < result["result"]["num_output_tokens"] < result["workload"]["num_output_tokens"]


def test_the_ladder(toy, tmp_path, capsys, monkeypatch):
    path = tmp_path / "ladder.json"
    real, taken = bench.serve, iter([5, 1, 1, 1, 3, 2, 2, 2, 4, 3, 3, 3])  # seconds, row after row

    def serve(llm, requests, temperature, label=None):
        run, meter = real(llm, requests, temperature, label)
        return (run if label is None else dict(run, seconds=next(taken))), meter  # None: warming up

    monkeypatch.setattr(bench, "serve", serve)
    code, out, _ = run(capsys, toy, "--ladder", "--output-len", "3", "6", "--num-prompts", "8",
                       "--output-json", str(path))
    assert code == 0 and next(taken, None) is None  # three rounds by default
    result = json.loads(path.read_text())
    names = [row["name"] for row in result["rows"]]
    assert names == ["one request at a time", "+ continuous batching", "+ chunked prefill",
                     "+ prefix caching"]
    assert all(out.count(name) == 4 for name in names) and "medians of 3" in out
    assert [row["seconds"] for row in result["rows"]] == [4, 2, 2, 2]
    assert {row["num_output_tokens"] for row in result["rows"]} == {
        result["workload"]["num_output_tokens"]}
    assert result["workload"]["name"] == "mixed"


@pytest.mark.parametrize("where", ["its engine is made", "it warms up", "it is measured"])
def test_ctrl_c_on_the_ladder_keeps_the_rows_that_were_done(toy, tmp_path, capsys, monkeypatch,
                                                            where):
    """Pressed in the third row, while ..."""
    made, path = [], tmp_path / "ladder.json"

    class Interrupted(LLM):
        def __init__(self, *args, **options):
            made.append(self)
            if len(made) == 3 and where == "its engine is made":
                raise KeyboardInterrupt
            super().__init__(*args, **options)

        def step(self):
            measured = len(self.requests) > 2  # a warm-up has two at most
            if len(made) == 3 and measured == (where == "it is measured"):
                raise KeyboardInterrupt
            return super().step()

    monkeypatch.setattr(bench, "LLM", Interrupted)
    code, out, _ = run(capsys, toy, "--ladder", "--output-len", "3", "6", "--num-prompts", "8",
                       "--output-json", str(path))
    result = json.loads(path.read_text())
    assert code == 130 and result["interrupted"] and len(made) == 3
    assert [row["name"] for row in result["rows"]] == ["one request at a time",
                                                       "+ continuous batching"]
    assert "medians" not in out


def test_the_run_in_the_middle():
    runs = {"odd": [3, 1, 2], "even": [4, 1, 2, 3], "one": [5], "none": []}
    runs = {name: [dict(seconds=s) for s in some] for name, some in runs.items()}
    assert [row["seconds"] for row in bench.middle_of_each(runs)] == [2, 2, 5]


def test_against_transformers(toy, tmp_path, capsys):
    path = tmp_path / "against.json"
    code, out, _ = run(capsys, toy, "--against", "hf", "--rounds", "2", "--num-prompts", "3",
                       "--input-len", "4", "20", "--output-len", "2", "6", "--threads", "1",
                       "--output-json", str(path))
    assert code == 0
    result = json.loads(path.read_text())
    ours, theirs = result["rounds"]["batch"].values()
    assert len(ours) == len(theirs) == 2
    for key in ("num_requests", "num_prompt_tokens", "num_output_tokens"):
        assert {run[key] for run in ours + theirs} == {result["workload"][key]}
    assert all(run["ttft"]["mean"] <= run["end_to_end"]["mean"] for run in ours + theirs)
    assert all("share" in run["roofline"] for run in ours)
    assert re.search(r"transformers [\d.]+, static batch .*times as good", out)


PEER = """
import json, sys
print(json.dumps({"ready": "another engine"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if len(asked["prompts"][0]) == 13:
        sys.exit("out of luck")
    print(json.dumps({"seconds": 2.0, "times": [[0.5, 2.0] for _ in asked["prompts"]],
                      "num_tokens": asked["max_tokens"]}), flush=True)
"""


def test_any_script_can_be_a_peer(toy, tmp_path, capsys):
    script, path = tmp_path / "peer.py", tmp_path / "out.json"
    script.write_text(PEER)
    common = ["--against", str(script), "--workload", "single", "--rounds", "1",
              "--output-len", "4"]
    code, out, _ = run(capsys, toy, *common, "--input-len", "9", "--output-json", str(path))
    [theirs] = json.loads(path.read_text())["rounds"]["single"]["another engine"]
    assert code == 0 and theirs["ttft"]["mean"] == 0.5 and theirs["decode_tok_s"] == 3 / 1.5
    with pytest.raises(SystemExit):
        run(capsys, toy, *common, "--input-len", "13")
    assert "the peer ended: out of luck" in capsys.readouterr().err


def test_the_readmes_tables_come_from_a_measurement(toy, tmp_path, capsys):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    data = {}
    args = argparse.Namespace(model=str(toy), dtype="float32", rounds="2", min_seconds="0",
                              against=[str(script)], peer_python=sys.executable, no_ladder=False)
    kept = [sorted(data) for _ in benchmark.measure(args, data)]  # what is written after each part
    assert kept == [["comparisons"], ["comparisons", "ladder"]]
    data = json.loads(json.dumps(benchmark.rounded(data)))
    text = benchmark.render(data)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    titles = [title for title in rows[0][1:]]
    assert titles == ["batch: output tok/s", "single: TTFT s", "single: decode tok/s",
                      "single: total s", "long-prompt: TTFT s", "shared-prefix: total s"]
    found = {row[0]: row[1:] for row in rows}
    count = sum(request.max_tokens for request in workloads.generate(SMALL["batch"], 300))
    assert found["another engine"] == [f"{count / 2:.3g}", "0.5", "42", "2", "0.5", "2"]
    ours = data["comparisons"][0]["rounds"]["shared-prefix"]["nanoserve"]
    assert found["nanoserve"][-1] == f"{sum(run['seconds'] for run in ours) / 2:.3g}"
    ratio = [2 / run["seconds"] for run in ours]
    assert found["times as good as another engine"][-1].startswith(f"{sum(ratio) / 2:.2f} (")
    assert len(found["nanoserve, share of the roofline"]) == 6
    assert "one request at a time" in found and "+ prefix caching" in found
    assert "`shared-prefix`: 16 requests of 512 common and 32 tokens in, 32 out" in text


def test_a_comparison_takes_the_place_of_its_machines_last_one(toy, tmp_path, monkeypatch):
    """Another CPU's stays, and so do the same one's in another dtype and that of its GPU."""
    new, *others = (dict(model=dict(dtype=dtype), machine=dict(cpu=cpu, device=device))
                    for dtype, cpu, device in (("float32", "B", "cpu"), ("float32", "A", "cpu"),
                                               ("bfloat16", "B", "cpu"), ("float32", "B", "GPU")))
    monkeypatch.setattr(benchmark.bench.Bench, "against", lambda self, names: new)
    args = argparse.Namespace(model=str(toy), dtype="float32", rounds="2", min_seconds="0",
                              against=None, peer_python=sys.executable, no_ladder=True)
    data = dict(comparisons=[dict(new, old=True), *others])
    list(benchmark.measure(args, data))
    assert sorted(map(str, data["comparisons"])) == sorted(map(str, [new, *others]))


def test_ctrl_c_among_peers_keeps_whole_rounds(capsys):
    def ours(requests, label):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(label)
        return workloads.summarize(2.0, 3, [[1.0, 2.0]]) | dict(interrupted=False)

    done = []
    found = peers.compare(ours, [], {"batch": [Request([1], 2)], "single": []}, rounds=3)
    assert found["interrupted"] and list(found["rounds"]) == ["batch"]
    assert len(found["rounds"]["batch"]["nanoserve"]) == 2
    assert "batch, medians of 2" in capsys.readouterr().out


def test_a_short_workload_gets_more_rounds(capsys):
    """A batch takes 40 s, a single request 15: in a minute at least, and two rounds, two and four.
    The table says so."""
    def ours(requests, label):
        return workloads.summarize({"batch": 40.0, "single": 15.0}[label], 3, [[1.0, 2.0]]) | dict(
            interrupted=False, roofline=dict(share=0.5, bandwidth=next(speeds), matrix_rate=2e11))

    speeds = iter(1e9 * n for n in (30, 41, 35, 35, 35, 35))
    found = peers.compare(ours, [], dict.fromkeys(("batch", "single"), [Request([1], 2)]), 2, 60)
    assert [len(runs["nanoserve"]) for runs in found["rounds"].values()] == [2, 4]
    assert "batch, medians of 2" in capsys.readouterr().out
    machine = dict(cpu="A", device="cpu", date="today", num_cores=2, threads=2, torch="2",
                   python="3", bandwidth=1e9, matrix_rate=1e9)
    text = benchmark.comparison(found | dict(machine=machine, model=dict(dtype="d", name="M")))
    assert "medians of 2 rounds, of `single` 4:" in text
    assert "copy 30 to 41 GB/s, matrix product 200 GFLOP/s" in text


def test_min_seconds_reach_the_comparison(toy, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "compare", lambda *args: asked.append(args[-2:]) or dict(rounds={}))
    monkeypatch.setattr(bench.Bench, "start_peer", lambda self, peer: contextlib.nullcontext())
    common = "--against", "hf", "--rounds", "2"
    assert run(capsys, toy, *common, "--min-seconds", "7")[0] == 0
    assert run(capsys, toy, *common)[0] == 0
    assert asked == [(2, 7.0), (2, 0)]


def test_single_tokens_have_no_rate(toy, tmp_path, capsys):
    """A comparison of them ended in a division by zero behind its last round, a ladder in a
    TypeError behind its first row."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    one = "--num-prompts", "1", "--input-len", "8", "--output-len", "1"
    code, out, _ = run(capsys, toy, "--against", str(script), "--workload", "single",
                       "--rounds", "1", *one)
    assert code == 0 and "decode tok/s nan" in out
    code, out, _ = run(capsys, toy, "--ladder", "--rounds", "1", "--output-len", "1")
    assert code == 0 and "+ prefix caching" in out and "nan ms" in out


def test_ratios_say_how_many_times_as_good_we_are():
    def one(tok_s, seconds, ttft, decode):
        return dict(output_tok_s=tok_s, seconds=seconds, ttft=dict(mean=ttft), decode_tok_s=decode)

    ours, theirs = [one(6, 2, 1, 5), one(8, 4, 3, 4)], [one(3, 3, 4, 10), one(2, 4, 1.5, 2)]
    assert peers.ratios("batch", ours, theirs) == [[2, 4]]
    assert peers.ratios("single", ours, theirs) == [[4, 0.5], [0.5, 2], [1.5, 1]]
    assert peers.ratios("long-prompt", ours, theirs) == [[4, 0.5]]
    assert peers.ratios("shared-prefix", ours, theirs) == [[1.5, 1]]
    assert peers.ratios("mixed", ours, theirs) == [[2, 4]]


@pytest.mark.parametrize("args, on_gpu, temperature", [
    ([], True, 0.6), ([], False, 0), (["--workload", "single"], True, 0), (["--ladder"], True, 0),
    (["--trace", "a.csv"], True, 0), (["--against", "hf"], True, 0),
    (["--temperature", "0"], True, 0), (["--ladder", "--temperature", "1"], False, 1)])
def test_only_the_community_workload_is_sampled(args, on_gpu, temperature):
    found = bench.Bench.__new__(bench.Bench)  # no hardware is measured for this
    found.args, found.on_gpu = bench.make_parser().parse_args(args), on_gpu
    assert found.temperature == temperature


@pytest.mark.parametrize("args, says", [
    (["--model", "Qwen3-0.5B"], "Qwen3-0.5B is neither a folder"),
    (["--num-prompts", "0"], "--num-prompts must be at least 1"),
    (["--min-seconds", "5"], "--min-seconds goes with --against"),
    *((["--against", "hf", "--min-seconds", value], f"finite number of at least 0, got {value}")
      for value in ("-1.0", "nan", "inf")),
    (["--input-len", "9", "8"], "--input-len takes one number"),
    (["--input-len", "0"], "--input-len takes one number"),
    (["--output-len", "1", "2", "3"], "--output-len takes one number"),
    (["--output-len", "50000"], "the longest request has"),
    (["--set", "max_model_len=64"], "max_model_len is 64"),
    (["--set", "block_size"], "write OPTION=VALUE"),
    (["--set", "block_size=None"], "block_size must be a whole number"),
    (["--set", "hf_overrides={[]:1}"], "hf_overrides must be a dict"),
    (["--set", "device=gpu"], "device='gpu' is not supported"),
    (["--set", "max_model_len=4k"], "max_model_len"),
    (["--set", "colour=blue"], "the engine has no option colour"),
    (["--set", "model=elsewhere"], "write --model elsewhere"),
    (["--set", "dtype=bfloat16"], "write --dtype bfloat16"),
    (["--request-rate", "0"], "--request-rate must be above 0"),
    (["--request-rate", "nan"], "--request-rate must be above 0"),
    (["--trace", "nowhere.csv"], "nowhere.csv can't be read"),
    (["--ladder", "--request-rate", "3"], "submit everything at once"),
    (["--trace", "a.csv", "--num-prompts", "3"], "--trace says how many"),
    (["--ladder", "--profile", "p.json"], "--profile is about one engine"),
    (["--against", "hf", "--temperature", "0.5"], "--against compares greedy decoding"),
    (["--against", "vlm"], "neither a file nor one of hf"),
    (["--output-json", "nowhere/out.json"], "the folder of nowhere/out.json"),
    (["--workload", "nothing"], "invalid choice"),
])
def test_wrong_use_is_refused_before_any_work(args, says, toy, capsys, monkeypatch):
    monkeypatch.setattr(meter, "serve", None)
    with pytest.raises(SystemExit) as exit:
        run(capsys, toy, *args)
    assert exit.value.code == 2 and says in capsys.readouterr().err


def test_built_in_names_are_found_in_any_case(tmp_path, monkeypatch):
    assert roofline.built_in("qwen3-0.6b") == "Qwen3-0.6B"
    assert roofline.built_in("Qwen/Qwen3-0.6B") is None  # a hub id: the real weights
    for name in MODELS:
        ModelConfig.from_folder(roofline.write_config(name, tmp_path))
    monkeypatch.setattr(sys, "argv", ["roofline"])
    with pytest.raises(ValueError, match="config.json"):
        ModelConfig.from_folder(tmp_path / "nothing")


def test_the_roofline_table_can_be_printed(capsys, monkeypatch):
    monkeypatch.setattr(roofline, "MODELS", {"Qwen3-0.6B": MODELS["Qwen3-0.6B"]})
    monkeypatch.setattr(roofline, "community", lambda: workloads.community(4, (5, 9), (2, 3)))
    monkeypatch.setattr(sys, "argv", ["roofline", "--bandwidth", "2", "--rate", "100"])
    roofline.main()
    assert re.search(r"^Qwen3-0.6B +[\d.]+ +[\d,]+ +[\d,]+$", capsys.readouterr().out, re.M)
