"""Random workloads of the engine on a small checkpoint, whose oracle is transformers.

Greedy requests get transformers' text; seeded samples are those of the same request alone in a
plain engine. Arrivals, lengths, shared prefixes, priorities, several samples, aborts and small
caches are random, and what happened in the workloads is counted.
"""

from collections import Counter
from pathlib import Path

import pytest
from checkpoints import assert_same_text
from helpers import poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.hooks import Extra
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

BASE = [(37 * i + 11) % 251 for i in range(30)]
PROMPTS = [BASE[:20], BASE[:21] + [5, 6, 7], BASE[:16], BASE[:7] + [9] * 9, [65, 66, 67], BASE[:12]]
LONGEST = 10  # output tokens


class Changing(Extra):
    """An order that is another one whenever a sequence has got a token."""

    interrupts = True

    def order(self, seq):
        return hash((seq.seed, seq.num_tokens)) % 4


ENGINES = [
    dict(num_gpu_blocks_override=10, block_size=4, max_num_batched_tokens=7, max_num_seqs=4),
    dict(num_gpu_blocks_override=10, block_size=4, max_num_batched_tokens=7, max_num_seqs=4,
         async_scheduling=True),
    dict(num_gpu_blocks_override=12, block_size=3, max_num_batched_tokens=5, max_num_seqs=5,
         async_scheduling=True, scheduling_policy="priority"),
    dict(num_gpu_blocks_override=35, block_size=1, max_num_batched_tokens=40, max_num_seqs=3,
         max_model_len=35,
         enable_chunked_prefill=False, scheduling_policy="priority"),
    dict(num_gpu_blocks_override=5, block_size=8, max_num_batched_tokens=64, max_num_seqs=8,
         enable_prefix_caching=False, async_scheduling=True, extras=[Changing()]),
    dict(num_gpu_blocks_override=6, block_size=16, max_num_batched_tokens=64, max_num_seqs=8,
         async_scheduling=True, scheduling_policy="shortest"),
]
SHARED = [len(ENGINES)]  # on two ranks: one engine for all workloads
ENGINES.append(ENGINES[1] | dict(tensor_parallel_size=2))
PLAIN = dict(num_gpu_blocks_override=64, enable_prefix_caching=False)  # one request at a time


def depends_on_all_before(token_ids, logits):
    """A request's own function: another shift for another output, be it the order alone."""
    return logits.roll(sum(i * token for i, token in enumerate(token_ids, 1)) % 7)


class ByCalls:
    """The same of a class: an object notes its calls, and each call makes a difference. `pure`, the
    oracle, finds out from the output what an object that meets each token once has noted."""

    def __init__(self, factor: int = 1):
        self.noted = [factor]

    def __call__(self, token_ids, logits):
        self.noted.append(sum(token_ids))
        return depends_on_all_before(self.noted, logits)

    @staticmethod
    def pure(token_ids, logits):
        calls = [sum(token_ids[:length]) for length in range(len(token_ids) + 1)]
        return depends_on_all_before([1, *calls], logits)


# No min_tokens: a request that is cut short would be another request.
CONTROLS = [dict(), dict(), dict(repetition_penalty=1.5), dict(frequency_penalty=1.0),
            dict(presence_penalty=-1.0, logit_bias={7: 4.0, 9: -3.0}), dict(bad_words=["a", "bc"]),
            dict(allowed_token_ids=list(range(30)) + [200, 201], presence_penalty=2.0),
            dict(logits_processors=[ByCalls, depends_on_all_before], presence_penalty=1.0)]
engines: dict[tuple[Path, int | str], LLM] = {}


def engine(folder, which: int | str) -> LLM:
    if (key := (folder, which)) not in engines:
        options = PLAIN if which == "plain" else ENGINES[which]
        engines[key] = poisoned(LLM(folder, dtype="float32", device="cpu", **options))
    return engines[key]


@st.composite
def engine_asks(draw) -> dict:
    """Greedy ones, which transformers can answer, and seeded samples, which only we can; some of
    either want logprobs, and some samples have controls."""
    greedy = draw(st.booleans())
    return dict(
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        controls=0 if greedy else draw(st.integers(0, len(CONTROLS) - 1)),
        prompt=draw(st.integers(0, len(PROMPTS) - 1)), max_tokens=draw(st.integers(1, LONGEST)),
        n=1 if greedy else draw(st.integers(1, 3)),
        seed=None if greedy else draw(st.integers(0, 1)),
        stop_at=draw(st.none() | st.integers(1, LONGEST)) if greedy else None,
        arrival=draw(st.integers(0, 10)), priority=draw(st.integers(-1, 1)),
        abort=draw(st.none() | st.none() | st.integers(0, 25)))


def params_of(ask: dict, greedy_text: list[int]) -> SamplingParams:
    extras = dict(logprobs=ask["logprobs"], prompt_logprobs=ask["prompt_logprobs"],
                  detokenize=False)
    if ask["seed"] is None:
        stop = [] if ask["stop_at"] is None else greedy_text[ask["stop_at"] - 1:ask["stop_at"]]
        return SamplingParams(temperature=0, max_tokens=ask["max_tokens"], stop_token_ids=stop,
                              **extras)
    return SamplingParams(temperature=1, max_tokens=ask["max_tokens"], seed=ask["seed"], n=ask["n"],
                          **extras, **CONTROLS[ask["controls"]])


def play(llm: LLM, asks: list[dict], params: list[SamplingParams]) -> dict:
    """Drive the engine by hand; returns the last output of every request."""
    by_priority, results, now = llm.config.scheduling_policy == "priority", {}, 0
    while now <= 25 or llm.has_unfinished_requests():
        for i, ask in enumerate(asks):
            if ask["arrival"] == now:
                llm.add_request(str(i), PROMPTS[ask["prompt"]], params[i],
                                priority=ask["priority"] if by_priority else 0)
            if ask["abort"] == now:
                llm.abort_request(str(i))
        for output in llm.step():
            if output.finished:
                results[output.request_id] = output
        now += 1
        assert now < 1000, "stuck"
    assert set(results) == {str(i) for i in range(len(asks))}, "every request gets an answer"
    return results


def run_random_workloads(checkpoints, references, name, which, max_examples, enough=5) -> None:
    """Greedy fp32 tokens are transformers'; seeded samples are those of the same request alone in a
    plain engine (one at a time, no prefix cache, no overlap). An abort may cut them short. `enough`
    is how often everything must have happened that the workloads are meant to reach."""
    seen, samples_alone, prompts_alone = Counter(), {}, {}
    folder = checkpoints[name]

    def sample_alone(ask: dict) -> list[list[int]]:
        key = (ask["prompt"], ask["seed"], ask["n"], ask["controls"])
        if key not in samples_alone:
            params = params_of(
                ask | dict(max_tokens=LONGEST, logprobs=None, prompt_logprobs=None), [])
            params.logits_processors = [
                getattr(one, "pure", one) for one in params.logits_processors or ()]
            output, = engine(folder, "plain").generate(
                PROMPTS[ask["prompt"]], params, use_tqdm=False)
            samples_alone[key] = [sample.token_ids for sample in output.outputs]
        return samples_alone[key]

    def check(ask: dict, params: SamplingParams, output, where: str) -> None:
        text, gaps = references(name, PROMPTS[ask["prompt"]], LONGEST)
        texts = [text] if ask["seed"] is None else sample_alone(ask)
        check_logprobs(ask, output, where)
        for sample, expected in zip(output.outputs, texts, strict=True):
            ends = [i + 1 for i, token in enumerate(expected) if token in params.stop_token_ids]
            expected = expected[:min([*ends, params.max_tokens])]
            seen[sample.finish_reason] += 1
            if sample.finish_reason == "abort":
                expected = expected[:len(sample.token_ids)]
            if ask["seed"] is None:
                assert_same_text(sample.token_ids, expected, gaps, where)
            else:
                assert sample.token_ids == expected, where

    def check_logprobs(ask: dict, output, where: str) -> None:
        """One entry for each token. What they say is tested in test_request_logprobs, but for the
        prompt's, which may not depend on anything."""
        for sample in output.outputs:
            assert (sample.logprobs is None) == (ask["logprobs"] is None), where
            entries = zip(sample.token_ids, sample.logprobs or [], strict=bool(sample.logprobs))
            assert all(next(iter(entry)) == token for token, entry in entries), where
        if ask["prompt_logprobs"] is None or output.outputs[0].finish_reason == "abort":
            return
        prompt = PROMPTS[ask["prompt"]]
        if ask["prompt"] not in prompts_alone:
            params = SamplingParams(max_tokens=1, prompt_logprobs=2)
            out, = engine(folder, "plain").generate(prompt, params, use_tqdm=False)
            prompts_alone[ask["prompt"]] = out.prompt_logprobs
        expected = prompts_alone[ask["prompt"]]
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for token, ours, theirs in zip(prompt[1:], output.prompt_logprobs[1:], expected[1:],
                                       strict=True):
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4), where
            seen["scored"] += 1

    @settings(derandomize=True, deadline=None, max_examples=max_examples)
    @given(st.sampled_from(which), st.lists(engine_asks(), min_size=1, max_size=5))
    def run_one(which, asks):
        llm = engine(folder, which)
        texts = [references(name, PROMPTS[ask["prompt"]], LONGEST)[0] for ask in asks]
        params = [params_of(ask, text) for ask, text in zip(asks, texts, strict=True)]
        sequences = watch(llm, seen)
        results = play(llm, asks, params)
        for i, ask in enumerate(asks):
            check(ask, params[i], results[str(i)], f"engine {which}, request {i}")
        blocks = llm.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks and not llm.requests
        seen["preemption"] += sum(seq.num_preemptions for seq in sequences)
        seen["hit"] += sum(bool(seq.num_cached_tokens) for seq in sequences)

    run_one()
    expected = ["hit", "stop", "length", "abort", "scored"]
    if name == "qwen3":  # blocks behind a window come back by themselves: hardly anybody must yield
        expected.append("preemption")
    assert all(seen[what] >= enough for what in expected), f"too harmless: {seen}"


def watch(llm: LLM, seen: Counter) -> list[Sequence]:
    """All sequences that get into the scheduler from now on, for the statistics."""
    sequences, add = [], Scheduler.add
    llm.scheduler.add = lambda seq: (sequences.append(seq), add(llm.scheduler, seq))
    return sequences
