"""Logits that are no numbers (NaN, infinity) end their own request, which says why, and no other.

Where they come from: the vector of one token in the embedding is set to NaN. Its prompts are sick
from there on; a text is, once it has written this token.
"""

import math
import re

import pytest
import torch
from clean_process import EXTRAS

from nanoserve import LLM, RequestOutputKind, SamplingParams

MODES = {
    "plain operators": dict(kernels="torch"), "overlap": dict(async_scheduling=True),
    "in chunks of 3": dict(max_num_batched_tokens=3), "KV in 8 bits": dict(kv_cache_dtype="int8"),
    "two ranks": dict(tensor_parallel_size=2)}
if EXTRAS.exists():
    MODES |= {"two stages": dict(pipeline_parallel_size=2), "drafts": dict(
        speculative_config=dict(method="ngram", num_speculative_tokens=3))}
HEALTHY, SICK = [[20, 30, 20, 30, 20], [10, 11, 12, 13, 14, 15, 16]], 99
PROMPTS = [[SICK, 1, 2, 3, 4], [1, 2, SICK, 3, 4], [1, 2, 3, 4, SICK], [SICK]]
ASKED = [dict(), dict(temperature=1.0, seed=1), dict(temperature=1.0, top_p=0.5, n=2),
         dict(logprobs=2), dict(prompt_logprobs=1), dict(allowed_token_ids=[5, 6, 7]),
         dict(logprobs=0, logit_bias={5: 3.0}), dict(presence_penalty=1.0, temperature=0.5),
         dict(logits_processors=[lambda token_ids, logits: logits])]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**dict(temperature=0, max_tokens=8, ignore_eos=True) | fields)


def spoil(llm: LLM, token_id: int) -> None:
    with torch.inference_mode():
        llm.runner.model.embed_tokens.weight[token_id] = math.nan


def check_sick(output, tokens: int = 0) -> None:
    for sample in output.outputs:
        assert (len(sample.token_ids), sample.finish_reason) == (tokens, "abort")
        assert re.search("NaN or infinity in .*, with dtype='float32'", sample.stop_reason)
        for logprobs in sample.logprobs or []:
            assert all(math.isfinite(one.logprob) for one in logprobs.values())
    for logprobs in (output.prompt_logprobs or [])[1:]:
        assert all(math.isfinite(one.logprob) for one in logprobs.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_request_without_numbers_ends_and_no_other(qwen3, ranks_in_threads, mode, capsys):
    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=64, **MODES[mode]) as llm:
        params = [greedy(), greedy(temperature=0.7, seed=4)]
        expected = [out.outputs[0].token_ids for out in llm.generate(
            HEALTHY, params, use_tqdm=False)]
        assert SICK not in sum(expected, [])
        spoil(llm, SICK)
        for i, fields in enumerate(ASKED):
            for prompt in (PROMPTS if i == 0 else PROMPTS[i % 2:3:2]):
                first, sick, second = llm.generate(
                    [HEALTHY[0], prompt, HEALTHY[1]], [params[0], greedy(**fields), params[1]],
                    use_tqdm=False)
                check_sick(sick)
                assert [out.outputs[0].token_ids for out in (first, second)] == expected
        assert "NaN or infinity in its logits" in capsys.readouterr().err
        # In the middle of a text, which is told up to there; token 4 comes for the first time.
        text = expected[0]
        spoil(llm, text[4])
        count = text.index(text[4]) + 1
        for kind in RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA:
            llm.add_request("a", HEALTHY[0], greedy(output_kind=kind, logprobs=1))
            outputs = []
            while llm.has_unfinished_requests():
                outputs += llm.step()
            told = sum((out.outputs[0].token_ids for out in outputs), [])
            assert told == text[:count] and outputs[-1].outputs[0].finish_reason == "abort"
        llm.scheduler.check()


def test_a_prompts_middle_alone(qwen3, monkeypatch):
    """Only a position that is scored has no numbers: without its score nobody needs it."""
    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=64) as llm:
        model = llm.runner.model
        compute_logits = model.compute_logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden)
            if len(logits) == 4:  # positions 0 to 3
                logits[2, 7] = math.nan
            return logits

        monkeypatch.setattr(model, "compute_logits", broken)
        sick, whole = llm.generate([[1, 2, 3, 4, 5]] * 2, [greedy(prompt_logprobs=0), greedy()],
                                   use_tqdm=False)
        assert "in the logits of prompt position 2, with" in sick.outputs[0].stop_reason
        assert sick.outputs[0].finish_reason == "abort" and len(sick.prompt_logprobs) <= 3
        assert whole.outputs[0].finish_reason == "length"


def test_a_mask_hides_no_nan_from_logprobs(qwen3, monkeypatch):
    """All allowed tokens have numbers, so one can be chosen; but no token has a probability."""
    with LLM(qwen3, dtype="float32", num_gpu_blocks_override=64) as llm:
        model = llm.runner.model
        compute_logits = model.compute_logits
        monkeypatch.setattr(model, "compute_logits", lambda hidden: compute_logits(
            hidden).index_fill(1, torch.tensor([7]), math.nan))
        chosen, scored = llm.generate([[1, 2, 3]] * 2, [
            greedy(allowed_token_ids=[5, 6], **more) for more in ({}, dict(logprobs=1))],
            use_tqdm=False)
        assert chosen.outputs[0].finish_reason == "length"
        check_sick(scored)


@pytest.mark.parametrize("ranks, heat", [(1, 0.01), (2, 0)])
def test_steps_that_are_replayed(checkpoints, recorded, ranks_in_threads, ranks, heat):
    """The token of a graph says it, too, and the next step, in flight by then, has some input. Two
    ranks send each its best token alone."""
    pytest.importorskip("nanoserve.triton_attention")
    with LLM(checkpoints["tiny"], dtype="float32", device="cpu", kernels="triton", max_num_seqs=2,
             tensor_parallel_size=ranks, async_scheduling=True, num_gpu_blocks_override=48) as llm:
        [whole] = llm.generate([[5, 7, 9]], greedy(temperature=heat, max_tokens=4), use_tqdm=False)
        text = whole.outputs[0].token_ids
        spoil(llm, text[1])
        recorded.clear()
        [sick] = llm.generate([[5, 7, 9]], greedy(temperature=heat, max_tokens=4), use_tqdm=False)
        assert recorded
        check_sick(sick, text.index(text[1]) + 1)
