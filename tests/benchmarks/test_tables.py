"""The benchmark's tables are written from what was measured, and from nothing else."""

import argparse
import json
import sys

import pytest
from bench_runs import PEER

from benchmarks import peers, tables, workloads
from benchmarks.workloads import SMALL, Request

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


def test_a_comparison_takes_the_place_of_its_machines_last_one(toy, tmp_path, monkeypatch):
    """Another CPU's stays, and so do the same one's in another dtype and that of its GPU."""
    new, *others = (dict(model=dict(dtype=dtype), machine=dict(cpu=cpu, device=device))
                    for dtype, cpu, device in (("float32", "B", "cpu"), ("float32", "A", "cpu"),
                                               ("bfloat16", "B", "cpu"), ("float32", "B", "GPU")))
    monkeypatch.setattr(tables.throughput.Bench, "against", lambda self, names: new)
    args = argparse.Namespace(model=str(toy), dtype="float32", rounds="2", min_seconds="0",
                              against=None, peer_python=sys.executable, no_ladder=True)
    data = dict(comparisons=[dict(new, old=True), *others])
    list(tables.measure(args, data))
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
    text = tables.comparison(found | dict(machine=machine, model=dict(dtype="d", name="M")))
    assert "medians of 2 rounds, of `single` 4:" in text
    assert "copy 30 to 41 GB/s, matrix product 200 GFLOP/s" in text


def one_comparison(dtype: str, date: str, **more) -> dict:
    """Two engines that take turns twice on two workloads, with numbers made up."""
    def runs(seconds: float) -> list[dict]:
        return [dict(output_tok_s=60 / seconds, ttft=dict(mean=seconds), decode_tok_s=2 / seconds,
                     seconds=seconds * n, roofline=dict(share=0.5, bandwidth=1e9, matrix_rate=1e9))
                for n in (1, 3)]

    machine = dict(cpu="A", device="cpu", date=date, num_cores=2, threads=2, torch="2", python="3")
    return dict(more, machine=machine, model=dict(dtype=dtype, name="M"), rounds={
        name: {"nanoserve": runs(2.0), "another": runs(3.0)} for name in ("batch", "single")})


def test_the_newest_of_each_dtype_comes_first_and_an_old_one_says_so():
    data = dict(comparisons=[
        one_comparison("bfloat16", "2026-01-02", note="before the flood"),
        one_comparison("bfloat16", "2026-01-01"), one_comparison("bfloat16", "2026-02-01"),
        one_comparison("float32", "2025-12-31", note="older than all")])
    heads = [line.split(" A, ")[0] for line in tables.render(data).splitlines()
             if line.startswith("202")]
    assert heads == ["2026-02-01,", "2025-12-31, older than all,", "2026-01-02, before the flood,",
                     "2026-01-01,"]


def test_readmes_table_is_of_the_newest_bfloat16_with_ratios_in_brackets():
    """Medians of 2 and 6 s, and of 3 and 9: the second engine is 1.5 times as slow."""
    data = dict(comparisons=[one_comparison("bfloat16", "2026-01-01"),
                             one_comparison("float32", "2026-01-02")])
    assert tables.headlines(data).splitlines() == [
        "2026-01-01, A, 2 cores, M's shapes with random weights:", "",
        "| bfloat16 | nanoserve | another |", "| --- | --- | --- |",
        "| batch: output tok/s | 30 | 20 (1.50) |", "| single: TTFT s | 2 | 3 (1.50) |",
        "| single: decode tok/s | 1 | 0.667 (1.50) |", "| single: total s | 4 | 6 (1.50) |"]
    assert "Not measured" in tables.headlines({}) and "Not measured" in tables.render({})


def test_the_tables_are_written_between_the_markers_of_both_pages(tmp_path, monkeypatch):
    for name in ("PAGE", "README"):
        monkeypatch.setattr(tables, name, tmp_path / name)
        (tmp_path / name).write_text(f"before\n{tables.BEGIN}old\n{tables.END}after\n")
    (tmp_path / "data").write_text(json.dumps(dict(
        comparisons=[one_comparison("bfloat16", "2026-01-01")])))
    monkeypatch.setattr(tables, "DATA", tmp_path / "data")
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    for name, words in (("PAGE", "share of the roofline"), ("README", "| 20 (1.50) |")):
        text = (tmp_path / name).read_text()
        assert words in text and "old" not in text
        assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n")
