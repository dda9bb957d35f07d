"""Why a sequence waits: a sentence for each that gets no tokens in a step.

    A is computed, B begins with the same blocks, C is longer than what the budget leaves, D is last

    B waits for blocks that A is computing
    C needs 14 tokens at once to overtake B, 2 of the budget are left
    D stands behind C

The scheduler notes in the step which sequences were deferred for another one's blocks, which were
preempted for which, and at which sequence it stopped and why (`Step.deferred`, `Step.preempted`,
`Step.blocked_on`). This module turns the notes into sentences. One waiting sequence is *next in
line* and has its own reason; all sequences behind it wait only for that one.

Invariant: each sequence that is known to the scheduler and has no share of the step gets exactly
one reason here, or stands behind the next in line. Asking changes nothing, and costs O(running)
however long the queue is. Known limit: drafts take budget and blocks that are left at the end of
`schedule()`, so with drafts a sentence may name fewer free blocks than there were. The scheduler
only takes notes, so its hot path formats no text.
"""

from dataclasses import dataclass, field

from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.summary import many


@dataclass
class Waits:
    """Sequences that wait in a step. of: the sentence about each, without the sequence's name at
    its beginning. next_in_line: waiting sequences that are not in `of` are behind this one (None:
    there are none)."""

    of: dict[Sequence, str] = field(default_factory=dict)
    next_in_line: Sequence | None = None


def explain(scheduler: Scheduler, step: Step) -> Waits:
    """The reasons in a step. Call it after the `schedule()` that made the step, before the
    scheduler's state changes again."""
    waits = Waits()
    if len(step.num_new_tokens) < len(scheduler.running):
        _explain_running(scheduler, step, waits.of)
    for seq, owner in step.deferred.items():
        waits.of[seq] = ("waits for blocks that are being read from the folder" if owner is seq else
                         f"waits for blocks that {owner.name} is computing")
    line = scheduler.waiting[len(step.deferred):]
    if line:
        waits.next_in_line = line[0]
        waits.of[line[0]] = _of_next_in_line(scheduler, step, line[0])
    return waits


def _explain_running(scheduler: Scheduler, step: Step, reasons: dict[Sequence, str]) -> None:
    """Reasons of running sequences. Before the one at which the step stopped, a sequence can only
    wait for a step in flight, or be held back by an extra (`Extra.cut`)."""
    stopped, lacks, _ = step.blocked_on or (None, "", 0)
    reason = ""
    for seq in scheduler.running:
        if seq in step.num_new_tokens:
            continue
        if seq is stopped:
            reasons[seq] = _of_stopped(scheduler, step)
            reason = reasons[seq] if lacks == "budget" else f"stands behind {seq.name}"
        else:
            reasons[seq] = reason or (
                "waits for its token of a step in flight" if seq.num_inflight_tokens
                else _of_cut(seq))


def _of_next_in_line(scheduler: Scheduler, step: Step, seq: Sequence) -> str:
    """The reason of the next in line. If there are several, the one that lasts longest."""
    stopped, lacks, _ = step.blocked_on or (None, "", 0)
    kept = len(step.deferred)
    if seq in step.preempted:
        return lost_blocks(seq, step.preempted[seq])
    if step.preempted:
        victim, taker = list(step.preempted.items())[-1]
        return f"waits: blocks ran out, {victim.name} {lost_blocks(victim, taker)}"
    if lacks == "step":
        return f"waits for {stopped.name} to make way"
    if lacks == "blocks" and stopped is not seq:
        return f"waits: blocks ran out for {stopped.name}"
    if kept >= len(scheduler.free_rows):
        return f"has no seat: max_num_seqs={scheduler.max_num_seqs}" + (
            f", {kept} of them kept for those that sit out" if kept else "")
    return _of_stopped(scheduler, step)


def _of_stopped(scheduler: Scheduler, step: Step) -> str:
    """The resource that the sequence lacks at which the step stopped; the budget, if the step did
    not stop early."""
    seq, lacks, needed = step.blocked_on or (None, "budget", 0)
    if lacks == "cut":
        return _of_cut(seq)
    if lacks == "step":
        return f"makes way for {scheduler.waiting[0].name} when its own step ends"
    if lacks == "budget":
        return f"gets no tokens: the budget of {scheduler.max_num_batched_tokens:,} is used up"
    if lacks == "tokens":
        first = next(iter(step.deferred), None)
        budget = step.budget + sum(map(len, step.drafts.values()))
        why = "(enable_chunked_prefill=False)" if first is None else f"to overtake {first.name}"
        return f"needs {many(needed, 'token')} at once {why}, {budget} of the budget are left"
    free = scheduler.blocks.num_free_blocks
    reason = f"needs {many(needed, 'block')}, {free:,} {'is' if free == 1 else 'are'} free"
    if seq.row < 0:
        return reason
    # The last running sequence would release its blocks, but a step in flight still writes to them.
    victim = scheduler.running[-1]
    whose = "its own step" if victim is seq else f"the step of {victim.name}"
    return f"{reason} until {whose} ends"


def _of_cut(seq: Sequence) -> str:
    """The reason of a sequence whose tokens an extra has cut to none."""
    return "waits for the next step: " + (
        "this one encodes enough images of others" if seq.request.contents
        else "several are in flight, each with a part of all")


def lost_blocks(victim: Sequence, taker: Sequence) -> str:
    """The sentence about a preemption. The last running sequence can preempt only itself."""
    return "was preempted: it needs a block, and nobody stands behind it" if victim is taker else (
        f"was preempted for {taker.name}")
