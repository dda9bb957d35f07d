"""docs/server.md tells the truth: its examples print what it shows, its tables are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, block_after, read, run

pytest.importorskip("fastapi")

PAGE, README = read("docs/server.md"), read("README.md")


def test_the_clients_print_what_the_pages_show():
    """The page's and the README's, against one server."""
    pytest.importorskip("openai")
    process = subprocess.Popen([sys.executable, "-m", "nanoserve", "serve", "--dtype", "float32",
                                "--port", "0"],
                               stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        line = next(line for line in process.stderr if "nanoserve: serving" in line)
        address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        for page in (PAGE, README):
            code = block_after(page, "<!-- client -->").replace("http://127.0.0.1:8000", address)
            shown = block_after(page, "<!-- printed by the client -->")
            assert run("-c", code).strip() == shown.strip()
    finally:
        process.terminate()
        process.communicate()


def test_the_stories_are_those_that_the_page_shows():
    assert run("-c", block_after(PAGE, "<!-- stories -->")) == block_after(
        PAGE, "<!-- printed by the stories -->")


def test_every_endpoint_and_option_is_in_its_table():
    from nanoserve.server import api, cli

    source = Path(api.__file__).read_text()
    for path in re.findall(r'@app\.(?:post|get)\("(.*?)"', source):
        assert f"{path}`" in PAGE, path
    engine = {cli.option_name(field.name) for field in cli.engine_fields()}
    own = set(re.findall(r'door\.add_argument\("(--[\w-]+)"', Path(cli.__file__).read_text()))
    for option in own - engine - {"--log-level"}:
        assert f"`{option}`" in PAGE, option


def test_every_file_of_the_server_is_in_its_table():
    for path in (ROOT / "nanoserve" / "server").iterdir():
        if path.suffix in (".py", ".json") and path.stem != "__init__":
            assert f"`server/{path.name}`" in PAGE, path.name


def test_the_picture_is_there_and_small():
    picture = ROOT / "docs" / re.search(r"\]\((.*?\.png)\)", PAGE)[1]
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 200_000
