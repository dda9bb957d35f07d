"""The step trace of a running server: the work of scheduler and cache, for the browser.

A `Trace` (trace/recorder.py) stops when its page would grow too large. A script ends before that; a
server does not. So a full `Tracer` begins a new recording when a request comes to an idle engine.

    recording 1 ──full──► nothing is recorded ──idle, then a request──► recording 2

Invariants: a recording begins when no request runs, because it must see where every block comes
from. It holds no text: people who may see a server's steps must not see its users' prompts.

Known limit: a server that is never idle shows only the first steps since it was last idle, up to
the recorder's limit. The latest steps can't be kept instead: a recording is a list of changes, so
its beginning can't be cut off.
"""

from pathlib import Path

from nanoserve.engine import LLMEngine
from nanoserve.request import Request
from nanoserve_extras.trace.recorder import Trace, encoder_of


class Tracer(Trace):
    """An observer of one engine that never writes a file."""

    shows_prompts = False

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self._begin()
        engine.add(self)

    def _begin(self) -> None:
        super().__init__("trace.html", self.engine.scheduler, Path(self.engine.config.model).name,
                         lambda line: None, encoder=encoder_of(self.engine))

    def close(self) -> None:
        """The engine ends: unlike a `Trace`, write no file."""

    def added(self, request: Request) -> None:
        scheduler = self.engine.scheduler
        if self.closed and not scheduler.in_flight and (
                {*scheduler.running, *scheduler.waiting} <= {*request.sequences}):
            self._begin()
        super().added(request)
