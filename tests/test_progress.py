"""Bars and lines share standard error: on a terminal they don't collide, in a file there is no bar.

The oracle is a terminal of a few lines: what a reader sees when everything has been written.
"""

import os
import pty
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.floor

SCRIPT = """
from nanoserve.progress import prompts_bar, say
say("before the bar")
with prompts_bar(2, True) as bar:
    bar.mininterval = 0
    bar.update()
    say("in the middle", "and another line")
    bar.update()
say("behind the bar")
"""


def screen(written: str) -> list[str]:
    """What a terminal shows: a carriage return goes back to the line's start, to write over it."""
    lines, column = [""], 0
    for character in written:
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1:]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def run_on_a_terminal(script: str) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    child = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while some := os.read(ours, 4096):
            written += some
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    assert child.wait() == 0, written
    return written.decode()


def test_a_line_does_not_cut_through_a_bar():
    written = run_on_a_terminal(SCRIPT)
    assert "\r" in written  # or there was no bar at all
    before, middle, another, bar, behind = screen(written)
    assert before == "nanoserve: before the bar"
    assert (middle, another) == ("nanoserve: in the middle", "nanoserve: and another line")
    assert bar.startswith("Processed prompts: 100%|") and "2/2" in bar
    assert behind == "nanoserve: behind the bar"
