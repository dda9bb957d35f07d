"""Checkpoints that can't be run are refused for the true reason, which names the entry."""

import pytest

from nanoserve.checkpoint.model_config import ModelConfig

pytestmark = pytest.mark.floor

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], vocab_size=260, hidden_size=64,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=256)


def test_mlx_checkpoints_are_refused_as_that():
    """MLX says `quantization`; such a checkpoint was refused for a tensor that was left over."""
    with pytest.raises(ValueError, match="quantization=.*bits.*MLX's quantised checkpoints are"):
        ModelConfig.from_dict(QWEN3 | dict(quantization=dict(group_size=64, bits=4)))
    assert ModelConfig.from_dict(QWEN3 | dict(quantization=None)).quantization is None


def test_how_weights_are_stored_is_kept_as_it_stands():
    """What it means is extras/quantization.py's business."""
    entry = dict(quant_method="of the future", bits=1)
    assert ModelConfig.from_dict(QWEN3 | dict(quantization_config=entry)).quantization == entry
    with pytest.raises(ValueError, match="quantization_config=\\['gptq'\\] must be an object"):
        ModelConfig.from_dict(QWEN3 | dict(quantization_config=["gptq"]))


@pytest.mark.parametrize("names", [None, [], [None], {}, 3])
def test_a_config_without_architectures_is_told_which_entry_is_missing(names):
    """It was refused by its model_type, as if that were the name of an architecture."""
    with pytest.raises(ValueError, match="architectures=.*names no network.*'qwen3'.*overrides"):
        ModelConfig.from_dict(QWEN3 | dict(architectures=names, model_type="qwen3"))
    without = {name: value for name, value in QWEN3.items() if name != "architectures"}
    with pytest.raises(ValueError, match="architectures=None names no network .*None"):
        ModelConfig.from_dict(without)
