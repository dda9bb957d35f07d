"""Ranks that somebody else has started: torchrun, a batch system, or a user by hand."""

import sys

import pytest
import torch
from process_tools import Script, looks_into_proc

from nanoserve.parallel import take_gpu

pytestmark = [looks_into_proc, pytest.mark.usefixtures("leave_nobody")]


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
    """The same script: rank 0 goes on behind the constructor, the other serves in it and exits."""
    script = Script(qwen3, tmp_path / "it", SECOND_ENGINE.format(folder=str(qwen3)),
                    command=torchrun("--standalone", "--nproc-per-node", "2")).end()
    script.out, _, last = script.out.rstrip("\n").rpartition("\n")
    assert "have served an engine already" in last, script.err
    script.out += "\n"
    script.check(expected(), 0)
    assert "died" not in script.err


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
