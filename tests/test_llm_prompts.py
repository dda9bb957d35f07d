"""What goes in and what comes out; what is refused costs the others nothing."""

import random

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from small_engine import (
    HELLO,
    MAX_MODEL_LEN,
    MESSAGES,
    TOKENIZER,
    assert_idle,
    assert_serves,
    drain,
    greedy,
    ids_of,
    make,
    run,
    tokens,
)

from nanoserve import LLM, RequestOutputKind, SamplingParams

# ----------------------------------------------------- prompts and their results


@pytest.mark.parametrize(("prompts", "texts"), [
    ("Hello", ["Hello"]),
    ({"prompt": "Hello"}, ["Hello"]),
    ({"prompt_token_ids": HELLO}, [None]),
    ({"prompt": "shown", "prompt_token_ids": HELLO}, ["shown"]),
    (HELLO, [None]),
    (tuple(HELLO), [None]),
    (list(np.array(HELLO)), [None]),
    (["Hello"], ["Hello"]),
    ([HELLO], [None]),
    (["Hello", {"prompt": "Hello"}, {"prompt_token_ids": HELLO}, HELLO, tuple(HELLO)],
     ["Hello", "Hello", None, None, None]),
], ids=str)
def test_prompt_forms(llm, expected, prompts, texts):
    """Every form of a prompt means the same tokens; a single prompt still returns a list."""
    outs = run(llm, prompts, greedy())
    assert isinstance(outs, list) and [out.prompt for out in outs] == texts
    for out in outs:
        assert out.prompt_token_ids == HELLO
        assert out.outputs[0].token_ids == expected("Hello")


def test_the_fields_of_an_output(llm, expected):
    [out] = run(llm, "Hello, you there!", greedy(6))
    [sample] = out.outputs
    assert isinstance(out.request_id, str) and out.finished
    assert (out.prompt, out.prompt_token_ids) == ("Hello, you there!", ids_of("Hello, you there!"))
    assert out.prompt_logprobs is None
    assert (sample.index, sample.token_ids) == (0, expected("Hello, you there!", 6))
    assert sample.text == TOKENIZER.decode(sample.token_ids)
    assert (sample.cumulative_logprob, sample.logprobs) == (None, None)
    assert (sample.finish_reason, sample.stop_reason, sample.finished()) == ("length", None, True)


def test_results_come_in_the_order_of_the_prompts(llm, expected):
    """More requests than rows, and the first are the longest: they finish in another order."""
    prompts = [random.Random(i).choices(range(256), k=3 + 5 * (i % 4)) for i in range(9)]
    lengths = [24 - 2 * i for i in range(9)]
    outs = run(llm, prompts, [greedy(n) for n in lengths])
    assert [out.prompt_token_ids for out in outs] == prompts
    assert tokens(outs) == [expected(p, n) for p, n in zip(prompts, lengths, strict=True)]


def test_no_prompts_no_results(llm):
    assert run(llm, []) == run(llm, (), []) == []
    assert list(llm.stream([])) == []
    assert llm.chat([], use_tqdm=False) == []


def test_every_prompt_gets_its_params(llm):
    """`zip(prompts, sampling_params)` silently dropped the prompts beyond the shorter list
    (nano-vllm): lists of different lengths must raise."""
    outs = run(llm, ["a", "b", "c"], [greedy(n) for n in (3, 1, 2)])
    assert [len(ids) for ids in tokens(outs)] == [3, 1, 2]
    for count in (0, 1, 2, 4):
        for call in (run, LLM.stream):
            with pytest.raises(ValueError, match=f"sampling_params.*{count}.*3 prompts"):
                call(llm, ["a", "b", "c"], [greedy()] * count)
    with pytest.raises(ValueError, match="priority.*2.*3 prompts"):
        run(llm, ["a", "b", "c"], greedy(), priority=[0, 0])


def test_unknown_arguments_raise(qwen3, llm):
    """Keyword arguments that were accepted and ignored (nano-vllm) hide every misspelling."""
    with pytest.raises(TypeError, match="max_model_length"):
        LLM(qwen3, max_model_length=100)
    with pytest.raises(TypeError):
        LLM(qwen3, "bfloat16")  # everything after the model is keyword-only
    for method, given in ((llm.generate, "a"), (llm.stream, "a"), (llm.chat, MESSAGES)):
        with pytest.raises(TypeError, match="sampling_parms"):
            method(given, sampling_parms=greedy())


def test_the_callers_params_are_not_touched(llm):
    """They may be used for many calls, and changed between them."""
    params = greedy(4, output_kind=RequestOutputKind.DELTA)
    llm.add_request("r", "Hello", params)
    params.max_tokens = 1
    run(llm, "Hello", params)
    assert params == greedy(1, output_kind=RequestOutputKind.DELTA)
    outs = drain(llm)["r"]
    assert sum(len(out.outputs[0].token_ids) for out in outs) == 4


# ------------------------------------------------------------------- bad input

BAD_PROMPTS = [
    ("", "empty"), ({"prompt": ""}, "empty"), ({"prompt_token_ids": []}, "empty"),
    ([[]], "empty"), ([""], "empty"), ({}, "prompt_token_ids"),
    ([VOCAB_SIZE], rf"token id {VOCAB_SIZE}"),
    ([5, -1, 7], "token id -1"), ({"prompt_token_ids": [3, 10 ** 12]}, "token id 1000"),
    ({"prompt": "a", "promt_token_ids": [1]}, "got .*promt_token_ids"),
    (None, "NoneType"), (7, "int"), ([None], "no text: None"), ([1.5], "float"), ([True], "bool"),
    ([1, "a"], "list of token ids"), ({"prompt_token_ids": "abc"}, "list of token ids"),
    ({"prompt": 7}, "7"), pytest.param(iter(["a"]), "iterator", id="an iterator"),
]


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS, ids=str)
def test_bad_prompts_are_refused(llm, expected, prompt, says):
    """With an IndexError for an empty prompt, say, nano-vllm left its caller to guess."""
    for call in (run, LLM.stream):  # a stream complains at once, not when it is iterated
        with pytest.raises(ValueError, match=says):
            call(llm, prompt, greedy())
    assert_serves(llm, expected)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 5000])
def test_a_prompt_that_is_too_long_is_refused(llm, expected, length):
    """mini-sglang logged an over-long prompt and dropped it: the caller waited for ever, or got an
    empty text. The message has the length, the maximum and the option to change."""
    says = f"{length} tokens.* {MAX_MODEL_LEN} tokens.*max_model_len"
    for call in (lambda: run(llm, [7] * length), lambda: run(llm, "x" * length),
                 lambda: llm.add_request("r", [7] * length)):
        with pytest.raises(ValueError, match=says):
            call()
    assert_serves(llm, expected)
    assert len(run(llm, [7] * (MAX_MODEL_LEN - 1))[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(("place", "wrong", "says"), [
    (0, [1, 2, VOCAB_SIZE], f"token id {VOCAB_SIZE}"), (6, [1, 2, VOCAB_SIZE], "token id"),
    (3, "\ud800 hi", "lone surrogate"), (3, "", "empty"), (3, None, "None"),
    (3, {"prompt": 7}, "7"), (3, {"prompt": "a", "x": 1}, "x")], ids=ascii)
def test_one_bad_prompt_among_many_costs_nothing(llm, expected, monkeypatch, place, wrong, says):
    """It is found before any work starts, and the message tells which one it is: one text that
    can't be tokenised fails the whole batch."""
    def no_work(step):
        raise AssertionError("work has started")
    prompts = [[1, 2, 3], "one"] * 4
    prompts[place] = wrong
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch", no_work)
        with pytest.raises(ValueError, match=f"^prompt {place}: .*{says}"):
            run(llm, prompts, greedy())
        assert_idle(llm)
    assert_serves(llm, expected)


def test_bad_params_are_refused_and_the_engine_serves_on(llm, expected):
    """nano-vllm asserts on `temperature=0`, never ends with `max_tokens=0` and accepts -5."""
    for field, value in [("max_tokens", 0), ("max_tokens", -5), ("temperature", -1.0)]:
        with pytest.raises(ValueError, match=f"{field}.*{value}"):
            run(llm, "Hello", SamplingParams(**{field: value}))
        params = greedy()
        setattr(params, field, value)  # behind the constructor's back
        with pytest.raises(ValueError, match=f"{field}.*{value}"):
            run(llm, ["Hello", "Hello"], [greedy(), params])
    assert_serves(llm, expected)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None, 3]], ids=str)
def test_params_of_another_kind_are_refused(llm, params):
    with pytest.raises(ValueError, match="sampling_params"):
        run(llm, ["Hello", "Hello"], params)


def test_a_priority_is_a_number(llm):
    assert len(run(llm, "Hello", priority=[2])) == 1  # as in vLLM: it changes no text
    with pytest.raises(ValueError, match="priority.*'high'"):
        llm.add_request("r", "Hello", priority="high")
    for wrong in (np.array([1, 2]), [0.0, False]):
        with pytest.raises(ValueError, match="prompt 0: priority must be a whole number"):
            run(llm, ["Hello", "you"], priority=wrong)
    assert len(run(llm, "Hello", priority=[0])) == 1


def test_what_the_cache_can_never_hold_is_refused(qwen3, expected):
    """The sizes and the option are named, and the engine goes on."""
    llm = make(qwen3, max_model_len=None, num_gpu_blocks_override=2)
    for call in (lambda: run(llm, [5] * 40, greedy()), lambda: llm.add_request("r", [5] * 40)):
        with pytest.raises(ValueError, match="40 tokens.*32.*kv_cache_memory_bytes"):
            call()
    assert tokens(run(llm, "Hello", greedy(20))) == [expected("Hello", 20)]
    assert_idle(llm)


def test_a_request_id_must_be_a_str(llm):
    with pytest.raises(ValueError, match="request_id.*got 5"):
        llm.add_request(5, "Hello", greedy(2))


def test_a_bad_word_that_is_no_text_is_refused(llm):
    with pytest.raises(ValueError, match="bad_words="):
        run(llm, "x", SamplingParams(bad_words=["\ud800"]))
