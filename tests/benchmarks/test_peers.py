"""Several engines on the same requests, in turns."""

from benchmarks import peers, workloads
from benchmarks.workloads import Request


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


def test_ratios_say_how_many_times_as_good_we_are():
    def one(tok_s, seconds, ttft, decode):
        return dict(output_tok_s=tok_s, seconds=seconds, ttft=dict(mean=ttft), decode_tok_s=decode)

    ours, theirs = [one(6, 2, 1, 5), one(8, 4, 3, 4)], [one(3, 3, 4, 10), one(2, 4, 1.5, 2)]
    assert peers.ratios("batch", ours, theirs) == [[2, 4]]
    assert peers.ratios("single", ours, theirs) == [[4, 0.5], [0.5, 2], [1.5, 1]]
    assert peers.ratios("long-prompt", ours, theirs) == [[4, 0.5]]
    assert peers.ratios("shared-prefix", ours, theirs) == [[1.5, 1]]
    assert peers.ratios("mixed", ours, theirs) == [[2, 4]]
