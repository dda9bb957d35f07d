"""How another engine is asked: a process that answers a line of JSON with a line of JSON.

    benchmarks.throughput                       peer
       ── {"prompts": [[1, 2, 3], ...],  ──►
           "max_tokens": [16, ...]}
       ◄── {"ready": "transformers 5.23.0"} ──      once, when the model is loaded
       ◄── {"seconds": 3.2, "times": [[0.4, 0.5, ...], ...]} ──

`times` are the seconds from the start of the run to each token of each request; an engine that
doesn't tell gives the first and the last one of each request, and `"num_tokens"`.

A process of its own, because engines may need different versions of torch and must not share its
threads; it stays, so that the two can take turns (A B A B) without loading a model again. It needs
nothing of nanoserve, so it can run in an environment that hasn't got it. By hand, too:

    echo '{"prompts": [[1, 2, 3]], "max_tokens": [8]}' | python engines/hf.py --model FOLDER

Whatever an engine prints goes to stderr: stdout carries answers alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable


def serve(load: Callable) -> None:
    """Load the engine, then answer until the input ends.

    load(args) returns its name and a function `run(prompts, max_tokens)` that gives an answer.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder with config.json; without "
                        "*.safetensors in it the weights are random")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--continuous", action="store_true", help="transformers alone: "
                        "its continuous batching instead of one padded batch")
    parser.add_argument("--exported", help="OpenVINO and llama.cpp: the model in "
                        "their own form")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, run = load(args)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["prompts"], request["max_tokens"])), file=answers, flush=True)
