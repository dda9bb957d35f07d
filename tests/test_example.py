"""example.py, as a newcomer runs it: Ctrl-C, and the run that `--trace` records."""

import os
import signal
import subprocess
import sys
import time

from witness import read

from nanoserve.tools.house import PACKAGE

EXAMPLE = PACKAGE.parent / "example.py"


def test_ctrl_c_ends_it_in_silence():
    """While it generates: no traceback, and the exit status that a shell expects."""
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
    assert [line for line in rest.splitlines() if line and bar not in line] == []


def test_ctrl_c_while_torch_is_loaded_ends_it_in_silence():
    """Loading takes seconds, so that is where it is often pressed. Libraries may catch it."""
    example = subprocess.Popen([sys.executable, "-X", "importtime", EXAMPLE], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in example.stderr:
        if " torch." in line:  # one of hundreds of its modules is there
            break
    example.send_signal(signal.SIGINT)
    out, rest = example.communicate(timeout=60)
    assert example.returncode == 130 and out == "" and "Traceback" not in rest


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
