"""A request with the fields that only extras and servers need: times, a salt, a template.

A salt keeps tenants apart: a prompt's blocks are found only by prompts with the same salt, so
response times do not tell what others have asked. Each salt has a root of its own in the prefix
cache, as each adapter has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

from nanoserve import request as plain
from nanoserve.config import SamplingParams
from nanoserve.detokenizer import Detokenizer, StopStrings
from nanoserve.hooks import Extra
from nanoserve.sequence import CacheEntry, Sequence

# One root for each salt, kept as long as a request or a cached block begins at it.
SALTED: WeakValueDictionary[tuple[CacheEntry | None, str], CacheEntry] = WeakValueDictionary()


@dataclass
class RequestStateStats:
    """Times and token counts of a request: `RequestOutput.metrics`.

    The names are vLLM V1's, of its class of this name; the last six are ours. `arrival_time` is
    a wall clock's (`time.time`), the `_ts` are `time.monotonic`'s: 0.0 means "not yet". With n > 1
    a time is that of the first sample to reach it (`last_token_ts`: the last), and counts are sums.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0  # the request was checked
    queued_ts: float = 0.0  # the scheduler got it
    scheduled_ts: float = 0.0  # a step had its first tokens
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival to the first token: TTFT
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_samples: int = 1
    num_draft_tokens: int = 0  # without the tokens that a grammar forces
    num_accepted_tokens: int = 0  # drafts that were accepted

    def snapshot(self, sequences: list[Sequence]) -> "RequestStateStats":
        """A copy as of now, because an output must not change after it was handed over."""
        return replace(
            self, num_prompt_tokens=sequences[0].num_prompt_tokens,
            num_generation_tokens=sum(len(s.token_ids) - s.num_prompt_tokens for s in sequences),
            num_cached_tokens=sequences[0].num_cached_tokens or 0,
            num_preemptions=sum(s.num_preemptions for s in sequences), num_samples=len(sequences))


# Fields of a request that only an extra can honour -> the remedy if the engine has no such extra.
HANDED_ON = {"lora_request": "make the engine with enable_lora=True",
             "extra_args": "make the engine with logits_processors=[...], which read them",
             "structured_outputs": "this engine has no extra for grammars, leave it out",
             "thinking_token_budget": "this engine has no extra for thoughts, leave it out"}


@dataclass(eq=False)
class Request(plain.Request):
    """The plain engine's request, with more fields."""

    cache_salt: str | None = None  # only requests with the same one find its blocks
    chat_template: str | None = None  # that wrote the prompt; None: the tokenizer's, if any
    lora_request: object = None  # the adapter that the caller names
    made: dict[object, Any] = field(default_factory=dict)  # extra -> its object for the request
    make_stops: Callable[[SamplingParams], StopStrings] = StopStrings  # called for each sample
    stats: RequestStateStats = field(default_factory=RequestStateStats)

    def __post_init__(self):
        super().__post_init__()
        self.stats.arrival_time = self.core.arrival_time

    def check_taken(self, extras: list[Extra]) -> None:
        """Raises `ValueError` for a field of `HANDED_ON` that none of the extras honours: those
        that do name it in `takes`."""
        taken = [name for extra in extras for name in getattr(extra, "takes", ())]
        for name, remedy in HANDED_ON.items():
            value = getattr(self, name, None) or getattr(self.params, name, None)
            if value is not None and name not in taken:
                raise ValueError(f"{name}={value!r:.80}: {remedy}")

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        self.core = replace(self.core, root=salted(self.core.root, self.cache_salt))
        return super().start(arrival, engine_seed)

    def make_detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, self.params, self.prompt_token_ids,
                           self.make_stops(self.params))

    def output(self) -> plain.RequestOutput:
        output = super().output()
        output.metrics = self.stats.snapshot(self.sequences)
        return output


def salted(root: CacheEntry | None, salt: str | None) -> CacheEntry | None:
    """The root for requests with this salt, below `root` (an adapter's, for example)."""
    if salt is None:
        return root
    key = sha256((b"" if root is None else root.key) + salt.encode(errors="surrogatepass")).digest()
    return SALTED.setdefault((root, salt), CacheEntry(key, -1, [], root))
