"""What the HTTP server costs: its streams beside offline `generate` on the same requests.

    python -m benchmarks.server --streams 64 --output-len 128

    offline    one call of `generate`, in this process
    server     `nanoserve serve` in a process of its own; this one opens all streams at once and
               reads them to the end

Both have the same options and get the same prompts, of random tokens, greedily and to the full
length. They take turns with a pause between (see peers.py), because others use the machine, too;
medians count. Before any time is
taken the texts are compared, stream by stream: a fast wrong answer is no result.

The client runs on the same cores as the server, and so is part of what is measured: it does nothing
but read bytes, which are looked at when the clock has stopped. Road not taken: a client library;
one that parses each piece while it comes takes more of the cores than the server's own HTTP.
"""

import argparse
import json
import random
import selectors
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

from benchmarks.peers import cpu_seconds, pause
from nanoserve.config import SamplingParams
from nanoserve.llm import BUNDLED_MODEL, LLM

OPTIONS = dict(enable_prefix_caching=False, max_num_seqs=64)  # the second round computes as much


@contextmanager
def served(model: str, dtype: str):
    """Run a server in a process of its own, on a free port; yields the port and its CPU clock."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoserve", "serve", model, "--port", "0", "--dtype", dtype,
         "--no-enable-prefix-caching", "--max-num-seqs", str(OPTIONS["max_num_seqs"]),
         "--log-level", "warning"], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "serving" in line:
                port = int(line.split("http://127.0.0.1:")[1].split()[0])
                yield port, partial(cpu_seconds, process.pid)
                break
        else:
            raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.communicate()


def read_streams(port: int, bodies: list[bytes]) -> list[bytes]:
    """What comes over each connection, to its end."""
    received: dict[socket.socket, list[bytes]] = {}
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body)
            selector.register(connection, selectors.EVENT_READ)
            received[connection] = []
        while selector.get_map():
            for key, _ in selector.select():
                if data := key.fileobj.recv(2 ** 16):
                    received[key.fileobj].append(data)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return [b"".join(pieces) for pieces in received.values()]


def text_of(data: bytes) -> str:
    """A stream's text, behind the headers and between the lengths of chunks."""
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def bench(model: str, dtype: str, num_streams: int, input_len: int, output_len: int,
          rounds: int = 3, seed: int = 0) -> dict[str, list[float]]:
    """Output tokens a second of each round, offline and served."""
    llm = LLM(model, dtype=dtype, **OPTIONS)
    rng = random.Random(seed)
    prompts = [[rng.randrange(llm.model_config.vocab_size) for _ in range(input_len)]
               for _ in range(num_streams)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    bodies = [json.dumps(dict(prompt=ids, temperature=0, max_tokens=output_len, ignore_eos=True,
                              stream=True)).encode() for ids in prompts]
    speeds: dict[str, list[float]] = {"offline": [], "server": []}
    with llm, served(model, dtype) as (port, server_clock):
        for number in range(rounds + 1):
            pause(time.process_time, server_clock)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            offline = time.perf_counter() - start
            pause(time.process_time, server_clock)
            start = time.perf_counter()
            streams = read_streams(port, bodies)
            server = time.perf_counter() - start
            if number == 0:  # to warm up, and to compare
                assert [text_of(data) for data in streams] == [
                    output.outputs[0].text for output in outputs], "the texts differ"
                continue
            num_tokens = num_streams * output_len
            speeds["offline"].append(num_tokens / offline)
            speeds["server"].append(num_tokens / server)
    return speeds


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
    args = parser.parse_args()
    speeds = bench(args.model, args.dtype, args.streams, args.input_len, args.output_len,
                   args.rounds, args.seed)
    for name, values in speeds.items():
        print(f"{name:10} {statistics.median(values):8,.0f} output tok/s   of "
              f"{', '.join(f'{value:,.0f}' for value in values)}")
    ratios = [s / o for o, s in zip(speeds["offline"], speeds["server"], strict=True)]
    print(f"{'ratio':10} {statistics.median(ratios):8.2f}")


if __name__ == "__main__":
    main()
