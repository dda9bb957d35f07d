"""Messages of libraries' errors, made safe for clients to read.

An error of a library becomes a `ValueError` that begins with the field and its value. Addresses of
objects are removed, because they reveal the randomised memory layout of this process (vLLM's
CVE-2026-22778), and so are paths of libraries and torch's stack of C++ calls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# An object as Python shows it, "<_io.BytesIO object at 0x7f63904cef20>", and an address alone.
OBJECT, ADDRESS = re.compile(r"\s*<[^<>]*\bat 0x[0-9a-fA-F]+>"), re.compile(r"\b0x[0-9a-fA-F]{6,}")
LIBRARIES = re.compile(r"[^\s\"']*/(site-packages|dist-packages|python3\.\d+)/")


@contextmanager
def in_words(words: str, *kinds: type[Exception]) -> Iterator[None]:
    """Inside this block an error of these kinds (of any kind, if none is named) becomes a
    `ValueError` that begins with `words`."""
    try:
        yield
    except (kinds or Exception) as error:  # noqa: B030 - a tuple of classes, or one
        raise ValueError(f"{words}: {words_of(error):.500}") from error


def words_of(error: BaseException | str) -> str:
    """An error's text without addresses of objects and paths of libraries."""
    said = str(error).partition("\nException raised from ")[0]
    if isinstance(error, KeyError):  # its text is the key alone
        said = f"there is no {said}"
    said = ADDRESS.sub("0x...", OBJECT.sub("", LIBRARIES.sub("", said)))
    return said if said.strip() or isinstance(error, str) else type(error).__name__
