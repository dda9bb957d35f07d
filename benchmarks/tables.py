"""Measures the tables of docs/benchmarks.md and README's one, and writes them.

    python -m benchmarks.tables --measure                  bfloat16 and the ladder; 25 minutes
    python -m benchmarks.tables --measure --dtype float32 --no-ladder             20 minutes
    python -m benchmarks.tables                            only write the tables again

Other engines take part with `--against hf --against 'OTHER/bin/python SCRIPT'`, see
benchmarks/engines; their commands stand below their table. What was measured goes to
benchmarks/tables.json: a comparison for each machine and dtype, which takes the place of the last
one there, and one ladder. Each table says on what machine and when. They come from that file and
from nowhere else: a test holds both pages against it. Where a later change of the code makes a
measurement old, an entry `note` beside it says so ("before the compiled twin") and stands in front
of its table; the next measurement takes the entry's place. README has the newest comparison in
bfloat16. Leave the machine alone meanwhile.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import throughput
from benchmarks.peers import HEADLINES, headline, ratios
from benchmarks.workloads import ROWS, SMALL

CLONE = Path(__file__).parent.parent
DATA = Path(__file__).with_name("tables.json")
PAGE, READMES = CLONE / "docs" / "benchmarks.md", (CLONE / "README.md", CLONE / "README.zh.md")
BEGIN, END = "<!-- written by benchmarks/tables.py -->\n", "<!-- end of what it wrote -->\n"
WORKLOADS = tuple(name for name in HEADLINES if name not in ROWS)  # the ways to use an engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--min-seconds", default="60", help="see throughput.py; default: 60")
    parser.add_argument("--against", action="append", help="default: hf")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--no-ladder", action="store_true")
    args = parser.parse_args()
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    if args.measure:
        for _ in measure(args, data):  # what is measured is kept, whatever comes after it
            DATA.write_text(json.dumps(rounded(data), indent=1) + "\n")
    write(PAGE, render(rounded(data)))
    for readme in READMES:
        write(readme, headlines(rounded(data)))


def measure(args: argparse.Namespace, data: dict) -> Iterator[None]:
    """Put the comparison into `data`, then the ladder; yields after each."""
    common = ["--model", args.model, "--dtype", args.dtype]
    peers = [word for peer in args.against or ["hf"] for word in ("--against", peer)]
    asked = throughput.make_parser().parse_args(
        [*common, *peers, "--rounds", args.rounds, "--min-seconds", args.min_seconds,
         "--seed", args.seed])
    with throughput.Bench(asked) as one:
        found = one.against(tuple(HEADLINES))
    others = [old for old in data.get("comparisons", []) if place(old) != place(found)]
    data["comparisons"] = sorted([*others, found], key=place)
    yield
    if not args.no_ladder:
        asked = throughput.make_parser().parse_args([*common, "--ladder", "--rounds", args.rounds])
        with throughput.Bench(asked) as one:
            data["ladder"] = one.ladder()
        yield


def place(found: dict) -> tuple[str, str, str]:
    """What a comparison is kept by."""
    return found["machine"]["device"], found["machine"]["cpu"], found["model"]["dtype"]


def rounded(value):
    """Four digits that count: more would only make the file's history longer."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ------------------------------------------------------------------- the tables

NOT_MEASURED = "Not measured yet: `python -m benchmarks.tables --measure` does it.\n"


def write(page: Path, text: str, begin: str = BEGIN) -> None:
    """Put `text` between the page's markers."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + text + END + rest.split(END, 1)[1], encoding="utf-8")


def newest_first(data: dict) -> list[dict]:
    """The newest comparison of each dtype, then all others; newer ones before older ones."""
    found = sorted(data.get("comparisons", []), key=lambda one: one["machine"]["date"],
                   reverse=True)
    newest = {one["model"]["dtype"]: one for one in reversed(found)}.values()
    return sorted(found, key=lambda one: not any(one is other for other in newest))


def render(data: dict) -> str:
    """docs/benchmarks.md: everything that was measured."""
    parts = [comparison(found) for found in newest_first(data)]
    if "ladder" in data:
        parts.append(ladder(data["ladder"]))
    return "\n".join([*parts, asked()]) if parts else NOT_MEASURED


def headlines(data: dict) -> str:
    """README: the newest bfloat16 comparison, in short."""
    of_dtype = [one for one in newest_first(data) if one["model"]["dtype"] == "bfloat16"]
    if not of_dtype:
        return NOT_MEASURED
    found = of_dtype[0]
    return (f"{when(found)}, {found['machine']['cpu']}, {found['machine']['num_cores']} cores, "
            f"{found['model']['name']}'s shapes with random weights:\n\n"
            f"{table(lines_of(found, [name for name in found['rounds'] if name in WORKLOADS]))}")


def asked() -> str:
    """The workloads in words."""
    said = []
    for name in WORKLOADS:
        shape = SMALL[name]
        inputs, outputs = (" to ".join(str(n) for n in dict.fromkeys(lengths))
                           for lengths in (shape.input_len, shape.output_len))
        count = f"{shape.num_prompts} requests of " if shape.num_prompts > 1 else ""
        common = f"{shape.shared_len:,} common and " if shape.shared_len else ""
        said.append(f"`{name}`: {count}{common}{inputs} tokens in, {outputs} out")
    (inputs, _), (outputs, _) = SMALL["rows-1"].input_len, SMALL["rows-1"].output_len
    said.append(f"`rows-N`: N requests of {inputs} tokens in, {outputs} out")
    return "; ".join(said) + "; all submitted at once.\n"


def comparison(found: dict) -> str:
    """Every workload, with the ratios' ranges, our share of the roofline, the peers' commands."""
    runs, dtype = found["rounds"], found["model"]["dtype"]
    rows = lines_of(found, list(runs), in_full=True)
    shares = {name: statistics.median(run["roofline"]["share"] for run in runs[name]["nanoserve"])
              for name in runs}  # of a whole run: the same for each of its headlines
    column = [f"{shares[name]:.0%}" for name in runs for _ in HEADLINES[name]]
    for row, share in zip(rows, ["share of the roofline", "---", *column], strict=True):
        row.insert(2, share)
    counts = {name: len(runs[name]["nanoserve"]) for name in runs}
    usual = min(counts.values())
    more = "".join(f", of `{name}` {count}" for name, count in counts.items() if count > usual)
    limits = {name: [run["roofline"][name] / 1e9 for of_one in runs.values()
                     for run in of_one["nanoserve"]] for name in ("bandwidth", "matrix_rate")}
    commands = "".join(f"\n{name}: `--against \"{command}\"`\n"
                       for name, command in found.get("commands", {}).items())
    return (f"{on(found, limits)}, {found['model']['name']}'s shapes, random weights, {dtype}; "
            f"the same token ids, greedy, engines in turns, medians of {usual} rounds{more}:\n\n"
            f"{table(rows)}{commands}")


def lines_of(found: dict, names: list[str], in_full: bool = False) -> list[list[str]]:
    """A line for each headline of the workloads `names`, a column for each engine. In brackets how
    many times as good nanoserve is as a peer: the median of the pairs, and in full their range."""
    runs = found["rounds"]
    engines = list(next(iter(runs.values())))
    rows = [[found["model"]["dtype"], *engines], ["---"] * (1 + len(engines))]
    for name in names:
        values = {engine: list(zip(*(headline(name, run) for run in runs[name][engine]),
                                   strict=True)) for engine in engines}
        for i, (title, *_) in enumerate(HEADLINES[name]):
            row = [f"{name}: {title}"]
            for engine in engines:
                row.append(f"{statistics.median(values[engine][i]):.3g}")
                if engine != "nanoserve":
                    pairs = ratios(name, runs[name]["nanoserve"], runs[name][engine])[i]
                    spread = f", {min(pairs):.2f} to {max(pairs):.2f}" if in_full else ""
                    row[-1] += f" ({statistics.median(pairs):.2f}{spread})"
            rows.append(row)
    return rows


def ladder(found: dict) -> str:
    load = found["workload"]
    rows = [["", "seconds", "output tok/s", "TTFT s", "between tokens: mean ms", "p99 ms"],
            ["---"] * 6]
    for row in found["rows"]:
        rows.append([row["name"], f"{row['seconds']:.1f}", f"{row['output_tok_s']:.1f}",
                     f"{row['ttft']['mean']:.2f}", f"{1e3 * row['inter_token']['mean']:.0f}",
                     f"{1e3 * row['inter_token']['p99']:.0f}"])
    limits = {name: [found["machine"][name] / 1e9] for name in ("bandwidth", "matrix_rate")}
    return (f"What each idea brings, switched on one after the other ({on(found, limits)}; "
            f"{found['model']['name']}'s shapes, {found['model']['dtype']}; {load['num_requests']} "
            f"requests, {load['num_prompt_tokens']:,} prompt and {load['num_output_tokens']:,} "
            f"output tokens, many with a common beginning; middle of {found['rounds']} rounds). "
            f"All rows but the last run plain `ops`:\n\n{table(rows)}")


def on(found: dict, limits: dict[str, list[float]]) -> str:
    """limits: what was measured of the machine, in 1e9 a second; of several the least and most."""
    machine = found["machine"]
    copy, product = (" to ".join(dict.fromkeys(f"{n:.0f}" for n in (min(measured), max(measured))))
                     for measured in (limits["bandwidth"], limits["matrix_rate"]))
    device = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    return (f"{when(found)}, {device}{machine['cpu']}, {machine['num_cores']} cores, "
            f"{machine['threads']} threads, torch {machine['torch']}, Python {machine['python']}, "
            f"copy {copy} GB/s, matrix product {product} GFLOP/s")


def when(found: dict) -> str:
    """The day, with what has become of the code since."""
    return ", ".join(filter(None, [found["machine"]["date"], found.get("note")]))


def table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
