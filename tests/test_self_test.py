"""The trial at the first start: what is broken on purpose is found, named and replaced.

A twin is a stand-in here: `ops` itself, with one function that goes wrong as a miscompiled kernel
would. The compiled twin as it is passes.
"""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from checkpoints import assert_same_text
from dummy_engines import start
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import LLM, SamplingParams, ops
from nanoserve import self_test as trial
from nanoserve.config import EngineConfig
from nanoserve.model_config import ModelConfig
from nanoserve.self_test import Shapes, failing_functions, load_backend, trials

SMALL = Shapes(torch.float32, 48, 8, qk_norm=True, num_experts=3, windows=(None, 5), softcap=20.0)


def twin(**functions) -> SimpleNamespace:
    return SimpleNamespace(**vars(ops) | functions)


def wrong(found: dict[tuple[str, ...], tuple[float, str]]) -> dict[tuple[str, ...], str]:
    return {names: error for names, (_, error) in found.items() if error}


@pytest.mark.parametrize("dtype", trial.TOLERANCE, ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
def test_the_compiled_twin_passes(dtype, is_int8):
    cpu = pytest.importorskip("nanoserve.cpu")
    shapes = SMALL._replace(dtype=dtype, is_int8=is_int8, hidden_size=520, head_dim=64)
    found = trials(cpu, shapes)
    assert set(found) == set(trial.CHECKS) and not wrong(found)
    assert found["prepack", "linear", "embed"][0] > 0 < found["prepack", "experts"][0]


def last_row_lost(x, *args):
    out = ops.linear(x, *args)
    return out if len(out) != 9 else torch.cat((out[:-1], out[:1]))


def nan_in_one(x, *args):
    out = ops.act_and_mul(x, *args)
    out[-1, -1] = torch.nan
    return out


def stale_cache(qkv, *args):
    """Writes the keys of the first token for all."""
    *others, k_cache, v_cache, slots = args
    return ops.norm_rope_store(qkv, *others, k_cache, v_cache, slots.clamp(max=int(slots[0])))


@pytest.mark.parametrize("broken, says", [
    (dict(linear=last_row_lost), "linear of a batch of 9 is wrong"),
    (dict(act_and_mul=nan_in_one), "act_and_mul of a batch of 1 is wrong .relative error nan"),
    (dict(rms_norm=lambda x, weight, eps: 1 / 0),
     "rms_norm or add_rms_norm fails .ZeroDivisionError"),
    (dict(add_rms_norm=lambda *given: ops.add_rms_norm(*given[:3], 0.1)),
     "add_rms_norm of a batch of 1 is wrong"),
    (dict(experts=lambda *given: ops.experts(*given) * 1.001), "experts of a batch of 1 is wrong"),
    (dict(norm_rope_store=stale_cache), "paged_attention of .* is wrong"),
    (dict(paged_attention=lambda q, k, v, batch, scale, window, *rest: ops.paged_attention(
        q, k, v, batch, scale, None, *rest)), "paged_attention of 1 row is wrong"),
    (dict(argmax=lambda logits: logits.argmin(-1)), "argmax of a batch of 1 is wrong"),
    (dict(thresholds=lambda logits, heat, top_k, top_p, min_p: ops.thresholds(
        logits, heat, top_k * 0, top_p, min_p)), "thresholds is wrong"),
    (dict(sample_tokens=lambda logits, heat, *rest: ops.sample_tokens(logits, heat * 0.5, *rest)),
     "sample_tokens is wrong")],
    ids=lambda given: str(*given) if isinstance(given, dict) else "")
def test_a_function_that_differs_or_raises_is_named(broken, says):
    [(_, error)] = wrong(trials(twin(**broken), SMALL)).items()
    assert re.match(says, error), error


class Graph:
    """A recording that runs the function once more."""

    def capture(self, function):
        self.function = function

    def replay(self):
        return self.function()


class StaleGraph(Graph):
    """Gives what it gave when it was recorded: products on another stream would."""

    def capture(self, function):
        self.output = function().clone()

    def replay(self):
        return self.output


class NoGraph(Graph):
    def capture(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_graph_whose_replay_is_stale_is_found():
    assert not wrong(trials(ops, SMALL, Graph))
    for kind, says in ((StaleGraph, "a graph's replay with contents 2 is wrong"),
                       (NoGraph, "graph fails (Runt")):
        [(names, error)] = wrong(trials(ops, SMALL, kind)).items()
        assert names == ("graph",) and error.startswith(says)


def test_what_shares_a_layout_in_memory_goes_together(dummy, trusted, monkeypatch):
    """Another backend's panels or cache can't be read; and `ops` of some waits for the device."""
    model = ModelConfig.from_folder(dummy)
    config = EngineConfig(model="none", dtype="float32").resolved("cpu", model)

    def replaced(name: str) -> tuple[str, ...]:
        broken = twin(**{name: None})
        monkeypatch.setattr(trial, "load_backend", lambda kernels: broken)
        monkeypatch.setattr(trial, "wrong_functions", lambda backend, shapes: {
            ", ".join(names): error for names, error in wrong(trials(backend, shapes)).items()})
        return failing_functions(config, model)[0]

    assert replaced("act_and_mul") == ("act_and_mul",)
    assert replaced("linear") == ("embed", "experts", "graph", "linear", "prepack")
    assert replaced("paged_attention") == ("graph", "new_cache", "norm_rope_store",
                                           "paged_attention")


def test_replaced_functions_are_those_of_ops():
    cpu = pytest.importorskip("nanoserve.cpu")
    made = load_backend("cpu", ("linear", "graph"))
    assert made.linear is ops.linear and made.argmax is cpu.argmax and not hasattr(made, "graph")
    assert load_backend("cpu") is cpu and load_backend("torch", ("linear",)).linear is ops.linear


def test_what_is_taken_from_ops_is_not_tried():
    assert not trials(ops, SMALL)
    other = twin(act_and_mul=lambda *given: ops.act_and_mul(*given))
    assert [*trials(other, SMALL)] == [("act_and_mul",)]


@pytest.mark.parametrize("name", ops.__all__)
def test_whatever_is_broken_is_not_in_what_is_believed(name):
    """Some functions have no check of their own, but share that of another."""
    def broken(*given):
        raise RuntimeError("no kernel image")

    found = wrong(trials(twin(**{name: broken}), SMALL))
    assert found and all(name in names for names in found)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError(
    ), RuntimeError("Triton Error [CUDA]: out of memory")], ids=lambda error: type(error).__name__)
def test_a_trial_without_memory_is_not_remembered(dummy, trusted, monkeypatch, tmp_path, error):
    def full(*given):
        raise error

    config = ModelConfig.from_folder(dummy)
    engine = EngineConfig(model="none", dtype="float32").resolved("cpu", config)
    with monkeypatch.context() as patch:
        patch.setattr(trusted, "act_and_mul", full)
        with pytest.raises(ValueError, match="no memory for a trial of the kernels: end other"):
            failing_functions(engine, config)
    assert not [*tmp_path.glob("self-test-*")]


@pytest.fixture
def trusted(monkeypatch, tmp_path):
    """Nothing is remembered but in a cache folder of the test's own. Returns the CPU's twin."""
    cpu = pytest.importorskip("nanoserve.cpu")
    monkeypatch.setattr(trial, "wrong_functions", inspect.unwrap(trial.wrong_functions))
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path)
    return cpu


def test_an_engine_with_a_broken_twin_writes_the_right_text(checkpoints, trusted, monkeypatch,
                                                            references, prompts, capsys):
    """From the first start on. The second one remembers."""
    product = trusted.LIBRARY.product
    monkeypatch.setattr(trusted, "linear", lambda x, packed, bias=None, out_dtype=None: product(
        x.contiguous(), packed, bias) * 1.01)
    for count in (1, 2):
        engine = LLM(checkpoints["mixtral"], dtype="float32", num_gpu_blocks_override=64)
        said = capsys.readouterr().err
        assert "on this machine: linear of a batch of 1 is wrong (relative error 1.0e-02)" in said
        assert "embed, experts, graph, linear, prepack are those of kernels='torch' here" in said
        assert "nanoserve doctor" in said
        assert engine.runner.ops.linear is ops.linear is engine.runner.placement.ops.linear
        assert engine.runner.ops.paged_attention is trusted.paged_attention
        params = SamplingParams(temperature=0, max_tokens=8)
        for prompt, output in zip(prompts[2:5], engine.generate(prompts[2:5], params,
                                                                use_tqdm=False), strict=True):
            got = output.outputs[0].token_ids
            assert_same_text(got, *references("mixtral", prompt, 8, got), f"start {count}")
        monkeypatch.setattr(trial, "trials", None)  # would fail if it were called


def test_a_trial_is_remembered_by_all_that_matters(dummy, trusted, monkeypatch, tmp_path):
    tries = []
    monkeypatch.setattr(trial, "trials", lambda *given: tries.append(given) or {})

    def starts(**options) -> int:
        tries.clear()
        asked = EngineConfig(model="none", **options)
        model = ModelConfig.from_folder(dummy)
        failing_functions(asked.resolved("cpu", model), model)
        return len(tries)

    assert [starts(dtype="float32"), starts(dtype="float32")] == [1, 0]
    assert [starts(dtype="bfloat16"), starts(dtype="float32", kv_cache_dtype="int8"),
            starts(dtype="float32", block_size=8)] == [1, 1, 1]
    kept = [*tmp_path.glob("self-test-*")]
    assert len(kept) == 4
    for path in kept:
        path.write_text("{damaged")
    assert [starts(dtype="float32"), starts(dtype="float32")] == [1, 0]
    monkeypatch.setattr(trusted, "COMPILED", SimpleNamespace(_name="another library"))
    assert starts(dtype="float32") == 1
    monkeypatch.setattr(trial, "cache_folder", lambda: tmp_path / "missing")  # no error
    assert [starts(dtype="float32"), starts(dtype="float32")] == [1, 1]
    monkeypatch.setattr(trial, "cache_folder", lambda: None)
    assert starts(dtype="float32") == 1


def test_a_twin_whose_queries_see_other_keys_is_found_at_each_start(dummy, trusted, monkeypatch):
    """Also where the trial is remembered, and where only the farthest keys differ."""
    config = ModelConfig.from_folder(dummy)
    engine = EngineConfig(model="none", dtype="float32").resolved("cpu", config)
    assert failing_functions(engine, config) == ((), [])
    reach = config.max_position_embeddings - config.max_position_embeddings // 8
    monkeypatch.setattr(trial, "visible", lambda query, key, window, last: (
        (key <= last) & ((key > query - reach) | (key < 4))))
    names, [said] = failing_functions(engine, config)
    assert names == ("graph", "new_cache", "norm_rope_store", "paged_attention")
    assert "does not see what `visible` in nanoserve/sequence.py says" in said


def test_a_kernel_that_breaks_the_device_is_left_out_by_the_next_start(dummy, trusted, monkeypatch):
    """An illegal address ends a GPU's every later call in this process."""
    def broken(*sizes, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(trial, "trials",
                        lambda *given: {("sample_tokens",): (0.0, "draw fails (illegal)")})
    config = ModelConfig.from_folder(dummy)
    engine = EngineConfig(model="none").resolved("cpu", config)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", broken)
        with pytest.raises(ValueError, match="GPU.*draw.*start again"):
            failing_functions(engine, config)
    names, [said] = failing_functions(engine, config)
    assert names == ("argmax", "sample_tokens", "thresholds") and "draw fails (illegal)" in said


def test_a_gpu_is_known_by_what_every_torch_says_of_it(monkeypatch):
    """By public names alone: a private one was gone in torch 2.11, and no engine started."""
    pytest.importorskip("triton")
    from nanoserve import triton_attention as kernels

    about = [("get_device_name", "a card"), ("get_device_capability", (9, 0))]
    for name, value in about:
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    machine = trial.machine_of(kernels, torch.device("cuda"))
    assert {torch.__version__, *(value for _, value in about)} <= {*machine}


def test_the_specification_is_not_tried(dummy, trusted, monkeypatch):
    monkeypatch.setattr(trial, "trials", None)
    for kernels in ("torch", "triton"):  # in the interpreter
        asked = EngineConfig(model="none", kernels=kernels)
        config = asked.resolved("cpu", ModelConfig.from_folder(dummy))
        assert failing_functions(config, None) == ((), [])


def test_graphs_are_off_where_one_was_stale(dummy, monkeypatch, trusted):
    monkeypatch.setattr(trial, "failing_functions", lambda *given: (("graph",), ["a sentence"]))
    runner = start(dummy).runner
    runner.graph_class, runner.config = Graph, runner.config.__class__(
        **vars(runner.config) | dict(kernels="triton", enforce_eager=False))
    assert not runner.wants_graphs
    runner.parts = runner.parts.__class__()
    assert runner.wants_graphs
