"""One page of hooks: all that an extra can add to an engine, and when each method is called.

An *extra* is an object that is handed to the engine. It inherits from `Extra`, whose methods do
nothing, and overrides those that it needs:

    prepare ──► attach ──► check ─► added ─► usable, find, cut, force, draft ─► scheduled, launching
    options     engine     each request      a step is planned                  it is launched
                                         ended, idle ◄─ updated, or dropped ◄─ gave_up ◄─ its tokens
    between two requests: reset, close                   at any time: committed, evicted

Extras are called in the order of `engine.extras`. If several cut a chunk, each gets the tokens that
the one before it left; the first that has drafts for a row gives them.

An error in a hook is raised in the call that led to the hook. A step that was only planned is then
dropped. Tokens that count already reach their callers. The requests go on.

Invariants: an extra may change *when* a token is computed, never *which* token comes out. It
changes only its own attributes, and drops what it keeps for a sequence when the sequence has ended.
`Hooks` keeps only overridden methods, so a method that no extra overrides costs nothing.

Not known here: which extras there are. Road not taken: entry points or a registry. The user passes
an object instead.
"""

from collections.abc import Callable, Iterable
from inspect import isfunction
from typing import Any

from nanoserve.rules import Options
from nanoserve.sequence import Sequence, Step


class Extra:
    """The base class of extras. A type whose import would need torch or the engine is `Any` here,
    and the docstring names it.

    Options: the class of its options. name: how the user names it, for messages. needs, ends: facts
    that must be true with it, and facts that are untrue with it (nanoserve_extras/base/facts.py).
    most_drafts: the most tokens that `draft` guesses for a row; every drafter must say it.
    interrupts: with `order`, whether a waiting sequence preempts a running one that comes after it.
    All of these are known before `prepare`. engine: a weak reference to the `LLMEngine`, which
    holds this object; set before `attach`.
    """

    Options: type[Options] = Options
    needs: frozenset = frozenset()
    ends: frozenset = frozenset()
    most_drafts: int = 0
    interrupts: bool = False
    engine: Any

    def __init__(self, **options: Any):
        """The options become a record with rules, like those of the engine (rules.py)."""
        self.options = self.Options.of(options)

    @property
    def name(self) -> str:
        return type(self).__name__

    # ------------------------------------------------------------------ an engine is made

    def prepare(self, plan: Any) -> Any:
        """Check the options, and return the `Plan` with this extra's additions, such as parts for
        the runner of each rank, or a class that checks requests. Called before weights are read;
        raises `ValueError` with the remedy."""
        return plan

    def attach(self, engine: Any) -> None:
        """Make the objects that need the `LLMEngine`, and keep no strong reference to it. Called
        once: when runner and scheduler exist, or by `LLM.add`."""

    # ------------------------------------------------------------------ requests

    def check(self, request: Any) -> None:
        """Check a `Request`, and make what it asks for (a grammar, say). Called in the caller's
        thread before the request is queued; raises `ValueError`."""

    def added(self, request: Any) -> None:
        """Note a `Request`'s sequences. Called when they are queued, between two steps."""

    def ended(self, sequences: list[Sequence]) -> None:
        """Drop what is kept for these sequences. Called after each step, mostly with none, and
        after an abort. A step that is in flight at that time is still `updated` later."""

    def idle(self) -> None:
        """Run steps of the extra's own (to save blocks, say). Called when no request is left."""

    # ------------------------------------------------------------------ a step is planned

    def order(self, seq: Sequence) -> Any:
        """Return how urgent a sequence is: the smallest is first, and among equal ones the first
        that came. Called before each step for all sequences, running or waiting, in the place of
        the option `scheduling_policy`. The answer may change from step to step; answers for two
        sequences must be comparable."""

    def usable(self, seq: Sequence, hits: list) -> list:
        """Return the part of `hits` (cache entries), from the first on, that this sequence can use.
        Called whenever its tokens are looked up in the prefix cache."""
        return hits

    def find(self, step: Step, seq: Sequence, num_hits: int) -> int:
        """Return how many blocks after the first `num_hits` can be loaded from elsewhere. Called
        when a waiting sequence may be admitted."""
        return 0

    def is_reading(self, seq: Sequence) -> bool:
        """Return whether more blocks of `seq` are being read. Then the sequence is deferred."""
        return False

    def cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        """Return how many of the `num_new` tokens from `start` on the step may compute; 0 for no
        chunk. Called before it is certain that the step holds the chunk, so note nothing here."""
        return num_new

    def force(self, seq: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that must follow, by a grammar say. Called for each row that
        decodes and whose tokens are all known. most: limited by the budget, blocks and buffers that
        are left."""
        return []

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Return a list of up to `most` guesses of the next tokens; any more are ignored. -1 stands
        for a guess that `launching` will put into `step.drafts`. An answer of another kind ends the
        sequence's request. Called after `force`, for the same rows. With such an extra the extras'
        `LLM` has no overlap, in which a row's newest token is not known yet. `Step.num_right` tells
        in `updated` how many guesses were right."""
        return []

    def scheduled(self, step: Step) -> None:
        """Add to the planned step what it needs (copies of blocks), and note what is in it. Called
        with each step, even an empty one."""

    # ------------------------------------------------------------------ a step is run

    def launching(self, step: Step) -> None:
        """Do on the device what must come before the step. Called right before its launch; an error
        drops the step."""

    def gave_up(self, seq: Sequence) -> bool:
        """Return whether the stop token that ends `seq` was forced although its text is incomplete:
        then the finish reason is "length"."""
        return False

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        """Take a finished step into account. accepted: the new tokens of each sequence that closed
        its gap; a stop string may still remove the last ones."""

    def dropped(self, step: Step) -> None:
        """Forget a step: its tokens are scheduled again. Called after an error or Ctrl-C: instead
        of `updated`, or after it if `updated` of another extra has failed."""

    # ------------------------------------------------------------------ blocks

    def committed(self, entry: Any) -> None:
        """Note that a block can be found from now on. entry: its `CacheEntry`."""

    def evicted(self, entry: Any) -> None:
        """Save or forget a block whose memory will be reused. Called before anything is written to
        it. entry: its `CacheEntry`."""

    # ------------------------------------------------------------------ the engine lives on

    def reset(self) -> None:
        """Forget everything computed from the weights or the cache. Called while no request runs.
        """

    def close(self) -> None:
        """Give back memory, threads and files. Called by `engine.shutdown`, not by `LLM.remove`.
        """


NAMES = [name for name, method in vars(Extra).items()
         if isfunction(method) and not name.startswith("_")]


def checked(extras: Any, policy: str = "fcfs") -> list[Extra]:
    """The extras as a list. Raises `ValueError` for anything else, for one that comes twice, for a
    drafter without `most_drafts`, and for an order beside another one. policy: the option
    `scheduling_policy`."""
    kept: list[Extra] = []
    if isinstance(extras, Extra) or not isinstance(extras, Iterable):
        raise ValueError(f"extras must be a list of objects that inherit from Extra, got "
                         f"{extras!r:.80}")
    orders = [] if policy == "fcfs" else [f"scheduling_policy={policy!r}"]
    for extra in extras:
        if not isinstance(extra, Extra):
            raise ValueError(f"extras must be objects that inherit from Extra, got {extra!r:.80}")
        if extra in kept:
            raise ValueError(f"{extra.name} is there already: leave the second time out")
        kept.append(extra)
        own, most = Hooks([extra]), extra.most_drafts
        if own.draft and not (isinstance(most, int) and most > 0):
            raise ValueError(f"{extra.name} drafts, and its most_drafts is {most!r}: set it to the "
                             "most tokens that it guesses for a row, for which buffers are made")
        if own.order:
            orders.append(extra.name)
            if len(orders) > 1:
                raise ValueError(f"{' and '.join(orders)} both say who goes first: leave one out")
    return kept


class Hooks:
    """The overridden methods of some extras, by name: `for tell in hooks.evicted: tell(entry)`.

    Engine, scheduler and block manager share one object. `keep` makes all lists again.
    """

    def __init__(self, extras: Iterable[Extra] = ()):
        self.keep(extras)

    def __getattr__(self, name: str) -> list[Callable]:
        raise AttributeError(f"{name} is no method of Extra")  # called for missing names only

    def keep(self, extras: Iterable[Extra]) -> None:
        extras = list(extras)
        self.interrupts = any(one.interrupts for one in extras)
        for name in NAMES:
            inherited = vars(Extra)[name]  # the base class's method does nothing
            methods = [getattr(one, name) for one in extras]
            setattr(self, name, [method for method in methods
                                 if getattr(method, "__func__", method) is not inherited])
