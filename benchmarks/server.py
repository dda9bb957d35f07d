"""What the HTTP server costs: its streams beside offline `generate` on the same requests.

    python -m benchmarks.server --streams 64 --output-len 128

    offline    one call of `generate`, in this process
    server     `nanoserve serve` in a process of its own; this one opens all streams at once and
               reads them to the end
    peer       with `--against`, in place of offline: another server of OpenAI's protocol

Both have the same options and get the same prompts, of random tokens, greedily and to the full
length. They take turns with a pause between (see peers.py), because others use the machine, too;
medians count. The texts of `generate` are compared, stream by stream: a fast wrong answer is no
result. A peer's are not, since it rounds elsewhere.

    python -m benchmarks.server --model FOLDER --dtype bfloat16 --streams 8 --against \\
        "OTHER/bin/vllm serve FOLDER --port 8123 --no-enable-prefix-caching"

The peer's command must name its port. Its model needs weights and a tokenizer.

The client runs on the same cores as the server, and so is part of what is measured: it does nothing
but read bytes, which are looked at when the clock has stopped. Road not taken: a client library;
one that parses each piece while it comes takes more of the cores than the server's own HTTP.
"""

import argparse
import json
import math
import random
import re
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from benchmarks.peers import cpu_seconds, pause
from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.model_config import ModelConfig

OPTIONS = dict(enable_prefix_caching=False, max_num_seqs=64)  # the second round computes as much
Run = tuple[float, float, list[str]]  # seconds, the mean ones to a stream's first token, texts


@contextmanager
def served(command: list[str], port: int):
    """Run a server in a process of its own, from when it answers; yields its CPU clock."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"the server ended: {shlex.join(command)}")
        yield partial(cpu_seconds, process.pid)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def read_streams(port: int, bodies: list[bytes]) -> Run:
    """All at once, each over a connection of its own, to its end."""
    received: dict[socket.socket, list[bytes]] = {}
    first: dict[socket.socket, float] = {}
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body)
            selector.register(connection, selectors.EVENT_READ)
            received[connection] = []
        while selector.get_map():
            for key, _ in selector.select():
                if data := key.fileobj.recv(2 ** 16):
                    received[key.fileobj].append(data)
                    if b"data: {" in data:
                        first.setdefault(key.fileobj, time.perf_counter() - start)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    seconds = time.perf_counter() - start
    return (seconds, statistics.mean(first.values()),
            [text_of(b"".join(pieces)) for pieces in received.values()])


def text_of(data: bytes) -> str:
    """A stream's text, behind the headers and between the lengths of chunks."""
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def bench(model: str, dtype: str, num_streams: int, input_len: int, output_len: int,
          rounds: int = 3, seed: int = 0, against: str | None = None
          ) -> dict[str, list[tuple[float, float]]]:
    """Of each round: output tokens a second, and the mean seconds to the first; of two engines."""
    rng, vocab_size = random.Random(seed), ModelConfig.from_folder(model).vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_streams)]
    asked = dict(temperature=0, max_tokens=output_len, ignore_eos=True)
    bodies = [json.dumps(dict(asked, prompt=ids, stream=True)).encode() for ids in prompts]

    def offline() -> Run:
        start = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(**asked), use_tqdm=False)
        return (time.perf_counter() - start, math.nan,
                [output.outputs[0].text for output in outputs])

    with ExitStack() as stack:
        port = free_port()
        clocks = [stack.enter_context(served(
            [sys.executable, "-m", "nanoserve", "serve", model, "--port", str(port), "--dtype",
             dtype, "--no-enable-prefix-caching", "--max-num-seqs", str(OPTIONS["max_num_seqs"]),
             "--log-level", "warning"], port))]
        if against:
            of_peer = int(re.search(r"--port[ =](\d+)", against)[1])
            other = ("peer", partial(read_streams, of_peer, bodies))
            clocks.append(stack.enter_context(served(shlex.split(against), of_peer)))
        else:
            llm = stack.enter_context(LLM(model, dtype=dtype, **OPTIONS))
            other, clocks = ("offline", offline), [*clocks, time.process_time]
        engines = dict([other, ("server", partial(read_streams, port, bodies))])
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            texts = []
            for name, run in engines.items():
                pause(*clocks)
                seconds, first, text = run()
                texts.append(text)
                if number:  # round 0 warms up
                    found[name].append((num_streams * output_len / seconds, first))
            assert against or texts[0] == texts[1], "the texts differ"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", help="a command that starts another server, with its --port")
    args = parser.parse_args()
    found = bench(args.model, args.dtype, args.streams, args.input_len, args.output_len,
                  args.rounds, args.seed, args.against)
    for name, rounds in found.items():
        speeds, first = zip(*rounds, strict=True)
        print(f"{name:10} {statistics.median(speeds):8,.0f} output tok/s   of "
              f"{', '.join(f'{speed:,.0f}' for speed in speeds)}; "
              f"first token after {statistics.median(first):.3f} s")
    other, server = found.values()
    for title, ratios in (("ratio", [a[0] / b[0] for a, b in zip(server, other, strict=True)]),
                          ("of TTFT", [b[1] / a[1] for a, b in zip(server, other, strict=True)])):
        print(f"{title:10} {statistics.median(ratios):8.2f}   "
              f"({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
