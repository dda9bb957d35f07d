"""The package's files by name, and code in a process of its own, which has imported nothing yet."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, EXTRAS = ROOT / "nanoserve", ROOT / "nanoserve_extras"
# The engine's tests run with the extras deleted, but for those that look at both.
needs_extras = pytest.mark.skipif(not EXTRAS.exists(), reason="nanoserve_extras was deleted")


def files_of(package: Path) -> list[str]:
    """As "scheduler" or "device/kernels". Left out is what only makes a folder a package, or a
    command."""
    return sorted(path.relative_to(package).with_suffix("").as_posix()
                  for path in package.rglob("*.py") if path.stem not in ("__init__", "__main__"))


FILES, EXTRA_FILES = files_of(PACKAGE), files_of(EXTRAS)


def room_of(name: str) -> str:
    """The folder of a file; "" of one that stands in the core."""
    return name.rpartition("/")[0]


def modules(names: list[str]) -> list[str]:
    """Dotted names, for `import`."""
    return ["nanoserve." + name.replace("/", ".") for name in names]


def run(code: str, folder: Path = ROOT) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
