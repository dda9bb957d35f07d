"""What there is: this machine, the commands, the instruments, and the first lines to type.

    python -m nanoserve

A newcomer who has installed the package has no folder with a README before them. This page tells
what would run here (device and kernels, found as an engine finds them), which versions are
installed, and which commands there are, with the first sentence of each one's docstring. So a new
instrument is listed by itself.

Nothing is loaded or compiled for it: whether a C++ compiler is there is looked up, and the engine
compiles on its first start. Not known here: models.
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from textwrap import fill

import torch

import nanoserve
from nanoserve.__main__ import COMMANDS
from nanoserve.checkpoint.hub import BUNDLED
from nanoserve.config import EngineConfig
from nanoserve.device.build import BuildError, find_compiler, find_openmp
from nanoserve.device.choice import fit_to_device, pick_device
from nanoserve.tools.house import PACKAGE, read_file, read_house

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")
WIDTH, INDENT = 96, " " * 6
SNIPPET = """\
from nanoserve import LLM, SamplingParams
llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


def machine() -> list[str]:
    """The device and the kernels that an engine without options would take, and why."""
    if pick_device("auto") == "cuda":
        wanted = EngineConfig(model="any", device="cuda", kernels="triton", dtype="bfloat16")
        config, said = fit_to_device(wanted, EngineConfig(model="any"))
        return [f"device cuda ({torch.cuda.get_device_name()}), kernels={config.kernels!r}", *said]
    here = f"device cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    try:
        compiler, _ = find_compiler(), find_openmp()
    except BuildError as error:
        return [f"{here}, kernels='onednn', which is slower than 'cpu':", str(error)]
    return [f"{here}, kernels='cpu', which {compiler[0]} compiles once, on the first start"]


def versions() -> str:
    """Of Python, and of the packages that decide what runs."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def commands() -> list[tuple[str, str]]:
    """Each command with what its docstring says first: commands, instruments, scripts of a clone.
    Commands whose annex was deleted are left out."""
    rows = []
    for name, module in COMMANDS.items():
        path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        if path.exists():
            rows.append((f"python -m nanoserve {name}", read_file(path).teaches))
    for file in read_house():
        lines = (PACKAGE / f"{file.name}.py").read_text(encoding="utf-8").splitlines()
        if file.room == "tools" and 'if __name__ == "__main__":' in lines:
            rows.append((f"python -m nanoserve.{file.name.replace('/', '.')}", file.teaches))
    for name in ("example.py", "bench.py"):
        path = PACKAGE.parent / name
        if path.exists():  # in a clone: a wheel has the package alone
            rows.append((f"python {name}", read_file(path, PACKAGE.parent).teaches))
    return rows


def bundled_models() -> str:
    """Their names, which every option takes that takes a model."""
    return ", ".join(sorted(path.parent.name for path in BUNDLED.glob("*/config.json")))


def page() -> str:
    """All of it, to be printed at once."""
    lines = [f"nanoserve {nanoserve.__version__}, {PACKAGE}", "", "Here"]
    lines += [f"  {line}" for line in machine()]
    lines += [f"  {versions()}", f"  bundled models: {bundled_models() or 'none'}"]
    lines += ["", "Commands (--help tells more)"]
    for command, teaches in commands():
        lines += [f"  {command}", fill(teaches, WIDTH, initial_indent=INDENT,
                                       subsequent_indent=INDENT)]
    lines += ["", "In Python"]
    return "\n".join(lines + [f"  {line}" for line in SNIPPET.splitlines()])


def main(argv: list[str] | None = None) -> int:
    """Print the page; returns the exit code."""
    if argv:
        print(f"nanoserve about takes no arguments, got {' '.join(argv)}", file=sys.stderr)
        return 2
    print(page())
    return 0
