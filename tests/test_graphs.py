"""Steps of decodes, recorded by a stand-in for CUDA graphs (recorded_graphs.py) and replayed."""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from checkpoints import assert_same_text
from clean_process import needs_extras
from helpers import poisoned, watch_steps
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture
from recorded_graphs import RecordedGraph
from safetensors.torch import load_file

from nanoserve import LLM, SamplingParams
from nanoserve.graphs import DecodeGraphs, Size, graph_sizes
from nanoserve.sequence import Step

pytest.importorskip("nanoserve.triton_attention")

def start(folder, depth=1, **options) -> LLM:
    """Kernels on a CPU."""
    return poisoned(LLM(folder, dtype="float32", device="cpu", kernels="triton",
                        async_scheduling=bool(depth),
                        **dict(num_gpu_blocks_override=48) | options))


# ------------------------------------------------------------------- sizes


def decodes(rows: Iterable) -> Step:
    """Each of these computes one token, the one at position 4, and samples the next."""
    rows = list(rows)
    return Step(0, dict.fromkeys(rows, 1), [4] * len(rows), rows)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 9, 16, 17, 20, 31, 256, 257, 320, 1000])
def test_every_batch_finds_a_size(max_num_seqs):
    """Sizes that ended below max_num_seqs were a crash at batch 17 of 20 (nano-vllm)."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    graphs = of_sizes(max_num_seqs)
    for num_rows in range(1, max_num_seqs + 1):
        size = graphs.size_for(decodes(range(num_rows)))
        assert num_rows <= size.rows == size.tokens <= max_num_seqs and not size.drafts
        assert size.rows < 2 * num_rows + 16, "more padding than work"
        assert all(other < num_rows for other in sizes if other < size.rows)


def of_sizes(max_num_seqs: int) -> DecodeGraphs:
    """Without recordings."""
    return DecodeGraphs([Size(rows, rows) for rows in graph_sizes(max_num_seqs)], torch.empty(0))


def test_what_is_recorded():
    """Steps that sample behind each of their tokens: no chunk, and no step that samples nothing."""
    graphs, step = of_sizes(8), decodes("abc")
    assert graphs.size_for(step) == Size(4, 4)
    assert graphs.size_for(replace(step, network=1)) is None
    assert graphs.size_for(replace(step, num_new_tokens=dict(a=1, b=1, c=2))) is None
    assert graphs.size_for(replace(step, sampling=["a", "b"])) is None
    assert graphs.size_for(Step(0)) is None


# ---------------------------------------------------------- the same tokens


def test_every_batch_size_equals_transformers(checkpoints, references, recorded):
    """All requests, one, and some, on the same engine: they end one after the other, so that each
    size is replayed, with rows that change, leave early and leave stale numbers behind."""
    engine = start(checkpoints["tiny"], max_num_seqs=5)
    assert [size.rows for size in engine.runner.graphs.sizes if not size.drafts] == [
        1, 2, 4, 5]
    for count in (5, 1, 3):
        prompts = [[10 * count + i, 7, 60 + i] + [40 + i] * (5 * i) for i in range(count)]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=3 + i)
                  for i in range(count)]
        recorded.clear()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        for output, asked in zip(outputs, params, strict=True):
            expected, gaps = references("tiny", output.prompt_token_ids, 12)
            assert_same_text(output.outputs[0].token_ids, expected[:asked.max_tokens], gaps,
                             f"{count} rows")
        assert len(recorded) >= 1 + count, "decodes must have been replayed"
        sizes = {engine.runner.graphs.size_for(decodes(range(n + 1))) for n in range(count)}
        assert set(recorded) == sizes, "each size must have been replayed"


def test_graphs_equal_eager_in_mixed_company(checkpoints, references, prompts, recorded):
    """Chunks, prefix hits and preemptions between the decodes; block tables that change their
    width; a window of rows that comes and goes."""
    engine = start(checkpoints["tiny"], max_num_seqs=3, max_num_batched_tokens=24,
                   num_gpu_blocks_override=5)
    asked = SamplingParams(temperature=0, max_tokens=7)
    short = prompts[2:5] + [prompts[10][:20]] * 2  # 2 blocks each in the end, of 5
    steps = watch_steps(engine)
    for output in engine.generate(short, asked, use_tqdm=False):
        expected, gaps = references("tiny", output.prompt_token_ids, 12)
        assert_same_text(output.outputs[0].token_ids, expected[:7], gaps, "mixed")
    assert len(recorded) > 5 and any(step.preempted for step in steps)


def test_samples_and_controls_equal_eager(checkpoints, recorded):
    """Temperature, filters, penalties, bad words, logprobs: in graphs, and the same engine without.

    What a graph can't know, penalties, is chosen from the hidden states it leaves behind.
    """
    params = [SamplingParams(**dict(seed=i, max_tokens=2, ignore_eos=True) | kinds)
              for i, kinds in enumerate((
                  dict(temperature=.8), dict(temperature=0), dict(temperature=2, top_k=5, top_p=.7),
                  dict(min_p=.2, logprobs=2), dict(frequency_penalty=1.5, presence_penalty=.5),
                  dict(temperature=0, logit_bias={65: 4.0}, allowed_token_ids=[*range(60, 90)])))]
    prompts = [[3 * i + 1, 7, 9] for i in range(len(params))]
    # Together they choose behind it. By themselves: the recording's choice, logprobs, edits.
    all_together, alone = slice(6), (slice(3), slice(3, 4), slice(5, 6))
    told = []
    for enforce_eager, groups in ((False, (all_together, *alone)), (True, (all_together,))):
        engine = start(checkpoints["tiny"], max_num_seqs=6, enforce_eager=enforce_eager)
        assert (engine.runner.graphs is None) == enforce_eager
        for some in groups:
            outputs = engine.generate(prompts[some], params[some], use_tqdm=False)
            told.append([(output.outputs[0].token_ids, [
                round(entry.logprob, 4) for position in output.outputs[0].logprobs or []
                for entry in position.values()]) for output in outputs])
    together, *parts, eager = told
    assert together == eager and together[3][1]
    assert together[:4] + together[5:] == sum(parts, []), "company changes nothing"
    assert recorded


@needs_extras
def test_new_weights_and_a_new_cache_are_recorded_anew(checkpoints, recorded):
    """Graphs hold addresses of both: replayed behind an update or a sleep they would read what is
    no longer there. Here weights have 4 bits in the layers and 8 in the head."""
    weights = load_file(checkpoints["tiny"] / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(1)
    texts = []
    for enforce_eager in (False, True):
        engine = start(checkpoints["tiny"], max_num_seqs=2, enforce_eager=enforce_eager,
                       quantization="int4")
        for change in (lambda: None, lambda: engine.update_weights(weights),  # noqa: B023
                       lambda: engine.sleep() or engine.wake_up()):  # noqa: B023
            change()
            outputs = engine.generate([[1, 7, 9], [5]], SamplingParams(
                temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[:3] == texts[3:] and texts[0] != texts[1] == texts[2] and recorded


def test_a_recording_keeps_no_logits(checkpoints, recorded):
    """What it returns is its own for ever: the logits of 20 sizes would be 0.7 GB."""
    graphs = start(checkpoints["tiny"], max_num_seqs=2).runner.graphs.graphs
    assert [size for size in graphs if not size.drafts] == [Size(2, 2), Size(1, 1)], (
        "the largest first, in whose memory the others find room")
    for size, (layers, choice) in graphs.items():
        assert layers.output.shape == (size.tokens, 32) and choice.output.shape == (size.tokens,)
        assert any(not hasattr(call[0], "overloadpacket") for call in layers.calls), "no kernels"


@needs_extras
def test_where_recording_fails_steps_run_one_by_one(checkpoints, recorded, monkeypatch, capsys):
    """At the start and behind `wake_up`, whose failure once ended the engine, with a traceback.
    What was recorded before the failure gives its memory back. As on a GPU, the recording that
    ends early has an error of its own. The model has experts, which differ from step to step."""
    def ids(engine) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        [output] = engine.generate([[1, 2, 3]], params, use_tqdm=False)
        return output.outputs[0].token_ids

    engine = start(checkpoints["tiny-moe"], max_num_seqs=2)
    expected, capture, made = ids(engine), RecordedGraph.capture, []
    assert engine.runner.graphs is not None

    def fail(graph, function):
        made.append(weakref.ref(graph))
        if len(made) % 3:  # both of the first, and largest one are recorded
            return capture(graph, function)
        try:
            raise torch.OutOfMemoryError("not permitted")
        finally:
            raise RuntimeError("the recording was ended early")

    monkeypatch.setattr(RecordedGraph, "capture", fail)
    engine.sleep(level=1)
    engine.wake_up()
    for tried in (engine, start(checkpoints["tiny-moe"], max_num_seqs=2)):
        assert tried.runner.graphs is None and ids(tried) == expected
        assert not any(graph() for graph in made), "a failed start keeps no recording"
    assert len(made) == 6 and "memory ran out" in capsys.readouterr().err


# ------------------------------------------------------------------- memory


def test_a_forgotten_engine_is_freed_at_once(checkpoints, recorded):
    """Not when Python's garbage collector comes by: nothing holds on to a runner in a circle, no
    closure of a recording either. Or the next engine would find its memory taken."""
    engine = start(checkpoints["tiny"], max_num_seqs=2)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    held = [weakref.ref(part) for part in (engine.runner, engine.runner.model,
                                           engine.runner.graphs, engine.runner.kv_cache[0][0])]
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()


@needs_extras
def test_forced_tokens_among_recorded_steps(checkpoints, references, recorded):
    """A grammar forces tokens of one row, while the other only decodes."""
    params = [SamplingParams(temperature=0, max_tokens=9, structured_outputs=dict(regex="abcdef")),
              SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)]
    engine = start(checkpoints["tiny"], max_num_seqs=4)
    forced, free = engine.generate([[1, 7, 9], [5]], params, use_tqdm=False)
    assert forced.outputs[0].text == "abcdef"
    assert_same_text(free.outputs[0].token_ids, *references("tiny", [5], 5), "beside it")
    assert {size.drafts for size in recorded} == {False, True}


@needs_extras
def test_drafts_among_recorded_steps(checkpoints, recorded):
    """Steps with drafts of some rows, or of all, are replayed as those between, and so are the
    decodes of a draft model. Drawn and filtered tokens go through the kernel that draws, several
    for a row. Without overlap: the host knows each row's input."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(0, 240, 12))]
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
              SamplingParams(temperature=0.4, top_k=40, top_p=0.9, seed=3, max_tokens=8,
                             ignore_eos=True, logprobs=1)]

    def texts(engine) -> list[list[int]]:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    options = dict(depth=0, max_num_seqs=2)
    expected = texts(start(checkpoints["tiny"], **options, enforce_eager=True))
    engine = start(checkpoints["tiny"], **options, speculative_config=dict(
        method="draft_model", model=str(checkpoints["tiny"]), num_speculative_tokens=2))
    turns, [propose] = iter(range(100)), engine.scheduler.hooks.draft
    # Every other time: a right token, and a wrong one.
    engine.scheduler.hooks.draft[:] = [lambda seq, most: [] if next(turns) % 4 > 1 else [
        *propose(seq, most)[:1], 0][:most]]
    recorded.clear()
    assert texts(engine) == expected
    assert engine.metrics.num_draft_tokens > 4
    assert {size.drafts for size in recorded} == {False, True}
    assert {size.network for size in recorded} == {0, 1}
