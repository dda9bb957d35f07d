"""Why is one token slow, and sixteen nearly free? Measured here: `python -m course.speed`.

    python -m course.speed               the bundled model
    python -m course.speed Qwen3-0.6B    random weights in a real one's shapes: minutes, 3 GB

First the napkin: what a step must read, over the memory's speed. Then the engine, each time with
one thing changed: tokens a second, and which share that is of what this machine could do in the
steps as they were scheduled (benchmarks/roofline.py; the clock is that of benchmarks/meter.py).
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import roofline
from benchmarks.meter import serve
from benchmarks.workloads import Shape, generate
from nanoserve import LLM
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.base.command import command

PLAIN, INT8, NO_CACHE = {}, dict(quantization="int8"), dict(enable_prefix_caching=False)
DRAFTS = dict(speculative_config={"method": "suffix", "num_speculative_tokens": 8})
PROMPTS, DECODES, ALL = "prompts", "decodes", "all"  # steps whose time counts, and their tokens


@dataclass
class Run:
    """A line of the table. before: the line from which it differs by one thing."""

    name: str
    before: str
    shape: Shape
    options: dict  # its engine has them beside those of all
    part: str = DECODES
    num_tokens: int = 0  # in the steps that count of the fastest round
    seconds: float = float("inf")
    work: list[roofline.Work] | None = None

    def measure(self, llm: LLM, rounds: int) -> None:
        """Other programs only ever make a round longer, so the fastest counts."""
        requests = generate(self.shape, llm.model_config.vocab_size)
        for _ in range(rounds):
            result, meter = serve(llm, requests, label=self.name)
            first, last = result["ttft"]["p99"], result["end_to_end"]["p99"]
            count = sum(any(start < seq.num_prompt_tokens for seq, start
                            in zip(step.num_new_tokens, step.starts, strict=True))
                        for step in meter.steps)  # steps with a prompt come first
            steps, seconds = {PROMPTS: (meter.steps[:count], first), ALL: (meter.steps, last),
                              DECODES: (meter.steps[count:], last - first)}[self.part]
            if seconds < self.seconds:
                self.seconds = seconds
                self.work = [roofline.Work.of(one, llm.model_config.windows) for one in steps]
                self.num_tokens = sum(len(new) for step in steps for new in step.accepted.values())
                if self.part != DECODES:
                    self.num_tokens += result["num_prompt_tokens"]


def plan(short: int, long: int) -> list[Run]:
    """short and long: tokens of a prompt. After each `short` more are written."""
    def rows(number: int, prompt: int = short) -> Shape:
        return Shape(number, (prompt, prompt), (short + 1, short + 1))

    shared = Shape(16, (short, short), (short, short), shared_len=long)
    return [
        Run("1 row", "", rows(1), PLAIN),
        Run("4 rows", "1 row", rows(4), PLAIN),
        Run("16 rows", "4 rows", rows(16), PLAIN),
        Run("64 rows", "16 rows", rows(64), PLAIN),
        Run(f"a prompt of {long}", "1 row", Shape(1, (long, long), (1, 1)), PLAIN, PROMPTS),
        Run(f"1 row, {long} keys more", "1 row", rows(1, long + short), PLAIN),
        Run(f"16 rows, {long} keys more", "16 rows", rows(16, long + short), PLAIN),
        Run("1 row, int8", "1 row", rows(1), INT8),
        Run("16 rows, int8", "16 rows", rows(16), INT8),
        Run("1 row, drafts", "1 row", rows(1), DRAFTS),
        Run(f"16 requests, {long} tokens alike", "", shared, NO_CACHE, ALL),
        Run("with the prefix cache", f"16 requests, {long} tokens alike", shared, PLAIN, ALL)]


def main(model: str | None = None, short: int = 32, long: int = 512, rounds: int = 3) -> None:
    name = roofline.built_in(model or "")
    if model and not name:
        raise ValueError(f"there is no model {model!r}: choose one of {[*roofline.MODELS]}")
    runs, machine = plan(short, long), roofline.Machine(0, 0)
    with tempfile.TemporaryDirectory() as folder:
        usual = dict(model=BUNDLED_MODEL) if not name else dict(
            model=roofline.write_config(name, Path(folder)), load_format="dummy")
        usual |= dict(skip_tokenizer_init=True, max_num_seqs=64, max_model_len=long + 3 * short,
                      max_num_batched_tokens=16 * (long + short) + 64,
                      num_gpu_blocks_override=long + 4 * short + 64)
        for options in (PLAIN, INT8, DRAFTS, NO_CACHE):
            with LLM(**usual | options) as llm:
                config, dtype = llm.model_config, getattr(torch, llm.config.dtype)
                serve(llm, generate(runs[0].shape, config.vocab_size))  # warm up
                for run in runs:
                    if run.options is options:
                        run.measure(llm, rounds)
            again = roofline.measure(torch.device(llm.config.device), dtype)
            machine = again.or_better(machine)
    size = dtype.itemsize
    count = roofline.matrix_parameters(config, 1)[0] + config.vocab_size * config.hidden_size
    least = count * size / machine.bandwidth
    print(f"{count / 1e6:,.1f} M weights of {size} bytes are {count * size / 1e6:,.0f} MB; this "
          f"machine copies {machine.bandwidth / 1e9:.1f} GB/s.\nSo a step that reads all of them "
          f"takes {1e3 * least:.2f} ms: {1 / least:,.0f} steps a second, at most.\n\n"
          "| what changes | from | tokens/s before | and after | of the limit |\n"
          "| --- | --- | ---: | ---: | ---: |")
    rates = {"": ""} | {run.name: f"{run.num_tokens / run.seconds:,.0f}" for run in runs}
    for run in runs:
        parts = roofline.run_seconds(run.work, config, machine, size)
        if run.options is INT8:  # one byte a number; keys and activations stay as wide
            small = roofline.run_seconds(run.work, config, machine, 1)
            parts |= {part: small[part] for part in ("linear", "head")}
        print(f"| {run.name} | {run.before} | {rates[run.before]} | {rates[run.name]} | "
              f"{sum(parts.values()) / run.seconds:.0%} |")


if __name__ == "__main__":
    with command():
        try:
            main(*sys.argv[1:2])
        except ValueError as error:
            sys.exit(str(error))
