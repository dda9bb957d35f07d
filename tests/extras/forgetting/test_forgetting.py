"""Caches that forget: exact in a crowd with preemptions, chunks and prefix hits, with the audit
after each step, and with KV that is not the sequence's own replaced by NaN.

The oracle is transformers' network. It gets the whole text, and a dense mask made by the papers'
rules: of positions alone for sinks; for votes, of the weights that its own attention returns.
"""

from itertools import count
from random import Random

import pytest
import torch
from helpers import hand_over, poisoned, watch_steps
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve_extras.forgetting.forgetting import AttentionSinks, Forgetting
from nanoserve_extras.forgetting.snapkv import SnapKV

SIZE, COUNT = 4, 24  # tokens in a block; tokens of an answer
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


def sinks(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """AttentionSinks(sinks=3, window=16, every=8): 3 sinks take a whole block."""
    return (key <= query) & ((key < SIZE) | (key >= query - query % 8 - 16))


class EveryOther(Forgetting):
    """CONTRIBUTING's recipe."""

    def boundary(self, seq, position):
        return position - position % 8 + 8

    def first_drop(self, seq):
        return 24  # block 1 lies wholly before the last 16 tokens

    def choose(self, seq, position):
        return range(1, (position - 16) // self.block_size, 2)


def every_other(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & ((key // SIZE % 2 == 0) | (key >= query - query % 8 - 16))


class Counted(SnapKV):
    """It keeps the votes that it has counted, by prompt."""

    def choose(self, seq, position):
        self.counted.append((seq.token_ids[:position], self.votes[seq].clone()))
        return super().choose(seq, position)


def votes_on(model, prompt: list[int]) -> torch.Tensor:
    """What the last 10 tokens give to each token, in all layers and heads."""
    with torch.no_grad():
        layers = model(torch.tensor([prompt]), output_attentions=True).attentions
    return sum(layer[0, :, -10:].double().sum((0, 1)) for layer in layers)


def voted(model, prompt: list[int]) -> torch.Tensor:
    """SnapKV(keep=8, observed=10): which tokens of the prompt are kept."""
    first = max(0, len(prompt) - 10)
    blocks = votes_on(model, prompt)[:first // SIZE * SIZE].view(-1, SIZE).sum(1)
    kept = torch.ones(len(prompt), dtype=torch.bool)
    for block in blocks.argsort(descending=True)[2:].tolist():
        kept[block * SIZE:(block + 1) * SIZE] = False
    return kept


def expected_texts(folder, prompts, rule) -> list[list[int]]:
    """Greedy; where two logits are almost equal the text ends, as either may come."""
    model, texts = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"), []
    for prompt in prompts:
        ids, kept = list(prompt), voted(model, prompt)
        for _ in range(COUNT):
            query, key = torch.arange(len(ids))[:, None], torch.arange(len(ids))
            mask = rule(query, key) if rule is not voted else (key <= query) & (
                (query < len(prompt)) | (key >= len(prompt)) | kept[key.clamp(max=len(prompt) - 1)])
            with torch.no_grad():
                mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
                logits = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            if first - second < 1e-3:
                break
            ids.append(int(logits.argmax()))
        texts.append(ids[len(prompt):])
    return texts


def prompts() -> list[list[int]]:
    rng = Random(5)
    shared = [rng.randrange(256) for _ in range(40)]
    return [shared[:rng.randrange(4, 24)] + [rng.randrange(256) for _ in range(
        rng.randrange(1, 24))] for _ in range(9)]


def start(folder, extra, **options) -> LLM:
    return poisoned(LLM(folder, dtype="float32", device="cpu", block_size=SIZE, max_num_seqs=6,
                        extras=[extra], **dict(num_gpu_blocks_override=24, kernels="torch",
                                               max_num_batched_tokens=24) | options))


def texts_of(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids
            for output in llm.generate(asked, GREEDY, use_tqdm=False)]


KINDS = {  # the rule of the oracle, the extra, and in which ways the engine runs
    "sinks": (sinks, lambda: AttentionSinks(sinks=3, window=16, every=8),
              [{}, dict(async_scheduling=True, kernels="auto")]),
    "every other block": (every_other, EveryOther, [{}]),
    "votes": (voted, lambda: SnapKV(keep=8, observed=10), [{}, dict(async_scheduling=True)])}


@pytest.mark.parametrize("name", KINDS)
def test_a_crowd_that_forgets_and_is_preempted_writes_what_the_mask_says(checkpoints, name):
    rule, make, ways = KINDS[name]
    asked = prompts()
    expected = expected_texts(checkpoints["tiny"], asked, rule)
    assert sum(map(len, expected)) > 150
    for options in ways:
        with start(checkpoints["tiny"], make(), **options) as llm:
            assert llm.check_every_step
            steps, dropped = watch_steps(llm), set()
            hand_over(llm, updated=lambda step, accepted: dropped.update(  # noqa: B023
                seq for seq in accepted if seq.dropped_blocks))
            for got, text in zip(texts_of(llm, asked), expected, strict=True):
                assert got[:len(text)] == text, options
            assert sum(len(step.preempted) for step in steps) >= 3
            assert len(dropped) > 4 and not llm.extras[-2].chosen


@pytest.mark.parametrize("name", ["sinks", "votes"])
def test_lost_steps_forget_nothing_twice_and_count_no_vote_twice(checkpoints, name):
    """Every seventh step fails in its last layer. Those who vote are in several chunks."""
    rule, asked = KINDS[name][0], prompts()[:5]
    expected = expected_texts(checkpoints["tiny"], asked, rule)
    extra = KINDS["sinks"][1]() if name == "sinks" else Counted(keep=8, observed=10)
    launches, extra.counted, num_lost, done = count(1), [], 0, {}

    def fail(layer, args):
        if next(launches) % 7 == 0:
            raise OSError("lost")

    with start(checkpoints["tiny"], extra, max_num_batched_tokens=7) as llm:
        llm.runner.model.layers[-1].mlp.register_forward_pre_hook(fail)
        for i, prompt in enumerate(asked):
            llm.add_request(str(i), prompt, GREEDY)
        while llm.has_unfinished_requests():
            try:
                done |= {output.request_id: output for output in llm.step()}
            except OSError:
                num_lost += 1
    for i, text in enumerate(expected):
        assert done[str(i)].outputs[0].token_ids[:len(text)] == text
    model = AutoModelForCausalLM.from_pretrained(
        checkpoints["tiny"], dtype=torch.float32, attn_implementation="eager")
    for prompt, votes in extra.counted:
        torch.testing.assert_close(votes, votes_on(model, prompt), atol=1e-4, rtol=1e-4)
    assert num_lost > 5 and len(extra.counted) == (name == "votes") * len(asked)


@pytest.mark.parametrize("name", ["sinks", "votes"])
def test_what_others_computed_in_full_is_not_found_behind_the_first_drop(checkpoints, name):
    """As in a chat: the next turn's prompt has the last answer in it. It is computed, with all keys
    in sight, while the answer itself is written once more, and preempted."""
    rule, make, _ = KINDS[name]
    with start(checkpoints["tiny"], make(), num_gpu_blocks_override=60) as llm:
        prompt = prompts()[0]
        [answer] = texts_of(llm, [prompt])
        llm.add_request("turn 2", [*prompt, *answer, 7], SamplingParams(max_tokens=1))
        llm.add_request("again", prompt, GREEDY)
        [again] = llm.requests["again"].sequences
        while llm.has_unfinished_requests():
            llm.step()
            if len(again.token_ids) == len(prompt) + 15 and not again.num_preemptions:
                llm.scheduler.preempt(again)
    assert again.num_preemptions == 1 and again.output_token_ids == answer


@pytest.mark.parametrize("options, says", [
    (dict(extras=[AttentionSinks(window=18)], block_size=4), "window=18 must be a multiple of"),
    (dict(extras=[AttentionSinks()], speculative_config=dict(
        method="ngram", num_speculative_tokens=2)), "AttentionSinks: it needs that no key of a"),
    (dict(extras=[AttentionSinks()], kv_offload_bytes=2 ** 20),
     "kv_offload_bytes=1048576 does not go together with AttentionSinks"),
    (dict(extras=[AttentionSinks(), SnapKV()], kernels="torch"), "SnapKV does not go together"),
    (dict(extras=[SnapKV()]), "kernels='torch'")])
def test_what_it_does_not_go_with_is_refused(checkpoints, options, says):
    with pytest.raises(ValueError, match=says):
        LLM(checkpoints["tiny"], device="cpu", **options)


def test_a_window_of_the_model_and_forced_tokens_are_refused(checkpoints):
    with pytest.raises(ValueError, match="sliding windows: choose another model"):
        LLM(checkpoints["mistral"], device="cpu", extras=[AttentionSinks()])
    with LLM(checkpoints["tiny"], device="cpu", extras=[AttentionSinks()]) as llm:
        with pytest.raises(ValueError, match="force tokens.*AttentionSinks"):
            llm.generate([1, 2], SamplingParams(structured_outputs=dict(regex="a+")))
        with pytest.raises(ValueError, match="can't be added to an engine that runs"):
            llm.add(AttentionSinks())
