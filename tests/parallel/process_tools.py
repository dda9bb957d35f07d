"""Engines whose ranks are processes, users' scripts, and who is left of them."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams, parallel

looks_into_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(),
                                     reason="looks into /proc")
ROOT = Path(__file__).parent.parent.parent
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SMALL = dict(num_gpu_blocks_override=64, dtype="float32", device="cpu")
PATIENCE = 30  # seconds: what the others may take to notice a death, and to end


def state_of(pid: int) -> str:
    """The process's state by its letter, "" if there is none (left)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(condition, what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.05)


def assert_gone(pids: list[int]) -> None:
    """Ended and, if they were ours, reaped; an orphan may be left for init as a zombie."""
    wait_for(lambda: all(state_of(pid) in ("", "Z") for pid in pids), f"{pids} end")


def assert_closed(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def pids_of(llm: LLM) -> list[int]:
    return [child.pid for child in llm.runner.ranks.watch.children]


def run(llm: LLM, prompts=PROMPT, params=GREEDY) -> list:
    return llm.generate(prompts, params, use_tqdm=False)


def in_children(monkeypatch, code: str) -> None:
    """Run this in every child started from now on, before it does anything else."""
    monkeypatch.setattr(parallel, "CHILD", parallel.CHILD.replace("run_child()", f"{code}; "
                                                                  "run_child()"))


def hold_the_lock(seconds: float) -> None:
    """What a regular expression that backtracks does, and json.loads: no other thread runs."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


SCRIPT = """\
import os, signal, sys, time
from nanoserve import LLM, SamplingParams
{setting}
llm = LLM({folder!r}, tensor_parallel_size=2, num_gpu_blocks_override=64, skip_tokenizer_init=True)
params = SamplingParams(temperature=0, max_tokens={max_tokens})
text = lambda: llm.generate({prompt}, params, use_tqdm=False)[0].outputs[0].token_ids
tokens = text()
watch = llm.runner.ranks.watch
pids = [child.pid for child in watch.children]
for pid in ["self", *pids]:  # what is deleted already (tqdm's lock) can't be left over
    shared = [line for line in open(f"/proc/{{pid}}/maps") if " /dev/shm/" in line]
    assert all(line.rstrip().endswith("(deleted)") for line in shared), shared
print(tokens, pids, getattr(llm.runner.ranks.store, "port", None), flush=True)
del watch
{ending}
"""


class Script:
    """A script in a file of its own, run from another folder, in a session of its own (so that a
    signal may be sent to all its processes as a terminal does). Its ranks find no `__main__` guard,
    and a file in the current folder that must not be imported in place of Python's own."""

    started: list["Script"] = []

    def __init__(self, folder: Path, where: Path, ending: str = "", by_stdin: bool = False,
                 command: tuple[str, ...] = (sys.executable,), setting: str = "", **env: str):
        where.mkdir()
        (where / "app").mkdir()
        script = SCRIPT.format(folder=str(folder), max_tokens=MAX_TOKENS, prompt=PROMPT,
                               ending=ending, setting=setting)
        (where / "app" / "script.py").write_text(script)
        if not by_stdin and len(command) == 1:  # others import from here by themselves
            (where / "queue.py").write_text("raise RuntimeError('not yours')")
        self.process = subprocess.Popen(
            [*command, "-" if by_stdin else "app/script.py"], cwd=where, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | env)
        if by_stdin:
            self.process.stdin.write(script)
            self.process.stdin.close()
            self.process.stdin = None
        self.out = self.err = ""
        self.started.append(self)

    def signal_all(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def line(self) -> str:
        """Its next line on standard output."""
        return self.process.stdout.readline().rstrip()

    def end(self, seconds: float = 90) -> "Script":
        """Wait until it has ended, and everybody who could still write to its standard error."""
        try:
            out, self.err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            raise
        self.out += out
        return self

    def check(self, expected: list[int], code: int) -> None:
        """The right tokens and nothing else on its standard output, and nobody and nothing left."""
        assert self.process.returncode == code, self.err
        tokens, pids, port = re.fullmatch(r"\[(.*)\] \[(.*)\] (\w+)\n", self.out).groups()
        assert [int(token) for token in tokens.split(",")] == expected
        assert_gone([int(pid) for pid in pids.split(",") if pid])
        if port != "None":
            assert_closed(int(port))
