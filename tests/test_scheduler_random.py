"""Random workloads: whatever happens around a request, it gets the tokens it would get alone.

The scheduler with a fake device. Its "model" is a hash, its KV cache a dict from slot to number,
and what it computes for a token depends on everything before it, *read through the block table*. So
a stale block, a false prefix hit, a wrong position, or a block written by two owners gives wrong
tokens, as on a real device, and the naive twin (a list, no blocks) tells. `engine_workloads` does
the same with the real engine.

Random here means arrivals, lengths, shared prefixes, priorities, several samples, aborts, stop
strings, failed steps, tiny caches, budgets, block sizes, guessed tokens, right and wrong ones, and
results that arrive a step late. Each test also counts what happened in its workloads: a workload
without preemptions proves nothing.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from helpers import sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.block_manager import BlockManager
from nanoserve.config import POLICIES, EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

pytestmark = pytest.mark.floor
VOCAB_SIZE, EOS, STOP = 16, 0, 1
STOP_STRING = "###"
FAMILIES = ([7, 3, 9, 2, 12, 5, 5, 8, 14, 2, 6, 11] * 2, [7, 3, 9, 2, 4, 4, 4, 4] * 3)


@dataclass
class Ask:
    """One request of a workload. Times are in steps."""

    prompt: list[int]
    max_tokens: int
    arrival: int = 0
    priority: int = 0
    n: int = 1
    ignore_eos: bool = False
    stop_string_at: int | None = None  # the stop string is in the text after so many tokens
    abort: int | None = None


@dataclass
class Workload:
    asks: list[Ask]
    num_blocks: int
    block_size: int
    budget: int = 64
    max_num_seqs: int = 8
    caching: bool = True
    chunking: bool = True
    policy: str = "fcfs"
    depth: int = 0
    window: int | None = None  # how many keys a query sees, its own included
    num_drafts: int = 0  # the most that are guessed for a row
    step_seconds: float = 0.01  # which policy "shortest" reckons with
    order: str | None = None  # "changing": another order with each token; "interrupting", too
    failures: set[int] = field(default_factory=set)  # when all steps in flight are lost
    resets: set[int] = field(default_factory=set)  # when the prefix cache is to be forgotten


# ------------------------------------------------------- the model and its twin


def attend(history: list[int], token: int, window: int | None) -> int:
    """The model: a token's "KV" depends on the token and on all KV before it, position included, or
    with a window on the `window - 1` last of them."""
    first = 0 if window is None else max(0, len(history) - window + 1)
    return hash((len(history), token, *history[first:]))


def choose(history: list[int], seed: int, window: int | None) -> int:
    return hash((seed, *history[-(window or 0):])) % VOCAB_SIZE


def alone(ask: Ask, seed: int, window: int | None) -> tuple[list[int], str, int | str | None]:
    """The naive twin: output tokens, finish_reason and stop_reason without any engine."""
    kv: list[int] = []
    for token in ask.prompt:
        kv.append(attend(kv, token, window))
    output: list[int] = []
    while True:
        output.append(choose(kv, seed, window))
        if output[-1] in (EOS, STOP) and not ask.ignore_eos:
            return output, "stop", None if output[-1] == EOS else STOP
        if len(output) == ask.stop_string_at:
            return output, "stop", STOP_STRING
        if len(output) == ask.max_tokens:
            return output, "length", None
        kv.append(attend(kv, output[-1], window))


@dataclass
class Launched:
    """A step as it is packed at its launch. Nothing that the host does later changes it."""

    step: Step
    rows: list[tuple[Sequence, list[int], int, list[int]]]  # its slots, first position and tokens
    tokens: list[int] | None = None  # sampled, once it has run


class FakeDevice:
    """Runs steps in the order of their launch, and as late as it can: when their tokens are asked
    for. Knows of a sequence only what its block table and its inputs were at the launch.

    All rows of a step read before any of them writes: nobody may rely on another row's work.
    """

    def __init__(self, blocks: BlockManager, window: int | None):
        self.blocks, self.window = blocks, window
        self.slots: dict[int, int] = {}
        self.last_sampled: dict[Sequence, int] = {}
        self.queue: deque[Launched] = deque()

    def launch(self, step: Step) -> Launched:
        size, rows = self.blocks.block_size, []
        for (seq, num_new), start in zip(step.num_new_tokens.items(), step.starts, strict=True):
            slots = [block * size + i for block in seq.block_table for i in range(size)]
            for slot in slots[start:start + num_new]:
                self.check_may_write(slot // size)
            tokens = seq.token_ids + step.drafts.get(seq, [])
            rows.append((seq, slots, start, tokens[start:start + num_new]))
        for seq, num_loaded in step.num_loaded.items():  # behind what it has computed
            first, end = seq.num_computed_tokens, seq.num_computed_tokens + num_loaded
            for block in seq.block_table[first // size:end // size]:
                self.check_may_write(block)
        self.queue.append(Launched(step, rows))
        return self.queue[-1]

    def fetch(self, launched: Launched) -> list[int]:
        while launched.tokens is None:
            self.run(self.queue.popleft())
        return launched.tokens

    def synchronize(self) -> None:
        while self.queue:
            self.run(self.queue.popleft())

    def run(self, launched: Launched) -> None:
        step, written, sampled = launched.step, {}, {}
        for seq, slots, start, tokens in launched.rows:
            if len(tokens) < step.num_new_tokens[seq]:  # which only the device knows
                tokens.append(self.last_sampled[seq])
            assert len(tokens) == step.num_new_tokens[seq]
            # What a window has left behind may hold another's numbers, or none: nobody looks.
            first = 0 if self.window is None else max(0, start - self.window + 1)
            history = [self.slots.get(slot) for slot in slots[:start]]
            assert None not in history[first:], "a slot is read that was never written"
            chosen = sampled[seq] = []
            for slot, token in zip(slots[start:], tokens, strict=False):
                assert slot not in written, f"slot {slot} is written twice in a step"
                written[slot] = attend(history, token, self.window)
                history.append(written[slot])
                chosen.append(choose(history, seq.seed, self.window))
            del chosen[:-1 - len(step.drafts.get(seq, []))]
        self.slots |= written
        self.last_sampled |= {seq: chosen[-1] for seq, chosen in sampled.items()}
        launched.tokens = [token for seq in step.sampling for token in sampled[seq]]

    def check_may_write(self, block: int) -> None:
        assert self.blocks.ref_counts[block] == 1, f"block {block} is written, but not one owner's"
        assert self.blocks.entry_of[block] is None, f"block {block} is written, but findable"


# ------------------------------------------------------------------ the driver


class Drive:
    """Runs a workload step by step, auditing all the time; `seen` counts what happened."""

    def __init__(self, workload: Workload, seen: Counter):
        self.workload, self.seen = workload, seen
        self.scheduler = Scheduler(EngineConfig(
            model="none", max_num_batched_tokens=workload.budget, block_size=workload.block_size,
            max_num_seqs=workload.max_num_seqs, scheduling_policy=workload.policy,
            enable_prefix_caching=workload.caching, enable_chunked_prefill=workload.chunking),
            workload.num_blocks, workload.window, most_drafts=workload.num_drafts or None)
        if workload.order:
            self.scheduler.hooks.order.append(lambda seq: hash((seq.seed, seq.num_tokens)) % 4)
            self.scheduler.hooks.interrupts = workload.order == "interrupting"
        if workload.num_drafts:
            self.scheduler.hooks.draft.append(self.guess)
        self.device = FakeDevice(self.scheduler.blocks, workload.window)
        self.in_flight: deque[Launched] = deque()
        self.samples: dict[int, list[Sequence]] = {}  # of each ask
        self.stop_string_at: dict[Sequence, int] = {}
        self.order: dict[Sequence, tuple] = {}  # when it arrived

    def run(self) -> None:
        last = max((max(ask.arrival, ask.abort or 0) for ask in self.workload.asks), default=0)
        now = 0
        while now <= last or self.scheduler.has_unfinished():
            self.arrivals_and_aborts(now)
            if now in self.workload.failures:
                self.seen["failure"] += bool(self.in_flight)
                self.in_flight.clear()
                self.device.synchronize()
                self.scheduler.drop_in_flight()
                self.scheduler.check()
            if now in self.workload.resets:
                self.reset()
            self.step()
            now += 1
            assert now < 3000, "stuck"
        blocks = self.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks were lost"
        assert len(self.scheduler.free_rows) == self.workload.max_num_seqs, "rows were lost"
        self.compare()

    def reset(self) -> None:
        self.seen["reset"] += self.scheduler.blocks.reset_prefix_cache()

    def guess(self, seq: Sequence, most: int) -> list[int]:
        """What the twin says, with a mistake here and there."""
        ask, known = self.workload.asks[int(seq.request.request_id)], len(seq.output_token_ids)
        text, _, _ = alone(ask, seq.seed, self.workload.window)
        assert most < ask.max_tokens - known, "a guess at the last token is one too many"
        return [token if hash((seq.seed, known + i)) % 5 else (token + 1) % VOCAB_SIZE
                for i, token in enumerate(text[known:][:min(most, self.workload.num_drafts)])]

    def arrivals_and_aborts(self, now: int) -> None:
        for i, ask in enumerate(self.workload.asks):
            if ask.arrival == now:
                self.submit(i, ask)
            if ask.abort == now:
                for seq in self.samples.get(i, []):
                    self.seen["abort in flight"] += seq.num_inflight_tokens > 0
                    self.scheduler.finish(seq, "abort")
            self.scheduler.check()

    def submit(self, i: int, ask: Ask) -> None:
        stops = frozenset() if ask.ignore_eos else frozenset((EOS, STOP))
        longest = len(ask.prompt) + ask.max_tokens
        seqs = [sequence(str(i), list(ask.prompt), SamplingParams(n=ask.n), i,
                         priority=ask.priority, index=index, seed=100 * i + index,
                         stop_ids=stops, eos_ids=stops - {STOP}, max_num_tokens=longest,
                         arrival_time=ask.arrival * self.workload.step_seconds)
                for index in range(ask.n)]
        if longest - 1 > self.workload.num_blocks * self.workload.block_size:
            self.seen["refused"] += 1
            with pytest.raises(ValueError, match="can't fit"):
                self.scheduler.add(seqs[0])
            return
        for seq in seqs:
            self.scheduler.add(seq)
            self.stop_string_at[seq] = ask.stop_string_at
            self.order[seq] = seq.order
        self.samples[i] = seqs

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.scheduler.add_drafts(step)
        assert step.num_tokens <= self.workload.budget
        if not self.workload.chunking:  # also where two steps of prompts were lost at once
            assert set(step.sampling) == set(step.num_new_tokens), "a prompt was cut"
        self.seen["preemption"] += len(step.preempted)
        self.seen["interruption"] += bool(step.admitted and step.preempted)
        self.seen["draft"] += sum(map(len, step.drafts.values()))
        if step.num_new_tokens:
            self.seen["released"] += any(seq.num_released_blocks for seq in step.num_new_tokens)
            self.seen["reused in flight"] += bool(self.blocks_in_flight() & {
                block for seq in step.admitted for block in seq.block_table})
            self.in_flight.append(self.device.launch(step))
        self.check()
        if self.in_flight and (len(self.in_flight) > self.workload.depth
                               or not step.num_new_tokens):
            launched = self.in_flight.popleft()
            sampled = self.device.fetch(launched)
            for seq, tokens in self.scheduler.update(launched.step, sampled).items():
                self.seen["accepted"] += len(tokens) - 1
                # What a stop token says is not looked at.
                num_text = len(seq.output_token_ids) - (seq.finish_reason == "stop")
                if num_text >= (self.stop_string_at[seq] or 100):
                    self.scheduler.finish(seq, "stop", STOP_STRING,
                                          seq.num_prompt_tokens + self.stop_string_at[seq])
                self.seen["ended in flight"] += bool(seq.finish_reason and seq.num_inflight_tokens)
            self.check()

    def check(self) -> None:
        self.scheduler.check()
        for seq, order in self.order.items():
            if self.workload.order is None:
                assert seq.order == order, f"sequence {seq.name} changed its place"
            else:
                self.seen["another place"] += seq.order != order

    def blocks_in_flight(self) -> set[int]:
        """Those that a step in flight writes to for a sequence that has ended meanwhile."""
        size = self.scheduler.blocks.block_size
        return {slot // size for launched in self.in_flight
                for seq, slots, start, _ in launched.rows if seq.finish_reason is not None
                for slot in slots[start:start + launched.step.num_new_tokens[seq]]}

    def compare(self) -> None:
        for i, seqs in self.samples.items():
            for seq in seqs:
                output, reason, stop_reason = alone(self.workload.asks[i], seq.seed,
                                                    self.workload.window)
                self.seen["hit"] += bool(seq.num_cached_tokens)
                if seq.finish_reason == "abort":
                    self.seen["abort"] += 1
                    assert seq.output_token_ids == output[:len(seq.output_token_ids)]
                    continue
                self.seen[f"{reason} {stop_reason}"] += 1
                assert seq.output_token_ids == output, f"sequence {seq.name} got other tokens"
                assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)


def run(*asks: Ask, seen: Counter | None = None, **workload) -> Counter:
    seen = Counter() if seen is None else seen
    Drive(Workload(list(asks), **workload), seen).run()
    return seen


# ---------------------------------------------------- the scheduler, at random


@st.composite
def asks(draw, num_slots: int) -> Ask:
    """Prompts start with a piece of one of two families, which themselves share their start."""
    shared = draw(st.integers(0, 24))
    prompt = FAMILIES[draw(st.integers(0, 1))][:shared] + draw(
        st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=6))
    longest = max(1, min(20, num_slots + 1 - len(prompt)))  # mostly such that it just fits
    return Ask(
        prompt or [2], draw(st.integers(1, longest)), arrival=draw(st.integers(0, 12)),
        priority=draw(st.integers(-1, 1)), n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        ignore_eos=draw(st.booleans()),
        stop_string_at=draw(st.none() | st.integers(1, 6)),
        abort=draw(st.none() | st.none() | st.integers(0, 30)))


@st.composite
def workloads(draw, depth: int, drafts: tuple[int, ...] = (0,)) -> Workload:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_blocks = draw(st.integers(1, 40 // block_size + 2))
    chunking = draw(st.sampled_from([True, True, True, False]))
    budget = draw(st.integers(1, 24)) if chunking else 0
    some = draw(st.lists(asks(block_size * num_blocks), min_size=1, max_size=7))
    budget = budget or max(len(ask.prompt) + ask.max_tokens for ask in some)  # the least there is
    return Workload(
        some, num_blocks, block_size, budget, draw(st.integers(1, min(6, budget))),
        caching=draw(st.sampled_from([True, True, False])), chunking=chunking, depth=depth,
        policy=draw(st.sampled_from([*POLICIES])),
        order=draw(st.sampled_from([None, None, "changing", "interrupting"])),
        num_drafts=draw(st.sampled_from(drafts)),
        window=draw(st.none() | st.integers(1, 12)),
        failures=draw(st.just(set()) | st.sets(st.integers(1, 30), max_size=3)),
        resets=draw(st.just(set()) | st.sets(st.integers(1, 30), max_size=3)))


@pytest.mark.parametrize("drafts", [(0,), (1, 2, 5)], ids=["", "drafts"])
@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_of_the_scheduler(depth, drafts):
    """Every finished sequence's tokens are the twin's, every aborted one's a beginning of them;
    every block comes back; the audit holds after every step. Right guesses save steps, wrong ones
    leave no trace: their numbers stay in the slots, and whoever read them, or found them in the
    prefix cache, would get other tokens than its twin."""
    seen = Counter()

    @settings(derandomize=True, deadline=None, max_examples=100 if any(drafts) else 200)
    @given(workloads(depth, drafts))
    def run_one(workload):
        Drive(workload, seen).run()

    run_one()
    seen["rejected"] = seen["draft"] - seen["accepted"]
    expected = ["preemption", "hit", "abort", "stop None", "stop 1", "stop ###", "length None"]
    expected += ["accepted", "rejected"] if any(drafts) else [
        "interruption", "reset", "refused", "released", "another place"]
    if depth and not any(drafts):  # at depth 0 nothing is in flight when something else can happen
        expected += ["abort in flight", "ended in flight", "failure", "reused in flight"]
    assert all(seen[what] >= 2 for what in expected), f"too harmless: {seen}"


@pytest.mark.parametrize("depth", [1, 2])
def test_random_workloads_of_whole_prompts_whose_steps_are_lost(depth):
    """Prompts that may not be cut, room for all of them, and a budget that the longest fills: when
    several steps in flight are lost, more of them run than a step can hold."""
    seen = Counter()

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6), st.integers(0, 3),
                              st.integers(-1, 1)), min_size=2, max_size=7),
           st.sets(st.integers(1, 8), min_size=1, max_size=3), st.sampled_from([*POLICIES]))
    def run_one(prompts, failures, policy):
        asks = [Ask([2 + i, *FAMILIES[0][:length - 1]], count, arrival, priority)
                for i, (length, count, arrival, priority) in enumerate(prompts)]
        run(*asks, seen=seen, num_blocks=100, block_size=4, depth=depth, failures=failures,
            budget=max(8, *(len(ask.prompt) + ask.max_tokens for ask in asks)), chunking=False,
            policy=policy)

    run_one()
    assert seen["failure"] > 30
