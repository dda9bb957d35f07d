"""What small weights cost in perplexity, and what they bring in time and memory.

    python -m benchmarks.quantization --corpus childrens_books.txt
    python -m benchmarks.quantization --speed --model Qwen3-0.6B --rounds 5

The first table is about text: the bundled model predicts each token of the corpus' held-out pieces
(see train.py), in windows of 1,024 that don't overlap. Perplexity is e to the mean loss.

The second is about steps: a step that decodes so many rows, and one that computes a prompt, with
random weights of a model's shapes. The engines take turns, because others use the machine, too; the
median of the ratios of steps is the gain, and their quarter and three-quarter points tell how far
to trust it. On a busy machine, `--cpu-seconds` counts one thread's CPU time instead of the clock's,
which leaves out other programs' time. The third table is about memory, each line from a process of
its own: what it holds when the engine is ready, less what it held before, and the most that it ever
held.

Not known here: how a weight is rounded (quantization/quantized_linear.py and its neighbours).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks import roofline
from benchmarks.train import encode, split_corpus
from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve.llm import BUNDLED_MODEL

CONTEXT = 1024  # tokens of a window
QUANTIZATIONS = (None, "int8", "int4")
PROMPT = 512  # tokens of the prompt whose step is timed
STEPS = 12  # decode steps of a round


def held_out_tokens(corpus: Path, model: str | Path) -> list[int]:
    """The held-out pieces, one behind the other, as the model was evaluated on them."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return encode(tokenizer, split_corpus(corpus)[1]).tolist()


def loss(tokens: list[int], model: str | Path, context: int = CONTEXT, **options) -> float:
    """Nats a token. The last token of a window is the first of the next, so each but the very
    first is predicted once."""
    windows = [tokens[i:i + context + 1] for i in range(0, len(tokens) - 1, context)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(model, max_model_len=context + 2, enable_prefix_caching=False, **options) as llm:
        outputs = llm.generate(windows, params, use_tqdm=False)
    return -sum(each[token].logprob for window, output in zip(windows, outputs, strict=True)
                for token, each in zip(window[1:], output.prompt_logprobs[1:], strict=True)
                ) / (len(tokens) - 1)


def perplexity_table(tokens: list[int], model: str | Path, context: int = CONTEXT) -> list[str]:
    """Each line beside float32's."""
    lines = ["| dtype | quantization | nats a token | perplexity | of float32's |",
             "|---|---|---|---|---|"]
    first = None
    for dtype in ("float32", "bfloat16"):
        for quantization in QUANTIZATIONS:
            nats = loss(tokens, model, context, dtype=dtype, quantization=quantization)
            first = nats if first is None else first
            lines.append(f"| {dtype} | {quantization} | {nats:.4f} | {math.exp(nats):.3f} "
                         f"| {100 * math.exp(nats - first):.2f}% |")
    return lines


def step_seconds(llm: LLM, rows: int, prompt: int, steps: int,
                 clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The time of a step with `rows` prompts, then of `steps` steps that decode all of them."""
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True, detokenize=False)
    for row in range(rows):
        llm.add_request(str(row), [(7 * row + i) % 250 for i in range(prompt)], params)
    seconds = []
    for _ in range(steps + 1):
        start = clock()
        llm.step()
        seconds.append(clock() - start)
    assert not llm.has_unfinished_requests()
    return seconds


def speed_table(folder: Path, dtype: str, rounds: int, rows: list[int],
                clock: Callable[[], float] = time.perf_counter) -> list[str]:
    """Milliseconds a step of each engine, in turns. The first round only warms up."""
    most, longest = max(rows), PROMPT + 2 * STEPS
    engines = [LLM(folder, dtype=dtype, quantization=one, load_format="dummy", max_num_seqs=most,
                   skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=longest,
                   num_gpu_blocks_override=max(4 * most, -(-longest // 16)))
               for one in QUANTIZATIONS]
    lines = [f"| a step of | {dtype}, ms " + "".join(
        f"| {one}, ms | times as fast | of half the pairs " for one in QUANTIZATIONS[1:]) + "|",
        "|---" * (3 * len(QUANTIZATIONS) - 1) + "|"]
    cases = [(f"{n} row{'s' * (n > 1)}", n, 16, STEPS) for n in rows]
    for name, n, prompt, steps in [*cases, (f"a prompt of {PROMPT}", 1, PROMPT, 0)]:
        steps_of: list[list[float]] = [[] for _ in engines]
        for i in range(rounds + 1):
            for times, llm in zip(steps_of, engines, strict=True):
                seconds = step_seconds(llm, n, prompt, steps, clock)
                if i:
                    times += seconds[1 if steps else 0:]
        plain, *others = steps_of
        lines.append(f"| {name} | {1e3 * statistics.median(plain):.1f} "
                     + "".join(compare(plain, small) for small in others) + "|")
    for llm in engines:
        llm.shutdown()
    return lines


def compare(plain: list[float], small: list[float]) -> str:
    """Three columns: the time, the median of the ratios, where their middle half lies."""
    ratios = sorted(a / b for a, b in zip(plain, small, strict=True))
    quarter = len(ratios) // 4
    return (f"| {1e3 * statistics.median(small):.1f} | {statistics.median(ratios):.2f} "
            f"| {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f} ")


def held_bytes(name: str) -> int:
    """Of this process: now (VmRSS), or the most there ever was (VmHWM). Only Linux says it. The
    most by `getrusage` is no less than what the parent held when it started this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not say how much memory this process holds")


def measure_memory(folder: str, dtype: str, quantization: str | None) -> dict[str, int]:
    """In a process of its own: what an engine with a small KV cache adds to it."""
    before = held_bytes("VmRSS")
    with LLM(folder, dtype=dtype, quantization=quantization, load_format="dummy", max_num_seqs=1,
             skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=4):
        return dict(resident=held_bytes("VmRSS") - before, peak=held_bytes("VmHWM") - before)


def memory_table(folder: Path, dtype: str) -> list[str]:
    lines = ["| weights | resident when ready, MB | the most while loading, MB |", "|---|---|---|"]
    for quantization in QUANTIZATIONS:
        question = json.dumps([str(folder), dtype, quantization])
        found = json.loads(subprocess.run(
            [sys.executable, "-m", "benchmarks.quantization", "--memory-of", question],
            stdout=subprocess.PIPE, text=True, check=True).stdout)
        lines.append(f"| {quantization or dtype} | {found['resident'] / 2 ** 20:,.0f} "
                     f"| {found['peak'] / 2 ** 20:,.0f} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description="What small weights cost, and what they bring.")
    parser.add_argument("--corpus", type=Path, help="the text whose held-out part is predicted")
    parser.add_argument("--speed", action="store_true", help="time steps, and look at the memory")
    parser.add_argument("--model", default="Qwen3-0.6B", help="shapes, for --speed: a folder with "
                        f"a config.json, or one of {', '.join(roofline.MODELS)}")
    parser.add_argument("--dtype", default="bfloat16", help="of the other engine, for --speed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--cpu-seconds", action="store_true", help="with --speed: one thread, and "
                        "its CPU time in place of the clock")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not (args.memory_of or args.corpus or args.speed):
        parser.error("say what to measure: --corpus FILE, or --speed")
    if args.corpus and not args.corpus.is_file():
        parser.error(f"--corpus {args.corpus}: there is no such file")
    if args.memory_of:
        print(json.dumps(measure_memory(*json.loads(args.memory_of))))
    if args.corpus:
        tokens = held_out_tokens(args.corpus, BUNDLED_MODEL)
        print(*perplexity_table(tokens, BUNDLED_MODEL), sep="\n")
    if args.speed:
        with tempfile.TemporaryDirectory() as folder:
            given = Path(args.model)
            written = given if given.is_dir() else roofline.write_config(args.model, Path(folder))
            clock = time.perf_counter
            if args.cpu_seconds:
                torch.set_num_threads(1)
                clock = time.process_time
            print(*speed_table(written, args.dtype, args.rounds, args.rows, clock), "", sep="\n")
            print(*memory_table(written, args.dtype), sep="\n")


if __name__ == "__main__":
    main()
