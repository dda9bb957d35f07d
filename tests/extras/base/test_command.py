"""How a command ends: each in a process of its own, whose status and last words are compared."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanoserve_extras.base.command import command

pytestmark = pytest.mark.floor
ROOT = Path(__file__).parents[3]
CATCHES = """
import os, time
try: os.kill(os.getpid(), 2); time.sleep(60)
except BaseException: print("caught")
"""
LOADING = """
from nanoserve_extras.base.command import command
with command():
    import catches
"""
RUNNING = """
import os, time
from nanoserve_extras.base.command import command
with command():
    os.kill(os.getpid(), 2); time.sleep(60)
"""
BEHIND = """
import sys
from nanoserve_extras.base.command import command
with command():
    print("the last words of a command that ends itself")
    sys.exit(3)
"""


@pytest.mark.parametrize("code", [LOADING, RUNNING], ids=["loading", "running"])
def test_ctrl_c_ends_a_command_in_silence(code, tmp_path):
    """While libraries are loaded, some of which catch whatever is raised there; and later."""
    (tmp_path / "catches.py").write_text(CATCHES)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("words", [["-c", BEHIND], ["-m", "nanoserve"]], ids=["ours", "door"])
def test_a_reader_that_has_seen_enough_ends_a_command_in_silence(words):
    """`| head` left a traceback on the screen."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=theirs,
                          stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_command_without_standard_output_ends_well():
    """As a service may be started: it ended with an AttributeError."""
    done = subprocess.run(["sh", "-c", f"exec '{sys.executable}' -m nanoserve >&-"],
                          cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_leaves_the_handler_that_it_finds():
    """In a shell's background Ctrl-C is ignored, and stays so; in a thread nothing is tried."""
    for handler in (signal.SIG_IGN, signal.default_int_handler):
        before = signal.signal(signal.SIGINT, handler)
        try:
            with command():
                assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)
    seen = []

    def work() -> None:
        with command():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [signal.default_int_handler]
