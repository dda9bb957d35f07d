"""What checkpoints say about pooling, and what is refused before any work starts."""


import pytest
import torch
from checkpoints import CHECKPOINTS, byte_tokenizer, save
from helpers import write_json
from pooled import assert_close, class_logits, pooled, start, vectors, write_files
from small_engine import assert_idle
from transformers import AutoModel

from nanoserve import PoolerConfig, PoolingParams, SamplingParams

# --------------------------------------------------------- reading checkpoints


def test_without_normalize_a_vector_keeps_its_length_unless_the_user_overrules_it(
        qwen3, prompts, hidden_states, tmp_path):
    """Qwen3-Embedding's form: tensors without "model." in front, no LM head, a generator's name."""
    AutoModel.from_pretrained(qwen3, dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", architectures=["Qwen3ForCausalLM"])
    write_files(tmp_path, ("Pooling", dict(pooling_mode_mean_tokens=True), {}))
    with start(tmp_path, runner="auto") as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)),
                     [hidden_states("qwen3", prompts[5]).mean(0)])
    with start(tmp_path, pooler_config=dict(pooling_type="LAST", use_activation=True)) as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)),
                     [pooled(hidden_states("qwen3", prompts[5]), "LAST")])


def test_a_base_model_embeds_by_itself(prompts, tmp_path):
    """`Qwen3Model` and `Gemma3TextModel` have no head, and so no other use."""
    for name in ("qwen3", "gemma3"):
        folder = save(AutoModel.from_config(CHECKPOINTS[name]()), tmp_path / name)
        model = AutoModel.from_pretrained(folder).eval()
        with torch.no_grad():
            hidden = model(torch.tensor([prompts[5]])).last_hidden_state[0]
        with start(folder, runner="auto") as llm:
            assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)), [pooled(hidden, "LAST")])
        with pytest.raises(ValueError, match="runner='generate'.*LM head"):
            start(folder, runner="generate")


def test_a_classifier_as_an_embedder_and_the_other_way_round(classifiers, qwen3, prompts):
    folder = classifiers("qwen3", 3)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([prompts[5]])).last_hidden_state[0]
    with start(folder, convert="embed") as llm:
        assert_close(vectors(llm.embed(prompts[5], use_tqdm=False)), [pooled(hidden, "LAST")])
    with pytest.raises(ValueError, match="missing.*score.weight"):
        start(qwen3, convert="classify")
    with pytest.raises(ValueError, match=r"score.weight.*shape \(3, 64\)"):
        start(folder, hf_overrides={"num_labels": 4})


def test_bfloat16_is_close(classifiers, qwen3, prompts, hidden_states):
    """Heads and activations are float32 there, too."""
    with start(qwen3, dtype="bfloat16") as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
        for prompt, vector in zip(prompts, found, strict=True):
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
        submit = llm.submit

        def aborts(request, inbox):
            submit(request, inbox)
            if len(llm.requests) == 3:
                llm.abort_request(list(llm.requests)[1])

        alone = llm.embed(["a", "c"], use_tqdm=False) if method == "embed" else (
            llm.score("a", "c", use_tqdm=False))
        monkeypatch.setattr(llm, "submit", aborts)
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
    (lambda llm: llm.chat([{"role": "user", "content": "a"}]), "runner='generate'"),
    (lambda llm: llm.stream("a"), "runner='generate'"),
    (lambda llm: llm.add_request("a", "a"), "runner='generate'"),
    (lambda llm: llm.encode("a"), "pooling_task.*embed, token_embed"),
    (lambda llm: llm.encode("a", pooling_task="vote"), "task='vote'"),
    (lambda llm: llm.classify("a"), "task='classify'.*convert"),
    (lambda llm: llm.encode("a", PoolingParams(task="embed"), pooling_task="token_embed"), "task"),
    (lambda llm: llm.embed("a", pooling_params=SamplingParams()), "PoolingParams"),
    (lambda llm: llm.embed("a", pooling_params={}), "PoolingParams.*got {}"),
    (lambda llm: llm.embed(["a", "b"], pooling_params=[None]), "1 entries for 2 prompts"),
    (lambda llm: llm.embed(["a", ""]), "prompt 1: .*empty"),
    (lambda llm: llm.embed([[1], [260]]), "prompt 1: .*260.*vocabulary"),
    (lambda llm: llm.embed(["a", "b" * 129]), "129 tokens.*128"),
    (lambda llm: llm.embed(7), "must be a str"),
    (lambda llm: llm.embed("a", priority=["high"]), "priority"),
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
    (dict(runner="draft"), "runner.*got 'draft'"),
    (dict(convert="reword"), "convert.*got 'reword'"),
    (dict(pooler_config={"pooling_type": "SUM"}), "pooling_type.*CLS.*'SUM'"),
    (dict(pooler_config="MEAN"), "pooler_config"),
    (dict(pooler_config={"use_activation": "no"}), "use_activation.*got 'no'"),
    (dict(pooler_config={"pooling_type": "STEP"}), "pooling_type.*CLS.*'STEP'"),
    (dict(hf_overrides={"architectures": ["Qwen3ForTokenClassification"]}),
     "Qwen3ForTokenClassification.*ForSequenceClassification"),
    (dict(hf_overrides={"architectures": ["BertModel"]}), "BertModel"),
    (dict(pooler_config={"dimensions": 8}), "is_matryoshka"),
    (dict(hf_overrides={"is_causal": False}), "is_causal"),
    (dict(hf_overrides={"use_bidirectional_attention": True}), "use_bidirectional_attention"),
    (dict(hf_overrides={"classifier_from_token": ["no", "Y"]}), "'no' .*token"),
    (dict(hf_overrides={"classifier_from_token": ["Y"], "is_original_qwen3_reranker": True}),
     "two tokens"),
    (dict(hf_overrides={"classifier_from_token": ["Y"], "method": "vote"}), "method='vote'"),
    (dict(hf_overrides={"classifier_from_token": "Yn"}), "'Yn'"),
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


def test_vllms_words_for_pooling(qwen3):
    """Taken where they ask for nothing, refused with the way round where they ask for something."""
    assert PoolingParams(normalize=None) == PoolingParams()
    for asked in (True, False):  # neither is the same as nothing
        with pytest.raises(ValueError, match=f"normalize={asked} .*use_activation="):
            PoolingParams(normalize=asked)
    config = PoolerConfig(pooling_type="MEAN", activation=None)
    with start(qwen3, pooler_config=config) as llm:
        assert str(llm.runner.pooler) == "pooling MEAN to embed"
        assert len(llm.embed("a", lora_request=None)) == 1
        for call in (llm.embed, lambda text, **given: llm.score(text, text, **given)):
            with pytest.raises(ValueError, match="lora_request='x'"):
                call("a", lora_request="x")
        with pytest.raises(TypeError, match="use_tdqm.*use_tqdm"):
            llm.embed("a", use_tdqm=False)
