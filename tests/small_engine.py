"""A small engine that many tests share, and how it is driven and looked at.

Oracles: transformers' greedy text for the texts of models; for stopping and streaming, which depend
on the text, a model whose sampled tokens are replaced by given ones (it computes its KV as always).
"""

import shutil

from checkpoints import byte_tokenizer

from nanoserve import LLM, SamplingParams

MAX_MODEL_LEN = 64
TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def greedy(max_tokens: int = 8, **kinds) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kinds)


def make(folder, **options) -> LLM:
    """A small engine: 4 sequences, steps of 24 tokens, 24 blocks of 16, at most 64 tokens each."""
    small = dict(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_MODEL_LEN,
                 num_gpu_blocks_override=24)
    return LLM(folder, **small | options)


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is owed to anybody, and every block has come back."""
    assert not llm.has_unfinished_requests() and not llm.requests and not llm.scheduler.in_flight
    assert not llm.scheduler.has_unfinished()
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
    llm.scheduler.check()


def run(llm: LLM, prompts, params=None, **kinds):
    return llm.generate(prompts, params, use_tqdm=False, **kinds)


def tokens(outs) -> list[list[int]]:
    """The token ids of each request's first sample."""
    return [out.outputs[0].token_ids for out in outs]


def drain(llm: LLM) -> dict[str, list]:
    """Step by hand to the end; every output of each request, in order."""
    seen: dict[str, list] = {}
    busy = True
    while busy:
        busy = llm.has_unfinished_requests()
        for out in llm.step():  # once more at the end, for what aborted requests had generated
            seen.setdefault(out.request_id, []).append(out)
    return seen


def drain_through(llm: LLM, errors, after=lambda: None) -> tuple[dict, int]:
    """Step by hand to the end although steps raise these errors. The last output of each request,
    and how many steps failed. after: called behind each step."""
    outs, failures = {}, 0
    while llm.has_unfinished_requests():
        try:
            outs |= {out.request_id: out for out in llm.step()}
        except errors:
            failures += 1
        after()
    return outs, failures


def lose_steps(llm: LLM, every: int) -> None:
    """What the second step from now on computes is lost, and then that of every such step."""
    fetch, before = llm.runner.fetch, llm.scheduler.num_steps

    def lose(output):
        if (llm.scheduler.num_steps - before) % every == 2:
            raise RuntimeError("lost")
        return fetch(output)

    llm.runner.fetch = lose


def assert_serves(llm: LLM, expected) -> None:
    assert tokens(run(llm, ["still", "here?"], greedy())) == [expected("still"), expected("here?")]


HELLO = ids_of("Hello")

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye"}]


def copy_of(folder, where):
    """A checkpoint to be changed."""
    return shutil.copytree(folder, where / "changed")
