"""docs/traces.md: the line that ends `generate(..., summarize=True)` looks as it is shown."""

import re

from pages import read

from nanoserve import LLM, SamplingParams


def test_the_summary_line_looks_as_shown(capsys):
    [shown] = re.findall(r"^nanoserve: \d+ requests? in .*$", read("docs/traces.md"), re.M)
    with LLM() as llm:
        capsys.readouterr()
        llm.generate(["Once", "The"], SamplingParams(max_tokens=3, ignore_eos=True),
                     use_tqdm=False, summarize=True)
    real = capsys.readouterr().err.splitlines()[0]

    def shape(line: str) -> str:
        return re.sub(r"\bm?s\b", "s", re.sub(r"\d[\d,.]*", "0", line))

    assert shape(real) == shape(shown)
