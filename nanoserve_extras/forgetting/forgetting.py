"""Caches that forget: blocks in the middle of a text are freed, and no later query sees them.

    text     block 0    1    2    3    4    5    6 ...          StreamingLLM (Xiao et al. 2023):
    table    [ 7,       -    -    -    2,   9,   5 ]            the first tokens are kept (attention
    places     0..15                   16..  32.. 48..          sinks), and a window
    positions  0..15                   64..  80.. 96..          for RoPE: as in the text

A block that is dropped leaves the table (`BlockManager.drop`), and later keys move up. So attention
sees fewer keys, all of them in order, and needs no mask: every backend and CUDA graph is used
unchanged. A key keeps the position with which RoPE rotated it.

**What a query sees is decided by its position, and never by when it is computed.** Otherwise a
long chunk would see keys that a short one no longer sees, and texts would depend on other requests.
So blocks are dropped at certain positions only (`boundary`), and no chunk crosses one (`cut`).

A **preempted** sequence releases all its blocks. It can't recompute only the kept tokens: their KV
was computed when dropped tokens were still visible. So it recomputes its whole text, from its
prefix hits on, and drops the same blocks at the same positions, which are noted. For the same
reason only blocks before its first drop may come from the prefix cache, or go to it (`usable`).

Simplifications: one table serves all layers and heads, so they drop the same blocks; papers with
scores choose for each head. A request must fit into the KV cache as if it dropped nothing. Drafts
and forced tokens could cross a boundary: they are refused, and so are layers with a sliding window,
which count keys by their places. Road not taken: positions within the cache, as in the paper. They
stay small, so a text may grow longer than the model was trained for; here it can't. But kept keys
would have to be rotated again at each drop.
"""

from dataclasses import dataclass

from nanoserve import rules
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.request import Request
from nanoserve.sequence import CacheEntry, Sequence, Step
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan


class Forgetting(Extra):
    """The base of such caches: a subclass defines where blocks are dropped, and which."""

    needs = frozenset([Fact.GENERATES, Fact.KV_ALONE, Fact.ONE_STAGE])
    ends = frozenset([Fact.KV_ALONE, Fact.ALL_KEYS])  # it keeps what it has dropped
    block_size: int

    # ------------------------------------------------------------ the rule

    def boundary(self, seq: Sequence, position: int) -> int:
        """The first position behind `position` before which blocks are dropped."""
        raise NotImplementedError

    def is_boundary(self, seq: Sequence, position: int) -> bool:
        return position > 0 and self.boundary(seq, position - 1) == position

    def first_drop(self, seq: Sequence) -> int:
        """The first position at which blocks may be dropped. Everything before it is as in an
        engine that forgets nothing."""
        raise NotImplementedError

    def choose(self, seq: Sequence, position: int) -> range | list[int]:
        """The blocks to drop before the token at `position`, a boundary, is computed. Called once
        for each boundary; blocks are numbered by their place in the text."""
        raise NotImplementedError

    # --------------------------------------------------------- the mechanism

    def prepare(self, plan: Plan) -> Plan:
        if plan.parts.num_drafts:
            raise ValueError(f"{self.name} does not go together with drafts, which may reach over "
                             "a position at which blocks are dropped: leave one of them out")
        if any(window is not None for window in plan.model_config.windows):
            raise ValueError(f"{self.name} needs layers that see all keys, and this model has "
                             "sliding windows: choose another model")
        self.block_size = plan.config.block_size
        return plan

    def attach(self, engine: LLMEngine) -> None:
        self.chosen: dict[Sequence, dict[int, range | list[int]]] = {}  # at which position: which

    def check(self, request: Request) -> None:
        params = request.params
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            raise ValueError("structured_outputs and thinking_token_budget force tokens, which may "
                             f"reach over a position at which {self.name} drops blocks: leave one "
                             "of them out")

    def usable(self, seq: Sequence, hits: list[CacheEntry]) -> list[CacheEntry]:
        return hits[:self.first_drop(seq) // self.block_size]

    def cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        return min(num_new, self.boundary(seq, start) - start)

    def scheduled(self, step: Step) -> None:
        """Drop blocks of the rows that begin at a boundary. Steps in flight still read them, but
        they run before the next owner's step writes to them."""
        for (seq, num_new), start in zip(step.num_new_tokens.items(), step.starts, strict=True):
            assert start + num_new <= self.boundary(seq, start), (
                f"{seq.name}: a chunk crosses a position at which blocks are dropped")
            if not self.is_boundary(seq, start):
                continue
            chosen = self.chosen.setdefault(seq, {})
            if start not in chosen:
                chosen[start] = self.choose(seq, start)
            self.engine.scheduler.blocks.drop(seq, chosen[start])

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.chosen.pop(seq, None)


@dataclass(frozen=True, kw_only=True)
class SinksOptions(rules.Options):
    """Options in tokens, in multiples of the block size, except `sinks`, which is rounded up.
    every: blocks are dropped at multiples of it, so up to `every` tokens more than the window are
    kept."""

    sinks: rules.Count = 4
    window: rules.Count = 1024
    every: rules.Count = 256


class AttentionSinks(Forgetting):
    """StreamingLLM's memory (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks"). The query at position q sees the `sinks`, and the keys from q - q % every - window on.

        llm = LLM(model, extras=[AttentionSinks(sinks=4, window=1024, every=256)])
    """

    Options = SinksOptions

    def prepare(self, plan: Plan) -> Plan:
        plan, asked = super().prepare(plan), self.options
        for name in ("window", "every"):
            if getattr(asked, name) % self.block_size:
                raise ValueError(f"{name}={getattr(asked, name)} must be a multiple of block_size="
                                 f"{self.block_size}")
        self.num_sinks = -(-asked.sinks // self.block_size)  # blocks
        return plan

    def boundary(self, seq: Sequence, position: int) -> int:
        every = self.options.every
        return position - position % every + every

    def first_drop(self, seq: Sequence) -> int:
        """The position at which the window no longer touches the sinks. With blocks of 16, 4 sinks,
        a window of 32 and every=16: at 64, block 1 is dropped."""
        kept = self.num_sinks * self.block_size + self.options.window
        return self.boundary(seq, kept)

    def choose(self, seq: Sequence, position: int) -> range:
        return range(self.num_sinks, (position - self.options.window) // self.block_size)
