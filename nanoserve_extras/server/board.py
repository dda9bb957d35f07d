"""A live view of the engine for the page at `/`: a picture of a step, a few times a second.

    GET /live ──► Board.read() ──► {steps' tokens, blocks, rows: who computes, who waits and why}

After a client has asked, pictures are made for two more seconds. Otherwise the cost of a step is
two comparisons.

Invariant: a picture holds numbers and the engine's own sentences, and no text of a request: people
who may see a server's steps must not see its users' prompts.

`/trace` has the whole history of steps (tracer.py). Road not taken: an event stream, which would
have to be closed explicitly when the server shuts down.
"""

import time
from collections import deque
from itertools import islice

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.trace.reasons import explain

WATCHED, PAUSE = 2.0, 0.1  # seconds: pictures are made so long after a read; between two pictures
MOST_ROWS = 24  # for running sequences, and for waiting ones
MOST_STEPS = 120


class Board(Extra):
    """An observer of one engine."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.until = self.next_picture = 0.0
        self.num_read = self.num_written = 0  # tokens of prompts and outputs, while watched
        self.steps: deque[tuple[int, int]] = deque(maxlen=MOST_STEPS)  # (prompts', all) tokens
        self.picture: dict = self._idle()
        engine.add(self)

    def read(self) -> dict:
        """The latest picture. New ones are made for the next two seconds."""
        self.until = time.monotonic() + WATCHED
        return self.picture | dict(read=self.num_read, written=self.num_written,
                                   steps=list(self.steps))

    # --------------------------------------------------------------- hooks

    def scheduled(self, step: Step) -> None:
        if (now := time.monotonic()) > self.until or not step.num_new_tokens:
            return
        prompts = sum(min(start + n, seq.num_prompt_tokens) - start
                      for (seq, n), start in zip(step.num_new_tokens.items(), step.starts,
                                                 strict=True)
                      if start < seq.num_prompt_tokens)
        self.num_read += prompts
        self.steps.append((prompts, step.num_tokens))
        if now >= self.next_picture:
            self.next_picture = now + PAUSE
            self.picture = self._picture(step)

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        if time.monotonic() <= self.until:
            self.num_written += sum(map(len, accepted.values()))

    def ended(self, sequences: list[Sequence]) -> None:
        if sequences and not self.engine.scheduler.has_unfinished():
            self.picture = self._idle()

    # ------------------------------------------------------------ pictures

    def _picture(self, step: Step) -> dict:
        scheduler, waits = self.engine.scheduler, explain(self.engine.scheduler, step)
        starts = dict(zip(step.num_new_tokens, step.starts, strict=True))
        running = [self._row(seq, starts.get(seq), step.num_new_tokens.get(seq, 0),
                             waits.of.get(seq, "")) for seq in scheduler.running[:MOST_ROWS]]
        behind = waits.next_in_line and f"stands behind {waits.next_in_line.name}"
        waiting = [self._row(seq, None, 0, waits.of.get(seq, behind))
                   for seq in islice(scheduler.waiting, MOST_ROWS)]
        return self._totals() | dict(rows=[*running, *waiting])

    def _idle(self) -> dict:
        return self._totals() | dict(rows=[])

    def _totals(self) -> dict:
        scheduler = self.engine.scheduler
        return dict(
            budget=scheduler.max_num_batched_tokens, num_blocks=scheduler.blocks.num_blocks,
            free=scheduler.blocks.num_free_blocks, cached=len(scheduler.blocks.cached),
            running=len(scheduler.running), waiting=len(scheduler.waiting))

    def _row(self, seq: Sequence, start: int | None, num_new: int, why: str) -> dict:
        """A sequence's row. start: the position of the first token that the step computes for it;
        None: the step computes none."""
        done = seq.num_computed_tokens if start is None else start
        return dict(name=seq.name, prompt=seq.num_prompt_tokens, done=done, new=num_new,
                    cached=seq.num_cached_tokens or 0, blocks=len(seq.block_table),
                    output=max(0, seq.num_tokens - seq.num_prompt_tokens),
                    waits=seq.row < 0, why=why or "")
