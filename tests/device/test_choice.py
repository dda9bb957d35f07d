"""The choice of the device, its dtype and its kernels; a slow path is never silent."""

import dataclasses
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from dummy_engines import start

from nanoserve import ops
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.device import choice
from nanoserve.device.choice import fit_to_device, pick_device
from nanoserve.frontend.defaults import resolve


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, dummy):
    monkeypatch.setattr(choice, "TRACES", ())
    monkeypatch.setattr(choice.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match='device=\'cuda\'.*device="cpu"'):
        start(dummy, device="cuda")
    with pytest.raises(ValueError, match='device .*"cuda:1".*got \'gpu:1\''):
        start(dummy, device="gpu:1")
    with pytest.raises(ValueError, match="device='cuda:1'.*2 ranks"):
        EngineConfig(model="none", device="cuda:1", tensor_parallel_size=2)


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


def test_a_gpu_is_chosen_by_its_number(cards):
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda", "cpu", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match="device='cuda:2'.*cuda:0, cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize("capability, runs", [
    ((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True), ((12, 0), True)])
def test_a_gpu_for_which_torch_has_no_code_is_named(cards, dummy, capability, runs):
    """sm_80 is code for all 8.x, compute_90 is compiled for whatever comes later. Without either
    the first kernel of torch's own was an error in the middle of loading."""
    cards[0] = capability
    assert pick_device("auto") == ("cuda" if runs else "cpu")
    if not runs:
        with pytest.raises(ValueError, match="card 0.*7.5.*sm_80 sm_90a"):
            pick_device("cuda")
        asked = EngineConfig(model="none", kernels="torch")
        fitted, [said] = fit_to_device(resolve(asked, "cpu", ModelConfig.from_folder(dummy)), asked)
        assert fitted.device == "cpu" and "card 0" in said and "slower" in said


@pytest.mark.parametrize("built_for, error, says", [
    (None, None, "without CUDA"),
    ("12.8", "The NVIDIA driver on your system is too old (found version 11040)",
     "CUDA 12.8.*too old"),
    ("12.8", None, "nvidia-smi")])
def test_a_gpu_that_torch_cannot_see_is_told(monkeypatch, tmp_path, dummy, built_for, error, says):
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
    asked = EngineConfig(model="none", kernels="torch")
    config = resolve(asked, "cpu", ModelConfig.from_folder(dummy))
    assert fit_to_device(config, asked)[1] == []
    trace.touch()
    [said] = fit_to_device(config, asked)[1]
    assert re.search(f"nvidiactl.*{says}.*CPU", said)
    assert fit_to_device(config, dataclasses.replace(asked, device="cpu"))[1] == []
    with pytest.raises(ValueError, match=f"device='cuda'.*{says}"):
        pick_device("cuda")


def test_a_card_without_bfloat16_gets_float16(dummy, monkeypatch):
    """bf16 unavailable (compute capability 7.5) must still work; not tested on such a card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    config = ModelConfig.from_folder(dummy)

    def fit(device, **options):
        asked = EngineConfig(model="none", kernels="torch", **options)
        return fit_to_device(dataclasses.replace(
            resolve(asked, device, config), dtype="bfloat16"), asked)

    fitted, said = fit("cuda")
    assert fitted.dtype == "float16" and "an old card has no bfloat16" in said[0]
    assert fit("cpu")[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match='dtype="bfloat16".*an old card.*"float16"'):
        fit("cuda", dtype="bfloat16")


def test_a_gpu_without_triton_says_so_and_works_without(dummy, monkeypatch):
    """132 tok/s instead of 9,500, and no warning (nano-vllm #245): a slow path is never silent."""
    def no_triton(name):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(choice, "namespace", no_triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = ModelConfig.from_folder(dummy)
    asked = EngineConfig(model="none")
    fitted, said = fit_to_device(resolve(asked, "cuda", config), asked)
    assert fitted.kernels == "torch" and "No module named 'triton'" in said[0] and "slow" in said[0]
    asked = EngineConfig(model="none", kernels="triton")
    with pytest.raises(ValueError, match="kernels='triton'.*No module.*'torch'"):
        fit_to_device(resolve(asked, "cuda", config), asked)


def test_a_gpu_that_cannot_run_kernels_says_so(dummy, monkeypatch):
    """An old card takes plain torch's way with a line that says so, and it is an error if kernels
    were asked for. So does a GPU where TRITON_INTERPRET was forgotten: kernels in Python are
    thousands of times slower."""
    config, capability = ModelConfig.from_folder(dummy), [(7, 0)]
    interpreted = SimpleNamespace(INTERPRETED=False)
    monkeypatch.setattr(choice, "namespace", lambda name: interpreted)
    monkeypatch.setattr(choice, "first_kernel", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")

    def fit(kernels: str):
        asked = EngineConfig(model="none", kernels=kernels)
        return fit_to_device(resolve(asked, "cuda", config), asked)

    fitted, said = fit("auto")
    assert fitted.kernels == "torch" and "an old card is older" in said[0] and "slow" in said[0]
    with pytest.raises(ValueError, match="kernels='triton'.*an old card.*kernels='torch'"):
        fit("triton")
    capability[0] = (7, 5)
    assert fit("triton")[0].kernels == "triton" and not fit("auto")[1]
    interpreted.INTERPRETED = True
    fitted, said = fit("auto")
    assert fitted.kernels == "torch" and "TRITON_INTERPRET is set" in said[0]
    assert "unset it" in said[0] and "slow" in said[0]
    with pytest.raises(ValueError, match="TRITON_INTERPRET.*kernels='torch'"):
        fit("triton")


@pytest.mark.parametrize("kernel, reason", [
    (lambda *_: 1 / 0, "ZeroDivisionError.*python3-dev"),
    (lambda x, weight, eps: x, "wrong numbers")])
def test_a_first_kernel_that_fails_is_a_reason(dummy, monkeypatch, kernel, reason):
    """Triton can be imported without a C compiler, Python.h and libcuda.so.1, and needs them when a
    kernel is launched: public reports of three engines end in that traceback."""
    twin = SimpleNamespace(INTERPRETED=False, rms_norm=kernel)
    monkeypatch.setattr(choice, "namespace", lambda name: twin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    asked = EngineConfig(model="none", dtype="float32")
    config = resolve(asked, "cuda", ModelConfig.from_folder(dummy))
    fitted, [said] = fit_to_device(config, asked)
    assert fitted.kernels == "torch" and re.search(f"{reason}.*'torch'", said)
    with pytest.raises(ValueError, match=f"kernels='triton'.*{reason}"):
        fit_to_device(config, dataclasses.replace(asked, kernels="triton"))
    twin.rms_norm = ops.rms_norm
    assert fit_to_device(config, asked) == (config, [])


@pytest.mark.parametrize("device, kernels, reason, instead", [
    ("cuda", "cpu", "CPU", "triton"),
    ("cpu", "triton", ".*TRITON_INTERPRET=1", "cpu")])
def test_kernels_for_another_device_are_refused(dummy, monkeypatch, device, kernels, reason,
                                                instead):
    monkeypatch.setattr(choice, "namespace", lambda name: SimpleNamespace(INTERPRETED=False))
    asked = EngineConfig(model="none", kernels=kernels, dtype="float32")
    with pytest.raises(ValueError, match=f"kernels='{kernels}'.*{reason}.*kernels='{instead}'"):
        fit_to_device(resolve(asked, device, ModelConfig.from_folder(dummy)), asked)
