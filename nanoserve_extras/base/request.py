"""A request with what only extras and servers ask of it: a salt, and the template of its prompt.

A salt keeps tenants apart: a prompt's blocks are found only by prompts with the same salt, so the
time of an answer tells nobody what others have asked. Its blocks begin at a root of their own, as
those of an adapter do.
"""

from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakValueDictionary

from nanoserve import request as plain
from nanoserve.sequence import CacheEntry, Sequence

# One root for each salt, as long as a request or a cached block begins at it.
SALTED: WeakValueDictionary[tuple[CacheEntry | None, str], CacheEntry] = WeakValueDictionary()


@dataclass(eq=False)
class Request(plain.Request):
    """As the plain engine's."""

    cache_salt: str | None = None  # only requests with the same one find its blocks
    chat_template: str | None = None  # it wrote the prompt; None: the tokenizer's own, if any

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        self.root = salted(self.root, self.cache_salt)
        return super().start(arrival, engine_seed)


def salted(root: CacheEntry | None, salt: str | None) -> CacheEntry | None:
    """The root, of an adapter say, for those who know the salt."""
    if salt is None:
        return root
    key = sha256((b"" if root is None else root.key) + salt.encode(errors="surrogatepass")).digest()
    return SALTED.setdefault((root, salt), CacheEntry(key, -1, [], root))
