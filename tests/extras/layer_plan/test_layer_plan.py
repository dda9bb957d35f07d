"""Stages: whole layers on several ranks give, to the last bit, what one rank gives.

The oracle is the engine on one rank, whose own oracle is transformers. The ranks are threads;
test_layer_plan_processes.py has processes.
"""

import json
import time
from itertools import pairwise

import pytest
from helpers import hand_over
from scheduler_by_hand import add, finish_step
from scheduler_by_hand import alone as by_hand
from small_engine import drain
from witness import read

from nanoserve import LLM, EngineConfig, SamplingParams
from nanoserve.model_config import ModelConfig
from nanoserve.scheduler import Scheduler
from nanoserve_extras.layer_plan.layer_plan import Stage, places, share_out, share_out_rows

SMALL = dict(num_gpu_blocks_override=64, dtype="float32", device="cpu")
PARAMS = [SamplingParams(temperature=0, max_tokens=14, logprobs=3),
          SamplingParams(seed=3, n=2, top_p=0.9, repetition_penalty=1.3, max_tokens=12),
          SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=2, bad_words=["e"]),
          SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-f]{9}"})]


def numbers(entries) -> list | None:
    """Logprobs as plain numbers, to be compared bit by bit."""
    return entries and [one and [(i, it.logprob, it.rank) for i, it in one.items()]
                        for one in entries]


def texts(llm: LLM, prompts: list) -> list:
    asked = [(prompt, params) for prompt in prompts for params in PARAMS]
    outputs = llm.generate([prompt for prompt, _ in asked], [one for _, one in asked],
                           use_tqdm=False)
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    return [(numbers(output.prompt_logprobs), one.token_ids, one.text, numbers(one.logprobs))
            for output in outputs for one in output.outputs]


def both(folder, prompts: list, options: dict, stages: dict) -> tuple[list, list]:
    """On one rank (of each stage), and in stages, one step at a time. Twice: the second time from
    the prefix cache."""
    results = []
    for more in ({}, stages | dict(async_scheduling=False)):
        with LLM(folder, **SMALL | options, **more) as llm:
            results.append([texts(llm, prompts), texts(llm, prompts)])
    return results


@pytest.mark.parametrize("name, options, stages", [
    ("qwen3", {}, dict(pipeline_parallel_size=2)),
    ("qwen3", dict(dtype="bfloat16"), dict(layer_plan=[1, 1, 1])),
    ("qwen3-tied", dict(kernels="torch"), dict(layer_plan=[2, 1])),
    ("gemma3", dict(max_num_batched_tokens=11, max_num_seqs=6), dict(layer_plan=[1, 2])),
    ("mixtral", dict(dtype="bfloat16", max_num_batched_tokens=40), dict(layer_plan=[1, 1, 1])),
    ("llama-bias", dict(num_gpu_blocks_override=12, max_model_len=190, max_num_seqs=20),
     dict(pipeline_parallel_size=3)),
    ("qwen2", dict(quantization="int8"), dict(pipeline_parallel_size=2)),
    ("llama3.1", dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
     dict(layer_plan=[2, 1])),
    ("gemma2", dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)),
], ids=lambda it: it if isinstance(it, str) else json.dumps(it))
def test_not_one_bit_is_another_than_on_one_rank(name, options, stages, checkpoints, prompts,
                                                 ranks_in_threads):
    """Tokens and logprobs: plain, drawn, scored, penalised and by a grammar; in chunks, from the
    prefix cache, and with so few blocks that sequences are preempted."""
    one, several = both(checkpoints[name], prompts[2:5], options, stages)
    assert one == several


@pytest.mark.parametrize("name, options", [
    ("qwen3", dict(pipeline_parallel_size=2)),
    ("gemma2", dict(layer_plan=[1, 1, 1], max_num_batched_tokens=24, max_num_seqs=11)),
    ("llama3.2", dict(layer_plan=[1, 1, 1], num_gpu_blocks_override=14, max_model_len=190)),
    pytest.param("mistral", dict(layer_plan=[2, 1], scheduling_policy="priority"),
                 marks=pytest.mark.full)], ids=str)
def test_steps_in_flight_change_no_text(name, options, checkpoints, prompts, ranks_in_threads):
    """As many as there are stages, so other rows share a step than on one rank: the same tokens,
    and logprobs to 1e-4. No sequence is in two steps, unless all its tokens are known."""
    with LLM(checkpoints[name], **SMALL) as llm:
        expected = texts(llm, prompts[2:5])
    with LLM(checkpoints[name], **SMALL | options) as llm:
        most = 0

        def look(step):
            nonlocal most
            flying = [seq for one in llm.scheduler.in_flight for seq in one.sampling]
            assert len(set(flying)) == len(flying) and llm.scheduler.in_flight[-1] is step
            most = max(most, len(llm.scheduler.in_flight))

        hand_over(llm, launching=look)
        for _ in range(2):
            for (scored, ids, text, logprobs), theirs in zip(
                    texts(llm, prompts[2:5]), expected, strict=True):
                assert (ids, text) == theirs[1:3]
                assert values(scored) == pytest.approx(values(theirs[0]), abs=1e-4)
                assert values(logprobs) == pytest.approx(values(theirs[3]), abs=1e-4)
        assert most == llm.config.steps_at_once == llm.depth + 1


def values(entries) -> list[float]:
    return [it[1] for one in entries or () for it in one or ()]


def test_a_failed_step_and_an_abort_lose_no_other_text(checkpoints, prompts, ranks_in_threads):
    """Results of dropped steps are still sent: they must not be taken for those of later ones."""
    greedy = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.1)
    with LLM(checkpoints["qwen3"], **SMALL) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts[2:8], greedy)]
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=[1, 1, 1]) as llm:
        for fails in range(1, 14, 2):
            for i, prompt in enumerate(prompts[2:8]):
                llm.add_request(str(i), prompt, greedy)

            def fail(step, at=llm.scheduler.num_steps + fails):
                if step.index == at:
                    raise ZeroDivisionError

            failing = hand_over(llm, launching=fail)
            found = {}
            while llm.has_unfinished_requests():
                try:
                    found |= {out.request_id: out.outputs[0].token_ids for out in llm.step()}
                except ZeroDivisionError:
                    llm.abort_request("3")
            llm.remove(failing)
            assert {i: expected[int(i)] for i in found if i != "3"} == {
                i: ids for i, ids in found.items() if i != "3"} and len(found) >= 5


def test_a_slow_stage_gets_every_chunk_of_a_prompt(checkpoints, ranks_in_threads, monkeypatch):
    """Nothing is fetched of a chunk that samples nothing, so rank 0 runs ahead. It once wrote the
    next steps into messages that were still on their way."""
    forward, prompt = Stage.forward, list(range(90))

    def slow(stage, *args):
        time.sleep(0.01 * stage.line.stage)
        return forward(stage, *args)

    with LLM(checkpoints["qwen3"], **SMALL) as llm:
        expected = texts(llm, [prompt])
    monkeypatch.setattr(Stage, "forward", slow)
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=[1, 2], max_num_batched_tokens=8,
             max_num_seqs=8) as llm:
        assert [one[1] for one in texts(llm, [prompt])] == [one[1] for one in expected]


def test_a_rank_has_its_layers_and_no_others(checkpoints, ranks_in_threads, monkeypatch):
    """Weights, and blocks of the KV cache; the embedding, the last norm and the head on rank 0."""
    made, make = {}, Stage.__init__

    def record(stage, *args):
        make(stage, *args)
        made[stage.line.stage] = stage

    monkeypatch.setattr(Stage, "__init__", record)
    with LLM(checkpoints["qwen3-sharded"], **SMALL, layer_plan=[1, 2]) as llm:
        sizes = {name.split(".")[0] + "." * name.startswith("layers") + name.split(".")[1]
                 * name.startswith("layers") for name, _ in made[0].named_parameters()}
        assert sizes == {"layers.0", "embed_tokens", "norm"} and made[0].lm_head is not None
        assert {name[:8] for name, _ in made[1].named_parameters()} == {"layers.1", "layers.2"}
        assert len(llm.runner.kv_cache) == len(made[0].kv_shapes) == 1
        assert len(made[1].kv_shapes) == 2


@pytest.mark.parametrize("count, shares", [(3, [3, 0]), (4, [4, 0]), (6, [4, 2]), (11, [6, 5])])
def test_steps_in_flight_share_sequences_out_and_keep_them(count, shares):
    """Two at a time, of prompts of 2 tokens. Up to 4 rows take as long as one, and stay together. A
    step gets those whose tokens are known, and so the same ones all along."""
    scheduler = Scheduler(EngineConfig(
        model="none", max_num_batched_tokens=64, block_size=4, max_num_seqs=16,
        pipeline_parallel_size=2, async_scheduling=True), 64)
    scheduler.hooks.cut.append(lambda step, seq, start, n: share_out_rows(scheduler, step, n))
    seqs = [add(scheduler, 2, max_tokens=6) for _ in range(count)]
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [len(first.num_new_tokens), len(second.num_new_tokens)] == shares
    assert not (shares[1] == 0 and scheduler.waiting)
    flying = [step for step in (first, second) if step.num_new_tokens]
    while flying:
        step = flying.pop(0)
        finish_step(scheduler, step)
        if left := {seq for seq in step.sampling if seq.finish_reason is None}:
            flying.append(scheduler.schedule())
            assert flying[-1].num_new_tokens.keys() == left
    assert all(seq.token_ids[2:] == by_hand(seq) for seq in seqs)


@pytest.mark.parametrize("layers, vocabulary, stages, expected", [
    (28, 0.1, 2, [14, 14]), (28, 0.1, 3, [9, 9, 10]), (3, 0.1, 3, [1, 1, 1]),
    (28, 10, 2, [9, 19]), (28, 60, 3, [1, 13, 14]), (4, 60, 4, [1, 1, 1, 1])])
def test_equal_parts_by_weight(checkpoints, tmp_path, layers, vocabulary, stages, expected):
    """vocabulary: how many layers the embedding and the head weigh together."""
    config = json.loads((checkpoints["llama2"] / "config.json").read_text())
    layer = 4 * 64 * 64 + 3 * 64 * 96
    sizes = dict(num_hidden_layers=layers, vocab_size=round(vocabulary * layer / 64),
                 tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    plan = share_out(ModelConfig.from_folder(tmp_path), stages)
    assert plan == expected
    assert [i for one in places(plan, [0] * stages) for i in one.layers] == list(range(layers))


@pytest.mark.parametrize("options, message", [
    (dict(pipeline_parallel_size=4), "there are 3 layers: a stage needs one"),
    (dict(layer_plan=[1, 1]), "all together the 3"), (dict(layer_plan=[3, 0]), "needs a layer"),
    (dict(layer_plan=[1, 2], pipeline_parallel_size=3), "leave one out"),
    (dict(layer_plan=[1, 2], kv_offload_bytes=10 ** 6), "kv_offload_bytes=1000000"),
    (dict(layer_plan=[1, 2], runner="pooling"), "runner='pooling'"),
    (dict(layer_plan=[1, 2], model_impl="transformers", tensor_parallel_size=2),
     "together with tensor_parallel_size=2"),
    (dict(layer_plan=[1, 2], model_impl="transformers", enable_lora=True), "enable_lora"),
    (dict(layer_plan=[1, 2], speculative_config=dict(
        method="draft_model", model="m", num_speculative_tokens=2)), "speculative_config=")],
    ids=str)
def test_what_is_refused_by_name(checkpoints, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        LLM(checkpoints["qwen3"], **SMALL, **options)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trace_tells_when_each_stage_computed_each_step(checkpoints, prompts, tmp_path,
                                                          ranks_in_threads, overlap):
    """A stage computes one step at a time, each when the stage before it has, and rank 0 once more
    when all have. With overlap a step is scheduled before the last one has ended."""
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=[1, 1, 1], trace=tmp_path / "it.html",
             async_scheduling=overlap) as llm:
        texts(llm, prompts[3:6])
        assert not llm.runner.parts.decoder.coming
    *frames, _ = read(tmp_path / "it.html")["frames"]
    spans = [[[span[1:] for span in zip(*[iter(frame["s"])] * 3, strict=True) if span[0] == stage]
              for stage in range(3)] for frame in frames]  # by frame and stage: from, to
    for stage in range(3):
        track = sorted(span for frame in spans for span in frame[stage])
        assert all(one[1] <= other[0] for one, other in pairwise(track))
    assert overlap == any(other["t"] < one["t"] + one["d"] for one, other in pairwise(frames))
    for (first, last), one, two in spans:
        order = [*first, *one[0], *two[0], *last]
        assert order == sorted(order) and len(one) == len(two) == 1


# -------------------------------------------------------------- plans that change between two steps


def texts_by_plans(llm: LLM, prompts: list, plans: list, every: int = 4) -> dict[str, list]:
    """Step by step; after some steps the layers go elsewhere."""
    plans = list(plans)
    for i, prompt in enumerate(prompts):
        llm.add_request(str(i), prompt, PARAMS[i % len(PARAMS)])
    found, num_steps = {}, 0
    while llm.has_unfinished_requests():
        for out in llm.step():
            found[out.request_id] = [(one.token_ids, one.text) for one in out.outputs]
        num_steps += 1
        if num_steps % every == 0 and plans:
            llm.deploy(plans.pop(0))
    assert not plans, "it ended too early"
    return found


@pytest.mark.parametrize("name, options, plans", [
    ("qwen3", dict(layer_plan={"disk": 0}), [{"disk": 3}, {"disk": 1}, {"device": 3}]),
    ("gemma2", dict(layer_plan=[1, 2], max_num_batched_tokens=30), [[2, 1], [{"disk": 1}, 2]]),
    ("llama3.2", dict(pipeline_parallel_size=2, tensor_parallel_size=2), [[1, 2], [2, 1]]),
    ("mistral", dict(layer_plan=[2, 1], num_gpu_blocks_override=16, max_model_len=190,
                     quantization="int8"), [[1, 2], [2, 1]])], ids=str)
def test_no_request_is_lost_and_no_text_changes(name, options, plans, checkpoints, prompts,
                                                ranks_in_threads):
    options = SMALL | options
    kept = {key: value for key, value in options.items() if key in SMALL or key == "quantization"}
    with LLM(checkpoints[name], **kept | dict(num_gpu_blocks_override=64)) as llm:
        expected = texts_by_plans(llm, prompts[1:7], [])
    with LLM(checkpoints[name], **options) as llm:
        for these in (plans, plans[::-1]):
            assert texts_by_plans(llm, prompts[1:7], these) == expected
        free = llm.scheduler.blocks.num_free_blocks
        assert free == llm.scheduler.blocks.num_blocks


def test_a_plan_that_cannot_be_followed_changes_nothing(checkpoints, prompts, ranks_in_threads):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=[1, 2]) as llm:
        expected = llm.generate(prompts[4], greedy)[0].outputs[0].token_ids
        llm.add_request("running", prompts[4], greedy)
        llm.step()
        for plan, message in (([1, 1, 1], "is for 3 stages, and the engine has 2"),
                              ({"disk": 1}, "is for 1 stages"), ([3, 1], "all together the 3"),
                              ("all on disk", "layer_plan must be how many layers")):
            with pytest.raises(ValueError, match=message):
                llm.deploy(plan)
        assert drain(llm)["running"][-1].outputs[0].token_ids == expected
    with LLM(checkpoints["qwen3"], **SMALL) as llm, pytest.raises(ValueError, match="'disk': 0"):
        llm.deploy({"disk": 1})


@pytest.mark.parametrize("plan", [[2, 1], {"disk": 2}], ids=str)
def test_new_weights_sleep_and_deploy_go_together(checkpoints, prompts, ranks_in_threads, plan):
    """A trainer's tensors reach the layers where they are. They can't be read again, so the layers
    stay there."""
    from safetensors.torch import load_file

    greedy = SamplingParams(temperature=0, max_tokens=8)
    stored = load_file(checkpoints["qwen3"] / "model.safetensors")
    others = {name: tensor.flip(0) if "proj" in name else tensor
              for name, tensor in stored.items()}

    def text(llm):
        return llm.generate(prompts[4], greedy, use_tqdm=False)[0].outputs[0].token_ids

    with LLM(checkpoints["qwen3"], **SMALL) as llm:
        first = text(llm)
        llm.update_weights(others)
        second = text(llm)
    assert first != second
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=plan) as llm:
        assert text(llm) == first
        llm.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            llm.deploy(plan)
        llm.wake_up()
        assert text(llm) == first
        llm.update_weights(others)
        assert text(llm) == second
        with pytest.raises(ValueError, match="other weights since update_weights"):
            llm.deploy(plan)
        assert text(llm) == second
