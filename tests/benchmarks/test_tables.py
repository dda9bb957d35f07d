"""The benchmark's tables are written from what was measured, and from nothing else."""

import argparse
import json
import sys

import pytest
from bench_runs import PEER

from benchmarks import tables, workloads
from benchmarks.workloads import SMALL

pytestmark = pytest.mark.usefixtures("known_machine")


def test_the_tables_come_from_a_measurement(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NANOSERVE_CHECK")  # nine in ten seconds would go to audits of a large cache
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    data = {}
    args = argparse.Namespace(model=str(toy), dtype="float32", rounds="2", min_seconds="0",
                              against=[str(script)], peer_python=sys.executable, no_ladder=False)
    kept = [sorted(data) for _ in tables.measure(args, data)]  # what is written after each part
    assert kept == [["comparisons"], ["comparisons", "ladder"]]
    data = json.loads(json.dumps(tables.rounded(data)))
    text = tables.render(data)
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
