"""The part of a checkpoint that a layer keeps, alone and on each rank. Ranks are threads here.

The oracle: a step of all ranks gives transformers' logits. Sizes are uneven on purpose: 3 KV heads
over 2 ranks, 1 over 4, a vocabulary of 260 over 3, 5 experts over 4, an MLP of 95 over anything.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import SIZES, Reference, logprobs_beside, save
from rank_threads import in_threads, thread_ranks
from transformers import AutoModelForCausalLM, LlamaConfig

from nanoserve import LLM, SamplingParams
from nanoserve.layers import Embedding, Experts, Linear, Placement
from nanoserve.parallel import Ranks, Slice, check_shares

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    """The session's checkpoints and one with uneven sizes and biases everywhere."""
    @cache
    def folder(name: str) -> Path:
        if name != "uneven":
            return checkpoints[name]
        config = LlamaConfig(**SIZES | dict(hidden_size=48, intermediate_size=95),
                             num_attention_heads=6, num_key_value_heads=3, attention_bias=True,
                             mlp_bias=True)
        return save(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("uneven"))

    return folder


def on_all_ranks(size: int, work) -> list:
    with_ranks = torch.inference_mode()(work)  # a thread's own mode
    return in_threads(thread_ranks(size), with_ranks)


def fill(layer: torch.nn.Module, path: str, stored: dict[str, torch.Tensor]) -> None:
    """As the loader does it, with a layer that stands alone."""
    for name, copy_into in layer.tensors(path):
        copy_into(stored[name])
    layer.process_weights_after_loading()


# -------------------------------------------------------------- their answers


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_row_parallel_bias_is_added_once(size):
    """It was added once a rank (nano-vllm #125), or its loader crashed (#203)."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((5, 7), (5,), (3, 7)))

    def work(ranks: Ranks) -> torch.Tensor:
        inputs = ranks.share(7)
        linear = Linear(inputs, {"all": Slice.whole(5)}, True, Placement(torch.float32, CPU, ranks))
        fill(linear, "linear", {"all.weight": weight, "all.bias": bias})
        return linear(x[:, inputs.start:inputs.stop])

    for answer in on_all_ranks(size, work):
        torch.testing.assert_close(answer, x @ weight.T + bias)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6], [200, 7, 100]]


@pytest.mark.parametrize("size", [3, 5, 7, 9, 16])
def test_ranks_that_can_not_share_a_model_are_refused(size):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} .* 8 .* 2 .*1, 2, 4, 6, 8"):
        check_shares(size, 8, 2)
    check_shares(4, 8, 2)


@pytest.mark.parametrize("name, size, expert_parallel", [
    *[("uneven", size, False) for size in (1, 2, 3)],
    *[("qwen3-tied", size, False) for size in (1, 2, 3, 4)],
    ("llama-bias", 4, False), ("llama3.2", 2, False), ("mistral", 4, False),
    ("qwen2-window", 2, False), ("mixtral", 2, False), ("mixtral", 2, True),
    ("mixtral", 4, True), ("qwen3-moe-odd", 4, True), ("qwen3-moe-odd", 4, False),
    ("qwen3-moe", 2, True), ("gemma2", 2, False), ("gemma2", 4, False), ("gemma3", 4, False),
])
def test_all_ranks_together_have_transformers_logits(folders, ranks_in_threads, name, size,
                                                     expert_parallel):
    """Of two prompts, in chunks and decodes."""
    with LLM(folders(name), dtype="float32", num_gpu_blocks_override=8, max_num_batched_tokens=11,
             tensor_parallel_size=size, expert_parallel=expert_parallel) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(
            temperature=0, max_tokens=5, ignore_eos=True, logprobs=-1), use_tqdm=False)
    model = Reference(folders(name)).model
    for output in outputs:
        torch.testing.assert_close(*logprobs_beside(model, output), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "mixtral"])
def test_a_weight_that_is_packed_is_there_once(checkpoints, name):
    """The checkpoint's order of memory is let go of. Only an embedding that is not the LM head
    keeps it, which is looked up row by row."""
    model = LLM(checkpoints[name]).runner.model
    for module in model.modules():
        if isinstance(module, Linear):
            assert module.weight is None and module.packed is not None
        elif isinstance(module, Experts):
            assert module.gate_up_proj is module.down_proj is None and len(module.packed) == 2
        elif isinstance(module, Embedding):
            assert (module.weight is None) == (module.packed is not None) == module.tied
    assert model.embed_tokens.tied == (model.lm_head is None) == (name == "qwen3-tied")
