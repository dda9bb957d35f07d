"""Overlap: step n+1 is scheduled and launched before anybody has seen the tokens of step n.

A device that is late on purpose stands in for a busy GPU. `launch` builds the batch and returns at
once; the forward pass runs only when somebody asks for its tokens, that is, after the host has gone
on, changed its books and built the next batch. The cache is full of NaN until it is written. What
comes out must be what transformers says (greedy), or the same engine without overlap (everything
else): the host may be ahead of the device, but never of the truth.
"""

from types import SimpleNamespace

import engine_workloads as fuzz
import pytest
from checkpoints import assert_same_text
from helpers import poisoned

from nanoserve import LLM, SamplingParams, sampler
from nanoserve.sampler import SamplingInputs

MAX_TOKENS = 12


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**dict(temperature=0, max_tokens=MAX_TOKENS) | fields)


class LateTokens:
    """What `launch` returns. `tolist()` is the only way to the values, and it is written down."""

    failed: dict = {}

    def __init__(self, device: "LateDevice", index: int):
        self.device, self.index, self.values = device, index, None

    def tolist(self) -> tuple:
        self.device.log.append(f"read {self.index}")
        self.device.catch_up(self.index)
        return self.values.tolist()


class LateDevice:
    """Stands in for `runner.launch`; runs the real one, in order, when a result is asked for."""

    def __init__(self, llm: LLM, monkeypatch):
        self.runner, self.monkeypatch = llm.runner, monkeypatch
        self.really_launch, self.build = llm.runner.launch, llm.runner.builder.build
        self.log: list[str] = []  # "launch 0", "launch 1", "read 0", ...
        self.queue: list[tuple] = []  # launched, not run
        self.num_launched = 0
        self.steps, self.num_unknown = [], []
        self.fail_at: int | None = None
        self.lose_the_queue = False
        monkeypatch.setattr(llm.runner, "launch", self)

    def __call__(self, step) -> LateTokens:
        index, self.num_launched = self.num_launched, self.num_launched + 1
        if index == self.fail_at:
            self.queue.clear() if self.lose_the_queue else self.catch_up(index)
            raise RuntimeError("the device is on fire")
        self.log.append(f"launch {index}")
        self.steps.append(step)
        batch = self.build(step)
        self.num_unknown.append(batch.num_unknown)
        # What the host decides about the samples is decided now; only the device is late.
        inputs = SamplingInputs.of(step, batch, {})
        self.queue.append((step, batch, inputs, LateTokens(self, index)))
        return self.queue[-1][-1]

    def catch_up(self, index: int) -> None:
        """Run everything up to step `index`, as a stream does."""
        while self.queue and self.queue[0][-1].index <= index:
            self.run_next()

    def run_next(self) -> None:
        step, batch, inputs, tokens = self.queue.pop(0)
        with self.monkeypatch.context() as patch:
            patch.setattr(self.runner.builder, "take_buffer", lambda: None)
            patch.setattr(self.runner.builder, "write", lambda step, buffer, size: None)
            patch.setattr(self.runner.builder, "read", lambda buffer: batch)
            patch.setattr(sampler, "SamplingInputs",
                          SimpleNamespace(of=lambda *arguments: inputs))
            tokens.values = self.really_launch(step)


def start(folder, depth=1, **options) -> LLM:
    return poisoned(LLM(folder, dtype="float32", device="cpu", async_scheduling=bool(depth),
                        **dict(num_gpu_blocks_override=64) | options))


def generate(llm: LLM, prompts, params) -> list:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    blocks = llm.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks and not llm.scheduler.in_flight
    return outputs


def assert_transformers_agrees(outputs, references, where) -> None:
    for output in outputs:
        expected, gaps = references("qwen3", output.prompt_token_ids, MAX_TOKENS)
        assert_same_text(output.outputs[0].token_ids, expected, gaps, where)


# ---------------------------------------------------------------- being ahead


@pytest.mark.parametrize("depth, order", [
    (0, ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]),
    (1, ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"])])
def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(
        qwen3, references, monkeypatch, depth, order):
    """Four tokens: a prefill and three decodes, with and without a step in flight. Nothing is
    launched behind the last token, whose end by length is known in advance."""
    llm = start(qwen3, depth)
    device = LateDevice(llm, monkeypatch)
    output, = generate(llm, [[10, 20, 30]], greedy(max_tokens=4))
    assert device.log == order
    expected, gaps = references("qwen3", [10, 20, 30], MAX_TOKENS)
    assert_same_text(output.outputs[0].token_ids, expected[:4], gaps, f"depth {depth}")


# ------------------------------------------------------------ the same tokens


def test_random_workloads_on_a_late_device(checkpoints, references, monkeypatch):
    """Chunks, hits, preemption, samples, stop tokens, lengths, logprobs and aborts in flight: every
    request has transformers' text, or that of the same request alone in a plain engine."""
    device = LateDevice(fuzz.engine(checkpoints["qwen3"], 1), monkeypatch)
    try:
        fuzz.run_random_workloads(checkpoints, references, "qwen3", [1], 30)
        assert sum(device.num_unknown) > 100 and device.log.count("read 0") == 1
    finally:
        while fuzz.engines:
            fuzz.engines.popitem()[1].shutdown()


# -------------------------------------------------------------------- endings


def finish(llm: LLM) -> dict[str, object]:
    """Step until nothing is left; the last output of every request."""
    results = {}
    for _ in range(300):
        for output in llm.step():
            results[output.request_id] = output
        if not llm.has_unfinished_requests():
            return results
    raise AssertionError("stuck")


@pytest.mark.parametrize("fail_at", [0, 2, 6])
@pytest.mark.parametrize("lost", [False, True], ids=["the step before ran", "it is lost, too"])
def test_a_launch_that_fails_costs_nothing_but_time(qwen3, references, prompts, monkeypatch,
                                                    fail_at, lost):
    """An error comes up while the step before is in flight. Both are forgotten; the requests are
    still there, and going on gives the right text."""
    llm = start(qwen3, max_num_batched_tokens=40, num_gpu_blocks_override=12, max_num_seqs=6)
    device = LateDevice(llm, monkeypatch)
    device.fail_at, device.lose_the_queue = fail_at, lost
    chosen = prompts[2:12]
    for i, prompt in enumerate(chosen):
        llm.add_request(str(i), prompt, greedy())
    with pytest.raises(RuntimeError, match="on fire"):
        finish(llm)
    assert not llm.scheduler.in_flight
    llm.scheduler.check()
    results = finish(llm)
    assert set(results) == {str(i) for i in range(len(chosen))}, "none had ended before"
    assert all(output.finished for output in results.values())
    assert_transformers_agrees(results.values(), references, f"launch {fail_at} failed")
    assert llm.scheduler.blocks.num_free_blocks == 12
