"""Structured output's instrument: a made-up vocabulary's masks. Times are not judged.

Its table of steps is compared with the page in tests/docs/test_tables.py.
"""

import re

from benchmarks import structured


def test_masks_of_a_made_up_vocabulary_are_measured():
    table = structured.mask_table(num_rows=3, vocab_size=1000, rounds=1).splitlines()
    assert len(table) == 4 and table[0].startswith("3 rows, 1,000 tokens")
    assert all(re.search(r" +[\d,]+ +[\d,]+$", line) for line in table[1:])
