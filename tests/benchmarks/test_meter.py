"""One run as the meter sees it: the scheduler's steps, and clocks that start in time."""

import time

from benchmarks import meter, roofline, throughput, workloads
from benchmarks.roofline import Work
from benchmarks.workloads import SMALL, Request
from nanoserve import LLM


def test_the_steps_are_those_of_the_scheduler(toy):
    """What the meter has seen is what a simulation of the same scheduler does."""
    requests = workloads.generate(throughput.replace(SMALL["batch"], output_len=(2, 9)), 300)
    with LLM(toy, device="cpu", load_format="dummy", skip_tokenizer_init=True,
             max_num_batched_tokens=300, max_num_seqs=8, max_model_len=400,
             num_gpu_blocks_override=400) as llm:
        extras = llm.extras[:]
        _, seen = meter.serve(llm, requests)
        assert llm.extras == extras
        steps = [Work.of(step, llm.model_config.windows) for step in seen.steps]
    assert steps == roofline.simulate(requests, llm.model_config, 8, 300)


def test_a_clock_starts_when_the_request_arrives(toy, monkeypatch):
    """Each step takes a second here. B arrives in the middle of the first one and is served by the
    second, C while nobody is there."""
    class Clock:
        now = 100.0
        perf_counter = staticmethod(time.perf_counter)

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(meter, "clock", clock)
    requests = [Request([1], 1, 9.25), Request([1, 2], 2, 0.5), Request([1, 2, 3], 1, 0.0)]
    with LLM(toy, device="cpu", load_format="dummy", skip_tokenizer_init=True,
             num_gpu_blocks_override=9) as llm:
        launch = llm.runner.launch

        def slow(step):
            clock.now += 1
            return launch(step)

        llm.runner.launch = slow
        result, _ = meter.serve(llm, requests)
    assert result["ttft"] == dict(mean=3.5 / 3, p50=1.0, p90=1.5, p99=1.5)
    assert result["end_to_end"]["p99"] == 2.5
    assert result["seconds"] == 10.25
