"""The benchmark's tables are written from what was measured, and from nothing else."""

import argparse
import json
import sys

import pytest
from bench_runs import PEER

from benchmarks import peers, tables, workloads
from benchmarks.workloads import SMALL

pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.mark.full
def test_the_tables_come_from_a_measurement(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NANOSERVE_CHECK")  # nine in ten seconds would go to audits of a large cache
    monkeypatch.setattr(peers, "PAUSE", 0)
    shorter = {name: workloads.Shape(2, (8, 8), (2, 2)) for name in workloads.ROWS} | {
        "batch": workloads.Shape(4, (32, 64), (8, 16)),
        "long-prompt": workloads.Shape(1, (256, 256), (8, 8)),
        "mixed": workloads.Shape(8, (32, 32), (8, 16), shared_len=32, long_every=4, long_len=80)}
    monkeypatch.setattr(workloads, "SMALL", SMALL | shorter)
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    data = {}
    args = argparse.Namespace(model=str(toy), dtype="float32", rounds="2", min_seconds="0",
                              against=[f"{sys.executable} {script}"], seed="0", no_ladder=False)
    kept = [sorted(data) for _ in tables.measure(args, data)]  # what is written after each part
    assert kept == [["comparisons"], ["comparisons", "ladder"]]
    data = json.loads(json.dumps(tables.rounded(data)))
    text = tables.render(data)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["float32", "nanoserve", "share of the roofline", "another engine"]
    found = {row[0]: row[1:] for row in rows}
    count = sum(request.max_tokens for request in workloads.generate(shorter["batch"], 300))
    theirs = {title: row[2].partition(" (")[0] for title, row in found.items() if len(row) == 3}
    assert theirs == {
        "float32": "another engine", "batch: output tok/s": f"{count / 2:.3g}",
        "single: TTFT s": "0.5", "single: decode tok/s": "42", "single: total s": "2",
        "long-prompt: TTFT s": "0.5", "shared-prefix: total s": "2",
        **{f"{name}: ms a step": "1.5e+03" for name in workloads.ROWS}}
    runs = data["comparisons"][0]["rounds"]
    ours = [run["seconds"] for run in runs["shared-prefix"]["nanoserve"]]
    row, pairs = found["shared-prefix: total s"], [2 / seconds for seconds in ours]
    assert row[0] == f"{sum(ours) / 2:.3g}"
    assert row[2] == f"2 ({sum(pairs) / 2:.2f}, {min(pairs):.2f} to {max(pairs):.2f})"
    assert all(found[title][1].endswith("%") for title in theirs if title != rows[0][0])
    assert f'another engine: `--against "python {script.name}"`' in text
    assert "one request at a time" in found and "+ prefix caching" in found
    assert "`shared-prefix`: 16 requests of 512 common and 32 tokens in, 32 out" in text
