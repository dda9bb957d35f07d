"""Workloads for measuring an engine: requests of random tokens, and a summary of their times.

Each named workload stands for a way of using an engine, and for what it is hard on:

    batch          many short texts at once: continuous batching, everything
    single         one conversation: how fast the weights can be read
    long-prompt    one document: arithmetic, attention above all
    shared-prefix  one system prompt for all: the prefix cache
    repetitive     prompts that repeat themselves: drafting what comes next
    mixed          shared prefixes, and long prompts while others decode: for the `--ladder`
    rows-N         N short prompts that decode side by side: what a step of N rows takes

On a GPU `batch` is the community workload of nano-vllm, drawn as it draws it, number by number: 256
requests, prompts and outputs of 100 to 1024 tokens, 142,827 and 133,966 in all.

Invariant: the same seed gives the same tokens, everywhere, so that two engines can be asked for the
same work. Every request generates its full length (`ignore_eos`), because with random weights the
end of a text is an accident. Not known here: torch, the engine. Road not taken: real prompts, which
need a data set and a tokenizer; a model with random weights can't tell the difference, and what a
token is decides nothing but which experts are hit.
"""

import shutil
import textwrap
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from random import Random

COMMUNITY_TOKENS = 10_000  # nano-vllm draws its token ids from 0 to this, inclusive
Range = tuple[int, int]  # from, to, inclusive


@dataclass(frozen=True)
class Request:
    """arrival: seconds after the start."""

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A workload's numbers: what `--num-prompts`, `--input-len` and `--output-len` change."""

    num_prompts: int
    input_len: Range  # of a prompt's own tokens
    output_len: Range
    shared_len: int = 0  # tokens that all prompts begin with
    period: int = 0  # a prompt repeats its first so many tokens; 0: it doesn't repeat
    long_every: int = 0  # every n-th prompt shares nothing and is `long_len` long
    long_len: int = 0


ROWS = {f"rows-{n}": Shape(n, (32, 32), (33, 33)) for n in (1, 4, 8, 16, 32, 64)}
# On a CPU: small enough for half a billion parameters on two cores.
SMALL = {
    "batch": Shape(16, (32, 256), (32, 128)),
    "single": Shape(1, (128, 128), (64, 64)),
    "long-prompt": Shape(1, (2048, 2048), (8, 8)),
    "shared-prefix": Shape(16, (32, 32), (32, 32), shared_len=512),
    "repetitive": Shape(4, (128, 128), (64, 64), period=16),
    "mixed": Shape(12, (32, 32), (16, 48), shared_len=192, long_every=4, long_len=640),
    **ROWS,
}
LARGE = {  # on a GPU
    "batch": Shape(256, (100, 1024), (100, 1024)),
    "single": Shape(1, (1024, 1024), (512, 512)),
    "long-prompt": Shape(1, (16384, 16384), (8, 8)),
    "shared-prefix": Shape(256, (64, 64), (128, 128), shared_len=2048),
    "repetitive": Shape(32, (512, 512), (256, 256), period=32),
    "mixed": Shape(48, (64, 64), (32, 96), shared_len=1024, long_every=4, long_len=4096),
    **ROWS,
}
WORKLOADS = tuple(SMALL)


def community(num_prompts: int = 256, input_len: Range = (100, 1024),
              output_len: Range = (100, 1024), seed: int = 0,
              max_token: int = COMMUNITY_TOKENS) -> list[Request]:
    """nano-vllm's draw: all prompts, a length before its tokens, and then the output lengths."""
    rng = Random(seed)
    prompts = [[rng.randint(0, max_token) for _ in range(rng.randint(*input_len))]
               for _ in range(num_prompts)]
    return [Request(prompt, rng.randint(*output_len)) for prompt in prompts]


def generate(shape: Shape, vocab_size: int, seed: int = 0) -> list[Request]:
    """The requests of a workload, all arriving at once."""
    max_token = min(COMMUNITY_TOKENS, vocab_size - 1)
    if not (shape.shared_len or shape.period or shape.long_every):
        return community(shape.num_prompts, shape.input_len, shape.output_len, seed, max_token)
    rng = Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, max_token) for _ in range(count)]

    shared, requests = tokens(shape.shared_len), []
    for i in range(shape.num_prompts):
        if shape.long_every and i % shape.long_every == shape.long_every - 1:
            prompt = tokens(shape.long_len)
        elif shape.period:
            length = rng.randint(*shape.input_len)
            prompt = (tokens(shape.period) * (length // shape.period + 1))[:length]
        else:
            prompt = shared + tokens(rng.randint(*shape.input_len))
        requests.append(Request(prompt, rng.randint(*shape.output_len)))
    return requests


def poisson(requests: list[Request], rate: float, seed: int = 0) -> list[Request]:
    """The same, arriving independently of each other, `rate` a second on average: the times
    between two arrivals are exponentially distributed."""
    rng, now, timed = Random(seed), 0.0, []
    for request in requests:
        now += rng.expovariate(rate)
        timed.append(replace(request, arrival=now))
    return timed


def replay(path: Path, vocab_size: int, seed: int = 0) -> list[Request]:
    """Real arrivals: lines of `seconds,prompt,output[,shared]`, the lengths in tokens. Raises
    `ValueError` naming the line that is wrong."""
    try:
        from nanoserve_extras.trace.trace import read_csv  # late: bench.py needs no extras
        arrivals = read_csv(path)
    except OSError as error:
        raise ValueError(f"--arrivals: {path} can't be read: {error.strerror}") from None
    rng, max_token = Random(seed), min(COMMUNITY_TOKENS, vocab_size - 1)
    shared = [rng.randint(0, max_token) for _ in range(max(a.num_shared for a in arrivals))]
    return [Request(shared[:a.num_shared] + [
        rng.randint(0, max_token) for _ in range(a.num_prompt - a.num_shared)],
        a.num_output, a.seconds) for a in arrivals]


# ------------------------------------------------------------ how long it took


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 by nearest rank (the 99th of 100 values); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return dict(mean=sum(values) / len(values), **{
        f"p{n}": ordered[ceil(n * len(ordered) / 100) - 1] for n in (50, 90, 99)})


def summarize(seconds: float, num_prompt_tokens: int, token_times: list[list[float]],
              num_tokens: list[int] | None = None) -> dict:
    """What one run came to, for any engine.

    token_times: of each request, the seconds from its arrival to each of its tokens; with
    num_tokens only those to its first and last. `inter_token` is about the times between any two
    tokens that follow each other; `decode_tok_s` is what one request sees behind its first token,
    and `step_ms` the same in milliseconds a token.
    """
    if num_tokens is None:
        num_tokens = [len(times) for times in token_times]
        gaps = [b - a for times in token_times for a, b in pairwise(times)]
    else:
        gaps = []
    waited = sum(times[-1] - times[0] for times in token_times)
    total = sum(num_tokens)
    num_decoded = total - len(num_tokens)
    return dict(
        seconds=seconds, num_requests=len(num_tokens), num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=total, requests_s=len(num_tokens) / seconds,
        output_tok_s=total / seconds, total_tok_s=(num_prompt_tokens + total) / seconds,
        decode_tok_s=num_decoded / waited if num_decoded and waited else None,
        step_ms=1e3 * waited / num_decoded if num_decoded and waited else None,
        ttft=spread([times[0] for times in token_times]), inter_token=spread(gaps),
        end_to_end=spread([times[-1] for times in token_times]))


# ------------------------------------------------------------- how it is told


def wrapped(title: str, text: str, column: int = 10) -> str:
    """`title`, and `text` in a column beside it, in lines as wide as the terminal (80 characters
    where there is none). A word that is longer than that, such as a path, stays whole."""
    width = max(shutil.get_terminal_size().columns, column + 30)
    return textwrap.fill(text, width, initial_indent=title.ljust(column - 1) + " ",
                         subsequent_indent=" " * column, break_long_words=False,
                         break_on_hyphens=False)
