"""What the host does between two forwards, in microseconds a step; and what watching it costs.

    python -m benchmarks.host                  schedule, build and update, without a model
    python -m benchmarks.host --observers      metrics and a step trace, on the bundled model

Bookkeeping is `schedule`, building the batch, and `update`; making text is not in it. It has to
stay far below a forward pass, or a fast device waits for Python. It is timed on decoding sequences,
where a step is shortest, with the samples coming from nowhere: without a model.

Observers (metrics, a step trace) are timed in two ways, because on a shared machine one is not
enough: the time inside their own calls, and whole steps of two engines, one with a trace and one
without, that take turns.

The times should grow with the sequences that run, and not with those that wait: while
`max_num_seqs` run, the queue is not searched. All figures are medians of steps, because one pause
of the machine lasts longer than many steps.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from nanoserve import LLM
from nanoserve.batch import BatchBuilder
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.hooks import Extra
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CoreRequest, Sequence
from nanoserve_extras.base.command import command

PROMPT_LEN, BLOCK_SIZE, NUM_STEPS = 200, 16, 100
CASES = [(1, 0), (16, 0), (64, 0), (256, 0), (1024, 0), (256, 100_000)]  # (running, waiting)


def bench_scheduler() -> None:
    """A line for each case: median microseconds of a step's three parts."""
    print(f"{'running':>8} {'waiting':>8} {'schedule':>9} {'build':>7} {'update':>7} "
          f"{'total':>7}  µs per step, median of {NUM_STEPS}")
    for num_running, num_waiting in CASES:
        parts = time_bookkeeping(num_running, num_waiting)
        print(f"{num_running:8,} {num_waiting:8,} {parts[0]:9.1f} {parts[1]:7.1f} {parts[2]:7.1f} "
              f"{sum(parts):7.1f}")


def time_bookkeeping(num_running: int, num_waiting: int) -> list[float]:
    """Median microseconds of schedule, build and update while `num_running` sequences decode.

    The prompts of those that run fit into the first step: every later one is decodes alone. No
    sample ends a sequence, and blocks suffice for all.
    """
    max_len = PROMPT_LEN + NUM_STEPS + 8
    config = EngineConfig(model="none", max_model_len=max_len, max_num_seqs=num_running,
                          max_num_batched_tokens=num_running * PROMPT_LEN, block_size=BLOCK_SIZE)
    blocks_each = -(-max_len // BLOCK_SIZE)
    scheduler = Scheduler(config, num_blocks=(num_running + 4) * blocks_each)
    builder = BatchBuilder(num_running, config.max_num_batched_tokens, max_len, BLOCK_SIZE,
                           torch.device("cpu"))
    params = SamplingParams(temperature=0, max_tokens=None)
    rng = random.Random(0)
    for i in range(num_running + num_waiting):
        prompt = [rng.randrange(1000) for _ in range(PROMPT_LEN if i < num_running else 4)]
        core = CoreRequest(str(i), params, arrival=i, stop_ids=frozenset((1000,)),
                           max_num_tokens=max_len)
        scheduler.add(Sequence(core, prompt))
    times: list[tuple[float, float, float]] = []
    for _ in range(NUM_STEPS + 2):
        t0 = time.perf_counter()
        step = scheduler.schedule()
        t1 = time.perf_counter()
        builder.build(step)
        t2 = time.perf_counter()
        scheduler.update(step, [7] * len(step.sampling))
        t3 = time.perf_counter()
        times.append((t1 - t0, t2 - t1, t3 - t2))
    columns = zip(*times[2:], strict=True)  # without the prefill
    return [1e6 * statistics.median(column) for column in columns]


WATCHING = ("EngineMetrics", "Trace")  # extras that do nothing else


class Timed:
    """An extra with a stopwatch around its calls."""

    def __init__(self, extra: Extra):
        self.extra, self.seconds = extra, 0.0

    def timed(self, method: Callable) -> Callable:
        def call(*args):
            start = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - start
        return call


def bench_observers(model: list[str], num_prompts: int, input_len: int, output_len: int,
                    seed: int) -> None:
    """Two engines do the same work and take turns step by step: A B A B. Prints medians of steps.
    model: its name, or nothing for the bundled one."""
    folder = tempfile.TemporaryDirectory()
    plain, traced = LLM(*model), LLM(*model, trace=f"{folder.name}/run.html")
    rng, vocab_size = random.Random(seed), plain.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    watches = {id(extra): Timed(extra) for extra in traced.extras}
    for name in ("added", "scheduled", "updated", "ended"):
        calls = getattr(traced.hooks, name)
        calls[:] = [watches[id(call.__self__)].timed(call) for call in calls]
    timed = [watch for watch in watches.values() if type(watch.extra).__name__ in WATCHING]
    times: list[tuple[float, float]] = []
    inside: list[list[float]] = []  # of each step, the seconds in each observer's calls
    for llm in (plain, traced):
        for i, prompt in enumerate(prompts):
            llm.add_request(str(i), prompt, params)
    while plain.has_unfinished_requests():
        pair = [0.0, 0.0]
        for observer in timed:
            observer.seconds = 0.0
        for i in ((0, 1), (1, 0))[len(times) % 2]:  # whoever comes second has a warmer machine
            start = time.perf_counter()
            (plain, traced)[i].step()
            pair[i] = time.perf_counter() - start
        times.append((pair[0], pair[1]))
        inside.append([observer.seconds for observer in timed])
    without, with_trace = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{num_prompts} requests, {len(times)} steps in turns: {1e3 * without:.2f} ms "
          f"without a trace, {1e3 * with_trace:.2f} ms with one")
    print(f"{'observer':16} {'µs per step':>12} {'of a step':>10}  medians")
    for observer, column in zip(timed, zip(*inside, strict=True), strict=True):
        seconds, name = statistics.median(column), type(observer.extra).__name__
        print(f"{name:16} {1e6 * seconds:12.1f} {seconds / with_trace:10.2%}")
    traced.shutdown()
    folder.cleanup()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--observers", action="store_true", help="time metrics and the step trace instead")
    add("--model", help="of --observers; default: the bundled one")
    add("--num-prompts", type=int, default=16, help="of --observers; default: 16")
    add("--input-len", type=int, default=128, help="of --observers; default: 128")
    add("--output-len", type=int, default=64, help="of --observers; default: 64")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.observers:
        bench_observers([args.model] if args.model else [], args.num_prompts, args.input_len,
                        args.output_len, args.seed)
    else:
        bench_scheduler()


if __name__ == "__main__":
    with command():
        main()
