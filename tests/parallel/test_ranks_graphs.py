"""Two ranks replay what both have recorded, collectives among it (recorded_graphs.py)."""

import pytest
from checkpoints import assert_same_text
from clean_process import EXTRAS
from helpers import poisoned

from nanoserve import LLM, SamplingParams
from nanoserve.graphs import Size
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel import Ranks

pytest.importorskip("nanoserve.triton_attention")


def start(folder, **options) -> LLM:
    return poisoned(LLM(folder, **dict(dtype="float32", device="cpu", kernels="triton",
                                       max_num_seqs=1, num_gpu_blocks_override=48,
                                       tensor_parallel_size=2) | options))


def test_two_ranks_write_transformers_text(checkpoints, references, recorded, ranks_in_threads):
    """With overlap: the likeliest tokens, for which each rank sends its best alone (with the
    extras); drawn ones (as cold as the likeliest); and those of a row with controls, which rank 0
    chooses behind all ranks' replay of the layers (all tokens are allowed that transformers
    writes)."""
    with start(checkpoints["tiny"], async_scheduling=True) as llm:
        expected, gaps = references("tiny", [5, 7, 9], 12)
        sent = [[args[3][0].numel() for _, args, *_ in choice.calls if len(args) > 3
                 and getattr(args[1], "__name__", "") == "gather"]
                for choice in llm.runner.graphs.graphs[Size(1, 1)][1:]]
        share = llm.runner.model_config.vocab_size // 2
        assert sent == [[share], [2 if EXTRAS.exists() else share]]
        for controls in {}, dict(temperature=.01), dict(logprobs=1,
                                                        allowed_token_ids=expected[:4]):
            recorded.clear()
            params = SamplingParams(**dict(temperature=0) | controls, ignore_eos=True,
                                    max_tokens=4)
            [output] = llm.generate([[5, 7, 9]], params, use_tqdm=False)
            assert_same_text(output.outputs[0].token_ids, expected[:4], gaps, str(controls))
            assert recorded == [Size(1, 1)] * 2 * 3


@pytest.mark.full
def test_drafts_and_drawn_tokens_on_two_ranks(checkpoints, recorded, ranks_in_threads):
    """As one rank draws them. The drafts are wrong."""
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=6, ignore_eos=True)
    texts = []
    for size in (2, 1):
        with start(checkpoints["tiny"], max_num_seqs=2, tensor_parallel_size=size,
                   speculative_config=dict(method="ngram", num_speculative_tokens=2)) as llm:
            llm.scheduler.hooks.draft[:] = [lambda seq, most: [0, 0][:most]]
            outputs = llm.generate([[5, 6, 7], [8]], params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1] and any(size.drafts for size in recorded)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failing", [{0}, {0, 1}], ids=str)
def test_a_run_before_a_recording_that_fails_on_one_rank_ends_all(
        checkpoints, recorded, monkeypatch, ranks_in_threads, capsys, failing):
    """On GPUs the other one has queued a collective, and would wait. Where all fail, none does."""
    def choose(runner, hidden, batch, choose=ModelRunner._choose):
        choose(runner, hidden, batch)
        if runner.ranks.rank in failing and batch.is_greedy:  # behind the run's last collective
            raise MemoryError("no room for a kernel")

    monkeypatch.setattr(ModelRunner, "_choose", choose)
    if len(failing) == 1:
        with pytest.raises(RuntimeError, match="rank 0 failed in front of .* make a new LLM"):
            start(checkpoints["tiny"])
    else:
        with start(checkpoints["tiny"]) as llm:
            assert llm.runner.graphs is None
        assert "can't be recorded (MemoryError: no room" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_where_one_rank_can_not_record_none_does(checkpoints, references, recorded, monkeypatch,
                                                 ranks_in_threads, capsys, rank):
    """The other hears of it behind each recording, and does not wait for ever."""
    def least(ranks, value, least=Ranks.least):
        return least(ranks, 0 if value == 1 and ranks.rank == rank else value)

    monkeypatch.setattr(Ranks, "least", least)
    with start(checkpoints["tiny"]) as llm:
        assert llm.runner.graphs is None
        [output] = llm.generate([[5, 7, 9]], SamplingParams(temperature=0, max_tokens=4),
                                use_tqdm=False)
    expected, gaps = references("tiny", [5, 7, 9], 12)
    assert_same_text(output.outputs[0].token_ids, expected[:4], gaps, "eager")
    assert "another rank can't record it" in capsys.readouterr().err and not recorded
