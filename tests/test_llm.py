"""The API on a small checkpoint: what goes in, what comes out, and what survives going wrong.

Oracles: transformers' greedy text for whatever a model says; for stopping and streaming, where it
matters what is said, a model whose words are put into its mouth (it computes its KV as always, but
the sampled tokens are replaced). After each test the shared engine must be idle, with every block
free and its books in order.
"""

import json
import random
import shutil
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BOS, END_OF_TURN, EOS, VOCAB_SIZE, byte_tokenizer, write_json
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.frontend.detokenizer import Detokenizer
from nanoserve.sampler import SamplerOutput
from nanoserve.turns import Turns, in_turn, take_all

MAX_MODEL_LEN = 64
TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def greedy(max_tokens: int = 8, **kinds) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kinds)


def make(folder, **options) -> LLM:
    """A small engine: 4 sequences, steps of 24 tokens, 24 blocks of 16, at most 64 tokens each."""
    small = dict(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_MODEL_LEN,
                 num_gpu_blocks_override=24)
    return LLM(folder, **small | options)


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is owed to anybody, and every block has come back."""
    assert not llm.has_unfinished_requests() and not llm.requests and not llm.in_flight
    assert not llm.scheduler.has_unfinished() and not llm.scheduler.draining
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    llm.scheduler.check()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(request, qwen3):
    llm = make(qwen3, async_scheduling=request.param)
    llm.check_every_step = True  # the variable is set for single tests, this engine is older
    return llm


@pytest.fixture
def llm(engine, monkeypatch):
    yield engine
    monkeypatch.undo()  # whatever a test put into the engine's way
    try:
        assert_idle(engine)
    finally:  # one failure is enough: the next test finds the engine tidy
        for request_id in list(engine.requests):
            engine.abort_request(request_id)
        drain(engine)


@pytest.fixture
def expected(references):
    """transformers' greedy text: token ids by prompt (text or ids) and length."""
    def tokens(prompt, max_tokens: int = 8) -> list[int]:
        ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        return references("qwen3", ids, max_tokens)[0]
    return tokens


@pytest.fixture
def say(llm, monkeypatch):
    """Put words into the model's mouth: every request's output is this text, then EOS for ever."""
    def script(text: str | list[int]) -> None:
        words = ids_of(text) if isinstance(text, str) else text
        launch = llm.runner.launch

        def spoken(step):
            launch(step)
            at = [seq.num_tokens - 1 - seq.num_prompt_tokens for seq in step.sampling]
            tokens = torch.tensor([words[i] if i < len(words) else EOS for i in at])
            llm.runner.last_tokens[[seq.row for seq in step.sampling]] = tokens.int()
            return SamplerOutput(tokens)
        monkeypatch.setattr(llm.runner, "launch", spoken)
    return script


def run(llm: LLM, prompts, params=None, **kinds):
    return llm.generate(prompts, params, use_tqdm=False, **kinds)


def tokens(outs) -> list[list[int]]:
    """The token ids of each request's first sample."""
    return [out.outputs[0].token_ids for out in outs]


def drain(llm: LLM) -> dict[str, list]:
    """Step by hand to the end; every output of each request, in order."""
    seen: dict[str, list] = {}
    busy = True
    while busy:
        busy = llm.has_unfinished_requests()
        for out in llm.step():  # once more at the end, for what aborted requests had generated
            seen.setdefault(out.request_id, []).append(out)
    return seen


def assert_serves(llm: LLM, expected) -> None:
    assert tokens(run(llm, ["still", "here?"], greedy())) == [expected("still"), expected("here?")]


# ----------------------------------------------------- prompts and their results


HELLO = ids_of("Hello")


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
    assert (out.metrics.num_prompt_tokens, out.metrics.num_generation_tokens) == (17, 6)
    assert (sample.index, sample.token_ids) == (0, expected("Hello, you there!", 6))
    assert sample.text == TOKENIZER.decode(sample.token_ids)
    assert (sample.cumulative_logprob, sample.logprobs) == (None, None)
    assert (sample.finish_reason, sample.stop_reason, sample.finished()) == ("length", None, True)


def test_results_come_in_the_order_of_the_prompts(llm, expected):
    """More requests than seats, and the first are the longest: they finish in another order."""
    prompts = [random.Random(i).choices(range(256), k=3 + 5 * (i % 4)) for i in range(9)]
    lengths = [24 - 2 * i for i in range(9)]
    outs = run(llm, prompts, [greedy(n) for n in lengths])
    assert [out.prompt_token_ids for out in outs] == prompts
    assert tokens(outs) == [expected(p, n) for p, n in zip(prompts, lengths, strict=True)]


def test_no_prompts_no_results(llm):
    assert run(llm, []) == run(llm, (), []) == []
    assert list(llm.stream([])) == []
    assert llm.chat([], use_tqdm=False) == []


def test_prompts_without_params_use_the_models_defaults(llm):
    [out] = run(llm, "Hello")
    assert len(out.outputs[0].token_ids) == 16


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
    with pytest.raises(TypeError, match="max_model_length.*max_model_len"):
        LLM(qwen3, max_model_length=100)
    with pytest.raises(TypeError):
        LLM(qwen3, "bfloat16")  # everything after the model is keyword-only
    for method in (llm.generate, llm.stream, llm.chat):
        with pytest.raises(TypeError, match="lora_request"):
            method("a", lora_request=None)


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
    ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
    ([VOCAB_SIZE], rf"token id {VOCAB_SIZE}.*vocabulary of {VOCAB_SIZE}"),
    ([5, -1, 7], "token id -1.*vocabulary"), ({"prompt_token_ids": [3, 10 ** 12]}, "token id 1000"),
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
    says = rf"{length} tokens.*max_model_len is {MAX_MODEL_LEN}.*raise max_model_len"
    for call in (lambda: run(llm, [7] * length), lambda: run(llm, "x" * length),
                 lambda: llm.add_request("r", [7] * length)):
        with pytest.raises(ValueError, match=says):
            call()
    assert_serves(llm, expected)
    assert len(run(llm, [7] * (MAX_MODEL_LEN - 1))[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize("bad", [0, 3, 6])
def test_one_bad_prompt_among_many_costs_nothing(llm, expected, monkeypatch, bad):
    """It is found before any work starts, and the message tells which one it is."""
    def no_work(step):
        raise AssertionError("work has started")
    prompts = [[1, 2, 3]] * 7
    prompts[bad] = [1, 2, VOCAB_SIZE]
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch", no_work)
        with pytest.raises(ValueError, match=f"prompt {bad}: token id {VOCAB_SIZE}"):
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


def test_a_priority_without_effect_is_refused(llm):
    with pytest.raises(ValueError, match="priority=2.*scheduling_policy"):
        run(llm, "Hello", priority=[2])
    with pytest.raises(ValueError, match="priority.*'high'"):
        llm.add_request("r", "Hello", priority="high")
    assert len(run(llm, "Hello", priority=[0])) == 1


def test_what_the_cache_can_never_hold_is_refused(qwen3, expected):
    """The sizes and the option are named, and the engine goes on."""
    llm = make(qwen3, max_model_len=None, num_gpu_blocks_override=2)
    for call in (lambda: run(llm, [5] * 40, greedy()), lambda: llm.add_request("r", [5] * 40)):
        with pytest.raises(ValueError, match="40 tokens.*32.*kv_cache_memory_bytes"):
            call()
    assert tokens(run(llm, "Hello", greedy(20))) == [expected("Hello", 20)]
    assert_idle(llm)


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score"])
def test_a_generator_does_no_pooling(llm, method):
    with pytest.raises(ValueError, match="runner='generate'"):
        getattr(llm, method)(*[["a", "b"]] * (2 if method == "score" else 1))
    assert "extras.pooling" in getattr(LLM, method).__doc__  # where `help` sends the reader


# -------------------------------------------------------------- when it is over


@pytest.mark.parametrize("max_tokens", [50, 51, 1000, None])
def test_a_text_ends_at_the_models_maximum(llm, expected, max_tokens):
    """14 prompt tokens of 64 leave 50, whatever is asked for."""
    prompt = list(range(14))
    [out] = run(llm, prompt, greedy(max_tokens, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == MAX_MODEL_LEN - 14
    assert out.outputs[0].finish_reason == "length"


def test_max_tokens_of_one(llm, expected):
    [out] = run(llm, "Hello", greedy(1))
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == (expected("Hello", 1),
                                                                        "length")


@pytest.mark.parametrize(("said", "params", "text", "num_tokens", "reason"), [
    ("Hi", dict(), "Hi", 3, ("stop", None)),  # EOS counts as a token, and is no text
    ("Hi", dict(ignore_eos=True, max_tokens=9), "Hi", 9, ("length", None)),
    ("Hi", dict(stop_token_ids=[EOS]), "Hi", 3, ("stop", None)),  # it is EOS all the same
    ("Hi", dict(ignore_eos=True, stop_token_ids=[EOS]), "Hi", 3, ("stop", EOS)),
    ("Hi!?", dict(stop_token_ids=[1, *ids_of("!")]), "Hi", 3, ("stop", ids_of("!")[0])),
    ("Hi!?", dict(stop_token_ids=ids_of("!"), include_stop_str_in_output=True), "Hi!", 3,
     ("stop", ids_of("!")[0])),
    ("Hi you", dict(stop=" y"), "Hi", 4, ("stop", " y")),
    ("Hi you", dict(stop=["you", "i "]), "H", 3, ("stop", "i ")),
    ("Hi you", dict(stop=" y", include_stop_str_in_output=True), "Hi y", 4, ("stop", " y")),
    ("Hi yo", dict(stop="you"), "Hi yo", 6, ("stop", None)),  # held back, then released
    ("Hi you", dict(stop="you", max_tokens=5), "Hi yo", 5, ("length", None)),
    ("Hi you", dict(stop="you", max_tokens=6), "Hi ", 6, ("stop", "you")),  # both at once
    ("", dict(), "", 1, ("stop", None)),
    ("é", dict(max_tokens=1), "\ufffd", 1, ("length", None)),
], ids=str)
def test_how_a_text_ends(llm, say, said, params, text, num_tokens, reason):
    """By EOS, a stop token, a stop string or the length; the reasons say which."""
    say(said)
    [out] = run(llm, "Say: ", SamplingParams(temperature=0, **dict(max_tokens=20) | params))
    sample = out.outputs[0]
    assert (sample.text, len(sample.token_ids)) == (text, num_tokens)
    assert (sample.finish_reason, sample.stop_reason) == reason


def test_special_tokens_are_skipped_or_shown(llm, say):
    say([*ids_of("a"), END_OF_TURN, *ids_of("b")])
    for skip, text in ((True, "ab"), (False, "a<|end|>b")):
        [out] = run(llm, "Say: ", greedy(skip_special_tokens=skip))
        assert out.outputs[0].text == text


def test_without_detokenizing_there_are_tokens_only(llm, say):
    say("Hi")
    [out] = run(llm, "Say: ", greedy(detokenize=False))
    assert (out.outputs[0].text, out.outputs[0].token_ids) == ("", [*ids_of("Hi"), EOS])


def test_a_stop_string_that_arrives_with_half_a_character(llm, say, monkeypatch):
    """The token that reaches `max_tokens` holds the stop string and the first half of a character.
    Where the text is cut, the reason must be told."""
    say("Hi!")
    monkeypatch.setattr(llm.tokenizer, "decode", lambda ids, **kinds: TOKENIZER.decode(
        ids).replace("i", "iX\ufffd"))
    [out] = run(llm, "Say: ", greedy(2, stop="X"))
    sample = out.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("Hi", "stop", "X")


# -------------------------------------------------------------- driving it by hand


def test_step_by_step(llm, expected):
    """Each output of a request has everything so far; the last one is finished."""
    llm.add_request("one", "Hello", greedy(5))
    llm.add_request("two", [1, 2, 3], greedy(3))
    outs = drain(llm)
    assert tokens(outs["one"]) == [expected("Hello", n) for n in range(1, 6)]
    assert tokens(outs["two"]) == [expected([1, 2, 3], n) for n in range(1, 4)]
    for seen in outs.values():
        assert [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]


def test_a_step_with_nothing_to_do_is_legal(llm):
    assert not llm.has_unfinished_requests()
    assert llm.step() == llm.step() == []


def test_a_request_id_is_used_once_at_a_time(llm):
    llm.add_request("r", "Hello", greedy(3))
    with pytest.raises(ValueError, match="request_id='r' is in use"):
        llm.add_request("r", "other", greedy(3))
    assert len(drain(llm)["r"][-1].outputs[0].token_ids) == 3
    llm.add_request("r", "other", greedy(2))
    assert len(drain(llm)["r"][-1].outputs[0].token_ids) == 2


@pytest.mark.parametrize("victim", ["long", "short", "late"])
def test_aborting_in_every_state(llm, expected, victim):
    """Two seats for three requests, and a prompt of several chunks: after each number of steps the
    victim waits, is prefilled, decodes, is in flight or has finished. It gives its blocks back, and
    the others go on as if nothing had happened."""
    requests = {"long": (list(range(50)), 9), "short": ([9, 8, 7], 6), "late": ([5] * 20, 7)}
    for num_steps in range(14):
        llm.reset_prefix_cache()
        outs = {}
        for name, (prompt, length) in requests.items():
            llm.add_request(name, prompt, greedy(length))
        for _ in range(num_steps):
            outs |= {out.request_id: out for out in llm.step()}
        before = outs.get(victim)
        llm.abort_request(victim)
        llm.abort_request(victim)  # twice is harmless
        llm.scheduler.check()
        outs |= {name: seen[-1] for name, seen in drain(llm).items()}
        for name, (prompt, length) in requests.items():
            if name != victim or (before and before.finished):
                assert outs[name].outputs[0].token_ids == expected(prompt, length)
                continue
            sample = outs[name].outputs[0]
            assert (outs[name].finished, sample.finish_reason) == (True, "abort")
            assert sample.token_ids == (before.outputs[0].token_ids if before else [])
            assert sample.text == TOKENIZER.decode(sample.token_ids)
        assert_idle(llm)


def test_aborting_a_preempted_request(qwen3, expected):
    """It waits, holds no blocks, and has tokens that are handed over."""
    llm = make(qwen3, num_gpu_blocks_override=5)
    for name in ("stays", "goes"):
        llm.add_request(name, [3] * 30, greedy(30, ignore_eos=True))
    seen = {}
    goes = llm.requests["goes"].sequences[0]
    while not goes.num_preemptions:
        seen |= {out.request_id: out for out in llm.step()}
    assert goes.row < 0 and not goes.block_table
    llm.abort_request("goes")
    outs = drain(llm)
    assert tokens(outs["goes"]) == tokens([seen["goes"]])
    assert outs["goes"][0].outputs[0].finish_reason == "abort"
    assert tokens(outs["stays"][-1:]) == [expected([3] * 30, 30)]
    assert_idle(llm)


def test_aborting_what_is_not_there_is_harmless(llm):
    llm.abort_request("never heard of")
    for wrong in (None, 3):
        with pytest.raises(ValueError, match=f"request_id={wrong} must be a str or a list"):
            llm.abort_request(wrong)
    assert llm.step() == []


def test_aborting_some_of_many_samples_gives_all_blocks_back(llm):
    """A request whose first samples wait, while others run: it is one request, and ends as one."""
    llm.add_request("r", [4] * 20, SamplingParams(n=6, max_tokens=5, seed=1, ignore_eos=True))
    for _ in range(4):
        llm.step()
    llm.abort_request("r")
    [out] = drain(llm)["r"]
    assert {sample.finish_reason for sample in out.outputs} == {"abort"}


# ----------------------------------------------------- calls that share an engine


def test_requests_by_hand_survive_generate(llm, expected):
    """Results of offline calls went to the wrong request and last tokens were lost (mini-sglang
    #62), and a counter that was not reset between calls lost results (transformers #45943). Here
    requests that were added by hand run along, and keep every output for the next `step()`."""
    llm.add_request("mine", "Hello", greedy(6))
    llm.add_request("later", "Hello", greedy(20))
    first = llm.step()
    assert_serves(llm, expected)
    assert_serves(llm, expected)
    outs = drain(llm)
    mine = [out for out in first if out.request_id == "mine"] + outs["mine"]
    assert tokens(mine) == [expected("Hello", n) for n in range(1, 7)]
    assert tokens(outs["later"][-1:]) == [expected("Hello", 20)]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_finished_outputs_wait_for_step_under_any_name(llm, expected, kind):
    """Requests by hand may be called "1", "2", ..., as the engine calls its own. One that finishes
    during a `generate` is not the next `generate`'s result, however their ids collide."""
    names = [str(llm.num_named + 2 * i) for i in range(1, 8)]
    for i, name in enumerate(names):
        llm.add_request(name, [i] * 3, greedy(2, output_kind=kind))
    for i in range(12):
        assert tokens(run(llm, [20 + i] * 3, greedy(4))) == [expected([20 + i] * 3, 4)]
    outs = drain(llm)
    assert list(outs) == names
    for i, name in enumerate(names):
        ids = tokens(outs[name])
        total = sum(ids, []) if kind is RequestOutputKind.DELTA else ids[-1]
        assert total == expected([i] * 3, 2)


def test_a_stream_that_has_not_started_takes_nothing_from_others(llm, expected):
    """Streams are submitted when they are first asked; until then their ids are only promised."""
    one, other = llm.stream("Hello", greedy(4)), llm.stream("world", greedy(4))
    assert_serves(llm, expected)
    for number in range(llm.num_named - 6, llm.num_named + 3):
        llm.add_request(str(number), [1, 2, 3], greedy(5))
    assert tokens(list(one)[-1:]) == [expected("Hello", 4)]
    assert tokens(list(other)[-1:]) == [expected("world", 4)]
    outs = drain(llm)
    assert len(outs) == 9
    for seen in outs.values():
        assert tokens(seen[-1:]) == [expected([1, 2, 3], 5)]


def stop_spinning(monkeypatch, llm: LLM) -> None:
    """Turn a loop that waits for ever into a failure."""
    schedule, count = llm.scheduler.schedule, 0

    def counted():
        nonlocal count
        count += 1
        assert count < 100, "the engine steps and steps, and nothing comes of it"
        return schedule()
    monkeypatch.setattr(llm.scheduler, "schedule", counted)


def test_step_leaves_a_streams_outputs_to_the_stream(llm, expected, monkeypatch):
    """Whoever steps, moves all requests on; but an output goes to those who asked for it. A stream
    whose last output was given to somebody else would wait for ever."""
    stop_spinning(monkeypatch, llm)
    stream = llm.stream("Hello", greedy(5))
    seen = [next(stream)]
    llm.add_request("mine", "world", greedy(9))
    outs = drain(llm)
    assert list(outs) == ["mine"] and tokens(outs["mine"][-1:]) == [expected("world", 9)]
    seen += stream
    assert tokens(seen) == [expected("Hello", n) for n in range(1, 6)]


def test_an_id_is_free_again_when_its_request_has_finished(llm, expected, monkeypatch):
    """The stream's request finishes while somebody else steps; before the stream has looked, its id
    is used by hand. Each gets what is its own."""
    stop_spinning(monkeypatch, llm)
    stream = llm.stream("Hello", greedy(4))
    name = next(stream).request_id
    run(llm, "world", greedy(6))
    llm.add_request(name, [1, 2, 3], greedy(2))
    assert tokens(list(stream)[-1:]) == [expected("Hello", 4)]
    assert tokens(drain(llm)[name][-1:]) == [expected([1, 2, 3], 2)]


def test_streams_and_generate_interleave(llm, expected):
    """Two streams and a `generate` inside the loop of the first: everybody gets their own."""
    one = llm.stream(["Hello", "world"], greedy(9))
    other = llm.stream("Hello there", greedy(7))
    seen = {}
    for i, out in enumerate(one):
        seen[out.prompt] = out
        if i == 3:
            assert_serves(llm, expected)
        for out in [next(other, None)]:
            seen |= {out.prompt: out} if out else {}
    seen |= {out.prompt: out for out in other}
    for prompt, length in (("Hello", 9), ("world", 9), ("Hello there", 7)):
        assert seen[prompt].finished
        assert seen[prompt].outputs[0].token_ids == expected(prompt, length)


def test_two_engines_do_not_disturb_each_other(checkpoints, references):
    """A fixed port and shared-memory name made two engines on a machine clash, and a second engine
    in one process initialised the process group twice (nano-vllm). Step by step in turns, with
    different models, each says what it says alone; shutting one down leaves the other alone."""
    engines = {name: make(checkpoints[name]) for name in ("qwen3", "llama3.1")}
    outs = {name: [] for name in engines}
    for llm in engines.values():
        llm.add_request("r", HELLO, greedy(8))
    while any(llm.has_unfinished_requests() for llm in engines.values()):
        for name, llm in engines.items():
            outs[name] += llm.step()
    for name in engines:
        assert outs[name][-1].outputs[0].token_ids == references(name, HELLO, 8)[0]
    engines["qwen3"].shutdown()
    again = run(engines["llama3.1"], HELLO, greedy(8))
    assert tokens(again) == [references("llama3.1", HELLO, 8)[0]]


# ------------------------------------------------------------------ streaming


EMOJI = "é 👨\u200d👩\u200d👧 ok"


@pytest.mark.parametrize("stop", [None, " ok", "ok!"])
def test_streaming_cumulative(llm, say, stop):
    """Each output continues the one before, up to `generate`'s text; no broken characters."""
    say(EMOJI)
    final = run(llm, "Say: ", greedy(40, stop=stop))[0].outputs[0]
    outs = [out.outputs[0] for out in llm.stream("Say: ", greedy(40, stop=stop))]
    assert final.text == (EMOJI[:-3] if stop == " ok" else EMOJI)
    assert (outs[-1].text, outs[-1].token_ids) == (final.text, final.token_ids)
    assert [len(out.token_ids) for out in outs] == list(range(1, len(final.token_ids) + 1))
    for earlier, later in zip(outs, outs[1:]):
        assert later.text.startswith(earlier.text) and "\ufffd" not in earlier.text
        assert earlier.finish_reason is None


@pytest.mark.parametrize("stop", [None, " ok", "ok!"])
def test_streaming_deltas_add_up(llm, say, stop):
    """Several samples at once; the pieces of each, put together, are its whole text."""
    say(EMOJI)
    params = dict(n=3, max_tokens=40, stop=stop)
    [final] = run(llm, "Say: ", SamplingParams(**params))
    outs = list(llm.stream("Say: ", SamplingParams(**params, output_kind=RequestOutputKind.DELTA)))
    for index in range(3):
        pieces = [out.outputs[index] for out in outs]
        assert "".join(piece.text for piece in pieces) == final.outputs[index].text
        assert sum((p.token_ids for p in pieces), []) == final.outputs[index].token_ids
        assert not any("\ufffd" in piece.text for piece in pieces)
        assert pieces[-1].finish_reason == final.outputs[index].finish_reason == "stop"
    assert max(len(piece.text) for out in outs for piece in out.outputs) < len(EMOJI)


def test_streaming_final_outputs_only(llm, expected):
    """One output a request, in the order in which they finish."""
    params = [greedy(n, output_kind=RequestOutputKind.FINAL_ONLY) for n in (9, 5, 7)]
    outs = list(llm.stream(["a", "b", "c"], params))
    assert [out.prompt for out in outs] == ["b", "c", "a"]
    assert tokens(outs) == [expected("b", 5), expected("c", 7), expected("a", 9)]
    assert all(out.finished for out in outs)


@pytest.mark.parametrize("how", ["close", "abandon", "raise", "break before the first"])
def test_leaving_a_stream_early_gives_everything_back(llm, expected, how):
    """The consumer goes away, or fails: its requests are aborted, other people's go on."""
    llm.add_request("mine", "Hello", greedy(20))
    iterator = llm.stream(["a", "b", [7] * 40, "d", "e"], greedy(20))
    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            for out in iterator:
                1 / (3 - len(out.outputs[0].token_ids))
    elif how != "break before the first":
        next(iterator), next(iterator)
    if how == "close":
        iterator.close()
    del iterator
    assert [request.request_id for request in llm.requests.values()] == ["mine"]
    assert llm.scheduler.num_waiting + llm.scheduler.num_running == 1
    outs = drain(llm)
    assert list(outs) == ["mine"] and tokens(outs["mine"][-1:]) == [expected("Hello", 20)]
    assert_serves(llm, expected)


def test_a_consumer_may_abort_its_own_request(llm, expected):
    """The stream ends with what it had, instead of waiting for ever."""
    outs = []
    for out in llm.stream(["Hello", "world"], greedy(12)):
        outs.append(out)
        if out.prompt == "Hello" and len(out.outputs[0].token_ids) == 3:
            llm.abort_request(out.request_id)
    last = {out.prompt: out.outputs[0] for out in outs}
    assert (last["Hello"].finish_reason, len(last["Hello"].token_ids)) == ("abort", 3)
    assert last["world"].token_ids == expected("world", 12)


# -------------------------------------------------------------- what goes wrong


PLACES = {  # where the signal or error comes: an object of the engine, and its method
    "launch": lambda llm: (llm.runner, "launch"),
    "schedule": lambda llm: (llm.scheduler, "schedule"),
    "update": lambda llm: (llm.scheduler, "update"),
    "finish": lambda llm: (llm.scheduler, "finish"),
    "add": lambda llm: (llm.scheduler, "add"),
    "progress": lambda llm: (tqdm, "update"),
}


def disturb(monkeypatch, llm: LLM, place: str, call: int, trouble, after: bool) -> None:
    """Make trouble at the given call of a method, before or after it has done its work."""
    target, name = PLACES[place](llm)
    method, count = getattr(target, name), 0

    def disturbed(*args, **kinds):
        nonlocal count
        count += 1
        if count == call and not after:
            trouble()
        result = method(*args, **kinds)
        if count == call and after:
            trouble()
        return result
    monkeypatch.setattr(target, name, disturbed)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_generate(llm, expected, monkeypatch, place, call, after):
    """Requests are aborted, blocks come back, and the engine says the same as before. A request
    that was added by hand is none of `generate`'s business, and goes on to its end."""
    if place == "add":
        call += 1  # the first is the request by hand
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, lambda: signal.raise_signal(signal.SIGINT), after)
        llm.add_request("mine", [6] * 20, greedy(15))
        prompts = ["Hello", [7] * 40, "c", "d", "e", [7] * 40]
        # The traceback is kept, as a debugger would: nothing may depend on its being freed.
        with pytest.raises(KeyboardInterrupt) as interrupted:
            run(llm, prompts, [greedy(n) for n in (9, 8, 1, 6, 5, 4)])
    assert set(llm.requests) <= {"mine"} and interrupted.traceback
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.scheduler.check()
    outs = drain(llm)
    assert list(outs) == ["mine"]
    assert tokens(outs["mine"][-1:]) == [expected([6] * 20, 15)]
    assert_idle(llm)
    assert_serves(llm, expected)


@pytest.mark.parametrize("call", [1, 2, 4, 7])
@pytest.mark.parametrize("place", ["launch", "schedule"])
def test_an_error_in_a_step(llm, expected, monkeypatch, place, call):
    """Out of memory, say: `generate` raises it and cleans up. By hand, the step is simply lost, and
    may be tried again."""
    def fail():
        raise RuntimeError("out of memory")
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, fail, after=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(llm, ["Hello", [7] * 40, "c"], greedy(9))
    assert_idle(llm)
    with monkeypatch.context() as patch:
        disturb(patch, llm, place, call, fail, after=False)
        for name, prompt in (("one", "Hello"), ("two", [7] * 40)):
            llm.add_request(name, prompt, greedy(9))
        outs = {}
        for _ in range(call - 1):
            outs |= {out.request_id: out for out in llm.step()}
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.step()
        llm.scheduler.check()
        outs |= {name: seen[-1] for name, seen in drain(llm).items()}
    assert tokens([outs["one"], outs["two"]]) == [expected("Hello", 9), expected([7] * 40, 9)]
    assert_serves(llm, expected)


def test_an_error_that_shows_when_the_result_is_read(llm, expected, monkeypatch):
    """A device reports its errors late: when the host waits for the tokens."""
    class Broken:
        def tolist(self):
            raise RuntimeError("device lost")
    with monkeypatch.context() as patch:
        launch = llm.runner.launch
        patch.setattr(llm.runner, "launch", lambda step: launch(step) is None or Broken())
        with pytest.raises(RuntimeError, match="device lost"):
            run(llm, ["Hello", "world"], greedy())
    assert_serves(llm, expected)


def test_outside_the_main_thread(llm, expected):
    """Signals are the main thread's: a server's worker thread must not try to handle them."""
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(llm, "Hello", greedy())))
    thread.start()
    thread.join()
    assert tokens(results) == [expected("Hello")]


def test_somebody_elses_signal_handler_is_called_and_kept(llm, expected, monkeypatch):
    """A handler that only takes a note, as a server has it: nothing is interrupted."""
    notes = []
    before = signal.signal(signal.SIGINT, lambda *args: notes.append(args))
    try:
        with monkeypatch.context() as patch:
            disturb(patch, llm, "update", 2, lambda: signal.raise_signal(signal.SIGINT), True)
            assert tokens(run(llm, "Hello", greedy())) == [expected("Hello")]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(notes) == 1


@pytest.mark.parametrize("checking", [True, False])
def test_the_audit_runs_when_it_is_asked_for(qwen3, monkeypatch, checking):
    """NANOSERVE_CHECK=1: a broken count is found after the step in which it breaks."""
    monkeypatch.setenv("NANOSERVE_CHECK", "1" if checking else "0")
    llm = make(qwen3)
    llm.add_request("r", "Hello", greedy(4))
    llm.step()
    llm.scheduler.blocks.ref_counts[llm.requests["r"].sequences[0].block_table[0]] += 1
    if checking:
        with pytest.raises(AssertionError, match="counts 2 references but is held by"):
            llm.step()
    else:
        assert llm.step()[0].outputs[0].finish_reason is None


# -------------------------------------------------------- samples, priorities, caches


def test_samples_of_one_prompt(llm):
    """`n` outputs with their indices, all different, each as if it had been asked for alone."""
    params = SamplingParams(n=5, seed=3, max_tokens=12, ignore_eos=True)
    [out] = run(llm, "Hello", params)
    assert [sample.index for sample in out.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(sample.token_ids) for sample in out.outputs}) == 5
    assert all(len(sample.token_ids) == 12 for sample in out.outputs)
    [again] = run(llm, "Hello", SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True))
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in out.outputs[:2]]


def test_samples_that_end_at_different_times(qwen3, monkeypatch):
    """A request is finished when its last sample is; those that are done keep their reason."""
    llm = make(qwen3)
    launch = llm.runner.launch

    def by_index(step):  # sample i says i letters, then EOS
        launch(step)
        return SamplerOutput(torch.tensor(
            [65 if seq.num_tokens - 1 - seq.num_prompt_tokens < seq.index else EOS
             for seq in step.sampling]))
    monkeypatch.setattr(llm.runner, "launch", by_index)
    outs = list(llm.stream("Hello", SamplingParams(n=3, max_tokens=2)))
    assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
    assert [sample.finish_reason for sample in outs[-1].outputs] == ["stop", "stop", "length"]
    assert tokens([outs[-1]]) == [[EOS]]
    assert [len(sample.token_ids) for sample in outs[-1].outputs] == [1, 2, 2]
    assert_idle(llm)


@pytest.mark.parametrize("by_hand", [False, True])
def test_lower_priorities_are_served_first(qwen3, expected, by_hand):
    """One seat: the requests end in the order of priority, then of arrival."""
    llm = make(qwen3, scheduling_policy="priority", max_num_seqs=1)
    prompts, priorities = ["a", "b", "c", "d", "e"], [2, 0, 1, 0, -1]
    params = greedy(3, output_kind=RequestOutputKind.FINAL_ONLY)
    if by_hand:
        for prompt, priority in zip(prompts, priorities, strict=True):
            llm.add_request(prompt, prompt, params, priority=priority)
        outs = [seen[0] for seen in drain(llm).values()]
    else:
        outs = list(llm.stream(prompts, params, priority=priorities))
    assert [out.prompt for out in outs] == ["e", "b", "d", "c", "a"]
    assert tokens(outs) == [expected(out.prompt, 3) for out in outs]
    results = run(llm, prompts, params, priority=priorities)
    assert [out.prompt for out in results] == prompts


def test_resetting_the_prefix_cache(llm, expected):
    """40 tokens in blocks of 16: two are hit the second time, none after a reset."""
    prompt = random.Random(40).choices(range(256), k=40)
    hits = []
    for reset in (True, False, True):
        if reset:
            assert llm.reset_prefix_cache() is True
        [out] = run(llm, prompt, greedy())
        assert out.outputs[0].token_ids == expected(prompt)
        hits.append(out.num_cached_tokens)
    assert hits == [0, 32, 0]
    llm.add_request("r", prompt, greedy(3))
    llm.step()
    assert llm.reset_prefix_cache() is False  # it runs: nothing is changed
    drain(llm)
    assert run(llm, prompt)[0].num_cached_tokens == 32


# ------------------------------------------------------------------------- chat


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye"}]
RENDERED = "<s>user:Hi<|end|><s>assistant:Yes?<|end|><s>user:Bye<|end|>"


def test_chat_uses_the_template(llm, expected):
    [out] = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    assert out.prompt == RENDERED + "<s>assistant:"
    assert out.prompt_token_ids == [
        BOS, *ids_of("user:Hi"), END_OF_TURN, BOS, *ids_of("assistant:Yes?"), END_OF_TURN,
        BOS, *ids_of("user:Bye"), END_OF_TURN, BOS, *ids_of("assistant:")]
    assert tokens([out]) == [expected(out.prompt_token_ids)]


def test_chat_takes_many_conversations_and_options(llm):
    params = [greedy(n) for n in (2, 3)]
    outs = llm.chat([MESSAGES, MESSAGES[:1]], params, use_tqdm=False, add_generation_prompt=False)
    assert [out.prompt for out in outs] == [RENDERED, "<s>user:Hi<|end|>"]
    assert [len(ids) for ids in tokens(outs)] == [2, 3]
    [out] = llm.chat(MESSAGES[:1], greedy(), use_tqdm=False, chat_template_kwargs={"x": "!"},
                     chat_template="{{ x }}{{ messages[0].content }}")
    assert out.prompt == "!Hi"
    [out] = llm.chat(MESSAGES[:2], greedy(), use_tqdm=False, continue_final_message=True)
    assert out.prompt == "<s>user:Hi<|end|><s>assistant:Yes?"


def copy_of(folder, where):
    """A checkpoint to be changed."""
    return shutil.copytree(folder, where / "changed")


def test_chat_does_not_double_special_tokens(qwen3, tmp_path):
    """A tokenizer that puts BOS in front of a text, and a template that has written it already."""
    folder, tokenizer = copy_of(qwen3, tmp_path), byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save_pretrained(folder)
    llm = make(folder)
    [out] = llm.chat(MESSAGES[:1], greedy(), use_tqdm=False, add_generation_prompt=False)
    assert out.prompt_token_ids == [BOS, *ids_of("user:Hi"), END_OF_TURN]
    assert run(llm, "user:Hi")[0].prompt_token_ids == [BOS, *ids_of("user:Hi")]


def test_chat_without_a_template_says_so(qwen3, tmp_path):
    folder, tokenizer = copy_of(qwen3, tmp_path), byte_tokenizer()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    llm = make(folder)
    with pytest.raises(ValueError, match="no chat template.*chat_template="):
        llm.chat(MESSAGES, greedy(), use_tqdm=False)
    [out] = llm.chat(MESSAGES, greedy(), use_tqdm=False,
                     chat_template="{{ messages[0].content }}")
    assert out.prompt == "Hi"


# ------------------------------------------------------------- the engine around it


def test_default_params_come_from_generation_config(qwen3, tmp_path):
    folder = copy_of(qwen3, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(dict(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=5,
        eos_token_id=[EOS, END_OF_TURN], bos_token_id=BOS)))
    llm = make(folder)
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=5)
    assert len(run(llm, "Hello", llm.get_default_sampling_params())[0].outputs[0].token_ids) <= 5
    assert len(run(llm, "Hello")[0].outputs[0].token_ids) <= 5  # no params: the same defaults
    assert len(run(llm, "Hello", greedy(7, ignore_eos=True))[0].outputs[0].token_ids) == 7
    write_json(folder / "generation_config.json", temperature=None, top_k=None, top_p=None,
               max_new_tokens=None)
    assert make(folder).get_default_sampling_params() == SamplingParams()


def test_an_engine_without_a_tokenizer(qwen3, expected):
    """Token ids in, token ids out; whatever needs text says why it can't be had."""
    llm = make(qwen3, skip_tokenizer_init=True)
    assert llm.get_tokenizer() is None
    [out] = run(llm, HELLO, greedy())
    assert (out.outputs[0].text, out.outputs[0].token_ids) == ("", expected("Hello"))
    for call in (lambda: run(llm, "Hello"), lambda: run(llm, {"prompt": "Hello"}),
                 lambda: run(llm, HELLO, SamplingParams(stop="x")),
                 lambda: llm.chat(MESSAGES, use_tqdm=False)):
        with pytest.raises(ValueError, match="tokenizer"):
            call()
    assert tokens(run(llm, HELLO, greedy())) == [expected("Hello")]


def test_the_tokenizer_is_at_hand(llm):
    assert llm.get_tokenizer().encode("Hello") == HELLO


def test_shutting_down(qwen3):
    with make(qwen3) as llm:
        run(llm, "Hello", greedy())
        unfinished, unbegun = llm.stream("Hello", greedy()), llm.stream("Hello", greedy())
        next(unfinished)
    for call in (lambda: run(llm, "Hello"), lambda: llm.add_request("r", "Hello"), llm.step,
                 lambda: llm.stream("Hello"), lambda: next(unfinished), lambda: next(unbegun)):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    assert not llm.has_unfinished_requests()
    llm.abort_request("r")
    llm.shutdown()  # twice is fine


def test_leaving_the_context_by_an_error_shuts_down_too(qwen3):
    with pytest.raises(ZeroDivisionError), make(qwen3) as llm:
        1 / 0
    with pytest.raises(RuntimeError, match="shut down"):
        llm.step()


def test_the_progress_bar(llm, capsys):
    """Prompts done, prompt tokens and output tokens a second; on demand nothing at all."""
    llm.generate(["Hello", "world"], greedy())
    shown = capsys.readouterr()
    assert "Processed prompts: 100%" in shown.err and "2/2" in shown.err
    assert "input: " in shown.err and "output: " in shown.err and "tok/s" in shown.err
    llm.generate(["Hello", "world"], greedy(), use_tqdm=False)
    llm.generate([])
    assert capsys.readouterr() == ("", "")
    assert shown.out == ""


def test_the_engine_says_what_it_runs_on(qwen3, capsys):
    """An engine fell back to 132 tokens/s instead of about 9,500 without a word (nano-vllm #245):
    device, dtype, attention, graphs and the size of the KV cache are printed in one line."""
    make(qwen3)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "nanoserve" in line]
    for part in ("cpu", "float32", "torch attention", "no graphs", "24 blocks of 16 = 384 tokens",
                 "max_model_len 64", "24 tokens and 4 sequences"):
        assert part in line


# ------------------------------------------------------- trouble with a tokenizer


def test_a_tokenizer_that_fails_ends_one_request_alone(llm, expected, monkeypatch):
    """The tokens of a step are counted before they become text: a tokenizer that raised for one
    request left the others a token short, and the engine stuck with a finished one."""
    add = Detokenizer.add

    def picky(self, token_ids):
        if self.params.seed == 13:
            raise RuntimeError("no such token")
        return add(self, token_ids)

    monkeypatch.setattr(Detokenizer, "add", picky)
    llm.add_request("good", "Hello", greedy(6))
    llm.add_request("bad", "world", greedy(6, seed=13))
    llm.add_request("short", [1, 2, 3], greedy(1))
    outs, errors = {}, 0
    while llm.has_unfinished_requests():
        try:
            outs |= {out.request_id: out for out in llm.step()}
        except RuntimeError:
            errors += 1
    outs |= {out.request_id: out for out in llm.step()}
    assert errors == 1
    assert outs["bad"].outputs[0].finish_reason == "abort"
    assert outs["good"].outputs[0].token_ids == expected("Hello", 6)
    assert outs["good"].outputs[0].text == TOKENIZER.decode(
        expected("Hello", 6), skip_special_tokens=True)
    assert outs["short"].outputs[0].token_ids == expected([1, 2, 3], 1)
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def test_a_request_that_can_not_start_leaves_no_trace(llm, expected, monkeypatch):
    """A detokenizer looks at the prompt when it is made, and may raise: nothing is queued then."""
    def broken(self, *args):
        raise RuntimeError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "__init__", broken)
        with pytest.raises(RuntimeError, match="no such token"):
            run(llm, ["Hello", "world"], greedy(4))
        with pytest.raises(RuntimeError, match="no such token"):
            llm.add_request("mine", "Hello", greedy(4))
    llm.scheduler.check()
    assert not llm.has_unfinished_requests()
    assert_serves(llm, expected)


@pytest.mark.parametrize("messages", ["hi", [["hi"]], ["hi"], [{"role": "user", "content": "a"}, 1]])
def test_a_conversation_that_is_none_is_explained(llm, expected, messages):
    with pytest.raises(ValueError, match="conversation must be a list of dicts"):
        llm.chat(messages, greedy(2), use_tqdm=False)
    assert_serves(llm, expected)


def test_a_request_id_must_be_a_str(llm):
    with pytest.raises(ValueError, match="request_id must be a str, got 5"):
        llm.add_request(5, "Hello", greedy(2))


def test_content_parts_of_a_message_are_joined(llm):
    """OpenAI's form of a message: templates print a list as it is, brackets and all."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    [out] = llm.chat([{"role": "user", "content": parts}], greedy(2), use_tqdm=False)
    [plain] = llm.chat([{"role": "user", "content": "Hello\nworld"}], greedy(2), use_tqdm=False)
    assert out.prompt == plain.prompt and "type" not in out.prompt


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url", "image_url": {}}], [1]])
def test_content_that_is_no_text_is_refused(llm, content):
    with pytest.raises(ValueError, match="content must be text"):
        llm.chat([{"role": "user", "content": content}], greedy(2), use_tqdm=False)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "hi"}, None])
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(ValueError, match="conversation must be a list"):
        llm.chat(messages, greedy(2), use_tqdm=False)


def test_a_template_that_raises_is_explained(llm):
    with pytest.raises(ValueError, match="chat template refuses this conversation: not so"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False,
                 chat_template="{{ raise_exception('not so') }}")


def test_template_options_may_repeat_an_argument(llm):
    message = [{"role": "user", "content": "hi"}]
    [out] = llm.chat(message, greedy(2), use_tqdm=False,
                     chat_template_kwargs={"add_generation_prompt": False})
    assert not out.prompt.endswith("assistant:")


def test_a_lone_surrogate_is_explained(llm, expected):
    with pytest.raises(ValueError, match="lone surrogate"):
        run(llm, "\ud800 hi", greedy(2))
    assert_serves(llm, expected)


def test_several_requests_can_be_aborted_at_once(llm):
    """vLLM's engine takes a list of ids."""
    for name in "abc":
        llm.add_request(name, "Hello", greedy(9))
    llm.step()
    llm.abort_request(["a", "c", "unknown"])
    outs = drain(llm)
    assert [outs[name][-1].outputs[0].finish_reason for name in "abc"] == [
        "abort", "length", "abort"]


def test_threads_may_share_an_engine(llm, expected):
    """They take turns step by step, and everybody gets their own results. Without turns the books
    of the scheduler were changed by two steps at once."""
    wanted = {n: [[n] * (5 + 9 * n), [7, n, 7]] for n in range(4)}
    texts = {n: [expected(prompt, 12) for prompt in prompts] for n, prompts in wanted.items()}
    got, errors = {}, []

    def work(n: int) -> None:
        try:
            for _ in range(3):
                got[n] = tokens(run(llm, wanted[n], greedy(12)))
                assert got[n] == texts[n]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and got == texts
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def test_shutdown_from_another_thread_waits_for_the_step(qwen3):
    """It pulled the scheduler away under a step: an AttributeError, and with several ranks two
    threads in their collectives at once."""
    llm, errors = LLM(qwen3, num_gpu_blocks_override=64), []

    def work() -> None:
        try:
            run(llm, [[1, 2, 3]] * 20, SamplingParams(max_tokens=190, ignore_eos=True))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not llm.requests:
        time.sleep(0.001)
    llm.shutdown()
    thread.join(60)
    assert errors == ["this engine was shut down: make a new LLM"]


@pytest.mark.parametrize("method", ["_schedule_running", "schedule", "update"])
def test_a_stream_that_is_closed_in_the_middle_of_a_step(llm, expected, monkeypatch, method):
    """The garbage collector may do that at any line, in the thread that steps: the lock let it in,
    and aborting took a row away from a step that was being made. It waits for the step's end now;
    so does an abort by a signal's handler."""
    iterator = llm.stream(["a", "b", [7] * 40], greedy(20))
    next(iterator)
    llm.add_request("its handler's", "world", greedy(20))
    inner, called = getattr(llm.scheduler, method), []

    def closes(*args):
        result = inner(*args)
        if not called:
            called.append(len(llm.requests))
            iterator.close()
            llm.abort_request("its handler's")
            assert len(llm.requests) == called[0], "not in the middle of the step"
        return result

    monkeypatch.setattr(llm.scheduler, method, closes)
    assert tokens(run(llm, ["Hello"], greedy(12))) == [expected("Hello", 12)]
    assert called and not llm.requests
    llm.scheduler.check()
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    *_, output = llm.step()
    assert output.request_id == "its handler's" and output.aborted
    assert_serves(llm, expected)


@pytest.mark.parametrize("busy", [False, True])
def test_a_handler_that_comes_while_its_thread_waits(busy):
    """It found its own thread in the doorway, a lock that wasn't reentrant: both waited for ever."""
    engine, ran, held = SimpleNamespace(lock=Turns()), [], threading.Event()

    @in_turn
    def method(engine, name):
        ran.append(name)

    def holds(engine) -> None:
        with engine.lock:
            held.set()
            time.sleep(0.3)

    previous = signal.signal(signal.SIGALRM, lambda *_: engine.lock.run(
        lambda: method(engine, "handler")))
    thread = threading.Thread(target=in_turn(holds) if busy else holds, args=(engine,))
    try:
        thread.start()
        assert held.wait(60)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        method(engine, "waits")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        thread.join(60)
    assert ran == ["handler", "waits"]


def test_ctrl_c_does_not_lose_what_was_put_off():
    """It is looked at behind every call, so between taking one off the list and calling it, too."""
    engine, ran = SimpleNamespace(lock=Turns()), []

    class Interrupted(deque):
        def popleft(self):
            signal.raise_signal(signal.SIGINT)
            return super().popleft()

    @in_turn
    def method(engine):
        for name in "ab":
            engine.lock.run(lambda name=name: ran.append(name))

    engine.lock.put_off = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        method(engine)
    assert ran == ["a", "b"] and not engine.lock.busy


def test_shutting_down_in_the_middle_of_a_step(qwen3, monkeypatch):
    """As the handler of SIGTERM does it: the step ends, and then the engine does."""
    with make(qwen3) as llm:
        update = llm.scheduler.update

        def ends(*args):
            llm.shutdown()
            assert llm.scheduler is not None
            return update(*args)

        monkeypatch.setattr(llm.scheduler, "update", ends)
        with pytest.raises(RuntimeError, match="shut down"):
            run(llm, "Hello", greedy(8))
        assert llm.scheduler is None


def test_an_output_that_comes_while_the_inbox_is_emptied_stays():
    """The garbage collector may close a stream there, whose end takes the tokens of a step in
    flight into account: others' outputs were deleted unseen, and their stream waited for ever."""
    class Inbox(list):
        def __getitem__(self, key):
            found = super().__getitem__(key)
            if late:
                self.append(late.pop())
            return found

    late = ["late"]
    inbox = Inbox(["early"])
    assert take_all(inbox) == ["early"] and inbox == ["late"]
    assert take_all(inbox) == ["late"] and not inbox


def test_what_was_put_off_fails_for_itself(capsys):
    """Whoever gives the lock back has nothing to do with it; and it runs once, at the very end."""
    engine, ran = SimpleNamespace(lock=Turns()), []

    @in_turn
    def inner(engine):
        engine.lock.run(lambda: ran.append(1))
        engine.lock.run(lambda: 1 / 0)
        engine.lock.run(lambda: ran.append(2))

    @in_turn
    def outer(engine):
        inner(engine)
        assert not ran
        return "its own result"

    assert outer(engine) == "its own result"
    assert ran == [1, 2] and "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), engine.lock:  # within none of them
        engine.lock.run(lambda: 1 / 0)


def test_nobody_waits_for_ever_while_another_thread_steps():
    """A plain lock was taken again by the thread that had just given it back, up to a thousand
    times: whoever wanted to shut down, abort or add a request waited until all was generated."""
    turns, num_steps, done = Turns(), 0, False

    def steps() -> None:
        nonlocal num_steps
        while not done and num_steps < 2000:
            with turns, turns:  # like `step` in `generate`: once more inside is free
                num_steps += 1
                time.sleep(0.001)

    thread = threading.Thread(target=steps)
    thread.start()
    for _ in range(50):
        with turns:
            pass
    done = True
    thread.join(60)
    assert num_steps < 1000, "each of the 50 should have waited for a step or two"


def test_a_bad_word_that_is_no_text_is_refused(llm):
    with pytest.raises(ValueError, match="bad_words=.*no valid text"):
        run(llm, "x", SamplingParams(bad_words=["\ud800"]))


def test_a_tokenizer_that_fails_at_an_abort_leaves_nothing_running(llm, monkeypatch):
    """The request was forgotten first and its text made next: where that failed, its sequences went
    on without anybody, and the next step ended in a KeyError."""
    llm.add_request("gone", [1, 2, 3], SamplingParams(n=2, seed=1, max_tokens=20))
    llm.step()
    monkeypatch.setattr(llm.requests["gone"], "flush", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.abort_request("gone")
    assert llm.scheduler.num_running == 0
    while llm.has_unfinished_requests():  # the step in flight
        llm.step()
    blocks = llm.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
    output, = run(llm, [[5, 6]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("how", ["by hand", "a stream that is closed"])
def test_a_tokenizer_that_fails_at_an_abort_leaves_the_others_theirs(llm, expected, monkeypatch,
                                                                     how):
    """Its own request has ended and has an output all the same; those behind it are aborted, too,
    and the error is raised at the end. They ran on without anybody."""
    flush, ended = Detokenizer.flush, []

    def picky(self):
        if self.params.seed == 13:
            raise RuntimeError("no such token")
        return flush(self)

    monkeypatch.setattr(Detokenizer, "flush", picky)
    monkeypatch.setattr(llm.metrics, "ended", ended.extend)
    params = [greedy(20, seed=13), greedy(20)]
    if how == "by hand":
        for name, param in zip("ab", params):
            llm.add_request(name, "Hello", param)
        llm.step()
        with pytest.raises(RuntimeError, match="no such token"):
            llm.abort_request(["a", "b"])
        assert {out.request_id: out.aborted for out in llm.step()} == {"a": True, "b": True}
    else:
        iterator = llm.stream(["Hello", "Hello"], params)
        next(iterator)
        with pytest.raises(RuntimeError, match="no such token"):
            iterator.close()
    assert len(ended) == 2 and not llm.requests
    blocks = llm.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
    assert_serves(llm, expected)
