"""The step trace of a running server: what the scheduler and the cache did, for the browser.

`nanoserve.tools.recorder` records an engine's steps for a page, and stops when it has so many that
the page would grow too large. A script ends before that; a server does not. So a `Tracer` stands
between: an observer that hands everything on to a recording, and begins a new one when the old one
is full and a request comes while nothing else runs.

    recording 1 ──full──► nothing is kept ──idle, then a request──► recording 2

Invariants: a recording begins with no request running, which is what it needs to know every block
it sees. It holds no text: to see a server's steps must not mean to read its users' prompts.

Known limit: a server that is never idle shows only the first steps since it was last idle, up to
the recorder's limit. Not known here: what is recorded, and how the page shows it. Road not taken:
to keep the latest steps instead; a recording lists changes, so its beginning can't be cut off.
"""

from pathlib import Path

from nanoserve.engine import LLMEngine
from nanoserve.frontend.outputs import RequestStateStats
from nanoserve.sequence import Sequence, Step
from nanoserve.tools.recorder import Trace, eyes_of


class Tracer:
    """An observer of one engine."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.running: set[Sequence] = set()
        self.recording = self._begin()
        engine.observers.append(self)

    def _begin(self) -> Trace:
        """A recording that is never written to a file."""
        return Trace("trace.html", self.engine.scheduler, Path(self.engine.config.model).name,
                     lambda line: None, eyes=eyes_of(self.engine))

    def added(self, sequences: list[Sequence], stats: RequestStateStats,
              prompt: str | None) -> None:
        if self.recording.closed and not self.running and not self.engine.scheduler.in_flight:
            self.recording = self._begin()
        self.running.update(sequences)
        self.recording.added(sequences, stats, None)

    def scheduled(self, step: Step) -> None:
        self.recording.scheduled(step)

    def updated(self, step: Step, grown: dict[Sequence, list[int]]) -> None:
        self.recording.updated(step, grown)

    def ended(self, sequences: list[Sequence]) -> None:
        self.running.difference_update(sequences)
        self.recording.ended(sequences)

    def stream(self) -> dict:
        """The recording as it is now, for `page`. Only between two steps."""
        stream = self.recording.stream()
        return stream | {"requests": list(stream["requests"]), "meta": dict(stream["meta"])}
