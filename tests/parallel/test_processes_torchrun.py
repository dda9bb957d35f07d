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


def test_a_rank_takes_its_own_gpu_before_it_tries_kernels(monkeypatch):
    """Not where there are too few, and not for an engine that this rank has for itself."""
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    take_gpu(2, "cuda")
    with pytest.raises(ValueError, match="3 ranks need 3 GPUs.*sees 2.*tensor_parallel_size"):
        take_gpu(3, "cuda")
    for name, value in (("RANK", 3), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    take_gpu(4, "cpu")
    take_gpu(1, "cuda")
    assert not made
    take_gpu(4, "cuda")
    assert made == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 ranks need 4 GPUs"):
        take_gpu(4, "cuda")
