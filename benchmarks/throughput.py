"""How fast is it, on exactly what, and how fast could it be?

    python -m benchmarks.throughput                       something that every machine can do
    python -m benchmarks.throughput --model Qwen3-8B      real shapes, random weights, no download
    python -m benchmarks.throughput --request-rate 4      Poisson arrivals: latencies under load
    python -m benchmarks.throughput --arrivals FILE.csv   real ones: seconds,prompt,output a line
    python -m benchmarks.throughput --step-trace run.html a page that shows every step of the run
    python -m benchmarks.throughput --ladder              what each idea brings, one after another
    python -m benchmarks.throughput --against hf          transformers does the same, in turns

`bench.py` is the short answer; this is the long one, made of three more files, with `--against` of
four:

    workloads   requests and their arrivals         the same token ids for each engine
    roofline    what this machine can do, now       a copy of memory, a matrix product
    meter       one run of the engine               every step, every token's time, parts of a step
    peers       others on the same requests         in turns: a ratio for each pair of runs

A single run prints hardware, engine and workload; the throughput in a line as vLLM's own benchmark
prints it; latencies; then the roofline, the least that the hardware needs for the very steps that
were scheduled, part by part beside what they took. Where a part takes much more than its minimum
there is something to gain.

Without `--model` a GPU gets the community workload (nano-vllm's) on Qwen3-0.6B's shapes. A CPU gets
as many of its 16 requests as its own roofline promises to do in 20 s; where those are fewer than 4,
the bundled model is taken.

A request's clock starts when it arrives, also where the engine was too busy to take it. `host` is
wall time outside of the forward; on a GPU it overlaps with the device, whose parts aren't timed.
Ctrl-C ends a run, and what was measured up to there is printed. No test judges a time, and neither
should you without an interleaved comparison: on a shared machine bandwidth varies twofold.

Not known here: how a step is made; the engine is what any user gets from `LLM`. Road not taken: a
server and clients that load it, as vLLM's benchmark has them: benchmarks/server.py compares the
server with `generate`.
"""

import argparse
import ast
import json
import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from nanoserve import LLM, ModelConfig  # isort: skip  (before torch: see nanoserve/__init__.py)
import torch
from tqdm import tqdm

from benchmarks import roofline, workloads
from benchmarks.meter import peak_memory, profile, serve
from benchmarks.peers import Peer, compare
from benchmarks.roofline import Machine, Work
from benchmarks.workloads import WORKLOADS, Request, wrapped
from nanoserve.config import DTYPES
from nanoserve.device import free_cpu_memory, pick_device
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.loader import BUNDLED
from nanoserve_extras import choose
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.command import command
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.tools.doctor import features
from nanoserve_extras.trace.recorder import Trace

CPU_SECONDS = 20  # what the default workload may take at least, by the roofline, on a CPU
MIN_DEFAULT_REQUESTS = 4
CPU_MEMORY = 6 * 2 ** 30  # bytes that should be free for half a billion parameters
PROFILED_STEPS = 8
# What `--set` leaves to an option of its own, which the rest of a run has to know.
OWN_OPTIONS = {"model": "--model", "dtype": "--dtype", "trace": "--step-trace"}
HF = [sys.executable, str(Path(__file__).parent / "engines" / "hf.py")]
PEERS = {"hf": HF, "hf-continuous": [*HF, "--continuous"]}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, which is 130 after Ctrl-C, as in a shell."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check(args)
        with Bench(args) as bench:
            results = (bench.ladder() if args.ladder else bench.against() if args.against
                       else bench.throughput())
            if args.output_json:
                Path(args.output_json).write_text(json.dumps(results, indent=1) + "\n")
                print(f"wrote {args.output_json}")
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 130 if results.get("interrupted") else 0


def make_parser() -> argparse.ArgumentParser:
    """The options. Most of the engine's are left to `--set`, which takes them by the names that
    `LLM` has for them: a new one can be measured without a line here."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder, a hub id, a bundled model, or shapes: "
        + ", ".join(roofline.MODELS))
    add("--dtype", default="auto", choices=DTYPES)
    add("--workload", default="batch", choices=WORKLOADS)
    add("--num-prompts", type=int)
    add("--input-len", type=int, nargs="+", metavar="TOKENS", help="of each prompt, or: from to")
    add("--output-len", type=int, nargs="+", metavar="TOKENS", help="of each output, or: from to")
    add("--seed", type=int, default=0)
    add("--temperature", type=float, help="default: 0; 0.6 for the batch on a GPU")
    add("--request-rate", type=float, metavar="R", help="arrivals a second, Poisson; default: all "
        "at once")
    add("--arrivals", type=Path, metavar="FILE.csv", help="seconds,prompt,output a line")
    add("--trace", help=argparse.SUPPRESS)  # refused: elsewhere that word means --step-trace
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="of the engine, e.g. "
        "block_size=32; may be repeated")
    add("--threads", type=int, help="of torch on a CPU")
    add("--step-trace", metavar="FILE", help="record every step of the run: .html or .json")
    add("--profile", metavar="FILE.json", help=f"a Chrome trace of {PROFILED_STEPS} steps")
    add("--output-json", metavar="FILE")
    add("--ladder", action="store_true", help="one row per idea, each switched on after the other")
    add("--against", action="append", metavar="PEER", help=f"{', '.join(PEERS)}, or a command in "
        "quotes that speaks engines/protocol.py; may be repeated")
    add("--rounds", type=int, default=3, help="of --against and --ladder; default: 3")
    add("--min-seconds", type=float, metavar="S", help="with --against: more rounds of a workload "
        "whose runs take less than this together")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse before any work. Raises `ValueError` naming the option."""
    if args.trace:
        raise ValueError(f"--trace is called --arrivals where it means a file of arrivals: write "
                         f"--arrivals {args.trace}; a trace of the steps is --step-trace FILE")
    for name in ("num_prompts", "threads", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.min_seconds is not None and not (
            args.against and 0 <= args.min_seconds < float("inf")):
        raise ValueError("--min-seconds goes with --against, and must be a finite number of at "
                         f"least 0, got {args.min_seconds}")
    for name in ("input_len", "output_len"):
        lengths = getattr(args, name)
        if lengths and (len(lengths) > 2 or not 1 <= lengths[0] <= lengths[-1]):
            raise ValueError(f"--{name.replace('_', '-')} takes one number of at least 1, or two "
                             f"in order, got {' '.join(map(str, lengths))}")
    if args.request_rate is not None and not 0 < args.request_rate < float("inf"):
        raise ValueError("--request-rate must be above 0; leave it out for all at once")
    if (args.against or args.ladder) and (args.arrivals or args.request_rate):
        raise ValueError("--against and --ladder submit everything at once: leave --arrivals and "
                         "--request-rate out")
    if args.arrivals and (args.request_rate or args.num_prompts or args.input_len
                          or args.output_len):
        raise ValueError("--arrivals says how many requests arrive, when, and how long they are: "
                         "leave --request-rate, --num-prompts, --input-len and --output-len out")
    for name in ("profile", "step_trace"):
        if getattr(args, name) and (args.against or args.ladder):
            raise ValueError(f"--{name.replace('_', '-')} is about one run of one engine: leave "
                             "--against and --ladder out")
    if args.step_trace:
        try:
            EngineArgs(model="checked here, before anything is measured", trace=args.step_trace)
        except ValueError as error:
            raise ValueError(f"--step-trace: {error}") from None
    if args.against and args.temperature:
        raise ValueError("--against compares greedy decoding: leave --temperature out")
    for name in ("output_json", "profile"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name.replace('_', '-')}: the folder of {path} does not exist")
    for peer in args.against or []:
        if peer not in PEERS and not shutil.which(shlex.split(peer)[0]):
            raise ValueError(f"--against: {peer} is neither one of {', '.join(PEERS)} nor a "
                             "command, such as 'OTHER/bin/python SCRIPT.py'")


class Bench:
    """One model, one workload, and what the machine can do: the same for all ways to measure.

    Random weights do: shapes decide what products and bytes cost, and every request runs to its
    length (`ignore_eos`). Not so with drafts, whose hits depend on the text. Use it in a `with`
    statement: the folder that it makes for shapes is deleted at its end.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.temporary = args, tempfile.TemporaryDirectory()
        if args.threads:
            torch.set_num_threads(args.threads)
        self.options = parse_options(args.set)
        self.device = torch.device(pick_device(self.options.get("device", "auto")))
        self.on_gpu = self.device.type == "cuda"
        name = args.model or "Qwen3-0.6B"
        self.folder = self.find(name)
        _, self.config, _ = choose(EngineArgs(model=name, **self.options), self.folder)
        self.dtype, self.machine = self.pick_dtype()
        self.workload = "arrivals" if args.arrivals else args.workload
        if self.workload == "batch" and args.ladder:  # it has no common prefix, no long prompts
            self.workload = "mixed"
        self.requests = self.make_requests(self.workload)
        if not (self.on_gpu or args.model or args.arrivals or args.num_prompts):
            self.fit_to_cpu()
        self.check_fits(self.requests)

    def find(self, name: str) -> Path:
        """A folder; for shapes a temporary one with nothing but a config.json, whose weights are
        made up. Raises `ValueError` for what is neither a folder, nor built in, nor a hub id."""
        known = roofline.built_in(name)
        if known and not Path(name).is_dir():
            folder = Path(self.temporary.name, known)
            folder.mkdir()
            return roofline.write_config(known, folder)
        if "/" not in name and not Path(name).exists() and not (BUNDLED / name).is_dir():
            raise ValueError(f"--model: {name} is neither a folder, nor a hub id (owner/name), nor "
                             f"a bundled model, nor one of {', '.join(roofline.MODELS)}")
        return find_folder(name)

    def pick_dtype(self) -> tuple[str, Machine]:
        """The model's own dtype; float32 where a CPU computes in that faster: many have bfloat16 in
        name only."""
        dtype = self.config.dtype if self.args.dtype == "auto" else self.args.dtype
        machine = roofline.measure(self.device, getattr(torch, dtype))
        if self.args.dtype == "auto" and not self.on_gpu and dtype != "float32":
            plain = roofline.measure(self.device, torch.float32)
            if plain.matrix_rate > machine.matrix_rate:
                return "float32", plain
        return dtype, machine

    def make_requests(self, workload: str) -> list[Request]:
        """The requests of a workload by its name, or of a file of arrivals. Options for lengths and
        numbers take the place of the workload's own; the rest of its shape, such as the common
        beginning of prompts, stays."""
        args = self.args
        if args.arrivals:
            return workloads.replay(args.arrivals, self.config.vocab_size, args.seed)
        shape = (workloads.LARGE if self.on_gpu else workloads.SMALL)[workload]
        for name in ("input_len", "output_len"):
            if getattr(args, name):
                shape = replace(shape, **{name: tuple(getattr(args, name)[i] for i in (0, -1))})
        shape = replace(shape, num_prompts=args.num_prompts or shape.num_prompts)
        requests = workloads.generate(shape, self.config.vocab_size, args.seed)
        return workloads.poisson(requests, args.request_rate, args.seed) if (
            args.request_rate) else requests

    def fit_to_cpu(self) -> None:
        """Nothing was said: no more requests than the machine can be expected to do in time."""
        itemsize = getattr(torch, self.dtype).itemsize
        fitting = self.requests if free_cpu_memory() > CPU_MEMORY else []
        while len(fitting) >= MIN_DEFAULT_REQUESTS and sum(roofline.run_seconds(
                roofline.simulate(fitting, self.config, 64, 2048), self.config, self.machine,
                itemsize).values()) > CPU_SECONDS:
            fitting = fitting[:-1]
        if len(fitting) < min(MIN_DEFAULT_REQUESTS, len(self.requests)):
            self.folder = BUNDLED_MODEL
            self.config = ModelConfig.from_folder(self.folder)
            fitting = self.make_requests(self.workload)
        self.requests = fitting
        print(wrapped("chosen", f"for this machine: {self.folder.name}, {len(fitting)} requests "
                      "(--model and --num-prompts choose otherwise)"))

    def check_fits(self, requests: list[Request]) -> None:
        """Raises `ValueError` where a request is longer than `max_model_len`. The engine would find
        it as well, but only after it has made up its weights, a minute for eight billion."""
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        limit = self.options.get("max_model_len") or self.config.max_position_embeddings
        if longest > limit:
            raise ValueError(f"the longest request has {longest} tokens, prompt and output, and "
                             f"max_model_len is {limit}: lower --input-len or --output-len, or "
                             "choose another --workload or --model")

    def make_engine(self, requests: list[Request], **options) -> LLM:
        """A warm engine. options: what a way of measuring wants; what the user has `--set` wins.

        One or two short requests run through it first and pay for much that happens once: memory
        is touched for the first time, kernels are compiled. Shapes that only long prompts have stay
        cold.
        """
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        usual = dict(dtype=self.dtype, skip_tokenizer_init=True,
                     max_model_len=min(max(longest, 4096), self.config.max_position_embeddings))
        if not any((*self.folder.glob("*.safetensors"), *self.folder.glob("pytorch_model*.bin"))):
            usual["load_format"] = "dummy"
        start = time.perf_counter()
        llm = LLM(self.folder, **usual | options | self.options)
        warm_up, _ = serve(llm, [Request(r.prompt[:64], 4) for r in requests[:2]], self.temperature)
        if warm_up["interrupted"]:
            llm.shutdown()
            raise KeyboardInterrupt
        self.startup_seconds = time.perf_counter() - start
        return llm

    @property
    def temperature(self) -> float:
        """0.6 for the community workload, which samples at that. All else is greedy, and cheaper:
        also arrivals and the ladder, whose requests are others, and whatever runs beside peers."""
        args = self.args
        if args.temperature is not None:
            return args.temperature
        elsewhere = args.against or args.ladder or args.arrivals
        return 0.6 if self.on_gpu and args.workload == "batch" and not elsewhere else 0.0

    # ------------------------------------------------------- ways to measure

    def throughput(self) -> dict:
        """One run, with everything there is to say about it."""
        with self.make_engine(self.requests) as llm:
            result = self.describe(llm)
            print_description(result)
            trace = self.start_trace(llm)
            result |= self.run(llm, self.requests, self.workload)
            print_result(result)
            if trace is not None:
                trace.close()  # here: a profile's steps are no part of the run
            if self.args.profile and not result["interrupted"]:
                profile(llm, self.requests, PROFILED_STEPS, self.args.profile)
                print(f"wrote {self.args.profile}")
        return result

    def start_trace(self, llm: LLM) -> Trace | None:
        """Record from now on, so that the page shows the run and not the warm-up before it."""
        if not self.args.step_trace:
            return None
        llm.reset_prefix_cache()  # the run would do it, and its blocks would be seen to go
        trace = Trace(self.args.step_trace, llm.scheduler, Path(llm.config.model).name, tqdm.write)
        llm.add(trace)
        return trace

    def run(self, llm: LLM, requests: list[Request], label: str) -> dict:
        """One run, and its minimum on this machine. The minimum is that of the steps which the
        scheduler really made: the share is about their execution, and what other steps would have
        taken is what the ladder shows. With arrivals over time it falls while nobody asks.

        The machine is measured a second time behind the run, but for a GPU, whose memory may be
        full.
        """
        run, meter = serve(llm, requests, self.temperature, label, time=True)
        peak = peak_memory(self.device)  # before the measurement takes some
        if not self.on_gpu and not run["interrupted"]:
            try:
                self.machine = self.machine.or_better(
                    roofline.measure(self.device, getattr(torch, self.dtype)))
            except KeyboardInterrupt:  # the run is done, and is printed
                run["interrupted"] = True
        steps = [Work.of(step, self.config.windows) for step in meter.steps]
        ideal = roofline.run_seconds(steps, self.config, self.machine,
                                     getattr(torch, self.dtype).itemsize)
        return dict(
            result=run, interrupted=run.pop("interrupted"), roofline=dict(
                num_steps=len(steps), minimum_seconds=ideal,
                share=sum(ideal.values()) / run["seconds"],
                measured_seconds=meter.parts(run["seconds"]),
                bandwidth=self.machine.bandwidth, matrix_rate=self.machine.matrix_rate),
            peak_memory_bytes=peak)

    def run_beside_peers(self, llm: LLM, requests: list[Request], label: str) -> dict:
        """The same in a long measurement: what the machine can do has changed since the start."""
        self.machine = roofline.measure(self.device, getattr(torch, self.dtype))
        found = self.run(llm, requests, label)
        return dict(found["result"], interrupted=found["interrupted"], roofline=found["roofline"])

    def ladder(self) -> dict:
        """Ideas switched on one after the other, always on the same requests.

        The first row is this engine with everything off. Each row keeps what came before; chunked
        prefill comes with the smaller budget that it is for. An option given with `--set` wins in
        all rows. On a CPU few sequences run, and from chunked prefill on the budget is small: with
        room for all prompts in a step there would be nothing to schedule, and nothing to see.

        All rows are run in turns, `rounds` times, and of each the run in the middle counts: some
        ideas bring less than a machine that others use as well loses in a bad minute.
        """
        requests = self.requests
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        options = dict(max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False,
                       enable_chunked_prefill=False, max_num_batched_tokens=max(longest, 2048),
                       max_model_len=longest, kernels="torch", enforce_eager=True)
        rungs = [
            ("one request at a time", {}),
            ("+ continuous batching", dict(max_num_seqs=64 if self.on_gpu else 6)),
            ("+ chunked prefill", dict(enable_chunked_prefill=True,
                                       max_num_batched_tokens=2048 if self.on_gpu else 192)),
            ("+ prefix caching", dict(enable_prefix_caching=True))]
        rungs.append(("+ fused kernels" if self.on_gpu else "+ compiled kernels",
                      dict(kernels="auto")))
        if self.on_gpu:  # what is no kernel of ours can't be recorded in a graph
            rungs += [("+ CUDA graphs", dict(enforce_eager=False)),
                      ("+ overlap", dict(async_scheduling=True))]
        rounds, runs = self.args.rounds, {name: [] for name, _ in rungs}
        results = dict(self.describe(), rounds=rounds)
        print_description(results)
        try:
            for turn in range(rounds):
                print_rungs_head(f"round {turn + 1} of {rounds}")
                switched = dict(options)
                for name, change in rungs:
                    switched |= change
                    with self.make_engine(requests, **switched) as llm:
                        run, _ = serve(llm, requests, self.temperature, name)
                    if run["interrupted"]:
                        raise KeyboardInterrupt
                    runs[name].append(dict(run, name=name))
                    print_rung(runs[name][-1])
        except KeyboardInterrupt:  # in a row, or while the next one's engine is made
            return results | dict(interrupted=True, rows=middle_of_each(runs))
        results["rows"] = middle_of_each(runs)
        if rounds > 1:
            print_rungs_head(f"medians of {rounds}")
            for row in results["rows"]:
                print_rung(row)
        return results

    def against(self, names: tuple[str, ...] = ()) -> dict:
        """nanoserve and its peers take turns, round by round, on the same token ids. names: of
        workloads, where it is about more than the one that was asked for.

        All engines stay loaded, so that a turn is a run and not a start-up: memory has to hold all
        of them.
        """
        requests = {name: self.make_requests(name) for name in names} or {
            self.workload: self.requests}
        # On a GPU engines that take turns lie in the same memory.
        options = dict(gpu_memory_utilization=0.45) if self.on_gpu else {}
        with self.make_engine(self.requests, **options) as llm, ExitStack() as stack:
            result = self.describe(llm) | dict(workloads=[
                describe_requests(name, asked) for name, asked in requests.items()])
            print_description(result)
            peers = [stack.enter_context(self.start_peer(peer)) for peer in self.args.against]
            run = partial(self.run_beside_peers, llm)
            return result | compare(run, peers, requests, self.args.rounds,
                                    self.args.min_seconds or 0)

    def start_peer(self, peer: str) -> "Peer":
        """A peer in a process of its own. It is told folder, dtype, threads and context length;
        what it makes of them, and its other settings, are its script's (benchmarks/engines)."""
        longest = max(len(request.prompt) + request.max_tokens for request in self.requests)
        return Peer(peer, [
            *(PEERS.get(peer) or shlex.split(peer)), "--model", str(self.folder), "--dtype",
            self.dtype, "--threads", str(torch.get_num_threads()), "--max-model-len",
            str(min(max(longest, 4096), self.config.max_position_embeddings))])

    def describe(self, llm: LLM | None = None) -> dict:
        """On what: machine, model, workload, and the engine's main settings."""
        result = dict(
            machine=dict(describe_machine(self.device), bandwidth=self.machine.bandwidth,
                         matrix_rate=self.machine.matrix_rate),
            model=dict(name=self.folder.name, dtype=self.dtype),
            workload=describe_requests(self.workload, self.requests, self.args.request_rate))
        if llm is not None:
            c = llm.config
            result["engine"] = dict(
                attention=c.kernels, graphs=llm.runner.graphs is not None, overlap=llm.depth,
                num_kv_blocks=llm.scheduler.blocks.num_blocks, block_size=c.block_size,
                max_num_seqs=c.max_num_seqs, max_num_batched_tokens=c.max_num_batched_tokens,
                max_model_len=c.max_model_len, startup_seconds=self.startup_seconds)
        return result

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc_info) -> None:
        self.temporary.cleanup()


def parse_options(settings: list[str]) -> dict:
    """["block_size=32", "kernels=torch"] -> what `LLM` takes. Values are Python literals; anything
    else is a string. Raises `ValueError` for what is not OPTION=VALUE, what the engine doesn't
    have or can't take, and what the roofline and peers must know, too, and has its own option."""
    options = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(f"--set {setting}: write OPTION=VALUE")
        if name in OWN_OPTIONS:
            raise ValueError(f"--set {setting}: write {OWN_OPTIONS[name]} {text}")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError):
            options[name] = text
    if unknown := sorted(set(options) - {field.name for field in fields(EngineArgs)}):
        raise ValueError(f"--set: the engine has no option {', '.join(unknown)}")
    EngineArgs(model="checked here, before anything is measured", **options)
    return options


def middle_of_each(runs: dict[str, list[dict]]) -> list[dict]:
    """Of each row's runs the one in the middle by its seconds, of two in the middle the faster."""
    return [sorted(some, key=lambda run: run["seconds"])[(len(some) - 1) // 2]
            for some in runs.values() if some]


# ----------------------------------------------------------- what is printed


def describe_machine(device: torch.device) -> dict:
    """The hardware and what runs on it. A CPU's name is that of /proc/cpuinfo where there is one,
    with what multiplies matrices: Python's own is `x86_64` on most Linux machines."""
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines()
                  if line.startswith("model name")]
        name = f"{(models or [name])[0]} ({features()})"
    return dict(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", cpu=name,
        num_cores=os.cpu_count(), threads=torch.get_num_threads(), torch=torch.__version__,
        python=platform.python_version(), system=platform.system(), date=time.strftime("%Y-%m-%d"))


def describe_requests(name: str, requests: list[Request], rate: float | None = None) -> dict:
    """How much there is to do. rate: Poisson arrivals a second; None for all at once, or for
    the times of a file of arrivals."""
    return dict(name=name, num_requests=len(requests),
                num_prompt_tokens=sum(len(request.prompt) for request in requests),
                num_output_tokens=sum(request.max_tokens for request in requests),
                request_rate=rate)


def print_rungs_head(title: str) -> None:
    print(f"{title:23}{'seconds':>9}{'tok/s':>9}{'TTFT s':>9}{'between tokens: mean':>22}"
          f"{'p99':>8}")


def print_rung(row: dict) -> None:
    """One row of the ladder."""
    gap = row["inter_token"] or dict(mean=math.nan, p99=math.nan)  # of single tokens
    print(f"{row['name']:23}{row['seconds']:9.2f}{row['output_tok_s']:9.1f}"
          f"{row['ttft']['mean']:9.2f}{1e3 * gap['mean']:19.1f} ms{1e3 * gap['p99']:8.1f}")


def print_description(result: dict) -> None:
    """Print, before the run, what is being measured. The engine's line is left out on the ladder,
    where each row has another."""
    machine, model = result["machine"], result["model"]
    on = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    print(wrapped("machine", f"{on}{machine['cpu']}, {machine['num_cores']} cores, "
                  f"{machine['threads']} threads | torch {machine['torch']}, Python "
                  f"{machine['python']}"))
    print(wrapped("limits", f"copy {machine['bandwidth'] / 1e9:,.1f} GB/s, matrix product "
                  f"{machine['matrix_rate'] / 1e9:,.0f} GFLOP/s in {model['dtype']}, "
                  "both measured just now"))
    if engine := result.get("engine"):
        graphs = "graphs" if engine["graphs"] else "no graphs"
        print(wrapped("engine", f"{model['name']}, {model['dtype']} | {engine['attention']} "
                      f"attention, {graphs}, overlap {engine['overlap']} | "
                      f"{engine['num_kv_blocks']:,} KV blocks of {engine['block_size']} | up to "
                      f"{engine['max_num_batched_tokens']:,} tokens and {engine['max_num_seqs']} "
                      f"sequences a step | warm after {engine['startup_seconds']:.1f} s"))
    for load in result.get("workloads", [result["workload"]]):
        arrivals = f", {load['request_rate']} a second" if load["request_rate"] else ""
        print(wrapped("workload", f"{load['name']}: {load['num_requests']} requests, "
                      f"{load['num_prompt_tokens']:,} prompt and {load['num_output_tokens']:,} "
                      f"output tokens{arrivals}"))
    print()


def print_result(result: dict) -> None:
    """After the run. The first line is word for word vLLM's, for scripts that look for it; then
    latencies; then seconds by part, the hardware's minimum beside wall time (with waiting for
    arrivals). Sampling and host have no minimum. On a GPU the device's parts have no time: how long
    it is waited for is all that is seen of them. Last the host's part of a step, and memory."""
    run, line = result["result"], result["roofline"]
    print(f"Throughput: {run['requests_s']:.2f} requests/s, {run['total_tok_s']:.2f} total "
          f"tokens/s, {run['output_tok_s']:.2f} output tokens/s\n")
    print(f"{'seconds':24}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}")
    for title, key in (("time to first token", "ttft"), ("between two tokens", "inter_token"),
                       ("end to end", "end_to_end")):
        if run[key]:
            print(f"{title:24}" + "".join(f"{value:9.3f}" for value in run[key].values()))
    steps = f"{line['num_steps']:,} steps"
    print(f"\n{steps:24}{'at least':>9}{'measured':>10}")
    names = dict(linear="linear layers", head="LM head", attention="attention",
                 other="small operators", sampling="sampling", host="host")
    measured, ideal = line["measured_seconds"], line["minimum_seconds"]
    for part in (*names, "waiting for the device"):
        if part in measured or part in ideal:
            least, took = (f"{found[part]:.3f}" if part in found else "" for found in
                           (ideal, measured))
            print(f"{names.get(part, part):24}{least:>9}{took:>10}")
    print(f"{'all':24}{sum(ideal.values()):9.3f}{run['seconds']:10.3f}\n")
    print(wrapped("share", f"{line['share']:.1%} of the roofline "
                  f"({line['bandwidth'] / 1e9:,.1f} GB/s and {line['matrix_rate'] / 1e9:,.0f} "
                  "GFLOP/s, the best that was measured)"))
    host = (f"{name} {1e6 * measured[name] / max(line['num_steps'], 1):.0f}"
            for name in ("schedule", "build", "update"))
    print(wrapped("host", f"{', '.join(host)} µs a step"))
    print(wrapped("memory", ", ".join(
        f"{where} {peak / 2 ** 30:.2f} GB at most" for where, peak in
        result["peak_memory_bytes"].items())))


if __name__ == "__main__":
    with command():
        status = main()
    sys.exit(status)
