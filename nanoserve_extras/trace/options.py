"""Where each step is recorded."""

from dataclasses import dataclass

from nanoserve.frontend.rules import Options, new_file, option


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """trace: the file of the page, or of Perfetto's events."""

    trace: str | None = option(None, new_file(
        "a file in a folder that exists, ending in .html (a page to look at) or .json (for "
        "Perfetto)", ".html", ".json"))
