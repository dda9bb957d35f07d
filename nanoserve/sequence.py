"""The nouns: what the engine keeps about a request, and what a step plans.

**A sequence is a list of tokens and one number, `num_computed_tokens`: how many of them have their
KV in the cache.** The other tokens are its *gap*. A step gives some sequences a share of the token
budget to close it. Chunked prefill, a prefix hit, preemption, decoding and checking drafts are all
this one subtraction, so there is no phase, no status and no `is_prefill` here. A request has n
samples, each of which is a sequence; what they share is one `CoreRequest`. The words of the code
mean one thing each, everywhere:

    num_tokens           tokens of a sequence: prompt, output, and samples still on the device
    num_prompt_tokens    how many of them came with the request
    num_computed_tokens  how many have their KV in the cache, confirmed by a finished step
    num_inflight_tokens  how many more the launched, unfinished steps compute or load; among them
                         are drafts, which these steps check
    num_unknown_tokens   samples of launched steps whose value the host has not seen yet
    num_cached_tokens    how many prompt tokens a prefix hit provided (statistics only)
    num_prompt_logprobs  how many prompt positions, from the first on, must give a prompt logprob
                         or, where prompts are pooled, a hidden state
    num_new_tokens       how many tokens a step computes for a sequence
    block_size           tokens a KV block holds
    block_table          the ids of a sequence's KV blocks, in order of position
    place                where a token's KV stands in its sequence's block table: at its position,
                         less the tokens of `dropped_blocks`, of which most sequences have none
    slot                 memory for one token's KV: block id * block_size + offset in the block
    slot_mapping         the slot of every token of a step
    row                  a sequence's line in an array: in a step's batch, or, at `Sequence.row`, in
                         the arrays that last from step to step
    query_len            num_new_tokens of a row
    seq_len              tokens a row attends to: everything before the step plus query_len
    cu_seqlens_q         running sum of the query lengths, with a leading 0
    order                a sequence's sort key in both queues, from `Scheduler.order`: the smallest
                         is first
    depth                how many steps stay in flight while the next is scheduled: 0 without
                         overlap, 1 with it, and n - 1 if there are n > 1 pipeline stages as well
    prepack              lay a weight out as a device multiplies with it: `ops.prepack`

Invariant: one owner per fact. The scheduler changes a sequence's progress and the block manager its
blocks; all other modules only read. Nothing here knows torch, a tokenizer, or a model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any

from nanoserve.config import SamplingParams

NO_TOKEN = -1  # the sample of a row whose logits have NaN or infinity


@dataclass(frozen=True, eq=False)
class CoreRequest:
    """What scheduler, batch and sampler know of a request. Its n samples share this record, which
    `Request.start` makes when the request is submitted."""

    request_id: str
    params: SamplingParams
    arrival: int = 0  # place in the order of arrival
    priority: int = 0  # lower is served first
    arrival_time: float = 0.0  # in seconds, by any clock that all requests share
    max_num_tokens: int = 0  # prompt plus output of a sample never grow beyond this
    stop_ids: frozenset[int] = frozenset()  # EOS and stop tokens that end a sample
    eos_ids: frozenset[int] = frozenset()  # the stop_ids that are EOS: these give no stop_reason
    late_ids: frozenset[int] = frozenset()  # tokens not allowed before params.min_tokens
    bad_word_ids: list[list[int]] = field(default_factory=list)  # no output contains one of these
    added_processors: list[Callable] = field(default_factory=list)  # added by extras
    adapter_id: int = 0  # 0: no LoRA adapter
    root: "CacheEntry | None" = None  # parent of the first block: its key hashes the adapter
    contents: dict[int, bytes] = field(default_factory=dict)  # block index -> its image's hash

    @cached_property
    def processors(self) -> list[Callable]:
        """The functions, and classes of functions, that edit logits first."""
        return [*self.added_processors, *(self.params.logits_processors or ())]

    @cached_property
    def needs_output_tokens(self) -> bool:
        """Whether the values of all earlier output tokens must be known before the next draw."""
        params = self.params
        has_grammar = (params.structured_outputs is not None
                       or params.thinking_token_budget is not None)
        has_penalties = (params.repetition_penalty, params.frequency_penalty,
                         params.presence_penalty) != (1, 0, 0)
        has_long_words = any(len(word) > 1 for word in self.bad_word_ids)
        return has_grammar or has_penalties or has_long_words or bool(self.processors)

    @cached_property
    def has_controls(self) -> bool:
        """Whether it has penalties, constraints or logprobs."""
        params = self.params
        return (bool(params.controls() or self.bad_word_ids or self.processors)
                or params.logprobs is not None)


@dataclass(eq=False, slots=True)
class Sequence:
    """A list of tokens on its way through the engine. Compared and hashed by identity."""

    request: CoreRequest
    token_ids: list[int]  # prompt, then the output whose value is known
    index: int = 0  # 0 to n - 1 of the request's samples
    seed: int = 0  # 64 bits; with the position it fixes the random number of each token
    num_prompt_logprobs: int = 0
    num_prompt_tokens: int = field(init=False)

    # Progress: changed by the scheduler alone.
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_unknown_tokens: int = 0
    num_cached_tokens: int | None = None  # None: never scheduled
    num_preemptions: int = 0
    row: int = -1  # -1: not running
    order: tuple = ()  # the sort key of both queues, from `Scheduler.order`
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None

    # Memory: changed by the block manager alone.
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # chained hashes of its full blocks
    num_released_blocks: int = 0  # leading blocks given back: no query sees them any more
    dropped_blocks: tuple[int, ...] = ()  # blocks of the text that were taken out of the table
    num_committed_blocks: int = 0  # leading blocks already offered to the prefix cache
    cache_entry: "CacheEntry | None" = None  # the cache's entry for the last committed block

    # Changed by the sampler alone: see `controls.RowState` and `controls.Processors`.
    sampler_state: object = None
    processors: Any = None

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def needs_all_positions(self) -> bool:
        """Whether every prompt token must be computed, and none taken from the prefix cache, which
        keeps no logits. False from the first output token on: the prompt is scored by then."""
        return self.num_prompt_logprobs > 0 and len(self.token_ids) == self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    @property
    def name(self) -> str:
        """For traces and messages: "7", or "7.2" for the third of several samples."""
        request = self.request
        return request.request_id if request.params.n == 1 else f"{request.request_id}.{self.index}"


@dataclass(eq=False, slots=True, weakref_slot=True)
class CacheEntry:
    """A block that the prefix cache can find. Entries are compared by identity: two blocks with the
    same `parent` object follow the same prefix."""

    key: bytes
    block_id: int
    tokens: list[int]
    parent: "CacheEntry | None"
    content: bytes = b""  # see `CoreRequest.contents`


@dataclass(eq=False)
class Step:
    """One step's plan. `print(step)` shows it; an empty step is legal."""

    index: int
    num_new_tokens: dict[Sequence, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # position of each row's first new token
    sampling: list[Sequence] = field(default_factory=list)  # sequences that close their gap
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)  # each adds one sample
    forced: set[Sequence] = field(default_factory=set)  # their drafts are no guesses
    network: int = 0  # 0: the served model; 1: the network that drafts for it, greedily
    shift: int = 0  # 1: a position's input is the token after it
    prompt_logprob_positions: dict[Sequence, range] = field(default_factory=dict)
    budget: int = 0  # how many more tokens the step may compute
    admitted: list[Sequence] = field(default_factory=list)  # started or restarted in this step
    # Victim -> the sequence that gets its blocks.
    preempted: dict[Sequence, Sequence] = field(default_factory=dict)
    # Deferred sequence -> the sequence that computes its next block (itself, if the block is being
    # read from a file).
    deferred: dict[Sequence, Sequence] = field(default_factory=dict)
    # The first sequence that got no share, the reason, and how many blocks or tokens it needs:
    #   "blocks"  too few blocks are free
    #   "budget"  other sequences took the whole budget
    #   "tokens"  all its tokens must be computed at once, and the budget is smaller
    #   "cut"     an extra (`Extra.cut`) left it no token
    #   "step"    it must be preempted, but a step in flight still computes it
    # No sequence after it is admitted.
    blocked_on: tuple[Sequence, str, int] | None = None
    # The keys of the blocks that this step fills or loads -> the sequence for which it does.
    pending_keys: dict[bytes, Sequence] = field(default_factory=dict)
    num_loaded: dict[Sequence, int] = field(default_factory=dict)  # tokens whose KV is copied in
    # Copies between KV memory and the host's: (block, i) saves a block to host block i, and
    # (block, -1 - i) loads it from there.
    block_moves: list[tuple[int, int]] = field(default_factory=list)
    failed: dict[Sequence, str] = field(default_factory=dict)  # sequences to end -> the reason
    # An extra may add a section to the batch (`RankParts.sections`). Here are its numbers by row,
    # which the extra fills in while it is `launching`. A section that is not here is empty.
    sections: dict[str, dict[Sequence, int]] = field(default_factory=dict)
    # Set by `update`: the new tokens of the sequences that closed their gap.
    accepted: dict[Sequence, list[int]] = field(default_factory=dict)
    output: object = None  # `sampler.SamplerOutput`, once the step is launched

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens.values())

    def samples(self) -> list[Sequence]:
        """The sequence of each sampled token, in order. A sequence with k drafts is listed k + 1
        times: it samples after its newest token, and after each draft."""
        if not self.drafts:
            return self.sampling
        return [seq for seq in self.sampling for _ in range(1 + len(self.drafts.get(seq, ())))]

    def outcome(self, sampled: list[int | None]) -> dict[Sequence, list[int]]:
        """The new tokens of each sequence. sampled: one token for each of `samples()`, None for a
        pooled prompt, which gets no token. The tokens of a sequence with drafts end at the first
        that differs from its draft, or that ends the sequence.

        Example: drafts 5 6 7, sampled 5 6 9 4 gives 5 6 9. The 4 would have followed a 7.
        """
        if not self.drafts:
            return {seq: [] if token_id is None else [token_id]
                    for seq, token_id in zip(self.sampling, sampled, strict=True)}
        result: dict[Sequence, list[int]] = {}
        samples = iter(sampled)
        for seq in self.sampling:
            drafts = self.drafts.get(seq, [])
            own = list(islice(samples, 1 + len(drafts)))
            result[seq] = accepted_tokens(own, drafts, seq.request.stop_ids)
        return result

    def num_right(self, seq: Sequence) -> int:
        """How many of the drafts of `seq` were right, once `accepted` is set."""
        pairs = zip(self.accepted[seq], self.drafts[seq], strict=False)
        return sum(token_id == draft for token_id, draft in pairs)  # none counts behind a wrong one

    def without_token(self, sampled: list[int | None]) -> list[Sequence]:
        """The sequences that got `NO_TOKEN`. One after a wrong draft does not count."""
        if NO_TOKEN not in sampled:
            return []
        return [seq for seq, tokens in self.outcome(sampled).items() if NO_TOKEN in tokens]

    def by_sequence(self, results: dict[int, object]) -> dict[Sequence, list]:
        """Group results by sequence. results: index in `samples()` -> result, for some indices."""
        samples = self.samples()
        found: dict[Sequence, list] = {}
        for i, result in results.items():
            found.setdefault(samples[i], []).append(result)
        return found

    def __str__(self) -> str:
        """A line like `step 3: 9 tokens | A 17 ↦ | B 0..8 | preempted C`."""
        parts = [f"step {self.index}: {self.num_tokens} tokens"]
        sampling = set(self.sampling)
        for (seq, n), start in zip(self.num_new_tokens.items(), self.starts, strict=True):
            span = f"{start}" if n == 1 else f"{start}..{start + n}"
            parts.append(f"{seq.name} {span}{' ↦' if seq in sampling else ''}")
        if self.preempted:
            parts.append("preempted " + " ".join(seq.name for seq in self.preempted))
        return " | ".join(parts)


def accepted_tokens(sampled: list[int | None], drafts: list[int],
                    stop_ids: frozenset[int]) -> list[int]:
    """The samples up to the first one that its draft did not predict, or that ends the sequence."""
    tokens: list[int] = []
    for token_id, draft in zip_longest(sampled, drafts):
        if token_id is None:  # a pooled prompt
            break
        tokens.append(token_id)
        if token_id != draft or token_id in stop_ids:
            break
    return tokens


def visible(query: Any, key: Any, window: int | None, last: Any) -> Any:
    """Whether a query sees a key. query, key: positions, as numbers or as arrays that broadcast.

    Attention and the block manager share this rule. A block whose keys the next query does not see
    is given back, so no later query may see these keys either. window: how many keys a query sees
    at most, its own included; None: no limit. last: the last key that the query sees, which is its
    own, or the last one of the image that the query belongs to.
    """
    return (key <= last) & (window is None or key > query - window)
