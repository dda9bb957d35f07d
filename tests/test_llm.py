"""The engine around it: the tokenizer, progress, shutting down."""

import sys

import pytest
from small_engine import HELLO, MESSAGES, greedy, make, run, tokens
from tqdm import tqdm

from nanoserve.config import SamplingParams


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
