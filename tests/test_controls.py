"""Penalties and constraints: exactly what a plain loop over one row's tokens makes of the logits.

The oracle is `plain_edits`, which goes through one row token by token in numpy's float32, in the
order of vLLM's documentation. It knows of no batches, blocks or steps. What comes after the edits
(temperature, filters, the draw) is proved in test_sampler.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import sample_logits, sampling_inputs, sampling_step
from helpers import sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampling import plain_edits

from nanoserve import SamplingParams, ops
from nanoserve.config import CONTROLS
from nanoserve.controls import RowState
from nanoserve.sampler import SamplingInputs
from nanoserve.sequence import Sequence

CPU = torch.device("cpu")


# -------------------------------------------------- the sampler, on random logits

VOCAB_SIZE = 24
tokens = st.integers(0, VOCAB_SIZE - 1)


def by_count(token_ids, logits):
    """A request's own function, which makes a new row."""
    return logits * 2 + len(token_ids)


def in_place(token_ids, logits):
    logits[sum(token_ids) % VOCAB_SIZE] += 3
    return logits


@st.composite
def rows(draw) -> tuple[Sequence, list[int], list[int]]:
    """A sequence in the middle of its life; about a third of the rows use each control."""
    def maybe(strategy, neutral):
        return draw(st.just(neutral) | st.just(neutral) | strategy)

    params = SamplingParams(
        repetition_penalty=maybe(st.sampled_from([1e-6, 0.5, 1.3, 2.0, 1e6]), 1.0),
        frequency_penalty=maybe(st.sampled_from([-2.0, -0.3, 0.7, 2.0]), 0.0),
        presence_penalty=maybe(st.sampled_from([-1.5, 0.1, 2.0]), 0.0),
        temperature=draw(st.sampled_from([0, 0, 0.7, 1.5])), top_k=draw(st.sampled_from([0, 5])),
        min_tokens=maybe(st.integers(1, 8), 0), max_tokens=99,
        logprobs=maybe(st.integers(0, 5), None),
        logits_processors=maybe(st.sampled_from([[by_count], [in_place, by_count]]), None),
        logit_bias=maybe(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4), None),
        allowed_token_ids=maybe(st.lists(tokens, min_size=1, max_size=6), None))
    late, words = [], []
    if params.allowed_token_ids is None:  # something must be left of a row: the edge sees to that
        late = draw(st.lists(tokens, max_size=3))
        words = maybe(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4), [])
    prompt = draw(st.lists(tokens, min_size=1, max_size=10))
    output = draw(st.lists(tokens, max_size=10))
    if words and draw(st.booleans()):
        output += words[0][:-1]  # so that words of several tokens do begin
    seq = sequence("1", prompt, params, seed=draw(st.integers(0, 99)), late_ids=frozenset(late),
                   bad_word_ids=words)
    seq.token_ids = prompt + output
    seq.num_unknown_tokens = 1
    return seq, prompt, output


def sampled(logits: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    return sample_logits(logits, seqs, ops).token_ids.tolist()


@settings(derandomize=True, deadline=None, max_examples=120)
@given(st.lists(rows(), min_size=1, max_size=6), st.integers(0, 10 ** 6))
def test_every_row_is_edited_exactly_as_by_the_plain_loop(batch, seed):
    """All controls on all rows, mixed with rows that use none. The edited logits are equal bit by
    bit, and so are the tokens: those of the plainly edited row alone, without controls."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(batch), VOCAB_SIZE, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < .05] = 0  # where signs change
    before = logits.clone()
    seqs = [seq for seq, _, _ in batch]
    expected = torch.tensor(np.array([
        plain_edits(row, seq.request.params, prompt, output, seq.request.late_ids,
                    seq.request.bad_word_ids)
        for row, (seq, prompt, output) in zip(logits.numpy(), batch, strict=True)]))
    inputs = sampling_inputs(seqs)
    edited = logits.clone()
    if inputs.edits is not None:
        edited[inputs.edits.rows] = inputs.edits.apply(edited[inputs.edits.rows])
    assert torch.equal(edited, expected)
    got = sampled(logits, seqs)
    assert torch.equal(logits, before), "somebody else may want the model's own logits"
    for i, seq in enumerate(seqs):
        asked = seq.request.params
        free = sequence("1", seq.token_ids, SamplingParams(
            temperature=asked.temperature, top_k=asked.top_k), seed=seq.seed)
        free.num_unknown_tokens = 1
        assert [got[i]] == sampled(expected[i:i + 1], [free]), f"row {i}"
        assert expected[i, got[i]] > -np.inf, "a token that was ruled out"


def test_a_word_that_begins_in_the_prompt_is_no_word_of_the_output():
    seq = sequence("1", [1, 5], SamplingParams(temperature=0), num_unknown_tokens=1,
                   bad_word_ids=[[5, 7], [5, 6, 8]])
    for token, banned in ((None, []), (6, []), (5, [7]), (6, [8])):
        seq.token_ids += [token] * (token is not None)
        edits = sampling_inputs([seq]).edits
        assert (edits.banned[1].tolist() if edits else []) == banned


def test_ctrl_c_while_tokens_are_counted(monkeypatch):
    """Interrupted when everything is counted but nothing noted: the step is asked for again, and
    each token must count once."""
    seq = sequence("it", [1], SamplingParams(frequency_penalty=1), num_unknown_tokens=1)
    seq.token_ids += [5, 6, 5]
    read = RowState.read

    def interrupted(state, token_ids) -> None:
        num_read = state.num_read
        read(state, token_ids)
        state.num_read = num_read
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowState, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampling_inputs([seq])
    for _ in range(2):
        edits = sampling_inputs([seq]).edits
        assert (edits.seen[1].tolist(), edits.counts.tolist()) == ([5, 6], [2, 1])


@pytest.mark.parametrize("returned", [None, 5.0, torch.zeros(VOCAB_SIZE - 1), [0.0] * VOCAB_SIZE])
def test_a_function_that_does_not_return_logits_is_named(returned):
    def forgetful(token_ids, logits):
        return returned

    params = SamplingParams(temperature=0, logits_processors=[forgetful])
    seq = sequence("1", [1], params, num_unknown_tokens=1)
    edits = sampling_inputs([seq]).edits
    edits.apply(torch.zeros(1, VOCAB_SIZE))
    assert re.match(r"logits_processors: .*<function .* of 24 numbers, got", edits.failed[seq])


EXAMPLES = dict(presence_penalty=1, frequency_penalty=1, repetition_penalty=2, min_tokens=9,
                logit_bias={5: 3}, allowed_token_ids=[5, 6], bad_words=["word"],
                logits_processors=[by_count], structured_outputs={"regex": "a"},
                thinking_token_budget=1)


@pytest.mark.parametrize("name", CONTROLS)
def test_no_control_is_accepted_and_ignored(name):
    """Nor one that somebody adds to the config: without an example here its test fails, and without
    code the logits stay as they were."""
    seq = sequence("1", [1, 2], SamplingParams(**{name: EXAMPLES[name]}), num_unknown_tokens=1,
                   late_ids=frozenset([3]), bad_word_ids=[[4]] * (name == "bad_words"))
    seq.token_ids += [2]
    grammar = SimpleNamespace(mask=lambda *asked: np.array([1, 0, 0], dtype=np.uint8))
    step, batch = sampling_step([seq])
    is_mask = name in ("structured_outputs", "thinking_token_budget")
    edits = SamplingInputs.of(step, batch, {seq: grammar} if is_mask else {}).edits
    logits = torch.arange(1.0, 1 + VOCAB_SIZE)[None]
    assert not torch.equal(edits.apply(logits.clone()), logits)
