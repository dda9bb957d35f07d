"""benchmarks.throughput on shapes without weights, and a peer that is a small script."""

import os
from unittest import mock

from benchmarks import throughput


def run(capsys, toy, *args, columns: int = 300) -> tuple[int, str, str]:
    """columns: of the terminal; in a wide one a sentence is a line."""
    with mock.patch.dict(os.environ, COLUMNS=str(columns)):
        code = throughput.main(["--model", str(toy), "--set", "device=cpu", "--set",
                           "num_gpu_blocks_override=400", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


PEER = """
import json, sys
print(json.dumps({"ready": "another engine"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if len(asked["prompts"][0]) == 13:
        sys.exit("out of luck")
    print(json.dumps({"seconds": 2.0, "times": [[0.5, 2.0] for _ in asked["prompts"]],
                      "num_tokens": asked["max_tokens"]}), flush=True)
"""
