"""Faster heartbeats, here and in the ranks' processes."""

from process_tools import in_children

from nanoserve_extras.base.watch import Heartbeats

SETTING = "import nanoserve_extras.base.watch as w; w.Heartbeats.BEAT = {}"


def hasten(monkeypatch, seconds: float = 0.2) -> None:
    """Shorter beats in all ranks started from now on: dead after 3 s instead of 15."""
    monkeypatch.setattr(Heartbeats, "BEAT", seconds)
    in_children(monkeypatch, SETTING.format(seconds))
