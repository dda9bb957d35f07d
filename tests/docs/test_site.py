"""The rendered site, where the extra `site` is installed: mkdocs finds nothing to complain of."""

import json
import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT

pytest.importorskip("material", reason="it is one of the extra 'site'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder],
                          cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


def html_of(page: str) -> str:
    return "index.html" if page == "README.md" else page.removesuffix(".md") + ".html"


def test_each_page_is_there_and_its_links_lead_to_a_file(site):
    for page in PAGES:
        path = site / html_of(page)
        for link in re.findall(r'(?:href|src|srcset)="([^"#]+)', path.read_text("utf-8")):
            assert "://" in link or (path.parent / link).exists(), f"{page}: {link}"


def test_nothing_is_loaded_from_elsewhere(site):
    for page in PAGES:
        text = (site / html_of(page)).read_text("utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', text), page


def test_the_search_knows_both_languages_and_no_source(site):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert {html_of(page) for page in PAGES} <= {where.partition("#")[0] for where in texts}
    assert any("投机" in text for text in texts.values())
    assert not any(".py.html" in where for where in texts)
