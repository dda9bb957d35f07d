"""Penalties and constraints in the engine: in every mode, at the edge, and refused.

The oracle is `Naive`, which asks transformers for the logits of the whole text before every single
token and edits them with `plain_edits`. It knows of no batches, blocks or steps.
"""

import re
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import EOS, Reference, assert_same_text, byte_tokenizer
from clean_process import needs_extras
from engine_workloads import ByCalls, depends_on_all_before
from helpers import watch_steps
from plain_sampling import plain_edits
from small_engine import drain_through, lose_steps

from nanoserve import LLM, RequestOutputKind, SamplingParams

# ------------------------------------------------------- the engine, in every mode

MAX_TOKENS = 16
PROMPT = [10, 20, 30, 20, 10, 30, 30] + list(range(40, 60))


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**dict(temperature=0, max_tokens=MAX_TOKENS) | fields)


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


LETTERS = ids_of("abcdefghijklmnopqrstuvwxyz")
A, B = LETTERS[:2]
ASCII = ids_of("".join(map(chr, range(33, 127))))


class Naive:
    """Greedy text by the whole forward pass for each token, edited by the plain loop."""

    def __init__(self, folder):
        self.model = Reference(folder).model

    @torch.no_grad()
    def text(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
        output, gaps, late = [], [], [EOS, *params.stop_token_ids]
        words = [ids_of(word.lstrip()) for word in params.bad_words or []]
        while len(output) < params.max_tokens:
            logits = self.model(torch.tensor([prompt + output])).logits[0, -1].numpy()
            row = plain_edits(logits, params, prompt, output, late, words)
            best = np.sort(row)[::-1]
            gaps.append(float(best[0] - best[1]))
            output.append(int(row.argmax()))
            if output[-1] in params.stop_token_ids or output[-1] == EOS and not params.ignore_eos:
                break
        return output, gaps


@pytest.fixture(scope="module")
def naive(qwen3) -> Naive:
    return Naive(qwen3)


@pytest.fixture(scope="module")
def cases(naive) -> list[tuple[SamplingParams, list[int], list[float]]]:
    """Requests with and without controls, and what the naive loop says of each."""
    plain, _ = naive.text(PROMPT, greedy())
    said = [TOKENIZER.decode(token) for token in plain if token in ASCII]
    in_letters, _ = naive.text(PROMPT, greedy(allowed_token_ids=LETTERS))
    asked = [
        greedy(), greedy(repetition_penalty=1.3), greedy(repetition_penalty=.7),
        greedy(frequency_penalty=1.5), greedy(presence_penalty=2.0), greedy(presence_penalty=-1.0),
        greedy(repetition_penalty=1.5, frequency_penalty=.5, presence_penalty=.5),
        greedy(logit_bias={plain[0]: -100, plain[3]: 3.0, 99: 2.5}),
        greedy(logit_bias={77: 100}, repetition_penalty=2.0),
        greedy(allowed_token_ids=list(range(60, 70)), frequency_penalty=2.0),
        greedy(stop_token_ids=plain[1:3]), greedy(stop_token_ids=plain[1:3], min_tokens=5),
        greedy(stop_token_ids=plain[1:3], min_tokens=3, ignore_eos=True, presence_penalty=.7),
        greedy(bad_words=said),
        greedy(bad_words=[TOKENIZER.decode(in_letters[:3]), "abc"], allowed_token_ids=LETTERS),
        greedy(logit_bias={EOS: 100}, min_tokens=7),
        greedy(logits_processors=[depends_on_all_before], presence_penalty=1.0),
        greedy(logits_processors=[ByCalls, depends_on_all_before]),
    ]
    made = [(params, *naive.text(PROMPT, params)) for params in asked]
    texts = {tuple(text) for _, text, _ in made}
    assert len(texts) >= 13, "most controls must make a difference"
    return made


MODES = {
    "plain": dict(),
    "chunks": dict(max_num_batched_tokens=16, max_num_seqs=16),
    "overlap": dict(async_scheduling=True),
    "blocks of 3, no cache": dict(block_size=3, num_gpu_blocks_override=300,
                                  enable_prefix_caching=False),
    "a tiny cache": dict(num_gpu_blocks_override=9, max_num_batched_tokens=40),
    "a tiny cache, chunks, overlap": dict(num_gpu_blocks_override=9, max_num_batched_tokens=16,
                                         max_num_seqs=8, async_scheduling=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_controls_equal_the_naive_loop(qwen3, cases, mode):
    """All of them in one engine, each with its own controls: none knows of the others."""
    llm = LLM(qwen3, dtype="float32", device="cpu",
              **dict(num_gpu_blocks_override=64) | MODES[mode])
    steps = watch_steps(llm)
    outs = llm.generate([PROMPT] * len(cases), [params for params, _, _ in cases], use_tqdm=False)
    for out, (params, text, gaps) in zip(outs, cases, strict=True):
        assert_same_text(out.outputs[0].token_ids, text, gaps, f"{mode}, {params}")
    assert any(step.preempted for step in steps) == ("tiny cache" in mode)
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def test_who_waits_for_the_last_token_and_who_does_not(qwen3):
    """With overlap, a plain row samples in every step; a row with a penalty in every second one,
    because its next token depends on one that the host has not seen. min_tokens is only a count."""
    llm = LLM(qwen3, num_gpu_blocks_override=64, async_scheduling=True)
    for name, kinds in dict(plain={}, late=dict(min_tokens=8), biased=dict(logit_bias={5: 1}),
                            penalty=dict(presence_penalty=1), word=dict(bad_words=["ab"])).items():
        llm.add_request(name, [1, 2, 3], greedy(max_tokens=8, ignore_eos=True, **kinds))
    rows = watch_steps(llm)
    while llm.has_unfinished_requests():
        llm.step()
    sampled_in = {name: [step.index for step in rows for seq in step.sampling if seq.name == name]
                  for name in ("plain", "late", "biased", "penalty", "word")}
    assert sampled_in["plain"] == sampled_in["late"] == sampled_in["biased"] == list(range(8))
    assert sampled_in["penalty"] == sampled_in["word"] == list(range(0, 16, 2))


@pytest.fixture(scope="module")
def llm(qwen3) -> LLM:
    return LLM(qwen3, dtype="float32", num_gpu_blocks_override=64)


def run(llm: LLM, params: SamplingParams, prompt=PROMPT):
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


# ----------------------------------------------------------------- bad words


def test_a_word_that_is_another_token_behind_a_space():
    """The bundled model writes "was" as two tokens at the start of a text and as one behind a
    space. vLLM bans the second only where it has as many tokens as the first, so here " was" would
    come; it must not, in any spelling of the request."""
    llm = LLM(num_gpu_blocks_override=64)
    encode = llm.tokenizer.encode
    words = ["was", "Prince", "delighted"]
    assert len(encode("was")) == 2 and len(encode(" was")) == 1
    banned = [encode(space + word) for word in words for space in ("", " ")]

    def said(out) -> list[str]:
        ids = out.token_ids
        found = [word for word in words if re.search(rf"\b{word}\b", out.text)]
        return found + [word for word in banned for i in range(len(ids))
                        if ids[i:i + len(word)] == word]

    assert {*words} <= {*map(str, said(run(llm, greedy(max_tokens=60), "Once upon a time")))}
    for spelled in (words, [" " + word for word in words]):
        params = [greedy(max_tokens=60, bad_words=spelled), *(
            SamplingParams(temperature=1.2, seed=seed, max_tokens=60, bad_words=spelled)
            for seed in range(4))]
        outs = llm.generate(["Once upon a time the Prince was"] * 5, params, use_tqdm=False)
        assert [said(out.outputs[0]) for out in outs] == [[]] * 5
        assert all(len(out.outputs[0].text) > 100 for out in outs)


# ---------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(("stop", "min_tokens", "text", "num_tokens"), [
    ("ab", 0, "", 2), ("ab", 1, "", 2),  # it begins within the first token, and ends behind
    ("ab", 2, "ab", 4), ("ab", 7, "ababcd", 8), ("ab", 8, "ababcdab", 10),
    ("cd", 3, "abab", 6), ("cd", 6, "ababcdabababababab", 18),
    ("dabab", 9, "ababc", 10), ("dabab", 10, "ababcdabababababab", 18),
], ids=str)
def test_stop_strings_are_not_looked_for_before_min_tokens(
        llm, say, stop, min_tokens, text, num_tokens, kind):
    """vLLM's rule: a stop string may begin within the first min_tokens tokens, but not end there.
    The model says ab ab cd ab ab ..., one letter a token: 18 of them."""
    say("ababcdabababababab")
    params = greedy(max_tokens=18, stop=[stop], min_tokens=min_tokens, output_kind=kind)
    outs = [out.outputs[0] for out in llm.stream([PROMPT], params)]
    shown = "".join(o.text for o in outs) if kind is RequestOutputKind.DELTA else outs[-1].text
    assert shown == text
    count = sum(len(o.token_ids) for o in outs) if kind is RequestOutputKind.DELTA else len(
        outs[-1].token_ids)
    assert count == num_tokens


# --------------------------------------------------------------- at the edge

REFUSED = [
    (dict(logit_bias={260: 1.0}), "logit_bias.*260"),
    (dict(allowed_token_ids=[5, 999]), "allowed_token_ids.*999.*0 to 259"),
    (dict(stop_token_ids=[260]), "stop_token_ids.*260"),
    (dict(logprobs=261), "logprobs=261.*at most 260"),
    (dict(prompt_logprobs=1000), "prompt_logprobs=1000.*at most 260"),
    (dict(allowed_token_ids=[EOS], min_tokens=1), r"allowed_token_ids=\[257\].*min_tokens=1"),
    (dict(allowed_token_ids=[EOS, 5], stop_token_ids=[5], min_tokens=1), "min_tokens=1"),
    (dict(allowed_token_ids=[A], bad_words=["a"]), r"bad_words=\['a'\]"),
    (dict(allowed_token_ids=[A, B], bad_words=["ab", "ba"]), "no token"),
    (dict(allowed_token_ids=[*LETTERS, EOS], bad_words=[chr(i) for i in range(97, 123)],
          min_tokens=9), "no token"),
    (dict(stop_token_ids=list(range(260)), min_tokens=1), "min_tokens=1"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_before_any_work_starts(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT], greedy(**arguments), use_tqdm=False)
    assert not llm.requests


@pytest.mark.parametrize("arguments", [
    dict(logit_bias={259: 1.0}), dict(allowed_token_ids=[259]), dict(stop_token_ids=[259]),
    dict(logprobs=260), dict(prompt_logprobs=260), dict(allowed_token_ids=[EOS, 5], min_tokens=1),
    dict(allowed_token_ids=[EOS]), dict(allowed_token_ids=[A, B], bad_words=["ab"]),
    dict(allowed_token_ids=[A], bad_words=["xa"]),  # x is not allowed, so the word never begins
    dict(allowed_token_ids=np.array([5, 5, 6])), dict(logit_bias={np.int64(5): np.float64(2)}),
    dict(stop_token_ids=list(range(259)), min_tokens=1, ignore_eos=True),
], ids=str)
def test_what_is_just_possible_is_accepted(llm, arguments):
    assert run(llm, greedy(**arguments)).token_ids


def test_an_end_beyond_the_vocabulary_forbids_nothing(llm, qwen3):
    """Some configs name one, and min_tokens forbids all ends of a text."""
    params = greedy(logit_bias={EOS: 100}, min_tokens=3)
    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=16,
             hf_overrides=dict(eos_token_id=[EOS, 260, 999])) as other:
        assert run(other, params).token_ids == run(llm, params).token_ids


def test_bad_words_need_a_tokenizer(qwen3):
    llm = LLM(qwen3, num_gpu_blocks_override=16, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"bad_words=\['word'\].*tokenizer"):
        llm.generate([PROMPT], greedy(bad_words=["word"]), use_tqdm=False)
    assert run(llm, greedy(bad_words=[])).token_ids


KINDS = pytest.mark.parametrize("options", [
    dict(), dict(tensor_parallel_size=2), dict(async_scheduling=True),
    pytest.param(dict(pipeline_parallel_size=2), marks=needs_extras),
    pytest.param(dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
                 marks=needs_extras)], ids=str)


@KINDS
def test_each_sample_has_an_object_of_its_own(ranks_in_threads, qwen3, options):
    """Also beside other prompts, preempted, and where steps are lost whose calls were made. One
    object for all would be called by all."""
    def texts(llm, *processors) -> list[list[list[int]]]:
        for name in "ab":
            llm.add_request(name, [*PROMPT, 5 + ord(name)], SamplingParams(
                seed=1, n=3, max_tokens=12, top_k=3, logits_processors=[*processors]))
        outs, lost = drain_through(llm, RuntimeError, llm.scheduler.check)
        return [[sample.token_ids for sample in outs[name].outputs] for name in "ab"], lost

    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=12, max_num_batched_tokens=16,
             max_num_seqs=6, **options) as llm:
        expected, _ = texts(llm, ByCalls.pure)
        steps = watch_steps(llm)
        assert texts(llm, ByCalls) == (expected, 0)
        lose_steps(llm, every=4)
        again, lost = texts(llm, partial(ByCalls, factor=1))
        assert again == expected and lost > 2
        assert any(step.preempted for step in steps)


def test_an_object_that_cannot_be_copied_ends_its_request_alone(llm):
    class Generates:
        def __init__(self):
            self.numbers = (i for i in range(9))

        def __call__(self, token_ids, logits):
            return logits

    end = run(llm, greedy(logits_processors=[Generates]))
    assert end.finish_reason == "abort" and "Generates can't be copied (cannot pickle" in (
        end.stop_reason) and "__deepcopy__" in end.stop_reason


@KINDS
def test_an_error_in_a_requests_own_function_ends_this_request_alone(ranks_in_threads, qwen3,
                                                                     capsys, options):
    """It keeps the tokens that it had, and says why it ended. Another one's text is what it was,
    also where the last request has failed, and no rank and no step in flight is lost."""
    def fails_later(token_ids, logits):
        return logits if len(token_ids) < 2 else 1 / 0

    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=16, **options) as llm:
        expected = run(llm, greedy()).token_ids
        params = [greedy(logits_processors=[fails_later], temperature=1, top_k=1, n=2), greedy()]
        for count in (1, 2):
            failed, *others = llm.generate([PROMPT] * count, params[:count], use_tqdm=False)
            for sample in failed.outputs:
                assert (sample.token_ids, sample.finish_reason) == (expected[:2], "abort")
                assert sample.stop_reason == (
                    f"request {failed.request_id}: logits_processors: "
                    "ZeroDivisionError('division by zero')")
            assert sample.stop_reason in capsys.readouterr().err
            assert [out.outputs[0].token_ids for out in others] == [expected] * (count - 1)
            assert run(llm, greedy()).token_ids == expected
        llm.scheduler.check()
