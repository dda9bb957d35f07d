"""A witness of a step trace: a ledger that replays the frames with nothing but lists."""

import gzip
import json
from base64 import b64decode

from nanoserve.hooks import Extra
from nanoserve_extras.trace.reasons import Waits, explain
from nanoserve_extras.trace.recorder import Trace


class Ledger:
    """Frames -> who holds which block, and what can be found; with lists alone."""

    def __init__(self, num_blocks: int):
        self.tables: dict[int, list[int]] = {}
        self.findable: set[int] = set()
        self.num_blocks = num_blocks

    def read(self, frame: dict) -> None:
        gives = frame.get("g", [])
        for request, count in zip(gives[::2], gives[1::2], strict=True):
            table = self.tables[request]
            assert table and count <= len(table), "gives back what it does not have"
            self.tables[request] = [] if count < 0 else table[count:]
        for request, *blocks in frame.get("b", []):
            self.tables.setdefault(request, []).extend(blocks)
        assert not self.findable & set(frame.get("k", []))
        assert self.findable >= set(frame.get("e", []))
        self.findable |= set(frame.get("k", []))
        self.findable -= set(frame.get("e", []))

    def ref_counts(self) -> list[int]:
        held = [block for table in self.tables.values() for block in table]
        return [held.count(block) for block in range(self.num_blocks)]


class Witness(Extra):
    """Stands behind a trace: compares memory after each `schedule()`, and remembers the steps."""

    def __init__(self, trace: Trace, scheduler):
        self.trace, self.scheduler, self.blocks = trace, scheduler, scheduler.blocks
        self.ledger = Ledger(scheduler.blocks.num_blocks)
        self.num_read = 0
        self.steps: list[dict[str, list]] = []
        self.preempted, self.admitted, self.endings = [], [], []

    def scheduled(self, step) -> None:
        if len(self.trace.frames) == self.num_read:
            assert not step.num_new_tokens and not step.preempted
            return
        [frame] = self.trace.frames[self.num_read:]
        self.num_read += 1
        self.ledger.read(frame)
        self.compare()
        self.steps.append({seq.name: [start, n, seq in step.sampling] for (seq, n), start in zip(
            step.num_new_tokens.items(), step.starts, strict=True)})
        self.preempted.append([name for victim, taker in step.preempted.items()
                               for name in (victim.name, taker.name)])
        self.compare_reasons(frame, explain(self.scheduler, step), step)
        starts = zip(step.num_new_tokens, step.starts, strict=True)
        self.admitted.append({seq.name: start for seq, start in starts
                              if seq in step.admitted and start})

    def compare_reasons(self, frame: dict, waits: Waits, step) -> None:
        """Whether the sentences are true is for test_reasons."""
        names = [request[0] for request in self.trace.requests]
        told = frame.get("w", [])
        assert {names[r]: reason for r, reason in zip(told[::2], told[1::2], strict=True)} == {
            seq.name: reason for seq, reason in waits.of.items() if seq not in step.preempted}
        assert [names[r] for r in frame.get("n", [])] == (
            [waits.next_in_line.name] if waits.next_in_line else [])

    def compare(self) -> None:
        assert self.ledger.ref_counts() == self.blocks.ref_counts
        assert self.ledger.findable == {
            entry.block_id for entry in self.blocks.entry_of if entry is not None}

    def ended(self, sequences) -> None:
        self.endings += [(seq.name, seq.finish_reason, len(seq.output_token_ids))
                      for seq in sequences if seq.name not in {end[0] for end in self.endings}]

    def compare_stream(self, stream: dict) -> None:
        """The whole stream, when all is over."""
        *frames, tail = stream["frames"]
        assert len(frames) == self.num_read == len(self.steps) > 0 and tail["i"] == -1
        self.ledger.read(tail)
        self.compare()
        names = [request[0] for request in stream["requests"]]
        for frame, expected in zip(frames, self.steps, strict=True):
            assert len(frame["x"][0]) == len(expected)
            assert {names[request]: row
                    for request, *row in zip(*frame["x"], strict=True)} == expected
        assert [[names[r] for r in frame.get("p", [])] for frame in frames] == self.preempted
        hits = [frame.get("h", []) for frame in frames]
        assert [{names[r]: n for r, n in zip(h[::2], h[1::2], strict=True)}
                for h in hits] == self.admitted
        ends = [value for frame in stream["frames"] for value in frame.get("f", [])]
        assert [(names[r], *rest) for r, *rest in zip(
            ends[::3], ends[1::3], ends[2::3], strict=True)] == self.endings
        assert sorted(r for frame in stream["frames"] for r in frame.get("q", [])) == list(
            range(len(names)))
        times = [frame["t"] for frame in stream["frames"]]
        assert times == sorted(times)


def read(path) -> dict:
    """The data of a page, as a browser finds it."""
    text = path.read_text(encoding="utf-8")
    marker = '<script id="data" type="application/gzip">'
    start = text.index(marker) + len(marker)
    return json.loads(gzip.decompress(b64decode(text[start:text.index("</script>", start)])))
