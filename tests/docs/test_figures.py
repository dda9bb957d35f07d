"""Figures of the pages: each was measured and is kept, or is worked out again here. And two lists
that hold what the code has, as in test_tables.py, but whose code needs torch."""

import json
import re
from pathlib import Path

import pytest
import torch
from packing import FORMATS
from pages import between, block_after, read, rows_of
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks import structured, tables
from nanoserve import LLM
from nanoserve.llm import BUNDLED_MODEL

PAGE = read("docs/benchmarks.md")
DATA = json.loads(tables.DATA.read_text()) if tables.DATA.exists() else {}


def test_the_tables_are_what_was_measured():
    """No figure in them is typed by hand."""
    assert between(PAGE, tables.BEGIN, tables.END) == tables.render(DATA)
    assert between(read("README.md"), tables.BEGIN, tables.END) == tables.headlines(DATA)


def test_a_gpus_figures_are_those_of_a_gpu_or_not_there():
    pytest.importorskip("triton")
    from benchmarks.gpu import RESULTS, page_table

    page = read("docs/devices.md")
    if not RESULTS.exists():
        assert "no GPU has run it yet" in page
        return
    results = json.loads(RESULTS.read_text())
    assert results["machine"]["device"] != "cpu", "a dry run is no measurement"
    assert page_table(results) in page


def napkins() -> list[tuple[str, str, float, int]]:
    """(the line, its left side, its result, decimals) of every line."""
    lines = []
    for at in re.finditer("<!-- napkin -->", PAGE):
        for line in block_after(PAGE, "<!-- napkin -->", at.start()).strip().splitlines():
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
    assert round(989 / 4800 * 1000) == 206 and "989 / 4,800 × 1,000 = 206 tokens" in PAGE


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
    assert re.search(rf"{count:,}\sparameters", PAGE)
    assert round(count / 1e6, 2) == lines[4][0][0] and round(count / 1e9, 5) == lines[8][0][2]
    assert lines[6][0][2] == lines[0][1] / 1e6


def test_forced_tokens_save_the_steps_that_the_page_shows():
    """The table's last column is time, which the page doesn't show and a test doesn't measure."""
    table = structured.steps_table(str(BUNDLED_MODEL), rounds=0)
    assert "near-tie" not in table
    shown = block_after(
        read("docs/structured.md"), "<!-- printed by: python -m benchmarks.structured")
    assert [line[:-7].rstrip() for line in table.splitlines()] == shown.splitlines()


def test_the_quantised_formats_are_those_that_are_tried():
    page = read("docs/quantization.md")
    table = page[page.index("<!-- formats -->"):page.index("Refused by name")]
    named = [name for row in rows_of(table)[1:] for name in re.findall(r"`(.*?)`", row[0])]
    assert sorted(named) == sorted(FORMATS)


def test_every_endpoint_and_option_of_the_server_is_there():
    pytest.importorskip("fastapi")
    from nanoserve.server import api, cli

    page = read("docs/server.md")
    paths = re.findall(r'@app\.(?:post|get)\("(.*?)"', Path(api.__file__).read_text())
    for path in (*paths, *api.POOLING):
        assert f"{path.replace(':path', '')}`" in page, path
    engine = {cli.option_name(field.name) for field in cli.engine_fields()}
    own = set(re.findall(r'door\.add_argument\("(--[\w-]+)"', Path(cli.__file__).read_text()))
    for option in own - engine - {"--log-level"}:
        assert f"`{option}`" in page, option
