"""Random workloads with pictures: a request that waits for the tower, or blocks, stops no other.

The scheduler's own random workloads (test_scheduler_random.py), with recurrent states and without,
and the real extra in front of a tower that is a stand-in. `Scheduler.schedule` audits that no step
is empty without a reason, and the twin holds the texts: each picture's placeholders are a token of
its own, so that a text depends on its pictures.
"""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_recurrent_snapshots import StatefulDrive
from test_scheduler_random import Ask, Drive, Workload

from nanoserve.config import POLICIES
from nanoserve.sequence import Step
from nanoserve_extras.multimodal.multimodal import (
    NOTHING,
    EncoderCache,
    MediaItem,
    Multimodal,
    Shown,
)

SIZE = 8  # tokens of a picture
FIRST = 100  # the token of picture 0; a text's are smaller


def picture(number: int) -> list[int]:
    return [FIRST + number] * SIZE


def shown_in(prompt: list[int]) -> Shown:
    places = np.array([i for i, token in enumerate(prompt) if token >= FIRST], dtype=np.int64)
    return Shown([MediaItem({"pixel_values": torch.tensor(prompt[place])}, SIZE)
                  for place in places[::SIZE].tolist()], places, None)


class Pictured:
    """Before a `Drive` among the parents: the extra, told what an engine tells it.
    `launching` comes at once, since the drive launches each step that is not empty."""

    def __init__(self, *args, encoder_cache_tokens: int, mutual: bool = False, **options):
        super().__init__(*args, **options)
        scheduler, schedule, self.extra = self.scheduler, self.scheduler.schedule, Multimodal()
        encoder = self.extra.encoder = EncoderCache("image", encoder_cache_tokens)
        encoder.on = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
        encoder.width, encoder.index_of, encoder.mutual = 1, None, [0] * mutual
        encoder.encode = self.encode
        config = SimpleNamespace(
            model="none", block_size=self.workload.block_size,
            max_num_batched_tokens=self.workload.budget, max_num_seqs=3,
            enable_chunked_prefill=self.workload.chunking)
        engine = SimpleNamespace(requests={}, config=config,
                                 scheduler=scheduler)
        self.extra.attach(engine)
        scheduler.hooks.cut.append(self.extra.cut)

        def told() -> Step:
            step, self.num_encoded = schedule(), 0
            if step.num_new_tokens:
                self.extra.launching(step)
            for (seq, count), start in zip(step.num_new_tokens.items(), step.starts, strict=True):
                shown = self.extra.shown.get(seq, NOTHING)
                self.seen["within"] += sum(begin < start + count <= last for begin, last in zip(
                    *shown.runs, strict=True))
            self.seen["encoded"] += self.num_encoded
            self.seen[step.blocked_on and step.blocked_on[1]] += 1
            return step

        scheduler.schedule = told

    def encode(self, one: MediaItem) -> torch.Tensor:
        self.num_encoded += 1
        return torch.zeros(one.num_tokens, 1)

    def submit(self, i: int, ask: Ask) -> None:
        super().submit(i, ask)
        self.extra.shown |= dict.fromkeys(self.samples.get(i, ()), shown_in(ask.prompt))


class PicturedDrive(Pictured, Drive):
    pass


class PicturedStatefulDrive(Pictured, StatefulDrive):
    pass


def test_a_picture_that_waits_for_blocks_takes_no_turn_at_the_tower():
    """80 tokens of the first prompt are computed when the second comes, which is shorter, and so
    earlier in the order. It lacks blocks. Its picture was noted as due, there was no turn for that
    of the prompt that ran, and no step had a token from then on."""
    text = [2 + i % 11 for i in range(63)]
    asks = [Ask(text + sum(map(picture, range(5)), []), 1),
            Ask(picture(9) + text[:46], 1, arrival=8)]
    for policy in POLICIES:
        workload = Workload(asks, num_blocks=32, block_size=4, budget=10, policy=policy,
                            step_seconds=0.001)
        PicturedDrive(workload, Counter(), encoder_cache_tokens=16).run()


def some_asks(rng: random.Random, between: list[int]) -> list[Ask]:
    """Pictures before or behind a text. One prompt may take most of the pool."""
    found = []
    for _ in range(rng.randint(3, 6)):
        pictures = sum([picture(rng.randrange(20)) + between for _ in range(rng.randint(1, 5))], [])
        text = [2 + rng.randrange(9)] * rng.randint(0, 60)
        prompt = pictures + text if rng.random() < 0.5 else text + pictures
        found.append(Ask(prompt, rng.randint(1, 2), rng.randint(0, 40), rng.randint(-1, 1)))
    return found


@pytest.mark.parametrize("states, mutual", [(False, False), (True, False), (False, True)],
                         ids=["plain", "states", "mutual"])
def test_random_workloads_with_pictures(states, mutual):
    """mutual: a picture's tokens see each other, and no chunk ends in one. (No network has states
    besides, whose snapshots end chunks, too.)"""
    seen, rng, between = Counter(), random.Random(0), [1] * mutual
    for _ in range(25):
        workload = Workload(
            some_asks(rng, between), rng.randint(26, 32), 4, budget=12 if mutual else 10,
            step_seconds=0.0005, policy=rng.choice([*POLICIES]), depth=rng.choice([0, 0, 1]),
            failures={rng.randint(1, 60) for _ in range(rng.choice([0, 4]))})
        kind, more = (PicturedStatefulDrive, [4]) if states else (PicturedDrive, [])
        kind(workload, seen, *more, encoder_cache_tokens=rng.choice([8, 16]),
             mutual=mutual).run()
    expected = ["blocks", "cut", "budget", "preemption", "failure", "length None"]
    assert seen["encoded"] > 200 and all(seen[what] for what in expected), f"too harmless: {seen}"
    assert (seen["within"] == 0) == mutual
