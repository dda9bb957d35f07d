"""One page of hooks: all that can be added to an engine, and when each part of it is called.

An *extra* is an object that is handed to the engine. It inherits from `Extra`, whose methods do
nothing, and overrides those that it needs:

    prepare ──► attach ──► check ─► added ─► usable, find, cut, force, draft ─► scheduled, launching
    options     engine     each request      a step is planned                  it is launched
                                         ended, idle ◄─ updated, or dropped ◄─ gave_up ◄─ its tokens
    between two requests: reset, close                   at any time: committed, evicted

Extras are asked in the order of `engine.extras`: those that the options ask for, then those of
`LLM(extras=[...])`, then what was added later. Where several cut a chunk, each gets what the one
before it left; the first that has drafts for a row gives them.

An error in a hook is raised in the call that led to it. A step that was only planned is dropped
then, and tokens that count already reach their callers: the requests go on.

Invariants: an extra may change *when* a token is computed, never *which* token comes out. It
changes nothing but what is its own, and drops what it keeps for a sequence when that has ended. A
call site keeps only the methods that somebody has overridden (`Hooks`), so a method that nobody
needs costs nothing.

Not known here: which extras there are. Road not taken: entry points or a registry; the user hands
an extra over.
"""

from collections.abc import Callable, Iterable
from inspect import isfunction
from typing import Any

from nanoserve import rules
from nanoserve.rules import Options
from nanoserve.sequence import Sequence, Step


class Extra:
    """What can be added. Types that torch or the engine would bring are named in the sentences.

    Options: the class of its options. name: as the user asked for it, for messages. needs, ends:
    the facts that must be true with it, and those that are untrue with it (base/facts.py).
    takes: the fields of a request that it honours (`request.HANDED_ON`). most_drafts: how many
    tokens `draft` guesses for a row at most. All of them are known before `prepare`. engine: the
    `LLMEngine`, weakly, since it holds this object; from `attach` on.
    """

    Options: type[Options] = Options
    needs: frozenset = frozenset()
    ends: frozenset = frozenset()
    takes: tuple[str, ...] = ()
    most_drafts: int = 4
    engine: Any

    def __init__(self, **options: Any):
        """Its options are a record with rules, as the engine's own (rules.py)."""
        self.options = self.Options.of(**options)

    @property
    def name(self) -> str:
        return type(self).__name__

    # ------------------------------------------------------------------ an engine is made

    def prepare(self, plan: Any) -> Any:
        """Check the options, and return the `Plan` with what this adds to it: parts for the runner
        of each rank, a class that checks requests. Called before weights are read; raises
        `ValueError` with the remedy."""
        return plan

    def attach(self, engine: Any) -> None:
        """Make what needs the `LLMEngine`, and keep nothing that holds it. Called once, when runner
        and scheduler are there, or by `engine.add`."""

    # ------------------------------------------------------------------ requests

    def ready(self) -> None:
        """Raise `RuntimeError` if no request can be served now. Called before each is made."""

    def check(self, request: Any) -> None:
        """Check a `Request`, and put what it asks for (a grammar, say) into `request.made[self]`.
        Called in its caller's thread before it is queued; raises `ValueError`."""

    def added(self, request: Any) -> None:
        """Note a `Request`'s sequences. Called when they are queued, between two steps."""

    def ended(self, sequences: list[Sequence]) -> None:
        """Drop what is kept for these. Called after each step, mostly with none, and after an
        abort; a step that was in flight then is still `updated` later."""

    def idle(self) -> None:
        """Run steps of its own (to save blocks, say). Called when no request is left."""

    # ------------------------------------------------------------------ a step is planned

    def usable(self, seq: Sequence, hits: list) -> list:
        """Return the prefix of `hits` (cache entries) that this sequence can start from. Called
        whenever its prompt is looked up in the prefix cache."""
        return hits

    def find(self, step: Step, seq: Sequence, num_hits: int) -> int:
        """Return how many blocks after these hits can be loaded from elsewhere. Called when a
        waiting sequence may be admitted."""
        return 0

    def is_reading(self, seq: Sequence) -> bool:
        """Return whether further blocks of `seq` will soon be there. Then it is deferred."""
        return False

    def cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        """Return where a chunk of at most `num_new` tokens from `start` on may end, 0 for no chunk.
        Called before it is certain that the step holds the chunk, so note nothing of it here."""
        return num_new

    def force(self, seq: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that have to follow, by a grammar say. Called for each row
        that decodes and whose tokens are all known, with what is left of budget, blocks and rows.
        """
        return []

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Return up to `most` guesses of what follows; more are passed over. -1 stands for one that
        `launching` will put into `step.drafts`. Any other answer ends the sequence's request.
        Called after `force`, in the same way. An engine with such an extra has no overlap, in which
        no row's tokens are all known."""
        return []

    def scheduled(self, step: Step) -> None:
        """Give the planned step what it needs (copies of blocks), and note what is in it. Called
        with each step, an empty one, too."""

    # ------------------------------------------------------------------ a step is run

    def launching(self, step: Step) -> None:
        """Do on the device what must come before the step. Called right before its launch; an error
        drops the step."""

    def gave_up(self, seq: Sequence) -> bool:
        """Return whether the stop token that ends `seq` breaks its text off: then its finish reason
        is "length"."""
        return False

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        """Take a finished step into account. accepted: the new tokens of each sequence that closed
        its gap; a stop string may still remove the last ones."""

    def dropped(self, step: Step) -> None:
        """Forget a step: its tokens are scheduled again. Called after an error or Ctrl-C, mostly
        instead of `updated`, or after it if another extra has failed in it."""

    # ------------------------------------------------------------------ blocks

    def committed(self, entry: Any) -> None:
        """Note that a block can be found from now on. entry: its `CacheEntry`."""

    def evicted(self, entry: Any) -> None:
        """Save or forget a block whose memory will be another's. Called before anything is written
        to it."""

    # ------------------------------------------------------------------ the engine lives on

    def reset(self) -> None:
        """Forget what was computed from these weights or this cache. Called while no request
        runs."""

    def close(self) -> None:
        """Give back memory, threads and files. Called when the engine ends; `remove` does not."""


NAMES = [name for name, method in vars(Extra).items()
         if isfunction(method) and not name.startswith("_")]
EXTRAS = rules.list_of(rules.instance(Extra, ""), "a list of objects that inherit from Extra")


def checked(extras: Any) -> list[Extra]:
    """Raises `ValueError` for anything but a list of extras, none of them twice."""
    kept = rules.checked("extras", EXTRAS, extras)
    for i, extra in enumerate(kept):
        if any(extra is other for other in kept[:i]):
            raise ValueError(f"{extra.name} is there already: leave the second time out")
    return kept


def most_drafts(extras: Iterable[Extra]) -> int:
    """How many tokens one of these guesses for a row at most; 0 where none drafts."""
    return max([one.most_drafts for one in extras if Hooks([one]).draft], default=0)


class Hooks:
    """The overridden methods of some extras, by name: `for tell in hooks.evicted: tell(entry)`.

    One object for engine, scheduler and blocks. `keep` makes the lists anew.
    """

    def __init__(self, extras: Iterable[Extra] = ()):
        self.keep(extras)

    def __getattr__(self, name: str) -> list[Callable]:
        raise AttributeError(f"{name} is no method of Extra")  # called for missing names only

    def keep(self, extras: Iterable[Extra]) -> None:
        extras = list(extras)
        self.takes = {name for one in extras for name in one.takes}
        for name in NAMES:
            methods = [getattr(one, name) for one in extras]
            setattr(self, name, [method for method in methods
                                 if getattr(method, "__func__", method) is not vars(Extra)[name]])
