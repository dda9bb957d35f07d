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

from nanoserve.config import SamplingParams


def test_default_params_come_from_generation_config(qwen3, tmp_path):
    folder = copy_of(qwen3, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(dict(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=5,
        repetition_penalty=1.3,
        eos_token_id=[EOS, END_OF_TURN], bos_token_id=BOS)))
    llm = make(folder)
    assert llm.inputs.default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, max_tokens=5, repetition_penalty=1.3)
    assert len(run(llm, "Hello", llm.inputs.default_sampling_params())[0].outputs[0].token_ids) <= 5
    assert len(run(llm, "Hello")[0].outputs[0].token_ids) <= 5  # no params: the same defaults
    assert len(run(llm, "Hello", greedy(7, ignore_eos=True))[0].outputs[0].token_ids) == 7
    assert make(
        folder, generation_config="vllm").inputs.default_sampling_params() == SamplingParams()
    write_json(folder / "generation_config.json", temperature=None, top_k=None, top_p=None,
               max_new_tokens=None, repetition_penalty=None)
    assert make(folder).inputs.default_sampling_params() == SamplingParams()


def test_lengths_and_stop_strings_come_from_generation_config(qwen3, tmp_path):
    folder = copy_of(qwen3, tmp_path)
    write_json(folder / "generation_config.json", min_new_tokens=20, stop_strings=["q"])
    llm = make(folder)
    assert llm.inputs.default_sampling_params() == SamplingParams(
        min_tokens=20, max_tokens=20, stop=["q"])
    (output,) = run(llm, "Hello")
    assert len(output.outputs[0].token_ids) == 20


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
    with pytest.raises(ValueError, match="leave no token.*generation_config.json its suppress"):
        run(llm, HELLO, greedy(allowed_token_ids=free[:2]))
    write_json(folder / "generation_config.json", suppress_tokens=[5, 1.5])
    with pytest.raises(ValueError, match="generation_config.json: suppress_tokens .* lists of"):
        make(folder)


def test_an_engine_without_a_tokenizer(qwen3, expected):
    """Token ids in, token ids out; whatever needs text says why it can't be had."""
    llm = make(qwen3, skip_tokenizer_init=True)
    assert llm.tokenizer is None
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
        llm.generate(["Hello", "world"], greedy())
    shown = capsys.readouterr()
    assert "\r" not in shown.err + shown.out
    (started,) = shown.err.splitlines()
    assert started.startswith("nanoserve: qwen3-sharded, cpu")
