"""The README's benchmark section is written from what was measured, and from nothing else."""

import argparse
import json
import sys

import benchmark
import pytest
from bench_runs import PEER

from nanoserve.tools import peers, workloads
from nanoserve.tools.workloads import SMALL, Request

pytestmark = pytest.mark.usefixtures("known_machine")


def test_the_readmes_tables_come_from_a_measurement(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NANOSERVE_CHECK")  # nine in ten seconds would go to audits of a large pool
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
