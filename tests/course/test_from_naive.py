"""course/from_naive.md: the programs write the same texts, and waste what the page says."""

import re

import pytest
import torch
from pages import ROOT, between, read, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from course import from_naive, naive_5
from course.storyteller import BEGINNING, REQUESTS, Storyteller
from nanoserve.llm import BUNDLED_MODEL

PAGE = read("course/from_naive.md")
PROGRAMS = [f"course/naive_{i}.py" for i in range(1, 6)]


@pytest.mark.full
def test_five_programs_and_the_engine_write_the_same_and_waste_what_is_shown():
    """`table` compares the texts with each other; here one of them is compared with what
    transformers writes."""
    shown = between(PAGE, "<!-- printed by: python -m course.from_naive -->\n", "<!-- end -->")
    *counts, seconds = zip(*rows_of(from_naive.table()), strict=True)  # the seconds are a machine's
    assert [*zip(*counts, strict=True)] == [tuple(row[:-1]) for row in rows_of(shown)]
    assert seconds[0] == "seconds" and all(float(one) > 0 for one in seconds[2:])
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    requests = [(tokenizer.encode(BEGINNING + prompt), count) for prompt, count in REQUESTS]
    answers = naive_5.generate(Storyteller(), requests)
    for (prompt, count), answer in zip(requests, answers, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        assert answer == theirs[0, len(prompt):].tolist()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_shows_lines_of_each_program(program):
    source = read(program)
    section = PAGE[PAGE.index(f"[`{program[7:]}`]"):]
    shown = re.search(r"^```python\n(.*?)^```", section, re.S | re.M)[1]
    assert shown in source


def test_every_name_of_the_last_table_is_in_its_file():
    rows = re.findall(r"\]\(\.\./(nanoserve/\w+\.py)\), `(\w+)` \|", PAGE)
    assert len(rows) == 5
    for file, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text()
