"""How texts end, samples of one prompt, priorities, and the prefix cache."""

import shutil

import pytest
import torch
from checkpoints import EOS
from clean_process import EXTRAS, needs_extras
from helpers import write_json
from small_engine import (
    MAX_MODEL_LEN,
    TOKENIZER,
    assert_idle,
    drain,
    greedy,
    ids_of,
    make,
    run,
    tokens,
)

from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.sampler import SamplerOutput

# -------------------------------------------------------------- when it is over


@pytest.mark.parametrize("max_tokens", [50, 51, 1000, None])
def test_a_text_ends_at_the_models_maximum(llm, expected, max_tokens):
    """14 prompt tokens of 64 leave 50, whatever is asked for."""
    prompt = list(range(14))
    [out] = run(llm, prompt, greedy(max_tokens, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == MAX_MODEL_LEN - 14
    assert out.outputs[0].finish_reason == "length"


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
    pytest.param("Hi<|end|>you", dict(stop="<|end|>"), "Hi", 3, ("stop", 258),
                 marks=needs_extras),  # never in the text
    ("Hi<|end|>you", dict(stop="<|end|>", skip_special_tokens=False), "Hi", 3, ("stop", "<|end|>")),
    ("Hi<pad>you", dict(stop=["<|end|>", "y"]), "Hi", 4, ("stop", "y")),
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


@needs_extras
@pytest.mark.parametrize("stop", ["<|end|>\n", "a<pad>", "<s><s>"])
def test_a_stop_string_that_can_not_appear_is_refused(llm, stop):
    """It waited for special tokens in a text that leaves them out, and the model ran on."""
    with pytest.raises(ValueError, match="skip_special_tokens"):
        run(llm, "Say: ", greedy(stop=["ok", stop]))
    run(llm, "Say: ", greedy(stop=["ok", stop], skip_special_tokens=False))


@pytest.mark.parametrize(("config", "generation", "tokenizer", "ends"), [
    (None, None, None, {}), (None, None, "</s>", {257}), (257, None, None, {257}),
    (None, 256, "</s>", {256, 257}), ([5, 258], 256, None, {5, 256, 258}),
    (5, [256, 258], "</s>", {5, 256, 257, 258}), (257, 257, "</s>", {257})], ids=str)
def test_all_files_say_who_ends_a_text_whosever_the_network_is(
        checkpoints, tmp_path, config, generation, tokenizer, ends):
    """Only the tokenizer's EOS stopped generation, while chat models list several ids: their texts
    ran on behind <|eot_id|>. A fine-tuned one's ran on because the base model's
    generation_config.json was asked alone. And where config.json names no EOS, transformers'
    network ended a text at its class's default, ours at the tokenizer's."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["llama3.1"], folder)
    write_json(folder / "config.json", eos_token_id=config)
    write_json(folder / "generation_config.json", eos_token_id=generation)
    write_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    both = [dict(model_impl=whose) for whose in ("nanoserve", "transformers")]
    for options in both if EXTRAS.exists() else [{}]:
        with make(folder, **options) as llm:
            for token in (2, 5, 256, 257, 258):
                [out] = run(llm, [7, 8], greedy(3, logit_bias={token: 100}))
                assert (out.outputs[0].finish_reason == "stop") == (token in ends), (options, token)


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
    """One row: the requests end in the order of priority, then of arrival."""
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
