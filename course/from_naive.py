"""Counts what each of the five programs wastes, and the engine: `python -m course.from_naive`.

All get the same requests and must write the same tokens. The counts are the same everywhere; the
seconds in the last column are those of your machine.
"""

import time
from collections import Counter
from importlib import import_module

from course.storyteller import BEGINNING, REQUESTS, ROWS, Storyteller
from nanoserve import LLM, SamplingParams
from nanoserve.hooks import Extra

NAMES = ["no cache", "a cache", "a static batch", "continuous batching", "paged, shared beginning"]
BUDGET = 48  # tokens of an engine's step


def table() -> str:
    """The table of the page. Raises `AssertionError` where two programs write different texts."""
    llm = LLM(dtype="float32", kernels="torch", device="cpu", num_gpu_blocks_override=99,
              max_num_seqs=ROWS, max_num_batched_tokens=BUDGET)
    blocks, engine, model = llm.scheduler.blocks, Counter(), Storyteller()

    class Count(Extra):
        def launching(self, step):
            engine.update(steps=1, tokens=step.num_tokens)
            engine["largest"] = max(engine["largest"], step.num_tokens)
            engine["held"] = max(engine["held"], blocks.block_size * (99 - blocks.num_free_blocks))
    llm.add(Count())
    requests = [(llm.tokenizer.encode(BEGINNING + prompt), count) for prompt, count in REQUESTS]
    params = [SamplingParams(temperature=0, max_tokens=count) for _, count in requests]
    model(range(64), range(64), lambda layer, q, k, v: q)  # warm: the first call takes longer
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    rows = {f"nanoserve, {BUDGET} tokens a step": engine}
    engine["seconds"] = time.perf_counter() - start
    for i, name in reversed(list(enumerate(NAMES, 1))):
        model.counts, start = Counter(), time.perf_counter()
        written = import_module(f"course.naive_{i}").generate(model, requests)
        model.counts["seconds"] = time.perf_counter() - start
        assert written == [out.outputs[0].token_ids for out in outputs], f"{name}: another text"
        rows = {f"{i}. {name}": model.counts} | rows
    token_bytes = model.num_layers * 2 * model.kv_shape[0] * model.kv_shape[1] * 4
    lines = ["|  | tokens computed | of them padding | steps | tokens in the largest step | "
             "KV held, at most | seconds |", f"|{' --- |' + 6 * ' ---: |'}"]
    for name, counts in rows.items():
        cells = [f"{counts[key]:,}" for key in ("tokens", "padding", "steps", "largest")]
        cells += [f"{counts['held'] * token_bytes / 1e6:.2f} MB", f"{counts['seconds']:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
