"""What nanoserve does on a GPU, measured: the kernels, the engine, and what each idea is worth.

    python -m benchmarks.gpu                         everything, in less than 25 minutes
    python -m benchmarks.gpu --part attention        or a part of it, in less than 10:
    python -m benchmarks.gpu --part engine           one of attention, engine, ablation
    python -m benchmarks.gpu --quick                 a few shapes and one model, in 3 minutes
    python -m benchmarks.gpu --table gpu-results/*.json      docs/devices.md's table of these
    python -m benchmarks.gpu --dry-run               all of it at toy sizes, without a GPU

Shares are of what this machine really does: its own copy of 2 GB, its own product of two matrices
of random numbers, measured first. The floor of a workload is the sum over the steps that were
scheduled of the bytes and flops they can't do without, in `roofline`. What is timed reads memory
that no cache still has: tables take turns, so that no step finds the keys of the one before.

Kernels are timed inside a CUDA graph, as the engine runs them; otherwise the host's time to launch
them would be measured. Before it is timed, each launch is held against a softmax in float32.

Nothing is lost: after each part all results so far are written, a part that fails leaves its
traceback and the next one begins, and a part for which there is no time left says so. A model that
the GPU has no room for is left out. A dry run fails if anything in it does.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

if not torch.cuda.is_available():  # before anything imports triton, which decides at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.gpu_attention import (  # noqa: E402
    compile_share,
    measure_attention,
    num_workers,
    quick_tables,
)
from benchmarks.gpu_engine import measure_ablation, measure_engine  # noqa: E402
from benchmarks.gpu_report import (  # noqa: E402
    ON_GPU,
    REAL,
    TOY,
    Report,
    ceilings,
    failed,
    machine,
    page_table,
    summary,
    that_fit,
    troubles,
)

RESULTS = Path(__file__).with_name("gpu.json")
MINUTES = {"attention": 9, "engine": 9, "ablation": 7, "quick": 3, "all": 24}


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=MINUTES, default="all")
    parser.add_argument("--out", help="folder for the results; default: $OUT, or gpu-results")
    parser.add_argument("--minutes", type=float, help="stop in time; default: by part, "
                        + ", ".join(f"{part} {n}" for part, n in MINUTES.items()))
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU, too")
    parser.add_argument("--quick", dest="part", action="store_const", const="quick",
                        help="--part quick: its file is what to send with a report")
    parser.add_argument("--workers", type=int, default=num_workers(),
                        help="processes that compile ahead of the sweep; 0: none")
    parser.add_argument("--table", nargs="+", metavar="FILE",
                        help=f"join these in {RESULTS.name}, which the table of docs/devices.md, "
                             "printed here, is held against")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # "2/12/sm_90": a share
    args = parser.parse_args(arguments)
    if args.table:
        results = joined([json.loads(Path(file).read_text()) for file in args.table])
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(page_table(results))
        return results
    if args.compile:
        index, count, arch = args.compile.split("/")
        compile_share(REAL, int(index), int(count), arch)
        return {}
    if not ON_GPU and not args.dry_run:
        parser.error("torch sees no GPU: --dry-run runs everything at toy sizes")
    size = TOY if args.dry_run else that_fit(REAL)
    out = Path(args.out or os.environ.get("OUT") or "gpu-results")
    report = Report(out, args.part, 60 * (args.minutes or MINUTES[args.part]))
    report.measure("machine", 0, machine)
    report.measure("ceilings", 0, ceilings, size)
    for part, measure_part in (("attention", measure_attention), ("engine", measure_engine),
                               ("ablation", measure_ablation)):
        if args.part in (part, "all"):
            share = MINUTES[part] / sum(MINUTES[p] for p in ("attention", "engine", "ablation"))
            if args.part == "all":  # no part may eat up the time of those that follow it
                report.until = min(report.end, time.monotonic() + share * report.seconds)
            measure_part(report, size, args.workers)
    if args.part == "quick":
        quick_tables(report, size)
        size.models = dict(list(size.models.items())[:1])
        measure_engine(report, size, args.workers)
    report.write()
    print(summary(report.results), flush=True)
    print(f"all of it: {out / args.part}.json", flush=True)
    if args.dry_run and (wrong := troubles(report.results)):
        raise SystemExit("\n".join(["the dry run failed:", *wrong]))
    return report.results


def joined(parts: list[dict]) -> dict:
    """Of several runs' results the first that is one: a skipped or failed part doesn't count. Of
    the sweeps the best launches, not every one."""
    results: dict = {}
    for part in parts:
        for name, result in part.items():
            if name not in results or failed(results[name]):
                results[name] = result
    return {name: {key: value for key, value in result.items() if key != "rows"} if isinstance(
        result, dict) else result for name, result in results.items()}


if __name__ == "__main__":
    main()
