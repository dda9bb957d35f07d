"""The step trace: the work of scheduler and cache, recorded step by step, in one file.

`LLM(trace="run.html")` adds a `Trace` to the engine's extras: it observes the hooks added,
scheduled, updated and ended, and changes nothing. From its stream of frames it writes a page that
any browser opens without a network (`trace.html` is its template), or Chrome trace JSON, which
ui.perfetto.dev opens. A frame is a step, with all events since the step before:

    i, t, d   the step, from 0; when it was scheduled, and how long it took (µs; -1: never finished)
    q         requests that arrived          f   that ended: request, reason, output tokens
    h         prefix hits: request, tokens   p   preempted: request, and for which one
    l         of those, what the store behind the cache brought: request, tokens
    w         why requests wait: request, what follows its name in a sentence (see reasons.py)
    n         the request that is next in line: waiting requests not in w stand behind it
    x         rows, in columns: requests, first positions, tokens, 1 where a token is sampled
    g         blocks given back: request, how many leading ones (-1: all)
    b         blocks taken: one list for each request, [request, block, block, ...]
    s         when stages computed: which one, from when to when (µs; layer_plan/layer_plan.py)
    k, e      blocks that became findable in the prefix cache; that are findable no more
    v         tokens in the encoder cache from here on, images encoded (multimodal/multimodal.py)

Rows are written as they are, and the page holds all of it as gzip, which the browser uncompresses.
From step to step most of a column stays, so half a million rows, 2,000 steps of 256 requests, are
a file of about two megabytes.

Invariant: replaying g, b, k and e gives the block manager's own reference counts and cache after
every `schedule()` (the tests replay them with a ledger of their own). Of memory only changes are
told, and the reasons of waiting requests: a step costs O(running + its new blocks + those of the
next in line), never O(blocks) or O(waiting). Known limit: the trace grows with the run, so it stops
after `MAX_STEPS` steps, and says so.
"""

import gzip
import json
import os
import time
import weakref
from array import array
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoserve.hooks import Extra
from nanoserve.progress import say
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CacheEntry, Sequence, Step
from nanoserve_extras.base.files import private
from nanoserve_extras.engine_args import TraceOptions
from nanoserve_extras.trace.reasons import explain

MAX_STEPS = 20_000
TEMPLATE = Path(__file__).parent / "trace.html"
PROMPT_PREVIEW = 120  # characters


class Recorder(Extra):
    """The extra behind `LLM(trace=...)`. The trace is written whenever no request is left, and also
    after an error, Ctrl-C or the script's end."""

    Options = TraceOptions

    @property
    def name(self) -> str:
        return f"trace={self.options.trace!r}"

    def prepare(self, plan: Any) -> Any:
        if self.options.trace is None:
            raise ValueError("Recorder() needs a file: Recorder(trace='run.html'), say")
        return replace(plan, parts=replace(plan.parts, traced=True))

    def attach(self, engine: Any) -> None:
        config = engine.config
        self.trace = Trace(self.options.trace, engine.scheduler, Path(config.model).name, say,
                           encoder=encoder_of(engine))
        engine.add(self.trace)
        weakref.finalize(engine, self.trace.close)

    def idle(self) -> None:
        self.trace.write()

    def close(self) -> None:
        self.trace.close()


def encoder_of(engine):
    """The encoder cache of an engine that takes images or sounds; None for others."""
    return next((extra.encoder for extra in engine.extras if hasattr(extra, "encoder")), None)


@dataclass(eq=False, slots=True)
class Lane:
    """The part of a sequence's state that is recorded so far."""

    number: int
    table: list[int] = field(default_factory=list)  # the sequence's own list: told by identity
    num_seen: int = 0  # so many blocks of `table` were told
    num_released: int = 0


class Trace(Extra):
    """Records one scheduler. path: ends in .html or .json. say: gets a line for each file
    written. clock: seconds; note: what a reader should know about that clock. encoder: an encoder
    cache, which tells its `budget`, `num_tokens` and `num_runs`."""

    shows_prompts = True

    def __init__(self, path: str, scheduler: Scheduler, title: str, say: Callable[[str], None],
                 clock: Callable[[], float] = time.perf_counter, note: str = "", encoder=None):
        self.path, self.say, self.clock, self.encoder = Path(path).absolute(), say, clock, encoder
        self.seen = (0, 0) if encoder is None else (0, encoder.num_runs)  # tokens, the tower's runs
        self.scheduler, self.blocks = scheduler, scheduler.blocks
        blocks = self.blocks
        self.start, self.first = clock(), scheduler.num_steps  # earlier steps have no frame
        self.frames: list[dict] = []
        self.frame: dict[str, list] = {}  # the one that is not finished
        # Blocks whose place in the prefix cache changed in it; at first all that are cached.
        self.findable = {entry.block_id: True for entry in blocks.cached.values()}
        self.lanes: dict[Sequence, Lane] = {}  # one for each that has not ended
        self.requests: list[list] = []
        self.frame_of: dict[int, dict] = {}  # by index, for steps in flight
        self.closed, self.is_written = False, False  # the second: nothing is new since `write`
        self.last_write = (0.0, 0.0)  # its end, its duration
        self.meta = dict(
            title=title, note=note, num_blocks=blocks.num_blocks, block_size=blocks.block_size,
            budget=scheduler.max_num_batched_tokens, max_num_seqs=scheduler.max_num_seqs,
            states=bool(blocks.hooks.usable), images=0 if encoder is None else encoder.budget)

    # ------------------------------------------------------ what it is told

    def added(self, request: Any) -> None:
        if self.closed:
            return
        text = str(request.prompt or "") if self.shows_prompts else ""
        preview = text if len(text) <= PROMPT_PREVIEW else text[:PROMPT_PREVIEW] + "…"
        for seq in request.sequences:
            self.lanes[seq] = Lane(len(self.requests))
            self._tell("q", len(self.requests))
            self.requests.append([seq.name, seq.num_prompt_tokens, self._now(), preview])

    def scheduled(self, step: Step) -> None:
        """A frame ends here: the page shows the memory as it is while the step runs."""
        if self.closed or not (step.num_new_tokens or step.preempted):
            return
        self._look_at_images()
        if len(self.frames) >= MAX_STEPS:
            self._stop(f"only the first {MAX_STEPS:,} steps are recorded")
            return
        for seq, taker in step.preempted.items():
            self._tell("p", self.lanes[seq].number, self.lanes[taker].number)
            self._look_at_blocks(seq, self.lanes[seq])
        sampling, admitted = set(step.sampling), set(step.admitted)
        for seq, start in zip(step.num_new_tokens, step.starts, strict=True):
            lane = self.lanes[seq]
            if seq in admitted and start:
                self._tell("h", lane.number, start)
            if seq in step.num_loaded:
                self._tell("l", lane.number, step.num_loaded[seq])
            if len(seq.block_table) != lane.num_seen or seq.block_table is not lane.table:
                self._look_at_blocks(seq, lane)
        waits = explain(self.scheduler, step)
        for seq, reason in waits.of.items():
            if seq not in step.preempted:  # a preemption is recorded already
                self._tell("w", self.lanes[seq].number, reason)
        if waits.next_in_line is not None:
            self._tell("n", self.lanes[waits.next_in_line].number)
        columns = ([self.lanes[seq].number for seq in step.num_new_tokens], step.starts,
                   step.num_new_tokens.values(), [seq in sampling for seq in step.num_new_tokens])
        self.frame_of[step.index] = self._frame(step.index - self.first, -1) | {
            "x": [array("i", column) for column in columns]}  # a list takes ten times as much
        self.frames.append(self.frame_of[step.index])
        self.frame, self.findable, self.is_written = {}, {}, False

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        frame = self.frame_of.pop(step.index, None)
        if frame is not None:  # also of a full trace: a step in flight when it filled up
            frame["d"] = self._now() - frame["t"]
            at = self.clock() - self.start - time.time()  # ranks say the time since 1970
            if spans := getattr(step.output, "spans", ()):
                frame["s"] = [number for stage, *span in spans for number in (
                    stage, *(round(1e6 * (at + one)) for one in span))]
        for seq in step.num_new_tokens:
            lane = self.lanes.get(seq)
            if lane is not None and seq.num_released_blocks > lane.num_released:
                self._look_at_blocks(seq, lane)

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            lane = self.lanes.get(seq)
            if lane is not None:
                self._tell("f", lane.number, seq.finish_reason,
                           len(seq.token_ids) - seq.num_prompt_tokens)
                self._look_at_blocks(seq, lane)
                del self.lanes[seq]

    # ---------------------------------------------- what changed in memory

    def _look_at_blocks(self, seq: Sequence, lane: Lane) -> None:
        """Record the blocks that the sequence released and took. `BlockManager.free` makes a new
        list for the table, so the list that we kept still has the released blocks."""
        if seq.block_table is not lane.table:
            if lane.num_seen:
                self._tell("g", lane.number, -1)
            lane.table, lane.num_seen = seq.block_table, 0
            lane.num_released = 0
        if seq.num_released_blocks > lane.num_released:
            self._tell("g", lane.number, seq.num_released_blocks - lane.num_released)
            lane.num_released = seq.num_released_blocks
        new = lane.table[lane.num_seen:]
        if new:
            self._tell("b", [lane.number, *new])
            lane.num_seen += len(new)

    def committed(self, entry: CacheEntry) -> None:
        self._change(entry.block_id, True)

    def evicted(self, entry: CacheEntry) -> None:
        self._change(entry.block_id, False)

    def _change(self, block_id: int, findable: bool) -> None:
        """Twice in one frame is no change: committed, given back and taken by the next one."""
        if not self.closed and self.findable.pop(block_id, None) is None:
            self.findable[block_id] = findable

    def _look_at_images(self) -> None:
        """Add to the last frame the images that were encoded for its step: this is known only now,
        when the next step is scheduled."""
        if self.encoder is not None and self.frames:
            tokens, runs = self.encoder.num_tokens, self.encoder.num_runs
            if (tokens, runs) != self.seen:
                self.frames[-1]["v"] = [tokens, runs - self.seen[1]]
                self.seen = tokens, runs

    # ------------------------------------------------------------- the stream

    def _now(self) -> int:
        return round(1e6 * (self.clock() - self.start))

    def _tell(self, kind: str, *values) -> None:
        self.frame.setdefault(kind, []).extend(values)
        self.is_written = False

    def _frame(self, index: int, duration: int) -> dict:
        """A frame with all events since the last one."""
        changed = {kind: [one for one, is_findable in self.findable.items() if is_findable == says]
                   for kind, says in (("k", True), ("e", False))}
        return {"i": index, "t": self._now(), "d": duration} | self.frame | {
            kind: blocks for kind, blocks in changed.items() if blocks}

    def _stop(self, note: str) -> None:
        self.meta["note"] = f"{self.meta['note']} {note}".strip()
        self._finish_recording()
        self.say(f"trace: {note}")

    def _finish_recording(self) -> None:
        self.closed = True
        self.lanes.clear()

    def stream(self) -> dict:
        """The whole recording so far. Its last frame is no step: it has the events after the last
        step."""
        self._look_at_images()
        return dict(meta=dict(self.meta), requests=list(self.requests),
                    frames=[*self.frames, self._frame(-1, 0)])

    # ------------------------------------------------------------- the files

    def write(self, always: bool = False) -> None:
        """Write the file, if there is something new and it takes less than a twentieth of the time
        since it was last written: a script that generates 1,000 times must not spend its time here.
        `close` always writes."""
        ended_at, seconds = self.last_write
        now = time.perf_counter()
        if self.is_written or (not always and now - ended_at < 20 * seconds):
            return
        stream = self.stream()
        half_done = self.path.with_name(self.path.name + ".part")
        try:
            text = page(stream) if self.path.suffix == ".html" else json.dumps(chrome_trace(stream))
            half_done.unlink(missing_ok=True)  # left by a process that died, or a planted link
            with open(half_done, "x", encoding="utf-8", opener=private) as file:
                file.write(text)
            os.replace(half_done, self.path)  # an interruption leaves the last whole file
        except OSError as error:  # a full disk must not cost the caller their outputs
            with suppress(OSError):
                half_done.unlink()
            self.say(f"trace: {self.path} can't be written: {error}")
            return
        finally:  # a write that failed took its time as well
            self.last_write = (time.perf_counter(), time.perf_counter() - now)
        self.is_written = True
        how = "open it in a browser" if self.path.suffix == ".html" else "open it in Perfetto"
        self.say(f"trace: {len(self.frames):,} steps of {len(self.requests):,} requests in "
                 f"{self.path} ({len(text) / 2 ** 20:.1f} MB): {how}")

    def close(self) -> None:
        """Write the rest of the recording, and stop recording. A second call is harmless."""
        self.write(always=True)
        self._finish_recording()


def page(stream: dict) -> str:
    """The template with the data in it: JSON, gzip'ed, in base64. No text can end the script that
    it stands in, and the page's own script shows text as text only."""
    data = json.dumps(stream, separators=(",", ":"), default=list).encode()  # arrays as lists
    before, after = TEMPLATE.read_text(encoding="utf-8").split("/*THE TRACE*/")
    packed = gzip.compress(data, 1)  # the default, 9, saves a fifth and takes four times as long
    return before + b64encode(packed).decode() + after


def chrome_trace(stream: dict) -> dict:
    """The same in the Trace Event Format: a track of steps, a track for each request, counters.

    A run of decoding steps is one slice. With overlap a step starts before the last one has ended;
    slices of a track must not overlap, so it is drawn from where the last one ends.
    """
    events: list[dict] = []

    def tell(ph: str, name: str, pid: int, tid: int, ts: int = 0, **more) -> dict:
        events.append(dict(ph=ph, name=name, pid=pid, tid=tid, ts=ts, **more))
        return events[-1]

    for pid, name in ((1, "engine"), (2, "requests")):
        tell("M", "process_name", pid, 0, args={"name": name})
    for number, (name, num_prompt, _, _) in enumerate(stream["requests"]):
        tell("M", "thread_name", 2, number, args={"name": f"{name} ({num_prompt} prompt tokens)"})
    decoding: dict[int, dict] = {}  # request -> its slice that may go on
    reached = [0] * len(stream["requests"])  # how far it was computed: what is before is repeated
    end = 0
    for frame in stream["frames"]:
        begin, end = (max(t, end) for t in (frame["t"], frame["t"] + max(frame["d"], 0)))
        sums = dict(prefill=0, decode=0, recompute=0)
        still: dict[int, dict] = {}
        for request, start, n, _ in zip(*frame.get("x", ()), strict=True):
            kind = ("recompute" if start < reached[request] else
                    "prefill" if start < stream["requests"][request][1] else "decode")
            sums[kind] += n
            # Of a decoding row with drafts only the first token is sure to stay.
            reached[request] = max(reached[request], start + (1 if kind == "decode" else n))
            event = decoding.get(request) if kind == "decode" else None
            if event is None:
                event = tell("X", kind, 2, request, begin, cat=kind, args=dict(
                    first_position=start, tokens=0, step=frame["i"]))
            event["dur"] = end - event["ts"]
            event["args"]["tokens"] += n
            if kind == "decode":
                still[request] = event
        decoding = still
        if frame["i"] >= 0:
            tell("X", f"step {frame['i']}", 1, 0, begin, dur=end - begin,
                 args=dict(tokens=sum(sums.values())))
        tell("C", "tokens", 1, 0, begin, args=sums)
        if "v" in frame:
            tell("C", "encoder cache", 1, 0, begin, args=dict(tokens=frame["v"][0]))
        for kind, name in (("h", "prefix hit"), ("l", "loaded from the store"), ("p", "preempted")):
            for request in frame.get(kind, [])[::2]:
                tell("i", name, 2, request, begin, s="t")
    return dict(traceEvents=events, displayTimeUnit="ms", otherData=stream["meta"])
