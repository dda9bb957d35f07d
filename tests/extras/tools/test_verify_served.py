"""The second table of verify: what it counts, by hand; that it passes right engines and convicts
wrong ones; and what it reads of a text."""

from math import exp, log

import pytest
import torch
from checkpoints import Reference
from test_verify import use_modes

from nanoserve import LLM
from nanoserve.detokenizer import load_tokenizer
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.tools import verify, verify_served
from nanoserve_extras.tools.verify_served import Answers, Kind, Served, read_windows


def table(capsys, *argv) -> tuple[int, dict[str, list[str]], str]:
    """Exit code, {kind: its cells}, the last line."""
    code = verify.main([str(arg) for arg in argv])
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index(next(line for line in lines if line.startswith("served as"))) + 1:-2]
    assert all(len(line) <= 100 for line in rows)
    return code, {line[:24].strip(): line[24:].split() for line in rows}, lines[-1]


def test_what_is_counted():
    """Of two positions one flips: 0.1 goes from token 8 to token 9. At the other 0.1 goes from 5
    to 6, and 0.1 to a token which is too unlikely to be listed."""
    theirs = Answers([log(0.5), log(0.4)], [{5: 0.6, 6: 0.3}, {8: 0.5, 9: 0.4}])
    ours = Answers([log(0.5), log(0.5)], [{5: 0.4, 6: 0.4}, {9: 0.5, 8: 0.4}])
    row = Served.beside(Kind("mine", 0.13), ours, theirs)
    assert (row.num_tokens, row.flips) == (2, 0.5)
    assert row.moved == pytest.approx((0.15 + 0.1) / 2)
    assert row.perplexity == pytest.approx((1 / (0.5 * 0.5)) ** 0.5)
    assert row.change == pytest.approx((0.4 / 0.5) ** 0.5 - 1)
    assert not row.is_wrong and Served.beside(Kind("mine", 0.12), ours, theirs).is_wrong
    nan = float("nan")
    assert Served.beside(Kind("broken", 1.0), Answers([nan] * 2, [{5: nan}] * 2), theirs).is_wrong


def test_right_engines_are_normal_and_their_numbers_are_a_loop_s(capsys, tmp_path):
    """The oracle is another forward pass for each position."""
    file = tmp_path / "text.txt"
    file.write_text("There was once a king who had three daughters, and 🙂.", encoding="utf-8")
    code, rows, last = table(capsys, "storyteller", "--text", file)
    assert code == 0 and last.endswith("none of 5 kinds of weights move more than is normal")
    assert list(rows) == ["transformers, float32", "float32", "auto", "int8", "int4", "KV int8"]
    ids = load_tokenizer(BUNDLED_MODEL).encode(file.read_text(encoding="utf-8"))
    model, logprobs = Reference(BUNDLED_MODEL).model, []
    with torch.inference_mode():
        for end in range(1, len(ids)):
            logits = model(torch.tensor([ids[:end]])).logits[0, -1]
            logprobs.append(float(logits.log_softmax(-1)[ids[end]]))
    perplexity = exp(-sum(logprobs) / len(logprobs))
    for kind in ("transformers, float32", "float32"):
        tokens, flips, moved, found, change, *_ = rows[kind]
        assert (tokens, flips, moved, change) == (str(len(ids) - 1), "0.00%", "0.00%", "+0.00%")
        assert float(found.replace(",", "")) == pytest.approx(perplexity, rel=1e-5)
    assert rows["int4"][2] > rows["int8"][2] > "0.00%"  # as coarse as they are


def test_a_kind_that_is_wrong_is_named_and_one_that_is_refused_says_why(
        capsys, monkeypatch, qwen3):
    """In one kind the logits are twice as large; another one does not exist."""
    class Sabotaged(LLM):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            if options.get("quantization") == "int8":
                head = self.runner.model.compute_logits
                self.runner.model.compute_logits = lambda hidden: 2 * head(hidden)

    use_modes(monkeypatch, "batched")
    monkeypatch.setattr(verify_served, "LLM", Sabotaged)
    monkeypatch.setattr(verify_served, "KINDS", [
        *verify_served.KINDS[:3], Kind("fp8", 0.1, dict(kv_cache_dtype="fp8"))])
    code, rows, last = table(capsys, qwen3, "--num-prompts", 4, "--max-tokens", 4)
    assert code == 1 and last.endswith("1 of 4 kinds of weights move more than is normal")
    assert rows["int8"][-1] == "WRONG" and "WRONG" not in rows["auto"]
    assert " ".join(rows["fp8"]).startswith("not served: kv_cache_dtype")


def test_windows_of_a_text(tmp_path):
    """Each begins as a prompt does; a rest of one token has nothing to predict."""
    class WithBOS:
        def encode(self, text, add_special_tokens=True):
            return [1] * add_special_tokens + [ord(letter) for letter in text]

    file = tmp_path / "text.txt"
    file.write_text("abcdefg")
    a, b, c, d, e, f, g = map(ord, "abcdefg")
    assert read_windows(file, WithBOS(), 9, 4) == [[1, a, b, c], [1, d, e, f], [1, g]]
    assert read_windows(file, WithBOS(), 2, 4) == [[1, a, b, c], [1, d, e, f]]
    assert read_windows(file, None, 9, 3) == [[a, b, c], [d, e, f]]
    for content, words in ((b"", "at least two"), (b"a", "at least two"), (b"\xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_windows(file, None, 9, 3)
