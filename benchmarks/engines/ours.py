"""nanoserve as a peer of others, or of itself with other options, as JSON:

    python benchmarks/engines/ours.py --model FOLDER --exported '{"quantization": "int8"}'
"""

import json
import os
import time
from pathlib import Path

import torch
from protocol import serve

from nanoserve import LLM, SamplingParams
from nanoserve.cpu import multiplies


def load(args):
    torch.set_num_threads(args.threads)
    options = json.loads(args.exported or "{}")
    has_weights = any(Path(args.model).glob("*.safetensors"))
    llm = LLM(args.model, load_format="auto" if has_weights else "dummy", dtype=args.dtype,
              skip_tokenizer_init=True, max_model_len=args.max_model_len, **options)

    def run(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                  for count in max_tokens]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        times = [(one.first_token_latency, one.last_token_ts - one.first_token_ts)
                 for one in (output.metrics for output in outputs)]
        return {"seconds": seconds, "times": [[first, first + rest] for first, rest in times],
                "num_tokens": max_tokens}

    # The other one's name says what it multiplies by, if that was chosen.
    tiles = [multiplies(getattr(torch, args.dtype))] if "NANOSERVE_TILES" in os.environ else []
    return ", ".join(["nanoserve", *tiles, *map(str, options.values())]), run


if __name__ == "__main__":
    serve(load)
