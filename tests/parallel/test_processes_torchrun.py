"""Ranks that somebody else has started: torchrun, a batch system, or a user by hand."""

import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from process_tools import PATIENCE, Script, looks_into_proc

from nanoserve.processes import take_gpu

pytestmark = [looks_into_proc, pytest.mark.usefixtures("leave_nobody")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(*options: str) -> tuple[str, ...]:
    return sys.executable, "-m", "torch.distributed.run", *options


SECOND_ENGINE = """
llm.shutdown()
try:
    LLM({folder!r}, tensor_parallel_size=2)
except RuntimeError as error:
    print(error)
"""


def test_torchrun_on_one_machine(qwen3, tmp_path, expected):
    """The same script, in two stages (test_layer_plan.py has two ranks in each): rank 0 goes on
    behind the constructor, the other serves in it and exits."""
    script = Script(qwen3, tmp_path / "it", SECOND_ENGINE.format(folder=str(qwen3)),
                    setting="make = LLM; LLM = lambda folder, tensor_parallel_size, **options: "
                            "make(folder, pipeline_parallel_size=2, **options)",
                    command=torchrun("--standalone", "--nproc-per-node", "2")).end()
    script.out, _, last = script.out.rstrip("\n").rpartition("\n")
    assert "have served an engine already" in last, script.err
    script.out += "\n"
    script.check(expected(), 0)
    assert "died" not in script.err and "layers: 0 to 0, 1 to 2" in script.err


@pytest.mark.full
def test_torchrun_on_two_machines(qwen3, tmp_path, expected):
    """Both of them this one. Only the first prints, and holds Python's lock for longer than beats
    may be missed."""
    setting = "import ctypes, nanoserve.processes as p; p.HEARTBEAT_SECONDS = 0.2"
    ending = "ctypes.PyDLL(None).usleep(4_500_000); assert text() == tokens"
    port = str(free_port())
    machines = [Script(qwen3, tmp_path / str(i), ending, setting=setting, command=torchrun(
        "--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", "1", "--master-addr",
        "127.0.0.1", "--master-port", port)) for i in range(2)]
    for script in machines:
        script.end()
    machines[0].check(expected(), 0)
    assert machines[1].process.returncode == 0 and machines[1].out == "", machines[1].err


def started_by_hand(folder: Path, where: Path, ending: str, heartbeat: str) -> list[Script]:
    """Two ranks on their own, with the variables that torchrun or a batch system sets: there is
    nobody who would end the others, and the store is rank 0's."""
    port = str(free_port())
    return [Script(folder, where / str(i), ending, RANK=str(i), WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                   setting="import nanoserve.processes as p; p.GRACE_SECONDS = 1; "
                           f"p.HEARTBEAT_SECONDS = {heartbeat}")
            for i in range(2)]


@pytest.mark.full
def test_ranks_of_another_starter_end(qwen3, tmp_path, expected):
    """Rank 0 takes its store with it, which looked like its death to whoever counted up a heartbeat
    before it had heard the last word. (Of beats of 10 ms a busy machine skips any number.)"""
    beats = "0.01; p.MAX_MISSED_HEARTBEATS = 3000"
    ranks = [script.end() for script in started_by_hand(qwen3, tmp_path, "", beats)]
    ranks[0].check(expected(), 0)
    assert ranks[1].process.returncode == 0 and ranks[1].out == "", ranks[1].err
    assert "died" not in ranks[0].err + ranks[1].err


@pytest.mark.parametrize("how", ["killed", pytest.param("hangs", marks=pytest.mark.full)])
def test_a_rank_of_another_starter_dies(qwen3, tmp_path, expected, how):
    """They serve, and then one dies. A machine without power closes no connection, and neither does
    a process that hangs: the others waited for rank 0's store to answer. (Rank 0 counts the beats
    of the others, whoever has started them.)"""
    ranks = started_by_hand(qwen3, tmp_path, "print('idle', flush=True); time.sleep(1)\n"
                            "while True: text()", "0.2")
    assert ranks[0].line().startswith(str(expected())) and ranks[0].line() == "idle"
    ranks[0].signal_all(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    ranks[1].end(PATIENCE)
    ranks[0].signal_all(signal.SIGKILL)
    ranks[0].end()
    assert ranks[1].process.returncode == 1 and "rank 0 died" in ranks[1].err


@pytest.mark.parametrize("rank, size, taken", [(1, 2, [1]), (3, 4, []), (1, 1, [])])
def test_a_rank_takes_its_own_gpu_before_it_tries_kernels(monkeypatch, rank, size, taken):
    """Not where there are too few, and not for an engine that this rank has for itself."""
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    take_gpu(size, "cuda")
    assert not made  # not under torchrun
    for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    take_gpu(size, "cpu")
    take_gpu(size, "cuda")
    assert made == taken
