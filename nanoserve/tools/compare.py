"""Two runs told apart: what chunks, the prefix cache, continuous batching or a policy bring.

    python -m nanoserve trace --csv arrivals.csv --blocks 4096 --compare static
    python -m nanoserve trace --compare before.html after.html

Either the real scheduler runs the same arrivals twice (trace.py), or both runs were recorded. All
figures are counted from the frames (recorder.py); tokens that are computed again count again. Not
known here: why a figure differs; the page of a run shows that.
"""

import json
from pathlib import Path

from nanoserve.config import POLICIES
from nanoserve.frontend.metrics import percentile
from nanoserve.tools.recorder import rows

VARIANTS: dict[str, dict] = {  # what the second simulation gets
    "no-chunks": dict(enable_chunked_prefill=False),
    "no-prefix-cache": dict(enable_prefix_caching=False),
    "static": dict(static=True),
    **{policy: dict(policy=policy) for policy in POLICIES}}


def read_pages(paths: list[str]) -> list[dict]:
    """The streams of two recorded pages. Raises `ValueError` for anything else."""
    texts = [Path(path).read_text("utf-8") for path in paths if Path(path).is_file()]
    found = [text.partition('type="application/json">')[2] for text in texts]
    if len(paths) != 2 or len(list(filter(None, found))) != 2:
        raise ValueError(f"--compare {' '.join(paths)}: name one of {', '.join(VARIANTS)}; or two "
                         "pages of runs, as LLM(trace='run.html') writes them")
    return [json.loads(text.partition("</script>")[0]) for text in found]


def tell_apart(one: dict, other: dict) -> str:
    """A line for each figure of two streams."""
    lines = []
    for (what, a), b in zip(figures(one).items(), figures(other).values(), strict=True):
        how = ("the same" if a == b else f"{b / a:.1f} times as much" if b >= 2 * a > 0 else
               f"{abs(b / a - 1):.1%} {'more' if b > a else 'less'}" if a else "more")
        lines.append(f"{what}: {a:,} and {b:,}, {how}")
    return "\n".join(lines)


def figures(stream: dict) -> dict[str, float]:
    """What is compared, by the name that a reader sees."""
    requests, frames, waited = stream["requests"], stream["frames"], {}
    steps = [(frame, found) for frame, found in zip(frames, rows(frames), strict=True) if found]
    for frame, found in steps:
        for request, *_, samples in found:
            if samples:  # its first token; in ms
                waited.setdefault(
                    request, (frame["t"] + frame["d"] - requests[request][2]) / 1e3)
    ordered = sorted(waited.values()) or [0.0]
    return {"steps": len(steps),
            "tokens computed": sum(n for _, found in steps for _, _, n, _ in found),
            "preemptions": sum(len(frame.get("p", [])) // 2 for frame in frames),
            "ms to a first token, mean": round(sum(ordered) / len(ordered), 1),
            "ms to a first token, p99": round(percentile(ordered, 99), 1),
            "ms until all was done": round(frames[-1]["t"] / 1e3, 1)}
