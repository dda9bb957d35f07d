"""Logits processors of all requests, and vLLM's classes of them, written as vLLM's pages show.

Oracle: a pure function of the output, `ByCalls.pure`, as a request's own.
"""

from functools import partial

import pytest
import torch
from engine_workloads import ByCalls, depends_on_all_before
from small_engine import drain_through, greedy, lose_steps, make

from nanoserve import SamplingParams
from nanoserve.rules import Options
from nanoserve_extras.engine_args import EngineArgs, LogitsProcessorOptions
from nanoserve_extras.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    process_dict_updates,
)

PROMPTS = [list(range(5, 25)), list(range(5, 20)) + [9], [7] * 9]


class ForAll(LogitsProcessor):
    """Of a batch: as `ByCalls` does, for the requests whose `extra_args` say "factor"."""

    @classmethod
    def validate_params(cls, sampling_params):
        if sampling_params.extra_args and sampling_params.extra_args.get("factor") == "five":
            raise ValueError("factor must be a number")

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.block_size == 16 and device == torch.device("cpu") and not is_pin_memory
        self.noted: dict[int, list] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(self.noted, batch_update, lambda params, prompt, output: (
            [params.extra_args["factor"]], output) if params.extra_args else None)

    def apply(self, logits):
        for row, (noted, output) in self.noted.items():
            noted.append(sum(output))
            logits[row] = depends_on_all_before(noted, logits[row])
        return logits


class ForEach(AdapterLogitsProcessor):
    """The same, by an object for each request that wants it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return ByCalls(params.extra_args["factor"]) if params.extra_args else None


class Plain:
    """Without vLLM's base, and of three arguments."""

    def __init__(self, *given):
        pass

    def new_req_logits_processor(self, params):
        def with_prompt(prompt, output, logits):
            assert prompt in PROMPTS
            return ByCalls.pure(output, logits)
        return with_prompt if params.extra_args else None


def texts(llm, **fields) -> list[list[list[int]]]:
    """Of three prompts with three samples each, together."""
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, SamplingParams(seed=i, n=3, max_tokens=12, top_k=3,
                                                       **fields))
    outs, lost = drain_through(llm, RuntimeError, llm.scheduler.check)
    return [[sample.token_ids for sample in outs[str(i)].outputs] for i in range(3)], lost


@pytest.fixture(scope="module")
def expected(qwen3):
    with make(qwen3) as llm:
        plain, own = texts(llm)[0], texts(llm, logits_processors=[ByCalls.pure])[0]
        assert plain != own
        return plain, own


DRAFTS = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))


@pytest.mark.parametrize(("given", "options"), [
    (ForAll, dict(num_gpu_blocks_override=8, async_scheduling=True)), (ForAll, DRAFTS),
    (ForEach, DRAFTS), (f"{__name__}:Plain", DRAFTS)])
def test_classes_of_vllms_kinds_serve_the_requests_that_ask(qwen3, expected, given, options):
    """A sequence's text is that of the function, whatever is beside it, preempted, guessed, lost.
    A request without `extra_args` has its plain text."""
    plain, own = expected
    with make(qwen3, logits_processors=[given], **options) as llm:
        assert texts(llm, extra_args=dict(factor=1)) == (own, 0)
        assert texts(llm) == (plain, 0)
        lose_steps(llm, every=4)
        again, lost = texts(llm, extra_args=dict(factor=1))
        assert again == own and lost > 2


def test_functions_and_classes_of_our_own_go_before_those_of_a_request(qwen3, expected):
    def add_one(token_ids, logits):
        return logits + torch.arange(len(logits))

    plain, own = expected
    with make(qwen3, logits_processors=[partial(ByCalls, 1)]) as llm:
        assert texts(llm)[0] == own
    with make(qwen3) as llm:
        both = texts(llm, logits_processors=[ByCalls, add_one])[0]
        assert both not in (texts(llm, logits_processors=[add_one, ByCalls])[0], own)
    with make(qwen3, extras=[LogitsProcessors(logits_processors=[ByCalls])]) as llm:
        assert texts(llm, logits_processors=[add_one])[0] == both


def test_what_is_refused_and_when(qwen3):
    with make(qwen3, logits_processors=[ForAll]) as llm:
        with pytest.raises(ValueError, match="logits_processors: ForAll: factor must be a number"):
            llm.generate([1], greedy(extra_args=dict(factor="five")))
    with make(qwen3) as llm:
        with pytest.raises(ValueError, match=r"extra_args=\{'factor': 1\}: make the engine"):
            llm.generate([1], greedy(extra_args=dict(factor=1)))
        assert llm.generate([[1, 2]], greedy(extra_args={}), use_tqdm=False)
    for wrong in ([7], [dict], "f", ["no.module:Name"], [f"{__name__}:Missing"], [f"{__name__}"]):
        with pytest.raises(ValueError, match="logits_processors must be a list of functions"):
            EngineArgs(model="m", logits_processors=wrong)
    with pytest.raises(ValueError, match="logits_processors: Fails: no weights"):
        make(qwen3, logits_processors=[Fails])
    assert issubclass(LogitsProcessorOptions, Options)


class Fails(LogitsProcessor):
    def __init__(self, *given):
        raise RuntimeError("no weights")
