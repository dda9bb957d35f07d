"""Stages: what each rank holds and sends, by plan, and tokens a second.

    python -m benchmarks.stages [--plans '{}' '{"pipeline_parallel_size": 2}' ...]

Each plan runs in a process of its own, its ranks on this machine, which share out its threads:
prompts of 128 tokens in steps of 256, then steps of one token a row. What a rank
holds is its anonymous memory (/proc/PID/status), Python and torch included; what it sends is what
its process writes (`wchar` of /proc/PID/io), which is what gloo's sockets get.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanoserve import LLM, SamplingParams

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=1024,
              intermediate_size=3072, num_hidden_layers=20, num_attention_heads=16,
              num_key_value_heads=8, vocab_size=8000, max_position_embeddings=2048,
              rms_norm_eps=1e-5, tie_word_embeddings=True, torch_dtype="bfloat16", eos_token_id=0)
PLANS = ['{}', '{"tensor_parallel_size": 2}', '{"pipeline_parallel_size": 2}',
         '{"pipeline_parallel_size": 2, "async_scheduling": false}', '{"layer_plan": [14, 6]}',
         '{"layer_plan": [7, 7, 6]}']
ROWS = (1, 4, 16, 32)
NUM_TOKENS = 32


def number(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def measure(options: dict) -> None:
    """Two lines: of bytes, for each rank, and of tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu",
                 num_gpu_blocks_override=256, max_num_batched_tokens=256, **options) as llm:
            watch = llm.runner.ranks.watch  # None: there is but one rank
            pids = [os.getpid(), *(one.pid for one in (watch.children if watch else ()))]

            def run(rows: int, prompt: int, num_tokens: int) -> tuple[float, list[int]]:
                """Tokens a second, and the bytes that each rank sends a token."""
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
                before = [number(pid, "io", "wchar") for pid in pids]
                began = time.perf_counter()
                llm.generate([[j * i % 7990 + 1 for j in range(prompt)] for i in range(rows)],
                             params, use_tqdm=False)
                count = rows * (num_tokens + prompt - 1)
                return count / (time.perf_counter() - began), [
                    round((number(pid, "io", "wchar") - old) / count)
                    for pid, old in zip(pids, before, strict=True)]

            run(4, 8, 8)
            found = {"prompts": run(16, 128, 1)} | {
                f"{rows} rows": run(rows, 1, NUM_TOKENS) for rows in ROWS}
            held = [f"{number(pid, 'status', 'RssAnon') / 1024:.0f}" for pid in pids]
            print(f"{json.dumps(options)}: MB held {', '.join(held)}; bytes sent a token: "
                  + ", ".join(f"{what} {'+'.join(map(str, sent))}"
                              for what, (_, sent) in found.items()))
            print("    tokens a second: " + ", ".join(
                f"{what} {speed:.0f}" for what, (speed, _) in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", nargs="+", default=PLANS, help="options of LLM, as JSON")
    plans = parser.parse_args().plans
    if len(plans) == 1:
        measure(json.loads(plans[0]))
        return
    for plan in plans:
        subprocess.run([sys.executable, "-m", "benchmarks.stages", "--plans", plan], check=True)


if __name__ == "__main__":
    main()
