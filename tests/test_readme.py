"""The README tells the truth: its commands, tables, printed output and names are checked here."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import benchmark
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from nanoserve import LLM, EngineConfig, SamplingParams, sequence
from nanoserve.checkpoint.model_config import FAMILIES
from nanoserve.tools import bookkeeping, house

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(marker: str, start: int = 0) -> str:
    """The content of the first fenced block behind `marker`."""
    at = README.index(marker, start)
    return re.search(r"^```\w*\n(.*?)^```", README[at:], re.S | re.M)[1]


def run(*command: str) -> str:
    # On the CPU, as in the README: a GPU may round the example's text into another one. As a user
    # runs it, without an audit after every step.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NANOSERVE_CHECK": ""}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                            encoding="utf-8", env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_two_commands_are_those_that_ci_runs():
    script = (ROOT / ".ci" / "run").read_text()
    names = re.search(r"for name in (.*); do", script)[1].split()
    assert [block_after(f"<!-- ci: {name} -->").strip() for name in names] == [
        "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && python example.py",
        'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[test]" && '
        "python -m pytest",
    ]


def test_the_example_prints_what_the_readme_shows():
    code = block_after("\n```python")
    assert len(code.strip().splitlines()) == 5
    assert run("-c", code).strip() == block_after("<!-- printed by the example above -->").strip()


def test_the_pooling_example_prints_what_the_readme_shows():
    code = block_after("\n```python", README.index("## Pooling"))
    assert run("-c", code) == block_after("<!-- printed by the pooling example -->")


def test_the_speculative_example_prints_what_the_readme_shows():
    code = block_after("\n```python", README.index("## Speculative decoding"))
    assert run("-c", code) == block_after("<!-- printed by the speculative example -->")


def test_the_step_trace_is_real():
    shown = block_after("<!-- printed by: python -m nanoserve.tools.trace -->")
    assert run("-m", "nanoserve.tools.trace") == shown


def test_the_parity_matrix_is_real():
    shown = block_after("<!-- printed by: python -m nanoserve.tools.verify -->")
    command = re.search(r"`python (-m nanoserve.tools.verify nanoserve/.*?)`", README)[1]
    assert run(*command.split()) == shown


def napkins() -> list[tuple[str, list[float], float, int]]:
    """(words, the numbers of the left side, result of the line, decimals) of every line."""
    lines = []
    for at in re.finditer("<!-- napkin -->", README):
        for line in block_after("<!-- napkin -->", at.start()).strip().splitlines():
            words, right = line[16:].split(" = ")
            number = right.split()[0]
            lines.append((line, words, float(number.replace(",", "")),
                          len(number.partition(".")[2])))
    return lines


def numbers_in(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_napkins_are_right():
    """Each line is worked out from left to right; what is printed is that, rounded."""
    lines = napkins()
    assert len(lines) == 9
    for line, words, result, decimals in lines:
        numbers, signs = numbers_in(words), re.findall(" ([×/]) ", words)
        value = numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            value = value * number if sign == "×" else value / number
        assert round(value, decimals) == result, f"{line}: {value}"
    assert round(989 / 4800 * 1000) == 206 and "989 / 4,800 × 1,000 = 206 tokens" in README


def test_the_napkins_are_about_the_real_thing():
    """The bundled model's line is what its engine allocates; a gigabyte's is how the engine counts;
    and the parameters are those of the model that transformers makes from Qwen3-0.6B's sizes."""
    lines = [(numbers_in(words), result) for _, words, result, _ in napkins()]
    with LLM(dtype="float32", kv_cache_memory_bytes=2 ** 24) as llm:
        c = llm.model_config
        assert lines[1] == ([2, c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 4],
                            llm.runner.block_bytes / 16)
        assert llm.scheduler.blocks.num_blocks == int(2 ** 24 / lines[1][1] / 16)
    _, layers, kv_heads, head_dim, _ = map(int, lines[0][0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
            num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim,
            tie_word_embeddings=True))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,}\nparameters" in README or f"{count:,} parameters" in README
    assert round(count / 1e6, 2) == lines[4][0][0] and round(count / 1e9, 5) == lines[8][0][2]
    assert lines[6][0][2] == lines[0][1] / 1e6


def test_every_file_has_its_counterpart_in_vllm():
    table = README[README.index("<!-- vllm -->"):].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)` \| (.*?) \|$", table, re.M)
    files = {file.name for file in house.read_house() if file.room not in house.ANNEXES}
    assert {name for name, _ in rows} >= files
    assert all(re.match(r"`vllm/[\w/]+(\.py|/)`", paths) for _, paths in rows)


def test_the_summary_line_looks_as_shown(capsys):
    [shown] = re.findall(r"^nanoserve: \d+ requests? in .*$", README, re.M)
    with LLM() as llm:
        capsys.readouterr()
        llm.generate(["Once", "The"], SamplingParams(max_tokens=3, ignore_eos=True),
                     use_tqdm=False, summarize=True)
    real = capsys.readouterr().err.splitlines()[0]

    def shape(line: str) -> str:
        return re.sub(r"\bm?s\b", "s", re.sub(r"\d[\d,.]*", "0", line))

    assert shape(real) == shape(shown)


def test_the_pictures_are_there_and_small():
    for name in re.findall(r'(?:src|srcset)="(.*?)"', README):
        assert (ROOT / name).read_bytes()[:4] == b"\x89PNG"
        assert (ROOT / name).stat().st_size < 200_000


def test_the_families_are_those_that_can_be_read():
    assert re.findall(r"^\| `(\w+For\w+)` \|", README, re.M) == list(FAMILIES)


def test_the_map_lists_every_file_and_what_it_teaches():
    """All but the numbers of lines, which a command writes and which may be those of last week."""
    shown = README.split("<!-- printed by: python -m nanoserve.tools.house --map -->")[1]
    shown = shown.split("<!-- end")[0].strip()
    number = re.compile(r"\| \d+ \|")
    assert number.sub("", shown) == number.sub("", house.readme_map(house.read_house()))


def test_the_options_are_all_there_with_their_defaults():
    listed = re.search(r"Options, with their defaults: (.*?`)\.", README, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default!r}`" for f in fields(EngineConfig) if f.name != "model")


def test_the_sampling_controls_are_all_there_with_their_defaults():
    listed = re.search(r"`SamplingParams`, with their defaults: (.*?`)\.", README, re.S)[1]
    assert re.sub(r"\s+", " ", listed) == ", ".join(
        f"`{f.name}={f.default if f.name == 'output_kind' else repr(f.default)}`"
        for f in fields(SamplingParams))


def test_the_benchmark_tables_are_what_was_measured():
    """No figure in them is typed by hand."""
    shown = README.split(benchmark.BEGIN)[1].split(benchmark.END)[0]
    data = json.loads(benchmark.DATA.read_text()) if benchmark.DATA.exists() else {}
    assert shown == benchmark.render(data)


def test_the_bookkeeping_table_has_the_cases_that_the_command_measures():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \|(?: [\d.,]+ \|){4}$", README, re.M)
    assert [tuple(int(n.replace(",", "")) for n in row) for row in rows] == bookkeeping.CASES


def test_bookkeeping_can_be_measured():
    """The command's own function runs; what it says about time is not judged here."""
    assert len(bookkeeping.time_bookkeeping(4, 10)) == 3


def test_the_gpu_table_is_not_measured_or_what_was_measured():
    """Every figure is of a committed results.json, which tests/gpu/measure.py wrote on a GPU."""
    pytest.importorskip("triton")
    import measure
    from gpu_report import readme_table

    results = {}
    if measure.RESULTS.exists():
        results = json.loads(measure.RESULTS.read_text())
        assert results["machine"]["device"] != "cpu", "a rehearsal is no measurement"
    shown = README[README.index("<!-- printed by: python tests/gpu/measure.py --readme -->"):]
    assert shown.split("\n", 1)[1].startswith(readme_table(results) + "\n")
    if not results:
        rows = [line.strip("| ").split(" | ") for line in shown.splitlines()[3:]
                if line.startswith("|")]
        assert all(row[2].strip() == row[4].strip() == "not measured" for row in rows[:15])


def test_glossary_words_are_defined_in_the_code():
    table = README[README.index("## Glossary"):README.index("## Licence")]
    words = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert len(words) >= 8
    for word in words:
        assert f"\n    {word} " in sequence.__doc__, f"{word} is not in the glossary of sequence.py"


def test_nothing_names_a_machine_or_a_registry():
    """Files speak of the project alone."""
    tracked = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".md", ".toml", ".json")
               and not {".git", ".venv", "build"} & set(path.relative_to(ROOT).parts)]
    pattern = re.compile(r"(?<![\w.])/(?:root|home|opt|tmp)/\w")
    for path in tracked:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} names the path of a machine: {found[0]}"
