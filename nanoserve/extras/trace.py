"""Watch the scheduler think: the real scheduler and block manager, a fake model, one line a step.

    python -m nanoserve.extras.trace
    python -m nanoserve.extras.trace --budget 6 --blocks 12 --request 9:4 --request 20:2

The decisions are the engine's own; only the tokens are made up, because no decision depends on what
a token is. It needs no torch, no model and no time, so it is the quickest way to see what a change
to `scheduler.py` or `block_manager.py` does.

Each request is `prompt:output[:shared]` in tokens; requests whose prompts share their first tokens
can hit each other's blocks. A cell of the table is what a request gets in that step:

    0..8      computes the tokens at positions 0 to 7 of its prompt
    8..10 →   the rest of the prompt, and samples a token from it
    10 →      decodes: computes one token, samples the next
    hit 8     found its first 8 tokens in the prefix cache
    preempted gave its blocks back, will recompute
    ·         waits
"""

import argparse

from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

DEMO = ["10:5:8", "12:5:8", "14:3"]  # A and B share 8 tokens, C is on its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", type=int, default=12, help="tokens a step")
    parser.add_argument("--blocks", type=int, default=9, help="KV blocks")
    parser.add_argument("--block-size", type=int, default=4, help="tokens a block")
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--request", action="append", metavar="PROMPT:OUTPUT[:SHARED]")
    args = parser.parse_args()
    try:
        print(trace(args.request or DEMO, args.budget, args.blocks, args.block_size,
                    args.max_num_seqs))
    except ValueError as error:
        parser.error(str(error))


def trace(requests: list[str], budget: int, num_blocks: int, block_size: int,
          max_num_seqs: int) -> str:
    """Run the requests to their end; returns the table. Raises `ValueError` for what can't run."""
    config = EngineConfig(
        model="fake", max_model_len=num_blocks * block_size, block_size=block_size,
        max_num_batched_tokens=budget, max_num_seqs=min(max_num_seqs, budget))
    scheduler = Scheduler(config, num_blocks)
    seqs = [_make_sequence(i, request) for i, request in enumerate(requests)]
    for seq in seqs:
        scheduler.add(seq)
    rows = [["step", "tokens", *(seq.request_id for seq in seqs), "free blocks"]]
    cached: set[Sequence] = set()
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        cells = [_cell(step, seq, seq not in cached) for seq in seqs]
        cached.update(step.num_new_tokens)
        rows.append([str(step.index), f"{step.num_tokens}/{budget}", *cells,
                     str(scheduler.blocks.num_free_blocks)])
        # Any token will do, as long as different requests don't look alike by accident.
        scheduler.update(step, [1000 + seq.arrival for seq in step.sampling])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in rows)


def _make_sequence(i: int, request: str) -> Sequence:
    """ "10:5:8" -> ten prompt tokens, the first eight of them everybody's, five to generate."""
    try:
        numbers = [int(number) for number in request.split(":")]
        num_prompt, num_output, num_shared = numbers if len(numbers) == 3 else (*numbers, 0)
        if not (num_prompt >= 1 and num_output >= 1 and 0 <= num_shared <= num_prompt):
            raise ValueError
    except ValueError:
        raise ValueError(f"request {request!r} must be PROMPT:OUTPUT[:SHARED], whole numbers of at "
                         "least 1, SHARED at most PROMPT") from None
    tokens = list(range(num_shared)) + [100 * (i + 1) + n for n in range(num_prompt - num_shared)]
    return Sequence(chr(ord("A") + i), tokens, SamplingParams(temperature=0, max_tokens=num_output),
                    arrival=i, max_num_tokens=num_prompt + num_output)


def _cell(step: Step, seq: Sequence, first_time: bool) -> str:
    if seq in step.preempted:
        return "preempted"
    if seq not in step.num_new_tokens:
        return "·" if seq.finish_reason is None else ""
    index = list(step.num_new_tokens).index(seq)
    start, n = step.starts[index], step.num_new_tokens[seq]
    text = f"{start}" if n == 1 else f"{start}..{start + n}"
    hit = f"hit {seq.num_cached_tokens}, " if first_time and seq.num_cached_tokens else ""
    return hit + text + (" →" if seq in step.sampling else "")


if __name__ == "__main__":
    main()
