"""The step table of trace/trace.py, against a trace worked out by hand."""

import re
import subprocess
import sys

import pytest
from witness import read

from nanoserve_extras.trace.trace import Arrival, Simulation, main, parse, read_csv, table

pytestmark = pytest.mark.floor


def trace(requests: list[str], *options) -> str:
    return table(Simulation([parse(request) for request in requests], *options))


def test_a_small_trace_by_hand():
    """Two prompts of 5 and 7 tokens, budget 8, blocks of 4: chunking, decoding, block counts.

    Step 0: A's 5 tokens (2 blocks), 3 of B's (1 block), 7 of 10 blocks left. Step 1: A decodes at
    position 5; B's last 4 (positions 3 to 6: a second block). Step 2: A has its 2 tokens and is
    gone; B decodes at position 7. Free blocks are counted when the step has been scheduled.
    """
    table = [line.split() for line in trace(["5:2", "7:2"], 8, 10, 4, 4).splitlines()]
    assert table == [
        ["step", "tokens", "A", "B", "free", "blocks"],
        ["0", "8/8", "0..5", "→", "0..3", "7"],
        ["1", "5/8", "5", "→", "3..7", "→", "6"],
        ["2", "1/8", "7", "→", "8"],
    ]


def test_below_a_step_stands_who_waits_and_why():
    """One row, by hand: B is next, and C and D wait for nothing but B. When A has gone, B runs."""
    lines = trace(["3:1", "3:1", "3:1", "3:1"], 8, 10, 4, 1).splitlines()
    assert [line.strip() for line in lines if not line[0].isdigit()][1:] == [
        "B has no seat: --max-num-seqs 1", "C, D stand behind B",
        "C has no seat: --max-num-seqs 1", "D stands behind C", "D has no seat: --max-num-seqs 1"]


def test_who_has_not_arrived_does_not_wait():
    lines = table(Simulation([Arrival(3, 3), Arrival(3, 1, seconds=9)], 8, 10, 4, 1)).splitlines()
    assert all(line[0] in "s0123456789" for line in lines)


def test_an_idle_engine_may_wait_for_others():
    """Prompts at 0, 1 and 9 s, steps of 0.5 s: alone A runs at 0 and 0.5, B at 1 and 1.5. With
    2 seconds to wait A and B share the steps at 2 and 2.5; C comes alone, and waits in vain."""
    arrivals = [Arrival(3, 2, seconds=seconds) for seconds in (0, 1, 9)]
    for max_wait, expected in ((0, [0, .5, 1, 1.5, 9, 9.5]), (2, [2, 2.5, 11, 11.5])):
        simulation = Simulation(arrivals, 8, 10, 4, 4, 0.5, 0.0, max_wait)
        assert [simulation.now for _ in simulation.steps()] == expected


@pytest.mark.parametrize("request_", ["", "5", "0:3", "5:0", "5:5:6", "a:b", "1:2:3:4", "10:5:8:9"])
def test_a_wrong_request_is_explained(request_):
    with pytest.raises(ValueError, match="PROMPT:OUTPUT"):
        parse(request_)


def test_the_command_runs_without_torch():
    code = ("import sys; from nanoserve.__main__ import main; main(['trace']); "
            "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.startswith("step  tokens")


def run(*args: str) -> str:
    out = subprocess.run([sys.executable, "-m", "nanoserve", "trace", *args],
                         capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout


# ------------------------------------------------------------ arrivals from a file


CSV = "0.0,10,2\n2.5,4,1,4\n0.5,7,3,0\n"
HEADER = "seconds,prompt,output,shared\n"


@pytest.mark.parametrize("text", [
    CSV, HEADER + CSV, CSV.replace("4,1,4", "4,1,4,0"), "\ufeff" + CSV, "\ufeff" + HEADER + CSV,
    CSV.replace("0.5", "5e-1"),
    "model,output,prompt,shared,seconds\nx,2,10,,0\ny,1,4,4,2.5\nz,3,7,0,0.5\n\n"])
def test_a_csv_of_arrivals(tmp_path, text):
    """With a header or without, in any order of columns, as spreadsheets and pandas write them.
    Sorted by time."""
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read_csv(tmp_path / "a.csv") == [
        Arrival(10, 2, 0, 0.0), Arrival(7, 3, 0, 0.5), Arrival(4, 1, 4, 2.5)]


@pytest.mark.parametrize("text, says", [
    *[(f"{HEADER}0,1,1\n{line}", "request 2") for line in (
        "1,2", "1,0,5", "-1,5,5", "x,y,z", "1,5,5,6", "1,5.5,2", "inf,3,2", "time,1")],
    # its first column was taken for the one that is missing
    ("shared,seconds,prompt,output\n5,0,10\n", "request 1"),
    ("time,prompt,output\n0,1,1\n", "seconds"), ("", "no requests"), (HEADER, "no requests"),
    ("0," + 200_000 * "1" + ",3\n", "field larger"), ("\0s\0e\0c\0", "must be seconds")])
def test_what_is_no_arrival_is_named(tmp_path, text, says):
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"a\.csv.*{says}"):
        read_csv(tmp_path / "a.csv")


def test_only_shared_tokens_are_shared():
    """A's own tokens stand where B's shared ones go on, and are not taken for them."""
    simulation = Simulation([parse("200:1:100"), parse("200:1:200")], 64, 200, 4, 2)
    simulation.finish()
    assert [seq.num_cached_tokens for seq in simulation.seqs] == [0, 100]


def test_the_clock_is_simulated():
    """10 ms a step and 1 ms a token, by hand. A arrives at 0: its 5 tokens take 15 ms, its second
    token 11 ms more. B arrives at 20 ms, inside that step, and starts when it ends, at 26 ms: 4
    tokens, 14 ms. C arrives at 1 s: the clock jumps there."""
    simulation = Simulation([Arrival(5, 2), Arrival(4, 1, seconds=0.02), Arrival(1, 1, seconds=1)],
                            8, 10, 4, 4, 0.010, 0.001)
    simulation.finish()
    stamps = [(s.queued_ts, s.scheduled_ts, s.first_token_ts, s.last_token_ts,
               s.first_token_latency) for s in simulation.stats]
    expected = [(0, 0, 0.015, 0.026, 0.015), (0.026, 0.026, 0.040, 0.040, 0.020),
                (1, 1, 1.011, 1.011, 0.011)]
    assert stamps == [pytest.approx(row) for row in expected]


def test_many_requests_have_a_summary_and_no_table(tmp_path):
    (tmp_path / "a.csv").write_text("".join(f"{i},5,2\n" for i in range(13)))
    out = run("--csv", str(tmp_path / "a.csv"), "--html", str(tmp_path / "a.html"))
    assert out.startswith("26 steps, 13 requests in ") and "26 steps of 13" in out
    assert "simulated clock: 5 ms a step" in read(tmp_path / "a.html")["meta"]["note"]


@pytest.mark.parametrize("args, says", [
    ("--policy no.module:X", "No module named 'no'"),
    ("--policy nanoserve.hooks:Extra", "it has no method order"),
    ("--policy nanoserve.hooks:checked", "missing 1 required"),
    ("--request 50:1", "raise --blocks"), ("--html no/such/folder.html", "no/such"),
    ("--csv no-such-file.csv", "no-such-file"), ("--budget 0", "--budget: .* at least 1, got '0'"),
    ("--blocks 1.5", "--blocks: .* whole"), ("--step-ms nan", "--step-ms: must be a number"),
    ("--limit 1 2", "--limit has 2 numbers: name one, or one for each of the priorities .0.")])
def test_what_cannot_run_is_explained_in_this_commands_words(capsys, args, says):
    with pytest.raises(SystemExit):
        main(args.split())
    assert re.search(f"error: .*{says}", capsys.readouterr().err)


def test_a_budget_that_lowers_the_seats_says_so(capsys):
    main(["--budget", "2"])
    printed = capsys.readouterr()
    assert "--budget 2 lowers --max-num-seqs from 4 to 2" in printed.err
    assert "C has no seat: --max-num-seqs 2" in printed.out


def test_each_priority_has_its_figures_under_every_policy(tmp_path):
    """One row, by hand: a step takes 1 s. A, C and D come at 0, B at 1.5; each writes one token.
    First tokens come at 1 (A), 2 (C), 3 (D), 4 (B): after 1, 2, 3 and 2.5 seconds."""
    (tmp_path / "a.csv").write_text("seconds,prompt,output,priority\n0,3,1,1\n0,3,1,0\n0,3,1,0\n"
                                    "1.5,3,1,1\n")
    simulation = Simulation(read_csv(tmp_path / "a.csv"), 8, 9, 4, 1, 1.0, 0.0)
    simulation.finish()
    _, urgent, others = simulation.summary([2, 2.5]).splitlines()
    assert urgent.startswith("priority 0: 2 requests") and "p99 3.00 s" in urgent
    assert urgent.endswith("TTFT p50 2.00 s, 50.0% within 2 s")
    assert others.endswith("TTFT p50 1.00 s, 100.0% within 2.5 s")
    assert simulation.summary([2]).count("within 2 s") == 2
    assert "within" not in simulation.summary()


def test_requests_beside_a_csv_arrive_first(tmp_path):
    """A request on the command line arrives at 0, not behind the CSV's last."""
    (tmp_path / "a.csv").write_text("9,3,1\n")
    lines = run("--csv", str(tmp_path / "a.csv"), "--request", "5:1").splitlines()
    assert lines[1].split()[:3] == ["0", "5/12", "0..5"]


@pytest.mark.parametrize("policy, order", [
    ("fcfs", "ABCD"), ("shortest", "ACBD"), ("priority", "ADBC")])
def test_the_policy_is_the_schedulers(tmp_path, policy, order):
    """One row. B, C and D come while A runs: C is the shortest, D takes A's row if it may."""
    (tmp_path / "a.csv").write_text("seconds,prompt,output,priority\n0,12,3,1\n.001,9,1,1\n"
                                    ".001,4,1,1\n.006,5,1,0\n")
    simulation = Simulation(read_csv(tmp_path / "a.csv"), 12, 9, 4, 1, policy=policy)
    simulation.finish()
    first = {name: stats.first_token_ts for name, stats in zip("ABCD", simulation.stats,
                                                              strict=True)}
    assert "".join(sorted(first, key=first.get)) == order
    assert simulation.seqs[0].num_preemptions == (policy == "priority")
    assert simulation.summary().count("priority") == 2
