"""course/before.md: what its session prints, typed in order."""

import contextlib
import io
import re

from pages import read

PAGE = read("course/before.md")


def test_each_part_prints_what_is_shown():
    names: dict = {}
    parts = re.findall(r"^```python\n(.*?)^```\n\n<!-- printed: (\w+) -->\n```\n(.*?)^```$", PAGE,
                       re.M | re.S)
    assert [name for _, name, _ in parts] == ["token", "logits", "attention", "kv"]
    for program, name, shown in parts:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        assert printed.getvalue() == shown, name
