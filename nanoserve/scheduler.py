"""Continuous batching under one token budget: how many tokens of which sequence a step computes.

A step has a budget of `max_num_batched_tokens` tokens. Each sequence that decodes gets 1. Prompts
get the rest, in `order`. A prompt that gets fewer tokens than it has continues in the next step
(chunked prefill; Agrawal et al. 2023, "SARATHI"). Batches change from step to step (Yu et al. 2022,
"Orca").

    budget 8      step 0        step 1        step 2        step 3
    A (5 tokens)  ●●●●● ↦ a     ○ ↦ a         ○ ↦ a         ○ ↦ a       ● prompt token
    B (9 tokens)  ●●●           ●●●●●● ↦ b    ○ ↦ b         ○ ↦ b       ○ decoded token
    C (4 tokens)                ●             ●●● ↦ c       ○ ↦ c       ↦ a token is sampled

When blocks run out, the running sequence that is last in the order is *preempted*: it gives its
blocks back, waits again with all its tokens, and recomputes those that the prefix cache has lost.

Invariant: the scheduler may change *when* a token is computed, never *which* token comes out.
A step takes effect in `update()`. Until then a sequence merely counts its tokens in flight. So the
next step can be scheduled while a step runs (overlap), and a failed step is dropped by zeroing the
counts: nothing is rolled back. The device runs steps in order, so blocks of a sequence that ends
are free at once: their next owner writes later than any step in flight.

Not known here: torch, text, devices. Road not taken: swapping a victim's KV to the host's memory.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter

from nanoserve.block_manager import BlockManager
from nanoserve.config import POLICIES, EngineConfig
from nanoserve.hooks import Hooks
from nanoserve.sequence import CacheEntry, Sequence, Step

ORDER = attrgetter("order")


class Scheduler:
    """Owns every sequence's progress: `add`, then `schedule` and `update` in turn, or `finish`.

    config: a resolved `EngineConfig`. num_blocks: how many KV blocks there are. window: see
    `BlockManager`. most_drafts: for how many drafts of each row the runner has buffers; None: it
    has buffers for one sample of each row, and drafts take those of rows that sample nothing.
    vocab_size: token ids are below this.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, window: int | None = None,
                 hooks: Hooks | None = None, most_drafts: int | None = None,
                 vocab_size: int = 2 ** 31):
        assert config.max_num_batched_tokens and config.max_num_seqs, "config must be resolved"
        self.config, self.hooks = config, hooks or Hooks()
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs: int = config.max_num_seqs
        self.is_chunked = config.enable_chunked_prefill
        self.policy = POLICIES[config.scheduling_policy]
        self.in_stages = config.steps_at_once > 1  # then no sequence is in two steps at once
        self.most_drafts, self.vocab_size = most_drafts, vocab_size
        self.blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching,
                                   window, self.hooks)
        self.waiting: list[Sequence] = []  # sorted by `order`; the first is admitted next
        self.running: list[Sequence] = []  # sorted, too; the last is the first victim
        self.free_rows = list(range(config.max_num_seqs))
        self.in_flight: deque[Step] = deque()
        self.num_steps = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, and compute its block keys, so that no step has to wait for them.

        Raises `ValueError` for one that can never fit in the KV cache. The last output token is
        never computed: 64 slots serve 65 tokens, or 64 of a pooled prompt.
        """
        capacity = self.blocks.num_blocks * self.blocks.block_size
        longest = seq.request.max_num_tokens
        if max(longest - 1, seq.num_prompt_tokens) > capacity:
            raise ValueError(
                f"a request of up to {longest} tokens can't fit in the KV cache of "
                f"{capacity} tokens ({self.blocks.num_blocks} blocks of {self.blocks.block_size}): "
                "raise kv_cache_memory_bytes or num_gpu_blocks_override, or lower max_tokens")
        self.blocks.keys(seq)
        if not self.hooks.order:  # else it has none, and comes first, until the next step
            seq.order = self.order(seq)
        insort(self.waiting, seq, key=ORDER)

    def order(self, seq: Sequence) -> tuple:
        """A sequence's unique key in both queues; the smallest is first. The key of a policy is
        asked for once, so a preempted sequence returns to its old position."""
        [urgency] = self.hooks.order or [self.policy.urgency]
        return (urgency(seq), seq.request.arrival, seq.index)

    def sort(self) -> None:
        """Ask for the keys of all sequences anew: they may change where an extra has the order."""
        orders = [(seq, self.order(seq)) for seq in self.running + self.waiting]
        for seq, order in orders:  # all or, if the extra fails, none
            seq.order = order
        self.running.sort(key=ORDER)
        self.waiting.sort(key=ORDER)

    # ----------------------------------------------------------- scheduling

    def schedule(self) -> Step:
        """Give out the budget: a token to each sequence that decodes, the rest to prompts."""
        step = Step(self.num_steps, budget=self.max_num_batched_tokens)
        self.num_steps += 1
        self.in_flight.append(step)  # before extras are called: if one fails, the step is dropped
        if self.hooks.order:
            self.sort()
        if self.policy.interrupts or self.hooks.interrupts:
            self._interrupt(step)
        prompts = self._schedule_decodes(step)
        self._schedule_prompts(step, prompts)
        if not step.num_new_tokens:
            self.in_flight.pop()
        # With nothing in flight and nothing preempted, no sequence may run, and only deferred ones
        # may wait. Otherwise the engine would never go on.
        assert self.in_flight or step.preempted or (
            not self.running and (step.deferred or not self.waiting)), (
            f"stuck: nothing is scheduled for {[one.name for one in self.running + self.waiting]}")
        return step

    def _schedule_decodes(self, step: Step) -> list[Sequence]:
        """A token for each running sequence that decodes. This loop is the hot path. The budget
        covers all of them, because it is at least `max_num_seqs`.

        Returns the running prompts, whose gap is larger. They get blocks here and tokens later,
        since a prompt that lacks blocks preempts sequences, which must not have a share yet.
        """
        block_size, in_stages = self.blocks.block_size, self.in_stages
        prompts: list[Sequence] = []
        rows = self.running  # `_make_room` may take victims off its end
        if step.blocked_on is not None:
            rows = self.running[:-1]  # `_interrupt` waits to preempt the last one: no share for it
        for seq in rows:
            start = seq.num_computed_tokens + seq.num_inflight_tokens
            num_tokens = len(seq.token_ids) + seq.num_unknown_tokens
            if seq.num_unknown_tokens and (
                    in_stages or seq.request.needs_output_tokens
                    or num_tokens >= seq.request.max_num_tokens):
                continue  # the unknown token must be known first, or is the last (8th of 8)
            gap = num_tokens - start
            end = start + (gap if gap <= 1 else min(gap, step.budget))
            if end > len(seq.block_table) * block_size and not self._make_room(step, seq, end):
                break
            if gap > 1:
                prompts.append(seq)
            elif gap == 1:  # with k drafts in flight the gap is 1 - k, until these are checked
                self._add_row(step, seq, start, 1)
        return prompts

    def _make_room(self, step: Step, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the last running sequences until `seq` has blocks for `num_tokens`. After that no
        new sequence is admitted: it would take the blocks that a running one waits for.

        Returns False if `seq` itself was preempted, or if a step in flight still computes the next
        victim. Then neither `seq` nor any sequence after it gets a share. As `running` is sorted,
        no victim has a share yet.
        """
        while not self.blocks.allocate(seq, num_tokens):
            num_missing = self.blocks.num_blocks_for(num_tokens) - len(seq.block_table)
            step.blocked_on = seq, "blocks", num_missing
            victim = self.running[-1]
            if victim.num_inflight_tokens:
                return False
            step.preempted[victim] = seq
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Let a running sequence wait again, with all its tokens. No step in flight computes it."""
        self.running.remove(seq)
        self._retire(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        insort(self.waiting, seq, key=ORDER)

    def _schedule_prompts(self, step: Step, prompts: list[Sequence]) -> None:
        """Give the budget that decodes have left to the running `prompts` and to waiting ones, in
        order: a running prompt of 3,000 tokens does not hold up an urgent one that waits."""
        while step.budget > 0:
            running, new = prompts[0] if prompts else None, self._next_waiting(step)
            if new and (running is None or new.order < running.order):
                self._admit(step, new)
            elif running and self._add_chunk(step, running):
                del prompts[0]
            else:
                break
        if prompts:
            step.blocked_on = prompts[0], "budget", 0

    def _next_waiting(self, step: Step) -> Sequence | None:
        """The first waiting sequence that is not deferred; None if admission has stopped or no row
        is left. The deferred ones come first in `waiting`, and each of them reserves a row."""
        place = len(step.deferred)
        if step.blocked_on is not None or place >= min(len(self.waiting), len(self.free_rows)):
            return None
        return self.waiting[place]

    def _add_chunk(self, step: Step, seq: Sequence) -> bool:
        """Add a running prompt's next chunk. Returns False if the rest of the prompt must be
        computed at once, and is more than the budget."""
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        num_new = min(len(seq.token_ids) - start, step.budget)
        if start + num_new < len(seq.token_ids) and not self.is_chunked:
            return False
        if num_new := self._cut(step, seq, start, num_new):
            self._add_row(step, seq, start, num_new)
        return True

    def _cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        """How many of a chunk's `num_new` tokens the extras allow; 0: no chunk in this step."""
        for cut in self.hooks.cut:
            num_new = cut(step, seq, start, num_new)
        return num_new

    def _admit(self, step: Step, seq: Sequence) -> None:
        """Let a waiting sequence run, or note what it lacks: then no sequence after it starts.

        One exception: while the next block of `seq` is being computed for another sequence, or
        read from a file, `seq` is *deferred*, and hits the block later. Sequences after it may
        start only if the step holds all of their tokens: they only decode from then on. A deferred
        sequence reserves a row, so at most `max_num_seqs` sequences are deferred: no step searches
        a long queue of requests that wait for the same block.
        """
        hits = self.blocks.find_prefix(seq)
        if owner := self._pending(seq, len(hits)):
            step.deferred[seq] = owner
            return
        num_loaded = self.blocks.block_size * sum(
            find(step, seq, len(hits)) for find in self.hooks.find)
        # The share is computed *after* the hit: 40 tokens, 32 of them cached, ask for 8.
        start = len(hits) * self.blocks.block_size + num_loaded
        num_left = len(seq.token_ids) - start
        step.blocked_on = self._what_it_lacks(step, seq, hits, num_left)
        if step.blocked_on is not None:
            return
        num_new = self._cut(step, seq, start, min(num_left, step.budget))
        if not num_new:
            step.blocked_on = seq, "cut", self.blocks.num_needed(hits, len(seq.token_ids))
            return
        self._start(step, seq, hits)
        self._add_row(step, seq, start, num_new, num_loaded)
        self.blocks.allocate(seq, start + num_new)
        if seq.num_cached_tokens is None:  # a hit after a preemption saves nothing
            seq.num_cached_tokens = start

    def _what_it_lacks(self, step: Step, seq: Sequence, hits: list[CacheEntry],
                       num_left: int) -> tuple[Sequence, str, int] | None:
        """Why a waiting sequence with `num_left` tokens to compute can't start: a value for
        `Step.blocked_on`; None if it can."""
        must_be_whole = step.deferred or not self.is_chunked
        if num_left > step.budget and must_be_whole:
            return seq, "tokens", num_left
        # There must be room for all its tokens, not only for this chunk: otherwise prompts that
        # start together would preempt each other, which wastes more than some idle blocks.
        num_needed = self.blocks.num_needed(hits, len(seq.token_ids))
        if num_needed > self.blocks.num_free_blocks:
            return seq, "blocks", num_needed
        return None

    def _start(self, step: Step, seq: Sequence, hits: list[CacheEntry]) -> None:
        """Let a waiting sequence run. It gets a row, and the blocks of its prefix hit."""
        del self.waiting[len(step.deferred)]
        insort(self.running, seq, key=ORDER)
        step.admitted.append(seq)
        seq.row = self.free_rows.pop()
        seq.num_computed_tokens = len(hits) * self.blocks.block_size
        self.blocks.share(seq, hits)

    def _pending(self, seq: Sequence, num_hits: int) -> Sequence | None:
        """The sequence for which a step in flight, or this step, computes the next block of `seq`:
        `seq` itself while the block is read from a file, None if no step computes it."""
        key = self.blocks.next_key(seq, num_hits)
        if key is None:
            return None
        for step in self.in_flight:  # the last is the step that is being scheduled
            if key in step.pending_keys:
                return step.pending_keys[key]
        return seq if any(is_reading(seq) for is_reading in self.hooks.is_reading) else None

    def _add_row(self, step: Step, seq: Sequence, start: int, num_new: int,
                 num_loaded: int = 0) -> None:
        """Let the step compute `num_new` tokens from position `start` on, and load the `num_loaded`
        tokens before `start`. All of them are in flight until the step has finished."""
        step.num_new_tokens[seq] = num_new
        step.starts.append(start)
        step.budget -= num_new
        seq.num_inflight_tokens += num_new
        if num_new > 1 or num_loaded:  # not for decodes, the most frequent rows
            size = self.blocks.block_size
            keys = self.blocks.keys(seq)[(start - num_loaded) // size:(start + num_new) // size]
            step.pending_keys.update(dict.fromkeys(keys, seq))
            if num_loaded:
                step.num_loaded[seq] = num_loaded
                seq.num_inflight_tokens += num_loaded
        if start < seq.num_prompt_logprobs and seq.needs_all_positions:
            end = min(start + num_new, seq.num_prompt_logprobs)
            step.prompt_logprob_positions[seq] = range(start, end)
        if start + num_new == len(seq.token_ids) + seq.num_unknown_tokens:
            step.sampling.append(seq)  # an unfinished chunk samples nothing
            seq.num_unknown_tokens += 1

    def add_drafts(self, step: Step) -> None:
        """Ask extras for draft tokens of the decoding rows of a scheduled step, within the budget
        and blocks that are left. If 7 of at most 10 tokens are known, a row gets 2 drafts at most,
        since the step samples one token more than it has drafts.

        Each draft adds one sample. An engine without `most_drafts` has room for `max_num_seqs`
        samples. None of its extras guesses tokens (`Extra.draft`), but one may force them
        (`Extra.force`).
        """
        if step.preempted:
            return
        num_free = self.max_num_seqs - len(step.sampling)
        for seq, start in zip(list(step.num_new_tokens), step.starts, strict=True):
            num_known = len(seq.token_ids)
            if start != num_known - 1 or num_known == seq.num_prompt_tokens:
                continue  # it computes more than its newest token, or that one is not known yet
            room = (len(seq.block_table) + self.blocks.num_free_blocks) * self.blocks.block_size
            buffers = num_free if self.most_drafts is None else self.most_drafts
            most = min(step.budget, seq.request.max_num_tokens - 1 - num_known, room - num_known,
                       buffers)
            if most > 0:
                num_free -= self._add_drafts_of(step, seq, most)

    def _add_drafts_of(self, step: Step, seq: Sequence, most: int) -> int:
        """Add up to `most` drafts of one row, of the first extra that has some. Returns how many.
        """
        for ask in [*self.hooks.force, *self.hooks.draft]:
            if drafts := self._ask(ask, step, seq, most):
                if ask in self.hooks.force:
                    step.forced.add(seq)
                self.blocks.allocate(seq, len(seq.token_ids) + len(drafts))
                step.drafts[seq] = drafts
                step.num_new_tokens[seq] += len(drafts)
                seq.num_inflight_tokens += len(drafts)
                step.budget -= len(drafts)
                return len(drafts)
        return 0

    def _ask(self, ask: Callable, step: Step, seq: Sequence, most: int) -> list[int]:
        """Up to `most` drafts from the hook `ask`. An invalid answer ends this sequence's request
        and no other: an id beyond the vocabulary would read outside of the embedding. -1 stands for
        a draft that the extra fills in later."""
        found = ask(seq, most)
        if isinstance(found, list) and all(
                isinstance(draft, int) and -1 <= draft < self.vocab_size for draft in found[:most]):
            return found[:most]
        extra = getattr(ask, "__self__", ask)
        step.failed[seq] = (f"{getattr(extra, 'name', extra)} must return a list of token ids below"
                            f" {self.vocab_size} as drafts, got {found!r:.80}")
        return []

    def _interrupt(self, step: Step) -> None:
        """Preempt running sequences, the last first, while the first waiting one
        is earlier in the order and lacks a row or blocks. If a step in flight still computes the
        last running sequence, that one gets no share of this step, and the next call preempts it.
        """
        while self.running and self.waiting and self.waiting[0].order < self.running[-1].order:
            seq, last = self.waiting[0], self.running[-1]
            hits = self.blocks.find_prefix(seq)
            num_needed = self.blocks.num_needed(hits, len(seq.token_ids))
            fits = self.free_rows and num_needed <= self.blocks.num_free_blocks
            if fits or self._pending(seq, len(hits)):  # it starts, or is deferred: no victim needed
                return
            if last.num_inflight_tokens:
                step.blocked_on = last, "step", 0
                return
            step.preempted[last] = seq
            self.preempt(last)

    # ------------------------------------------------------------- results

    def update(self, step: Step, sampled: list[int | None]) -> dict[Sequence, list[int]]:
        """Take a finished step into account; steps come back in the order they were scheduled.

        sampled: one token for each of `step.samples()`, None where a prompt is pooled. Returns the
        sequences that closed their gap, each with its new tokens (a pooled one has none); some have
        finished (`finish_reason`). Wrong drafts don't count as computed: their slots are reused.
        """
        assert self.in_flight and self.in_flight[0] is step, (
            f"step {step.index} is not the oldest step in flight")
        assert len(sampled) == len(step.samples()), (
            f"step {step.index} samples {len(step.samples())} tokens, got {len(sampled)}")
        self.in_flight.popleft()
        self._take_samples(step, sampled)
        may_have_filled = self._count_computed(step)
        try:
            for seq in may_have_filled:
                self.blocks.commit(seq)
                self.blocks.release(seq)
        finally:  # runs even if a hook raised: a sequence must not continue past its stop token
            for seq in step.accepted:
                request, newest = seq.request, seq.token_ids[-1]
                if newest in request.stop_ids or len(seq.token_ids) >= request.max_num_tokens:
                    self._end(seq, newest)
        return step.accepted

    def _take_samples(self, step: Step, sampled: list[int | None]) -> None:
        """Append the new tokens, unless their sequence has ended meanwhile."""
        for seq, tokens in step.outcome(sampled).items():
            seq.num_unknown_tokens -= 1
            if step.drafts:  # 3 of 5 drafts are right: 6 computed, 4 count
                seq.num_computed_tokens -= len(step.drafts.get(seq, ())) + 1 - len(tokens)
            if seq.finish_reason is None:
                seq.token_ids += tokens
                step.accepted[seq] = tokens

    def _count_computed(self, step: Step) -> list[Sequence]:
        """Count the step's tokens as computed. Returns the sequences that may have filled a block
        with them."""
        block_size, may_have_filled = self.blocks.block_size, []
        for seq, num_new in step.num_new_tokens.items():
            num_done = num_new + step.num_loaded.get(seq, 0)
            seq.num_inflight_tokens -= num_done
            seq.num_computed_tokens += num_done
            # One token fills a block only where it ends at a multiple of the block's size.
            ends_block = num_done > 1 or seq.num_computed_tokens % block_size == 0
            if ends_block and seq.finish_reason is None:
                may_have_filled.append(seq)
        return may_have_filled

    def _end(self, seq: Sequence, newest: int) -> None:
        """End a sequence after its newest token, which is a stop token or the last one allowed."""
        request = seq.request
        if newest not in request.stop_ids or any(ask(seq) for ask in self.hooks.gave_up):
            self.finish(seq, "length")
        else:
            self.finish(seq, "stop", None if newest in request.eos_ids else newest)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None,
               num_tokens: int | None = None) -> None:
        """End a sequence in whatever state it is; ending it twice is harmless.

        num_tokens: how many tokens the sequence keeps, if a step brought more. If its last token
        has ended it and also completes a stop string, the reason becomes "stop": the text is cut at
        the string.
        """
        if num_tokens is not None:
            del seq.token_ids[num_tokens:]
        if seq.finish_reason is not None:
            if "abort" not in (reason, seq.finish_reason):
                seq.finish_reason, seq.stop_reason = reason, stop_reason
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.row < 0:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._retire(seq)

    def drop_in_flight(self) -> None:
        """Forget all launched steps, after an error or Ctrl-C. Their tokens are scheduled again,
        and written to the same slots."""
        dropped = list(self.in_flight)
        self.in_flight.clear()
        for seq in self.running:
            seq.num_inflight_tokens = seq.num_unknown_tokens = 0
        for step in dropped:
            for tell in self.hooks.dropped:
                tell(step)

    def _retire(self, seq: Sequence) -> None:
        """Give back the row and the blocks of a sequence that stops running."""
        self.free_rows.append(seq.row)
        seq.row = -1
        self.blocks.free(seq)

    def check(self) -> None:
        """Audit the whole state, blocks included. O(everything): for tests."""
        self.blocks.check(self.running + self.waiting)
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=ORDER), "running or waiting is out of order"
            assert not any(seq.finish_reason for seq in queue), "an ended sequence is still queued"
        rows = [seq.row for seq in self.running] + self.free_rows
        assert sorted(rows) == list(range(self.max_num_seqs)), (
            f"a row of {self.max_num_seqs} is lost or taken twice: {rows}")
        inflight = sum((Counter(step.num_new_tokens) + Counter(step.num_loaded)
                        for step in self.in_flight), Counter[Sequence]())
        for seq in self.running + self.waiting:
            assert seq.num_inflight_tokens == inflight[seq], (
                f"sequence {seq.name} counts {seq.num_inflight_tokens} tokens in flight, the steps "
                f"{inflight[seq]}")
            num_drafts = sum(len(step.drafts.get(seq, ())) for step in self.in_flight)
            assert seq.num_computed_tokens + inflight[seq] <= seq.num_tokens + num_drafts, (
                f"sequence {seq.name} computed tokens it lacks")
            assert seq.num_unknown_tokens <= len(self.in_flight), (
                f"sequence {seq.name} awaits {seq.num_unknown_tokens} samples of "
                f"{len(self.in_flight)} steps")
        for seq in self.waiting:
            assert seq.row < 0 and not seq.block_table and not seq.num_inflight_tokens, (
                f"sequence {seq.name} waits, but holds a row, blocks or a step in flight")
