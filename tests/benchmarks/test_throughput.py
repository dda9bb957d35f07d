"""benchmarks.throughput at toy sizes: every way to run it, and what it chooses and refuses.

No test here times anything or judges a time.
"""

import json
import re

import pytest
from bench_runs import PEER, run
from witness import read

from benchmarks import meter, roofline, throughput, workloads
from benchmarks.roofline import Machine
from benchmarks.workloads import SMALL
from nanoserve import LLM

pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.mark.parametrize("machine, model, count", [
    (Machine(1e12, 1e14), "Qwen3-0.6B", 16), (Machine(3e10, 1.5e11), "Qwen3-0.6B", None),
    (Machine(1e9, 1e10), "storyteller", 16)])
def test_without_a_model_a_cpu_gets_what_it_can_do(monkeypatch, machine, model, count):
    monkeypatch.setattr(roofline, "measure", lambda device, dtype: machine)
    monkeypatch.setattr(throughput, "free_cpu_memory", lambda: 2 ** 40)
    with throughput.Bench(throughput.make_parser().parse_args(["--set", "device=cpu"])) as found:
        assert found.folder.name == model
        assert len(found.requests) == count if count else 4 <= len(found.requests) < 16


def test_a_run_prints_its_throughput_and_its_share_of_the_roofline(toy, tmp_path, capsys):
    path = tmp_path / "out.json"
    code, out, _ = run(capsys, toy, "--workload", "mixed", "--output-len", "2", "5",
                       "--output-json", str(path))
    assert code == 0
    result = json.loads(path.read_text())
    requests = workloads.generate(throughput.replace(SMALL["mixed"], output_len=(2, 5)), 300)
    assert result["workload"]["num_prompt_tokens"] == sum(len(r.prompt) for r in requests)
    found, line = result["result"], result["roofline"]
    assert found["num_output_tokens"] == sum(r.max_tokens for r in requests)
    assert found["num_requests"] == len(requests)
    parts = line["measured_seconds"]
    assert all(parts[part] > 0 for part in (*roofline.PARTS, "sampling", "host", "schedule"))
    assert sum(seconds for part, seconds in parts.items() if part not in (
        "schedule", "build", "update")) == pytest.approx(found["seconds"])
    assert line["share"] == pytest.approx(sum(line["minimum_seconds"].values()) / found["seconds"])
    assert re.search(r"^Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output "
                     r"tokens/s$", out, re.M)
    assert "% of the roofline (30.0 GB/s and 400 GFLOP/s, the best that was measured)" in out


def test_arrivals_a_profile_and_a_step_trace_of_the_measured_run_alone(toy, tmp_path, capsys):
    """Not of the warm-up before it, nor of the profile behind it."""
    profile, trace = tmp_path / "profile.json", tmp_path / "run.html"
    code, out, _ = run(capsys, toy, "--num-prompts", "3", "--input-len", "40", "--output-len", "4",
                       "--request-rate", "2000", "--profile", str(profile), "--step-trace",
                       str(trace))
    assert code == 0 and "2000.0 a second" in out
    assert json.loads(profile.read_text())["traceEvents"] and out.endswith(f"wrote {profile}\n")
    stream = read(trace)
    assert [request[1] for request in stream["requests"]] == [40, 40, 40]
    assert not any("e" in frame for frame in stream["frames"])  # the warm-up's blocks are not seen


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


def test_the_ladder_shows_of_each_row_the_run_in_the_middle(toy, tmp_path, capsys, monkeypatch):
    path = tmp_path / "ladder.json"
    seconds = iter([5, 1, 1, 1, 1, 3, 2, 2, 2, 2, 4, 3, 3, 3, 3])  # of a run, row after row
    real = throughput.serve

    def serve(llm, requests, temperature, label=None):
        run, meter = real(llm, requests, temperature, label)
        warms_up = label is None
        return (run if warms_up else dict(run, seconds=next(seconds))), meter

    monkeypatch.setattr(throughput, "serve", serve)
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
    assert all("share" in run["roofline"] for run in ours)
    assert re.search(r"transformers [\d.]+, static batch: .*times as good", out)


def test_any_script_can_be_a_peer_also_of_single_tokens(toy, tmp_path, capsys):
    script, path = tmp_path / "peer.py", tmp_path / "out.json"
    script.write_text(PEER)
    common = ["--against", str(script), "--workload", "single", "--rounds", "1"]
    code, _, _ = run(capsys, toy, *common, "--input-len", "9", "--output-len", "4",
                     "--output-json", str(path))
    [theirs] = json.loads(path.read_text())["rounds"]["single"]["another engine"]
    assert code == 0 and theirs["ttft"]["mean"] == 0.5 and theirs["decode_tok_s"] == 3 / 1.5
    code, out, _ = run(capsys, toy, *common, "--input-len", "8", "--output-len", "1")
    assert code == 0 and "decode tok/s nan" in out
    with pytest.raises(SystemExit):
        run(capsys, toy, *common, "--input-len", "13")
    assert "the peer ended: out of luck" in capsys.readouterr().err


@pytest.mark.parametrize("args, says", [
    (["--model", "Qwen3-0.5B"], "Qwen3-0.5B is neither a folder"),
    (["--num-prompts", "0"], "--num-prompts must be at least 1"),
    (["--min-seconds", "5"], "--min-seconds goes with --against"),
    (["--input-len", "9", "8"], "--input-len takes one number"),
    (["--output-len", "50000"], "the longest request has"),
    (["--set", "block_size"], "write OPTION=VALUE"),
    (["--set", "device=gpu"], "device must be one of"),
    (["--set", "colour=blue"], "the engine has no option colour"),
    (["--set", "dtype=bfloat16"], "write --dtype bfloat16"),
    (["--request-rate", "nan"], "--request-rate must be above 0"),
    (["--arrivals", "nowhere.csv"], "nowhere.csv can't be read"),
    (["--step-trace", "run.txt"], "--step-trace: trace must be a file"),
    (["--step-trace", "run.html", "--ladder"], "--step-trace is about one run of one engine"),
    (["--ladder", "--request-rate", "3"], "submit everything at once"),
    (["--arrivals", "a.csv", "--num-prompts", "3"], "--arrivals says how many"),
    (["--against", "hf", "--temperature", "0.5"], "--against compares greedy decoding"),
    (["--against", "vlm"], "neither a file nor one of hf"),
    (["--output-json", "nowhere/out.json"], "the folder of nowhere/out.json"),
])
def test_wrong_use_is_refused_before_any_work(args, says, toy, capsys, monkeypatch):
    monkeypatch.setattr(meter, "serve", None)
    with pytest.raises(SystemExit) as exit:
        run(capsys, toy, *args)
    assert exit.value.code == 2 and says in capsys.readouterr().err
