"""docs/map.md: every file with what it teaches, its counterpart in vLLM, and the glossary."""

import re

import pytest
from house_files import FILES
from pages import between, read, rows_of

from nanoserve import sequence
from nanoserve.tools import house

pytestmark = pytest.mark.floor
PAGE = read("docs/map.md")


def test_the_map_lists_every_file_and_what_it_teaches():
    """All but the numbers of lines, which a command writes and which may be those of last week."""
    shown = between(PAGE, "<!-- printed by: python -m nanoserve.tools.house --map all -->",
                    "<!-- end")
    number = re.compile(r"\| \d+ \|")
    assert number.sub("", shown.strip()) == number.sub("", house.whole_map(FILES))


@pytest.mark.parametrize("options, first, count", [
    ([], "file ", None), (["--map"], "| file |", 2 + 13), (["--map", "all"], "| file |", None)])
def test_the_command_prints_the_figures_or_a_map(capsys, monkeypatch, options, first, count):
    monkeypatch.setattr(house, "read_house", lambda: FILES)
    house.main(options)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith(first)
    assert len(lines) == count if count else any("tools/house" in line for line in lines)


def test_both_maps_can_be_written_into_their_pages(tmp_path):
    """Whatever stood between the markers; the rest of a page stays."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/map.md"):
        (tmp_path / name).write_text(re.sub(r"(--map.*? -->\n).*?(<!-- end)", r"\1old\n\2",
                                            read(name), flags=re.S))
    house.write_maps(FILES, tmp_path)
    number = re.compile(r"\| \d+ \|")
    for name in ("README.md", "docs/map.md"):
        written = (tmp_path / name).read_text()
        assert "old\n" not in written and number.sub("", written) == number.sub("", read(name))


def test_every_file_has_its_counterpart_in_vllm():
    rows = [row for row in rows_of(PAGE[PAGE.index("<!-- vllm -->"):].split("\n## ")[0])[1:]
            if row[0].startswith("`")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+)`", row[0])]
    files = {file.name for file in FILES}
    assert set(named) <= files, "a file that is gone"
    core = {file.name for file in FILES if file.room not in house.ANNEXES}
    assert set(named) >= core
    assert all(re.match(r"`vllm/[\w/]+(\.py|/)`", row[1]) for row in rows)


def test_glossary_words_are_defined_in_the_code():
    table = PAGE[PAGE.index("\n## Glossary"):]
    words = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert len(words) >= 8
    for word in words:
        assert f"\n    {word} " in sequence.__doc__, f"{word} is not in the glossary of sequence.py"
