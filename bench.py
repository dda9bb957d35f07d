"""Throughput: tokens a second, and their share of what this machine could do at most.

    python bench.py                                          the bundled story model
    python bench.py --model Qwen/Qwen3-0.6B --num-prompts 256 --input-len 512
    python bench.py --set kernels=torch --set max_num_seqs=8       any option of `LLM`

All prompts are submitted at once. They are random token ids, so the prefix cache finds nothing, and
every output gets its full length. A short run goes first and isn't counted: it touches memory for
the first time and compiles kernels.

The roofline is the least time in which this machine, measured right after the run, could do the
very same steps (benchmarks/roofline.py). Latencies, arrivals over time, real models' shapes without
a download, other engines in turns: `python -m benchmarks.throughput`.
"""

import argparse
import ast
import random
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="storyteller", help="a folder, a hub id, a GGUF file or a bundled model")
    add("--dtype", default="auto")
    add("--num-prompts", type=int, default=64)
    add("--input-len", type=int, default=128, help="tokens of each prompt")
    add("--output-len", type=int, default=128, help="tokens of each output")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of the prompts")
    add("--set", type=option, action="append", default=[], metavar="OPTION=VALUE",
        help="of the engine, e.g. block_size=32; may be repeated")
    args = parser.parse_args()
    if min(args.num_prompts, args.input_len) < 1:
        parser.error("--num-prompts and --input-len must be at least 1")
    try:
        measure(args)
    except (TypeError, ValueError) as error:  # an option that the engine doesn't have or can't take
        parser.error(str(error))


def option(text: str) -> tuple[str, object]:
    """"block_size=32" -> ("block_size", 32). A value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"write OPTION=VALUE, not {text}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def measure(args: argparse.Namespace) -> None:
    """Make an engine, warm it up, run all prompts, print two lines."""
    from benchmarks import roofline  # here: both load torch, which takes seconds
    from nanoserve import LLM, SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len,
                            ignore_eos=True, detokenize=False)
    with LLM(args.model, dtype=args.dtype, **dict(args.set)) as llm:
        rng, vocab_size = random.Random(args.seed), llm.model_config.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(args.input_len)]
                   for _ in range(args.num_prompts)]
        llm.generate(prompts[:2], SamplingParams(max_tokens=4), use_tqdm=False)
        llm.reset_prefix_cache()
        watch = roofline.Watch(llm)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    asked = args.num_prompts * args.input_len
    print(f"Throughput: {len(prompts) / seconds:.2f} requests/s, {(asked + made) / seconds:.2f} "
          f"total tokens/s, {made / seconds:.2f} output tokens/s")
    print("Measuring what this machine can do at most ...", file=sys.stderr)
    print(f"Roofline: {watch.share(seconds)}")


if __name__ == "__main__":
    main()
