"""Vectors, classes and scores equal transformers', however the prompts were scheduled.

The oracle is transformers in float32, one prompt at a time, without a cache: hidden states of
`AutoModel`, logits of `AutoModelForSequenceClassification`, and of `AutoModelForCausalLM` where a
generator answers yes or no. Pooling, normalising and the rest are done here by hand.
"""


import copy
from contextlib import ExitStack

import pytest
import torch
import transformers
from architectures import GQA, make
from checkpoints import CHECKPOINTS, byte_tokenizer
from hybrids import HYBRIDS
from pooled import TOLERANCE, assert_close, class_logits, data, normalised, pooled, start, vectors
from small_engine import assert_idle, drain

from nanoserve import LLM, PoolingParams
from nanoserve_extras.base.facts import Fact

# ------------------------------------------------------------------ embeddings


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_embeds_as_transformers(checkpoints, prompts, hidden_states, name):
    """A generator's checkpoint as an embedder: batched, and in chunks of 7 tokens."""
    prompts = prompts[2:11:2]
    hidden = [hidden_states(name, prompt) for prompt in prompts]
    with start(checkpoints[name]) as llm:
        assert llm.runner.model.lm_head is None and Fact.GENERATES not in llm.facts
        outputs = llm.embed(prompts, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert_close(vectors(outputs), [pooled(h, "LAST") for h in hidden], name)
    with start(checkpoints[name], max_num_batched_tokens=7) as llm:
        assert_close(vectors(llm.embed(prompts, use_tqdm=False)),
                     [pooled(h, "LAST") for h in hidden], f"{name}, chunked")
        tokens = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        assert_close(data(tokens), [pooled(h, "ALL") for h in hidden], f"{name}, tokens")
        assert_idle(llm)


MODES = {
    "batched": {},
    "budget 5": dict(max_num_batched_tokens=5),
    "blocks of 5": dict(block_size=5, max_num_batched_tokens=16),
    "tiny cache": dict(num_gpu_blocks_override=6, max_num_batched_tokens=16),
    "overlap": dict(async_scheduling=True, max_num_batched_tokens=9),
    "overlap, tiny cache": dict(async_scheduling=True, num_gpu_blocks_override=20, block_size=5,
                               max_num_batched_tokens=33),
}


@pytest.mark.parametrize("pooling_type", ["CLS", "LAST", "MEAN", "ALL"])
@pytest.mark.parametrize("mode", MODES)
def test_every_pooling_type_in_every_mode(qwen3, prompts, hidden_states, mode, pooling_type):
    """Twice each: the second time LAST comes from the prefix cache, and nothing else does."""
    expected = [pooled(hidden_states("qwen3", prompt), pooling_type) for prompt in prompts]
    task = "token_embed" if pooling_type == "ALL" else "embed"
    with start(qwen3, pooler_config={"pooling_type": pooling_type}, **MODES[mode]) as llm:
        for where in ("first", "again"):
            outputs = llm.encode(prompts, pooling_task=task, use_tqdm=False)
            assert_close(data(outputs), expected, f"{pooling_type}, {mode}, {where}")
            assert_idle(llm)
        if pooling_type != "LAST":
            assert not any(output.num_cached_tokens for output in outputs)
        outputs = [llm.encode(one, pooling_task=task, use_tqdm=False)[0] for one in prompts[6:]]
        assert_close(data(outputs), expected[6:], f"{pooling_type}, {mode}, alone")


def test_preempted_in_the_middle(qwen3, prompts, hidden_states):
    """It begins anew, and nothing is counted twice. (Prompts alone never come to that: see
    `test_pooled_prompts_are_never_preempted` in test_scheduler. So the pool is called empty.)"""
    with start(qwen3, max_num_batched_tokens=16, pooler_config={"pooling_type": "MEAN"}) as llm:
        llm.add_request("r", prompts[8], PoolingParams())
        llm.step()
        llm.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.scheduler.blocks, "allocate", lambda seq, num_tokens: False)
            assert [seq.name for seq in llm.scheduler.schedule().preempted] == ["r"]
        assert_close(data(drain(llm)["r"]), [pooled(hidden_states("qwen3", prompts[8]), "MEAN")])
        assert_idle(llm)


def test_a_step_that_fails_counts_once(qwen3, prompts, hidden_states, monkeypatch):
    """It is dropped and computed again. A sum that was made when the step was launched had it
    twice."""
    for pooling_type in ("MEAN", "ALL"):
        llm = start(qwen3, pooler_config={"pooling_type": pooling_type}, max_num_batched_tokens=16)
        llm.add_request("r", prompts[8], PoolingParams())
        llm.step()
        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "fetch", lambda output: 1 / 0)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    llm.step()
        assert_close(data(drain(llm)["r"]), [pooled(
            hidden_states("qwen3", prompts[8]), pooling_type)])
        assert_idle(llm)


def test_only_last_reads_the_prefix_cache(qwen3, prompts, hidden_states):
    """MEAN or CLS pooling over a prefix hit was silently wrong: the cached positions have no hidden
    states (BUGS 36). All of them write to the cache, which holds the same keys for everyone."""
    prompt, hidden = prompts[8], hidden_states("qwen3", prompts[8])
    with start(qwen3) as llm:
        def once(task: str):
            [output] = llm.encode(prompt, pooling_task=task, use_tqdm=False)
            return output.outputs.data, output.num_cached_tokens

        tokens, hits = once("token_embed")
        assert hits == 0
        last, hits = once("embed")
        assert hits == 64  # of 70, what the tokens' request has computed
        assert_close([last], [pooled(hidden, "LAST")])
        again, hits = once("token_embed")
        assert hits == 0 and torch.equal(tokens, again)
        assert llm.get_metrics()[4].value == 64  # vllm:prefix_cache_hits
    for pooling_type in ("CLS", "MEAN"):
        with start(qwen3, pooler_config={"pooling_type": pooling_type}) as llm:
            for _ in range(2):
                [output] = llm.embed(prompt, use_tqdm=False)
                assert output.num_cached_tokens == 0
                assert_close(vectors([output]), [pooled(hidden, pooling_type)])


def test_nothing_decodes_and_blocks_go_back_at_once(qwen3, prompts):
    with start(qwen3) as llm:
        llm.embed(prompts, use_tqdm=False)
        assert llm.metrics.num_steps <= 2 and llm.metrics.num_generation_tokens == 0
        llm.add_request("a", prompts[8], PoolingParams())
        [output] = llm.step()  # the one step that it takes
        assert output.finished and output.request_id == "a" and not llm.has_unfinished_requests()
        assert_idle(llm)


def test_a_prompt_may_fill_the_model(qwen3, hidden_states):
    """Nothing comes after it: 64 tokens fit into max_model_len=64, and into 4 blocks of 16."""
    prompt = list(range(64))
    with start(qwen3, max_model_len=64, num_gpu_blocks_override=4) as llm:
        [vector] = vectors(llm.embed(prompt, use_tqdm=False))
        assert_close([vector], [pooled(hidden_states("qwen3", prompt), "LAST")])
        with pytest.raises(ValueError, match="65 tokens.*64.*truncate_prompt_tokens"):
            llm.embed(prompt + [1])
        for count in (-1, 64):
            cut = PoolingParams(truncate_prompt_tokens=count)
            [output] = llm.embed([1, 2, 3] + prompt, pooling_params=cut, use_tqdm=False)
            assert output.prompt_token_ids == prompt
            assert_close(vectors([output]), [vector])


def test_matryoshka(qwen3, prompts, hidden_states):
    hidden = hidden_states("qwen3", prompts[5])
    with start(qwen3, hf_overrides={"is_matryoshka": True}) as llm:
        for params, expected in (
                (PoolingParams(dimensions=8), normalised(hidden[-1, :8])),
                (PoolingParams(use_activation=False), hidden[-1]),
                (PoolingParams(dimensions=8, use_activation=False), hidden[-1, :8])):
            [output] = llm.embed(prompts[5], pooling_params=params, use_tqdm=False)
            assert output.outputs.hidden_size == len(expected)
            assert_close(vectors([output]), [expected])
        for wrong in (0, 65, "8"):
            with pytest.raises(ValueError, match="dimensions"):
                llm.embed(prompts[5], pooling_params=PoolingParams(dimensions=wrong))
    with start(qwen3, hf_overrides={"matryoshka_dimensions": [8, 16]},
               pooler_config={"dimensions": 16, "use_activation": False}) as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)), [hidden[-1, :16]])
        with pytest.raises(ValueError, match=r"one of \[8, 16\]"):
            llm.embed(prompts[5], pooling_params=PoolingParams(dimensions=9))
    with start(qwen3) as llm, pytest.raises(ValueError, match="is_matryoshka"):
        llm.embed(prompts[5], pooling_params=PoolingParams(dimensions=8))


def test_text_in_all_its_forms_and_many_params(qwen3, hidden_states):
    ids = byte_tokenizer().encode("Hello")
    expected = hidden_states("qwen3", ids)[-1]
    forms = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, ids]
    with start(qwen3) as llm:
        for form in forms:
            assert_close(vectors(llm.embed(form, use_tqdm=False)), [normalised(expected)])
        raw = PoolingParams(use_activation=False)
        outputs = llm.embed(forms, pooling_params=[None, raw, None, raw], use_tqdm=False)
        assert_close(vectors(outputs), [normalised(expected), expected] * 2)
        assert llm.embed([], use_tqdm=False) == []


# ------------------------------------------------------------------- the loop


def test_a_caller_may_change_what_it_got(qwen3):
    """Tensors of inference mode can't take part in training."""
    with start(qwen3) as llm:
        for task in ("embed", "token_embed"):
            [output] = llm.encode("Hello", pooling_task=task, use_tqdm=False)
            output.outputs.data.requires_grad_().sum().backward()


@pytest.mark.parametrize("pooling_type", ["CLS", "LAST", "MEAN", "ALL"])
def test_a_vector_without_numbers_is_an_error_of_its_own_request(qwen3, pooling_type):
    """Token 99 has NaN in the embedding, as after an overflow. A step tells it in the output, the
    offline methods raise it once all is computed, and the engine goes on."""
    task = "token_embed" if pooling_type == "ALL" else "embed"
    prompts, sick = [[1, 2, 3, 4], [5, 6, 7]], [99, 1, 2]
    with start(qwen3, pooler_config=dict(pooling_type=pooling_type), max_num_batched_tokens=2,
               max_num_seqs=2) as llm:
        expected = data(llm.encode(prompts, pooling_task=task, use_tqdm=False))
        with torch.inference_mode():
            llm.runner.model.embed_tokens.weight[99] = torch.nan
        for i, prompt in enumerate([prompts[0], sick, prompts[1]]):
            llm.add_request(str(i), prompt, PoolingParams(task=task))
        outputs = {name: one for name, [one] in drain(llm).items()}
        assert outputs["1"].outputs is None and outputs["1"].finished
        assert "request 1: NaN or infinity in its result" in outputs["1"].error
        assert_close(data([outputs["0"], outputs["2"]]), expected)
        with pytest.raises(ValueError, match="NaN or infinity in its result, with dtype='float32'"):
            llm.encode([prompts[0], sick, prompts[1]], pooling_task=task, use_tqdm=False)
        assert_close(data(llm.encode(prompts, pooling_task=task, use_tqdm=False)), expected)
        assert_idle(llm)


@pytest.mark.parametrize("most", [2048, 33])
def test_a_mean_is_summed_in_float32(qwen3, most):
    """Also of states in bfloat16, in which a sum of 240 would keep two digits."""
    prompt, plain = [i * 7 % 256 for i in range(240)], PoolingParams(use_activation=False)
    with start(qwen3, dtype="bfloat16", pooler_config=dict(pooling_type="MEAN"),
               max_num_batched_tokens=most) as llm:
        [mean], [states] = (data(llm.encode([prompt], plain, pooling_task=task, use_tqdm=False))
                            for task in ("embed", "token_embed"))
        torch.testing.assert_close(mean.double(), states.double().mean(0), rtol=1e-5, atol=1e-6)


def test_no_activation_makes_a_number_of_infinity(classifiers):
    """A sigmoid would say 1."""
    with start(classifiers("qwen3", num_labels=1)) as llm:
        vector = torch.zeros(1, 64)
        vector[0, 3] = torch.inf
        assert llm.runner.pooler.finish(vector, True).isnan().all()


# ------------------------------------------------------------------------ by transformers' decoders


PROMPTS = [[5, 6, 7], list(range(40, 73)), list(range(40, 61))]


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_decoders_of_transformers_embed_as_transformers(kind, tmp_path):
    """Whole prompts, chunks of them, and a prefix that is found again. OLMo 3 is not ours."""
    config = HYBRIDS["qwen3.5"]() if kind == "hybrid" else transformers.Olmo3Config(**GQA)
    folder = make(config, tmp_path / kind)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, runner="pooling", dtype="float32", max_num_batched_tokens=8, block_size=4,
             num_gpu_blocks_override=64) as llm:
        for _ in range(2):
            for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
                with torch.inference_mode():
                    hidden = network.model(torch.tensor([prompt])).last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(hidden, dim=0)
                found = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_engine_pools_that_is_handed_the_extra(qwen3):
    from nanoserve_extras.pooling.pooling import Pooling

    with LLM(qwen3, dtype="float32", runner="pooling") as asked, LLM(
            qwen3, dtype="float32", extras=[Pooling()]) as handed:
        [one], [other] = (llm.embed([[5, 6, 7]], use_tqdm=False) for llm in (asked, handed))
    assert one.outputs.embedding == other.outputs.embedding


def test_classes_are_refused_by_the_name_of_the_option(tmp_path):
    folder = make(HYBRIDS["qwen3.5"](), tmp_path / "model")
    with pytest.raises(ValueError, match="convert='embed'"):
        LLM(folder, runner="pooling", convert="classify")


# ------------------------------------------------------------------------------------- on two ranks


@pytest.fixture
def two_ranks(ranks_in_threads):
    with ExitStack() as stack:
        yield lambda folder, **options: stack.enter_context(
            start(folder, tensor_parallel_size=2, **options))


def test_two_ranks(checkpoints, classifiers, prompts, hidden_states, two_ranks):
    """Each has half of every layer and all hidden states; rank 0 pools. A reranker's rows lie in
    the shared embedding, one here and one there."""
    for options in ({}, dict(async_scheduling=True, max_num_batched_tokens=33)):
        llm = two_ranks(checkpoints["qwen3"], **options)
        hidden = [hidden_states("qwen3", prompt) for prompt in prompts]
        assert_close(vectors(llm.embed(prompts, use_tqdm=False)),
                     [pooled(h, "LAST") for h in hidden], "two ranks")
        tokens = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        assert_close(data(tokens), [pooled(h, "ALL") for h in hidden], "two ranks, tokens")
    folder = classifiers("qwen3", 3)
    outputs = two_ranks(folder, runner="auto").classify(prompts[:5], use_tqdm=False)
    assert_close([torch.tensor(output.outputs.probs) for output in outputs],
                 [logits.softmax(-1) for logits in class_logits(folder, prompts[:5])])
    overrides = dict(classifier_from_token=["!", "<s>"], is_original_qwen3_reranker=True)
    for name in ("qwen3", "qwen3-tied"):
        one, two = (make(checkpoints[name], hf_overrides=copy.copy(overrides))
                    for make in (start, two_ranks))
        pairs = ["king?", ["A king.", "A fox."]]
        assert [output.outputs.score for output in two.score(*pairs, use_tqdm=False)] == (
            pytest.approx([output.outputs.score for output in one.score(*pairs, use_tqdm=False)],
                          abs=TOLERANCE))
