"""README, CONTRIBUTING and all pages of docs/: links lead somewhere, and pages are found."""

import re

import pytest
from pages import PAGES, ROOT, read

pytestmark = pytest.mark.floor


def prose(text: str) -> str:
    """Without fenced blocks, where brackets are code and `#` is a comment."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"(.*?)\"", prose(text))
    return [link or source for link, source in found]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page):
    for link in links(read(page)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {link}, which is not there"
        if anchor:
            found = anchors(path.read_text(encoding="utf-8"))
            assert anchor in found, f"{page} links to {link}; headings there: {sorted(found)}"


def test_the_links_are_seen():
    """An expression that finds nothing would pass everything."""
    assert anchors("# A page\n## What's `it`?\n```\n# no\n```\n") == {"a-page", "whats-it"}
    assert links("[a](b.md#c) `x` <img src=\"d.png\">\n```\n[e](f)\n```\n") == ["b.md#c", "d.png"]
    assert len(links(read("README.md"))) > 25


def test_readme_leads_to_every_page():
    """From its section "Where to go"."""
    section = read("README.md").split("\n## Where to go\n")[1].split("\n## ")[0]
    assert sorted(links(section)) == sorted(set(PAGES) - {"README.md"})


def test_a_page_begins_with_its_name():
    for page in PAGES:
        assert re.match(r"# [A-Z].*\n\n", read(page)) or page == "README.md", page


TERMS = {"KV": "keys? and (a )?values?", "TTFT": "time to the first token", "RoPE": "rota(ry|tion)",
         "prefill": "computing a prompt", "logits": "scores"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_explains_its_terms_or_leads_to_the_glossary(page):
    text = re.sub(r"\s+", " ", read(page))
    for term, meaning in TERMS.items():
        if re.search(rf"\b{term}\b", text):
            assert re.search(meaning, text) or "map.md#glossary" in text, f"{page}: {term}"


def test_nothing_names_a_machine_or_a_registry():
    """Files speak of the project alone."""
    tracked = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".md", ".toml", ".json")
               and not {".git", ".venv", "build"} & set(path.relative_to(ROOT).parts)]
    pattern = re.compile(r"(?<![\w.])/(?:root|home|opt|tmp)/\w")
    for path in tracked:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} names the path of a machine: {found[0]}"
