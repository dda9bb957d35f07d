"""The package's files by name, and code in a process of its own, which has imported nothing yet."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanoserve"
ANNEXES = ("assets", "extras", "server", "tools")
# "scheduler", or "device/kernels": all but what only makes a folder a package, or it a command.
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix()
               for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__"))


def room_of(name: str) -> str:
    """The folder of a file; "" of one that stands in the spine."""
    return name.rpartition("/")[0]


CORE = [name for name in FILES if room_of(name) not in ANNEXES]


def modules(names: list[str]) -> list[str]:
    """Dotted names, for `import`."""
    return ["nanoserve." + name.replace("/", ".") for name in names]


def run(code: str, folder: Path = PACKAGE.parent) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
