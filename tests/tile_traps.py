"""A plugin for pytest: matrix tiles for a CPU that has none (tile_traps.cpp)."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    made = Path(folder, "tile_traps.so")
    subprocess.run(["g++", "-O2", "-march=native", "-Wall", "-Wextra", "-Werror", "-shared",
                    "-fPIC", str(Path(__file__).with_suffix(".cpp")), "-o", str(made)], check=True)
    TRAPS = ctypes.CDLL(str(made))
TRAPS.start()


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"traps: {TRAPS.count_products()} products, "
                                f"{TRAPS.count_borrowed()} threads without their own shape")
