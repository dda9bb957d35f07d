"""llama.cpp as a peer of nanoserve, in an environment with `pip install llama-cpp-python`.

    python -m benchmarks.throughput --model FOLDER --set quantization=int8 --against \\
        "OTHER/bin/python benchmarks/engines/llamacpp.py --exported q8_0.gguf"

llama.cpp's `convert_hf_to_gguf.py` makes a GGUF file of FOLDER, and `llama-quantize` (or
`llama_cpp.llama_model_quantize`) a Q8_0 or Q4_0 one. The same token ids, greedy, full lengths, one
request behind the other, nothing kept from one to the next.
"""

import time
from itertools import islice

import llama_cpp
from protocol import serve


def load(args):
    llm = llama_cpp.Llama(args.exported, n_ctx=args.max_model_len, n_threads=args.threads,
                          n_threads_batch=args.threads, verbose=False)

    def run(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        start, times = time.perf_counter(), []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            llm.reset()
            tokens = llm.generate(prompt, temp=0.0)
            times.append([time.perf_counter() - start for _ in islice(tokens, count)])
        return {"seconds": time.perf_counter() - start, "times": times}

    return f"llama.cpp ({llama_cpp.__version__} of llama-cpp-python)", run


if __name__ == "__main__":
    serve(load)
