"""What a checkpoint's generation_config.json brings, and what it does not."""

import json

import pytest
import torch
from checkpoints import BOS, END_OF_TURN, EOS
from helpers import write_json
from small_engine import HELLO, copy_of, greedy, make, run, tokens
from transformers import AutoModelForCausalLM

from nanoserve import SamplingParams


def test_default_params_come_from_generation_config(qwen3, tmp_path):
    folder = copy_of(qwen3, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(dict(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=5,
        repetition_penalty=1.3,
        eos_token_id=[EOS, END_OF_TURN], bos_token_id=BOS)))
    llm = make(folder)
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=5, repetition_penalty=1.3)
    assert len(run(llm, "Hello", llm.get_default_sampling_params())[0].outputs[0].token_ids) <= 5
    assert len(run(llm, "Hello")[0].outputs[0].token_ids) <= 5  # no params: the same defaults
    assert len(run(llm, "Hello", greedy(7, ignore_eos=True))[0].outputs[0].token_ids) == 7
    assert make(
        folder, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    write_json(folder / "generation_config.json", temperature=None, top_k=None, top_p=None,
               max_new_tokens=None, repetition_penalty=None)
    assert make(folder).get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("options", [{}, dict(async_scheduling=True)], ids=str)
def test_tokens_that_the_checkpoint_suppresses_never_come(qwen3, tmp_path, expected, options):
    """As transformers' `generate` obeys both entries, whatever a request asks for."""
    folder, free = copy_of(qwen3, tmp_path), expected("Hello")
    entries = dict(suppress_tokens=[free[0], free[1], 10 ** 6], bad_words_ids=[[free[2]], [EOS]])
    write_json(folder / "generation_config.json", **entries, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = model.generate(torch.tensor([HELLO]), do_sample=False,
                          max_new_tokens=8, eos_token_id=10 ** 6)[0, -8:].tolist()
    assert not {*want} & {*free[:3]}
    llm = make(folder, **options)
    for params in (greedy(8, ignore_eos=True), greedy(8, ignore_eos=True, bad_words=["#"])):
        assert tokens(run(llm, [HELLO] * 2, params)) == [want] * 2
    with pytest.raises(ValueError, match="leave no token"):
        run(llm, HELLO, greedy(allowed_token_ids=free[:2]))
    write_json(folder / "generation_config.json", suppress_tokens=[5, 1.5])
    with pytest.raises(ValueError, match="generation_config.json: suppress_tokens .* lists of"):
        make(folder)


def test_entries_of_generation_config_are_applied_or_said(qwen3, tmp_path, capsys):
    """transformers' `generate` obeys all of these, and forbids tokens by some."""
    folder, silent = copy_of(qwen3, tmp_path), dict(
        transformers_version="5.24.0", pad_token_id=0, do_sample=True, num_beams=1, typical_p=1.0,
        encoder_repetition_penalty=1.0, epsilon_cutoff=0.0, no_repeat_ngram_size=0, top_h=None,
        suppress_tokens=[], bad_words_ids=[[4]], cache_implementation="static", max_length=64)
    write_json(folder / "generation_config.json", **silent, min_new_tokens=20, stop_strings=["q"])
    llm = make(folder)
    assert "not applied" not in capsys.readouterr().err
    assert llm.get_default_sampling_params() == SamplingParams(
        min_tokens=20, max_tokens=20, stop=["q"])
    (output,) = run(llm, "Hello")
    assert len(output.outputs[0].token_ids) == 20
    said = dict(begin_suppress_tokens=[3], bad_words_ids=[[4, 5]],
                no_repeat_ngram_size=3, forced_bos_token_id=0, forced_eos_token_id=1, min_length=1,
                encoder_no_repeat_ngram_size=2, typical_p=0.9, epsilon_cutoff=0.1, top_h=0.4,
                max_length=63, do_sample=False, sequence_bias=[[[6], 1.0]], a_new_one={"b": 1})
    write_json(folder / "generation_config.json", **said)
    make(folder)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "not applied" in one]
    assert line == "nanoserve: generation_config.json: not applied: " + ", ".join(
        f"{name}={said[name]!r}" for name in json.loads(
            (folder / "generation_config.json").read_text()) if name in said)


def test_drafts_bring_no_token_that_the_checkpoint_suppresses(qwen3, tmp_path, expected):
    """Of n-grams, which repeat what they have seen. Oracle: the engine without drafts."""
    folder, free = copy_of(qwen3, tmp_path), expected("Hello")
    write_json(folder / "generation_config.json", suppress_tokens=free[:2], eos_token_id=EOS)
    drafts = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))
    plain, guessed = (tokens(run(make(folder, **options), [HELLO] * 2, greedy(8, ignore_eos=True)))
                      for options in ({}, drafts))
    assert plain == guessed and not {*plain[0]} & {*free[:2]}
