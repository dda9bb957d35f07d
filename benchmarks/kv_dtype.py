"""A decoding step with a KV cache of bfloat16 and with one of int8 (docs/training.md).

    python -m benchmarks.kv_dtype [--model Qwen3-0.6B] [--rows 16] [--tokens 2000] [--rounds 6]

Weights are random. One prompt is computed; all other rows have copies of its blocks, and a forward
that returns zeros until all decode. Two engines take turns, because others may use the machine.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from benchmarks import roofline
from nanoserve import LLM, SamplingParams

DTYPES = ("bfloat16", "int8")
STEPS = 5  # of a round


def decoding(folder: Path, dtype: str, rows: int, tokens: int, steps: int) -> LLM:
    """An engine whose rows all have so many tokens."""
    llm = LLM(folder, dtype="bfloat16", kv_cache_dtype="auto" if dtype == "bfloat16" else dtype,
              load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
              max_model_len=tokens + steps + 1, max_num_seqs=rows, max_num_batched_tokens=512,
              num_gpu_blocks_override=rows * ((tokens + steps) // 16 + 2) + 1)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps)
    rng, model = Random(0), llm.runner.model
    for row in range(rows):
        llm.add_request(str(row), [rng.randrange(1000) for _ in range(tokens)], params)
        while llm.scheduler.waiting or llm.scheduler.running[row].num_computed_tokens < tokens:
            llm.step()
        if row == 0:
            fill(llm)
            model.forward = lambda ids, positions, kv_cache, batch, wanted: torch.zeros(
                len(wanted), llm.runner.model_config.hidden_size, dtype=torch.bfloat16)
    del model.forward
    llm.step()  # the first makes what later ones keep
    return llm


def fill(llm: LLM) -> None:
    """Copies of the one row's blocks to all others."""
    made = torch.tensor(llm.scheduler.running[0].block_table)
    for cache in llm.runner.kv_cache:
        for part in cache:
            part.copy_(part[made[torch.arange(len(part)) % len(made)]])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen3-0.6B", help=", ".join(roofline.MODELS))
    for name, number in dict(rows=16, tokens=2000, rounds=6).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args(arguments)
    steps = args.rounds * STEPS + args.rows * (args.tokens // 512 + 2)  # early rows go on
    with tempfile.TemporaryDirectory() as place:
        folder = roofline.write_config(args.model, Path(place))
        engines = {dtype: decoding(folder, dtype, args.rows, args.tokens, steps)
                   for dtype in DTYPES}
        medians: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
        for _ in range(args.rounds):
            for dtype, llm in engines.items():
                times = []
                for _ in range(STEPS):
                    start = time.perf_counter()
                    llm.step()
                    times.append(time.perf_counter() - start)
                medians[dtype].append(1000 * statistics.median(times))
        ratios = sorted(a / b for a, b in zip(*medians.values(), strict=True))
        print(f"{args.model}, {args.rows} rows of {args.tokens:,} tokens:",
              ", ".join(f"{dtype} {statistics.median(values):.0f} ms"
                        for dtype, values in medians.items()),
              f"| int8 {statistics.median(ratios):.2f} times as fast "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
