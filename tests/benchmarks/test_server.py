"""The benchmark runs, and what it compares is the same; what it says about time is not judged."""

import sys

import pytest

pytest.importorskip("fastapi")

from benchmarks import peers, server  # noqa: E402
from nanoserve.llm import BUNDLED_MODEL  # noqa: E402


def test_a_streams_text_is_put_together_again():
    data = (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1a\r\n"
            b'data: {"choices":[{"text":"a b"}]}\n\n\r\n1a\r\n'
            b'data: {"choices":[{"text":"\\u00e9"}]}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n')
    assert server.text_of(data) == "a b\u00e9"


@pytest.mark.full
def test_a_round_of_few_short_streams(monkeypatch):
    """It compares the texts itself."""
    monkeypatch.setattr(peers, "PAUSE", 0)
    found = server.bench(str(BUNDLED_MODEL), "float32", num_streams=3, input_len=4, output_len=5,
                         rounds=1)
    assert {name: len(rounds) for name, rounds in found.items()} == dict(offline=1, server=1)


PEER = """
import http.server, sys
class Peer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
    def do_POST(self):
        self.do_GET()
        self.wfile.write(b'data: {"choices": [{"text": "of its own"}]}\\n\\n')
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Peer).serve_forever()
"""


@pytest.mark.full
def test_a_round_beside_another_server(monkeypatch, tmp_path):
    """Whose texts are its own, and are not compared."""
    monkeypatch.setattr(peers, "PAUSE", 0)
    (tmp_path / "peer.py").write_text(PEER)
    found = server.bench(str(BUNDLED_MODEL), "float32", 3, 4, 5, rounds=1, against=(
        f"{sys.executable} {tmp_path / 'peer.py'} --port {server.free_port()}"))
    assert {name: len(rounds) for name, rounds in found.items()} == dict(peer=1, server=1)
    for speed, first in found["peer"] + found["server"]:
        assert 0 < first < 15 / speed
