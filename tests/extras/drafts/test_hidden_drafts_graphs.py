"""Heads in CUDA graphs, for which a recorder stands in: drafts are still those of the definition.

Random heads are mostly wrong. So nearly all steps of the model check three drafts a row, and the
head goes on from one token a row, whose states the model's replay has left; then from its own.
"""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB_SIZE, Reference
from test_hidden_drafts import (
    FEW_WORDS,
    Dense,
    DenseForeign,
    DenseOwn,
    check_drafts,
    make_head,
    make_own,
    make_own_foreign,
    start,
    start_own,
)
from transformers import AutoModelForCausalLM
from weight_kinds import needs_interpreter

from nanoserve_extras.drafts.hidden_taps import Taps

PROMPTS = [[*range(60, 69)], [5, 7, 100]]
GRAPHS = dict(kernels="triton", max_num_seqs=2, num_gpu_blocks_override=8, max_model_len=64)


@pytest.fixture
def both_are_replayed(recorded):
    yield
    assert {(0, True), (1, False)} <= {(size.network, size.drafts) for size in recorded}


@pytest.mark.parametrize("tokens", [[[3, 4, 5], [9]], [[7, 3], [3, 8, 11, 2]]], ids=str)
def test_states_are_found_by_the_slots_of_the_last_step_alone(tokens):
    """At the addresses of the first step, which a recording writes to; padding has slot -1."""
    model = torch.nn.Identity()
    model.config = SimpleNamespace(hidden_size=2)
    model.forward = lambda *args: args[0]
    taps = Taps(model, torch.zeros(1, 2), 6)
    stream, address = taps.streams[0], taps.streams[0].data_ptr()
    for slots in tokens:
        slots = torch.tensor([*slots, -1, -1]).int()
        model(None, None, None, SimpleNamespace(slot_mapping=slots, num_tokens=len(slots)))
        taps.keep(0, torch.stack((slots.float(), slots.float() * 2), 1))
    assert taps.streams[0] is stream and stream.data_ptr() == address
    assert (taps.at(slots[:-2])[:, 0] == slots[:-2]).all()
    assert set(taps.slots.tolist()) == {-1, *slots.tolist()}


@pytest.mark.parametrize("words, impl", [
    (FEW_WORDS, "nanoserve"), (range(VOCAB_SIZE), "transformers")])
@needs_interpreter
@pytest.mark.full
def test_eagle_3(checkpoints, references, tmp_path, recorded, both_are_replayed, words, impl):
    head = make_head(tmp_path / "head", words)
    check_drafts("llama2", lambda **mode: start(checkpoints["llama2"], head, **GRAPHS, **(
        dict(model_impl=impl) if impl == "transformers" else {})),
        Dense(head, Reference(checkpoints["llama2"])), references, PROMPTS, ["batched"])
    assert any(size.network and size.drafts for size in recorded)  # behind a draft that was right


@needs_interpreter
@pytest.mark.full
def test_a_checkpoints_own_head(checkpoints, references, tmp_path, both_are_replayed):
    folder = make_own(tmp_path / "own", checkpoints["qwen2"])
    check_drafts("qwen2", lambda **mode: start_own(folder, **GRAPHS),
                 DenseOwn(folder, Reference(checkpoints["qwen2"])), references, PROMPTS,
                 ["batched"])


@needs_interpreter
@pytest.mark.full
def test_the_head_of_a_network_with_states(tmp_path, both_are_replayed):
    folder = make_own_foreign(tmp_path / "own")
    reference = Reference(folder)
    check_drafts("qwen3.5", lambda **mode: start_own(folder, **GRAPHS),
                 DenseForeign(folder, AutoModelForCausalLM),
                 lambda name, prompt, n: reference.generate(prompt, n), PROMPTS, ["batched"])
