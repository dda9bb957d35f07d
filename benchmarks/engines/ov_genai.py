"""OpenVINO GenAI as a peer of nanoserve, in an environment with `pip install openvino-genai`.

    optimum-cli export openvino --model FOLDER --task text-generation-with-past \\
        --weight-format int8 EXPORTED
    python -m benchmarks.throughput --model FOLDER --set quantization=int8 --against \\
        "OTHER/bin/python benchmarks/engines/ov_genai.py --exported EXPORTED"

Its own continuous batching, the same token ids, greedy, full lengths. Weights are what was
exported; by default the CPU plugin rounds activations and the KV cache to 8 bits. Of several
requests it tells the mean time to the first token alone.
"""

import time

import openvino
import openvino_genai
from protocol import serve


def load(args):
    config = openvino_genai.SchedulerConfig()
    config.cache_size = 2  # GB
    config.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        args.exported, config, "CPU", {"INFERENCE_NUM_THREADS": args.threads})

    def run(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        asked = [openvino_genai.GenerationConfig(
            max_new_tokens=count, ignore_eos=True, eos_token_id=0, stop_token_ids={0},
            do_sample=False) for count in max_tokens]
        start = time.perf_counter()
        results = pipeline.generate([openvino.Tensor([prompt]) for prompt in prompts], asked)
        seconds = time.perf_counter() - start
        metrics = [result.perf_metrics for result in results]
        return {"seconds": seconds, "num_tokens": max_tokens,
                "times": [[one.get_ttft().mean / 1e3, one.get_generate_duration().mean / 1e3]
                          for one in metrics]}

    return f"OpenVINO GenAI {openvino_genai.__version__.partition('-')[0]}", run


if __name__ == "__main__":
    serve(load)
