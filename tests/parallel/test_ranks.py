"""Shares and collectives: who holds what, that nobody holds everything, and that the sum is right.

The ranks are threads of this process here, with real groups between them (gloo), which costs
nothing to start: so every family and every way to share it can be compared with transformers. What
is special about processes is test_processes.py's business.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from checkpoints import assert_same_text
from rank_threads import in_threads, thread_ranks

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.model_config import ModelConfig
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel import Ranks, Slice, start_ranks

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


# ------------------------------------------------------------------------ shares


@pytest.mark.parametrize("size", range(1, 9))
def test_shares_cover_everything_once(size):
    """And differ by one at most, whether the number divides or not."""
    for total in range(40):
        shares = [Ranks(rank, size).share(total) for rank in range(size)]
        assert [i for share in shares for i in range(share.start, share.stop)] == [*range(total)]
        assert max(share.size for share in shares) - min(share.size for share in shares) <= 1
        assert all(share.total == total for share in shares)
        assert shares[-1].times(3) == Slice(3 * shares[-1].start, 3 * total, 3 * total)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [
    (4, 4), (4, 2), (4, 1), (8, 2), (12, 4), (6, 3), (9, 3), (10, 2), (7, 1), (32, 8)])
def test_every_head_finds_its_kv_head(num_heads, num_kv_heads):
    """Query heads are shared out once; each reads the KV head that it reads with one rank, also
    where several ranks keep the same; every rank's heads are in groups of equal size."""
    group = num_heads // num_kv_heads
    sizes = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or n % num_kv_heads == 0]
    for size in sizes:
        seen = []
        for rank in range(size):
            heads, kv_heads = Ranks(rank, size).share_heads(num_heads, num_kv_heads)
            assert heads.size and kv_heads.size and heads.size % kv_heads.size == 0
            for local in range(heads.size):
                head = heads.start + local
                kv_head = kv_heads.start + local // (heads.size // kv_heads.size)
                assert kv_head == head // group, (size, rank, head)
                seen.append(head)
        assert seen == [*range(num_heads)]


# ------------------------------------------------------------- ranks in threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
def test_gathering_columns(size, num_rows):
    """Shares of different widths, several rows: a gather that put rank behind rank without regard
    to the rows was right for a batch of one only (mini-sglang #98)."""
    for total in (size, 10, 11):
        whole = torch.randn(num_rows, total)

        def gather(ranks: Ranks, total=total, whole=whole):
            share = ranks.share(total)
            return ranks.gather(whole[:, share.start:share.stop], total)

        first, *others = in_threads(thread_ranks(size), gather)
        assert torch.equal(first, whole) and others == [None] * (size - 1)


def test_the_other_collectives():
    """NCCL's groups return None where gloo's return a `Work`: once no engine started on two GPUs.
    Those of `thread_ranks` do, too."""
    def work(ranks: Ranks):
        summed = ranks.all_reduce(torch.full((2, 3), float(ranks.rank + 1)))
        told = torch.tensor([ranks.rank + 7])
        ranks.broadcast(told)
        ranks.broadcast_host(nothing := torch.empty(0))
        return summed.unique().tolist(), told.item(), ranks.least(5 - ranks.rank), nothing.numel()

    assert in_threads(thread_ranks(3), work) == [([6.0], 7, 3, 0)] * 3
    assert work(Ranks()) == ([1.0], 7, 5, 0)  # alone: nobody is asked


def test_an_error_among_all_is_the_last_thing_they_do():
    ranks = Ranks(0, 2)
    killed = []
    ranks.watch = SimpleNamespace(end=lambda grace: killed.append(grace),
                                  wait_for_reason=lambda: setattr(ranks, "broken", "rank 1 died"))
    with pytest.raises(RuntimeError, match="rank 1 died.*make a new LLM"), ranks.together():
        raise ConnectionError("lost")
    assert killed == [0]
    with pytest.raises(RuntimeError, match="rank 1 died.*make a new LLM"), ranks.together():
        raise AssertionError("not reached")
    solo = Ranks()
    with pytest.raises(ZeroDivisionError), solo.together():
        raise ZeroDivisionError
    solo.raise_if_broken()  # one rank has nobody to get out of step with


# ------------------------------------------------------------------------ weights

# tests/test_layers.py has the logits of more of them.
CASES = [("llama2", 3, False), ("llama-bias", 2, False), ("mistral", 2, False),
         ("qwen3", 4, False), ("qwen3-sharded", 2, False), ("mixtral", 2, True),
         ("qwen3-moe-odd", 4, True), ("gemma3", 4, False)]


# --------------------------------------------------------------------------- text


@pytest.fixture
def start(ranks_in_threads):
    with ExitStack() as stack:
        yield lambda folder, **options: stack.enter_context(
            LLM(folder, num_gpu_blocks_override=64, dtype="float32", device="cpu", **options))


@pytest.mark.parametrize(("name", "size", "expert_parallel"), CASES)
def test_the_text_of_every_checkpoint(start, checkpoints, prompts, references, name, size,
                                      expert_parallel):
    """In chunks with a step in flight; where there are four ranks, batched. A bias behind a sum was
    added once a rank (nano-vllm #125, #203), logits were gathered in the wrong order (mini-sglang
    #98)."""
    prompts = prompts[2:11:2]
    options = {} if size == 4 else dict(async_scheduling=True, max_num_batched_tokens=16)
    llm = start(checkpoints[name], tensor_parallel_size=size, expert_parallel=expert_parallel,
                **options)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        ours = output.outputs[0].token_ids
        text = references(name, prompt, MAX_TOKENS, ours)
        assert_same_text(ours, *text, f"{name}, {len(prompt)} tokens")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_single_rank_makes_no_group(monkeypatch, device):
    """One GPU needs neither NCCL nor a port that another engine may have (nano-vllm #261)."""
    for name in ("TCPStore", "ProcessGroupGloo", "ProcessGroupNCCL", "init_process_group"):
        monkeypatch.setattr(torch.distributed, name, None, raising=False)
    ranks = start_ranks(1, device, id)
    assert (ranks.size, ranks.rank, ranks.group, ranks.watch) == (1, 0, None, None)
    hidden = torch.ones(2, 3)
    assert ranks.all_reduce(hidden) is hidden and ranks.gather(hidden, 3) is hidden
    ranks.close()


def test_all_ranks_run_the_largest_step(qwen3):
    """On GPUs each of them finds out what it leaves of the memory. Its rows ask for everything that
    a sampler can do, logprobs of prompts too; only rank 0 has logits to do it with."""
    config = EngineConfig(model=str(qwen3), dtype="float32", max_num_batched_tokens=64,
                          max_num_seqs=5, async_scheduling=True, tensor_parallel_size=2)
    model_config = ModelConfig.from_folder(qwen3)
    config = config.resolved("cpu", model_config)

    def work(ranks: Ranks) -> list[int]:
        runner = ModelRunner(config, model_config, qwen3, ranks)
        launch, found = runner.launch, []
        runner.launch = lambda step: found.append(launch(step)) or found[-1]
        runner.run_largest_step()
        return [len(output.token_ids) for output in found]

    assert in_threads(thread_ranks(2), work) == [[5]] * 2
