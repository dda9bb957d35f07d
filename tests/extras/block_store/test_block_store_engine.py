"""A second place for blocks, in the engine: whatever it brings back, no token changes."""

import json

import engine_workloads as fuzz
import pytest
from helpers import storage
from small_engine import drain_through

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve_extras.block_store.block_host import rows_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SMALL = dict(dtype="float32", device="cpu", num_gpu_blocks_override=12, max_model_len=128)
LONG = [(37 * i + 11) % 251 for i in range(100)]
OTHER = [(41 * i + 7) % 251 for i in range(100)]


def counts(llm: LLM) -> dict[str, int]:
    return {one.name.removeprefix("vllm:"): one.value for one in storage(llm).metrics()}


def num_loaded(llm: LLM) -> int:
    """Tokens, also of requests that were preempted."""
    return counts(llm)["kv_store_loaded_blocks"] * llm.config.block_size


def ask(llm: LLM, *prompts, **options) -> list[list[int]]:
    """The texts; and nothing may be lost behind them."""
    outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False, **options)
    llm.scheduler.check()
    storage(llm).audit()
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    assert not storage(llm).unsaved
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def qwen3(checkpoints):
    return checkpoints["qwen3"]


@pytest.mark.parametrize("name, changes, max_examples, least", [
    ("qwen3", dict(kernels="torch", async_scheduling=True), 25, 50),
    ("qwen3", dict(num_gpu_blocks_override=3, block_size=16), 25, 30),
    ("qwen3", dict(kernels="torch", async_scheduling=True, tensor_parallel_size=2,
                   kv_store="blocks"), 20, 5),
    ("mistral", dict(kernels="torch"), 25, 20)],
    ids=["overlap", "compiled", "folder, ranks, overlap", "window"])
def test_random_workloads_with_a_store(checkpoints, references, tmp_path, monkeypatch,
                                       ranks_in_threads, name, changes, max_examples, least):
    """The engine's random workloads and their oracles: a tiny cache and host memory, so that blocks
    go to and fro. The cache's memory is filled with NaN first: a block that was never loaded, or
    loaded too late, would show."""
    monkeypatch.chdir(tmp_path)
    first = len(fuzz.ENGINES)
    fuzz.ENGINES.append(fuzz.ENGINES[0] | changes | dict(kv_offload_bytes=2 ** 18))
    try:
        fuzz.run_random_workloads(checkpoints, references, name, [first], max_examples, enough=1)
        llm = fuzz.engines[checkpoints[name], first]
        storage(llm).audit()
        assert num_loaded(llm) >= least, counts(llm)
    finally:
        for key in [key for key in fuzz.engines if key[1] in (first, "plain")]:
            fuzz.engines.pop(key).shutdown()
        del fuzz.ENGINES[first:]


@pytest.mark.parametrize("changes", [
    dict(), dict(async_scheduling=True), dict(max_num_batched_tokens=33),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))],
    ids=["plain", "overlap", "chunks", "lookup"])
def test_an_engine_that_starts_again_finds_its_prompts_in_the_folder(qwen3, expect, tmp_path,
                                                                     changes):
    options = SMALL | dict(kv_store=str(tmp_path)) | changes
    with LLM(qwen3, **options) as llm:
        expect([LONG, OTHER], ask(llm, LONG, OTHER))
    with LLM(qwen3, **options) as llm:
        longer = LONG + [1, 2, 3]
        expect([longer, OTHER, LONG], ask(llm, longer, OTHER, LONG))
        assert num_loaded(llm) >= 96 + 96


@pytest.mark.parametrize("dtype, kernels", [
    ("float32", "cpu"), ("float16", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "torch")])
def test_blocks_come_back_bit_for_bit(qwen3, tmp_path, dtype, kernels):
    def run() -> dict[bytes, list[bytes]]:
        with LLM(qwen3, **SMALL | dict(dtype=dtype), kernels=kernels,
                 kv_store=str(tmp_path)) as llm:
            ask(llm, LONG)
            return {key: [bytes(cache[entry.block_id]) for cache in rows_of(llm.runner.kv_cache)]
                    for key, entry in llm.scheduler.blocks.cached.items()}, num_loaded(llm)

    (before, none), (after, loaded) = run(), run()
    assert none == 0 and loaded == 96 and len(before) >= 6
    assert before == after


def test_another_model_dtype_or_block_size_finds_nothing(checkpoints, noisy, expect, tmp_path):
    options = SMALL | dict(kv_store=str(tmp_path))
    with LLM(checkpoints["qwen3"], **options) as llm:
        ask(llm, LONG)
    for folder, changes in ((noisy("qwen3"), {}), (checkpoints["qwen3"], dict(dtype="bfloat16")),
                            (checkpoints["qwen3"], dict(block_size=32)),
                            (checkpoints["qwen3"], dict(hf_overrides=dict(rope_theta=500.0)))):
        with LLM(folder, **options | changes) as llm:
            ask(llm, LONG)
            assert num_loaded(llm) == 0
    with LLM(checkpoints["qwen3"], **options | dict(max_num_seqs=3)) as llm:
        expect([LONG], ask(llm, LONG))
        assert num_loaded(llm) == 96, "how many run together changes no KV"


def test_an_adapter_finds_its_own_blocks_alone(tmp_path):
    """The prefix must be keyed by the adapter's content, not by its name (five engines had this
    bug): the same name for no adapter, and the same adapter under another name."""
    voice, options = LoRARequest("a", 1, "nanoserve/assets/detective"), dict(
        enable_lora=True, kv_store=str(tmp_path), max_model_len=256, num_gpu_blocks_override=64)
    with LLM(**options) as llm:
        with_voice, = ask(llm, LONG, lora_request=LoRARequest("b", 2, voice.lora_path))
    with LLM(**options) as llm:
        bare, = ask(llm, LONG)
        assert num_loaded(llm) == 0
        again, = ask(llm, LONG, lora_request=voice)
        assert num_loaded(llm) == 96
        assert again == with_voice
    with LLM(max_model_len=256) as llm:
        plain = llm.generate([LONG], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert bare == plain


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_takes_its_saves_and_loads_with_it(qwen3, expect, monkeypatch, overlap):
    """At the load, and at each step around it: what was lost is computed again."""
    with LLM(qwen3, **SMALL, kv_offload_bytes=2 ** 22, async_scheduling=overlap) as llm:
        move, number = llm.runner.copier.move, 0
        for failing in range(12):
            texts = [ask(llm, prompt)[0] for prompt in (LONG, OTHER)]
            number = 0

            def fail(host, kv_cache, failing=failing):
                nonlocal number
                number += 1
                if number == failing:
                    raise RuntimeError("a step fails")
                move(host, kv_cache)

            monkeypatch.setattr(llm.runner.copier, "move", fail)
            llm.add_request("again", LONG, GREEDY)
            outputs, _ = drain_through(llm, RuntimeError)
            monkeypatch.undo()
            llm.scheduler.check()
            storage(llm).audit()
            texts.append(outputs["again"].outputs[0].token_ids)
            expect([LONG, OTHER, LONG], texts)
        assert num_loaded(llm) > 200


def test_blocks_are_loaded_once_where_a_single_token_is_left_to_compute(qwen3, expect, tmp_path):
    """97 tokens, 96 of them loaded: the step computes one, which fills no block, and what it had
    loaded was not entered in the prefix cache. Each request loaded it again, into memory of its
    own."""
    prompt, options = LONG[:97], SMALL | dict(kv_store=str(tmp_path), num_gpu_blocks_override=32)
    with LLM(qwen3, **options) as llm:
        ask(llm, prompt)
    with LLM(qwen3, **options) as llm:
        expect([prompt] * 3, ask(llm, prompt, prompt) + ask(llm, prompt))
        assert num_loaded(llm) == 96


def test_a_prompt_that_is_always_in_memory_keeps_its_files(qwen3, tmp_path):
    """Nobody reads them, so they were the first to be deleted, and after a restart the one prompt
    that everybody uses had to be computed."""
    options = SMALL | dict(kv_store=str(tmp_path), num_gpu_blocks_override=32, max_model_len=128)
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG)
        storage(llm).flush()
        size = sum(one.stat().st_size for one in tmp_path.iterdir())
    with LLM(qwen3, **options | dict(kv_store_bytes=4 * size)) as llm:
        for i in range(8):
            ask(llm, LONG)
            ask(llm, [i] + OTHER[1:])
            storage(llm).flush()
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG)
        assert num_loaded(llm) == 96


@pytest.mark.parametrize("options, message", [
    (dict(kv_offload_bytes=2 ** 20, enable_prefix_caching=False), "enable_prefix_caching=False"),
    (dict(kv_offload_bytes=100), "kv_offload_bytes=100"),
    (dict(kv_offload_bytes=2 ** 60), "kv_offload_bytes=1,152,"),
    (dict(kv_offload_bytes=2 ** 20, kernels="cpu", block_size=8), "multiple of 16"),
    (dict(kv_offload_bytes=-1), "kv_offload_bytes"), (dict(kv_store=7), "kv_store"),
    (dict(kv_store=""), "kv_store.*''"),
    (dict(kv_store="blocks", kv_store_bytes=10_000), "kv_store_bytes=10,000")])
def test_options_that_can_not_work_are_refused_before_the_work_starts(qwen3, options, message,
                                                                      tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, **SMALL | options)


def test_a_path_that_can_be_no_folder_is_refused_before_the_weights_are_loaded(qwen3, tmp_path,
                                                                              monkeypatch):
    monkeypatch.setattr(LLM, "make_runner", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="kv_store=.*file'"):
        LLM(qwen3, **SMALL, kv_store=str(tmp_path / "file"))


def test_the_trace_and_the_counters_tell_what_the_store_brought(qwen3, tmp_path):
    options = SMALL | dict(kv_store=str(tmp_path / "blocks"))
    with LLM(qwen3, **options) as llm:
        ask(llm, LONG)
    with LLM(qwen3, **options, trace=str(tmp_path / "run.json")) as llm:
        ask(llm, OTHER[:50], LONG)
        llm.generate([OTHER], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        found = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
    assert found["vllm:external_prefix_cache_hits"] == 96
    assert found["vllm:external_prefix_cache_queries"] == 150, "none for logprobs of all tokens"
    assert found["vllm:prefix_cache_queries"] == 150
    assert found["vllm:prefix_cache_hits"] == 0, "what the store has brought was no hit in memory"
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    loaded = [event["tid"] for event in events if event["name"] == "loaded from the store"]
    assert loaded == [1], "the second request"


def test_a_preempted_request_is_no_second_query(qwen3, expect):
    """Two times 90 tokens fill 12 blocks of 16, and then both go on. A share of found tokens above
    1 is what comes of counting such a request's hits and not its queries, or the other way round.
    """
    prompts = [LONG[:90], OTHER[:90]]
    with LLM(qwen3, **SMALL, kv_offload_bytes=2 ** 22) as llm:
        expect(prompts, ask(llm, *prompts))
        found = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
        assert found["vllm:num_preemptions"] > 0 and num_loaded(llm) > 0
        assert found["vllm:external_prefix_cache_queries"] == 180
        assert found["vllm:external_prefix_cache_hits"] == 0
