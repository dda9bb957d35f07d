"""Classes, rewards and scores equal transformers'."""

import shutil

import pytest
import torch
from checkpoints import byte_tokenizer
from helpers import write_json
from pooled import FAMILY_NAMES, TOLERANCE, assert_close, class_logits, data, normalised, start
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoserve import LLM, PoolingParams

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


@pytest.mark.parametrize("architecture, options", [
    ("Qwen3ForRewardModel", dict(runner="auto")), ("Qwen3ForRewardModeling", dict(runner="auto")),
    ("Qwen3Model", dict(runner="auto", convert="reward")),
    ("Qwen3ForProcessRewardModel", dict(runner="auto")),
    ("Qwen3ForCausalLM", dict(runner="pooling", convert="reward"))], ids=str)
def test_rewards_for_each_token(qwen3, prompts, hidden_states, tmp_path, architecture, options):
    """Qwen's reward models have two layers for a head. transformers has no class for them. Their
    names end in two ways, and convert="reward" says what another name does not."""
    folder, tensors = tmp_path / "reward", load_file(qwen3 / "model.safetensors")
    shutil.copytree(qwen3, folder)
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    judges_steps = "Process" in architecture  # Qwen2.5-Math-PRM: whether a step is right
    sizes = (64, 1 + judges_steps)
    w0, w2 = (torch.randn(n, 64, generator=generator) / 64 for n in sizes)
    b0, b2 = (torch.randn(n, generator=generator) for n in sizes)
    tensors |= {"score.0.weight": w0, "score.0.bias": b0, "score.2.weight": w2, "score.2.bias": b2}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", architectures=[architecture])
    expected = [(hidden_states("qwen3", prompt) @ w0.T + b0).relu() @ w2.T + b2
                for prompt in prompts]
    with start(folder, max_num_batched_tokens=33, **options) as llm:
        outputs = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
        # A reward is no probability; that of a step is, and comes as one.
        activation = (lambda x: x.softmax(-1)) if judges_steps else torch.sigmoid
        active = [activation(rewards) for rewards in expected]
        assert_close(data(outputs), active if judges_steps else expected)
        for use in (True, False):
            outputs = llm.encode(prompts, PoolingParams(use_activation=use),
                                 pooling_task="token_classify", use_tqdm=False)
            assert_close(data(outputs), active if use else expected)
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


@pytest.mark.parametrize("template", [
    "<s>{{ messages[0]['content'] }}?\n\nText: {{ messages[1]['content'] }}\nyes?", None])
@pytest.mark.parametrize("side", [None, "left"])
def test_of_a_pair_that_is_too_long_the_document_gives_way(checkpoints, template, side):
    """The prompt's last tokens were kept: two queries had one score, of a text without a query.
    Oracle: the same prompts with documents that were cut by hand, letter by letter."""
    tokenizer = byte_tokenizer()
    queries, document = ["Is the king old", "a fox"], "\nThe fox ran, the king slept. " * 9

    def ids(query: str, document: str) -> list[int]:
        text = f"<s>{query}?\n\nText: {document}\nyes?" if template else query + document
        return tokenizer.encode(text, add_special_tokens=False)

    overrides = dict(classifier_from_token=["n", "Y"], is_original_qwen3_reranker=True,
                     architectures=["Qwen3ForSequenceClassification"])
    with start(checkpoints["qwen3"], hf_overrides=overrides, max_model_len=100) as llm:
        for counts in ([-1, -1], [60, 60], [60, 90]):
            params = [PoolingParams(truncate_prompt_tokens=count, truncation_side=side)
                      for count in counts]
            outputs = llm.score(queries, [document] * 2, use_tqdm=False, chat_template=template,
                                pooling_params=params if counts[0] != counts[1] else params[0])
            kept = []
            for query, count in zip(queries, counts, strict=True):
                short = document
                while len(ids(query, short)) > (100 if count == -1 else count):
                    short = short[1:] if side else short[:-1]
                kept.append(ids(query, short))
            assert [output.prompt_token_ids for output in outputs] == kept
            expected = llm.classify(kept, use_tqdm=False)
            assert [output.outputs.score for output in outputs] == pytest.approx(
                [output.outputs.probs[0] for output in expected], abs=TOLERANCE)
            assert outputs[0].outputs.score != pytest.approx(outputs[1].outputs.score, abs=1e-6)
        with pytest.raises(ValueError, match="leave no room"):
            llm.score("long query " * 9, document, chat_template=template, use_tqdm=False,
                      pooling_params=params[0])


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
        before = llm.metrics.num_prompt_tokens
        outputs = llm.score("fox", ["A king.", "A fox."], use_tqdm=False)
        assert llm.metrics.num_prompt_tokens - before == len("fox" "A king." "A fox.")
        assert [output.prompt_token_ids for output in outputs] == [
            output.prompt_token_ids for output in one_by_one]
        assert [output.outputs.score for output in outputs] == pytest.approx(
            [output.outputs.score for output in one_by_one], abs=1e-5)
        assert llm.score("fox", [], use_tqdm=False) == []
