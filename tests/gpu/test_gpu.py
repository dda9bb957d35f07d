"""On a real GPU: what the interpreter and the stand-ins promise is what the device does.

    python -m pytest -n 8 tests/gpu      kernels, graphs, the engine; skipped where there is no GPU
    python -m pytest -n 0 tests/gpu      the same, and what it does with memory: alone on the GPU

Here the engine's greedy text in float32 against transformers'; graphs against eager steps; and what
only a device has: queues that the host runs ahead of, and waiting. Kernels and memory have files of
their own.
"""

import guessing
import pytest
import torch
from adapters import ALL, SMALL, Adapters
from architectures import ARCHITECTURES, assert_parity, make, texts_by
from checkpoints import CHECKPOINTS
from helpers import storage, watch_steps
from hybrids import HYBRIDS
from test_hidden_drafts import make_head

pytest.importorskip("triton")

from gpu_checks import DEVICE, GREEDY, assert_texts, needs_gpu, start, watch_replays
from helpers import sequence
from kernel_modes import MODES, few

from nanoserve import LLM, SamplingParams
from nanoserve.batch import BatchBuilder
from nanoserve.sequence import Step

pytestmark = needs_gpu


# --------------------------------------------------------------- the engine


@pytest.mark.parametrize("how", [dict(), dict(enforce_eager=True), dict(async_scheduling=False),
                                 dict(enforce_eager=True, async_scheduling=False),
                                 dict(kernels="torch")], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_transformers(checkpoints, references, prompts, mode, how):
    engine = start(checkpoints["qwen3"], **MODES[mode] | how)
    steps = watch_steps(engine)
    outputs = engine.generate(few(prompts), GREEDY, use_tqdm=False)
    assert_texts(outputs, references, "qwen3", f"{mode} {how}")
    assert any(step.preempted for step in steps) == ("preempted" in mode)
    assert (engine.runner.graphs is None) == bool(
        how.get("enforce_eager") or how.get("kernels") == "torch")


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "qwen3"])
def test_every_family_equals_transformers(checkpoints, references, prompts, name):
    """With graphs and overlap, chunked, cached; what is left open is what a GPU's user gets."""
    engine = start(checkpoints[name], max_num_batched_tokens=60, max_num_seqs=5)
    assert engine.depth == 1 and engine.runner.graphs is not None
    assert_texts(engine.generate(prompts, GREEDY, use_tqdm=False), references, name, name)


def test_graphs_equal_eager_for_every_batch_size(checkpoints, references):
    engines = {eager: start(checkpoints["qwen3"], max_num_seqs=20, num_gpu_blocks_override=128,
                            enforce_eager=eager) for eager in (False, True)}
    replayed = watch_replays(engines[False])
    decodes = [size for size in engines[False].runner.graphs.sizes if not size.drafts]
    assert decodes[-1].rows == 20
    for count in [*range(1, 21), 3, 20]:
        prompts = [[10 * count + i, 7, 60 + i] + [40 + i] * (5 * i) for i in range(count)]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=4 + i % 7)
                  for i in range(count)]
        replayed.clear()
        texts = {eager: engine.generate(prompts, params, use_tqdm=False)
                 for eager, engine in engines.items()}
        assert max(replayed) == min(size for size in decodes if size.rows >= count)
        for graph, eager in zip(texts[False], texts[True], strict=True):
            ours, theirs = graph.outputs[0].token_ids, eager.outputs[0].token_ids
            if ours != theirs:  # then one of them must be a near-tie of the reference's
                assert_texts([graph, eager], references, "qwen3", f"{count} rows")


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_come_back_from_pinned_memory_and_no_launch_waits(checkpoints, references, overlap):
    """9 blocks of cache, which lose every prompt to host memory before it is asked again: copies
    between the two stand in the step's own stream, in front of replays of graphs, too."""
    engine = start(checkpoints["qwen3"], num_gpu_blocks_override=9, max_model_len=128,
                   kv_offload_bytes=2 ** 24, async_scheduling=overlap)
    assert engine.runner.copier.memory.is_pinned()
    prompts = [[(37 * i + 11 * first) % 251 for i in range(100)] for first in range(3)]
    guard(engine)
    for _ in range(3):
        for prompt in prompts:
            assert_texts(engine.generate([prompt], GREEDY, use_tqdm=False), references, "qwen3",
                         "host memory")
    storage(engine).audit()
    assert storage(engine).num_hits >= 6 * 80


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gpt-oss"])  # the last is transformers'
def test_small_weights_in_graphs_equal_widened_ones(checkpoints, tmp_path, prompts, name,
                                                    quantization):
    """Their kernel, replayed and launched, beside `kernels="torch"`: the logprobs of what is
    chosen, whose sums have another order alone. Of experts it is one launch for all."""
    folder = checkpoints[name] if name in CHECKPOINTS else make(
        ARCHITECTURES[name](), tmp_path / name)
    prompts = [[token % 256 for token in prompt[:80]] for prompt in prompts]
    params, found = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0), []
    for how in (dict(kernels="torch"), dict(), dict(enforce_eager=True)):
        engine = start(folder, quantization=quantization, **how)
        assert (engine.runner.graphs is not None) == (how == {})
        outputs = engine.generate(prompts, params, use_tqdm=False)
        steps = [step for output in outputs for step in (
            *(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs)]
        found.append([(token, one.logprob) for step in steps for token, one in step.items()])
    for other in found[1:]:
        assert [token for token, _ in other] == [token for token, _ in found[0]]
        assert [logprob for _, logprob in other] == pytest.approx(
            [logprob for _, logprob in found[0]], abs=1e-3)


@pytest.mark.parametrize("asked", [
    dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=1),
    dict(method="draft_model", num_speculative_tokens=3)], ids=["ngram", "draft_model"])
def test_drafts_in_graphs_equal_transformers(checkpoints, references, prompts, asked):
    """All rows with drafts, or some of them, of a text that repeats itself. Nothing waits but the
    draft model's result."""
    if asked["method"] == "draft_model":
        asked = dict(asked, model=str(checkpoints["qwen3"]))
    engine = start(checkpoints["qwen3"], speculative_config=asked)
    replayed = watch_replays(engine)
    guard(engine)
    for some in (prompts, prompts[:1], [[5, 6, 7] * 4, *prompts[2:5]]):
        assert_texts(engine.generate(some, GREEDY, use_tqdm=False), references, "qwen3", "drafts")
    assert {size.drafts for size in replayed} == {False, True}
    assert {size.network for size in replayed} == {0, int(asked["method"] == "draft_model")}


def test_forced_tokens_in_graphs_equal_eager(checkpoints, prompts):
    """A grammar forces the tokens of one row while others decode."""
    params = [SamplingParams(temperature=0, max_tokens=24, structured_outputs=dict(
        json=dict(type="object", properties=dict(a_long_name=dict(type="integer")),
                  required=["a_long_name"], additionalProperties=False))),
              *[SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3]
    texts, replayed = [], []
    for eager in (False, True):
        engine = start(checkpoints["qwen3"], enforce_eager=eager)
        replayed = replayed if eager else watch_replays(engine)
        texts.append(ids_of(engine.generate(prompts[:4], params, use_tqdm=False)))
    assert texts[0] == texts[1] and any(size.drafts for size in replayed)


def test_adapters_in_graphs_equal_merged_weights(checkpoints, tmp_path):
    """Beside rows without, with drafts, and after others have been loaded."""
    voices = Adapters(checkpoints["qwen3"], tmp_path)
    voices.write(1, ["q_proj", "v_proj"]), voices.write(2, ALL, rank=8, scaling=1.0)
    options = SMALL | dict(device="cuda", block_size=16)
    with LLM(voices.base, **options, speculative_config=dict(
            method="ngram", num_speculative_tokens=3, prompt_lookup_max=1)) as llm:
        replayed = watch_replays(llm)
        guard(llm)
        for seeds in ([1, None, 1], [None] * 3, [2, None, 1, 2, 1], [1, 2]):
            voices.check(llm, seeds)
    assert {size.extra for size in replayed} == {False, True}


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma4", "deepseek3", "gpt-oss"])
def test_networks_of_transformers_in_graphs(tmp_path, prompts, name):
    """Recorded at the start, or said not to be: none of these is."""
    make(ARCHITECTURES[name](), tmp_path / name)
    some = [[token % 256 for token in prompt[:40]] for prompt in few(prompts)]
    engine = start(tmp_path / name, model_impl="transformers")
    assert engine.runner.graphs is not None
    assert_parity(engine, some, texts_by({name: tmp_path / name}, some)(name), name)


@pytest.mark.parametrize("asked", [None, dict(
    method="ngram", num_speculative_tokens=3, prompt_lookup_max=1)], ids=["decodes", "drafts"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "lfm2", "granite4-h"])
def test_networks_with_states_in_graphs(tmp_path, prompts, name, asked):
    """Twice, the second time from snapshots, which are copied between two replays."""
    make(HYBRIDS[name](), tmp_path / name)
    some = [[token % 256 for token in prompt[:40]] for prompt in few(prompts)]
    engine = start(tmp_path / name, speculative_config=asked)
    assert any(size.drafts for size in engine.runner.graphs.sizes) == ("qwen" in name)
    guard(engine)
    assert_parity(engine, some, texts_by({name: tmp_path / name}, some)(name), name)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_heads_drafts_in_graphs_are_those_of_eager_steps(checkpoints, references, tmp_path,
                                                           prompts, impl):
    """EAGLE-3: where the model's step leaves its states, a recording's and an eager one's too."""
    head, drafts = make_head(tmp_path / "head", True), []
    for eager in (False, True):
        engine = start(checkpoints["qwen3"], model_impl=impl, enforce_eager=eager,
                       speculative_config=dict(method="eagle3", model=str(head),
                                               num_speculative_tokens=3))
        assert (engine.runner.graphs is None) == eager
        if not eager:
            assert {size.network for size in engine.runner.graphs.sizes} == {0, 1}
        assert_texts(engine.generate(prompts, GREEDY, use_tqdm=False), references, "qwen3", impl)
        drafts.append(guessing.count(engine))
    assert drafts[0] == drafts[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_in_graphs_equal_transformers(checkpoints, references, prompts):
    """NCCL's collectives stand in the recordings: for the likeliest tokens each rank's best, for
    drawn ones (0.01 is as cold) whole logits. For logprobs the layers alone are replayed."""
    with start(checkpoints["qwen3"], tensor_parallel_size=2, speculative_config=dict(
            method="ngram", num_speculative_tokens=3, prompt_lookup_max=1)) as engine:
        assert engine.runner.graphs is not None
        for kind in (dict(temperature=0), dict(temperature=0, logprobs=1), dict(temperature=.01)):
            params = SamplingParams(max_tokens=12, **kind)
            assert_texts(engine.generate(prompts, params, use_tqdm=False), references, "qwen3",
                         "two GPUs")


KINDS = [dict(temperature=0), dict(temperature=0.8), dict(top_k=5, top_p=.7), dict(min_p=.2),
         dict(frequency_penalty=1.5, presence_penalty=.5, repetition_penalty=1.2),
         dict(logit_bias={65: 4.0}, temperature=0), dict(allowed_token_ids=[65, 66, 67]),
         dict(bad_words=["ab", "c"]), dict(min_tokens=4, ignore_eos=False), dict(logprobs=3),
         dict(prompt_logprobs=2), dict(temperature=0, logprobs=0, top_k=1)]


def asked(**more) -> list[SamplingParams]:
    return [SamplingParams(**dict(seed=i, max_tokens=8, ignore_eos=True) | kind | more)
            for i, kind in enumerate(KINDS)]


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_seeds_and_controls_do_not_depend_on_the_company(checkpoints, prompts):
    """Alone and together, in graphs and without, with overlap and without, in chunks."""
    some = [prompts[i % len(prompts)][:40] for i in range(len(KINDS))]
    texts = []
    for how in (dict(), dict(enforce_eager=True), dict(async_scheduling=False),
                dict(max_num_batched_tokens=24), dict(block_size=32)):
        engine = start(checkpoints["qwen3"], **how)
        texts.append(ids_of(engine.generate(some, asked(), use_tqdm=False)))
    engine = start(checkpoints["qwen3"])
    texts.append([ids_of(engine.generate([prompt], params, use_tqdm=False))[0]
                  for prompt, params in zip(some, asked(), strict=True)])
    assert all(text == texts[0] for text in texts), texts


# ----------------------------------------------------- the host runs ahead


def guard(engine, mode: str = "error") -> None:
    """A launch that waits for the device is an error."""
    launch = engine.runner.launch

    def guarded(step):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = guarded


@pytest.mark.parametrize("name, quantization", [
    ("qwen3", None), ("qwen3-moe", None), ("qwen3-moe", "int4"), ("gemma2", None),
    ("mistral", None)])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_launch_never_waits_for_the_device(checkpoints, prompts, name, quantization,
                                             enforce_eager):
    engine = start(checkpoints[name], enforce_eager=enforce_eager, max_num_batched_tokens=60,
                   quantization=quantization)
    some = [prompts[i % len(prompts)][:40] for i in range(len(KINDS))]
    expected = ids_of(engine.generate(some, asked(), use_tqdm=False))
    engine.reset_prefix_cache()
    guard(engine)
    assert ids_of(engine.generate(some, asked(), use_tqdm=False)) == expected


@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_buffer_is_not_written_before_its_copy_has_ended(waits):
    """Behind a device that is busy, the host packs six steps into two buffers (mini-sglang #103).
    Without the wait it would overwrite them: that, too, is shown. Steps are large: a copy of a few
    bytes might travel with its command."""
    n = 20_000
    builder = BatchBuilder(4, n, n, 16, DEVICE)
    if not waits:
        builder.copied = [None] * len(builder.copied)
    seen = torch.zeros(6, n, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # a quarter of a second
    for i in range(6):
        seq = sequence(str(i), [i + 1] * n, SamplingParams(), row=0, block_table=[*range(n // 16)])
        seen[i].copy_(builder.build(Step(i, {seq: n}, [0], [seq])).input_ids)
    torch.cuda.synchronize()
    expected = torch.arange(1, 7, device=DEVICE)[:, None].expand(-1, n)
    assert bool((seen == expected).all()) == waits


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_slow_device_changes_nothing(checkpoints, references, prompts, enforce_eager):
    engine = start(checkpoints["qwen3"], enforce_eager=enforce_eager, max_num_batched_tokens=60)
    launch = engine.runner.launch

    def late(step):
        torch.cuda._sleep(10_000_000)  # some milliseconds
        return launch(step)

    engine.runner.launch = late
    assert_texts(engine.generate(prompts, GREEDY, use_tqdm=False), references, "qwen3", "slow")


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_steps_in_flight_can_be_dropped(checkpoints, references, prompts, where):
    """Ctrl-C in the middle of a step, again and again: no token is lost, and none comes twice."""
    engine = start(checkpoints["qwen3"], max_num_batched_tokens=60)
    function, count = getattr(engine.runner, where), 0

    def interrupted(argument):
        nonlocal count
        count += 1
        if where == "launch":
            result = function(argument)  # it is queued, and nobody will hear of it
        if count % 3 == 0:
            raise KeyboardInterrupt
        return result if where == "launch" else function(argument)

    setattr(engine.runner, where, interrupted)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    outputs, dropped = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            dropped += 1
            assert not engine.scheduler.in_flight
    assert dropped > 3 and len(outputs) == len(prompts)
    assert_texts(outputs.values(), references, "qwen3", where)
