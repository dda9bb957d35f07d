"""Logprobs: what the model thought of the tokens, whatever way they were computed.

The oracle is transformers' log_softmax over one forward pass of prompt and output, in fp32, and
sorting it: the engine's numbers must agree to 1e-4 in every mode, and there must be one entry for
each token, neither lost nor told twice.
"""

import random

import pytest
import torch
from checkpoints import EOS, Reference, byte_tokenizer
from helpers import watch_steps
from small_engine import assert_idle, drain, drain_through
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nanoserve import LLM, Logprob, RequestOutputKind, SamplingParams, sampler
from nanoserve.request import LogprobMaker
from nanoserve.sampler import score

TOLERANCE = 1e-4
MAX_TOKENS = 10
TOKENIZER = byte_tokenizer()


def prompt(i: int, length: int) -> list[int]:
    return random.Random(i).choices(range(256), k=length)


SHARED = prompt(99, 36)
PROMPTS = [SHARED, SHARED + prompt(1, 9), SHARED, prompt(2, 1), prompt(3, 2), prompt(4, 33),
           prompt(5, 17), prompt(6, 16)]


def params_of(i: int, **fields) -> SamplingParams:
    """Requests of all kinds side by side: greedy and drawn, each with other numbers of logprobs."""
    kinds = [dict(temperature=0, logprobs=3, prompt_logprobs=2),
             dict(seed=1, logprobs=0, prompt_logprobs=0),
             dict(seed=2, n=2, logprobs=1, prompt_logprobs=5),
             dict(temperature=0, prompt_logprobs=1), dict(temperature=0, logprobs=2),
             dict(seed=3, temperature=1.7, top_k=20, logprobs=4, prompt_logprobs=3),
             dict(temperature=0), dict(seed=4, n=3, logprobs=2, repetition_penalty=1.3)]
    return SamplingParams(**dict(max_tokens=MAX_TOKENS, ignore_eos=True) | kinds[i] | fields)


@pytest.fixture(scope="module")
def log_softmax(qwen3):
    """(tokens,) -> (tokens, vocab_size): row i is about token i + 1."""
    model = Reference(qwen3).model

    @torch.no_grad()
    def compute(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return compute


def assert_entry(entry: dict[int, Logprob], token_id: int, num_top: int, row: torch.Tensor,
                 where: str) -> None:
    """The token first, then the `num_top` likeliest by rank; values, ranks and texts."""
    ids = list(entry)
    assert ids[0] == token_id and len(ids) in (num_top, num_top + 1), where
    assert len(ids) == num_top + 1 or num_top > 0, where
    row = row.double()
    for other, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(row[other]), abs=TOLERANCE), where
        # Tokens nearer than the tolerance may stand in either order.
        best = 1 + int((row > row[other] + TOLERANCE).sum())
        worst = 1 + int((row > row[other] - TOLERANCE).sum())
        assert best <= logprob.rank <= worst, where
        assert logprob.decoded_token == TOKENIZER.decode([other]), where
    likeliest = sorted((float(entry[other].logprob) for other in ids), reverse=True)[:num_top]
    assert likeliest == pytest.approx(row.topk(num_top).values.tolist(), abs=TOLERANCE), where
    top = ids[1:] if len(ids) == num_top + 1 else [*ids[1:], token_id]
    assert {entry[other].rank for other in top} <= set(range(1, num_top + 1)), where
    ranks = [entry[other].rank for other in ids[1:]]
    assert ranks == sorted(ranks), where


def check(out, params: SamplingParams, log_softmax, where: str = "") -> None:
    """Everything a request's last, cumulative output says."""
    ids, k = out.prompt_token_ids, params.prompt_logprobs
    if k is None:
        assert out.prompt_logprobs is None
    else:
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(ids)
        rows = log_softmax(ids)
        for i in range(1, len(ids)):
            assert_entry(out.prompt_logprobs[i], ids[i], k, rows[i - 1], f"{where} prompt {i}")
    for sample in out.outputs:
        if params.logprobs is None:
            assert sample.logprobs is None and sample.cumulative_logprob is None
            continue
        assert len(sample.logprobs) == len(sample.token_ids)
        rows = log_softmax(ids + sample.token_ids)[len(ids) - 1:]
        total = 0.0
        for i, token_id in enumerate(sample.token_ids):
            assert_entry(sample.logprobs[i], token_id, params.logprobs, rows[i], f"{where} {i}")
            total += sample.logprobs[i][token_id].logprob
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-9)


MODES = {
    "plain": dict(),
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=7),
    "overlap": dict(async_scheduling=True),
    "no prefix cache": dict(enable_prefix_caching=False),
    "a tiny cache, chunks, overlap": dict(
        num_gpu_blocks_override=20, block_size=4, max_num_batched_tokens=9, max_num_seqs=8,
        async_scheduling=True),
}


def start(folder, **options) -> tuple[LLM, list]:
    llm = LLM(folder, dtype="float32", device="cpu", **dict(num_gpu_blocks_override=64) | options)
    steps = watch_steps(llm)
    return llm, steps


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_equal_transformers(qwen3, log_softmax, mode, monkeypatch):
    """All requests at once, and once more when their prompts are in the prefix cache, whose
    positions have no logits: prompt logprobs over a hit were silently wrong (BUGS.md 36)."""
    if mode == "plain":
        monkeypatch.setattr(sampler, "SCORED_ROWS", 3)  # of rows, too: in several portions
    llm, steps = start(qwen3, **MODES[mode])
    params = [params_of(i) for i in range(len(PROMPTS))]
    for turn in ("first", "again"):
        outs = llm.generate(PROMPTS, params, use_tqdm=False)
        for i, (out, asked) in enumerate(zip(outs, params, strict=True)):
            check(out, asked, log_softmax, f"{mode}, {turn}, request {i}")
    assert any(step.preempted for step in steps) == ("tiny cache" in mode)
    assert_idle(llm)


def test_prompt_logprobs_write_to_the_prefix_cache_but_do_not_read(qwen3, log_softmax):
    """36 tokens in blocks of 16. Whoever wants them computes all 36; whoever doesn't hits 32."""
    llm, _ = start(qwen3)
    asks, plain = params_of(0), params_of(6)
    for params, hit in ((asks, 0), (plain, 32), (asks, 0), (plain, 32)):
        [out] = llm.generate([SHARED], params, use_tqdm=False)
        assert out.num_cached_tokens == hit
        check(out, params, log_softmax)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_in_the_middle_of_the_prompt(qwen3, log_softmax, async_scheduling):
    """Ten blocks of 4. A prompt of 36 is admitted to nine of them, and while its chunks are scored
    an older request grows into its last ones. Later all of its positions are computed again: none
    is told twice and none is lost."""
    llm, steps = start(qwen3, num_gpu_blocks_override=10, block_size=4, max_num_batched_tokens=8,
                       max_num_seqs=4, async_scheduling=async_scheduling)
    llm.add_request("old", prompt(7, 3), SamplingParams(temperature=0, max_tokens=20,
                                                        ignore_eos=True))
    llm.add_request("new", SHARED, params_of(0, max_tokens=4))
    known, outs = {}, {}
    while llm.has_unfinished_requests():
        if "new" in llm.requests:
            known[len(steps)] = len(llm.requests["new"].prompt_logprobs)
        outs |= {out.request_id: out for out in llm.step()}
    check(outs["new"], params_of(0, max_tokens=4), log_softmax)
    [preempted] = [step for step in steps if step.preempted]
    assert [seq.name for seq in preempted.preempted] == ["new"]
    assert 9 < known[preempted.index + 1] < len(SHARED), "it was not in the middle"
    positions = [i for step in steps for span in step.prompt_logprob_positions.values()
                 for i in span]
    assert len(positions) > len(set(positions)) == len(SHARED) - 1


@pytest.mark.parametrize("mode", ["chunks", "a tiny cache, chunks, overlap"])
def test_deltas_put_together_are_the_whole(qwen3, log_softmax, mode):
    """DELTA carries each entry once, the prompt's with the first output; the sum is over all."""
    llm, _ = start(qwen3, **MODES[mode])
    params = [params_of(i, output_kind=RequestOutputKind.DELTA) for i in range(len(PROMPTS))]
    whole = llm.generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))], use_tqdm=False)
    for i, one in enumerate(params):
        llm.add_request(str(i), PROMPTS[i], one)
    pieces = drain(llm)
    for i, expected in enumerate(whole):
        prompts = [out.prompt_logprobs for out in pieces[str(i)]]
        if expected.prompt_logprobs is None:
            assert prompts == [None] * len(prompts)
        else:
            assert same(prompts[0], expected.prompt_logprobs) and not any(prompts[1:])
        for j, sample in enumerate(expected.outputs):
            parts = [out.outputs[j] for out in pieces[str(i)]]
            assert [t for part in parts for t in part.token_ids] == sample.token_ids
            if sample.logprobs is None:
                assert {part.logprobs for part in parts} == {None}
                continue
            assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
            assert same([entry for part in parts for entry in part.logprobs], sample.logprobs)
            assert parts[-1].cumulative_logprob == pytest.approx(sample.cumulative_logprob,
                                                                 abs=10 * TOLERANCE)


def same(ours: list, theirs: list) -> bool:
    """The same tokens, with logprobs as near as two batches of other shapes compute them."""
    return len(ours) == len(theirs) and all(
        one is other is None or list(one)[0] == list(other)[0] and all(
            one[t].logprob == pytest.approx(other[t].logprob, abs=TOLERANCE)
            for t in set(one) & set(other))
        for one, other in zip(ours, theirs, strict=True))


def test_every_cumulative_output_has_an_entry_for_each_token(qwen3, log_softmax):
    llm, _ = start(qwen3)
    for out in llm.stream([SHARED], params_of(0)):
        check(out, params_of(0), log_softmax)


def test_logprobs_are_the_models_own(qwen3, log_softmax):
    """Before biases, bans, penalties and temperature: even of a token that had no choice."""
    llm, _ = start(qwen3)
    for kinds in (dict(logit_bias={65: 100}), dict(allowed_token_ids=[7, 8], temperature=0.2),
                  dict(repetition_penalty=2.0, frequency_penalty=1.0), dict(top_k=1, seed=1),
                  dict(bad_words=["a"], min_tokens=5, temperature=0)):
        params = params_of(0, **dict(temperature=1.0, seed=1) | kinds)
        [out] = llm.generate([prompt(8, 12)], params, use_tqdm=False)
        check(out, params, log_softmax, str(kinds))


def test_the_token_that_ends_it_has_an_entry(qwen3, log_softmax):
    """EOS, a stop token, a stop string in the middle of the text: one entry for each token id."""
    llm, _ = start(qwen3)
    [free] = llm.generate([SHARED], params_of(0), use_tqdm=False)
    third = free.outputs[0].token_ids[2]
    text = free.outputs[0].text
    for kinds in (dict(stop_token_ids=[third]), dict(logit_bias={EOS: 100}, ignore_eos=False),
                  dict(stop=[text[3:5]]), dict(stop=[text[3:5]], include_stop_str_in_output=True)):
        params = params_of(0, **kinds)
        [out] = llm.generate([SHARED], params, use_tqdm=False)
        assert out.outputs[0].finish_reason == "stop"
        check(out, params, log_softmax, str(kinds))


# ------------------------------------------------------------- interruptions


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["in launch", "when it is read"])
def test_a_lost_step_loses_and_repeats_nothing(qwen3, log_softmax, monkeypatch, late,
                                               async_scheduling):
    """An error drops all steps in flight; what they had scored is scored again, once."""
    llm, _ = start(qwen3, max_num_batched_tokens=16, max_num_seqs=4,
                   async_scheduling=async_scheduling)
    launch = llm.runner.launch
    for fail_at in (0, 2, 6):
        llm.reset_prefix_cache()
        llm.add_request("a", SHARED, params_of(0))
        llm.add_request("b", PROMPTS[1], params_of(5))
        moments = iter(range(100))

        def failing(step, moments=moments, fail_at=fail_at):
            output = launch(step)
            if next(moments) == fail_at:
                if not late:
                    raise RuntimeError("the device is on fire")
                output.tolist = lambda: 1 / 0
            return output

        monkeypatch.setattr(llm.runner, "launch", failing)
        outs, failures = drain_through(llm, (RuntimeError, ZeroDivisionError))
        assert failures == 1, fail_at
        check(outs["a"], params_of(0), log_softmax, f"step {fail_at} is lost")
        check(outs["b"], params_of(5), log_softmax, f"step {fail_at} is lost")


@pytest.mark.parametrize("kinds", [dict(skip_tokenizer_init=True), dict()], ids=str)
def test_without_text_there_is_no_decoded_token(qwen3, kinds):
    llm, _ = start(qwen3, **kinds)
    [out] = llm.generate([SHARED], params_of(0, detokenize=False), use_tqdm=False)
    entries = [*out.outputs[0].logprobs, *out.prompt_logprobs[1:]]
    assert all(logprob.decoded_token is None for entry in entries for logprob in entry.values())


def test_a_tokens_text_keeps_the_space_in_front_of_a_full_stop():
    """Some tokenizers "clean up" such spaces, and all texts together would not be the output."""
    words = Tokenizer(WordLevel({"so": 0, " .": 1}, unk_token="so"))
    maker = LogprobMaker(PreTrainedTokenizerFast(
        tokenizer_object=words, clean_up_tokenization_spaces=True))
    assert maker.make([(1, -0.5, 1)], 0)[1].decoded_token == " ."


# ------------------------------------------------------------------- numbers


def test_ranks_by_sorting():
    """Ties share the better rank: 1 + the number of tokens that are strictly likelier."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (40, 19), generator=generator).float()  # ties everywhere
    tokens = torch.randint(19, (40,), generator=generator)
    for k in (0, 1, 7, 19):
        for row, token, entries in zip(logits.tolist(), tokens.tolist(),
                                       score(logits, tokens, k).tolist(), strict=True):
            assert len(entries) == k + 1 and entries[0][0] == token
            falling = sorted(row, reverse=True)
            for token_id, value, rank in entries:
                assert rank == falling.index(row[token_id]) + 1
                total = torch.tensor(row).double().logsumexp(0)
                assert value == pytest.approx(row[token_id] - float(total), abs=1e-6)
            assert [row[token_id] for token_id, _, _ in entries[1:]] == falling[:k]


def test_a_long_prompt_never_makes_a_large_matrix(qwen3, log_softmax, monkeypatch):
    """700 positions of a large vocabulary would be more than the model itself: 64 at a time."""
    monkeypatch.setattr(sampler, "SCORED_ROWS", 8)
    llm, _ = start(qwen3)
    sizes, compute = [], llm.runner.model.compute_logits
    monkeypatch.setattr(llm.runner.model, "compute_logits",
                        lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    params = params_of(0, max_tokens=1)
    [out] = llm.generate([SHARED], params, use_tqdm=False)
    check(out, params, log_softmax)
    assert sorted(sizes) == [1, 3, 8, 8, 8, 8]
