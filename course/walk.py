"""Fills walk.md and walk.zh.md with the integers of a real run: `python -m course.walk`.

The pages are written by hand, but for the blocks behind a marker `<!-- walk: NAME -->`.
"""

import re

from course.scratch import HERE
from nanoserve import LLM, SamplingParams
from nanoserve.hooks import Extra

IN_BATCH = ["input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "block_tables",
            "logits_indices"]
IN_SEQUENCE = ["num_tokens", "num_computed_tokens", "num_inflight_tokens", "num_unknown_tokens",
               "block_table", "num_committed_blocks"]


class Walk(Extra):
    """Watches an engine that runs request B beside A, from step 1 on. It keeps as text what
    there is to see, by name."""

    def __init__(self, overlap: bool):
        self.found, self.step = {}, None
        llm = LLM(dtype="float32", kernels="torch", device="cpu", num_gpu_blocks_override=32,
                  block_size=4, max_num_seqs=4, max_num_batched_tokens=8,
                  async_scheduling=overlap)
        llm.add_request("A", "Once upon a time", SamplingParams(temperature=0, max_tokens=8))
        llm.step()
        llm.add(self)
        self.read, llm.runner.builder.read = llm.runner.builder.read, self.note_batch
        llm.add_request("B", "Once upon a time there was a king, who",
                        SamplingParams(temperature=0, max_tokens=4))
        while "B" in llm.requests:
            for out in llm.step():
                self.found[f"text of {out.request_id} {self.step.index}"] = (
                    f"{out.outputs[0].text!r}, finish_reason {out.outputs[0].finish_reason}\n")

    def note_batch(self, buffer):
        batch = self.read(buffer)
        self.found[f"batch {self.step.index}"] = "".join(
            f"{name:<15} {getattr(batch, name).tolist()}\n" for name in IN_BATCH)
        return batch

    def note_sequence(self, name):
        self.found[name] = "".join(f"{key:<21}{getattr(self.seq, key)}\n" for key in IN_SEQUENCE)

    def added(self, request):
        [self.seq] = request.sequences
        self.found["tokens"] = f"{self.seq.token_ids}\n"
        self.found["keys"] = "".join(f"{key.hex()}\n" for key in self.seq.block_keys)
        self.note_sequence("sequence")

    def scheduled(self, step):
        self.step, self.found[f"step {step.index}"] = step, f"{step}\n"
        self.note_sequence(f"sequence {step.index}")

    def updated(self, step, accepted):
        self.note_sequence(f"update {step.index}")


def fill(page: str) -> str:
    """The page, with its blocks as they are now."""
    found = Walk(overlap=False).found
    found |= {f"overlap, {name}": text for name, text in Walk(overlap=True).found.items()}
    return re.sub(r"(<!-- walk: (.*?) -->\n```\n).*?(```)",
                  lambda at: at[1] + found[at[2]] + at[3], page, flags=re.S)


if __name__ == "__main__":
    for page in (HERE / "walk.md", HERE / "walk.zh.md"):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
