"""example.py, as a newcomer runs it: Ctrl-C, and the run that `--trace` records."""

import os
import signal
import subprocess
import sys
import time

from witness import read

from nanoserve.tools.house import PACKAGE

EXAMPLE = PACKAGE.parent / "example.py"


def test_ctrl_c_ends_in_one_line():
    """While it generates: a line, no traceback, and the exit status that a shell expects."""
    example = subprocess.Popen(
        [sys.executable, EXAMPLE, "--max-tokens", "400"], stderr=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    for line in example.stderr:
        if "KV cache" in line:  # the engine is ready
            break
    time.sleep(0.5)
    example.send_signal(signal.SIGINT)
    out, rest = example.communicate(timeout=60)
    assert example.returncode == 130 and out == ""
    bar = "Processed prompts"
    assert [line for line in rest.splitlines() if line and bar not in line] == ["interrupted"]


def test_ctrl_c_while_torch_is_loaded_ends_in_one_line():
    """Loading takes seconds, so that is where it is often pressed. What is loaded here is a module
    that catches whatever is raised in it, as there are some in the libraries."""
    code = ("import os, runpy, sys, time, types\n"
            "def load(name):\n"
            "    try: os.kill(os.getpid(), 2); time.sleep(60)\n"
            "    except BaseException: return print\n"
            "sys.modules['nanoserve'] = fake = types.ModuleType('nanoserve')\n"
            "fake.__getattr__ = load\n"
            f"sys.argv = ['example.py']; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_traced_run_has_something_to_look_at(tmp_path):
    """Beginnings that are found again, prompts in chunks, a preemption, and reasons to wait."""
    path = tmp_path / "run.html"
    done = subprocess.run([sys.executable, EXAMPLE, "--trace", path], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    stream = read(path)
    frames = stream["frames"]
    events = {kind: [value for frame in frames for value in frame.get(kind, [])] for kind in "hpxw"}
    assert stream["meta"]["num_blocks"] < 30 and len(stream["requests"]) >= 6
    assert len(events["h"]) >= 4 and len(events["p"]) >= 2
    chunks = [n for n, samples in zip(events["x"][2::4], events["x"][3::4], strict=True)
              if not samples]
    assert chunks
    said = " ".join(events["w"][1::2])
    for words in ("waits for blocks that", "has no seat", "needs "):
        assert words in said
    lengths = {value for frame in frames for value in frame.get("f", [])[2::3]}
    assert len(lengths) == len(stream["requests"]), "bars of one length are dull"
