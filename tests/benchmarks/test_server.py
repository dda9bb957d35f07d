"""The benchmark runs, and what it compares is the same; what it says about time is not judged."""

import pytest

pytest.importorskip("fastapi")

from benchmarks import peers, server  # noqa: E402
from nanoserve.llm import BUNDLED_MODEL  # noqa: E402


def test_a_streams_text_is_put_together_again():
    data = (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1a\r\n"
            b'data: {"choices":[{"text":"a b"}]}\n\n\r\n1a\r\n'
            b'data: {"choices":[{"text":"\\u00e9"}]}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n')
    assert server.text_of(data) == "a b\u00e9"


def test_a_round_of_few_short_streams(monkeypatch):
    """It compares the texts itself."""
    monkeypatch.setattr(peers, "PAUSE", 0)
    speeds = server.bench(str(BUNDLED_MODEL), "float32", num_streams=3, input_len=4,
                                output_len=5, rounds=1)
    assert {name: len(values) for name, values in speeds.items()} == dict(offline=1, server=1)
