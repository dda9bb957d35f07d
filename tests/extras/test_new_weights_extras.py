"""New weights where an extra keeps something of the old ones: states, features, blocks.

The oracle is an engine that was made with these weights."""

import pytest
from architectures import make
from hybrids import HYBRIDS
from loading import stored_tensors
from seeing import Seer, make_seeing

from nanoserve import LLM, SamplingParams
from nanoserve_extras.block_store.block_store import BlockStore
from nanoserve_extras.multimodal.multimodal import Multimodal
from nanoserve_extras.recurrent.recurrent import Recurrent

SMALL = dict(dtype="float32", device="cpu", max_model_len=64, block_size=4,
             num_gpu_blocks_override=64)
SHARED = list(range(5, 25))
PROMPTS = [SHARED, [7, 3, 9], SHARED + [1, 2], list(range(40, 45))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


def texts(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def fresh(folder, prompts=PROMPTS, **options) -> list[list[int]]:
    with LLM(folder, **SMALL | options) as llm:
        return texts(llm, prompts)


@pytest.mark.parametrize("name, options", [
    ("qwen3.5", dict(max_num_seqs=2)),
    ("lfm2", dict(max_num_batched_tokens=11, async_scheduling=True)),
    ("granite4-h", dict(quantization="int8"))])
def test_states_of_old_weights_are_forgotten(trained, tmp_path, name, options):
    folder = make(HYBRIDS[name](), tmp_path / name)
    there, options = trained(folder), dict(options, snapshot_bytes=2 ** 16)
    expected = fresh(there, **options)
    with LLM(folder, **SMALL | options) as llm:
        snapshots, before = llm.extra(Recurrent).snapshots, texts(llm)
        assert before != expected and snapshots.named
        llm.update_weights(stored_tensors(there))
        assert not snapshots.named
        assert texts(llm) == texts(llm) == expected
        llm.sleep()
        assert not snapshots.named
        llm.update_weights(folder)
        llm.wake_up()
        assert texts(llm) == before
        llm.sleep()
        llm.wake_up()
        assert texts(llm) == texts(llm) == before
        snapshots.audit()


@pytest.mark.parametrize("name", ["qwen3-vl", "llava", "lfm2-vl"])
def test_features_of_old_weights_are_forgotten(trained, tmp_path, name):
    """Also for a request that was made before, and is served afterwards."""
    folder = make_seeing(name, tmp_path / name)
    seer, there = Seer(name, folder), trained(folder)
    prompts = [seer.prompt(seer.picture(4, 6, 1)), seer.prompt()]
    options = dict(limit_mm_per_prompt={"image": 1}, max_model_len=96)
    expected = fresh(there, prompts, **options)
    with LLM(folder, **SMALL | options) as llm:
        encoder, before = llm.extra(Multimodal).encoder, texts(llm, prompts)
        assert before != expected and encoder.held and encoder.num_runs
        waits = llm.make_request("", prompts[0], GREEDY)  # made before, and served afterwards
        with pytest.raises(ValueError, match="missing tensors"):
            llm.update_weights({})
        assert encoder.held
        llm.update_weights(stored_tensors(there))
        assert not encoder.held and encoder.num_tokens == 0
        assert texts(llm, prompts) == expected
        inbox = []
        llm.submit(waits, inbox)
        while llm.has_unfinished_requests():
            llm.step()
        assert inbox[-1].outputs[0].token_ids == expected[0]
        for level in (1, 2):
            llm.sleep(level)
            assert not encoder.held
            llm.update_weights(folder)
            llm.wake_up()
            assert texts(llm, prompts) == before


def test_blocks_of_old_weights_are_not_found_in_the_store(checkpoints, trained, tmp_path):
    """Neither this engine's own, nor those that another one with the old weights writes."""
    folder = checkpoints["qwen3"]
    there, options = trained(folder), dict(kv_store=tmp_path / "store", block_size=16)
    before, expected = fresh(folder), fresh(there)
    with LLM(folder, **SMALL | options) as llm, LLM(folder, **SMALL | options) as other:
        assert texts(llm) == before
        llm.update_weights(stored_tensors(there))
        assert texts(other) == before
        other.extra(BlockStore).flush()
        assert texts(llm) == expected
        assert llm.extra(BlockStore).num_loaded == 0
        llm.extra(BlockStore).flush()
        assert texts(other) == before
    assert fresh(folder, **options) == before and fresh(there, **options) == expected
