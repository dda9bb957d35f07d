"""The step trace of a running server: what the scheduler and the cache did, for the browser.

A `Trace` (trace/recorder.py) stops when it has so many steps that its page would grow too
large. A script ends before that; a server does not. So a `Tracer` begins anew when it is full and a
request comes while nothing else runs.

    recording 1 ──full──► nothing is kept ──idle, then a request──► recording 2

Invariants: a recording begins with no request running, which is what it needs to know every block
it sees. It holds no text: to see a server's steps must not mean to read its users' prompts.

Known limit: a server that is never idle shows only the first steps since it was last idle, up to
the recorder's limit. The latest steps can't be kept instead: a recording lists changes, so its
beginning can't be cut off.
"""

from pathlib import Path

from nanoserve.engine import LLMEngine
from nanoserve.request import Request
from nanoserve_extras.trace.recorder import Trace, encoder_of


class Tracer(Trace):
    """An observer of one engine, which never writes a file."""

    shows_prompts = False

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self._begin()
        engine.add(self)

    def _begin(self) -> None:
        super().__init__("trace.html", self.engine.scheduler, Path(self.engine.config.model).name,
                         lambda line: None, encoder=encoder_of(self.engine))

    def close(self) -> None:
        """The engine ends: nothing is written."""

    def added(self, request: Request) -> None:
        scheduler = self.engine.scheduler
        if self.closed and not scheduler.in_flight and (
                {*scheduler.running, *scheduler.waiting} <= {*request.sequences}):
            self._begin()
        super().added(request)
