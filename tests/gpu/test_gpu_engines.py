"""On a real GPU: images, engines that sleep, a second GPU, recordings that fail, fused steps.

Skipped where there is no GPU; there `NANOSERVE_GPU_TESTS=dry` runs what the interpreter and the
stand-in for graphs can (test_gpu.py: the others).
"""

import gc

import pytest
import torch
from seeing import Seer, make_seeing

pytest.importorskip("triton")

from gpu_checks import DRY, GREEDY, MB, alone, assert_texts, needs_gpu, start, watch_replays

from nanoserve import LLM, SamplingParams
from nanoserve.graphs import Recorder
from nanoserve.model_runner import ModelRunner
from nanoserve_extras.few_rows.few_rows import FewRows

pytestmark = needs_gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", ["qwen2-vl", "llava", "gemma3"])
def test_images_are_seen_beside_text(tmp_path, name):
    """Prompts with two pictures, with one and with none; the decodes behind them are replays."""
    seer = Seer(name, make_seeing(name, tmp_path / name))
    prompts = [seer.prompt(seer.picture(4, 6, 1), seer.picture(4, 4, 2)),
               seer.prompt(seer.picture(4, 4, 3), seed=1), seer.prompt(seed=2)]
    engine = start(tmp_path / name, limit_mm_per_prompt={"image": 2}, max_model_len=96)
    replayed = watch_replays(engine)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, gaps = seer.generate(prompt, 4)
        ours = output.outputs[0].token_ids
        assert ours == expected or min(gaps) < 1e-3, name
    assert replayed


@pytest.mark.parametrize("options", [dict(), dict(quantization="int4")], ids=str)
def test_an_engine_that_slept_records_anew_and_writes_the_same(checkpoints, prompts, options):
    """Its weights and its cache are gone meanwhile, and so are its recordings, which read them."""
    with start(checkpoints["qwen3"], num_gpu_blocks_override=256, **options) as engine:
        before = ids_of(engine.generate(prompts[:3], GREEDY, use_tqdm=False))
        engine.sleep(level=1)
        assert engine.runner.graphs is None and not engine.runner.kv_cache
        if not DRY:
            assert torch.cuda.memory_allocated() < 8 * MB
        engine.wake_up()
        assert engine.runner.graphs is not None
        assert ids_of(engine.generate(prompts[:3], GREEDY, use_tqdm=False)) == before


@needs_two
def test_two_engines_on_two_gpus_of_one_process(checkpoints, references, prompts):
    """In turns; each records on a stream of its own GPU, the second one first."""
    engines = [start(checkpoints["qwen3"], device=f"cuda:{number}") for number in (1, 0)]
    for engine, number in zip(engines, (1, 0), strict=True):
        layers, *_ = next(iter(engine.runner.graphs.graphs.values()))
        assert layers.stream.device_index == number
    for _ in range(2):
        for engine in engines:
            replayed = watch_replays(engine)
            assert_texts(engine.generate(prompts[:4], GREEDY, use_tqdm=False), references,
                         "qwen3", "two engines")
            assert replayed


def test_what_waits_is_named_and_nothing_is_recorded(checkpoints, references, prompts, monkeypatch,
                                                     capfd):
    """Before a recording begins: afterwards torch is as it was."""
    states = ModelRunner._states

    def waits(runner, batch):
        hidden = states(runner, batch)
        return hidden + hidden.sum().item() * 0

    monkeypatch.setattr(ModelRunner, "_states", waits)
    engine = start(checkpoints["qwen3"])
    assert engine.runner.graphs is None
    said = capfd.readouterr().err
    assert "aten::item waits" in said or "aten::_local_scalar_dense waits" in said
    assert_texts(engine.generate(prompts[:3], GREEDY, use_tqdm=False), references, "qwen3", "eager")
    if not DRY:
        assert torch.cuda.get_sync_debug_mode() == 0


@alone
@pytest.mark.skipif(DRY, reason="the memory is a GPU's")
def test_a_recording_that_fails_gives_its_memory_back(checkpoints, references, prompts, monkeypatch,
                                                      capfd):
    """In the middle, behind a piece of memory that it has taken: a second engine finds all memory,
    records, and torch's cache is emptied again when memory runs short."""
    def fails(recorder, batch):
        taken = torch.empty(2 ** 28, dtype=torch.uint8, device="cuda")
        return recorder.layers(batch) + taken[0].item()

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "states", fails)
        engine = start(checkpoints["qwen3"])
    assert engine.runner.graphs is None
    assert "can't be recorded" in capfd.readouterr().err
    assert_texts(engine.generate(prompts[:3], GREEDY, use_tqdm=False), references, "qwen3", "eager")
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 64 * MB
    with start(checkpoints["qwen3"]) as engine:
        assert engine.runner.graphs is not None
        assert_texts(engine.generate(prompts[:3], GREEDY, use_tqdm=False), references, "qwen3",
                     "again")
    held = [torch.empty(2 ** 28, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del held
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    most = torch.cuda.mem_get_info()[0] + cached
    torch.empty(int(0.95 * most), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("name", ["qwen3", "llama-bias"])
def test_fused_steps_of_few_rows_equal_transformers(checkpoints, references, prompts, name):
    engine = start(checkpoints[name], extras=[FewRows()], max_num_seqs=4)
    replayed = watch_replays(engine)
    for count in (1, 2, 3, 4):
        assert_texts(engine.generate(prompts[:count], GREEDY, use_tqdm=False), references, name,
                     f"{count} rows, fused")
    assert {size.rows for size in replayed} == {1, 2, 4}


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_engines_are_made_with_kernels_and_graphs(checkpoints):
    """What the other tests rely on."""
    engine = start(checkpoints["qwen3"], max_num_seqs=1)
    assert isinstance(engine, LLM) and engine.runner.graphs is not None
