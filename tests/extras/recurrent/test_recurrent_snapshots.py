"""Random workloads with states: a row's state is that of exactly the tokens that were computed.

The scheduler's own random workloads (test_scheduler_random.py: a fake device, a naive twin), and
beside the KV a state for each row, into which tokens are folded one after the other, as they come.
It is held after every step against the tokens in the sequence's own slots. So a row that begins
with what its last owner left, a snapshot that is a token late, a step that is lost and counts, or a
snapshot that outlives its prefix are found where they happen.
"""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_random import (
    FAMILIES,
    Ask,
    Drive,
    FakeDevice,
    Launched,
    Workload,
    alone,
    workloads,
)

from nanoserve.sequence import Sequence, Step
from nanoserve_extras.recurrent.recurrent_snapshots import ZEROS, Copies, Snapshots

pytestmark = pytest.mark.floor


def fold(state: int, tokens: list[int]) -> int:
    """The state behind these tokens; 0 is the state of nothing."""
    for token in tokens:
        state = hash((state, token))
    return state


@dataclass
class WithCopies(Launched):
    copies: Copies | None = None


class StatefulDevice(FakeDevice):
    """Copies states around each step, in the order in which steps run."""

    def __init__(self, snapshots: Snapshots, *args):
        super().__init__(*args)
        self.snapshots, self.tokens = snapshots, {}  # the token in each slot
        self.states = {ZEROS: 0}

    def launch(self, step: Step) -> Launched:
        launched = super().launch(step)
        self.queue[-1] = WithCopies(launched.step, launched.rows, copies=self.snapshots.plan(step))
        return self.queue[-1]

    def run(self, launched: WithCopies) -> None:
        super().run(launched)
        for seq, slots, start, tokens in launched.rows:
            source, *places = launched.copies.places[seq]
            self.tokens |= dict(zip(slots[start:], tokens, strict=False))
            state = self.states[source]
            computed = [self.tokens[slot] for slot in slots[:start + len(tokens)]]
            assert len(places) == (len(tokens) if seq in launched.step.drafts else 1)
            for i, token in enumerate(tokens, 1):
                state = self.states[places[min(i, len(places)) - 1]] = fold(state, [token])
                assert state == fold(0, computed[:start + i]), "a state of other tokens"
        self.states |= {target: self.states[source] for source, target in launched.copies.after}


class StatefulDrive(Drive):
    def __init__(self, workload: Workload, seen: Counter, num_snapshots: int):
        super().__init__(workload, seen)
        scheduler, update = self.scheduler, self.scheduler.update
        self.snapshots = Snapshots(scheduler, workload.max_num_seqs, num_snapshots,
                                   workload.num_drafts)
        hooks = scheduler.hooks  # the drive has put hooks of its own there
        drafts, order, interrupts = hooks.draft, hooks.order, hooks.interrupts
        hooks.keep([self.snapshots])
        hooks.draft, hooks.order, hooks.interrupts = drafts, order, interrupts
        self.device = StatefulDevice(self.snapshots, scheduler.blocks, None)

        def told(step: Step, sampled: list[int | None]) -> dict[Sequence, list[int]]:
            accepted = update(step, sampled)
            self.snapshots.updated(step, accepted)
            return accepted

        scheduler.update = told

    def arrivals_and_aborts(self, now: int) -> None:
        super().arrivals_and_aborts(now)
        self.tell_ended()

    def check(self) -> None:
        super().check()
        self.tell_ended()
        self.snapshots.audit()

    def tell_ended(self) -> None:
        """As the engine does, after each step and each abort."""
        ended = [seq for seq in self.order if seq.finish_reason is not None]
        self.snapshots.ended(ended)

    def run(self) -> None:
        super().run()
        snapshots = self.snapshots
        assert len(snapshots.free) + len(snapshots.named) == snapshots.num_snapshots
        self.seen["evicted"] += snapshots.num_evicted
        self.seen["saved"] += snapshots.num_saved
        self.seen["tokens"] += snapshots.num_tokens
        self.seen["workload"] += 1


def run_with_states(*asks: Ask, num_snapshots: int, seen: Counter | None = None,
                    **workload) -> Counter:
    seen = Counter() if seen is None else seen
    StatefulDrive(Workload(list(asks), **workload), seen, num_snapshots).run()
    return seen


# ------------------------------------------------------------------ the stories


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_goes_on_from_its_last_boundary(depth):
    """12 tokens and a bit: the second and third ask begin at 12, whatever came between."""
    prompt, filler = FAMILIES[0][:14], [10] * 9
    seen = run_with_states(Ask(prompt, 3), Ask(filler, 3, arrival=9), Ask(prompt, 3, arrival=18),
                           Ask(prompt, 5, arrival=27), num_snapshots=6, num_blocks=20,
                           block_size=4, depth=depth)
    assert (seen["hit"], seen["tokens"]) == (2, 24)


def test_a_prefix_that_two_share_is_found_by_the_third():
    """The second finds blocks of 8 tokens and no state there, so its chunk ends there."""
    shared = FAMILIES[0][:8]
    asks = [Ask(shared + [2 + i] * 7, 2, arrival=9 * i, ignore_eos=True) for i in range(3)]
    seen = run_with_states(*asks, num_snapshots=6, num_blocks=20, block_size=4)
    assert (seen["hit"], seen["tokens"]) == (1, 8)


def test_an_entry_that_is_forgotten_in_the_same_step_names_no_snapshot():
    """The second ask's first block is known by the first one's entry, which a long prompt evicts.
    So when the last ask comes to the second block's boundary in the same step, it has computed the
    first block anew, and its entry takes the second ask's place. A snapshot that was named by the
    forgotten entry would never be freed."""
    begins = Ask(FAMILIES[0][:3], 2, ignore_eos=True)
    follows = Ask(begins.prompt + alone(begins, 0, None)[0], 9, arrival=1, ignore_eos=True)
    again = follows.prompt + alone(follows, 100, None)[0][:4]
    for arrival in range(3, 8):
        run_with_states(begins, follows, Ask([10] * 20, 1, arrival=2, ignore_eos=True),
                        Ask(again, 3, arrival=arrival, ignore_eos=True),
                        num_snapshots=6, num_blocks=7, block_size=4)


def test_a_boundary_behind_a_wrong_draft_gets_no_snapshot():
    """There is one snapshot. Drafts up to 8 evict that of 4, and one of them is wrong: what was
    copied is no state of 4 tokens, which whoever has the same prompt would go on from."""
    seen = Counter()
    for prompt in (FAMILIES[0][:5], FAMILIES[1][3:8], FAMILIES[0][5:10]):
        for arrival in range(2, 8):
            run_with_states(Ask(prompt, 9, ignore_eos=True), Ask(prompt, 3, arrival=arrival),
                            num_snapshots=1, num_blocks=20, block_size=4, num_drafts=3, seen=seen)
    assert seen["hit"] and seen["accepted"] < seen["draft"], seen


# ---------------------------------------------------------- states, at random


def run_random_states(depth: int, max_examples: int, enough: int,
                      drafts: tuple[int, ...] = (0,)) -> Counter:
    seen = Counter()

    @settings(derandomize=True, deadline=None, max_examples=max_examples)
    @given(workloads(depth, drafts), st.integers(2, 6), st.sets(st.integers(1, 30), max_size=3))
    def run_one(workload, num_snapshots, failures):
        workload = replace(workload, window=None, failures=failures)
        StatefulDrive(workload, seen, num_snapshots).run()

    run_one()
    expected = ["preemption", "hit", "abort", "reset", "evicted", "saved", "stop None",
                "length None"]
    expected += ["accepted", "rejected"] if any(drafts) else ["interruption"]
    if depth:
        expected += ["abort in flight", "ended in flight", "failure"]
    seen["rejected"] = seen["draft"] - seen["accepted"]
    assert all(seen[what] >= enough for what in expected), f"too harmless: {seen}"
    return seen


@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_with_states(depth):
    run_random_states(depth, 50, enough=1)


@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_with_states_and_drafts(depth):
    """A state that took in a wrong draft is found where it happens, and so is a snapshot of one."""
    run_random_states(depth, 50, enough=1, drafts=(1, 2, 5))
