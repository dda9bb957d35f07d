"""Networks of transformers' in CUDA graphs, for which a recorder stands in (recorded_graphs.py)."""

import pytest
import torch
from architectures import ARCHITECTURES, Made, texts_by
from checkpoints import assert_same_text
from test_transformers_model import start
from weight_kinds import needs_interpreter

from nanoserve import SamplingParams
from nanoserve_extras.foreign.transformers_model import Pages, TransformersModel

pytestmark = needs_interpreter
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100]]
FIRST = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict:
    return Made(tmp_path_factory.mktemp("architectures"))


def assert_first_tokens(made, name: str, llm) -> None:
    outputs = llm.generate(PROMPTS, FIRST, use_tqdm=False)
    for output, (tokens, gaps) in zip(outputs, texts_by(made, PROMPTS)(name), strict=True):
        assert_same_text(output.outputs[0].token_ids, tokens[:5], gaps, name)


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(
    name, marks=pytest.mark.full) for name in ARCHITECTURES if name != "gpt2")])
def test_replays_write_transformers_text(made, recorded, name):
    """Decodes, and wrong drafts of some rows; all recordings leave their logits in one place."""
    with start(made[name], kernels="triton", max_num_seqs=2, speculative_config=dict(
            method="ngram", num_speculative_tokens=2)) as llm:
        llm.scheduler.hooks.draft[:] = [lambda seq, most: [0, 0][:most] * (len(seq.token_ids) % 2)]
        assert_first_tokens(made, name, llm)
        outputs = [layers.output for layers, _ in llm.runner.graphs.graphs.values()]
    assert {size.drafts for size in recorded} == {False, True}
    assert len({one.untyped_storage().data_ptr() for one in outputs}) == 1


def test_what_a_recording_would_freeze_is_found_at_the_start(made, recorded, capsys, monkeypatch):
    """A network that takes its position from the host: a replay would stay where it began."""
    run = TransformersModel.run

    def frozen(self, ids, positions, wanted, pages, **options):
        if len(ids) == 1 and isinstance(pages, Pages):
            positions = torch.full_like(positions, int(pages.batch.host["positions"][0]))
        return run(self, ids, positions, wanted, pages, **options)

    monkeypatch.setattr(TransformersModel, "run", frozen)
    with start(made["gpt2"], kernels="triton", max_num_seqs=1) as llm:
        assert "a replay gives other numbers" in capsys.readouterr().err
        assert llm.runner.graphs is None
        assert_first_tokens(made, "gpt2", llm)
