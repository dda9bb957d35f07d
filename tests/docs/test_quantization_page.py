"""docs/quantization.md: the formats are those that are tried, small weights cost what it says."""

from packing import FORMATS
from pages import between, block_after, read, rows_of, run

PAGE = read("docs/quantization.md")


def test_every_format_that_is_tried_is_listed():
    table = PAGE[PAGE.index("<!-- formats -->"):PAGE.index("Refused by name")]
    assert [row[0].split("`")[1] for row in rows_of(table)[1:]] == [*FORMATS]


def test_the_example_prints_what_is_shown():
    shown = block_after(PAGE, "<!-- printed by the int8 example -->")
    assert run("-c", block_after(PAGE, "\n```python")) == shown


def test_perplexity_costs_are_small():
    """Of 8 bits less than a percent, whole numbers or floats; of 4 bits less than five."""
    printed = between(PAGE, "benchmarks.quantization --corpus FILE -->", "<!-- end")
    rows = rows_of(printed)[1:]
    assert [row[:2] for row in rows] == [
        [dtype, one] for dtype in ("float32", "bfloat16")
        for one in ("None", "int8", "int4", "fp8")]
    for start, most in ((1, 0.01), (2, 0.05), (3, 0.01)):
        for plain, small in zip(rows[::4], rows[start::4], strict=True):
            assert abs(float(small[3]) / float(plain[3]) - 1) < most
