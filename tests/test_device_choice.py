"""The choice of the device, its dtype and its kernels; a slow path is never silent."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clean_process import needs_extras
from config_files import SIZES
from dummy_engines import start
from helpers import write_json
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import ops, self_test
from nanoserve.config import EngineConfig
from nanoserve.device import fit_dtype, full_float32, pick_device
from nanoserve.model_config import ModelConfig
from nanoserve.self_test import fit_kernels


@pytest.fixture
def fit(dummy):
    """What a small model gets on a device, for these options of an engine, and what is said."""
    def fit(on: str, text_type: str = "llama", **options):
        asked = EngineConfig(model="none", **options)
        model = replace(ModelConfig.from_folder(dummy), text_type=text_type)
        config, said = fit_dtype(asked.resolved(on, model), asked, model)
        config, more = fit_kernels(config, asked)
        return config, said + more

    return fit


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, dummy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match='device=\'cuda\'.*device="cpu"'):
        start(dummy, device="cuda")
    with pytest.raises(ValueError, match='device .*"cuda:1".*got \'gpu:1\''):
        start(dummy, device="gpu:1")
    with pytest.raises(ValueError, match="device='cuda:1'.*2 ranks"):
        EngineConfig(model="none", device="cuda:1", tensor_parallel_size=2)


def test_a_gpu_is_chosen_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda", "cpu", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match="device='cuda:2'.*cuda:0, cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # two, and an old driver
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match="device='cuda'.*torch sees no GPU"):
        pick_device("cuda")


def set_card(monkeypatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes))


def test_a_card_without_bfloat16_gets_float16(dummy, fit, monkeypatch):
    """bf16 unavailable (compute capability 7.5) must still work; not tested on such a card."""
    write_json(dummy / "config.json", dtype="bfloat16")
    set_card(monkeypatch, 7, 5)
    fitted, said = fit("cuda", kernels="torch")
    assert fitted.dtype == "float16" and "an old card has no bfloat16" in said[0]
    assert fit("cpu", kernels="torch", dtype="bfloat16")[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match='dtype="bfloat16".*an old card.*"float16"'):
        fit("cuda", kernels="torch", dtype="bfloat16")


@pytest.mark.parametrize("text_type", ["gemma2", "gemma3_text", "glm4", "plamo2"])
def test_a_network_that_overflows_in_float16_gets_another_dtype(dummy, fit, monkeypatch, text_type):
    """Also where a file says float16, or a card has no bfloat16. (vLLM refuses the same ones.) Once
    float16 on such a card gave two lines, and an error that named bfloat16."""
    for of_file, capability, dtype in (("float16", 8, "bfloat16"), ("float16", 7, "float32"),
                                       ("bfloat16", 7, "float32"), ("bfloat16", 8, "bfloat16")):
        write_json(dummy / "config.json", dtype=of_file)
        set_card(monkeypatch, capability, 5)
        fitted, said = fit("cuda", text_type, kernels="torch")
        assert fitted.dtype == dtype and len(said) == (dtype != of_file)
        assert not said or f"{dtype} takes its place" in said[0]
    with pytest.raises(ValueError, match='dtype="float16".*overflow.*: use "bfloat16"'):
        fit("cpu", text_type, kernels="torch", dtype="float16")
    set_card(monkeypatch, 7, 5)
    for asked in ("float16", "bfloat16"):
        with pytest.raises(ValueError, match=f'dtype="{asked}".*an old card.*: use "float32"'):
            fit("cuda", text_type, kernels="torch", dtype=asked)
    assert fit("cuda", "glm4_moe", kernels="torch")[0].dtype == "float16"


@pytest.mark.parametrize("architecture, outer, inner, overflows", [
    ("PaliGemmaForConditionalGeneration", "paligemma", "gemma2", True),  # PaliGemma 2
    ("PaliGemmaForConditionalGeneration", "paligemma", "gemma", False),
    ("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", True),
    # Its makers removed what overflowed in Gemma 3. The tower for images still does, and isn't run.
    ("Gemma3nForConditionalGeneration", "gemma3n", "gemma3n_text", False),
    ("Gemma3TextModel", "gemma3_text", None, True),  # EmbeddingGemma
    ("Gemma2ForSequenceClassification", "gemma2", None, True)])
@needs_extras
def test_the_text_network_tells_whether_float16_is_too_small(tmp_path, architecture, outer, inner,
                                                             overflows):
    """A wrapping's name does not. Gemma 3n was refused for the beginning of its name, and PaliGemma
    2 wrote NaN."""
    from nanoserve_extras import choose
    from nanoserve_extras.engine_args import EngineArgs

    sizes = dict(SIZES, head_dim=16)
    write_json(tmp_path / "config.json", architectures=[architecture], model_type=outer, **(
        sizes if inner is None else dict(text_config=dict(sizes, model_type=inner))))
    asked = EngineArgs(model="none", device="cpu", dtype="float16", kernels="torch")
    with pytest.raises(ValueError, match="65,504") if overflows else nullcontext():
        fit_dtype(asked, asked, choose(asked, tmp_path)[1])


@pytest.mark.parametrize("capability, interpreted, kernel, reason", [
    ((8, 0), None, None, "No module named 'triton'"),
    ((7, 0), False, ops.rms_norm, "an old card is older"),
    # Where it was forgotten. Kernels in Python are thousands of times slower.
    ((7, 5), True, ops.rms_norm, "TRITON_INTERPRET is set.*unset it"),
    # Triton can be imported without a C compiler, Python.h and libcuda.so.1, and needs them when a
    # kernel is launched: public reports of three engines end in that traceback.
    ((8, 0), False, lambda *_: 1 / 0, "ZeroDivisionError.*Python's headers"),
    ((7, 5), False, ops.rms_norm, None)])
def test_a_gpu_that_cannot_run_kernels_says_so(fit, monkeypatch, capability, interpreted, kernel,
                                               reason):
    """132 tok/s instead of 9,500, and no warning (nano-vllm #245): a slow path is never silent, and
    an error where kernels were asked for."""
    def load_backend(name):
        if interpreted is None:
            raise ImportError("No module named 'triton'")
        return SimpleNamespace(INTERPRETED=interpreted, rms_norm=kernel)

    monkeypatch.setattr(self_test, "load_backend", load_backend)
    set_card(monkeypatch, *capability)
    fitted, said = fit("cuda", dtype="float32")
    assert fitted.kernels == ("torch" if reason else "triton") and len(said) == bool(reason)
    if reason:
        assert re.search(f"{reason}.*'torch'.*slow", said[0])
        with pytest.raises(ValueError, match=f"kernels='triton'.*{reason}.*kernels='torch'"):
            fit("cuda", dtype="float32", kernels="triton")


@pytest.mark.parametrize("device, kernels, reason, instead", [
    ("cuda", "cpu", "CPU", "triton"),
    ("cpu", "triton", ".*TRITON_INTERPRET=1", "cpu")])
def test_kernels_for_another_device_are_refused(fit, monkeypatch, device, kernels, reason, instead):
    monkeypatch.setattr(self_test, "load_backend", lambda name: SimpleNamespace(INTERPRETED=False))
    with pytest.raises(ValueError, match=f"kernels='{kernels}'.*{reason}.*kernels='{instead}'"):
        fit(device, kernels=kernels, dtype="float32")


@pytest.mark.parametrize("how", ["default", "older", "newer", "all"])
def test_comparisons_keep_all_digits_and_leave_the_users_setting(how):
    """Scripts that train allow TF32 or bfloat16 for float32's products, in one of two ways."""
    backends, x = torch.backends, torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    kinds = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn

    def said() -> list[str]:
        return [backends.fp32_precision, *(kind.fp32_precision for kind in kinds)]

    before = said()
    try:
        if how == "older":
            torch.set_float32_matmul_precision("medium")
        elif how == "newer":
            backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = (
                "tf32", "bf16")
        elif how == "all":
            backends.fp32_precision = "tf32"
        wanted = said()
        with full_float32():
            assert {kind.fp32_precision for kind in kinds} == {"ieee"}
            assert not backends.cudnn.allow_tf32
            exact = x.double() @ x.double()
            assert (x @ x - exact).norm() < 1e-6 * exact.norm()
        assert said() == wanted
        if how == "older":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        for owner, precision in zip((backends, *kinds), before, strict=True):
            owner.fp32_precision = precision
