"""Watch the scheduler work: the real scheduler and block manager, a fake model, one line a step.

    python -m nanoserve trace
    python -m nanoserve trace --budget 6 --blocks 12 --request 9:4 --request 20:2
    python -m nanoserve trace --csv arrivals.csv --blocks 4096 --html run.html
    python -m nanoserve trace --csv arrivals.csv --blocks 4096 --policy shortest --limit 0.5

The decisions are the engine's own; only the tokens are made up, because no decision depends on what
a token is. It needs neither torch nor a model, so it is the quickest way to see what a change to
`scheduler.py` or `block_manager.py` does.

Each request is `prompt:output[:shared]` in tokens; requests whose prompts share their first tokens
can hit each other's blocks. A CSV adds when they arrive, and how urgent they are:
`seconds,prompt,output[,shared[,priority]]` a line (other columns, as in the header of the first
line, are passed over). A cell of the table is what a request gets in that step:

    0..8      computes the tokens at positions 0 to 7 of its prompt
    8..10 →   the rest of the prompt, and samples a token from it
    10 →      decodes: computes one token, samples the next
    hit 8     found its first 8 tokens in the prefix cache, or its own after a preemption
    preempted gave its blocks back, will recompute
    ·         waits

Below a step there is a line with the reason for each request that waits or was preempted. For many
requests there is no table, but figures: for all of them and for each priority.

The clock is simulated: a step takes `--step-ms`, and `--token-us` more for each token in it. A real
step's time has the same form (weights are read once, arithmetic grows with the tokens), but other
numbers.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import SimpleNamespace

from nanoserve.config import POLICIES, EngineConfig, SamplingParams
from nanoserve.hooks import Extra, Hooks, checked
from nanoserve.progress import say
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CoreRequest, Sequence, Step
from nanoserve_extras.base.command import named
from nanoserve_extras.base.metrics import EngineMetrics
from nanoserve_extras.base.request import RequestStateStats
from nanoserve_extras.base.summary import duration, percentile, summary
from nanoserve_extras.base.words import in_words
from nanoserve_extras.engine_args import TraceOptions
from nanoserve_extras.trace.reasons import explain, lost_blocks
from nanoserve_extras.trace.recorder import Trace

DEMO = ["10:5:8", "12:5:8", "14:3"]  # A and B share 8 tokens, C is on its own
WIDEST_TABLE = 12  # requests; more have no table, only a summary
OWN_WORDS = {"kv_cache_memory_bytes or num_gpu_blocks_override": "--blocks",
             "max_tokens": "a request's output", "max_num_seqs=": "--max-num-seqs "}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nanoserve trace",
                                     description=__doc__.split("\n")[0])
    count, amount = at_least(int, 1), at_least(float, 0)
    parser.add_argument("--budget", type=count, default=12, help="tokens a step")
    parser.add_argument("--blocks", type=count, default=9, help="KV blocks")
    parser.add_argument("--block-size", type=count, default=4, help="tokens a block")
    parser.add_argument("--max-num-seqs", type=count, default=4, help="at most --budget")
    parser.add_argument("--request", action="append", metavar="PROMPT:OUTPUT[:SHARED]")
    parser.add_argument("--csv", type=Path,
                        help="arrivals: seconds, prompt, output[, shared[, priority]]")
    parser.add_argument("--policy", default="fcfs", help="who goes first: "
                        f"{', '.join(POLICIES)}, or MODULE:CLASS, an extra with an order")
    parser.add_argument("--step-ms", type=amount, default=5.0, help="milliseconds of any step")
    parser.add_argument("--token-us", type=amount, default=20.0, help="microseconds more a token")
    parser.add_argument("--max-wait", type=amount, default=0.0,
                        help="seconds that the first of an idle engine waits for others")
    parser.add_argument("--limit", type=amount, nargs="+", metavar="SECONDS", default=[],
                        help="who has a first token by then? One, or one a priority, lowest first")
    parser.add_argument("--html", metavar="FILE", help="write the page: open it in a browser")
    parser.add_argument("--json", metavar="FILE", help="write Chrome trace JSON, for Perfetto")
    args = parser.parse_args(argv)
    try:
        arrivals = read_csv(args.csv) if args.csv else []
        arrivals += [parse(text) for text in args.request or ([] if args.csv else DEMO)]
        arrivals.sort(key=lambda arrival: arrival.seconds)  # --request's arrive at 0
        policy, orders = args.policy, []
        if ":" in policy:
            policy, orders = "fcfs", [order_named(policy)]
        simulation = Simulation(arrivals, args.budget, args.blocks, args.block_size,
                                args.max_num_seqs, args.step_ms / 1e3, args.token_us / 1e6,
                                args.max_wait, policy)
        for order in orders:
            simulation.add(order)
        for path, suffix in ((args.html, ".html"), (args.json, ".json")):
            if path:
                simulation.record(str(Path(path).with_suffix(suffix)))
        shown = table(simulation) if len(arrivals) <= WIDEST_TABLE else simulation.finish()
        if not shown or args.limit:
            shown = f"{shown}\n\n" * bool(shown) + simulation.summary(args.limit)
    except (ValueError, OSError) as error:
        parser.error(in_own_words(str(error)))
    if args.max_num_seqs > args.budget:
        say(f"--budget {args.budget} lowers --max-num-seqs from {args.max_num_seqs} to "
            f"{args.budget}: who writes takes one token of each step")
    print(shown)
    simulation.close()


def order_named(name: str) -> Extra:
    """An extra with an order. name: MODULE:CLASS. Raises `ValueError`."""
    with in_words(f"--policy {name}"):
        [extra] = checked([named(name)()])
        if not Hooks([extra]).order:
            raise ValueError("it has no method order")
        return extra


def at_least(kind: type, least: int) -> Callable[[str], float]:
    """A reader for an option's number, for argparse."""
    def read(text: str) -> float:
        with suppress(ValueError):
            if least <= (value := kind(text)) < inf:
                return value
        words = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {words} of at least {least}, got {text!r}")
    return read


def in_own_words(text: str) -> str:
    """An error of the engine with this command's options in place of the engine's."""
    for name, ours in OWN_WORDS.items():
        text = text.replace(name, ours)
    return text


@dataclass(frozen=True)
class Arrival:
    """A request of made-up tokens."""

    num_prompt: int
    num_output: int
    num_shared: int = 0  # first tokens that it shares with all others
    seconds: float = 0.0  # when it arrives
    priority: int = 0  # lower is served first, under that policy

    def __post_init__(self):
        if not (self.num_prompt >= 1 and self.num_output >= 1 and 0 <= self.seconds < inf
                and 0 <= self.num_shared <= self.num_prompt):
            raise ValueError


def parse(request: str) -> Arrival:
    """ "10:5:8" -> ten prompt tokens, the first eight of them everybody's, five to generate."""
    try:
        return Arrival(*map(int, request.split(":", 2)))
    except (ValueError, TypeError):
        raise ValueError(f"request {request!r} must be PROMPT:OUTPUT[:SHARED], whole numbers of at "
                         "least 1, SHARED at most PROMPT") from None


def read_csv(path: Path) -> list[Arrival]:
    """Lines of `seconds,prompt,output[,shared[,priority]]`, or a header with these names in any
    order."""
    try:  # Excel writes a BOM
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            lines = [line for line in csv.reader(file) if line]
    except csv.Error as error:
        raise ValueError(f"{path} must be lines of seconds,prompt,output: {error}") from None
    names = ["seconds", "prompt", "output", "shared", "priority"]
    if lines and lines[0][0].strip()[:1].isalpha():
        names = [name.strip().lower() for name in lines.pop(0)]
        if not {"seconds", "prompt", "output"} <= set(names):
            raise ValueError(f"{path}: the header must name seconds, prompt and output, got "
                             f"{', '.join(names)}")
    arrivals = []
    for number, line in enumerate(lines, 1):
        try:
            cells = dict(zip(names, line, strict=False))  # the last ones may be left out
            arrivals.append(Arrival(
                int(cells["prompt"]), int(cells["output"]), int(cells.get("shared") or 0),
                float(cells["seconds"]), int(cells.get("priority") or 0)))
        except (ValueError, KeyError):
            raise ValueError(f"{path}, request {number}: {','.join(line)[:80]!r} must be "
                             "seconds,prompt,output[,shared[,priority]]") from None
    if not arrivals:
        raise ValueError(f"{path} has no requests: write seconds,prompt,output a line")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


class Simulation:
    """The real scheduler fed with arrivals; its steps take simulated time.

    Raises `ValueError` for what can't run, at the latest when it arrives.
    """

    def __init__(self, arrivals: list[Arrival], budget: int, num_blocks: int, block_size: int,
                 max_num_seqs: int, step_seconds: float = 5e-3, token_seconds: float = 20e-6,
                 max_wait: float = 0.0, policy: str = "fcfs"):
        self.config = config = EngineConfig(
            model="fake", max_model_len=num_blocks * block_size, block_size=block_size,
            max_num_batched_tokens=budget, max_num_seqs=min(max_num_seqs, budget),
            scheduling_policy=policy)
        self.scheduler, self.max_wait = Scheduler(config, num_blocks), max_wait
        self.now, self.step_seconds, self.token_seconds = 0.0, step_seconds, token_seconds
        self.seqs = [_make_sequence(i, arrival) for i, arrival in enumerate(arrivals)]
        self.stats = [RequestStateStats(arrival_time=arrival.seconds) for arrival in arrivals]
        self.extras: list[Extra] = []
        self.add(EngineMetrics(self.clock, self.clock))
        self.extras[0].attach(self)
        self.num_arrived = 0

    def clock(self) -> float:
        return self.now

    def add(self, extra: Extra) -> None:
        self.extras.append(extra)
        self.scheduler.hooks.keep(self.extras)

    def record(self, path: str) -> Trace:
        """Write the steps to a file as well, an engine's page or JSON by its ending. Raises
        `ValueError` for another ending or a missing folder; what fails in writing is only said."""
        TraceOptions(trace=path)  # raises what an engine would
        trace = Trace(
            path, self.scheduler, "simulation", print, self.clock,
            f"made-up tokens, simulated clock: {1e3 * self.step_seconds:g} ms a step and "
            f"{1e6 * self.token_seconds:g} µs a token")
        self.add(trace)
        return trace

    def _arrive(self) -> None:
        """Submit the requests that are due. If no request runs, the clock jumps to the next arrival
        plus `max_wait` (a server also begins when a step is full)."""
        if not self.scheduler.has_unfinished() and self.num_arrived < len(self.seqs):
            self.now = max(self.now, self.stats[self.num_arrived].arrival_time + self.max_wait)
        while self.num_arrived < len(self.seqs) and (
                self.stats[self.num_arrived].arrival_time <= self.now):
            seq, stats = self.seqs[self.num_arrived], self.stats[self.num_arrived]
            self.scheduler.add(seq)
            for tell in self.scheduler.hooks.added:
                tell(SimpleNamespace(sequences=[seq], stats=stats, prompt=None))
            self.num_arrived += 1

    def steps(self) -> Iterator[Step]:
        """Run to the end, and yield each step while it is in flight."""
        hooks = self.scheduler.hooks
        self._arrive()
        while self.scheduler.has_unfinished():
            step = self.scheduler.schedule()
            for tell in hooks.scheduled:
                tell(step)
            yield step
            self.now += self.step_seconds + self.token_seconds * step.num_tokens
            # Any token will do, as long as different requests don't look alike by accident.
            tokens = [1000 + seq.request.arrival for seq in step.sampling]
            accepted = self.scheduler.update(step, tokens)
            for tell in hooks.updated:
                tell(step, accepted)
            for tell in hooks.ended:
                tell([seq for seq in accepted if seq.finish_reason is not None])
            self._arrive()

    def finish(self) -> None:
        """Run to the end, without a table."""
        for _ in self.steps():
            pass

    def summary(self, limits: list[float] = ()) -> str:
        """The number of steps, and `generate(summarize=True)`'s line, in simulated seconds; then a
        line for each priority. limits: seconds to a first token, one or as many as priorities."""
        metrics = [stats.snapshot([seq]) for stats, seq in zip(self.stats, self.seqs, strict=True)]
        lines = [f"{self.extras[0].num_steps:,} steps, {summary(metrics, self.now)}"]
        priorities = sorted({seq.request.priority for seq in self.seqs})
        if len(limits) not in (0, 1, len(priorities)):
            raise ValueError(f"--limit has {len(limits)} numbers: name one, or one for each of the "
                             f"priorities {priorities}, in this order")
        for i, priority in enumerate(priorities if limits or len(priorities) > 1 else ()):
            some = [one for one, seq in zip(metrics, self.seqs, strict=True)
                    if seq.request.priority == priority]
            ttft = sorted(one.first_token_latency for one in some)
            lines.append(f"priority {priority}: {summary(some, self.now)} | TTFT p50 "
                         f"{duration(percentile(ttft, 50))}")
            if limits:
                limit = limits[i % len(limits)]
                in_time = sum(one <= limit for one in ttft) / len(ttft)
                lines[-1] += f", {in_time:.1%} within {limit:g} s"
        return "\n".join(lines)

    def close(self) -> None:
        """The traces' files are complete only after this."""
        for trace in self.extras[1:]:
            trace.close()


def table(simulation: Simulation) -> str:
    """Run the requests to their end. A line for each step, and below it the sequences that wait,
    with the reasons."""
    seqs, scheduler = simulation.seqs, simulation.scheduler
    rows = [["step", "tokens", *(seq.request.request_id for seq in seqs), "free blocks"]]
    reasons: list[list[str]] = [[]]  # below each row
    for step in simulation.steps():
        rows.append([str(step.index), f"{step.num_tokens}/{scheduler.max_num_batched_tokens}",
                     *(_cell(step, seq) for seq in seqs), str(scheduler.blocks.num_free_blocks)])
        reasons.append(_reasons(scheduler, step, seqs[:simulation.num_arrived]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row, below in zip(rows, reasons, strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        lines += [" " * (widths[0] + 2) + reason for reason in below]
    return "\n".join(line.rstrip() for line in lines)


def _reasons(scheduler: Scheduler, step: Step, seqs: list[Sequence]) -> list[str]:
    """A sentence for each sequence without a share of the step; all that are only behind another
    one share a sentence."""
    waits = explain(scheduler, step)
    waits.of = {seq: in_own_words(reason) for seq, reason in waits.of.items()}
    said = [f"{seq.name} {lost_blocks(seq, taker)}" for seq, taker in step.preempted.items()]
    idle = [seq for seq in seqs if seq not in step.num_new_tokens and seq not in step.preempted
            and seq.finish_reason is None]
    said += [f"{seq.name} {waits.of[seq]}" for seq in idle if seq in waits.of]
    if behind := [seq for seq in idle if seq not in waits.of]:
        said.append(f"{', '.join(seq.name for seq in behind)} "
                    f"stand{'s' if len(behind) == 1 else ''} behind {waits.next_in_line.name}")
    return said


def _make_sequence(i: int, arrival: Arrival) -> Sequence:
    """The 27th request is called A1: letters read better than numbers beside so many numbers. Its
    own tokens are negative, so that they never look like shared ones."""
    own = range(arrival.num_prompt - arrival.num_shared)
    tokens = [*range(arrival.num_shared), *(-100 * (i + 1) - n for n in own)]
    params = SamplingParams(temperature=0, max_tokens=arrival.num_output)
    core = CoreRequest(f"{chr(ord('A') + i % 26)}{i // 26 or ''}", params, i, arrival.priority,
                       arrival.seconds, max_num_tokens=arrival.num_prompt + arrival.num_output)
    return Sequence(core, tokens)


def _cell(step: Step, seq: Sequence) -> str:
    """What a request gets in a step, as the module's docstring shows it."""
    if seq in step.preempted:
        return "preempted"
    if seq not in step.num_new_tokens:
        return "·" if seq.finish_reason is None else ""
    index = list(step.num_new_tokens).index(seq)
    start, n = step.starts[index], step.num_new_tokens[seq]
    text = f"{start}" if n == 1 else f"{start}..{start + n}"
    hit = f"hit {start}, " if start and seq in step.admitted else ""
    return hit + text + (" →" if seq in step.sampling else "")
