"""Networks with states in CUDA graphs, for which a recorder stands in (recorded_graphs.py).

States are NaN until they are written, that of padding, too: what is read from a place that a
recording has frozen, and padding that leaks, would show.
"""

import pytest
import torch
from architectures import GREEDY, Made, make, texts_by
from checkpoints import assert_same_text
from helpers import watch_steps
from hybrids import HYBRIDS
from test_recurrent import start
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from weight_kinds import needs_interpreter

from nanoserve import ops
from nanoserve_extras.recurrent.recurrent import Recurrent, RecurrentModel, Rows
from nanoserve_extras.recurrent.recurrent_delta import DeltaNet
from nanoserve_extras.recurrent.recurrent_snapshots import ZEROS

# In 3 blocks of 16 one of them is preempted; the first one's snapshot is behind 16 tokens.
PROMPTS = [[*range(60, 78)], [*range(5, 15)]]
BUSY = dict(kernels="triton", max_num_seqs=2, num_gpu_blocks_override=3, max_model_len=32,
            max_num_batched_tokens=20, block_size=16)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("hybrids"),
                lambda name, folder: make(HYBRIDS[name](), folder))


def assert_texts(llm, texts, where: str) -> None:
    """Of both prompts, and then of the first alone, from its snapshot. Some drafts are wrong; what
    a grammar would force is right, and one token where a row is free."""
    known = {tuple(prompt): tokens for prompt, (tokens, _) in zip(PROMPTS, texts, strict=True)}
    guesses = llm.runner.parts.num_drafts

    def draft(seq, most: int) -> list[int]:
        end = len(seq.output_token_ids)
        if (end + seq.row) % 3 == 0:
            return []
        tokens = known[tuple(seq.token_ids[:seq.num_prompt_tokens])][end:][:most]
        return [token + (i == end % 3) for i, token in enumerate(tokens[:2])] if guesses else (
            tokens[:2 - len(llm.scheduler.running)])

    llm.scheduler.hooks.draft[:] = [draft]
    for attempt in range(2):
        outputs = llm.generate(PROMPTS[:2 - attempt], GREEDY, use_tqdm=False)
        for output, (tokens, gaps) in zip(outputs, texts[:2 - attempt], strict=True):
            assert_same_text(output.outputs[0].token_ids, tokens, gaps, where)
        llm.extra(Recurrent).snapshots.audit()


@needs_interpreter
@pytest.mark.parametrize(("name", "drafter"), [("lfm2", "ngram"), *(
    pytest.param(name, drafter, marks=pytest.mark.full) for name in HYBRIDS
    for drafter in ("ngram", None) if (name, drafter) != ("lfm2", "ngram"))])
def test_replays_write_transformers_text(made, recorded, name, drafter):
    """Decodes, and rows with drafts, which have states of their own, or with what a grammar forces,
    which leave one. Mixers of transformers' take rows of one length: their drafts stay eager."""
    asked = drafter and dict(method=drafter, num_speculative_tokens=2)
    with start(made[name], **BUSY, speculative_config=asked) as llm:
        steps = watch_steps(llm)
        assert_texts(llm, texts_by(made, PROMPTS)(name), name)
        assert llm.extra(Recurrent).snapshots.num_tokens > 0
    assert any(step.drafts for step in steps)
    assert any(step.preempted for step in steps) or name not in ("lfm2", "qwen3.5")  # they end
    assert {size.drafts for size in recorded} == {False, "qwen" in name}
    assert all(size.extra for size in recorded)


@needs_interpreter
def test_a_place_that_a_recording_freezes_is_found(made, recorded, capsys, monkeypatch):
    """At the start, by the second content: the first goes on from zeros, as this recording does."""
    forward = RecurrentModel.forward

    def frozen(self, ids, positions, kv_cache, batch, wanted=None):
        if len(ids) == 1:
            batch.extra["state_sources"] = torch.full_like(
                batch.extra["state_sources"], max(ZEROS, *batch.host["state_sources"]))
        return forward(self, ids, positions, kv_cache, batch, wanted)

    monkeypatch.setattr(RecurrentModel, "forward", frozen)
    with start(made["lfm2"], **BUSY | dict(max_num_seqs=1)) as llm:
        assert "a replay gives other numbers" in capsys.readouterr().err
        assert llm.runner.graphs is None


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [[0, 0, 0], [0, 7, 9]], ids=["one place", "a place each"])
def test_ragged_rows_of_a_recording_are_those_of_an_eager_step(drafts):
    """Rows of 1, 3 and 2 tokens, padded to 5 rows and 9 tokens, against each token alone."""
    net = Qwen3_5GatedDeltaNet(HYBRIDS["qwen3.5"](), 0)
    ours, places = DeltaNet(net, ops), [2, 4, 3]
    states = {("conv", 0, 0): torch.randn(12, 3, net.conv_dim), ("recurrent", 0, 0): torch.randn(
        12, net.num_v_heads, net.head_k_dim, net.head_v_dim)}
    x, out = torch.randn(9, net.hidden_size), []
    expected = {key: one.clone() for key, one in states.items()}
    for row, (source, tokens) in enumerate(((5, x[:1]), (4, x[1:4]), (6, x[4:6]))):
        mine = {key: one[source:source + 1].clone() for key, one in states.items()}
        for i, token in enumerate(tokens):
            out.append(ours.forward(token[None, None], Rows.at(mine, [0], [1], x.device))[0])
            slot = drafts[row] + i - 1 if i and drafts[row] else places[row]
            for key, one in mine.items():
                expected[key][slot] = one[0]
    for one in states.values():
        one[0] = torch.nan
    numbers = [torch.tensor([*given, 0, 0]) for given in ([5, 4, 6], places, drafts)]
    got = ours.forward(x[None], Rows(states, *numbers, torch.tensor([0, 1, 4, 6, 6, 6]), 9, None,
                                     []))
    torch.testing.assert_close(got[0, :6], torch.cat(out))
    for key, one in states.items():
        torch.testing.assert_close(one[1:], expected[key][1:])
