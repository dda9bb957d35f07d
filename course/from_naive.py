"""Counts what each of the five programs wastes, and the engine: `python -m course.from_naive`.

All get the same requests and must write the same tokens. Nothing is timed: how many tokens are
computed, how many steps it takes and how much memory is held are the same on every machine.
"""

from importlib import import_module

from course.storyteller import BEGINNING, REQUESTS, ROWS, Storyteller
from nanoserve import LLM, SamplingParams

NAMES = ["no cache", "a cache", "a static batch", "continuous batching", "paged, shared beginning"]
BUDGET = 48  # tokens of an engine's step
HEAD = ["", "tokens computed", "of them padding", "steps", "tokens in the largest step",
        "KV held, at most"]


class Watch:
    """An observer of the engine; it keeps the same counters as `Storyteller`."""

    def __init__(self, llm):
        self.steps = self.tokens = self.padding = self.largest = self.held = 0
        self.blocks = llm.scheduler.blocks

    def added(self, sequences, stats, prompt): pass

    def scheduled(self, step):
        self.steps, self.tokens = self.steps + 1, self.tokens + step.num_tokens
        self.largest = max(self.largest, step.num_tokens)
        used = self.blocks.num_blocks - self.blocks.num_free_blocks
        self.held = max(self.held, used * self.blocks.block_size)

    def updated(self, step, grown): pass

    def ended(self, sequences): pass


def table() -> str:
    """The table of the page. Raises `AssertionError` where two programs write different texts."""
    llm = LLM(dtype="float32", kernels="torch", device="cpu", num_gpu_blocks_override=99,
              max_num_seqs=ROWS, max_num_batched_tokens=BUDGET)
    requests = [(llm.tokenizer.encode(BEGINNING + prompt), count) for prompt, count in REQUESTS]
    llm.observers.append(engine := Watch(llm))
    answers = [out.outputs[0].token_ids for out in llm.generate(
        [prompt for prompt, _ in requests],
        [SamplingParams(temperature=0, max_tokens=count) for _, count in requests],
        use_tqdm=False)]
    model, rows = Storyteller(), [HEAD, ["---"] + ["---:"] * 5]
    token_bytes = model.num_layers * 2 * model.kv_shape[0] * model.kv_shape[1] * 4

    def row(name, counts):
        rows.append([name, *(f"{count:,}" for count in (
            counts.tokens, counts.padding, counts.steps, counts.largest)),
            f"{counts.held * token_bytes / 1e6:.2f} MB"])

    for i, name in enumerate(NAMES, 1):
        model.reset()
        written = import_module(f"course.naive_{i}").generate(model, requests)
        assert written == answers, f"program {i} writes another text"
        row(f"{i}. {name}", model)
    row(f"nanoserve, {BUDGET} tokens a step", engine)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table())
