"""The page of hooks: what becomes of an engine when an extra fails, and what it is not handed.

The oracle is transformers' text.
"""

import os

import pytest
from clean_process import needs_extras
from helpers import hand_over, take_away, watch_steps
from small_engine import drain, drain_through, greedy, ids_of, make

from nanoserve.hooks import NAMES, Extra

# More prompts than rows and blocks, so that blocks are evicted; some share a block.
SHARED = ids_of("the same beginning")
PROMPTS = {"a": SHARED, "b": [7] * 30, "c": [*SHARED, 5], "d": [6] * 20, "e": [*SHARED, 9]}
IN_A_STEP = [name for name in NAMES if name not in (
    "prepare", "attach", "check", "added", "reset", "close", "draft")]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(request, qwen3):
    with make(qwen3, num_gpu_blocks_override=9, async_scheduling=request.param) as llm:
        llm.check_every_step = True
        yield llm


@pytest.mark.parametrize("hook", IN_A_STEP)
def test_a_hook_that_fails_is_heard_of_and_changes_no_text(llm, expected, hook):
    """In its first call, and in a later one. Steps by hand go on to the same texts, with as many
    logprobs as tokens; each output is handed over, and the books are in order after each step."""
    for nth in (1, 3):
        llm.reset_prefix_cache()
        calls = iter(range(1, 10 ** 6))

        def fail(*args):
            if next(calls) == nth:  # noqa: B023 - it is called within this loop
                raise KeyError(hook)
            return getattr(Extra, hook)(None, *args)

        failing, running = hand_over(llm, **{hook: fail}), set()
        behind = hand_over(llm, launching=running.add, dropped=running.discard,
                           updated=lambda step, accepted: running.discard(step))  # noqa: B023
        for name, prompt in PROMPTS.items():
            llm.add_request(name, prompt, greedy(12, logprobs=1))
        outs, errors = drain_through(llm, KeyError, llm.scheduler.check)
        take_away(llm, failing)
        take_away(llm, behind)
        assert not running, "the extra behind it has heard of each step's end"
        assert {name: out.outputs[0].token_ids for name, out in outs.items()} == {
            name: expected(prompt, 12) for name, prompt in PROMPTS.items()}
        assert errors == (next(calls) > nth), "raised where it was called so often"


def test_an_observer_that_fails_whenever_requests_end_keeps_none_of_them(llm):
    def fail(sequences):
        if sequences:
            raise KeyError("ended")

    failing = hand_over(llm, ended=fail)
    with pytest.raises(KeyError):
        llm.generate(list(PROMPTS.values()), greedy(4), use_tqdm=False)
    assert not llm.requests
    take_away(llm, failing)
    drain(llm)


class Drafter(Extra):
    """Guesses all that is asked for: every third token wrong. Fails in its `fails_in`th call."""

    most_drafts, fails_in, calls = 3, 0, 0

    def draft(self, seq, most):
        self.calls += 1
        if self.calls == self.fails_in:
            raise KeyError("draft")
        done = len(seq.output_token_ids)
        rest = self.texts[tuple(seq.token_ids[:seq.num_prompt_tokens])][done:]  # more than `most`
        return [token + ((done + i) % 3 == 2) for i, token in enumerate(rest)]


@needs_extras
def test_a_drafter_of_ones_own_is_asked_and_changes_no_text(qwen3, expected, capsys):
    """With overlap it was never asked: no row's last token is known when a step is planned. With
    all rows taken each has its drafts: buffers are made for them."""
    drafter = Drafter()
    drafter.texts = {tuple(prompt): expected(prompt, 12) for prompt in PROMPTS.values()}
    with make(qwen3, num_gpu_blocks_override=20, async_scheduling=True, extras=[drafter]) as llm:
        assert "overlap is off: drafts follow" in capsys.readouterr().err and llm.depth == 0
        steps = watch_steps(llm)
        for fails_in in (0, 1, 5):
            drafter.calls, drafter.fails_in = 0, fails_in
            for name, prompt in PROMPTS.items():
                llm.add_request(name, prompt, greedy(12, logprobs=1))
            outs, errors = drain_through(llm, KeyError, llm.scheduler.check)
            assert {name: out.outputs[0].token_ids for name, out in outs.items()} == {
                name: drafter.texts[tuple(prompt)] for name, prompt in PROMPTS.items()}
            assert errors == bool(fails_in)
        assert max(len(step.samples()) for step in steps) == 4 * (1 + 3)  # rows, with their drafts


@needs_extras
def test_guesses_of_ones_own_are_counted_as_any_others(qwen3, expected):
    """By an oracle that knows the texts: every third guess is wrong. Of two prompts at once each
    has its own numbers, too."""
    drafter, told = Drafter(), []
    prompts = [PROMPTS["b"], PROMPTS["d"]]
    drafter.texts = {tuple(prompt): expected(prompt, 12) for prompt in prompts}
    with make(qwen3, extras=[drafter]) as llm:
        hand_over(llm, updated=lambda step, accepted: told.extend(
            (accepted[seq], drafts) for seq, drafts in step.drafts.items()))
        outs = llm.generate(prompts, greedy(12), use_tqdm=False)
        numbers = {one.name: getattr(one, "value", None) or getattr(one, "values", None)
                   for one in llm.get_metrics() if "spec_decode" in one.name}
    right = [len(os.path.commonprefix(pair)) for pair in told]
    assert numbers == {
        "vllm:spec_decode_num_drafts": len(told),
        "vllm:spec_decode_num_draft_tokens": sum(len(drafts) for _, drafts in told),
        "vllm:spec_decode_num_accepted_tokens": sum(right),
        "vllm:spec_decode_num_accepted_tokens_per_pos": [
            sum(count > place for count in right) for place in range(3)]}
    assert 0 < sum(right) == sum(out.metrics.num_accepted_tokens for out in outs)


@pytest.mark.parametrize("most", [0, -1, None, 2.5])
def test_a_drafter_says_for_how_many_tokens_there_must_be_buffers(qwen3, most):
    """Without buffers overlap stays on, and with it nobody is asked."""
    extra = Drafter()
    extra.most_drafts = most
    with pytest.raises(ValueError, match=f"Drafter drafts, and its most_drafts is {most}: set it"):
        make(qwen3, async_scheduling=True, extras=[extra])


class Wrong(Extra):
    most_drafts = 4

    def draft(self, seq, most):
        return self.answers.get(seq.request.request_id, [])


@needs_extras
def test_a_wrong_draft_ends_its_request_alone(qwen3, expected):
    """In words that name the drafter. `None` was a TypeError without its name, and an id beyond the
    vocabulary an error of the embedding: both ended all requests."""
    extra = Wrong()
    extra.answers = {str(wrong): wrong for wrong in (
        None, 7, (1, 2), [260], [3, 10 ** 12], [-2], ["7"], [1.0])}
    names = ["right", *extra.answers, "later"]
    with make(qwen3, num_gpu_blocks_override=20, extras=[extra]) as llm:
        for name in names:
            llm.add_request(name, SHARED, greedy(6))
        outs, _ = drain_through(llm, (), llm.scheduler.check)
    for name, end in ((name, outs[name].outputs[0]) for name in names):
        if name in extra.answers:
            assert end.finish_reason == "abort" and end.token_ids == expected(SHARED, 1)
            assert f"Wrong must return a list of token ids below 260 as drafts, got {name}" in (
                end.stop_reason)
        else:
            assert end.token_ids == expected(SHARED, 6)


def test_one_object_is_handed_over_once(qwen3):
    with pytest.raises(ValueError, match="Extra is there already: leave the second time out"):
        make(qwen3, extras=[watcher := Extra(), watcher])
    for wrong in (Extra, None):
        with pytest.raises(ValueError, match="objects that inherit from Extra, got"):
            make(qwen3, extras=[wrong])
