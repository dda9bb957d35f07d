"""tools/verify.py judges engines: it must pass a right one, and convict each wrong one of what it
did. The wrong ones are the real engine with one fault put in; near-ties are made by hand."""

import shutil

import pytest
import torch
from checkpoints import EOS, Reference
from helpers import write_json
from transformers import AutoModelForImageTextToText

from benchmarks.models import WRAPPINGS
from nanoserve import LLM
from nanoserve.loader import find_model
from nanoserve_extras.tools import verify
from nanoserve_extras.tools.verify import Text, main

MODES = {mode.name: mode for mode in verify.MODES}


def run(capsys, *argv) -> tuple[int, dict[str, dict[str, str]], str]:
    """Returns the exit code, the table as {mode: {column: cell}}, and all of stdout."""
    code = main([str(arg) for arg in argv])
    out = capsys.readouterr().out
    lines = out.splitlines()
    names = lines[0].split()[1:] if lines else []
    rows = {}
    for line in lines[1:]:
        assert len(line) <= 100
        if not line:
            break
        if not line.startswith(" "):
            rows[line[:24].strip()] = row = dict(
                zip(names, line[24:].split(), strict=False)) | {"found": []}
        else:
            row["found"].append(line.strip())
    return code, rows, out


@pytest.fixture(autouse=True)
def no_kinds(monkeypatch):
    """The second table has its own tests: test_verify_served.py."""
    monkeypatch.setattr(verify, "compare_kinds", lambda *args, **options: ())


def use_modes(monkeypatch, *names) -> None:
    monkeypatch.setattr(verify, "MODES", [MODES[name] for name in names])


def sabotage(monkeypatch, fault) -> None:
    """`fault(llm)` is applied to every engine that verify starts."""

    class Sabotaged(LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            fault(self)

    monkeypatch.setattr(verify, "LLM", Sabotaged)


def test_a_right_engine_passes_in_every_mode(capsys, qwen3):
    code, rows, out = run(capsys, qwen3, "--num-prompts", 8, "--max-tokens", 12)
    assert code == 0
    assert list(rows) == list(MODES)
    for name, row in rows.items():
        mode = MODES[name]
        times = mode.n * mode.rounds * (1 + mode.restarts)
        assert row["texts"] == str(8 * times)
        assert int(row["tokens"]) == times * int(rows["alone"]["tokens"])
        assert (row["equal"], row["near-ties"], row["differ"]) == ("all", "0", "0")
        assert bool(int(row["preempted"])) == mode.tiny
        assert not row["found"]
    assert 80 < int(rows["alone"]["tokens"]) <= 8 * 12  # a text or two may end with an EOS
    assert int(rows["prefix-cached"]["cached"]) > 100 and rows["batched"]["cached"] == "0"
    assert int(rows["restarted from disk"]["cached"]) > 100
    assert out.endswith(f"{qwen3}: none of 15 modes differ from transformers; "
                        "near-ties: 0\n")


@pytest.mark.parametrize("dense", [False, True])
def test_the_reference_is_what_generate_writes(qwen3, dense):
    """The plain loop of forward passes against transformers' own `generate`, texts and gaps."""
    reference = Reference(qwen3)
    prompt = verify.read_prompts(verify.PROMPTS, None, 4, 40)[1]
    tokens, expected_gaps = reference.generate(prompt, 12)
    for guess in (tokens, tokens[:5], [*tokens[:3], EOS, 2, 3], [EOS], tokens * 2):
        text, gaps = reference.generate(prompt, 12, guess)  # whatever was guessed
        assert text == tokens and gaps == pytest.approx(expected_gaps, abs=1e-4)
    caches = []
    handle = reference.model.register_forward_hook(
        lambda module, args, out: caches.append(out.past_key_values))
    text = verify.write_reference(reference.model, prompt, (EOS,), 12, 0.5, dense)
    handle.remove()
    assert all((cache is None) == dense for cache in caches)
    assert text.token_ids == tokens
    assert [sorted(g.values())[1] for g in text.gaps] == pytest.approx(expected_gaps, abs=1e-4)
    assert all(gaps[token] == 0 for gaps, token in zip(text.gaps, tokens, strict=True))
    ended = verify.write_reference(reference.model, prompt, (EOS, tokens[3]), 12, 0.5)
    assert ended.token_ids == tokens[:tokens.index(tokens[3]) + 1]


def test_texts_that_end_and_a_generation_config_full_of_options(capsys, monkeypatch, qwen3,
                                                                tmp_path):
    """`generate` would have obeyed the penalties, and transformers' "greedy" text would be
    another one than the engine's."""
    use_modes(monkeypatch, "batched", "overlap")
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    write_json(folder / "generation_config.json", repetition_penalty=5.0, temperature=0.1,
               forced_eos_token_id=EOS, eos_token_id=list(range(0, 256, 16)))
    code, rows, _ = run(capsys, folder, "--kernels", "torch")
    assert code == 0
    assert {row["equal"] for row in rows.values()} == {"all"}
    assert 12 < int(rows["batched"]["tokens"]) < 12 * 24


# ------------------------------------------------------------------ wrong engines


def wrong_token(llm: LLM) -> None:
    """With overlap, output token 5 of the third prompt comes out one too high."""
    launch = llm.runner.launch

    def wrong_launch(step):
        output = launch(step)
        for i, seq in enumerate(step.sampling):
            if seq.name == "2" and seq.num_tokens - 1 - seq.num_prompt_tokens == 5:
                with torch.inference_mode():
                    output.token_ids[i] = (output.token_ids[i] + 1) % 256
        return output

    if llm.depth:
        llm.runner.launch = wrong_launch


def test_one_wrong_token_is_named(capsys, monkeypatch, qwen3):
    """With a margin as wide as all logits it is a near-tie, shown and excused."""
    use_modes(monkeypatch, "batched", "overlap", "n=3")
    sabotage(monkeypatch, wrong_token)
    code, rows, out = run(capsys, qwen3, "--num-prompts", 4, "--max-tokens", 8)
    assert code == 1
    assert [row["differ"] for row in rows.values()] == ["0", "1", "0"]
    # Three texts of 8, and 5 tokens of the wrong one before the one that differs.
    assert (rows["overlap"]["tokens"], rows["overlap"]["equal"]) == ("30", "29")
    prompt = verify.read_prompts(
        verify.PROMPTS, LLM(qwen3, num_gpu_blocks_override=4).tokenizer, 4, 248)[2]
    theirs = Reference(qwen3).generate(prompt, 8)[0][5]
    (found,) = rows["overlap"]["found"]
    assert found.startswith(f"prompt 2, token 5: {(theirs + 1) % 256} for {theirs}, gap ")
    assert "1 of 3 modes differ" in out
    code, rows, _ = run(capsys, qwen3, "--num-prompts", 4, "--max-tokens", 8, "--near-tie", 0.99)
    assert code == 0 and (rows["overlap"]["near-ties"], rows["overlap"]["differ"]) == ("1", "0")
    assert "prompt 2, token 5" in rows["overlap"]["found"][0]


def test_a_mode_that_raises_has_failed_and_the_others_go_on(capsys, monkeypatch, qwen3):
    def fault(llm):
        if llm.config.max_num_batched_tokens == 7:
            monkeypatch.setattr(llm.scheduler, "update", lambda *args: 1 / 0)

    use_modes(monkeypatch, "batched", "chunks of 7", "overlap")
    sabotage(monkeypatch, fault)
    code, rows, _ = run(capsys, qwen3, "--num-prompts", 2, "--max-tokens", 4)
    assert code == 1
    assert rows["chunks of 7"]["found"] == ["failed: ZeroDivisionError: division by zero"]
    assert [row["texts"] for row in rows.values()] == ["2", "0", "2"]


# ---------------------------------------------------------------- what is a near-tie

TEXT = Text([1], [5, 6, 7], gaps=[{5: 0.0, 8: 2.0}, {6: 0.0, 9: 3e-5, 8: 1.0}, {7: 0.0, 4: 1.0}],
            near=[1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("ours, num_equal, found, near_tie", [
    ([5, 6, 7], 3, "", False),
    ([5, 9, 3], 1, "token 1: 9 for 6, gap 3.0e-05 (near-ties: up to 1.0e-04)", True),
    ([5, 8, 7], 1, "token 1: 8 for 6, gap 1.0e+00 (near-ties: up to 1.0e-04)", False),
    # Neither of the top two, which are nearly tied: that doesn't excuse a third token.
    ([5, 2, 7], 1, "token 1: 2 for 6, gap 1.0e+00 (near-ties: up to 1.0e-04)", False),
    ([5, 6], 2, "token 2: the end for 7", False),
    ([5, 6, 7, 8], 3, "token 3: 8 for the end", False),
], ids=str)
def test_a_difference_is_judged_by_our_tokens_gap(ours, num_equal, found, near_tie):
    assert TEXT.compare(ours) == (num_equal, found, near_tie)


def test_the_margin_grows_with_the_logits():
    """Rounding errors are relative: at a logit of 30 three times those of 10."""

    class Model:
        device = "cpu"

        def __init__(self, scale):
            self.scale = scale

        def __call__(self, ids, **options):
            logits = self.scale * torch.tensor([[[1.0, 0.5, -2.0, 0.0]]])
            return type("Output", (), dict(logits=logits, past_key_values=None))

    (ten,), (thirty,) = (verify.write_reference(Model(scale), [1], (), 1, 1e-5).near
                         for scale in (5.0, 15.0))
    assert ten == pytest.approx(1e-4) and thirty == pytest.approx(3e-4)


# ----------------------------------------------------------------------- the command


@pytest.mark.parametrize("mode", ["preempted", "offloaded", "restarted from disk"])
def test_a_row_in_which_what_it_is_for_did_not_happen_says_so(capsys, monkeypatch, qwen3, mode):
    """A store that never finds anything passed as one that brings back the right blocks."""
    def fault(llm):
        llm.scheduler.hooks.find[:] = [lambda *args: 0]

    use_modes(monkeypatch, mode)
    sabotage(monkeypatch, fault)
    code, _, out = run(capsys, qwen3, "--num-prompts", 1, "--max-tokens", 4)
    assert code == 0 and f"{mode} (never!)" in out


def test_rows_for_several_ranks(capsys, monkeypatch, qwen3):
    """The option reaches the engines of its rows, and no others."""
    asked = []

    def start(model, tensor_parallel_size, **options):
        asked.append(tensor_parallel_size)
        return LLM(model, **options)

    use_modes(monkeypatch, "alone")
    monkeypatch.setattr(verify, "LLM", start)
    args = verify.EngineArgs
    monkeypatch.setattr(verify, "EngineArgs", lambda model, **options: args(model=model))
    code, rows, _ = run(capsys, qwen3, "--tensor-parallel-size", 2, "--num-prompts", 8,
                        "--max-tokens", 16)
    assert code == 0 and asked == [1, 2, 2, 2, 2, 2, 2, 2]
    assert list(rows) == ["alone", "batched, 2 ranks", "chunked, cached, 2 ranks",
                          "preempted, 2 ranks", "offloaded, 2 ranks", "restarted, 2 ranks",
                          "overlap, 2 ranks"]
    assert int(rows["preempted, 2 ranks"]["preempted"]) > 0
    assert int(rows["restarted, 2 ranks"]["cached"]) > 100


def test_ctrl_c_prints_what_was_compared(capsys, monkeypatch, qwen3):
    def fault(llm):
        if llm.depth:
            monkeypatch.setattr(llm, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    use_modes(monkeypatch, "batched", "overlap", "n=3")
    sabotage(monkeypatch, fault)
    code, rows, _ = run(capsys, qwen3, "--num-prompts", 2, "--max-tokens", 4)
    assert code == 130 and list(rows) == ["batched"]


def test_prompts_from_a_file(capsys, monkeypatch, qwen3, tmp_path):
    use_modes(monkeypatch, "batched")
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\nÜber den Wolken 🙂\n", encoding="utf-8")
    code, rows, _ = run(capsys, qwen3, "--prompts", file, "--max-tokens", 4)
    assert code == 0 and rows["batched"]["tokens"] == "8"
    file.write_text("short\n" + "x" * 260)
    assert main([str(qwen3), "--prompts", str(file)]) == 2
    assert "prompt 1 has 260 tokens, and the model has room for 232" in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    (lambda folder: shutil.rmtree(folder), "is not a local folder"),
    (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    (lambda folder: write_json(folder / "config.json", architectures=["OtherForCausalLM"]),
     "OtherForCausalLM is not supported"),
    (lambda folder: (folder / "model.safetensors").unlink(), "transformers can't load"),
], ids=["no folder", "no config", "architecture", "no weights"])
def test_a_model_that_cant_be_loaded(capsys, qwen3, tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    change(folder)
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert "verify: error: " in captured.err and message in captured.err
    assert captured.out == ""


def test_of_a_model_that_sees_it_says_what_is_not_compared(capsys, tmp_path):
    AutoModelForImageTextToText.from_config(WRAPPINGS["llava"]()).save_pretrained(tmp_path)
    verify.load_reference(tmp_path)
    assert "texts are compared, and no images" in capsys.readouterr().err


def test_without_a_model_it_is_the_bundled_one(monkeypatch):
    """Where the package is installed, and no folder of a clone can be named."""
    asked = []
    monkeypatch.setattr("nanoserve_extras.tools.verify.verify",
                        lambda args: asked.append(args) or [])
    assert main([]) == 0
    assert (find_model(asked[0].model) / "model.safetensors").exists()


@pytest.mark.parametrize("argv", [["--max-tokens", "0"], ["--max-tokens", "256"],
                                  ["--num-prompts", "0"], ["--tensor-parallel-size", "0"]], ids=str)
def test_numbers_that_cant_work(capsys, qwen3, argv):
    assert main([str(qwen3), *argv]) == 2
    assert "at least 1" in capsys.readouterr().err
