"""The choice of the device, its dtype and its kernels; a slow path is never silent."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from dummy_engines import start

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.device import choice
from nanoserve.device.choice import fit_to_device, pick_device
from nanoserve.frontend.defaults import resolve


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, dummy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match='device="cuda".*no GPU.*device="cpu"'):
        start(dummy, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (pick_device("auto"), pick_device("cpu")) == ("cuda", "cpu")


def test_a_card_without_bfloat16_gets_float16(dummy, monkeypatch):
    """bf16 unavailable (compute capability 7.5) must still work; not tested on such a card."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old card")
    config = ModelConfig.from_folder(dummy)

    def fit(device, **options):
        asked = EngineConfig(model="none", kernels="torch", **options)
        return fit_to_device(dataclasses.replace(
            resolve(asked, device, config), dtype="bfloat16"), asked)

    fitted, said = fit("cuda")
    assert fitted.dtype == "float16" and "an old card has no bfloat16" in said[0]
    assert fit("cpu")[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match='dtype="bfloat16", but an old card.*"float16"'):
        fit("cuda", dtype="bfloat16")


def test_a_gpu_without_triton_says_so_and_works_without(dummy, monkeypatch):
    """132 tok/s instead of 9,500, and no warning (nano-vllm #245): a slow path is never silent."""
    def no_triton(name):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(choice, "namespace", no_triton)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    config = ModelConfig.from_folder(dummy)
    asked = EngineConfig(model="none")
    fitted, said = fit_to_device(resolve(asked, "cuda", config), asked)
    assert fitted.kernels == "torch" and "No module named 'triton'" in said[0] and "slow" in said[0]
    asked = EngineConfig(model="none", kernels="triton")
    with pytest.raises(ValueError, match="kernels='triton'.*No module.*install.*'torch'"):
        fit_to_device(resolve(asked, "cuda", config), asked)


def test_a_gpu_that_cannot_run_kernels_says_so(dummy, monkeypatch):
    """An old card takes plain torch's way with a line that says so, and it is an error if kernels
    were asked for. So does a GPU where TRITON_INTERPRET was forgotten: kernels in Python are
    thousands of times slower."""
    config, capability = ModelConfig.from_folder(dummy), [(7, 5)]
    interpreted = SimpleNamespace(INTERPRETED=False)
    monkeypatch.setattr(choice, "namespace", lambda name: interpreted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    def fit(kernels: str):
        asked = EngineConfig(model="none", kernels=kernels)
        return fit_to_device(resolve(asked, "cuda", config), asked)

    fitted, said = fit("auto")
    assert fitted.kernels == "torch" and "an old card is older" in said[0] and "slow" in said[0]
    with pytest.raises(ValueError, match="kernels='triton', but an old card .*kernels='torch'"):
        fit("triton")
    capability[0] = (8, 0)
    assert fit("triton")[0].kernels == "triton" and not fit("auto")[1]
    interpreted.INTERPRETED = True
    fitted, said = fit("auto")
    assert fitted.kernels == "torch" and "TRITON_INTERPRET is set" in said[0]
    assert "unset it" in said[0] and "slow" in said[0]
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set.*unset it.*kernels='torch'"):
        fit("triton")


@pytest.mark.parametrize("device, kernels, reason, instead", [
    ("cuda", "cpu", "these kernels are for CPUs", "triton"),
    ("cpu", "triton", "there is no GPU .*TRITON_INTERPRET=1", "cpu")])
def test_kernels_for_another_device_are_refused(dummy, monkeypatch, device, kernels, reason,
                                                instead):
    monkeypatch.setattr(choice, "namespace", lambda name: SimpleNamespace(INTERPRETED=False))
    asked = EngineConfig(model="none", kernels=kernels, dtype="float32")
    with pytest.raises(ValueError, match=f"kernels='{kernels}', but {reason}.*kernels='{instead}'"):
        fit_to_device(resolve(asked, device, ModelConfig.from_folder(dummy)), asked)
