"""Simulated arrivals of docs/api.md and docs/extras.md, as their commands print them."""

import re

import pytest
from pages import ROOT, block_after, read, rows_of, run

from nanoserve.config import POLICIES
from nanoserve_extras.trace.trace import Simulation, read_csv

pytestmark = pytest.mark.floor
PAGE = read("docs/api.md")


def printed(*options: str, page: str = PAGE, marker: str = "<!-- command -->") -> str:
    """By the page's command, with these options more."""
    return run(*block_after(page, marker).replace("\\\n", "").split()[1:], *options)


@pytest.mark.parametrize("policy", [
    *POLICIES, "course.orders:FeedbackQueue", "course.orders:FairShare"])
def test_the_arrivals_under_each_policy(policy):
    everybody, *groups = printed("--policy", policy).splitlines()
    found = [policy, *re.search(r"TTFT mean (.*?), p99 (.*?) \|.* (\d+) preemption",
                                everybody).groups()]
    for line in groups:
        p99, p50, share = re.search(r", p99 (.*?) \|.*TTFT p50 (.*?), (.*?) within", line).groups()
        found += [p50, p99, share]
    assert len(groups) == 2 and found in rows_of(PAGE)


def test_what_max_wait_brings():
    page = read("docs/extras.md")
    rows = [row for row in rows_of(page[page.index("<!-- visits -->"):]) if len(row) == 4][1:]
    assert len(rows) == 4
    for wait, *shown in rows:
        said = printed("--max-wait", wait, page=page, marker="<!-- visits -->")
        found = re.search(r"^(\S+) steps.* TTFT mean (.*?), p99 (.*?) \|", said)
        assert list(found.groups()) == shown


def test_what_is_found_of_the_hot_prefix():
    """The figure of the other rule is held in tests/course/test_second_chance.py."""
    run = Simulation(read_csv(ROOT / "docs" / "hot-prefix.csv"), 512, 320, 16, 16)
    run.finish()
    assert f"finds {re.search(r'prefix hits (.*?%)', run.summary())[1]} of all prompt" in PAGE
