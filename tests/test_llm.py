"""The engine around it: defaults, the tokenizer, progress, shutting down."""

import json
import sys

import pytest
import torch
from checkpoints import BOS, END_OF_TURN, EOS
from helpers import write_json
from small_engine import HELLO, MESSAGES, copy_of, greedy, make, run, tokens
from tqdm import tqdm
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
    assert make(folder, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    write_json(folder / "generation_config.json", temperature=None, top_k=None, top_p=None,
               max_new_tokens=None, repetition_penalty=None)
    assert make(folder).get_default_sampling_params() == SamplingParams()


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


@pytest.mark.parametrize("options", [{}, dict(async_scheduling=True), dict(
    speculative_config=dict(method="ngram", num_speculative_tokens=3))], ids=str)
def test_tokens_that_the_checkpoint_suppresses_never_come(qwen3, tmp_path, expected, options,
                                                          capsys):
    """As transformers' `generate` obeys both entries, whatever a request asks for."""
    folder, free = copy_of(qwen3, tmp_path), expected("Hello")
    entries = dict(suppress_tokens=[free[0], free[1], 10 ** 6], bad_words_ids=[[free[2]], [EOS]])
    write_json(folder / "generation_config.json", **entries, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = model.generate(torch.tensor([HELLO]), do_sample=False,
                          max_new_tokens=8, eos_token_id=10 ** 6)[0, -8:].tolist()
    assert not {*want} & {*free[:3]}
    llm = make(folder, **options)
    assert "not applied" not in capsys.readouterr().err
    for params in (greedy(8, ignore_eos=True), greedy(8, ignore_eos=True, bad_words=["#"])):
        assert tokens(run(llm, [HELLO] * 2, params)) == [want] * 2
    with pytest.raises(ValueError, match="leave no token.*generation_config.json its suppress"):
        run(llm, HELLO, greedy(allowed_token_ids=free[:2]))
    write_json(folder / "generation_config.json", suppress_tokens=[5, 1.5])
    with pytest.raises(ValueError, match="generation_config.json: suppress_tokens .* lists of"):
        make(folder)


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
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="shut down"):
        llm.step()


def test_the_progress_bar(llm, capsys, monkeypatch):
    """Prompts done; on demand nothing at all."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    llm.generate(["Hello", "world"], greedy())
    shown = capsys.readouterr()
    assert "Processed prompts: 100%" in shown.err and "2/2" in shown.err
    llm.generate("Hello", greedy())
    assert "1/1" in capsys.readouterr().err
    llm.generate(["Hello", "world"], greedy(), use_tqdm=False)
    llm.generate([])
    assert capsys.readouterr() == ("", "")
    assert shown.out == ""


def test_a_bar_of_the_callers_own(llm):
    """As in vLLM, `use_tqdm` may be what makes the bar."""
    seen = []

    class Bar(tqdm):
        def update(self, n=1):
            seen.append((self.total, n))

    llm.generate(["Hello", "world"], greedy(), use_tqdm=Bar)
    assert seen == [(2, 1), (2, 1)]


def test_a_log_file_gets_lines_and_no_bars(checkpoints, capsys):
    """Bars draw over themselves with carriage returns, which make a log file hard to read."""
    folder = checkpoints["qwen3-sharded"]
    capsys.readouterr()  # transformers shows bars while it writes the files
    with make(folder) as llm:
        llm.generate(["Hello", "world"], greedy(), summarize=True)
    shown = capsys.readouterr()
    assert "\r" not in shown.err + shown.out
    started, summary = shown.err.splitlines()
    assert started.startswith("nanoserve: qwen3-sharded: Qwen3ForCausalLM by nanoserve, cpu")
    assert summary.startswith("nanoserve: 2 requests in ")
