"""What an engine of two processes serves, and what it sends from one to the other."""

import pytest
from checkpoints import assert_same_text
from process_tools import GREEDY, MAX_TOKENS, PROMPT, SMALL, looks_into_proc, run

from nanoserve import LLM, SamplingParams
from nanoserve.parallel import HEAD

pytestmark = looks_into_proc


@pytest.fixture(scope="module")
def llm(qwen3):
    options = SMALL | dict(num_gpu_blocks_override=256, max_num_batched_tokens=3000)
    with LLM(qwen3, **options, tensor_parallel_size=2, async_scheduling=True) as llm:
        llm.check_every_step = True
        yield llm


@pytest.fixture(scope="module")
def one_rank(qwen3):
    return LLM(qwen3, **SMALL, enable_prefix_caching=False)


def test_the_text_is_that_of_one_rank(llm, one_rank, prompts, references):
    """Greedy as transformers; with seeds, several samples, stop strings as one rank alone."""
    for prompt, output in zip(prompts, run(llm, prompts), strict=True):
        assert_same_text(output.outputs[0].token_ids, *references("qwen3", prompt, MAX_TOKENS),
                         f"{len(prompt)} tokens")
    stop = one_rank.tokenizer.decode(references("qwen3", PROMPT, MAX_TOKENS)[0][3:5])
    for params in (SamplingParams(seed=5, max_tokens=20), GREEDY,
                   SamplingParams(seed=6, n=2, top_p=0.9, max_tokens=20),
                   SamplingParams(temperature=0, stop=stop, max_tokens=20)):
        ours, theirs = ([(s.token_ids, s.text, s.finish_reason, s.stop_reason)
                         for output in run(engine, prompts[3:8] + [PROMPT], params)
                         for s in output.outputs] for engine in (llm, one_rank))
        assert ours == theirs


def test_abort_in_flight(llm, expected):
    for name in "abc":
        llm.add_request(name, [ord(name), *PROMPT], GREEDY)
    outputs = llm.step() + llm.step()
    llm.abort_request("b")
    while llm.has_unfinished_requests():
        outputs += llm.step()
    last = {output.request_id: output.outputs[0] for output in outputs}
    assert last["b"].finish_reason == "abort"
    for name in "ac":
        assert last[name].token_ids == expected([ord(name), *PROMPT])
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


def test_nobody_waits_with_a_time_out(llm):
    """Gloo's own is 30 minutes: an engine that had idled for longer was dead."""
    ranks = llm.runner.ranks
    assert ranks.group is ranks.control and ranks.control.options._timeout.days > 30


class Counted:
    """The group between the hosts, with a list of what was broadcast."""

    def __init__(self, group):
        self.group, self.sizes = group, []

    def broadcast(self, tensors, options):
        self.sizes += [tensor.numel() for tensor in tensors]
        return self.group.broadcast(tensors, options)


def test_one_broadcast_a_step(llm, monkeypatch, references):
    """Of the step's message and nothing else, and nothing is pickled. A step with more numbers than
    a first broadcast holds takes a second one."""
    ranks, num_launched = llm.runner.ranks, 0
    counted, launch = Counted(ranks.control), llm.runner.launch

    def counting_launch(step):
        nonlocal num_launched
        num_launched += 1
        return launch(step)

    def refuse(*args, **kinds):
        raise AssertionError("pickled")

    monkeypatch.setattr(ranks, "control", counted)
    monkeypatch.setattr(ranks, "broadcast", ranks.broadcast if llm.depth else refuse)
    monkeypatch.setattr(llm.runner, "launch", counting_launch)
    for name in ("dumps", "dump", "Pickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    assert ranks.group is counted.group  # gloo, too, but not counted: overlap's tokens go there
    llm.reset_prefix_cache()
    run(llm, [PROMPT, [5]])
    assert num_launched >= MAX_TOKENS and counted.sizes == [HEAD] * num_launched
    counted.sizes.clear()
    num_launched, prompts = 0, [[i, 7, 9] * 80 for i in range(12)]  # 2,880 tokens
    for prompt, output in zip(prompts, run(llm, prompts, SamplingParams(
            temperature=0, max_tokens=3)), strict=True):
        assert_same_text(output.outputs[0].token_ids, *references("qwen3", prompt, 3), "long")
    # Three numbers a token: the first step's buffer is the only one that is too long.
    assert len(counted.sizes) == num_launched + 1
    assert counted.sizes.pop(1) >= 3 * 2880 - HEAD and set(counted.sizes) == {HEAD}
