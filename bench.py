"""What the engine costs, measured: its throughput, and the host's bookkeeping alone.

    python bench.py               tokens per second of a batch on the bundled model
    python bench.py --scheduler   microseconds of bookkeeping per step, without a model
    python bench.py --observers   what metrics and a step trace cost, as a share of a step

Bookkeeping is `schedule` + building the batch + `update`; making text is not in it. It has to stay
far below a forward pass, or a fast device waits for Python. It is timed on decoding sequences, where
a step is shortest, with the samples coming from nowhere.

Throughput is vLLM's line: requests, all tokens, and output tokens, each per second. Prompts are
random tokens, all submitted at once, and every request generates its full length. With
`--step-trace FILE` it records what it did, step by step (see `LLM(trace=...)`).

Observers are timed in two ways, because on a shared machine one is not enough: the time inside their
own calls, and whole steps of two engines, one with a trace and one without, that take turns.
"""

import argparse
import random
import statistics
import tempfile
import time

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.batch import BatchBuilder
from nanoserve.config import EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

PROMPT_LEN, BLOCK_SIZE, NUM_STEPS = 200, 16, 100
CASES = [(1, 0), (16, 0), (64, 0), (256, 0), (1024, 0), (256, 100_000)]  # (running, waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scheduler", action="store_true", help="time the bookkeeping alone")
    parser.add_argument("--observers", action="store_true", help="time metrics and the trace")
    parser.add_argument("--step-trace", metavar="FILE", help="record every step: .html or .json")
    parser.add_argument("--model", help="folder or hub id; the bundled model without it")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.num_prompts < 1:
        parser.error("--num-prompts must be at least 1")
    try:
        if args.scheduler:
            bench_scheduler()
        elif args.observers:
            bench_observers(args)
        else:
            bench_throughput(args)
    except ValueError as error:
        parser.error(str(error))


def bench_throughput(args: argparse.Namespace) -> None:
    """One batch through `LLM.generate`."""
    llm = LLM(*([args.model] if args.model else []), trace=args.step_trace)
    prompts, params = workload(llm, args)
    llm.generate(prompts[0], SamplingParams(max_tokens=2), use_tqdm=False)  # warm up
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, summarize=True)
    seconds = time.perf_counter() - start
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_all = num_out + sum(len(output.prompt_token_ids) for output in outputs)
    print(f"Throughput: {len(outputs) / seconds:.2f} requests/s, {num_all / seconds:.2f} total "
          f"tokens/s, {num_out / seconds:.2f} output tokens/s")


def workload(llm: LLM, args: argparse.Namespace) -> tuple[list[list[int]], SamplingParams]:
    """Prompts of random tokens, and what to do with them."""
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(llm.model_config.vocab_size) for _ in range(args.input_len)]
               for _ in range(args.num_prompts)]
    return prompts, SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True,
                                   detokenize=False)


class Timed:
    """An observer with a stopwatch around its calls."""

    def __init__(self, observer):
        self.observer, self.seconds = observer, 0.0

    def __getattr__(self, name: str):
        method = getattr(self.observer, name)

        def timed(*args):
            start = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - start

        setattr(self, name, timed)  # found at once the next time
        return timed


def bench_observers(args: argparse.Namespace) -> None:
    """Two engines do the same work and take turns step by step: A B A B."""
    folder = tempfile.TemporaryDirectory()
    model = [args.model] if args.model else []
    plain, traced = LLM(*model), LLM(*model, trace=f"{folder.name}/run.html")
    traced.observers = timed = [Timed(observer) for observer in traced.observers]
    times: list[tuple[float, float]] = []
    for llm in (plain, traced):
        prompts, params = workload(llm, args)
        for i, prompt in enumerate(prompts):
            llm.add_request(str(i), prompt, params)
    while plain.has_unfinished_requests():
        pair = [0.0, 0.0]
        for i in ((0, 1), (1, 0))[len(times) % 2]:  # whoever comes second has a warmer machine
            start = time.perf_counter()
            (plain, traced)[i].step()
            pair[i] = time.perf_counter() - start
        times.append((pair[0], pair[1]))
    without, with_trace = (statistics.median(column) for column in zip(*times))
    print(f"{len(times)} steps of {args.num_prompts} requests, median {1e3 * without:.2f} ms without "
          f"a trace and {1e3 * with_trace:.2f} ms with one, in turns")
    print(f"{'observer':10} {'µs per step':>12} {'of a step':>10}")
    all_steps = sum(pair[1] for pair in times)
    for name, observer in zip(("metrics", "trace"), timed, strict=True):
        print(f"{name:10} {1e6 * observer.seconds / len(times):12.1f} "
              f"{observer.seconds / all_steps:10.2%}")
    traced.shutdown()
    folder.cleanup()


def bench_scheduler() -> None:
    """A line for each case: median microseconds of a step's three parts."""
    print(f"{'running':>8} {'waiting':>8} {'schedule':>9} {'build':>7} {'update':>7} "
          f"{'total':>7}  µs per step, median of {NUM_STEPS}")
    for num_running, num_waiting in CASES:
        parts = time_bookkeeping(num_running, num_waiting)
        print(f"{num_running:8,} {num_waiting:8,} {parts[0]:9.1f} {parts[1]:7.1f} {parts[2]:7.1f} "
              f"{sum(parts):7.1f}")


def time_bookkeeping(num_running: int, num_waiting: int) -> list[float]:
    """Median microseconds of schedule, build and update while `num_running` sequences decode."""
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
        scheduler.add(Sequence(str(i), prompt, params, arrival=i, stop_ids=frozenset((1000,)),
                               max_num_tokens=max_len))
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
    return [1e6 * statistics.median(column) for column in zip(*times[2:])]  # without the prefill


if __name__ == "__main__":
    main()
