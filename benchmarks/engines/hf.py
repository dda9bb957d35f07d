"""transformers as a peer of nanoserve: `generate` on one padded batch, or its continuous batching.

A static batch pads every prompt on the left to the longest, and runs until its longest output is
done: rows that are finished earlier keep computing. Their tokens are not counted, but their time
is. Most scripts do so; continuous batching was invented to avoid it.

The same greedy choice, the same lengths (no EOS), the same precision as nanoserve; attention is
`sdpa`, transformers' default, and so is the cache.
"""

import time
from pathlib import Path

import torch
import transformers
from protocol import serve
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)

PAGE = 64  # tokens


class Clock(StoppingCriteria):
    """Asked after every token whether to stop; says no, and notes the time."""

    def __init__(self):
        self.start, self.times = time.perf_counter(), []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load(args):
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    folder = Path(args.model)
    if any((*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    else:
        config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)

    def static(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        longest, clock = max(map(len, prompts)), Clock()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt)
                             for prompt in prompts])
        with torch.inference_mode():
            model.generate(ids.to(model.device), attention_mask=mask.to(model.device),
                           min_new_tokens=max(max_tokens), max_new_tokens=max(max_tokens),
                           stopping_criteria=[clock])
        return {"seconds": time.perf_counter() - clock.start,
                "times": [clock.times[:count] for count in max_tokens]}

    def continuous(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        """`generate_batch` takes one length for all, so requests are added one by one. The cache is
        as large as they need: by default it is most of the memory, which takes long to fill."""
        needs = [len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True)]
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=sum(-(-need // PAGE) for need in needs) + 1)
        start, results = time.perf_counter(), {}
        with model.continuous_batching_context_manager(
                generation_config=model.generation_config,
                continuous_batching_config=config) as manager:
            for i, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=count,
                                    record_timestamps=True)
            while len(results) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    results[int(result.request_id)] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching has ended by itself: see above")
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "times": [
            [at - start for at in results[i].timestamps[:count]]
            for i, count in enumerate(max_tokens)]}

    name = f"transformers {transformers.__version__}"
    if args.continuous:
        return f"{name}, continuous batching", continuous
    return f"{name}, static batch", static


if __name__ == "__main__":
    serve(load)
