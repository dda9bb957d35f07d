"""Why torch can't use a GPU: a line if the CPU is used instead, and an error otherwise."""

import re

import pytest
import torch
from dummy_engines import start

from nanoserve_extras.base import device as choice
from nanoserve_extras.base.device import pick_device, say_why_unused


@pytest.fixture
def cards(monkeypatch):
    """Two GPUs, the second one newer, and a build of torch for these and no others."""
    capabilities = [(8, 0), (9, 0)]
    place = lambda device: int(str(device).partition(":")[2] or 0)  # noqa: E731
    for name, stand_in in dict(
            is_available=lambda: True, device_count=lambda: 2,
            get_arch_list=lambda: ["sm_80", "sm_90a", "compute_90"],
            get_device_name=lambda device=None: f"card {place(device)}",
            get_device_capability=lambda device=None: capabilities[place(device)]).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return capabilities


def test_a_gpu_is_chosen_by_its_number(cards, monkeypatch):
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda", "cpu", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match="device='cuda:2'.*cuda:0, cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])  # code for no 9.x
    with pytest.raises(ValueError, match="card 1.*9.0.*sm_80"):
        pick_device("cuda:1")


@pytest.mark.parametrize("capability, runs", [
    ((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True), ((12, 0), True)])
def test_a_gpu_for_which_torch_has_no_code_is_named(cards, capsys, capability, runs):
    """sm_80 is code for all 8.x, compute_90 is compiled for whatever comes later. Without either
    the first kernel of torch's own was an error in the middle of loading."""
    cards[0] = capability
    assert pick_device("auto") == ("cuda" if runs else "cpu")
    if not runs:
        with pytest.raises(ValueError, match="card 0.*7.5.*sm_80 sm_90a"):
            pick_device("cuda")
        say_why_unused("auto")
        said = capsys.readouterr().err
        assert "card 0" in said and "slower" in said


@pytest.mark.parametrize("built_for, error, says", [
    (None, None, "without CUDA"),
    ("12.8", "The NVIDIA driver on your system is too old (found version 11040)",
     "CUDA 12.8.*too old"),
    ("12.8", None, "nvidia-smi")])
def test_a_gpu_that_torch_cannot_see_is_told(dummy, capsys, monkeypatch, tmp_path, built_for, error,
                                             says):
    """A trace of its driver is there, and once the engine ran on the CPU without a word."""
    def init():
        if error is not None:
            raise RuntimeError(error)

    trace = tmp_path / "nvidiactl"
    monkeypatch.setattr(choice, "TRACES", (str(trace),))
    monkeypatch.setattr(choice.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert pick_device("auto") == "cpu" == start(dummy).config.device
    assert "GPU" not in capsys.readouterr().err
    trace.touch()
    assert start(dummy).config.device == "cpu"
    assert re.search(f"nvidiactl.*{says}.*CPU", capsys.readouterr().err)
    start(dummy, device="cpu")
    assert "GPU" not in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"device='cuda'.*{says}"):
        start(dummy, device="cuda")
