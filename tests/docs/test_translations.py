"""The Chinese pages say what the English ones say: the same sections, commands, figures and links.

What their sentences mean only a reader can compare.
"""

import re
from collections import Counter

import pytest
from pages import read

pytestmark = pytest.mark.floor
CHAPTERS = ["before", "from_naive", "walk", "machine", "exercises", "museum"]
PAGES = ["README.md", "docs/start.md", *(f"course/{name}.md" for name in CHAPTERS)]
LANGUAGES = r"^\[(?:中文|English)\]\(.*\)\n"  # the link to the other page


def translated(page: str) -> str:
    return page.replace(".md", ".zh.md")


def sections(page: str) -> list[tuple[str, list[str], str]]:
    """Of each section: the level of its heading, its fenced blocks, and the rest."""
    text = re.sub(LANGUAGES, "", read(page), flags=re.M)
    fences = re.findall(r"^```.*?^```", text, re.S | re.M)
    text = re.sub(r"^```.*?^```", "FENCE", text, flags=re.S | re.M)
    parts = re.split(r"^(#+) .*\n", text, flags=re.M)[1:]
    found = []
    for level, rest in zip(parts[::2], parts[1::2], strict=True):
        count = rest.count("FENCE")
        found.append((level, fences[:count], rest))
        fences = fences[count:]
    return found


def figures(text: str) -> Counter:
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\]\(.*?\)", "]", text)))


def code(text: str) -> Counter:
    return Counter(re.sub(r"\s+", " ", one) for one in re.findall(r"`([^`]+)`", text))


def links(text: str, language: str = "") -> Counter:
    """Without anchors, which are headings' words; to a page that has two languages, in `language`.
    """
    names = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    pages = {*PAGES, *(page.rpartition("/")[2] for page in PAGES)}
    pages |= {f"../{page}" for page in PAGES}
    return Counter(translated(name) if language and name in pages else name for name in names)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_the_same_in_both_languages(page):
    ours, theirs = sections(page), sections(translated(page))
    assert [level for level, _, _ in ours] == [level for level, _, _ in theirs]
    for (_, fences, english), (_, blocks, chinese) in zip(ours, theirs, strict=True):
        start = chinese.strip()[:40]
        assert fences == blocks, start
        for what in (figures, code):
            assert what(english) == what(chinese), (
                start, what(english) - what(chinese), what(chinese) - what(english))
        assert links(english, "zh") == links(chinese), start


@pytest.mark.parametrize("page", PAGES)
def test_each_page_leads_to_the_other(page):
    name = page.rpartition("/")[2]
    assert f"\n[中文]({translated(name)})\n" in read(page)
    assert f"\n[English]({name})\n" in read(translated(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_link_to_a_page_in_english_says_so(page):
    own = page.rpartition("/")[2]  # the link to the other language
    links = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)(.{4}|)", read(translated(page)))
    for link, behind in links:
        assert link.endswith(".zh.md") or link == own or behind == "（英文）", link


def test_the_glossary_has_both_languages():
    """Each term that a Chinese page explains with its English word in brackets."""
    glossary = read("docs/architecture.md").split("\n## Glossary\n")[1]
    terms = dict(re.findall(r"([a-z][a-z ]*)\s([\u4e00-\u9fff]+)", glossary))
    for page in PAGES:
        for chinese, english in re.findall(r"([\u4e00-\u9fff]+)\*?（([a-z][a-z ]+)）",
                                           read(translated(page))):
            assert chinese.endswith(terms[english]), f"{page}: {chinese} ({english})"
