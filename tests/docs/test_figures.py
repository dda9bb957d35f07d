"""Figures of the pages: each was measured and is kept, or is worked out again here. And two lists
that hold what the code has, as in test_tables.py, but whose code needs torch."""

import json
import re
from pathlib import Path

import pytest
from packing import FORMATS
from pages import between, block_after, read, rows_of

from benchmarks import structured, tables
from nanoserve.llm import BUNDLED_MODEL

PAGE = read("docs/benchmarks.md")
DATA = json.loads(tables.DATA.read_text()) if tables.DATA.exists() else {}


def test_the_tables_are_what_was_measured():
    """No figure in them is typed by hand."""
    assert between(PAGE, tables.BEGIN, tables.END) == tables.render(DATA)
    assert between(read("README.md"), tables.BEGIN, tables.END) == tables.headlines(DATA)


def test_a_gpus_figures_are_those_of_a_gpu():
    pytest.importorskip("triton")
    from benchmarks.gpu import RESULTS, page_table
    from benchmarks.gpu_report import published_table

    page = read("docs/devices.md")
    results = json.loads(RESULTS.read_text())
    assert results["machine"]["device"] != "cpu", "a dry run is no measurement"
    assert page_table(results) in page and published_table(results) in page
    runs = [results[f"Qwen3-{model} throughput"] for model in ("0.6B", "8B")]
    for figure in [f"{run['output_tok_per_s']:,.0f}" for run in runs] + [
            f"{run['of_roofline']:.0%}" for run in runs]:
        assert figure in read("README.md"), figure


def test_forced_tokens_save_the_steps_that_the_page_shows():
    """The table's last column is time, which the page doesn't show and a test doesn't measure."""
    table = structured.steps_table(str(BUNDLED_MODEL), rounds=0)
    assert "near-tie" not in table
    shown = block_after(
        read("docs/extras.md"), "<!-- printed by: python -m benchmarks.structured")
    assert [line[:-7].rstrip() for line in table.splitlines()] == shown.splitlines()


def test_the_quantised_formats_are_those_that_are_tried():
    page = read("docs/extras.md")
    table = page[page.index("<!-- formats -->"):page.index("A checkpoint may mix formats")]
    named = [name for row in rows_of(table)[1:] for name in re.findall(r"`(.*?)`", row[0])]
    assert sorted(named) == sorted(FORMATS)


def test_every_endpoint_and_option_of_the_server_is_there():
    pytest.importorskip("fastapi")
    from nanoserve_extras.server import api, arguments, cli

    page = read("docs/server.md")
    for path in (*api.GETS, *api.POSTS):
        assert f"{path.replace(':path', '')}`" in page, path
    engine = {arguments.option_name(field.name) for field in arguments.engine_fields()}
    own = set(re.findall(r'door\.add_argument\("(--[\w-]+)"', Path(cli.__file__).read_text()))
    for option in own - engine - {"--log-level"}:
        assert f"`{option}`" in page, option
