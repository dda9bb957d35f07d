"""`launch` queues a step and never waits for the device, whatever extras have put into it.

On a GPU one forgotten `torch.tensor(list, device=...)` waits for all that was queued before, in
each layer of each step: hybrids, images and encoders had three of them. Seen without a GPU, see
no_waits.py.
"""

import numpy as np
import pytest
import torch
from architectures import make
from encoders import make as make_encoder
from hybrids import HYBRIDS
from no_waits import NoWaits, watch_launches
from seeing import Seer, make_seeing

from nanoserve import LLM, LoRARequest, SamplingParams, sampler
from nanoserve.llm import BUNDLED_MODEL

SMALL = dict(dtype="float32", num_gpu_blocks_override=64, max_model_len=96)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
EVERYTHING = [
    SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, logprobs=2,
                   prompt_logprobs=1, presence_penalty=0.5, logit_bias={3: 1.0}, min_tokens=2),
    SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[3, 4, 5])]


@pytest.mark.parametrize("options", [
    dict(), dict(async_scheduling=True), dict(quantization="int4", kv_cache_dtype="int8"),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
    dict(kv_offload_bytes=2 ** 22, num_gpu_blocks_override=6)], ids=str)
def test_a_launch_reads_nothing_and_copies_nothing_that_is_not_pinned(qwen3, monkeypatch, options):
    with LLM(qwen3, **SMALL | options) as llm:
        faults = watch_launches(llm, monkeypatch)
        for first in (1, 2, 1):  # with six blocks the third finds the first one's on the host
            llm.generate([[first, 2, 3], [5, 6, first] * 9], EVERYTHING, use_tqdm=False)
    assert not faults


def test_nor_does_one_with_adapters(monkeypatch):
    with LLM(**SMALL, enable_lora=True) as llm:
        faults = watch_launches(llm, monkeypatch)
        adapter = LoRARequest("detective", 1, str(BUNDLED_MODEL.parent / "detective"))
        llm.generate(["Once upon a time"] * 2, GREEDY, use_tqdm=False,
                     lora_request=[adapter, None])
    assert not faults


@pytest.mark.parametrize("name", [
    "qwen3.5", pytest.param("nemotron-h", marks=pytest.mark.full), "lfm2"])
def test_nor_does_one_with_states(tmp_path, monkeypatch, name):
    how = dict(kernels="triton") if name == "nemotron-h" else {}  # its experts wait elsewhere
    with LLM(make(HYBRIDS[name](), tmp_path / name), **SMALL | how) as llm:
        faults = watch_launches(llm, monkeypatch)
        for _ in range(2):  # the second time from snapshots
            llm.generate([[1, 2, 3], [5, 6, 7] * 9], GREEDY, use_tqdm=False)
    assert not faults


@pytest.mark.parametrize("name", ["qwen2-vl", "llava"])
def test_nor_does_one_with_images(tmp_path, monkeypatch, name):
    """Qwen3-VL's own network picks positions by a mask, and so waits once in each of three layers;
    Qwen2-VL's tower is all there is here."""
    seer = Seer(name, make_seeing(name, tmp_path / name))
    with LLM(tmp_path / name, **SMALL, limit_mm_per_prompt={"image": 2}) as llm:
        faults = watch_launches(llm, monkeypatch)
        llm.generate([seer.prompt(seer.picture(4, 6, 1), seer.picture(4, 4, 2))], GREEDY,
                     use_tqdm=False)
    assert not faults


def test_nor_does_an_encoder(tmp_path, monkeypatch):
    """BERT's, whose rows have token types."""
    with LLM(make_encoder("bert", tmp_path / "bert"), dtype="float32", runner="pooling") as llm:
        llm.runner.model.separator = 3  # as a tokenizer says it that joins pairs
        faults = watch_launches(llm, monkeypatch)
        llm.embed([[1, 2, 3, 4], [4] * 20], use_tqdm=False)
    assert not faults


@pytest.mark.parametrize("step, fault", [
    (lambda x: x[torch.tensor([1, 0], device=x.device)], "of numbers, with a device"),
    (lambda x: x[torch.from_numpy(np.array([1, 0])).to(x.device)], "from pageable memory"),
    (lambda x: x + torch.tensor([1.0, 2.0]), "tensors of the host"),
    (lambda x: x[torch.arange(2)], "tensors of the host"),
    (lambda x: x.sum().item(), "reads from the device"),
    (lambda x: bool(x[0] > 0), "reads from the device"), (lambda x: x.tolist(), "tolist of"),
    (lambda x: x[x > 0], "reads from the device"), (lambda x: x.nonzero(), "reads from the dev"),
    (lambda x: x.repeat_interleave((x > 0).long()), "reads from the device")])
def test_each_kind_of_wait_is_found(step, fault):
    x = torch.ones(2)
    with NoWaits([]) as book:
        step(x)
    assert any(fault in one for one in book.faults), book.faults
    with NoWaits([]) as book:
        at = sampler.put([1, 0], torch.int64, device=x.device)
        x[at].add_(2.0).mul_(torch.tensor(3.0)).repeat_interleave(at + 1, output_size=3)
        assert torch.arange(3).sum().item() == 3 and book.faults == []
