"""Layers on disk: the same bits, little memory, and nothing left behind.

The oracle for text and logprobs is the engine with all layers in memory; for memory, the kernel.
"""

import errno
import gc
import json
import os
import re
from itertools import count
from pathlib import Path

import pytest
from checkpoints import GQA, SIZES
from process_tools import looks_into_proc
from safetensors.torch import load_file
from test_layer_plan import SMALL, texts

from nanoserve import LLM, SamplingParams
from nanoserve.build import cache_folder
from nanoserve_extras.layer_plan import layer_disk
from nanoserve_extras.layer_plan.layer_plan import LayerPlan, places

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def everything(monkeypatch):
    """Also small tensors, as those of the tests are, go to the file."""
    monkeypatch.setattr(layer_disk, "SMALL", 0)


@pytest.mark.parametrize("name, options, plan", [
    ("qwen3", {}, {"disk": 1}), ("gemma3", dict(dtype="bfloat16"), {"disk": 3}),
    ("mixtral", dict(kernels="torch"), {"device": 1, "disk": 2}),
    ("qwen2", dict(quantization="int8"), {"disk": 2}),
    pytest.param("llama2", dict(quantization="int4"), {"disk": 3}, marks=pytest.mark.full),
    ("llama3.1", dict(async_scheduling=False), [{"disk": 1, "device": 1}, {"disk": 1}])], ids=str)
def test_not_one_bit_is_another_than_in_memory(name, options, plan, checkpoints, prompts,
                                               everything, ranks_in_threads):
    with LLM(checkpoints[name], **SMALL | options) as llm:
        expected = texts(llm, prompts[3:5])
    with LLM(checkpoints[name], **SMALL | options, layer_plan=plan) as llm:
        assert texts(llm, prompts[3:5]) == expected
        read, waited = llm.extra(LayerPlan).metrics()
        assert read.value > 0 and waited.value >= 0


def status(name: str) -> int:
    """In bytes."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def resident(address: int) -> int:
    """Bytes of a mapping that are this process's now."""
    found = re.search(rf"^{address:x}-.*?^Rss:\s+(\d+)", Path("/proc/self/smaps").read_text(),
                      re.M | re.S)
    return int(found[1]) * 1024


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines()
            if re.search(rf"{cache_folder()}/.*\(deleted\)", line)]


@looks_into_proc
@pytest.mark.parametrize("model_impl", ["auto", pytest.param("transformers",
                                                             marks=pytest.mark.full)])
def test_memory_is_held_and_given_back(model_impl, tmp_path):
    """80 MB of layers take less than half of it from the start on; what has computed is given
    back at once; and with the engine the file is gone, without Python's garbage collector."""
    config = SIZES | GQA | dict(
        hidden_size=1024, intermediate_size=2560, num_hidden_layers=4, model_type="llama",
        architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = status("RssAnon")
    gc.disable()
    try:
        with LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cpu",
                 num_gpu_blocks_override=16, layer_plan={"disk": 4},
                 model_impl=model_impl) as llm:
            disk = llm.runner.model.disk
            assert sum(shelf.num_bytes for shelf in disk.shelves) > 80e6
            for _ in range(3):
                llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
            assert status("RssAnon") - before < 40e6
            disk.reader.submit(lambda: None).result()  # what is read ahead has been read
            for i, shelf in enumerate(disk.shelves):
                held = [resident(tensor.data_ptr()) for _, tensor in shelf.maps]
                assert sum(held) == (0 if i else shelf.num_bytes), i
            assert mappings()
            del disk, shelf
        assert not mappings()
    finally:
        gc.enable()


@pytest.fixture
def full(monkeypatch):
    """A disk that is full when so many pieces of it are taken; later there is room again."""
    def fill(room: int) -> None:
        taken, reserve = count(), os.posix_fallocate

        def posix_fallocate(file: int, start: int, size: int) -> None:
            if next(taken) == room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reserve(file, start, size)

        monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    return fill


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system can't reserve room")
@pytest.mark.parametrize("room", [0, 5])  # of 4 matrices a layer
def test_a_full_disk_is_a_sentence(qwen3, full, everything, room):
    """A page of a sparse file that found no room ended the process with SIGBUS."""
    full(room)
    with pytest.raises(ValueError) as kept:
        LLM(qwen3, **SMALL, layer_plan={"disk": 2})
    found = re.match(r"no room for ([\d,]+) bytes in (.*), where ([\d,]+) are free "
                     r"\(No space left on device\), for layers on disk: give layer_plan fewer",
                     str(kept.value))
    needed, free = (int(found[i].replace(",", "")) for i in (1, 3))
    assert found[2] == str(cache_folder()) and free > 0
    layer = sum(4 * one.numel() for name, one in load_file(qwen3 / "model.safetensors").items()
                if "layers.1." in name)
    assert 0 < needed < layer


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system can't reserve room")
def test_a_plan_for_which_there_is_no_room_leaves_the_old_one(qwen3, full, everything, monkeypatch,
                                                              prompts):
    with LLM(qwen3, **SMALL, layer_plan={"disk": 1}) as llm:
        before = texts(llm, prompts[3:5])
        full(5)
        with pytest.raises(ValueError, match="give layer_plan fewer"):
            llm.deploy({"disk": 2})
        monkeypatch.undo()
        assert texts(llm, prompts[3:5]) == before


@pytest.mark.parametrize("count, expected", [(0, ()), (1, (7,)), (2, (3, 7)), (3, (1, 4, 7)),
                                             (8, tuple(range(8)))])
def test_layers_on_disk_are_as_far_apart_as_they_can_be(count, expected):
    assert places([8], [count])[0].on_disk == expected
    assert places([10, 8], [0, count])[1].on_disk == tuple(10 + i for i in expected)


@pytest.mark.parametrize("plan, message", [
    ({"disk": 4}, "all together the 3"), ({"disk": "all"}, "is a number of layers"),
    ({"disk": -1}, "is a number of layers"),
    ({"host": 1}, "no GPU has run them yet"), ({"floppy": 1}, "'floppy'"),
    ({"disk": 1, "device": 1}, "all together the 3"), ([{"host": 3}], "leave 'host' out"),
    ([{"disk": 2}, 2], "all together the 3"), (["disk"], "an entry is a number"),
    ([True, 2], "an entry is a number")], ids=str)
def test_a_plan_that_cannot_be_followed_is_refused(qwen3, plan, message):
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, **SMALL, layer_plan=plan)


@pytest.mark.parametrize("options, message", [
    (dict(max_wait=1), "max_wait=1 .*layer_plan"),
    (dict(max_wait=1, layer_plan={"disk": 0}), "max_wait=1 .*disk"),
    (dict(max_wait=-1, layer_plan={"disk": 1}), "max_wait.*-1")], ids=str)
def test_only_layers_on_disk_let_prompts_wait(qwen3, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, **SMALL, **options)
