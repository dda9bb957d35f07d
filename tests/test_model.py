"""The decoder, whose layers are ordinary modules: one by one they are transformers' network.

The oracle is transformers' `output_hidden_states`: the embedding, then each layer's output.
"""

import pytest
import torch
from checkpoints import Reference
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from nanoserve import LLM, SamplingParams
from nanoserve.batch import Batch
from nanoserve.checkpoint.loader import load_dummy_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.layers import Placement
from nanoserve.model import Decoder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def prefill(llm: LLM) -> Batch:
    """The batch of a step that computes all of the prompt."""
    llm.add_request("a", PROMPT, SamplingParams(temperature=0))
    return llm.runner.builder.build(llm.scheduler.schedule())


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_layer_by_layer_it_is_transformers_network(checkpoints, name):
    """A layer's output is the sum of the two terms that it hands on."""
    with torch.no_grad():
        reference = Reference(checkpoints[name]).model.model(
            torch.tensor([PROMPT]), output_hidden_states=True)
    llm, outputs = LLM(checkpoints[name], dtype="float32"), []
    batch, model = prefill(llm), llm.runner.model
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, args, out: outputs.append(out[0] + out[1]))
    with torch.inference_mode():
        embedded = model.embed(batch.input_ids)
        hidden = model(batch.input_ids, batch.positions, llm.runner.kv_cache, batch)
    first, *theirs = [states[0] for states in reference.hidden_states]
    torch.testing.assert_close(embedded, first)
    assert len(outputs) == len(model.layers) == len(theirs)
    for ours, expected in zip(outputs[:-1], theirs, strict=False):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    # transformers reports the last layer's output behind the norm
    torch.testing.assert_close(hidden, theirs[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(theirs[-1], reference.last_hidden_state[0])
    assert not torch.allclose(outputs[-1], hidden, atol=1e-2)


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral"])
@pytest.mark.parametrize("wanted", [[19], [4, 0, 4, 19], []])
def test_the_last_layer_leaves_out_what_nobody_reads(checkpoints, name, wanted):
    """Tokens whose output is wanted get what they get when all are, in the order asked for, and the
    others no output projection and no MLP there. Their keys and values are in the cache."""
    llm = LLM(checkpoints[name])
    batch = prefill(llm)
    model, cache, rows = llm.runner.model, llm.runner.kv_cache, []
    with torch.inference_mode():
        expected = model(batch.input_ids, batch.positions, cache, batch)
        written = [tensor.clone() for tensor in cache[-1]]
        for tensor in cache[-1]:
            tensor.zero_()
        for layer in model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp):
                part.register_forward_hook(lambda part, args, out: rows.append(len(args[0])))
        hidden = model(batch.input_ids, batch.positions, cache, batch,
                       wanted=torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(hidden, expected[wanted], rtol=1e-4, atol=1e-5)
    assert rows == [len(PROMPT)] * 2 * (len(model.layers) - 1) + [len(wanted)] * 2
    for tensor, before in zip(cache[-1], written, strict=True):
        assert before.any()
        torch.testing.assert_close(tensor, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gemmas_embedding_is_scaled_in_its_own_precision(dtype):
    """sqrt(48) is 6.928, but 6.9375 in bfloat16: Gemma was trained with the second."""
    config = ModelConfig.from_dict(dict(
        architectures=["Gemma3ForCausalLM"], vocab_size=260, hidden_size=48, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=4, head_dim=8))
    model = Decoder(config, Placement(dtype, torch.device("cpu")))
    load_dummy_weights(model, seed=0)
    theirs = Gemma3TextScaledWordEmbedding(260, 48, None, embed_scale=48 ** 0.5)
    theirs.weight.data = model.embed_tokens.packed
    ids = torch.arange(260)
    assert torch.equal(model.embed(ids), theirs(ids))
