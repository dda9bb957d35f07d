"""README, CONTRIBUTING, docs/ and course/: links lead somewhere, and pages are found."""

import re

import pytest
from pages import PAGES, ROOT, read

pytestmark = pytest.mark.floor
READ = [page for page in PAGES if not page.startswith("docs/log/")]  # a log names deleted files


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


def test_the_start_leads_to_every_page():
    """From its section "All pages". Each page in Chinese is linked from the English one."""
    section = read("docs/start.md").split("\n## All pages\n")[1]
    english = {page for page in READ if not page.endswith(".zh.md")}
    found = [str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in links(section)]
    assert sorted(found) == sorted(english - {"README.md", "docs/start.md"})


def test_the_site_has_every_page():
    assert sorted(re.findall(r"[\w./-]+\.md", read("mkdocs.yml"))) == sorted(PAGES)


def test_files_named_in_the_text_exist():
    """`nanoserve/...`, `tests/...` and `docs/...`, also within a command."""
    for page in READ:
        for name in re.findall(r"(?<![\w/])((?:nanoserve|tests|docs|course|benchmarks)/[\w./-]*\w)",
                               read(page)):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_pages_that_the_code_names_exist():
    """In messages, docstrings and comments."""
    for folder in ("nanoserve", "nanoserve_extras", "benchmarks", "course", "tests"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".cpp", ".h", ".html"):
                for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                    assert (ROOT / page).exists(), f"{path.name} names {page}"


def test_modules_named_in_commands_exist():
    for page in READ:
        for name in re.findall(r"python -m\s+((?:nanoserve|course|benchmarks)[\w.]*\w)",
                               read(page)):
            path = ROOT / name.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page}: python -m {name}"


def test_nothing_names_a_machine_or_a_registry():
    """Files speak of the project alone."""
    tracked = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".md", ".toml", ".json")
               and not {".git", ".venv", "build"} & set(path.relative_to(ROOT).parts)]
    pattern = re.compile(r"(?<![\w.])/(?:root|home|opt|tmp)/\w")
    for path in tracked:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} names the path of a machine: {found[0]}"
