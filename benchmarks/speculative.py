"""What speculative decoding brings, in steps and in time: streams with drafts and without.

    python -m benchmarks.speculative
    python -m benchmarks.speculative --streams 16
    python -m benchmarks.speculative MODEL --draft-model SMALL_MODEL --head HEAD --rounds 3

A draft saves a step for each token that it guesses right, and costs the time to make it and to
check it. So the table has both: steps, and seconds beside the CPU's seconds, which leave out what
other programs took. The engines take turns round by round, so that all of them meet the same other
load; the medians of the pairs' ratios are the gain. The first round only warms up.

Greedy text of a small model soon repeats itself and is easily guessed; drawn text does not.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.base.metrics import EngineMetrics

PROMPT = "Once upon a time there was a king who"


def counts_of(metrics: EngineMetrics) -> tuple[int, int]:
    """Drafts until now, and their accepted tokens."""
    return metrics.num_drafts, sum(metrics.num_accepted)


def mean_length(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Tokens that a row with a draft gets in a step: the accepted ones, and one more."""
    return 1 + (after[1] - before[1]) / max(after[0] - before[0], 1)


def main(arguments: list[str] | None = None) -> None:
    """Measure streams with and without, taking turns, so that all meet the same other load."""
    parser = argparse.ArgumentParser(description="What speculative decoding brings, in steps and "
                                                 "in time.")
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL))
    parser.add_argument("--draft-model", default=f"{BUNDLED_MODEL}-draft")
    parser.add_argument("--head", default=f"{BUNDLED_MODEL}-eagle3", help="an EAGLE-3 head")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--streams", type=int, default=1, help="requests at a time")
    parser.add_argument("--num-tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=7, help="how often all take turns")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(arguments)
    configs = {"none": None,
               "ngram": dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4,
                             prompt_lookup_min=2),
               "draft_model": dict(method="draft_model", num_speculative_tokens=4,
                                   model=args.draft_model),
               "eagle3": dict(method="eagle3", num_speculative_tokens=2, model=args.head)}
    engines = {name: LLM(args.model, dtype=args.dtype, speculative_config=config,
                         enable_prefix_caching=False, num_gpu_blocks_override=args.streams * (
                             8 + args.num_tokens // 16)) for name, config in configs.items()}
    print(f"{'text':8}{'drafts':12}{'steps':>6}{'a draft':>9}{'seconds':>9}{'gain':>7}"
          f"{'CPU seconds':>13}{'gain':>7}")
    for text, temperature in (("greedy", 0), ("drawn", 1)):
        runs = {name: [] for name in engines}
        for i in range(args.rounds + 1):  # the first is for caches, ours and the machine's
            params = [SamplingParams(temperature=temperature, seed=i * args.streams + k,
                                     max_tokens=args.num_tokens, ignore_eos=True)
                      for k in range(args.streams)]
            for name in [*engines][i % 4:] + [*engines][:i % 4]:
                runs[name].append(measure(engines[name], args.prompt, params))
        for name, some in runs.items():
            pairs = list(zip(runs["none"][1:], some[1:], strict=True))
            steps = statistics.mean(run.num_steps for _, run in pairs)
            length = "" if name == "none" else f"{statistics.mean(r.length for r in some[1:]):.2f}"
            print(f"{text:8}{name:12}{steps:6.0f}{length:>9}", end="")
            for clock, width in (("seconds", 9), ("cpu_seconds", 13)):
                times = [(getattr(a, clock), getattr(b, clock)) for a, b in pairs]
                print(f"{statistics.median(b for _, b in times):{width}.2f}"
                      f"{statistics.median(a / b for a, b in times):6.2f}x", end="")
            same = all(a.texts == b.texts for a, b in pairs)
            print("" if same else "  another text: a near-tie?")


@dataclass
class Run:
    """What the requests of a round took."""

    texts: list[list[int]]
    num_steps: int
    length: float  # tokens a draft
    seconds: float
    cpu_seconds: float  # of all threads: the time that others took from us is not in it


def measure(llm, prompt: str, params: list[SamplingParams]) -> Run:
    num_steps, counts = llm.metrics.num_steps, counts_of(llm.metrics)
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    length = mean_length(counts, counts_of(llm.metrics))
    return Run([output.outputs[0].token_ids for output in outputs],
               llm.metrics.num_steps - num_steps, length, seconds, cpu_seconds)


if __name__ == "__main__":
    main()
