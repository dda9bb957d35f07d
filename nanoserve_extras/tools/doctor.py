"""A check of this machine: hardware, correctness and speed, as a table for reports.

    nanoserve doctor                  with the bundled model's shapes
    nanoserve doctor Qwen/Qwen3-0.6B  or those of another; nothing but its config.json is read (of a
                                      GGUF file all, once: it is converted)

    machine      GPU, driver, CUDA of torch; compiler and headers; memory; features of the CPU
    functions    each of the backend that an engine would take, beside `ops`: self_test.py
    times        bytes that are read a second, and their share of this machine's own copy
    ranks        on several GPUs one all_reduce for each pair

The exit status is 0 if all functions that an engine would use here are right, else 1. `nanoserve
verify` compares texts, and `python -m benchmarks.gpu --quick` measures a whole model's speed.
"""

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nanoserve import build
from nanoserve.config import EngineConfig
from nanoserve.device import current, fit_dtype, free_cpu_memory
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.self_test import TOLERANCE, Shapes, compare, fit_kernels, load_backend, trials
from nanoserve_extras import choose
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.device import pick_device, why_unusable
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.quantization.quantization import kind_of_weight
from nanoserve_extras.quantization.quantized_linear import GROUP, round_groups, round_rows

Finding = tuple[str, str, str]  # a name, the result, a remark
GB, MB = 2 ** 30, 2 ** 20
FEATURES = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd",
            "bf16", "sve"}  # those that matrices are multiplied with
# Two ranks' start, which compares collectives. In a process: what hangs there can be ended.
# The second rank does nothing (`id`).
PAIR = ("from nanoserve.parallel import start_ranks; "
        "from nanoserve_extras.base.ranks import WatchedRanks; "
        "start_ranks(2, 'cuda', id, WatchedRanks).close(); print('right')")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nanoserve doctor", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    try:
        asked = EngineArgs(model=args.model, device=args.device)
        folder = find_folder(args.model, weights=False)
        asked, model, _ = choose(asked, folder)
        config = asked.resolved(pick_device(asked.device), model)
        config, said = fit_dtype(config, asked, model)
        config, more = fit_kernels(config, asked)
    except ValueError as error:
        print(f"nanoserve doctor: {error}", file=sys.stderr)
        return 1
    rows = machine(config) + [("falls back", sentence, "slower") for sentence in said + more]
    backend, shapes = load_backend(config.kernels), Shapes.of(config, model)
    with current(shapes.device):
        for part, given in ((functions, backend), (quantised, kind_of_weight(config.kernels)),
                            (times, backend)):
            try:
                rows += part(given, shapes)
            except Exception as error:  # memory ran out, or a kernel has broken the device
                rows.append((part.__name__, f"{type(error).__name__}: {error!s:.150}", "WRONG"))
    rows += pairs(torch.cuda.device_count())
    about = f"{Path(args.model).name}, {config.dtype}, kernels={config.kernels!r}"
    for row in [(about, "", ""), ("---",) * 3, *rows]:
        print("| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in row) + " |")
    return int(any(verdict == "WRONG" for *_, verdict in rows))


def machine(config: EngineConfig) -> list[Finding]:
    """The machine's hardware and software, with remarks on missing parts, as rows of a table."""
    cuda, include = torch.version.cuda, Path(sysconfig.get_path("include"), "Python.h")
    wsl = " (WSL)" if "microsoft" in platform.release().lower() else ""
    rows = [("system", f"{platform.system()} {platform.release()}{wsl}, Python "
             f"{platform.python_version()}", ""),
            ("torch", f"{torch.__version__}, CUDA {cuda}, {torch.get_num_threads()} threads", ""),
            ("CPU", f"{platform.machine()}, {os.cpu_count()} cores, {features()}", "")]
    if "amx_bf16" in features():
        rows.append(("matrix tiles", f"NANOSERVE_TILES={os.environ.get('NANOSERVE_TILES', '')}",
                     "0 leaves them alone; docs/devices.md has the commands that compare"))
    try:
        compiler = build.run([*build.find_compiler(), "--version"]).splitlines()[0]
        rows.append(("C++ compiler", compiler, ""))
    except build.BuildError as error:
        rows.append(("C++ compiler", str(error), "missing"))
    if config.on_gpu:
        rows.append(("Python.h", str(include), "" if include.exists() else
                     "missing: apt install python3-dev"))
    reason = why_unusable("auto")
    if reason:
        rows.append(("GPU", reason, "unused"))
    for number in range(torch.cuda.device_count() if reason is None else 0):
        major, minor = torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        rows.append((f"cuda:{number}", f"{torch.cuda.get_device_name(number)}, {major}.{minor}, "
                     f"{free / GB:.1f} of {total / GB:.1f} GB free", ""))
    for query in ("--query-gpu=driver_version", "--query-compute-apps=pid,name,used_memory"):
        if shutil.which("nvidia-smi") and (found := printed(
                ["nvidia-smi", query, "--format=csv,noheader"])):
            rows.append((query.partition("=")[2], found, ""))
    rows.append(("memory", f"{free_cpu_memory() / GB:.1f} GB free", ""))
    if Path("/dev/shm").exists():
        rows.append(("/dev/shm", f"{shutil.disk_usage('/dev/shm').free / GB:.2f} GB free", ""))
    kept = build.cache_folder()
    return [*rows, ("cache folder", str(kept), "" if kept else "nothing is kept between starts")]


def features() -> str:
    """The CPU's features for matrix products."""
    info = Path("/proc/cpuinfo")
    return " ".join(sorted(FEATURES & set(info.read_text().split() if info.exists() else ())))


def printed(command: list[str], seconds: float = 20, **environment: str) -> str:
    """The output of a command, or the reason why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds,
                              env=os.environ | environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout if done.returncode == 0 else done.stderr[-300:]).strip()


def functions(backend, shapes: Shapes) -> list[Finding]:
    """Check the functions for the model's shapes, then those that other models use."""
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    others = shapes._replace(is_int8=True, windows=(None, 100), num_experts=8, softcap=30.0,
                             activation="gelu_tanh")
    for one in (shapes, others):
        for names, (apart, error) in trials(backend, one).items():
            before, first_error = found.get(names, (0.0, ""))
            found[names] = max(before, apart), first_error or error
    return [verdict(", ".join(names), *outcome) for names, outcome in found.items()]


def verdict(name: str, apart: float, error: str) -> Finding:
    return name, error or f"relative error {apart:.1e}", "WRONG" if error else ""


def quantised(kind: type, shapes: Shapes) -> list[Finding]:
    """Compare products with 8-bit and 4-bit weights with those of the dequantised weights."""
    weight, x = (shapes.numbers(rows, 256) for rows in (136, 9))
    tolerance = max(TOLERANCE[shapes.dtype], 1e-4)  # a CPU rounds x to 16 bits

    def product(name: str, size: int, meant) -> Iterator[tuple]:
        yield name, kind.of(weight, size).linear(x, None), x.double() @ meant[:].double().T

    return [verdict(name, *compare([name], product(name, size, meant), tolerance))
            for name, size, meant in (("int8", 0, round_rows(weight)),
                                      ("int4", GROUP, round_groups(weight)))]


def times(backend, shapes: Shapes) -> list[Finding]:
    """One row's product, which reads its weight, beside a copy, which reads and writes; and the
    flops of many rows'."""
    device = shapes.device
    size = GB if device.type == "cuda" else 256 * MB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / seconds(lambda: target.copy_(source), device)
    outputs = size // 4 // (shapes.hidden_size * shapes.dtype.itemsize)
    packed = [backend.prepack(shapes.numbers(outputs, shapes.hidden_size))
              for _ in "abc"]
    x = shapes.numbers(1, shapes.hidden_size)
    read = 3 * outputs * shapes.hidden_size * shapes.dtype.itemsize / seconds(
        lambda: [backend.linear(x, one) for one in packed], device)
    many = shapes.numbers(512, shapes.hidden_size)
    flops = 2 * many.numel() * outputs / seconds(lambda: backend.linear(many, packed[0]), device)
    return [("copy", f"{copy / 1e9:.1f} GB/s", ""),
            ("one row's product", f"{read / 1e9:.1f} GB/s, {read / copy:.0%} of the copy's", ""),
            ("512 rows' product", f"{flops / 1e9:,.0f} GFLOP/s", "")]


def seconds(call: Callable, device: torch.device) -> float:
    """The best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def pairs(count: int) -> list[Finding]:
    """One start for each two of so many GPUs, by the names that this process knows them by."""
    rows, names = [], os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) >= count else [str(number) for number in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        told = printed([sys.executable, "-c", PAIR], 60,
                       CUDA_VISIBLE_DEVICES=f"{names[a]},{names[b]}")
        is_right = "right" in told.splitlines()  # NCCL may print lines of its own
        rows.append((f"all_reduce of {a} and {b}", "right" if is_right else told,
                     "" if is_right else "WRONG"))
    return rows
