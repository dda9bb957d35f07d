"""Code in a process of its own, which has imported nothing yet."""

import subprocess
import sys
from pathlib import Path

from nanoserve.tools.house import PACKAGE


def modules(names: list[str]) -> list[str]:
    """Dotted names, for `import`."""
    return ["nanoserve." + name.replace("/", ".") for name in names]


def run(code: str, folder: Path = PACKAGE.parent) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
