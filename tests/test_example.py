"""example.py, as a newcomer runs it: Ctrl-C, and the run that `--trace` records."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time

from clean_process import PACKAGE, needs_extras

EXAMPLE = PACKAGE.parent / "example.py"


@needs_extras
def test_ctrl_c_ends_it_in_silence():
    """While it generates: no traceback, and the exit status that a shell expects."""
    example = subprocess.Popen(
        [sys.executable, EXAMPLE], stderr=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    for line in example.stderr:
        if "KV cache" in line:  # the engine is ready
            break
    time.sleep(0.1)
    example.send_signal(signal.SIGINT)
    out, rest = example.communicate(timeout=60)
    assert example.returncode == 130 and out == ""
    bar = "Processed prompts"
    assert [line for line in rest.splitlines() if line and bar not in line] == []


@needs_extras
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


@needs_extras
def test_the_traced_run_shows_its_four_requests(tmp_path, monkeypatch, capsys):
    """In this process, which has loaded what it needs."""
    from witness import read

    path = tmp_path / "run.html"
    monkeypatch.setattr(sys, "argv", ["example.py", "--trace", str(path)])
    monkeypatch.setenv("NANOSERVE_CHECK", "")  # as a newcomer runs it
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr()
    assert f"requests in {path}" in said.err
    prompts = runpy.run_path(str(EXAMPLE))["PROMPTS"]
    starts = [said.out.index(f"\n{prompt}") for prompt in prompts]
    assert starts == sorted(starts)
    assert re.search(r"[.!?]['\"]?\n\n\d+ tokens of 4 stories at once in ", said.out)
    stream = read(path)
    assert len(stream["requests"]) == 4 and len(stream["frames"]) > 50
