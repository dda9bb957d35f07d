"""docs/lora.md tells the truth: its example prints what is shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")


def test_one_prompt_two_voices_one_batch():
    program = re.search(r"^```python\n(.*?)^```", PAGE, re.S | re.M)[1]
    shown = re.search(r"printed by the example above -->\n```\n(.*?)^```", PAGE, re.S | re.M)[1]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NANOSERVE_CHECK": ""}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env,
                            capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert result.stdout == shown
