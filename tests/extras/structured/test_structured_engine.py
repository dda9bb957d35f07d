"""Structured output in the engine: in every mode the text that a naive loop writes.

The oracle is `Naive`: transformers' logits of the whole text before each token, and of the tokens
that `regex` allows the likeliest. It knows of no masks, drafts, batches or blocks.
"""

import signal
from collections import Counter

import pytest
import torch
from checkpoints import EOS
from grammars import (
    END_OF_TURN,
    ENDS,
    TOKENIZER,
    Naive,
    padded_checkpoint,
    params_of,
    requests,
    start,
)
from helpers import watch_steps

from nanoserve import SamplingParams
from nanoserve_extras.structured.structured import Grammar, StructuredOutput

MAX_TOKENS = 24
REQUESTS = requests()
LENGTHS = [MAX_TOKENS, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS, 10, 40, 12, MAX_TOKENS]
SMALL_CACHE = dict(num_gpu_blocks_override=9, block_size=8, max_model_len=72,
                  max_num_batched_tokens=40)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)

SMALL = dict(method="draft_model", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return padded_checkpoint(tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def naive(folder):
    return Naive(folder)


@pytest.fixture(scope="module")
def expected(naive) -> list[tuple[list[int], str]]:
    return [naive.text(prompt, pattern, length)
            for (prompt, pattern), length in zip(REQUESTS, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def llm(folder):
    return start(folder)


def ask(llm, **fields) -> list[tuple[list[int], str]]:
    """All requests at once, and between them some without a grammar."""
    prompts = [prompt for prompt, _ in REQUESTS]
    params = [params_of(pattern, length, **fields)
              for (_, pattern), length in zip(REQUESTS, LENGTHS, strict=True)]
    plain = SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.2)
    outputs = llm.generate(prompts + prompts[:3], params + [plain] * 3, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason)
            for output in outputs[:len(prompts)]]


def text_of(llm, params, prompt=(5, 6, 7)) -> str:
    return llm.generate(list(prompt), params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("options", [
    dict(), dict(async_scheduling=True), dict(max_num_seqs=2), dict(max_num_batched_tokens=7,
                                                                  max_num_seqs=7),
    SMALL_CACHE, SMALL_CACHE | dict(async_scheduling=True),
    dict(kernels="torch"), dict(speculative_config=NGRAM), dict(speculative_config=SMALL),
    dict(speculative_config=NGRAM, **SMALL_CACHE), dict(speculative_config=SMALL, **SMALL_CACHE)],
    ids=str)
def test_every_mode_writes_the_naive_text(folder, expected, options):
    """A small network and forced tokens propose in the same steps, each for other rows."""
    if options.get("speculative_config") == SMALL:
        options = options | dict(speculative_config=SMALL | dict(model=str(folder)))
    with start(folder, **options) as llm:
        steps = watch_steps(llm)
        assert ask(llm) == expected
        if "speculative_config" in options:
            right = {True: 0, False: 0}  # forced ones, and guesses
            for step in steps:
                for seq in step.drafts.keys() & step.accepted.keys():
                    right[seq in step.forced] += step.num_right(seq)
            assert right[True] > 10 and right[False] > 5
            assert sum(llm.metrics.num_accepted) == right[False], "only guesses are counted"
        if options.get("num_gpu_blocks_override"):
            assert llm.metrics.num_preemptions
        assert not llm.extra(StructuredOutput).constraints, "who has ended is forgotten"


def test_the_small_network_has_read_what_was_forced(folder):
    """The draft model is the model, so in every position both must have the same keys, those of
    forced tokens included. (Its last guess, if that was right, it reads in the next step.)"""
    asked = SMALL | dict(model=str(folder))
    with start(folder, speculative_config=asked, kernels="torch", block_size=64) as llm:
        num_layers, num_compared = len(llm.runner.model.layers), 0
        for cache in llm.runner.kv_cache[num_layers:]:
            for tensor in cache:
                tensor.fill_(torch.nan)
        llm.add_request("r", [5, 6, 7], params_of("[ab]{3}cdefgh[a-z]{3}0123[a-z]{9}", 40))
        while llm.has_unfinished_requests():
            llm.step()
            for seq in llm.scheduler.running:
                num_read = seq.num_computed_tokens - 1
                for (ours, _), (small, _) in zip(llm.runner.kv_cache[:num_layers],
                                                 llm.runner.kv_cache[num_layers:], strict=True):
                    block = seq.block_table[0]
                    torch.testing.assert_close(small[block, :num_read], ours[block, :num_read])
                num_compared += num_read
        assert num_compared > 50


def test_two_ranks(folder, expected, ranks_in_threads):
    with start(folder, tensor_parallel_size=2, async_scheduling=True) as llm:
        assert ask(llm) == expected


def test_samples_are_those_of_one_request_alone(folder, llm):
    """n samples of one grammar each have a parser of their own; seeds decide, not the batch."""
    params = params_of("[a-e]{4}(x|yz)", 12, temperature=1, n=5, seed=3)
    alone = llm.generate([5, 6, 7], params, use_tqdm=False)[0]
    with start(folder, async_scheduling=True, **SMALL_CACHE) as other:
        together = other.generate([[5, 6, 7], [9] * 30, [8] * 30], [
            params, params_of("[ab]{20}", 30), params], use_tqdm=False)[0]
    assert [one.token_ids for one in together.outputs] == [one.token_ids for one in alone.outputs]
    assert len({one.text for one in alone.outputs}) > 1


# ------------------------------------------------------------------ forced tokens


def test_forced_tokens_take_free_rows_alone(folder, llm):
    """A step has buffers for max_num_seqs samples. Alone in an engine of 4, 3 tokens are guessed at
    a time; alone in an engine of 1, none."""
    for num_rows, num_steps in ((4, 1 + 4 + 1), (2, 1 + 8), (1, 17)):
        with start(folder, max_num_seqs=num_rows, max_num_batched_tokens=64) as other:
            sizes, launch = [], other.runner.launch
            other.runner.launch = lambda step, go=launch, to=sizes: (
                to.append(len(step.samples())) or go(step))
            assert text_of(other, params_of("abcdefghijklmnop", 30)) == "abcdefghijklmnop"
            assert max(sizes) <= num_rows and abs(len(sizes) - num_steps) <= 1, (num_rows, sizes)


def test_a_full_house_with_little_budget(folder):
    """Every step is full of samples and of tokens: buffers are filled to the last place."""
    with start(folder, max_num_seqs=6, max_num_batched_tokens=6, async_scheduling=True) as llm:
        params = [params_of(pattern, 20) for pattern in ["abcdefghijklmnop", "[xy]{3}abcdefgh"] * 6]
        outputs = llm.generate([[5, 6, i] for i in range(12)], params, use_tqdm=False)
    assert [output.outputs[0].text[-4:] for output in outputs] == ["mnop", "efgh"] * 6


# ----------------------------------------------------------------- interruptions


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["_mask_here", "_read"])
@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_while_a_parser_reads(folder, expected, monkeypatch, overlap, where, after):
    """It comes at the 30th call, before its work or behind it. The step is dropped; the requests
    that were added by hand go on, and their parsers read the tokens anew."""
    with start(folder, async_scheduling=overlap) as llm:
        for i, ((prompt, pattern), length) in enumerate(zip(REQUESTS, LENGTHS, strict=True)):
            llm.add_request(str(i), prompt, params_of(pattern, length))
        method, calls = getattr(Grammar, where), Counter()

        def disturbed(self, *args):
            calls["all"] += 1
            if calls["all"] == 30 and not after:
                signal.raise_signal(signal.SIGINT)
            result = method(self, *args)
            if calls["all"] == 30 and after:
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(Grammar, where, disturbed)
        results, num_interrupts = {}, 0
        while llm.has_unfinished_requests():
            try:
                results |= {out.request_id: out for out in llm.step()}
            except KeyboardInterrupt:
                num_interrupts += 1
        assert num_interrupts == 1
    assert [(results[str(i)].outputs[0].token_ids, results[str(i)].outputs[0].finish_reason)
            for i in range(len(REQUESTS))] == expected


# ------------------------------------------------------ beside other parameters


def test_either_eos_may_end_a_text(llm):
    for first, other in ((EOS, END_OF_TURN), (END_OF_TURN, EOS)):
        out = llm.generate([5, 6, 7], params_of(
            "ab", 9, logit_bias={first: 100, other: -100}), use_tqdm=False)[0].outputs[0]
        assert (out.text, out.token_ids[-1], out.stop_reason) == ("ab", first, None)


@pytest.mark.parametrize("fields, text, reason", [
    (dict(max_tokens=3), "abc", "length"),
    (dict(stop=["cd"]), "ab", "stop"),
    (dict(stop=["cd"], include_stop_str_in_output=True), "abcd", "stop"),
    (dict(stop_token_ids=[TOKENIZER.encode("e")[0]]), "abcd", "stop"),
    (dict(min_tokens=12), "abcdefgh", "stop"),  # there is nothing but EOS: the grammar decides
    (dict(bad_words=["d"]), "abcdefgh", "stop"),
    (dict(allowed_token_ids=[1, 2, 3]), "abcdefgh", "stop"),
    (dict(logit_bias={TOKENIZER.encode("a")[0]: -100}), "abcdefgh", "stop"),
    (dict(repetition_penalty=2.0, frequency_penalty=1.0, logprobs=2), "abcdefgh", "stop")])
def test_one_possible_text_beside_other_parameters(llm, fields, text, reason):
    out = llm.generate([5, 6, 7], params_of("abcdefgh", 20, **fields)
                       if "max_tokens" not in fields else params_of("abcdefgh", **fields),
                       use_tqdm=False)[0].outputs[0]
    assert (out.text, out.finish_reason) == (text, reason)


def test_other_constraints_hold_where_they_leave_a_choice(llm):
    """The likeliest of a and b is whatever it is; with a ban of it the other one must come."""
    a, b = TOKENIZER.encode("ab")
    assert text_of(llm, params_of("[ab]{6}", 20, bad_words=["a"])) == "b" * 6
    assert text_of(llm, params_of("[ab]{6}", 20, allowed_token_ids=[a, EOS, 9])) == "a" * 6
    assert text_of(llm, params_of("[ab]{6}", 20, logit_bias={b: 100})) == "b" * 6
    ends = dict.fromkeys(ENDS, 100.0)
    assert text_of(llm, params_of("a*", 20, logit_bias=ends)) == ""
    assert text_of(llm, params_of("a*", 20, logit_bias=ends, min_tokens=5)) == "a" * 5


def test_a_stop_token_ends_a_grammar_where_it_may_end(llm):
    """Without EOS the caller's token is the end, and it comes where the grammar allows it only."""
    x, = TOKENIZER.encode("x")
    out = llm.generate([5, 6, 7], params_of(
        "[0-9]{3}", 20, ignore_eos=True, stop_token_ids=[x], logit_bias={x: 100}),
        use_tqdm=False)[0].outputs[0]
    assert out.text.isdigit() and len(out.text) == 3
    assert (out.finish_reason, out.stop_reason, len(out.token_ids)) == ("stop", x, 4)


def test_logprobs_are_the_models_own(llm):
    """They say what the model thinks, not what is left of it: as with all other controls."""
    out = llm.generate([5, 6, 7], params_of("ab", 9, logprobs=5), use_tqdm=False)[0].outputs[0]
    free = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=1, logprobs=5),
                        use_tqdm=False)[0].outputs[0]
    first = TOKENIZER.encode("a")[0]
    assert out.token_ids[0] == first and out.logprobs[0][first].rank > 1
    likeliest = free.token_ids[0]
    assert out.logprobs[0][likeliest].logprob == pytest.approx(free.logprobs[0][likeliest].logprob)


def test_a_parser_that_gives_up_ends_the_text_and_says_so(llm, monkeypatch):
    """Put into its error state by a token that it never allowed. The text is not what was asked
    for, so it doesn't say "stop", and the token that ends it is not shown."""
    params = params_of("[ab]{50}", 60)
    llm.add_request("r", [5, 6, 7], params)
    for _ in range(5):
        llm.step()
    grammar = llm.extra(StructuredOutput).constraints[llm.requests["r"].sequences[0]]
    assert not grammar.matcher.consume_token(TOKENIZER.encode("x")[0])
    with pytest.warns(UserWarning, match="llguidance gave up: .*doesn't satisfy the grammar"):
        while llm.has_unfinished_requests():
            out, = llm.step()
    assert out.outputs[0].finish_reason == "length" and set(out.outputs[0].text) <= {"a", "b"}
    assert len(out.outputs[0].text) < 50


def test_requests_without_a_grammar_are_left_alone(llm):
    """Neither their masks nor their drafts."""
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = text_of(llm, plain)
    outputs = llm.generate([[5, 6, 7]] * 3, [
        plain, params_of("[ab]{9}", 12), SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, bad_words=["q"], seed=1)],
        use_tqdm=False)
    assert outputs[0].outputs[0].text == alone
