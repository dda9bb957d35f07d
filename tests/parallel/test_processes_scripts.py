"""A user's script: it needs no `__main__` guard, and ends as it would without ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tools import ROOT, Script, assert_gone, looks_into_proc, wait_for

pytestmark = [looks_into_proc, pytest.mark.usefixtures("leave_nobody")]
ENDINGS = {  # what a script ends with: its exit code, what it says last
    "an error behind a fork": (
        "if os.fork() == 0: sys.exit()\nos.wait()\nassert text() == tokens\n1 / 0", 1,
        "ZeroDivisionError"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9, "rank 0 died"),
}


def test_a_script_ends_and_so_do_its_ranks(qwen3, tmp_path, expected):
    """Without a `__main__` guard, from a file or from standard input; however it ends, its exit
    code is its own, and its ranks end with it. Two at a time: they don't meet. (One that falls
    off its end: the next test; one that shuts its engine down: test_processes_torchrun.py.)"""
    scripts = {name: Script(qwen3, tmp_path / name.replace(" ", "-"), ENDINGS[name][0],
                            by_stdin="fork" in name) for name in ENDINGS}
    for name, script in scripts.items():
        _, code, says = ENDINGS[name]
        script.end().check(expected(), code)
        assert "Traceback" not in script.err or says == "ZeroDivisionError", script.err
        assert says in script.err


def test_ctrl_c_in_generate(qwen3, tmp_path, expected):
    """It reaches all processes of a terminal, and is rank 0's business: the others go on, nothing
    is lost but the requests."""
    script = Script(qwen3, tmp_path / "it", """\
long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
print("generating", flush=True)
try:
    while True:
        llm.generate([[i + 1, 2, 3] for i in range(9)], long, use_tqdm=False)
except KeyboardInterrupt:
    blocks = llm.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks and not llm.requests
assert text() == tokens
""")
    script.out = script.line() + "\n"
    assert script.line() == "generating"
    time.sleep(0.5)
    script.signal_all(signal.SIGINT)
    script.end().check(expected(), 0)
    assert "died" not in script.err and "ends" not in script.err


@pytest.mark.parametrize("file, of", [
    ("cmdline", "run_child"), pytest.param("maps", "libtorch", marks=pytest.mark.full)],
                         ids=["its interpreter starts", "it imports torch"])
def test_ctrl_c_while_the_engine_starts(qwen3, tmp_path, file, of):
    """The child's interpreter is just starting, or importing torch, as /proc says."""
    script = Script(qwen3, tmp_path / "it")
    children = Path(f"/proc/{script.process.pid}/task/{script.process.pid}/children")

    def says(pid: str, file: str, of: str) -> bool:
        try:
            return of in Path(f"/proc/{pid}/{file}").read_text()
        except OSError:  # it was a compiler, which told its version
            return False

    def ranks() -> list[str]:
        return [pid for pid in children.read_text().split() if says(pid, "cmdline", "run_child")]

    wait_for(ranks, "a child is started", 60)
    [pid] = ranks()
    wait_for(lambda: says(pid, file, of), f"{of} is in {file}", 60)
    script.signal_all(signal.SIGINT)
    script.end()
    assert script.process.returncode == -signal.SIGINT and script.out == "", script.err
    assert_gone([int(pid)])
    assert "died" not in script.err


CTRL_C_IN_POPEN = """\
import os, signal, subprocess, sys, threading
from nanoserve.parallel import Ranks, Watch, kill

def interrupted_at(number, call):
    \"\"\"Ctrl-C comes at this line of Python's own subprocess module, if there are so many.\"\"\"
    lines = 0
    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename != subprocess.__file__:
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            signal.raise_signal(signal.SIGINT)
        return trace
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    assert lines < number, "the interrupt was lost"
    return False

for end in ("kill", "end"):
    number = 0
    again = True
    while again:
        number += 1
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
        watch = Watch(Ranks(0, 2), [child])
        if end == "end":
            child.kill()
        again = interrupted_at(number, {"end": lambda: watch.end(5),
                                        "kill": lambda: kill([child])}[end])
        killer = threading.Thread(target=kill, args=([child],), daemon=True)
        killer.start()
        killer.join(20)
        if killer.is_alive():
            print(f"{end}: Ctrl-C at line {number} hangs", flush=True)
            os._exit(1)
    assert number > 5, (end, number)
"""


def test_ctrl_c_in_the_middle_of_ending_a_child():
    """Between taking its own lock and promising to give it back, `Popen.poll` can be interrupted,
    and then who waits for the child waits for ever. Tried at every line."""
    run = subprocess.run([sys.executable, "-c", CTRL_C_IN_POPEN], capture_output=True, text=True,
                         timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stdout + run.stderr
