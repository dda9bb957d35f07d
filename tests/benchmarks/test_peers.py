"""Several engines on the same requests, in turns."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import peers, workloads
from benchmarks.workloads import Request


def test_ctrl_c_among_peers_keeps_whole_rounds(capsys, monkeypatch):
    monkeypatch.setattr(peers, "PAUSE", 0)
    def ours(requests, label):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(label)
        return run | dict(interrupted=False)

    done, run = [], workloads.summarize(2.0, 3, [[1.0, 2.0]])
    other = SimpleNamespace(name="nanoserve", asked="", cpu_seconds=float, run=lambda _: dict(run))
    found = peers.compare(ours, [other], {"batch": [Request([1], 2)], "single": []}, rounds=3)
    assert found["interrupted"] and list(found["rounds"]) == ["batch"]
    assert {name: len(runs) for name, runs in found["rounds"]["batch"].items()} == {
        "nanoserve": 2, "nanoserve (2)": 2}  # another tree of ours is told apart
    assert "batch, medians of 2" in capsys.readouterr().out


def test_a_pause_ends_when_no_engine_takes_time(monkeypatch):
    monkeypatch.setattr(peers, "PAUSE", 0)
    spinning = iter([0.0, 0.4, 0.4, 0.6, 0.6, 0.61, 99])
    peers.pause(lambda: 5.0, lambda: next(spinning))
    assert next(spinning) == 99  # looked at before and after each of three pauses
    busy = iter(range(100))
    with pytest.raises(ValueError, match="takes .* of a core while it should wait"):
        monkeypatch.setattr(peers, "PAUSE", 1e-3)
        peers.pause(lambda: next(busy), tries=3)


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else tells it")
@pytest.mark.parametrize("starter", [[], [
    sys.executable, "-c", "import subprocess, sys\nsubprocess.run(sys.argv[1:])"]],
    ids=["a process", "what a process started"])
def test_the_cpu_time_of_another_process_is_seen(starter):
    program = "import sys\nfor _ in sys.stdin:\n  sum(range(10 ** 7))\n  print('done', flush=True)"
    with subprocess.Popen([*starter, sys.executable, "-c", program], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        before = peers.cpu_seconds(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        worked = peers.cpu_seconds(process.pid)
        time.sleep(0.05)
        assert before < worked == peers.cpu_seconds(process.pid)
        process.stdin.close()


def test_ratios_say_how_many_times_as_good_we_are():
    def one(tok_s, seconds, ttft, decode):
        return dict(output_tok_s=tok_s, seconds=seconds, ttft=dict(mean=ttft), decode_tok_s=decode)

    ours, theirs = [one(6, 2, 1, 5), one(8, 4, 3, 4)], [one(3, 3, 4, 10), one(2, 4, 1.5, 2)]
    assert peers.ratios("batch", ours, theirs) == [[2, 4]]
    assert peers.ratios("single", ours, theirs) == [[4, 0.5], [0.5, 2], [1.5, 1]]
    assert peers.ratios("long-prompt", ours, theirs) == [[4, 0.5]]
    assert peers.ratios("shared-prefix", ours, theirs) == [[1.5, 1]]
    assert peers.ratios("mixed", ours, theirs) == [[2, 4]]
