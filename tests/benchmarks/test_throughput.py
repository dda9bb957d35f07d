"""benchmarks.throughput at toy sizes: every way to run it, and what it chooses and refuses.

No test here times anything or judges a time.
"""

import json
import re

import pytest
from bench_runs import run
from witness import read

from benchmarks import meter, peers, roofline, throughput, workloads
from benchmarks.workloads import SMALL
from nanoserve import LLM

pytestmark = pytest.mark.usefixtures("known_machine")


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


@pytest.mark.full
def test_against_transformers(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "PAUSE", 0)
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


@pytest.mark.parametrize("args, says", [
    (["--model", "Qwen3-0.5B"], "Qwen3-0.5B is neither a folder"),
    (["--input-len", "9", "8"], "--input-len takes one number"),
    (["--set", "block_size"], "write OPTION=VALUE"),
    (["--set", "colour=blue"], "the engine has no option colour"),
    (["--arrivals", "nowhere.csv"], "nowhere.csv can't be read"),
    (["--against", "vlm"], "vlm is neither one of hf"),
])
def test_wrong_use_is_refused_before_any_work(args, says, toy, capsys, monkeypatch):
    monkeypatch.setattr(meter, "serve", None)
    with pytest.raises(SystemExit) as exit:
        run(capsys, toy, *args)
    assert exit.value.code == 2 and says in capsys.readouterr().err
