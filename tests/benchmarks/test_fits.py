"""The table of docs/models.md by memory: what is computed is what an engine of that kind holds."""

import pytest
import torch
import transformers

from benchmarks import fits
from nanoserve import LLM

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, vocab_size=256, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
NETWORKS = {
    "ours": SMALL | dict(model_type="qwen3", tie_word_embeddings=False),
    "ours, one matrix at both ends": SMALL | dict(model_type="qwen3", tie_word_embeddings=True),
    "ours, experts": SMALL | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
                                  moe_intermediate_size=32, tie_word_embeddings=False),
    "transformers'": SMALL | dict(model_type="smollm3", tie_word_embeddings=True),
    "transformers', experts": SMALL | dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2,
                                           tie_word_embeddings=False)}


def test_the_page_has_what_is_computed():
    page = fits.PAGE.read_text().split(fits.BEGIN)[1].split("<!-- end")[0]
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    assert {line[0].strip("`") for line in lines[2:]} == fits.PUBLISHED.keys()
    few = {name: fits.PUBLISHED[name] for name in ("LiquidAI/LFM3-1.7B", "google/gemma-4-E4B-it")}
    assert [line for line in lines[2:] if line[0].strip("`") in few] == fits.rows(few)


def held_by(llm: LLM) -> int:
    """Bytes of all parameters, packed ones too."""
    parts = {}
    for module in llm.runner.model.modules():
        packed = getattr(module, "packed", None)
        own = [*module.parameters(recurse=False),
               *(packed if isinstance(packed, tuple) else (packed,))]
        parts |= {one.data_ptr(): one.nbytes for one in own
                  if isinstance(one, torch.Tensor) and not one.is_meta}
    return sum(parts.values())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", fits.KINDS[1:])
def test_an_engine_holds_what_the_formula_says(tmp_path, name, kind):
    config = transformers.AutoConfig.for_model(**NETWORKS[name])
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    with LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
             max_model_len=64, num_gpu_blocks_override=8, kernels="torch", device="cpu",
             quantization=kind) as llm:
        size = fits.sizes_of(NETWORKS[name])[kind]
        # Made-up weights have no file that could be mapped.
        assert held_by(llm) == pytest.approx(size.held + size.mapped, rel=0.02)
