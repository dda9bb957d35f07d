"""On a real GPU: what an engine does with memory; alone on it, with -n 0."""

import gc
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from gpu_checks import DEVICE, MB, alone, needs_gpu

from benchmarks.gpu_engine import config_json
from benchmarks.gpu_report import MODELS
from nanoserve import LLM, SamplingParams

pytestmark = needs_gpu


def used() -> int:
    """Bytes of the GPU, by the driver; torch's own cache has given back what it need not keep."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def large(tmp_path):
    """Qwen3-0.6B's shapes with fewer layers: a folder to make random weights from."""
    sizes = MODELS["Qwen3-0.6B"] | dict(L=6)
    (tmp_path / "config.json").write_text(json.dumps(config_json(sizes, "bfloat16")))
    return tmp_path


def start_large(folder, share: float) -> LLM:
    engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=200,
                 gpu_memory_utilization=share)
    engine.generate([[1, 2, 3], [4] * 900], SamplingParams(max_tokens=4, ignore_eos=True),
                    use_tqdm=False)
    return engine


@alone
def test_engines_leave_no_memory_behind(large):
    """One after the other, shut down or only forgotten. The first one's kernels and libraries stay,
    as they do for every program."""
    start_large(large, 0.5).shutdown()
    before, allocated = used(), torch.cuda.memory_allocated()
    blocks = []
    for end in ("shutdown", "del", "del", "shutdown"):
        engine = start_large(large, 0.5)
        blocks.append(engine.scheduler.blocks.num_blocks)
        assert used() - before > 0.3 * torch.cuda.mem_get_info()[1]
        if end == "shutdown":
            engine.shutdown()  # and somebody still holds it
        else:
            del engine
        assert used() - before < 64 * MB, f"after {end}: {(used() - before) / MB:.0f} MB are left"
        assert torch.cuda.memory_allocated() - allocated < MB
    assert max(blocks) - min(blocks) < 0.01 * max(blocks), blocks


@alone
def test_an_engine_after_a_forgotten_one_finds_all_memory(large):
    """Nothing is collected or emptied in between: what the first one left in torch's own cache must
    neither be counted as others' nor be of no use in pieces."""
    engine = start_large(large, 0.8)
    blocks = engine.scheduler.blocks.num_blocks
    del engine
    engine = start_large(large, 0.8)
    assert abs(engine.scheduler.blocks.num_blocks - blocks) < 0.01 * blocks
    engine.shutdown()


@alone
def test_the_memory_of_others_is_subtracted(large):
    """A tensor of this process, then another process: as many blocks fewer as they are large."""
    engine = start_large(large, 0.6)
    blocks, block_bytes = engine.scheduler.blocks.num_blocks, engine.runner.block_bytes
    engine.shutdown()
    del engine
    total = torch.cuda.mem_get_info()[1]
    size = total // 5
    mine = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    engine = start_large(large, 0.6)
    assert blocks - engine.scheduler.blocks.num_blocks == pytest.approx(size / block_bytes,
                                                                        rel=0.03)
    assert used() < 0.65 * total
    engine.shutdown()
    del engine, mine
    before = used()
    with subprocess.Popen([sys.executable, "-c", (
            "import torch, sys\n"
            f"x = torch.empty({size}, dtype=torch.uint8, device='cuda')\n"
            "print('ready', flush=True)\nsys.stdin.read()\n")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"ready\n"
            taken = used() - before
            engine = start_large(large, 0.6)
            assert blocks - engine.scheduler.blocks.num_blocks == pytest.approx(
                taken / block_bytes, rel=0.03)
            engine.shutdown()
        finally:
            other.stdin.close()
            other.wait(timeout=60)


@alone
def test_no_room_is_said_with_the_numbers(large):
    hog = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"no room for one KV block.*GB that others use"):
        start_large(large, 0.3)
    del hog
    start_large(large, 0.3).shutdown()


@alone
def test_graphs_find_room_beside_a_cache_of_the_usual_size(large):
    """They share memory and keep no logits: what they take is far less than what is kept free."""
    engine = start_large(large, 0.9)
    graphs, total = engine.runner.graphs, torch.cuda.mem_get_info()[1]
    assert 0 < graphs.memory < 400 * MB, f"{graphs.memory / MB:.0f} MB"
    assert used() < 0.93 * total
    engine.shutdown()
