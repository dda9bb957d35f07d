"""Vectors, classes and scores equal transformers', however the prompts were scheduled.

The oracle is transformers in float32, one prompt at a time, without a cache: hidden states of
`AutoModel`, logits of `AutoModelForSequenceClassification`, and of `AutoModelForCausalLM` where a
generator answers yes or no. Pooling, normalising and the rest are done here by hand.
"""

import copy
import json
import pickle
import shutil
import threading

import pytest
import torch
from conftest import CHECKPOINTS, byte_tokenizer, save, write_json
from safetensors.torch import load_file, save_file
from test_parallel import thread_ranks
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from nanoserve import LLM, PoolingParams, SamplingParams
from nanoserve import llm as llm_module
from nanoserve.extras import pooling
from nanoserve.model_runner import serve_rank

TOLERANCE = 1e-5
FAMILY_NAMES = ["llama3.1", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "gemma2", "gemma3"]


def start(folder, **options) -> LLM:
    """A pooling engine whose cache is NaN until it is written."""
    llm = LLM(folder, **dict(num_gpu_blocks_override=64, dtype="float32", device="cpu",
                             runner="pooling") | options)
    for kv in llm.runner.kv_cache:
        for cache in kv:
            cache.fill_(float("nan"))
    return llm


def vectors(outputs) -> list[torch.Tensor]:
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def data(outputs) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs]


def assert_close(got, expected, where: str = "") -> None:
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected)):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE,
                                   msg=lambda text, i=i: f"{where}, prompt {i}: {text}")


def assert_idle(llm: LLM) -> None:
    llm.scheduler.check()
    assert not llm.requests and not llm.scheduler.has_unfinished()
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def pooled(hidden: torch.Tensor, pooling_type: str) -> torch.Tensor:
    """The specification. hidden: (tokens, hidden_size)."""
    return normalised({"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0),
                       "ALL": hidden}[pooling_type])


@pytest.fixture(scope="session")
def hidden_states(checkpoints):
    """Hidden states by checkpoint and prompt; each is computed once."""
    models, known = {}, {}

    @torch.no_grad()
    def of(name: str, prompt: list[int]) -> torch.Tensor:
        if name not in models:
            models[name] = AutoModel.from_pretrained(checkpoints[name], dtype=torch.float32).eval()
        key = (name, tuple(prompt))
        if key not in known:
            known[key] = models[name](torch.tensor([prompt])).last_hidden_state[0]
        return known[key]

    return of


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory):
    """Classifiers by family and number of classes."""
    folders = {}

    def folder_of(name: str, num_labels: int, **entries):
        key = (name, num_labels, *entries.items())
        if key not in folders:
            config = CHECKPOINTS[name]()
            config.num_labels = num_labels
            for entry, value in entries.items():
                setattr(config, entry, value)
            model = AutoModelForSequenceClassification.from_config(config)
            folders[key] = save(model, tmp_path_factory.mktemp(f"{name}-{num_labels}"))
        return folders[key]

    return folder_of


@torch.no_grad()
def class_logits(folder, prompts) -> list[torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


# ------------------------------------------------------------------ embeddings


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_family_embeds_as_transformers(checkpoints, prompts, hidden_states, name):
    """A generator's checkpoint as an embedder: batched, and in chunks of 7 tokens."""
    prompts = prompts[2:11:2]
    hidden = [hidden_states(name, prompt) for prompt in prompts]
    with start(checkpoints[name]) as llm:
        assert llm.runner.model.lm_head is None and llm.config.runner == "pooling"
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
    "no prefix cache": dict(enable_prefix_caching=False),
    "budget 5": dict(max_num_batched_tokens=5),
    "budget 33": dict(max_num_batched_tokens=33),
    "two at a time": dict(max_num_seqs=2),
    "blocks of 5": dict(block_size=5, max_num_batched_tokens=16),
    "tiny pool": dict(num_gpu_blocks_override=6, max_num_batched_tokens=16),
    "overlap": dict(async_scheduling=True, max_num_batched_tokens=9),
    "overlap, tiny pool": dict(async_scheduling=True, num_gpu_blocks_override=20, block_size=5,
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
        outputs = [llm.encode(prompt, pooling_task=task, use_tqdm=False)[0] for prompt in prompts]
        assert_close(data(outputs), expected, f"{pooling_type}, {mode}, alone")


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
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert_close(data(outputs), [pooled(hidden_states("qwen3", prompts[8]), "MEAN")])
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
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert_close(data(outputs), [pooled(hidden_states("qwen3", prompts[8]), pooling_type)])
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


def test_what_arrives_together_is_computed_once(qwen3):
    with start(qwen3) as llm:
        outputs = llm.embed([[7] * 64 + [i] for i in range(8)], use_tqdm=False)
        assert sorted(output.num_cached_tokens for output in outputs) == [0] + [64] * 7
        assert llm.metrics.num_step_tokens == 65 + 7


def test_nothing_decodes_and_blocks_go_back_at_once(qwen3, prompts):
    with start(qwen3) as llm:
        llm.embed(prompts, use_tqdm=False)
        assert llm.metrics.num_steps <= 2 and llm.metrics.num_generation_tokens == 0
        llm.add_request("a", prompts[8], PoolingParams())
        [output] = llm.step()  # the one step that it takes
        assert output.finished and output.request_id == "a" and not llm.has_unfinished_requests()
        assert_idle(llm)
        assert set(dict(llm.runner.model.named_children())) & {"lm_head", "score"} == set()


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


# ------------------------------------------------------ classes and rewards


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_classifies_as_transformers(classifiers, prompts, name):
    """Batched with probabilities, in chunks with logits, and for each token."""
    folder, prompts = classifiers(name, 3), prompts[3:11:2]
    expected = class_logits(folder, prompts)
    raw = PoolingParams(use_activation=False)
    with LLM(folder, num_gpu_blocks_override=64, max_num_batched_tokens=33, device="cpu") as llm:
        outputs = llm.classify(prompts, use_tqdm=False)
        assert [output.outputs.num_classes for output in outputs] == [3] * len(prompts)
        assert_close([torch.tensor(output.outputs.probs) for output in outputs],
                     [logits.softmax(-1) for logits in expected], name)
        outputs = llm.encode(prompts, raw, pooling_task="token_classify", use_tqdm=False)
        assert [len(logits) for logits in data(outputs)] == [len(prompt) for prompt in prompts]
        scale = max(logits.abs().max() for logits in expected)  # of digits there are seven
        assert_close([logits[-1] / scale for logits in data(outputs)],
                     [logits / scale for logits in expected], name)
        with pytest.raises(ValueError, match="one class"):
            llm.score("a", "b")


@pytest.mark.parametrize(("num_labels", "problem", "activation"), [
    (1, None, torch.sigmoid), (2, None, lambda x: x.softmax(-1)),
    (2, "multi_label_classification", torch.sigmoid), (1, "regression", lambda x: x),
    (3, "single_label_classification", lambda x: x.softmax(-1))])
def test_the_activation_is_what_the_model_was_trained_for(classifiers, prompts, num_labels, problem,
                                                          activation):
    folder = classifiers("qwen3", num_labels, problem_type=problem)
    expected = [activation(logits) for logits in class_logits(folder, prompts[:3])]
    with start(folder) as llm:
        outputs = llm.classify(prompts[:3], use_tqdm=False)
        assert_close([torch.tensor(output.outputs.probs) for output in outputs], expected)


def test_rewards_for_each_token(qwen3, prompts, hidden_states, tmp_path):
    """Qwen's reward models have two layers for a head. transformers has no class for them."""
    folder, tensors = tmp_path / "reward", load_file(qwen3 / "model.safetensors")
    shutil.copytree(qwen3, folder)
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    w0, w2 = (torch.randn(n, 64, generator=generator) / 64 for n in (64, 1))
    b0, b2 = (torch.randn(n, generator=generator) for n in (64, 1))
    tensors |= {"score.0.weight": w0, "score.0.bias": b0, "score.2.weight": w2, "score.2.bias": b2}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", architectures=["Qwen3ForRewardModel"])
    expected = [(hidden_states("qwen3", prompt) @ w0.T + b0).relu() @ w2.T + b2
                for prompt in prompts]
    with start(folder, runner="auto", max_num_batched_tokens=33) as llm:
        outputs = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
        assert_close(data(outputs), expected)  # a reward is no probability
        use = PoolingParams(use_activation=True)
        outputs = llm.encode(prompts, use, pooling_task="token_classify", use_tqdm=False)
        assert_close(data(outputs), [torch.sigmoid(rewards) for rewards in expected])
        with pytest.raises(ValueError, match="token_classify"):
            llm.embed("a")


# -------------------------------------------------------------------- scores


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "gemma2"])
def test_a_reranker_that_answers_yes_or_no(checkpoints, name):
    """The rows of two tokens of the LM head, which may be the embedding, are a classifier: its
    score is the softmax over the two logits. (Gemma 2 squeezes its logits; a score is not.)"""
    yes, no = "Y", "n"
    pairs = [("king?", "A king."), ("king?", "A fox ran over the hill and was gone."), ("q", "d")]
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32).eval()
    yes_id, no_id = tokenizer.convert_tokens_to_ids([yes, no])
    rows = model.get_output_embeddings().weight

    @torch.no_grad()
    def expected(text: str) -> float:
        hidden = model.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
        return (rows[[no_id, yes_id]] @ hidden).softmax(-1)[1].item()

    overrides = dict(classifier_from_token=[no, yes], is_original_qwen3_reranker=True)
    if name != "gemma2":
        overrides["architectures"] = ["Qwen3ForSequenceClassification"]
    with start(checkpoints[name], hf_overrides=overrides) as llm:
        outputs = llm.score([q for q, _ in pairs], [d for _, d in pairs], use_tqdm=False)
        scores = [output.outputs.score for output in outputs]
        assert scores == pytest.approx([expected(q + d) for q, d in pairs], abs=TOLERANCE)
        outputs = llm.score("king?", ["A king.", "q"], use_tqdm=False, chat_template=(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"))
        assert [output.outputs.score for output in outputs] == pytest.approx([
            expected("<query>king?<document>" + d) for d in ("A king.", "q")], abs=TOLERANCE)
        with pytest.raises(ValueError, match="texts"):
            llm.score([[1, 2]], ["a"])
    overrides["is_original_qwen3_reranker"] = False
    with start(checkpoints[name], hf_overrides=overrides) as llm:
        [output] = llm.classify("king?A king.", use_tqdm=False)
        assert output.outputs.probs[1] == pytest.approx(expected("king?A king."), abs=TOLERANCE)


def test_a_cross_encoder_reads_both_texts(classifiers):
    folder, tokenizer = classifiers("qwen2", 1), byte_tokenizer()
    documents = ["A king.", "A fox."]
    ids = [tokenizer("king?", document)["input_ids"] for document in documents]
    expected = [torch.sigmoid(logits).item() for logits in class_logits(folder, ids)]
    with start(folder) as llm:
        outputs = llm.score("king?", documents, use_tqdm=False)
        assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
        assert [output.prompt_token_ids for output in outputs] == ids


def test_the_score_of_an_embedder_is_a_cosine(qwen3, hidden_states):
    tokenizer = byte_tokenizer()

    def vector(text: str) -> torch.Tensor:
        return normalised(hidden_states("qwen3", tokenizer.encode(text))[-1])

    texts = ["A king.", "A fox.", "Another fox."]
    with start(qwen3) as llm:
        outputs = llm.score("fox", texts, use_tqdm=False)
        expected = [float(vector("fox") @ vector(text)) for text in texts]
        assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
        outputs = llm.score(texts, texts, use_tqdm=False)
        assert [output.outputs.score for output in outputs] == pytest.approx([1] * 3, abs=1e-5)
        with pytest.raises(ValueError, match="2 and 3 texts"):
            llm.score(texts[:2], texts)


def test_a_query_is_embedded_once_for_all_its_documents(qwen3):
    """And not once for each: with many short documents, most of the work was the same vector."""
    with start(qwen3, pooler_config={"pooling_type": "MEAN"}) as llm:
        one_by_one = [llm.score("fox", text, use_tqdm=False)[0] for text in ("A king.", "A fox.")]
        before = llm.metrics.num_step_tokens
        outputs = llm.score("fox", ["A king.", "A fox."], use_tqdm=False)
        assert llm.metrics.num_step_tokens - before == len("fox" "A king." "A fox.")
        assert [output.prompt_token_ids for output in outputs] == [
            output.prompt_token_ids for output in one_by_one]
        assert [output.outputs.score for output in outputs] == pytest.approx(
            [output.outputs.score for output in one_by_one], abs=1e-5)
        assert llm.score("fox", [], use_tqdm=False) == []


# --------------------------------------------------------- reading checkpoints


def sentence_transformer(qwen3, folder, mode: str, modules=("Transformer", "Pooling", "Normalize")):
    """What sentence-transformers writes around a base model: Qwen3-Embedding's form."""
    model = AutoModel.from_pretrained(qwen3, dtype=torch.float32)
    model.save_pretrained(folder)  # tensors without "model." in front, no LM head
    byte_tokenizer().save_pretrained(folder)
    write_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    (folder / "modules.json").write_text(json.dumps([
        dict(idx=i, name=str(i), path="" if i == 0 else f"{i}_{kind}",
             type=f"sentence_transformers.models.{kind}") for i, kind in enumerate(modules)]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({
        "word_embedding_dimension": 64, "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": False, "include_prompt": True} | {mode: True}))
    return folder


@pytest.mark.parametrize(("mode", "pooling_type"), [
    ("pooling_mode_cls_token", "CLS"), ("pooling_mode_mean_tokens", "MEAN"),
    ("pooling_mode_lasttoken", "LAST")])
def test_sentence_transformers_files_are_read(qwen3, prompts, hidden_states, tmp_path, mode,
                                              pooling_type):
    folder = sentence_transformer(qwen3, tmp_path / "st", mode)
    expected = [pooled(hidden_states("qwen3", prompt), pooling_type) for prompt in prompts[:5]]
    with start(folder, runner="auto") as llm:
        assert_close(vectors(llm.embed(prompts[:5], use_tqdm=False)), expected)


def test_what_sentence_transformers_does_beyond_that_is_refused(qwen3, prompts, hidden_states,
                                                                tmp_path):
    plain = sentence_transformer(qwen3, tmp_path / "a", "pooling_mode_mean_tokens",
                                 ("Transformer", "Pooling"))
    with start(plain) as llm:  # no Normalize: no normalising
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)),
                     [hidden_states("qwen3", prompts[5]).mean(0)])
    with start(plain, pooler_config=dict(pooling_type="LAST", use_activation=True)) as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)),
                     [pooled(hidden_states("qwen3", prompts[5]), "LAST")])
    with pytest.raises(ValueError, match="pooling_mode_max_tokens"):
        start(sentence_transformer(qwen3, tmp_path / "b", "pooling_mode_max_tokens"))
    for where, modules in dict(c=("Transformer", "Pooling", "Dense"),
                               d=("Transformer", "Pooling", "Normalize", "Dense"),
                               e=("Transformer", "Pooling", "Dropout", "Normalize")).items():
        with pytest.raises(ValueError, match=r"modules.json: the module D\w+ is not supported"):
            start(sentence_transformer(qwen3, tmp_path / where, "pooling_mode_lasttoken", modules))
    lower = sentence_transformer(qwen3, tmp_path / "f", "pooling_mode_lasttoken")
    (lower / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ValueError, match="do_lower_case=True is not supported"):
        start(lower)


def test_a_base_model_embeds_by_itself(prompts, tmp_path):
    """`Qwen3Model` and `Gemma3TextModel` have no head, and so no other use."""
    for name in ("qwen3", "gemma3"):
        folder = save(AutoModel.from_config(CHECKPOINTS[name]()), tmp_path / name)
        model = AutoModel.from_pretrained(folder).eval()
        with torch.no_grad():
            hidden = model(torch.tensor([prompts[5]])).last_hidden_state[0]
        with start(folder, runner="auto") as llm:
            assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)), [pooled(hidden, "LAST")])
        with pytest.raises(ValueError, match="runner='generate'.*no LM head"):
            start(folder, runner="generate")


def test_a_classifier_as_an_embedder_and_the_other_way_round(classifiers, qwen3, prompts):
    folder = classifiers("qwen3", 3)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([prompts[5]])).last_hidden_state[0]
    with start(folder, convert="embed") as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)), [pooled(hidden, "LAST")])
    with pytest.raises(ValueError, match="missing from the checkpoint: score.weight"):
        start(qwen3, convert="classify")
    with pytest.raises(ValueError, match=r"score.weight.*shape \(3, 64\)"):
        start(folder, hf_overrides={"num_labels": 4})


def test_bfloat16_is_close(classifiers, qwen3, prompts, hidden_states):
    """Heads and activations are float32 there, too."""
    with start(qwen3, dtype="bfloat16") as llm:
        for prompt, vector in zip(prompts, vectors(llm.embed(prompts, use_tqdm=False))):
            assert vector @ pooled(hidden_states("qwen3", prompt), "LAST") > 0.999
    folder = classifiers("qwen3", 3)
    with start(folder, dtype="bfloat16") as llm:
        outputs = llm.classify(prompts[:5], use_tqdm=False)
        for output, logits in zip(outputs, class_logits(folder, prompts[:5]), strict=True):
            assert sum(output.outputs.probs) == pytest.approx(1, abs=1e-6)
            assert torch.tensor(output.outputs.probs).sub(logits.softmax(-1)).abs().max() < 0.1


def test_random_weights_pool_too(qwen3, classifiers):
    for folder in (qwen3, classifiers("qwen3", 3)):
        with start(folder, load_format="dummy") as llm:
            [output] = llm.encode([1, 2], pooling_task=llm.inputs.pooler.tasks[0], use_tqdm=False)
            assert output.outputs.data.isfinite().all()


@pytest.mark.parametrize(("method", "arguments"), [
    ("embed", (["a", "b", "c"],)), ("score", ("a", ["b", "c"]))])
def test_an_aborted_text_costs_the_others_nothing(checkpoints, monkeypatch, method, arguments):
    """Another thread may abort it. It has no vector, and the others' were lost with it."""
    with start(checkpoints["qwen3"]) as llm:
        advance = llm._advance

        def aborts():
            monkeypatch.setattr(llm, "_advance", advance)
            llm.abort_request(list(llm.requests)[1])
            advance()

        alone = llm.embed(["a", "c"], use_tqdm=False) if method == "embed" else (
            llm.score("a", "c", use_tqdm=False))
        monkeypatch.setattr(llm, "_advance", aborts)
        outputs = getattr(llm, method)(*arguments, use_tqdm=False)
        assert outputs.pop(1 if method == "embed" else 0).outputs is None
        for output, expected in zip(outputs, alone, strict=True):
            assert_close(*(torch.tensor(list(vars(one.outputs).values()))
                           for one in (output, expected)))


# ---------------------------------------------------------------- wrong use


@pytest.fixture(scope="module")
def embedder(checkpoints):
    with start(checkpoints["qwen3"], max_model_len=128) as llm:
        yield llm


@pytest.mark.parametrize(("call", "message"), [
    (lambda llm: llm.generate("a"), "runner='generate'"),
    (lambda llm: llm.generate("a", SamplingParams()), "runner='generate'"),
    (lambda llm: llm.generate("a", PoolingParams()), "runner='generate'"),
    (lambda llm: llm.stream("a", PoolingParams()), "runner='generate'"),
    (lambda llm: llm.chat([{"role": "user", "content": "a"}]), "runner='generate'"),
    (lambda llm: llm.stream("a"), "runner='generate'"),
    (lambda llm: llm.add_request("a", "a"), "runner='generate'"),
    (lambda llm: llm.encode("a"), "pooling_task.*embed, token_embed"),
    (lambda llm: llm.encode("a", pooling_task="vote"), "task='vote'"),
    (lambda llm: llm.classify("a"), "task='classify'.*convert"),
    (lambda llm: llm.encode("a", PoolingParams(task="embed"), pooling_task="token_embed"), "task"),
    (lambda llm: llm.embed("a", pooling_params=SamplingParams()), "PoolingParams"),
    (lambda llm: llm.embed("a", pooling_params={}), "must be PoolingParams, got {}"),
    (lambda llm: llm.embed(["a", "b"], pooling_params=[None]), "1 entries for 2 prompts"),
    (lambda llm: llm.embed(["a", ""]), "prompt 1: .*empty"),
    (lambda llm: llm.embed(["a", []]), "prompt 1: .*empty"),
    (lambda llm: llm.embed([[1], [260]]), "prompt 1: .*260.*vocabulary"),
    (lambda llm: llm.embed(["a", "b" * 129]), "129 tokens.*128"),
    (lambda llm: llm.embed(7), "must be a str"),
    (lambda llm: llm.embed("a", priority=[1]), "priority"),
    (lambda llm: llm.embed("a", pooling_params=PoolingParams(truncate_prompt_tokens=129)), "129"),
    (lambda llm: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (lambda llm: PoolingParams(use_activation="yes"), "use_activation"),
])
def test_wrong_use_is_refused_before_any_work(embedder, call, message):
    with pytest.raises(ValueError, match=message):
        call(embedder)
    assert_idle(embedder)
    assert len(embedder.embed("Hello", use_tqdm=False)[0].outputs.embedding) == 64


@pytest.mark.parametrize(("options", "message"), [
    (dict(convert="none"), "convert='none'"),
    (dict(runner="generate", convert="embed"), "convert='embed'.*runner='pooling'"),
    (dict(runner="generate", pooler_config={}), "pooler_config"),
    (dict(runner="draft"), "runner='draft'"),
    (dict(convert="reward"), "convert='reward'"),
    (dict(pooler_config={"pooling_type": "MAX"}), "pooling_type='MAX'"),
    (dict(pooler_config="MEAN"), "pooler_config"),
    (dict(pooler_config={"use_activation": "no"}), "use_activation must be .* got 'no'"),
    (dict(pooler_config={"pooling_type": "STEP"}), "pooling_type='STEP' is not supported"),
    (dict(hf_overrides={"architectures": ["Qwen3ForTokenClassification"]}),
     "Qwen3ForTokenClassification is not supported.*ForSequenceClassification"),
    (dict(hf_overrides={"architectures": ["Qwen2ForProcessRewardModel"]}),  # vLLM's STEP
     "Qwen2ForProcessRewardModel is not supported.*ForRewardModel"),
    (dict(hf_overrides={"architectures": ["BertModel"]}), "BertModel is not supported"),
    (dict(pooler_config={"dimensions": 8}), "is_matryoshka"),
    (dict(hf_overrides={"is_causal": False}), "is_causal"),
    (dict(hf_overrides={"use_bidirectional_attention": True}), "use_bidirectional_attention"),
    (dict(hf_overrides={"classifier_from_token": ["no", "Y"]}), "'no' is no token"),
    (dict(hf_overrides={"classifier_from_token": ["Y"], "is_original_qwen3_reranker": True}),
     "two tokens"),
    (dict(hf_overrides={"classifier_from_token": ["Y"], "method": "vote"}), "method='vote'"),
    (dict(hf_overrides={"classifier_from_token": "Yn"}), "'Yn' must be a list of tokens"),
    (dict(hf_overrides={"classifier_from_token": ["Y"]}, skip_tokenizer_init=True), "tokenizer"),
])
def test_options_that_can_not_work(qwen3, options, message):
    with pytest.raises(ValueError, match=message):
        start(qwen3, **options)


def test_unknown_names_are_refused(qwen3):
    with pytest.raises(TypeError, match="normalise"):
        PoolingParams(normalise=True)
    with pytest.raises(TypeError, match="pooling"):
        start(qwen3, pooler_config={"pooling": "MEAN"})


# ------------------------------------------------------------------- the loop


def test_ctrl_c_leaves_the_engine_usable(qwen3, prompts, monkeypatch):
    llm = start(qwen3, max_num_batched_tokens=16)
    expected = vectors(llm.embed(prompts, use_tqdm=False))
    launch, count = llm.runner.launch, 0

    def interrupted(step):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.embed(prompts, use_tqdm=False)
    assert_idle(llm)
    assert_close(vectors(llm.embed(prompts, use_tqdm=False)), expected)


def test_abort_and_priority(qwen3, prompts):
    with start(qwen3, scheduling_policy="priority", max_num_seqs=1) as llm:
        for name, priority in (("late", 3), ("gone", 2), ("soon", 1)):
            llm.add_request(name, prompts[5], PoolingParams(), priority)
        llm.abort_request("gone")
        names = []
        while llm.has_unfinished_requests():
            for output in llm.step():
                names.append(output.request_id)
                assert output.finished and (output.outputs is None) == (output.request_id == "gone")
        assert names == ["gone", "soon", "late"]
        assert_idle(llm)


def test_a_trace_shows_it(qwen3, prompts, tmp_path):
    with start(qwen3, trace=str(tmp_path / "run.json")) as llm:
        llm.embed(prompts, use_tqdm=False)
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_a_caller_may_change_what_it_got(qwen3):
    """Tensors of inference mode can't take part in training."""
    with start(qwen3) as llm:
        for task in ("embed", "token_embed"):
            [output] = llm.encode("Hello", pooling_task=task, use_tqdm=False)
            output.outputs.data.requires_grad_().sum().backward()


# ------------------------------------------------------------------- two ranks


@pytest.fixture
def two_ranks(monkeypatch):
    """Engines whose second rank is a thread, which gets its payload as a process would."""
    engines = []

    def thread_start(size: int, device: str, entry: str, payload):
        first, *others = thread_ranks(size)
        for one in others:
            threading.Thread(target=serve_rank, daemon=True,
                             args=(one, pickle.loads(pickle.dumps(payload)))).start()
        return first

    def make(folder, **options) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr(llm_module, "start_ranks", thread_start)
            engines.append(start(folder, tensor_parallel_size=2, **options))
        return engines[-1]

    yield make
    for llm in engines:
        llm.shutdown()


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


# ------------------------------------------------------------------- measuring


def test_the_comparison_can_be_made(qwen3):
    """It checks its numbers against each other; what it says about time is not judged here."""
    assert len(pooling.bench(qwen3, num_texts=5, batch_size=2, rounds=1)) == 3
