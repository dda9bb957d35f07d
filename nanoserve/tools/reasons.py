"""Why a sequence waits: a sentence for each that gets no tokens in a step, from public state.

    A is computed, B begins with the same blocks, C is longer than what the budget leaves, D is last

    B waits for blocks that A is computing
    C needs 14 tokens at once, 2 of the budget are left: it may overtake B only whole
    D stands behind C

The scheduler admits in order and stops at the first sequence that does not fit. So one sequence is
*next in line* and has a reason of its own; all that stand behind it wait for that alone. Beside it
there are two other kinds of waiting: sequences that sit out a step for blocks that another one is
computing, and running sequences for which no token of the budget was left.

The scheduler itself keeps no reasons. It records only what can't be found out afterwards: which
sequences sat out, and which were preempted for which (`Step.sitting_out`, `Step.preempted`).
Everything else is in its public state right after `schedule()`, because the attempt that failed was
the last thing it did: blocks and budget have not changed since.

Invariant: each sequence that is known to the scheduler and has no share of the step gets exactly
one reason here, or stands behind the next in line. Asking changes nothing, and costs O(running)
however long the queue is. Known limit: drafts take budget and blocks that are left at the end of
`schedule()`, so with drafts a sentence may name fewer free blocks than there were. Not known here:
pages, tables, torch. Road not taken: sentences made by the scheduler, in its hot path.
"""

from dataclasses import dataclass, field

from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step


@dataclass
class Waits:
    """Sequences that wait in a step. of: what follows a sequence's name in a sentence about it.
    next_in_line: waiting sequences not in `of` stand behind this one (None: there are none)."""

    of: dict[Sequence, str] = field(default_factory=dict)
    next_in_line: Sequence | None = None

    def reason(self, seq: Sequence) -> str:
        """What follows the name of a waiting sequence in a sentence."""
        if seq in self.of or self.next_in_line is None:
            return self.of.get(seq, "waits")
        return f"stands behind {self.next_in_line.name}"


def explain(scheduler: Scheduler, step: Step) -> Waits:
    """Ask this between `schedule()`, which made the step, and whatever changes the state next."""
    drafts = sum(map(len, step.drafts.values()))
    budget = scheduler.max_num_batched_tokens - step.num_tokens + drafts
    waits = Waits()
    short = _explain_running(scheduler, step, budget, waits.of)
    _explain_sitting_out(scheduler, step, waits.of)
    first = waits.next_in_line = next((seq for seq in scheduler.waiting if seq not in waits.of),
                                      None)
    if first is not None:
        waits.of[first] = _of_next_in_line(scheduler, step, budget, short, first)
    return waits


def many(count: int, noun: str) -> str:
    """ "1 block", "2 blocks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# ------------------------------------------------------------- those that run


def _explain_running(scheduler: Scheduler, step: Step, budget: int,
                     reasons: dict[Sequence, str]) -> Sequence | None:
    """Returns the one for which there were no blocks, if there is one: the step ended at it."""
    if len(step.num_new_tokens) == len(scheduler.running):
        return None  # the usual case: all of them have a share
    short = None
    for seq in scheduler.running:
        if seq in step.num_new_tokens:
            continue
        if _awaits_its_sample(seq):
            reasons[seq] = "waits for its token of a step in flight"
        elif short is not None:
            reasons[seq] = f"stands behind {short.name}"
        elif budget <= 0:
            reasons[seq] = _used_up(scheduler)
        else:
            short, reasons[seq] = seq, _needs_blocks(scheduler, seq, budget)
    return short


def _awaits_its_sample(seq: Sequence) -> bool:
    """With overlap: nothing is computed until the host has seen the token (or it is the last)."""
    return bool(seq.num_unknown_tokens and (seq.needs_output_tokens or seq.num_draft_tokens
                                            or seq.num_tokens >= seq.max_num_tokens))


def _needs_blocks(scheduler: Scheduler, seq: Sequence, budget: int) -> str:
    """The last in the order would give its own up, but a step in flight still writes to them."""
    blocks, victim = scheduler.blocks, scheduler.running[-1]
    end = seq.num_computed_tokens + seq.num_inflight_tokens + min(
        seq.num_uncomputed_tokens, budget)
    missing = blocks.num_blocks_for(end) - len(seq.block_table)
    whose = "its own step" if victim is seq else f"the step of {victim.name}"
    return f"{_blocks_missing(missing, blocks.num_free_blocks)} until {whose} ends"


# ------------------------------------------------------------- those that wait


def _explain_sitting_out(scheduler: Scheduler, step: Step, reasons: dict[Sequence, str]) -> None:
    """By the first of their blocks that a step in flight computes, this one included."""
    if not step.sitting_out:
        return
    owners: dict[bytes, Sequence] = {}
    size, keys = scheduler.blocks.block_size, scheduler.blocks.keys
    for one in [*scheduler.in_flight, step]:
        for (seq, num_new), start in zip(one.num_new_tokens.items(), one.starts, strict=True):
            first = start - one.num_loaded.get(seq, 0)
            if num_new > 1 or first < start:  # as in the scheduler: not for what decoding fills
                for key in keys(seq)[first // size:(start + num_new) // size]:
                    owners.setdefault(key, seq)
    for seq in step.sitting_out:
        owner = next((owners[key] for key in keys(seq) if key in owners), None)
        reasons[seq] = (f"waits for blocks that {owner.name} is computing" if owner is not None else
                        "waits for blocks that are being read from the folder")


def _of_next_in_line(scheduler: Scheduler, step: Step, budget: int, short: Sequence | None,
                     seq: Sequence) -> str:
    """The scheduler's own questions, in an order that names what lasts longest first."""
    blocks, kept = scheduler.blocks, len(step.sitting_out)
    if step.preempted or short is not None:
        return _blocks_ran_out(step, short, seq)
    if len(scheduler.running) + kept >= scheduler.max_num_seqs:
        return f"has no seat: max_num_seqs={scheduler.max_num_seqs}" + (
            f", {kept} of them kept for those that sit out" if kept else "")
    if budget <= 0:
        return _used_up(scheduler)
    hits = blocks.find_prefix(seq)
    num_new = len(seq.token_ids) - len(hits) * blocks.block_size
    if num_new > budget and (kept or not scheduler.enable_chunked_prefill):
        return f"needs {many(num_new, 'token')} at once, {budget} of the budget are left: " + (
            f"it may overtake {step.sitting_out[0].name} only whole" if kept else
            "enable_chunked_prefill=False")
    # A hit that nobody holds is one of the free blocks; one that somebody holds needs none of them.
    held = sum(blocks.ref_counts[hit.block_id] > 0 for hit in hits)
    missing = blocks.num_blocks_for(len(seq.token_ids)) - held
    return _blocks_missing(missing, blocks.num_free_blocks) if (
        missing > blocks.num_free_blocks) else "waits"


def _blocks_ran_out(step: Step, short: Sequence | None, seq: Sequence) -> str:
    """Nobody is admitted to blocks that somebody waits for."""
    if seq in step.preempted:
        return lost_blocks(seq, step.preempted[seq])
    if step.preempted:
        victim, taker = list(step.preempted.items())[-1]
        return f"waits: blocks ran out, {victim.name} {lost_blocks(victim, taker)}"
    return f"waits: blocks ran out for {short.name}"


def lost_blocks(victim: Sequence, taker: Sequence) -> str:
    """Who was preempted for whom. The last in the order has nobody to preempt but itself."""
    return "was preempted: it needs a block, and nobody stands behind it" if victim is taker else (
        f"was preempted for {taker.name}")


def _used_up(scheduler: Scheduler) -> str:
    return f"gets no tokens: the budget of {scheduler.max_num_batched_tokens:,} is used up"


def _blocks_missing(missing: int, free: int) -> str:
    return f"needs {many(missing, 'block')}, {free:,} {'is' if free == 1 else 'are'} free"
