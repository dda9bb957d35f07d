"""A scheduler that is stepped by hand, with a fake sampler instead of a model.

A sampled token is a fixed function of the tokens before it, so the right output of a request is
known without any scheduling: `alone()` is the whole naive twin. Blocks have 4 tokens unless a test
says otherwise, and the audit runs after every step.
"""

import zlib

from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CoreRequest, Sequence, Step

EOS, STOP = 5000, 5001


def make(num_blocks=64, *, budget=64, seqs=8, block_size=4, window=None, **options) -> Scheduler:
    config = EngineConfig(model="none", max_num_batched_tokens=budget, block_size=block_size,
                          max_num_seqs=min(seqs, budget), **options)
    return Scheduler(config, num_blocks, window)


def add(scheduler, prompt, max_tokens=4, *, name=None, n=1, **fields) -> Sequence:
    """Queue a request; `prompt` is its tokens, or a length for tokens that nobody else has."""
    arrival = scheduler.arrivals = getattr(scheduler, "arrivals", -1) + 1
    if isinstance(prompt, int):
        prompt = [1000 * (arrival + 10) + i for i in range(prompt)]
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = CoreRequest(name or chr(ord("A") + arrival % 26), params, arrival,
                          max_num_tokens=len(prompt) + max_tokens, **fields)
    samples = [Sequence(request, list(prompt), index) for index in range(n)]
    for seq in samples:
        scheduler.add(seq)
    return samples if n > 1 else samples[0]


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 1000


def alone(seq: Sequence) -> list[int]:
    """What the fake model says for this prompt, computed without any scheduler."""
    tokens = seq.token_ids[:seq.num_prompt_tokens]
    while len(tokens) < seq.request.max_num_tokens:
        tokens.append(next_token(tokens))
    return tokens[seq.num_prompt_tokens:]


def finish_step(scheduler: Scheduler, step: Step) -> list[Sequence]:
    accepted = scheduler.update(step, [next_token(seq.token_ids) for seq in step.sampling])
    scheduler.check()
    return accepted


def run_step(scheduler: Scheduler, look=lambda step: None) -> Step:
    step = scheduler.schedule()
    scheduler.check()
    look(step)
    if step.num_new_tokens:
        finish_step(scheduler, step)
    return step


def run(scheduler: Scheduler, look=lambda step: None) -> list[Step]:
    """Step until everything is done; `look` sees each step before it takes effect. The limit turns
    a scheduler that is stuck into a failure."""
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler, look))
        assert len(steps) < 2000, "stuck"
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "blocks were lost"
    return steps


def computed(steps: list[Step], *seqs: Sequence) -> int:
    return sum(step.num_new_tokens.get(seq, 0) for step in steps for seq in seqs)


def rows(step: Step) -> dict[str, int]:
    return {seq.name: n for seq, n in step.num_new_tokens.items()}


def told(step: Step) -> str:
    """As "A1 B3 -C": who computes how many tokens, and who has lost its blocks."""
    return " ".join([*(f"{seq.name}{n}" for seq, n in step.num_new_tokens.items()),
                     *(f"-{seq.name}" for seq in step.preempted)])
