"""An engine that sleeps: its memory is gone, and awake it writes what it wrote."""

import gc
import re
import threading
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
import torch
from adapters import Adapters
from architectures import make
from helpers import storage, write_json
from hybrids import HYBRIDS
from test_hidden_drafts import make_head
from test_new_weights import PROMPTS, SMALL, as_dict, as_folder, as_iterator, fresh, texts
from torch.multiprocessing.reductions import StorageWeakRef

import nanoserve_extras.quantization.formats  # noqa: F401 - its tables stay
from nanoserve import LLM, SamplingParams
from nanoserve_extras import new_weights
from nanoserve_extras.foreign import foreign_layers  # noqa: F401
from nanoserve_extras.layer_plan import layer_disk


def storages() -> dict[StorageWeakRef, str]:
    """All in this process that have memory, each with a tensor's name that lies in it."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return {StorageWeakRef(one.untyped_storage()): str(one.dtype) + str(list(one.shape))
            for one in found if one.device.type == "cpu" and one.untyped_storage().nbytes()}


KINDS = {
    "plain torch, tied": ("qwen3-tied", dict(kernels="torch")),
    "compiled, tied": ("qwen3-tied", {}),
    "int8, tied": ("qwen3-tied", dict(quantization="int8")),
    "int4": ("qwen3", dict(quantization="int4", kernels="torch")),
    "transformers, tied": ("qwen3-tied", dict(model_impl="transformers")),
    "transformers, int4": ("qwen3", dict(model_impl="transformers", quantization="int4")),
    "a draft network": ("qwen3", dict(method="draft_model", model="tiny")),
    "a head that drafts": ("qwen3", dict(method="eagle3")),
    "adapters": ("qwen3", dict(enable_lora=True)),
    "states": ("qwen3.5", {}),
}


RARE = ("plain torch, tied", "int4", "transformers, tied", "a draft network")


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.full] * (kind in RARE)) for kind in KINDS])
def test_no_memory_of_a_network_is_left_and_every_bit_comes_back(checkpoints, tmp_path, kind,
                                                                 monkeypatch):
    """What counts are the storages, which C++ may hold where Python sees nothing: the base of a
    view kept all packed weights. Buffers of steps stay, which are rows of integers. As on a GPU,
    from which host memory is another place."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    name, options = KINDS[kind]
    folder = make(HYBRIDS[name](), tmp_path / name) if name in HYBRIDS else checkpoints[name]
    if "method" in options:
        model = make_head(tmp_path / "head") if options["method"] == "eagle3" else folder
        options = dict(speculative_config=options | dict(
            model=str(model), num_speculative_tokens=2))
    lora = {}
    if kind == "adapters":
        adapters = Adapters(folder, tmp_path)
        adapters.write(1)
        lora = dict(lora_request=adapters.request(1))
    before = set(storages())
    with LLM(folder, **SMALL | options) as llm:
        expected = texts(llm, **lora)
        own = {one: name for one, name in storages().items() if one not in before}
        assert len(own) > 20
        llm.sleep(1)
        left = {name for one, name in own.items() if not one.expired()}
        assert all(re.fullmatch(r"torch.int(32|64)\[\d+\]", name) for name in left), left
        llm.wake_up()
        assert texts(llm, **lora) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_asleep_it_refuses_and_awake_it_writes_what_it_wrote(ranks_in_threads, checkpoints, trained,
                                                             ranks):
    """Weights come back at level 1, wherever they came from, and at level 2 only by an update: for
    TRL in two parts, weights first."""
    there = trained(checkpoints["qwen3"])
    expected = fresh(there)
    with LLM(checkpoints["qwen3"], **SMALL, tensor_parallel_size=ranks) as llm:
        before = texts(llm)
        llm.sleep()
        llm.sleep(1)  # again: nothing is left to give back
        with pytest.raises(RuntimeError, match="wake_up"):
            texts(llm)
        assert llm.reset_prefix_cache()
        llm.wake_up()
        assert texts(llm) == before
        for handed in (as_dict, as_folder):
            llm.update_weights(handed(there))
            for first, second in permutations(["weights", "kv_cache"]):
                llm.sleep(level=1)
                llm.wake_up([first])
                llm.wake_up([first])  # again: it is there
                with pytest.raises(RuntimeError, match="is asleep"):
                    texts(llm)
                llm.wake_up([second])
                assert texts(llm) == expected
        for kv_first in (True, False):
            llm.sleep(level=2)
            llm.wake_up(["weights"])
            if kv_first:
                llm.wake_up()
                with pytest.raises(RuntimeError, match="update_weights"):
                    texts(llm)
            llm.update_weights(as_iterator(there))
            if not kv_first:
                with pytest.raises(RuntimeError, match="is asleep"):
                    texts(llm)
            llm.wake_up()
            assert texts(llm) == expected


def test_two_ranks_record_graphs_once_both_have_all(ranks_in_threads, recorded, checkpoints,
                                                     monkeypatch, capsys):
    """Awake, and with new weights, but not while the other has none: it would wait for ever."""
    broken, bring_back = [], new_weights.bring_back

    def bring_back_but_on_rank_1(runner):
        if runner.ranks.rank in broken:
            raise MemoryError("no memory on rank 1")
        bring_back(runner)

    monkeypatch.setattr(new_weights, "bring_back", bring_back_but_on_rank_1)
    with LLM(checkpoints["tiny"], **SMALL | dict(kernels="triton", max_num_seqs=1),
             tensor_parallel_size=2) as llm:
        def text() -> tuple[list[int], int]:
            recorded.clear()
            [out] = llm.generate([[5, 7, 9]], SamplingParams(temperature=0, max_tokens=2),
                                 use_tqdm=False)
            return out.outputs[0].token_ids, len(recorded)

        expected, tensors = text(), as_dict(checkpoints["tiny"])
        assert expected[1] == 2
        llm.sleep(1)
        llm.wake_up(["weights"])
        llm.update_weights(tensors)  # there is no cache yet
        llm.wake_up()
        assert text() == expected and capsys.readouterr().err.count("CUDA graphs for") == 2
        broken.append(1)
        with pytest.raises(RuntimeError, match="another rank failed"):
            llm.update_weights(tensors)
        broken.clear()
        llm.update_weights(tensors)
        assert text() == expected


def resident() -> int:
    """Bytes of this process that are no file's: what it really holds."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read as on Linux")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_asleep_it_has_given_its_memory_back_to_the_system(dummy, kernels):
    """160 MB of weights and 67 MB of cache, every page of which was written."""
    write_json(dummy / "config.json", hidden_size=1024, intermediate_size=3072,
               num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    with LLM(dummy, dtype="float32", load_format="dummy", device="cpu", kernels=kernels,
             num_gpu_blocks_override=512, max_model_len=256) as llm:
        for cache in (one for pair in llm.runner.kv_cache for one in pair):
            cache.fill_(1)
        cache = sum(one.nbytes for pair in llm.runner.kv_cache for one in pair)
        awake = resident()
        for level, weights in ((1, 0), (2, 160e6)):  # a CPU's weights stay where they are at first
            llm.sleep(level)
            assert awake - resident() > 0.9 * (weights + cache)
            if level == 1:
                llm.wake_up()
                llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)
                assert resident() > awake - 1.1 * cache  # which is resident where it is written


@pytest.mark.parametrize("call, error, message", [
    (lambda llm: llm.sleep(level=0), ValueError, "level=0.*1.*2"),
    (lambda llm: llm.wake_up(["kv"]), ValueError, r"tags=\['kv'\].*weights, kv_cache"),
    (lambda llm: (llm.add_request("a", [1, 2, 3]), llm.sleep()), RuntimeError, "1 requests")])
def test_what_is_wrong_with_a_sleep(checkpoints, call, error, message):
    with LLM(checkpoints["qwen3"], **SMALL) as llm, pytest.raises(error, match=message):
        call(llm)


def test_layers_on_disk_stay_there(checkpoints, monkeypatch):
    monkeypatch.setattr(layer_disk, "SMALL", 0)
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan={"disk": 2}) as llm:
        before, shelves = texts(llm), llm.runner.model.disk.shelves
        places = [tensor.data_ptr() for shelf in shelves for _, tensor in shelf.maps]
        llm.sleep()
        assert places == [tensor.data_ptr() for shelf in shelves for _, tensor in shelf.maps]
        llm.wake_up()
        assert texts(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_network_sleeps_and_wakes_up_beside_new_weights(checkpoints, trained, level):
    """It has the weights that come: so it is right, or it came back with others."""
    there = trained(checkpoints["qwen3"])
    with LLM(checkpoints["qwen3"], **SMALL, speculative_config=dict(
            method="draft_model", model=str(there), num_speculative_tokens=2)) as llm:
        llm.sleep(level)
        llm.update_weights(as_iterator(there))
        llm.wake_up()
        assert texts(llm) == fresh(there)
        counted = llm.metrics
        assert sum(counted.num_accepted) > counted.num_draft_tokens / 2 > 0


@pytest.mark.parametrize("ranks", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)])
def test_steps_in_flight_end_before_it_sleeps(ranks_in_threads, checkpoints, ranks):
    with LLM(checkpoints["qwen3"], **SMALL, **ranks) as llm:
        before = texts(llm)
        for i, prompt in enumerate(PROMPTS):
            llm.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=30))
        llm.step()
        with pytest.raises(RuntimeError, match="4 requests"):
            llm.sleep()
        llm.abort_request([str(i) for i in range(len(PROMPTS))])
        llm.sleep()
        llm.wake_up()
        assert texts(llm) == before


# ------------------------------------------------------------- a second place


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_folder", [False, True])
def test_blocks_in_a_second_place_outlive_a_sleep_and_not_the_weights(
        ranks_in_threads, checkpoints, trained, tmp_path, ranks, has_folder):
    """What the cache alone had is saved, too: without a folder only evicted blocks were."""
    folder = checkpoints["qwen3"]
    there = trained(folder)
    options = dict(block_size=16, kv_offload_bytes=2 ** 20, tensor_parallel_size=ranks,
                   kv_store=str(tmp_path) if has_folder else None)
    before, expected = fresh(folder), fresh(there)
    with LLM(folder, **SMALL | options) as llm:
        store = storage(llm)
        assert texts(llm) == before and store.num_loaded == 0
        for part in (["weights"], ["kv_cache"], None):
            llm.sleep()
            assert not llm.runner.kv_cache
            llm.wake_up(part)
            llm.wake_up()
            loaded = store.num_loaded
            assert texts(llm) == before and store.num_loaded > loaded
        for level in (1, 2):
            llm.sleep(level)
            llm.update_weights(as_dict(there))
            llm.wake_up()
            loaded = store.num_loaded
            assert texts(llm) == expected and store.num_loaded == loaded
        llm.sleep()
        llm.reset_prefix_cache()
        llm.wake_up()
        assert texts(llm) == expected and store.num_loaded == loaded
        store.audit()
        llm.sleep()  # and is shut down
    assert fresh(folder, **options) == before and fresh(there, **options) == expected


def test_a_host_that_is_too_small_saves_some_and_a_failed_step_none(checkpoints, monkeypatch):
    folder, options = checkpoints["qwen3"], dict(block_size=16, kv_offload_bytes=2 ** 15)
    before = fresh(folder)
    with LLM(folder, **SMALL | options) as llm:
        assert texts(llm) == before
        llm.sleep()
        assert not storage(llm).unsaved
        llm.wake_up()
        assert texts(llm) == before
        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "launch", failing)
            llm.sleep()
        llm.wake_up()
        assert not storage(llm).unsaved and texts(llm) == before
        storage(llm).audit()


def failing(*unused):
    raise RuntimeError("a step fails")


# ------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("ranks, which", [(1, 0), (2, 0), (2, 1)])
def test_too_little_host_memory_leaves_an_engine_that_wakes_up(ranks_in_threads, checkpoints,
                                                               monkeypatch, ranks, which):
    counts = Counter()

    def cpu(tensor):  # rank 0 is the main thread
        is_rank_0 = threading.current_thread() is threading.main_thread()
        counts[is_rank_0] += 1
        if is_rank_0 == (which == 0) and counts[is_rank_0] == 9:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return tensor.clone()

    with LLM(checkpoints["qwen3"], **SMALL, tensor_parallel_size=ranks) as llm:
        before = texts(llm)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", cpu)
            with pytest.raises(RuntimeError, match="can't allocate|another rank failed"):
                llm.sleep()
        with pytest.raises(RuntimeError, match="is asleep"):
            texts(llm)
        llm.wake_up()
        assert texts(llm) == before
        llm.sleep()
        llm.wake_up()
        assert texts(llm) == before
