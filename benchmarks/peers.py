"""nanoserve beside another engine: the same token ids, in turns, and the ratio of their speeds.

    round 1   nanoserve ─ transformers ─  |  round 2   nanoserve ─ transformers ─  |  round 3   ...
                  └── a ratio ──┘                           └── a ratio ──┘

On a machine that others use, bandwidth varies all the time, so two numbers that were not taken one
after the other say little. Engines take turns; each pair gives a ratio, and the median of
the ratios is the result. All ratios are shown, so that one can see how far they are apart.

A peer is a process that speaks `benchmarks/engines/protocol.py`: engines may need different
versions of torch, and must not share threads. Between its turns it waits for its input. Its threads
may still spin: libiomp5's do for 0.2 s, and took a short run behind vLLM's from 0.105 s to 0.178.
So behind every run there is a pause (─), until no engine has taken CPU time for a second.

Not known here: what a peer is. Road not taken: comparing texts as well; random weights differ from
engine to engine, and `nanoserve_extras/tools/verify.py` does that with real ones.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from benchmarks.workloads import ROWS, Request, summarize, wrapped

PAUSE, IDLE = 1.0, 0.05  # seconds between two runs, and how much CPU time in it is none
# What a workload is about, as (title, key, part of it), and whether more is better.
HEADLINES = {
    "batch": [("output tok/s", "output_tok_s", None, True)],
    "single": [("TTFT s", "ttft", "mean", False), ("decode tok/s", "decode_tok_s", None, True),
               ("total s", "seconds", None, False)],
    "long-prompt": [("TTFT s", "ttft", "mean", False)],
    "shared-prefix": [("total s", "seconds", None, False)],
    **{name: [("ms a step", "step_ms", None, False)] for name in ROWS},
}


class Peer:
    """Another engine in a process of its own; see benchmarks/engines/protocol.py.

    Starting one waits until it is loaded. Its standard output is the protocol's alone, one JSON
    object a line; what it logs goes to a file (a pipe that nobody reads fills up, and then it
    hangs), of which the end is shown if it dies. asked: the words by which it was asked for.
    """

    def __init__(self, asked: str, command: list[str]):
        self.asked = asked
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True)
        self.name = self.read()["ready"]

    def run(self, requests: list[Request]) -> dict:
        """Run requests. Returns `summarize`'s numbers by the clock of the peer's process, so that
        writing and reading between the two isn't counted. Raises `ValueError` if the peer ends."""
        try:
            print(json.dumps(dict(prompts=[request.prompt for request in requests],
                                  max_tokens=[request.max_tokens for request in requests])),
                  file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has ended: `read` says why
        answer = self.read()
        return summarize(answer["seconds"], sum(len(request.prompt) for request in requests),
                         answer["times"], answer.get("num_tokens"))

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise ValueError("--against: the peer ended: " + self.errors.read()[-1500:].strip())
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """Of all its threads so far."""
        return cpu_seconds(self.process.pid)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc_info) -> None:
        self.process.stdin.close()  # the end of its input is the end of its work
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def cpu_seconds(process_id: int) -> float:
    """CPU time of all the threads of another process, and of the processes that it started. Without
    /proc nobody knows, and it is 0."""
    folder = Path(f"/proc/{process_id}")
    if not folder.exists():
        return 0.0
    fields = (folder / "stat").read_text().rsplit(")")[-1].split()  # behind the name
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(
        cpu_seconds(int(child)) for started in folder.glob("task/*/children")
        for child in started.read_text().split())


def pause(*clocks: Callable[[], float], tries: int = 30) -> None:
    """Wait until no engine's CPU time has moved for a second. Raises `ValueError` if one's goes on.
    clocks: CPU seconds so far, of each engine that should rest."""
    for _ in range(tries):
        before = [clock() for clock in clocks]
        time.sleep(PAUSE)
        taken = [clock() - start for clock, start in zip(clocks, before, strict=True)]
        if max(taken) < IDLE:
            return
    raise ValueError(f"an engine takes {max(taken) / PAUSE:.0%} of a core while it should wait")


def shortened(command: str) -> str:
    """A command without the folders that are this machine's own."""
    return re.sub(r"(^|[\s:=])/[^\s:]*/", r"\1", command)


def compare(ours: Callable[[list[Request], str], dict], peers: list[Peer],
            workload: dict[str, list[Request]], rounds: int, min_seconds: float = 0) -> dict:
    """A B A B on each workload. Prints the result and returns every run.

    ours: runs nanoserve, already warm, on requests with a label. rounds: the least number for each
    workload. More are run until all runs together took `min_seconds`, since short runs vary most.
    """
    runs: dict[str, dict[str, list]] = {}
    taken = ["nanoserve"]
    for peer in peers:
        if peer.name in taken:  # another tree of ours, say
            peer.name += f" ({len(taken) + 1})"
        taken.append(peer.name)
    commands = {peer.name: shortened(peer.asked) for peer in peers}
    clocks = [time.process_time, *(peer.cpu_seconds for peer in peers)]
    for name, requests in workload.items():
        mine = runs[name] = {engine: [] for engine in ["nanoserve", *(p.name for p in peers)]}
        warm = [Request(request.prompt[:64], 4) for request in requests[:2]]
        for peer in peers:
            peer.run(warm)
        seconds = 0.0
        try:
            with tqdm(desc=name, total=None if min_seconds else rounds, unit="round", leave=False,
                      disable=None) as bar:
                while len(mine["nanoserve"]) < rounds or seconds < min_seconds:
                    pause(*clocks)
                    found = [ours(requests, name)]
                    if found[0].pop("interrupted"):
                        raise KeyboardInterrupt
                    for peer in peers:
                        pause(*clocks)
                        found.append(peer.run(requests))
                    for engine, run in zip(mine, found, strict=True):
                        mine[engine].append(run)
                    seconds += sum(run["seconds"] for run in found)
                    bar.update()
        except KeyboardInterrupt:  # whole rounds only: a run without its neighbour says little
            if mine["nanoserve"]:
                print_comparison(name, mine)
            else:
                print(f"{name}: interrupted in its first round", file=sys.stderr)
            return dict(rounds=runs, commands=commands, interrupted=True)
        print_comparison(name, mine)
    return dict(rounds=runs, commands=commands)


def headline(workload: str, run: dict) -> list[float]:
    """The numbers of one run that matter for its workload; nan for a missing one."""
    found = [run[key] if part is None else run[key][part]
             for _, key, part, _ in HEADLINES.get(workload, HEADLINES["batch"])]
    return [math.nan if value is None else value for value in found]


def ratios(workload: str, mine: list[dict], theirs: list[dict]) -> list[list[float]]:
    """How many times as good we are: for each headline, one number for each pair of runs.

    Above 1 we are ahead, whether more is better (tokens a second) or less (seconds).
    """
    columns = []
    for i, (_, _, _, more_is_better) in enumerate(HEADLINES.get(workload, HEADLINES["batch"])):
        pairs = [(headline(workload, a)[i], headline(workload, b)[i])
                 for a, b in zip(mine, theirs, strict=True)]
        columns.append([a / b if more_is_better else b / a for a, b in pairs])
    return columns


def print_comparison(workload: str, runs: dict[str, list[dict]]) -> None:
    """For each engine its medians, and behind a peer's our ratios, their median first."""
    print(f"\n{workload}, medians of {len(runs['nanoserve'])}")
    for engine, theirs in runs.items():
        values = zip(*(headline(workload, run) for run in theirs), strict=True)
        compared = zip(HEADLINES.get(workload, HEADLINES["batch"]), values,
                       ratios(workload, runs["nanoserve"], theirs), strict=False)
        print(wrapped(f"  {engine}:", "; ".join(
            f"{title} {statistics.median(column):.2f}" + ("" if engine == "nanoserve" else
            f" (nanoserve is {statistics.median(pairs):.2f} times as good: "
            f"{', '.join(f'{ratio:.2f}' for ratio in pairs)})")
            for (title, _, _, _), column, pairs in compared), column=4))
