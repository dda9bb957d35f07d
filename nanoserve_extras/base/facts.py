"""What is true of an engine, and what each part of it needs: facts in the place of pairs.

    a block store   needs  "KV blocks are all that a sequence keeps"  ─┐
    a hybrid model  ends   "KV blocks are all that a sequence keeps"  ─┴─► `ValueError`, both named

Two features that can't work together have a reason, and the reason is a fact that one needs and the
other makes untrue. So no feature names another: it says which facts it needs and which it ends, and
`facts_of` finds the clashes. A new feature is combined with all others by two lines, and the page
docs/extras.md is made of the same facts.

Invariant: at least one part needs each fact, and one ends it; otherwise it is no reason for
anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from nanoserve.config import EngineConfig


class Fact(Enum):
    """What holds for a plain engine: our own decoder with all of its weights on one CPU or GPU."""

    GENERATES = "it writes text"
    OWN_LINEAR = "the linear layers are nanoserve's own"
    KV_ALONE = "KV blocks are all that a sequence keeps"
    PREFIX_CACHE = "KV blocks are kept for later prompts"
    ONE_RANK = "each weight is whole on one rank"
    ONE_STAGE = "all layers are on one rank"
    IN_MEMORY = "all layers stay in memory"
    ON_CPU = "it runs on a CPU"
    GRAPHS = "a decode step can be recorded as a CUDA graph"
    ALL_KEYS = "no key of a running text is forgotten"


class Part(Protocol):
    """What an engine is made with: an extra, or an `Asked`. name: as the user wrote it."""

    name: str
    needs: frozenset[Fact]
    ends: frozenset[Fact]


@dataclass(frozen=True)
class Asked:
    """One of the engine's own options, or a kind of model, with the facts that it ends."""

    name: str
    ends: frozenset[Fact]
    needs: frozenset[Fact] = frozenset()


def own_parts(asked: EngineConfig, device: str) -> list[Asked]:
    """The engine's own options that end facts."""
    untrue = [
        (f"tensor_parallel_size={asked.tensor_parallel_size}", Fact.ONE_RANK,
         asked.tensor_parallel_size > 1),
        ("enable_prefix_caching=False", Fact.PREFIX_CACHE, not asked.enable_prefix_caching),
        (f"device={device!r}", Fact.ON_CPU, device != "cpu")]
    return [Asked(name, frozenset([fact])) for name, fact, is_so in untrue if is_so]


def clash(one: Part, other: Part) -> str | None:
    """Why these two can't be parts of one engine; None if they can."""
    for needy, ender in ((one, other), (other, one)):
        if wrong := [fact for fact in Fact if fact in needy.needs & ender.ends]:
            option = next((part.name.partition("=")[0] for part in (needy, ender)
                           if "=" in part.name), "")
            remedy = ("leave one of them out" if all("=" in part.name for part in (needy, ender))
                      else f"leave {option} out" if option else "choose another model")
            return (f"{needy.name} does not go together with {ender.name}: it needs that "
                    f"{wrong[0].value}; {remedy}")
    return None


def facts_of(parts: Iterable[Part]) -> frozenset[Fact]:
    """The facts that hold for an engine with these parts. Raises `ValueError` for two parts that
    clash, and for a part that is given twice."""
    parts = list(parts)
    for i, one in enumerate(parts):
        for other in parts[:i]:
            if one is other or one.name == other.name and "=" in one.name:  # one option, twice
                raise ValueError(f"{one.name} is there already: leave the second time out")
            if (why := clash(one, other)) is not None:
                raise ValueError(why)
    return frozenset(Fact).difference(*(part.ends for part in parts))


def check_added(part: Part, others: Iterable[Part]) -> None:
    """Check that a part can be added to a running engine. Raises `ValueError` as `facts_of` does,
    and if the part ends a fact on which the engine was built."""
    others = list(others)
    before = facts_of(others)
    if lost := [fact for fact in Fact if fact in before - facts_of([*others, part])]:
        raise ValueError(f"{part.name} can't be added to an engine that runs, which relies on it "
                         f"that {lost[0].value}: make the engine with extras=[...]")
