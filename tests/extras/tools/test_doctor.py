"""`nanoserve doctor`: what it prints, and that it finds what is broken on purpose."""

from types import SimpleNamespace

import pytest
import torch

from nanoserve import build, ops
from nanoserve import self_test as trial
from nanoserve_extras.quantization.quantized_linear import TorchWeight
from nanoserve_extras.tools import doctor


@pytest.fixture
def small_times(monkeypatch):
    """What is timed is small; no GPU, and none that torch can't see."""
    monkeypatch.setattr(doctor, "MB", 2 ** 8)
    monkeypatch.setattr(doctor, "why_unusable", lambda device: "")


def table(text: str) -> dict[str, tuple[str, str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines()]
    return {name.strip(): tuple(word.strip() for word in rest) for name, *rest in lines}


def test_a_machine_that_is_right_has_status_0(small_times, checkpoints, capsys):
    cpu = pytest.importorskip("nanoserve.cpu")
    assert doctor.main([str(checkpoints["mixtral"]), "--device", "cpu"]) == 0
    told = table(capsys.readouterr().out)
    assert "mixtral, float32, kernels='cpu'" in told
    assert {*map(", ".join, trial.CHECKS)} <= set(told)
    assert {"int8", "int4", "torch", "C++ compiler", "copy"} <= set(told)
    assert torch.__version__ in told["torch"][0] and "GB/s" in told["copy"][0]
    assert "of the copy's" in told["one row's product"][0]
    assert "GFLOP/s" in told["512 rows' product"][0] and cpu is not None


def test_a_function_that_is_wrong_is_a_line_and_a_status(small_times, dummy, monkeypatch, capsys):
    """Also one that no option of this model asks for: experts, an int8 cache."""
    broken = SimpleNamespace(**vars(ops) | dict(
        experts=lambda *given: ops.experts(*given) * 2, act_and_mul=lambda *given: 1 / 0))
    monkeypatch.setattr(doctor, "load_backend", lambda kernels: broken)
    def product(self, x, bias):
        return x.new_full((len(x), 136), torch.nan) if self.size == 0 else 1 / 0

    monkeypatch.setattr(TorchWeight, "linear", product)
    monkeypatch.setattr(doctor, "kind_of_weight", lambda kernels: TorchWeight)
    assert doctor.main([str(dummy), "--device", "cpu"]) == 1
    told = table(capsys.readouterr().out)
    for name, says in (("prepack, experts", "experts of a batch of 1 is wrong"),
                       ("act_and_mul", "fails (ZeroDivisionError"),
                       ("int8", "relative error nan"), ("int4", "fails (ZeroDivisionError")):
        assert says in told[name][0] and told[name][1] == "WRONG"
    assert not any(", ".join(names) in told for names in trial.CHECKS if "rms_norm" in names)


def test_what_is_missing_is_named(small_times, dummy, monkeypatch, capsys, tmp_path):
    """The table of a machine without a compiler, and with a GPU that torch can't use."""
    def none():
        raise build.BuildError("there is no C++ compiler: install one")

    monkeypatch.setattr(build, "find_compiler", none)
    monkeypatch.setattr(doctor, "why_unusable", lambda device: "there may be a GPU, but no CUDA")
    config = doctor.EngineConfig(model="none", device="cuda")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    told = {name: rest for name, *rest in doctor.machine(config)}
    assert told["C++ compiler"] == ["there is no C++ compiler: install one", "missing"]
    assert told["GPU"] == ["there may be a GPU, but no CUDA", "unused"]
    assert told["Python.h"][1] == "missing: apt install python3-dev"
    assert doctor.main(["/no/such/model"]) == 1
    assert "nanoserve doctor: " in capsys.readouterr().err


def test_each_pair_of_gpus_is_tried(monkeypatch):
    """A pair that says anything but "right" is wrong: an error, or nothing within a minute."""
    answers = {"0,1": "right", "0,2": "ConnectionError: NCCL", "1,2": ""}
    monkeypatch.setattr(doctor, "printed", lambda command, seconds, CUDA_VISIBLE_DEVICES: (
        answers[CUDA_VISIBLE_DEVICES]))
    assert doctor.pairs(3) == [
        ("all_reduce of 0 and 1", "right", ""),
        ("all_reduce of 0 and 2", "ConnectionError: NCCL", "WRONG"),
        ("all_reduce of 1 and 2", "", "WRONG")]
    assert doctor.pairs(1) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-2f")  # the others are somebody else's
    answers["5,GPU-2f"] = "NCCL version 2.27.5\nright"
    assert doctor.pairs(2) == [("all_reduce of 0 and 1", "right", "")]


@pytest.mark.parametrize("part", ["functions", "quantised", "times"])
def test_the_table_is_printed_also_where_memory_runs_out(small_times, dummy, monkeypatch, capsys,
                                                         part):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name in ("functions", "quantised", "times"):
        monkeypatch.setattr(doctor, name, lambda *given: [("a part", "right", "")])
    full.__name__ = part
    monkeypatch.setattr(doctor, part, full)
    assert doctor.main([str(dummy), "--device", "cpu"]) == 1
    told = table(capsys.readouterr().out)
    assert told[part] == ("OutOfMemoryError: CUDA out of memory", "WRONG") and "a part" in told
