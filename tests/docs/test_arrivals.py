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


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * (1000 if unit == "s" else 1)


def test_what_is_said_about_them():
    """Four tenths off the mean and half more at p99; the urgent ones in a seventh of the time."""
    means, p99s = ({name: milliseconds(re.search(what + r" (.*?)[,|]", shown)[1].strip())
                    for name, (_, shown) in zip(["fcfs", "shortest"], SHOWN, strict=False)}
                   for what in ("TTFT mean", "p99"))
    assert 0.55 < means["shortest"] / means["fcfs"] < 0.65
    assert 1.4 < p99s["shortest"] / p99s["fcfs"] < 1.6
    urgent, others = (milliseconds(mean) for mean in re.findall(
        r"priority \d: .*?TTFT mean (.*?),", SHOWN[2][1]))
    assert 6.5 < means["fcfs"] / urgent < 7.5 and 1.03 < others / means["fcfs"] < 1.07
