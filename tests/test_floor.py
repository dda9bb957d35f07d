"""`pytest -m floor` runs without torch: who changes the scheduler has an answer at once.

Not part of the floor itself, which would collect everything twice.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLLECT = """
import sys
import pytest

failed = pytest.main(["-m", "floor", "-n", "0", "--collect-only"])
heavy = {"torch", "transformers", "tokenizers", "triton"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else failed)
"""


def test_the_floor_imports_no_torch():
    """Neither conftest nor a collected file does. What a test imports when it runs is looked at
    behind each test of such a run, by a fixture."""
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_scheduler", "test_block_manager", "test_model_config"):
        assert f"{name}.py::" in done.stdout
