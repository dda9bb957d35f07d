"""bench.py: what it computes from what it sees, and that every way to run it works.

No test here times anything or judges a time.
"""

import contextlib
import json
import re

import pytest
from bench_runs import PEER, run
from witness import read

import bench
from nanoserve import LLM
from nanoserve.tools import bookkeeping, meter, roofline, workloads
from nanoserve.tools.roofline import Machine
from nanoserve.tools.workloads import SMALL

pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.mark.parametrize("text, says", [
    ("", "holds no requests"), ("0.5,10\n", "request 1"), ("0,5,3\n1,x,3\n", "request 2"),
    ("0,5,3\n-1,4,3\n", "request 2"), ("0,0,3\n", "request 1"), ("nan,1,3\n", "nan"),
    ("0,4,1\ninf,4,1\n", "inf"), ("when,prompt,output\n0,1,2\n", "header")])
def test_a_bad_file_of_arrivals_is_refused(tmp_path, toy, capsys, text, says):
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    with pytest.raises(SystemExit):
        run(capsys, toy, "--arrivals", str(path))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("machine, model, count", [
    (Machine(1e12, 1e14), "Qwen3-0.6B", 16), (Machine(3e10, 1.5e11), "Qwen3-0.6B", None),
    (Machine(1e9, 1e10), "storyteller", 16)])
def test_without_a_model_a_cpu_gets_what_it_can_do(monkeypatch, machine, model, count):
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: machine)
    with bench.Bench(bench.make_parser().parse_args(["--set", "device=cpu"])) as found:
        assert found.folder.name == model
        assert len(found.requests) == count if count else 4 <= len(found.requests) < 16


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


def test_arrivals_and_a_profile(toy, tmp_path, capsys):
    path = tmp_path / "profile.json"
    code, out, _ = run(capsys, toy, "--num-prompts", "3", "--input-len", "5", "--output-len", "4",
                       "--request-rate", "200", "--profile", str(path))
    assert code == 0 and "200.0 a second" in out
    assert json.loads(path.read_text())["traceEvents"] and out.endswith(f"wrote {path}\n")


def test_a_step_trace_shows_the_measured_run_alone(toy, tmp_path, capsys):
    """Not the warm-up before it, nor the profile behind it. Where a request arrived, how many
    steps there were and what the machine did are those of the three requests."""
    path, results = tmp_path / "run.html", tmp_path / "out.json"
    code, out, _ = run(capsys, toy, "--num-prompts", "3", "--input-len", "40", "--output-len", "4",
                       "--step-trace", str(path), "--profile", str(tmp_path / "profile.json"),
                       "--output-json", str(results))
    assert code == 0
    stream = read(path)
    assert [request[1] for request in stream["requests"]] == [40, 40, 40]
    *frames, tail = stream["frames"]
    assert len(frames) == 4 and all(frame["d"] > 0 for frame in frames)
    assert [frame["i"] for frame in frames] == [0, 1, 2, 3]
    assert tail["f"] == [0, "length", 4, 1, "length", 4, 2, "length", 4]
    assert not any("e" in frame for frame in stream["frames"])  # the warm-up's blocks are not seen
    said = out.splitlines()[-3:]
    assert said[0].startswith(f"trace: 4 steps of 3 requests in {path} (")
    assert said[1:] == [f"wrote {tmp_path / 'profile.json'}", f"wrote {results}"]


def test_the_workload_that_is_named_is_the_one_that_runs(tmp_path, capsys, monkeypatch):
    """Without a model the ladder said that 16 requests were chosen, and ran the 12 of another
    workload."""
    ran = []
    monkeypatch.setattr(bench.Bench, "make_engine",
                        lambda self, requests, **options: contextlib.nullcontext())
    monkeypatch.setattr(bench, "serve", lambda llm, requests, *args: (
        ran.append(requests) or workloads.summarize(1.0, 9, [[0.5, 1.0]] * len(requests))
        | dict(interrupted=False), None))
    monkeypatch.setenv("COLUMNS", "200")
    assert bench.main(["--ladder", "--rounds", "1", "--set", "device=cpu"]) == 0
    out = capsys.readouterr().out
    [count] = {len(requests) for requests in ran}
    chosen, named = re.search(r"(\d+) requests \(--model", out), re.search(r"mixed: (\d+) req", out)
    assert int(chosen[1]) == int(named[1]) == count and "batch:" not in out
    assert f"{sum(len(r.prompt) for r in ran[0]):,} prompt" in out


@pytest.mark.parametrize("columns", [80, 60])
def test_no_line_is_wider_than_the_terminal(toy, tmp_path, capsys, columns):
    """But vLLM's own, which scripts look for. Tables need 80, and fold with the terminal below."""
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    for args in ([], ["--ladder", "--rounds", "1"], ["--against", str(path), "--rounds", "3"]):
        code, out, _ = run(capsys, toy, "--num-prompts", "3", "--input-len", "5", "--output-len",
                           "4", *args, columns=columns)
        assert code == 0
        wide = [line for line in out.splitlines() if len(line) > columns
                and not line.startswith("Throughput: ") and ("|" in line or ";" in line
                                                             or columns == 80)]
        assert wide == []


def test_observers_are_timed_in_medians(capsys, monkeypatch):
    """Each step's own calls: a step in which the machine paused for a second moves no figure."""
    now = [0.0]

    class Paused:
        def scheduled(self, step):
            now[0] += 1.0 if len(seen) == 3 else 2e-6
            seen.append(step)

        def updated(self, *args):
            now[0] += 3e-6

        def added(self, *args):
            now[0] += 9.0  # before the first step

        def ended(self, *args):
            pass

    class Engine(LLM):
        def __init__(self, *args, trace=None):
            super().__init__(*args, num_gpu_blocks_override=40)
            self.observers = [Paused(), Paused()] if trace else []

        def step(self):
            now[0] += 1e-3
            return super().step()

    seen: list = []
    monkeypatch.setattr(bookkeeping, "LLM", Engine)
    monkeypatch.setattr(bookkeeping.time, "perf_counter", lambda: now[0])
    bookkeeping.bench_observers([], 2, 5, 8, 0)
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == ("2 requests, 8 steps in turns: 1.00 ms without a trace, 1.01 ms with one")
    assert [line.split() for line in lines] == [["metrics", "5.0", "0.50%"],
                                                ["trace", "5.0", "0.50%"]]


def test_observers_are_measured_as_the_docs_say(monkeypatch):
    asked = []
    monkeypatch.setattr(bookkeeping, "bench_observers", lambda *args: asked.append(args))
    assert bench.main(["--observers"]) == 0
    assert asked == [([], 16, 128, 64, 0)]


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
    seconds = iter([5, 1, 1, 1, 1, 3, 2, 2, 2, 2, 4, 3, 3, 3, 3])  # of a run, row after row
    real = bench.serve

    def serve(llm, requests, temperature, label=None):
        run, meter = real(llm, requests, temperature, label)
        warms_up = label is None
        return (run if warms_up else dict(run, seconds=next(seconds))), meter

    monkeypatch.setattr(bench, "serve", serve)
    code, out, _ = run(capsys, toy, "--ladder", "--output-len", "3", "6", "--num-prompts", "8",
                       "--output-json", str(path))
    assert code == 0 and next(seconds, None) is None  # three rounds by default
    result = json.loads(path.read_text())
    names = [row["name"] for row in result["rows"]]
    assert names == ["one request at a time", "+ continuous batching", "+ chunked prefill",
                     "+ prefix caching", "+ compiled kernels"]
    assert all(out.count(name) == 4 for name in names) and "medians of 3" in out
    assert [row["seconds"] for row in result["rows"]] == [4, 2, 2, 2, 2]
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
    assert re.search(r"transformers [\d.]+, static batch: .*times as good", out)


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


@pytest.mark.parametrize("args, on_gpu, temperature", [
    ([], True, 0.6), ([], False, 0), (["--workload", "single"], True, 0), (["--ladder"], True, 0),
    (["--arrivals", "a.csv"], True, 0), (["--against", "hf"], True, 0),
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
    (["--set", "device=gpu"], "device must be one of"),
    (["--set", "max_model_len=4k"], "max_model_len"),
    (["--set", "colour=blue"], "the engine has no option colour"),
    (["--set", "model=elsewhere"], "write --model elsewhere"),
    (["--set", "dtype=bfloat16"], "write --dtype bfloat16"),
    (["--request-rate", "0"], "--request-rate must be above 0"),
    (["--request-rate", "nan"], "--request-rate must be above 0"),
    (["--arrivals", "nowhere.csv"], "nowhere.csv can't be read"),
    (["--trace", "a.csv"], "write --arrivals a.csv; a trace of the steps is --step-trace FILE"),
    (["--step-trace", "run.txt"], "--step-trace: trace must be a file"),
    (["--step-trace", "run.html", "--ladder"], "--step-trace is about one run of one engine"),
    (["--set", "trace=run.html"], "write --step-trace run.html"),
    (["--ladder", "--request-rate", "3"], "submit everything at once"),
    (["--arrivals", "a.csv", "--num-prompts", "3"], "--arrivals says how many"),
    (["--ladder", "--profile", "p.json"], "--profile is about one run of one engine"),
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
