"""Two ranks embed and classify as one."""

import copy
from contextlib import ExitStack

import pytest
import torch
from pooled import TOLERANCE, assert_close, class_logits, data, pooled, start, vectors


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
