"""What a second place for KV blocks brings, and what it costs.

    python -m benchmarks.block_store
    python -m benchmarks.block_store --model Qwen3-0.6B --prompt-tokens 1500 --rounds 3

Three tables. *Time to first token* of a long system prompt: computed (cold), found in the KV cache
(warm), and found in the folder by an engine that was started anew. *Hit rates* of conversations
that take turns with a cache too small for all of them, with host memory and without. *What saving
costs* a decoding step: two engines decode the same requests in turns, one of them with a folder, to
which every full block goes; the medians of the pairs' ratios are the cost.

The weights are random: what is measured does not depend on them. The folder lies where `--folder`
says, or in the system's place for temporary files; what the system still has in memory of it is
read from there, as after any restart of a program.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import roofline
from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve_extras.block_store.block_store import BlockStore

VOCAB_SIZE = 100_000  # token ids are drawn below it


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen3-0.6B", help=", ".join(roofline.MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="sequences that decode together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the folder of blocks is made")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = roofline.write_config(args.model, Path(place))
        options = dict(model=str(folder), dtype=args.dtype, load_format="dummy",
                       skip_tokenizer_init=True)
        for name in args.tables:
            print(*TABLES[name](args, options), "", sep="\n")


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def timed(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
    """Seconds for all of them together, and prompt tokens that were found."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True,
                            detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, sum(output.num_cached_tokens for output in outputs)


# ---------------------------------------------------------- time to first token


def first_token_table(args: argparse.Namespace, options: dict) -> list[str]:
    """A system prompt, and a question of 10 tokens behind it, which is another one each time."""
    system, times = prompt_of(0, args.prompt_tokens), {}
    for i in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.folder) as store:
            for start in ("cold", "restart"):
                with LLM(**options, max_model_len=args.prompt_tokens + 64,
                         kv_offload_bytes=2 ** 30, kv_store=store) as llm:
                    timed(llm, [prompt_of(1, 40)], 1)  # the first step of a process is slow
                    for name in (start, "warm")[:1 if start == "restart" else 2]:
                        question = prompt_of(hash((i, name)), 10)
                        times.setdefault(name, []).append(timed(llm, [system + question], 1))
    cold = statistics.median(seconds for seconds, _ in times["cold"])
    lines = [f"| {args.prompt_tokens:,} tokens of system prompt | time to first token, s | found |"
             " times as fast |", "|---|---|---|---|"]
    for name, title in (("cold", "cold"), ("warm", "warm: in the KV cache"),
                        ("restart", "after a restart: in the folder")):
        seconds = statistics.median(seconds for seconds, _ in times[name])
        lines.append(f"| {title} | {seconds:.3f} | {times[name][0][1]:,} | {cold / seconds:.1f} |")
    return lines


# -------------------------------------------------------------------- hit rates


def hit_table(args: argparse.Namespace, options: dict) -> list[str]:
    """Each turn sends the whole conversation again, 100 tokens longer. The cache has room for two
    of them."""
    longest = 200 + 100 * args.turns
    num_blocks = 2 * -(-longest // 16)
    lines = [f"| {args.conversations} conversations of {args.turns} turns | prompt tokens found |"
             " seconds |", "|---|---|---|"]
    for title, num_bytes in (("the cache alone", 0), ("1 GiB of host memory", 2 ** 30)):
        with LLM(**options, max_model_len=longest, num_gpu_blocks_override=num_blocks,
                 kv_offload_bytes=num_bytes) as llm:
            timed(llm, [prompt_of(1, 40)], 1)
            found = asked = seconds = 0
            for turn in range(args.turns):
                for one in range(args.conversations):
                    prompt = prompt_of(1000 + one, 100 * (turn + 1))
                    took, cached = timed(llm, [prompt], 1)
                    seconds, found, asked = seconds + took, found + cached, asked + len(prompt)
        lines.append(f"| {title} | {found / asked:.0%} | {seconds:.1f} |")
    return lines


# --------------------------------------------------------------- what it costs


def cost_table(args: argparse.Namespace, options: dict) -> list[str]:
    """Decoding alone: prompts of 16 tokens, and enough tokens that every row fills blocks."""
    prompts = [prompt_of(i, 16) for i in range(args.rows)]
    runs: dict[str, list[float]] = {"plain": [], "store": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as store:
        common = options | dict(max_model_len=128, num_gpu_blocks_override=8 * args.rows)
        engines = {"plain": LLM(**common),
                   "store": LLM(**common, kv_store=store, kv_offload_bytes=2 ** 30)}
        for i in range(2 * args.rounds + 1):
            for name in list(engines)[::1 if i % 2 else -1]:
                engines[name].reset_prefix_cache()  # or the second round would save nothing
                runs[name].append(timed(engines[name], prompts, 64)[0])
                if engines[name].extra(BlockStore) is not None:
                    engines[name].extra(BlockStore).flush()
        for llm in engines.values():
            llm.shutdown()
    ratios = [b / a for a, b in zip(runs["plain"][1:], runs["store"][1:], strict=True)]
    step = statistics.median(runs["plain"][1:]) / 64
    return [f"| {args.rows} rows decode | a step, ms | with every full block saved |",
            "|---|---|---|",
            f"| {args.dtype} | {1e3 * step:.1f} | {statistics.median(ratios) - 1:+.1%} "
            f"({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}) |"]


TABLES = dict(first_token=first_token_table, hits=hit_table, cost=cost_table)

if __name__ == "__main__":
    main()
