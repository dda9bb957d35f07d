"""The host's time of a step: both commands run and print a line for each case. None is judged."""

import re

from benchmarks import host


def test_each_case_has_a_line_with_the_sum_of_its_parts(capsys, monkeypatch):
    monkeypatch.setattr(host, "CASES", [(1, 0), (4, 1000)])
    monkeypatch.setattr(host, "NUM_STEPS", 5)
    host.main([])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("µs per step, median of 5")
    rows = [[float(n.replace(",", "")) for n in line.split()] for line in lines]
    assert [row[:2] for row in rows] == [[1, 0], [4, 1000]]
    assert all(abs(sum(row[2:5]) - row[5]) < 0.2 and min(row[2:5]) > 0 for row in rows)


def test_the_observers_are_timed_in_steps_of_two_engines_in_turns(capsys, qwen3):
    host.main(["--observers", "--model", str(qwen3), "--num-prompts", "2", "--input-len", "5",
               "--output-len", "8"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r"2 requests, 8 steps in turns: [\d.]+ ms without a trace, [\d.]+ ms", head)
    assert [line.split()[0] for line in lines] == [
        "EngineMetrics", "Trace"]
