"""docs/scheduling.md: the same arrivals under each policy, as its commands print them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.floor
ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- printed by: python (.*?) -->\n```\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("command, shown", SHOWN, ids=["fcfs", "shortest", "priority"])
def test_the_arrivals_under_each_policy(command, shown):
    out = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True,
                         text=True, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    assert out.stdout == shown
