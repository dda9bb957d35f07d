"""Stages, and layers on disk, of transformers' networks: text for text what transformers writes,
and to the last bit what one rank gives with all layers in memory.

Ranks are threads here, which load one after the other: transformers sets torch's defaults
meanwhile, and all threads share these.
"""

from functools import partial
from shutil import copytree
from threading import RLock
from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES, GQA, Made, assert_parity, make, texts_by
from hybrids import HYBRIDS
from safetensors.torch import load_file, save_file
from test_layer_plan import SMALL, both, texts
from transformers import GraniteConfig, GraniteForCausalLM

from nanoserve import LLM
from nanoserve_extras.foreign import foreign_weights, transformers_model
from nanoserve_extras.layer_plan import layer_disk
from nanoserve_extras.layer_plan.foreign_stage import ForeignStage, Left
from nanoserve_extras.layer_plan.layer_plan import LayerPlan, Place

PROMPTS = [list(range(60, 100)), [7, 9, 200], [*range(60, 81), 5, 6]]
# In chunks, and with so few blocks that one long text preempts the others.
OPTIONS = dict(dtype="float32", device="cpu", model_impl="transformers", num_gpu_blocks_override=12,
               block_size=5, max_num_batched_tokens=22, max_num_seqs=6)
SEVERAL = OPTIONS | dict(pipeline_parallel_size=2)
READ_MORE = ["gemma4"]  # the embedding, in each layer


@pytest.fixture(autouse=True)
def in_threads(ranks_in_threads, monkeypatch):
    lock = RLock()

    def one_by_one(function, *args):
        with lock:
            return function(*args)

    for module, name in ((foreign_weights, "make_network"), (transformers_model, "take_over")):
        monkeypatch.setattr(module, name, partial(one_by_one, getattr(module, name)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    return Made(tmp_path_factory.mktemp("stages"), lambda name, folder: make(
        (ARCHITECTURES | HYBRIDS)[name](), folder))


@pytest.fixture(scope="module")
def texts_of(made):
    return texts_by(made, PROMPTS)


@pytest.fixture
def everything(monkeypatch):
    """Also small tensors, as those of the tests are, go to the file."""
    monkeypatch.setattr(layer_disk, "SMALL", 0)


# Granite's class scales the embedding, and its logits behind the head.
@pytest.mark.parametrize("name", [
    one if one == "granite" else pytest.param(one, marks=pytest.mark.full)
    for one in ARCHITECTURES if one not in READ_MORE])
def test_text_equals_transformers(name, made, texts_of):
    with LLM(made[name], **SEVERAL) as llm:
        assert_parity(llm, PROMPTS, texts_of(name), name)


@pytest.mark.parametrize("name, options", [
    pytest.param(one, {}, marks=[pytest.mark.full] * (one != "lfm2")) for one in HYBRIDS] + [
    pytest.param("qwen3.5", dict(layer_plan=[{"disk": 1}, 1], speculative_config=dict(
        method="ngram", num_speculative_tokens=3)), marks=pytest.mark.full),
    pytest.param("qwen3-next", dict(async_scheduling=False), marks=pytest.mark.full)], ids=str)
def test_states_stay_with_the_stage_of_their_layer(name, options, made, texts_of, everything):
    """Most have a stage of states and one that attends. Snapshots are copied on all ranks: the
    second time the prompts go on from these."""
    with LLM(made[name], **SEVERAL | options) as llm:
        assert_parity(llm, PROMPTS, texts_of(name), name)
        [found] = [one for one in llm.get_metrics() if one.name == "vllm:state_snapshot_tokens"]
        assert found.value > 0


@pytest.mark.parametrize("name", [
    one if one == "qwen3.5" else pytest.param(one, marks=pytest.mark.full)
    for one in ARCHITECTURES | HYBRIDS])
def test_layers_on_disk_change_no_text(name, made, texts_of, everything):
    with LLM(made[name], **OPTIONS, layer_plan={"disk": 2}) as llm:
        assert_parity(llm, PROMPTS, texts_of(name), name)
        first, second, *_ = llm.runner.model.disk.shelves
        assert first.num_bytes and second.num_bytes
        assert llm.extra(LayerPlan).metrics()[0].value > first.num_bytes


@pytest.mark.full
@pytest.mark.parametrize("name, options, stages", [
    ("qwen3", {}, dict(pipeline_parallel_size=2)),
    ("gemma3", dict(dtype="bfloat16"), dict(layer_plan=[{"device": 1, "disk": 1}, {"disk": 1}])),
    ("gemma3", dict(max_num_batched_tokens=11, max_num_seqs=6), dict(layer_plan=[1, 1, 1])),
    ("gemma2", dict(num_gpu_blocks_override=12, max_model_len=190, max_num_seqs=20),
     dict(layer_plan=[1, 2])),
    ("mixtral", dict(quantization="int8"), dict(layer_plan=[2, 1])),
    ("mixtral", dict(quantization="int4"), dict(layer_plan={"disk": 2})),
    ("qwen3-tied", dict(quantization="int4", dtype="bfloat16"), dict(layer_plan=[2, 1])),
    ("qwen3-tied", dict(quantization="int8"), dict(layer_plan={"disk": 3})),
    ("llama3.1", dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
     dict(layer_plan=[2, 1]))], ids=str)
def test_not_one_bit_is_another_than_on_one_rank(name, options, stages, checkpoints, prompts,
                                                 everything):
    one, several = both(checkpoints[name], prompts[2:5], options | dict(model_impl="transformers"),
                        stages)
    assert one == several


@pytest.mark.parametrize("part, dtype", [(1, "float32"), (0.01, "bfloat16")])
@pytest.mark.parametrize("name", READ_MORE)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_layers_that_read_more_than_the_stream_are_refused(name, made, tmp_path, part, dtype):
    """On all ranks, though but one of them can tell; also if it is little: what the trial sees is
    not rounding, as the stream was the same."""
    folder = copytree(made[name], tmp_path / "model")
    save_file({key: one * part if "post_per_layer_input_norm" in key else one for key, one in
               load_file(folder / "model.safetensors").items()}, folder / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(ValueError, match="can't be shared out to stages.*layer_plan out"):
        LLM(folder, **SEVERAL | dict(dtype=dtype))


def test_a_rank_has_its_layers_and_no_others(checkpoints, monkeypatch):
    """Of the files, too, nothing of the others is read."""
    has, take = ForeignStage.has, ForeignStage.take
    names, read = {}, {0: set(), 1: set()}

    def note(stage, path):
        read[stage.line.stage] |= {path} if has(stage, path) and path.endswith("weight") else set()
        return has(stage, path)

    def keep(stage, network):
        take(stage, network)
        names.setdefault(stage.line.stage, {name for name, _ in network.named_parameters()})

    monkeypatch.setattr(ForeignStage, "has", note)
    monkeypatch.setattr(ForeignStage, "take", keep)
    with LLM(checkpoints["qwen3-sharded"], **SMALL, layer_plan=[1, 2], model_impl="transformers"):
        pass
    assert read == names
    assert {one.split(".")[2] if "layers." in one else one for one in names[0]} == {
        "0", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert {one.split(".")[2] for one in names[1] - {"model.norm.weight"}} == {"1", "2"}


def test_layers_on_disk_leave_no_tensor_of_a_file_out():
    """On one rank all is here: a tower's layers, too, which may be more than those of the text."""
    config = GraniteConfig(**GQA)
    line = SimpleNamespace(is_alone=True, stage=0, place=Place(range(2), (0,)),
                           row=torch.empty(0, config.hidden_size))
    stage = ForeignStage(line, config.num_hidden_layers)
    with torch.device("meta"):
        stage.take(GraniteForCausalLM(config))
    assert stage.on_disk == {"model.layers.0": 0}
    names = ["model.layers.1.mlp.up_proj.weight", "vision_tower.encoder.layers.7.norm.weight"]
    assert [name for _, name, _ in stage.pass_over((None, name, None) for name in names)] == names


def test_a_stream_that_is_wider_than_what_the_next_rank_receives_is_refused():
    """Some classes keep it in float32 whatever the weights are (Zaya)."""
    row = torch.empty(0, 4, dtype=torch.bfloat16)
    stage = ForeignStage(SimpleNamespace(place=Place(range(1)), row=row), num_layers=2)

    def network(input_ids):
        raise Left(torch.zeros(1, 3, 4))

    stage.network = network
    with pytest.raises(ValueError, match="float32 and not .* of torch.bfloat16"):
        stage.through(dict(input_ids=torch.zeros(1, 3)))


@pytest.mark.full
def test_layers_move_and_weights_are_replaced(checkpoints, prompts, everything):
    folder, options = checkpoints["qwen3"], SMALL | dict(model_impl="transformers")
    with LLM(folder, **options) as llm:
        expected = [one[1:3] for one in texts(llm, prompts[3:5])]
    with LLM(folder, **options, layer_plan=[1, 2]) as llm:
        llm.deploy([2, {"disk": 1}])
        assert [one[1:3] for one in texts(llm, prompts[3:5])] == expected
        llm.sleep()
        llm.wake_up()
        assert [one[1:3] for one in texts(llm, prompts[3:5])] == expected
        weights = load_file(folder / "model.safetensors")
        with pytest.raises(ValueError, match="missing tensors.*layers.2.mlp.up_proj"):
            llm.update_weights({name: one for name, one in weights.items()
                                if "layers.2.mlp.up_proj" not in name})  # rank 1 needs it
        assert [one[1:3] for one in texts(llm, prompts[3:5])] == expected
        llm.update_weights(folder)
        assert [one[1:3] for one in texts(llm, prompts[3:5])] == expected
