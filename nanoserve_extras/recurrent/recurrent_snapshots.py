"""Snapshots of recurrent states: which are taken, how they are found again, and which are kept.

A prefix hit gives a sequence the KV of its first blocks. A recurrent layer also needs the state at
the end of the last one, which does not follow from KV. So states are copied at block boundaries:

    blocks     | 0 | 1 | 2 | 3 | 4 |5            prompt of 5 blocks and a few tokens
    chunks      ───────────────────► ─►          one ends at the prompt's last boundary
    state                          S5            copied into a snapshot there
    cache        e0  e1  e2  e3  e4              S5's name is e4, the cache's entry for block 4

A snapshot is found and forgotten with its cache entry, so it belongs to the same prefix
(block_manager.py). **A hit without a snapshot is no hit.** Snapshots are taken at three places: at
the last boundary of each prompt; at the newest boundary of each running sequence, replacing its
last one, because a chat goes on there; and where a prompt found blocks without a state, since
others may share this prefix (Pan et al. 2024, "Marconi"). Snapshots that an ended sequence has
passed are evicted first, then the least recently used. With drafts a step may not reach a boundary:
then its snapshot gets no name.

Invariants (`check()` audits them): a snapshot is either free, or written by a step in flight, or
named. A step reads a snapshot in its forward pass and writes one after it, on the device and in the
order of steps.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

from nanoserve.hooks import Extra
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CacheEntry, Sequence, Step
from nanoserve_extras.base.metrics import Counter, Gauge, Metric

ZEROS, FIRST_ROW = 1, 2  # in the array of all states; 0: of a batch's padding


@dataclass
class Copies:
    """A step's operations on states, by their indices in the array of all states."""

    # Of each row: where the state lies, and where it is left, with drafts behind each token.
    places: dict[Sequence, list[int]]
    after: list[tuple[int, int]] = field(default_factory=list)  # copied then: (from, to)


@dataclass
class Snapshot:
    index: int  # in the array of all states
    end: int  # how many tokens it is the state of
    owner: Sequence | None = None  # it moves on with this one, and only this one evicts it
    num_found: int = 0


class Snapshots(Extra):
    """Decides where chunks end and which hits are usable, and observes finished steps. The array of
    states has one for padding, zeros, `num_rows` rows, snapshots, and `num_drafts` more for each
    row's drafts."""

    def __init__(self, scheduler: Scheduler, num_rows: int, num_snapshots: int,
                 num_drafts: int = 0):
        # Weak: the scheduler holds this object.
        self.scheduler, self.blocks = weakref.proxy(scheduler), weakref.proxy(scheduler.blocks)
        self.num_snapshots, self.num_drafts = num_snapshots, num_drafts
        self.first, self.behind = FIRST_ROW + num_rows, FIRST_ROW + num_rows + num_snapshots
        self.free = list(range(self.first, self.behind))
        self.named: OrderedDict[CacheEntry, Snapshot] = OrderedDict()  # least recently used first
        self.moving: dict[Sequence, CacheEntry] = {}  # the name of the one that moves on with it
        self.branch: dict[Sequence, int] = {}  # up to where it found blocks, but no state
        self.in_flight: dict[Step, dict[Sequence, Snapshot]] = {}  # the snapshots to be written
        # Whose last tokens were drafted: the first one's position, where each has left its state.
        self.drafted: dict[Sequence, tuple[int, list[int]]] = {}
        self.num_tokens = self.num_saved = self.num_evicted = 0  # see `metrics`

    # ------------------------------------------------- the scheduler's questions

    def usable(self, seq: Sequence, hits: list[CacheEntry]) -> list[CacheEntry]:
        """The first of the hits, up to the last that has a snapshot."""
        count = next((i for i in range(len(hits), 0, -1) if hits[i - 1] in self.named), 0)
        if count < len(hits):
            self.branch[seq] = len(hits) * self.blocks.block_size
        return hits[:count]

    def cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        """How many of `num_new` tokens to compute: up to a boundary that gets a snapshot. With
        blocks of 16, a prompt of 40 tokens is computed up to 32, and then to its end. One of 32
        stops at 16, because a hit leaves a token to compute."""
        size, end = self.blocks.block_size, start + num_new
        if not self.num_snapshots or not self.scheduler.config.enable_chunked_prefill:
            return num_new
        for boundary in (self.branch.get(seq, 0), self.last_boundary(seq)):
            if start < boundary < end:
                return boundary - start
        whole = end // size * size - start
        return whole if 0 < whole and end < len(seq.token_ids) else num_new

    def last_boundary(self, seq: Sequence) -> int:
        return (len(seq.token_ids) - 1) // self.blocks.block_size * self.blocks.block_size

    def dropped(self, step: Step) -> None:
        """A step was lost, with its snapshots. Its sequences start again: KV may be written twice
        to the same slots, but a token must not be folded into a state twice.
        """
        self.free += [one.index for one in self.in_flight.pop(step, {}).values()]
        for seq in step.num_new_tokens:
            if seq.row >= 0:
                self.scheduler.preempt(seq)

    # ------------------------------------------------------ the life of a step

    def plan(self, step: Step) -> Copies:
        """Called when the step is planned, before it is launched."""
        copies, size = Copies({}), self.blocks.block_size
        saves = self.in_flight[step] = {}
        for seq, start in zip(step.num_new_tokens, step.starts, strict=True):
            first, left = self.drafted.pop(seq, (start - 1, [FIRST_ROW + seq.row]))
            if seq in step.admitted:
                source = self.find_snapshot(seq) if start else ZEROS
            else:  # if 2 of 3 tokens from 17 on count, it goes on at 19
                source = left[start - 1 - first]
            copies.places[seq] = [source, FIRST_ROW + seq.row]
        for (seq, places), start in zip(copies.places.items(), step.starts, strict=True):
            end = start + (num_new := step.num_new_tokens[seq])
            if self.num_drafts and seq in step.drafts:
                spare = self.behind + seq.row * self.num_drafts
                places += range(spare, spare + num_new - 1)
                self.drafted[seq] = start, places[1:]
                end = min(end, (start // size + 1) * size)  # the first boundary, if it gets there
            if self.num_snapshots and end % size == 0 and (snapshot := self.take(seq, end)):
                saves[seq] = snapshot
                copies.after.append((places[min(end - start, len(places) - 1)], snapshot.index))
        return copies

    def find_snapshot(self, seq: Sequence) -> int:
        """The state from which an admitted sequence goes on. Once found, a snapshot stays."""
        snapshot = self.named[seq.cache_entry]
        snapshot.owner = None
        snapshot.num_found += 1
        self.named.move_to_end(seq.cache_entry)
        self.num_tokens += seq.num_computed_tokens
        return snapshot.index

    def take(self, seq: Sequence, end: int) -> Snapshot | None:
        """A snapshot to be written: a free one, the sequence's own last one, or the least recently
        used that moves on with no sequence. None where there is none of these."""
        stays = end in (self.last_boundary(seq), self.branch.get(seq))  # never when decoding
        if not self.free and not stays:
            self.forget_moving(seq)
        if not self.free:
            victim = next((entry for entry, one in self.named.items() if one.owner is None), None)
            if victim is None:
                return None
            self.num_evicted += 1
            self.evicted(victim)
        return Snapshot(self.free.pop(), end, None if stays else seq)

    def evicted(self, entry: CacheEntry) -> None:
        """The cache forgets an entry, or its snapshot is needed."""
        if snapshot := self.named.pop(entry, None):
            self.free.append(snapshot.index)

    def forget_moving(self, seq: Sequence) -> None:
        """The one behind the sequence, unless a prompt has found it meanwhile."""
        entry = self.moving.pop(seq, None)
        if entry in self.named and self.named[entry].owner is seq:
            self.evicted(entry)

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        """Name the step's snapshots, now that the blocks before them are in the cache."""
        for seq, snapshot in self.in_flight.pop(step, {}).items():
            entry, was_aborted = seq.cache_entry, seq.finish_reason and seq not in accepted
            # None: a collision. Or another sequence has computed it, or its parent, once more. Or
            # the drafts in front of the boundary were wrong.
            if was_aborted or entry is None or entry in self.named or (
                    self.blocks.entry_of[entry.block_id] is not entry) or (
                    seq.num_computed_tokens // self.blocks.block_size
                    != snapshot.end // self.blocks.block_size):
                self.free.append(snapshot.index)
                continue
            self.num_saved += 1
            self.named[entry] = snapshot
            if snapshot.owner is not None:
                self.forget_moving(seq)
                self.moving[seq] = entry

    def ended(self, sequences: list[Sequence]) -> None:
        """Keep the sequences' last snapshots, as the most recently used ones. Earlier ones of the
        same sequence are evicted next, unless several sequences began there: a chat goes on from
        its end."""
        for seq in sequences:
            self.branch.pop(seq, None)
            self.drafted.pop(seq, None)
            entry = self.moving.pop(seq, None)
            if entry not in self.named or self.named[entry].owner is not seq:
                continue
            self.named[entry].owner = None
            self.named.move_to_end(entry)
            while entry := entry.parent:
                if entry in self.named and self.named[entry].num_found < 2:
                    self.named.move_to_end(entry, last=False)

    # ------------------------------------------------------------ for a reader

    def metrics(self) -> list[Metric]:
        """num_tokens: that came from snapshots, also where a preempted sequence began anew."""
        name = "vllm:state_snapshot_{}".format
        return [Counter(name("tokens"), {}, self.num_tokens),
                Counter(name("saved"), {}, self.num_saved),
                Counter(name("evicted"), {}, self.num_evicted),
                Gauge(name("usage_perc"), {},
                      1 - len(self.free) / max(self.num_snapshots, 1))]

    def audit(self) -> None:
        """Audit everything. O(snapshots): for tests."""
        written = [one.index for saves in self.in_flight.values() for one in saves.values()]
        taken = [*self.free, *written, *(one.index for one in self.named.values())]
        assert sorted(taken) == list(range(self.first, self.behind)), (
            f"a snapshot of {self.num_snapshots} is lost or taken twice: {sorted(taken)}")
        for entry, one in self.named.items():
            assert self.blocks.entry_of[entry.block_id] is entry, (
                f"snapshot {one.index} is named by an entry that the cache has forgotten")
            assert one.owner is None or self.moving.get(one.owner) is entry, (
                f"snapshot {one.index} moves on with no sequence")
        assert self.in_flight.keys() <= set(self.scheduler.in_flight), "a step was not ended"
        for seq in self.moving.keys() | self.branch.keys() | self.drafted.keys():
            assert seq.finish_reason is None, f"sequence {seq.name} has ended, and keeps a snapshot"
