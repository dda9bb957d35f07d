"""Networks that are transformers', in our steps: token for token what its own `generate` gives.

The oracle is transformers with its usual attention (sdpa), one prompt at a time, in float32. The
engine must write the same in any mode, as with our own decoder, and refuse what it would get wrong.
"""

import random
import re

import pytest
import torch
import transformers
from architectures import (
    ARCHITECTURES,
    GQA,
    GREEDY,
    MAX_TOKENS,
    SIZES,
    Made,
    assert_parity,
    make,
    texts_by,
)
from checkpoints import EOS, Reference, assert_same_text
from helpers import poisoned, write_json
from safetensors.torch import load_file, save_file
from transformers import CodeGenConfig, ExaoneConfig, MistralConfig
from weight_kinds import needs_interpreter

from nanoserve import LLM, SamplingParams
from nanoserve_extras.foreign.transformers_model import Pages, TransformersModel, attend

MODES = {  # each runs the prompts twice, and the second time finds them in the prefix cache
    "plain operators": dict(num_gpu_blocks_override=40, block_size=32, kernels="torch"),
    # 12 blocks of 5 hold one of the longest texts: everybody else is preempted, in small chunks.
    "busy": dict(num_gpu_blocks_override=12, block_size=5, max_num_batched_tokens=7,
                 async_scheduling=True)}


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict:
    return Made(tmp_path_factory.mktemp("architectures"))


@pytest.fixture(scope="session")
def few_prompts() -> list[list[int]]:
    """Around blocks and windows, two with a common beginning."""
    rng = random.Random(0)
    shared, *own = ([rng.randrange(256) for _ in range(n)] for n in (20, 1, 16, 17, 40, 9, 13))
    return [*own[:4], shared + own[4], shared + own[5]]


@pytest.fixture(scope="session")
def texts_of(made, few_prompts):
    return texts_by(made, few_prompts)


def start(folder, **options) -> LLM:
    return poisoned(LLM(folder, **dict(num_gpu_blocks_override=24, model_impl="transformers",
                                       dtype="float32") | options))


# ------------------------------------------------------------------ the same text


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_equals_transformers_in_every_mode(made, few_prompts, texts_of, name):
    assert len({tuple(tokens) for tokens, _ in texts_of(name)}) == len(few_prompts)  # lively
    for mode, options in MODES.items():
        with start(made[name], **options) as llm:
            assert_parity(llm, few_prompts, texts_of(name), f"{name}, {mode}")
            assert llm.get_metrics() is not None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_transformers(made, few_prompts, name):
    """Greedy text can't see what multiplies all logits, as Cohere and Granite do behind the head,
    nor a scale of attention that is nearly right. Prompt and output, a chunk boundary between."""
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0,
                            ignore_eos=True)
    with start(made[name], max_num_batched_tokens=16) as llm:
        (output,) = llm.generate([few_prompts[3]], params, use_tqdm=False)
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.no_grad():
        logits = Reference(made[name]).model(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    entries = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    got = [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)


def test_a_config_may_know_no_padding(few_prompts, tmp_path):
    """CodeGen's class has no `pad_token_id`, as nearly all others have."""
    config = CodeGenConfig(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                           rotary_dim=4, eos_token_id=EOS)
    assert not hasattr(config, "pad_token_id")
    folder = make(config, tmp_path / "codegen")
    with start(folder) as llm:
        assert_parity(llm, few_prompts, texts_by({"codegen": folder}, few_prompts)("codegen"),
                      "codegen")


def test_a_copy_of_a_family_goes_by_its_own_name(few_prompts, tmp_path):
    """EXAONE 3's files name a class that transformers has under Llama's name, and other tensors.
    Where a class was made for the config, no other name is taken."""
    folder = make(ExaoneConfig(**GQA), tmp_path / "exaone")
    texts = texts_by({"exaone": folder}, few_prompts)("exaone")
    for name in ("LlamaForCausalLM", "ExaoneForCausalLM"):  # as transformers 5 saves it; published
        write_json(folder / "config.json", architectures=[name])
        with start(folder, model_impl="auto") as llm:
            assert_parity(llm, few_prompts, texts, "exaone")
    with pytest.raises(ValueError, match="has no model of that name"):
        start(folder, hf_overrides=dict(model_type="opt"))


@pytest.mark.parametrize("impl", ["nanoserve", "transformers"])
def test_a_mistral_whose_file_names_layer_types_is_a_ministral(few_prompts, tmp_path, impl):
    """transformers makes it one as it reads the file. As a Mistral all layers had the window."""
    folder = make(MistralConfig(**GQA, sliding_window=5), tmp_path / "mistral")
    write_json(folder / "config.json", layer_types=["full_attention", "sliding_attention"])
    texts = texts_by({"mistral": folder}, few_prompts)("mistral")
    with start(folder, model_impl=impl) as llm:
        assert_parity(llm, few_prompts, texts, impl)


def test_auto_takes_transformers_network_where_there_is_none_of_ours(made, few_prompts, texts_of,
                                                                     capsys):
    with start(made["opt"], model_impl="auto") as llm:
        assert "transformers' network" in capsys.readouterr().err
        assert "OPTForCausalLM by transformers" in llm.describe()
        assert_parity(llm, few_prompts, texts_of("opt"), "auto")
    with pytest.raises(ValueError, match="OPTForCausalLM.*LlamaForCausalLM"):
        start(made["opt"], model_impl="nanoserve")


def test_drafts_and_samples_are_as_with_our_decoder(made, few_prompts, texts_of):
    """What a step verifies needs logits at several positions of a row."""
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2,
                  prompt_lookup_min=1)
    with start(made["gpt2"], speculative_config=drafts, num_gpu_blocks_override=64) as llm:
        assert_parity(llm, few_prompts, texts_of("gpt2"), "drafts")
        params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=MAX_TOKENS)
        outputs = llm.generate(few_prompts, params, use_tqdm=False)
    for output, (tokens, gaps) in zip(outputs, texts_of("gpt2"), strict=True):
        for sample in output.outputs:
            assert_same_text(sample.token_ids, tokens, gaps, "n=3")


def test_half_precision_is_computed_in_half_precision(made, few_prompts):
    for dtype in ("bfloat16", "float16"):
        with start(made["opt"], dtype=dtype) as llm:
            assert llm.generate(few_prompts, GREEDY, use_tqdm=False)[0].finished
            assert next(llm.runner.model.parameters()).dtype == getattr(torch, dtype)


# ------------------------------------------------------------- what files say


def test_the_longest_text_is_as_long_as_there_are_learned_positions(made):
    """OPT's table has two more rows than positions, and GPT-2's has none to spare."""
    for name in ("opt", "gpt2"):
        prompt = [random.Random(0).randrange(256) for _ in range(120)]
        with start(made[name]) as llm:
            assert llm.config.max_model_len == 128
            (output,) = llm.generate([prompt], SamplingParams(
                temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        reference = Reference(made[name])
        reference.model.generation_config.eos_token_id = None
        assert_same_text(output.outputs[0].token_ids, *reference.generate(prompt, 8), name)
        with pytest.raises(ValueError, match="max_model_len=129 .* 128 "):
            start(made[name], max_model_len=129)


def test_dummy_weights_need_a_config_and_no_more(made, tmp_path):
    (tmp_path / "config.json").write_text((made["gpt2"] / "config.json").read_text())
    with start(tmp_path, load_format="dummy") as llm, start(tmp_path, load_format="dummy") as same:
        texts = [one.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                 for one in (llm, same)]
    assert texts[0] == texts[1] and len(texts[0]) == MAX_TOKENS


# ---------------------------------------------------------------- weights


def test_missing_left_over_and_wrong_tensors_are_named(tmp_path):
    """transformers makes up what is missing, with a warning: fluent nonsense."""
    folder = make(ARCHITECTURES["phi"](), tmp_path / "phi")
    file = folder / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.fc1.weight"
    for changed, words in [
            ({key: value for key, value in stored.items() if key != name},
             f"phi: missing tensors for PhiForCausalLM: {name}"),
            (stored | {"stray": torch.zeros(3)}, "unexpected tensors .*stray"),
            (stored | {name: torch.zeros(3, 3)},
             rf"mismatched tensors .*{name} \[3, 3\], not \[48, 32\]"),
            (stored | {name: stored[name].to(torch.int8)}, "quantised weights are not supported")]:
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            start(folder)


def test_tied_weights_that_are_stored_twice(tmp_path, few_prompts):
    """A pickle names embedding and head. Where they differ, one of them was trained by itself, in
    spite of what config.json says: our decoder refuses that, and so does each network. Either of
    them alone is both."""
    folder = make(ARCHITECTURES["opt"](), tmp_path / "opt", pickled=True)
    file = folder / "pytorch_model.bin"
    stored = torch.load(file, weights_only=True)
    texts = [Reference(folder).generate(prompt, MAX_TOKENS) for prompt in few_prompts]
    for left_out in ("", "lm_head.weight", "model.decoder.embed_tokens.weight"):
        torch.save({name: one for name, one in stored.items() if name != left_out}, file)
        with start(folder) as llm:
            assert_parity(llm, few_prompts, texts, f"without {left_out}")
    torch.save(stored | {"lm_head.weight": torch.randn(260, 32)}, file)
    with pytest.raises(ValueError, match="lm_head.weight.*false"):
        start(folder)


# ---------------------------------------------------------------- refusals


def refused(tmp_path, config, **options) -> str:
    """What is said to a folder with nothing but this config."""
    config.architectures = [options.pop("architecture")]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        start(tmp_path, load_format="dummy", model_impl="auto", skip_tokenizer_init=True, **options)
    return str(error.value)


STATELESS = dict(vocab_size=260, hidden_size=32, num_hidden_layers=2)
REFUSED = {
    "BloomForCausalLM": (lambda: transformers.BloomConfig(**STATELESS, n_head=4), "be replaced"),
    "MptForCausalLM": (lambda: transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=260), "be replaced"),
    "FalconForCausalLM": (lambda: transformers.FalconConfig(
        **STATELESS, num_attention_heads=4), "be replaced"),
    "MambaForCausalLM": (lambda: transformers.MambaConfig(**STATELESS), "recurrent state"),
    "RwkvForCausalLM": (lambda: transformers.RwkvConfig(**STATELESS), "recurrent state"),
    "GPTNeoForCausalLM": (lambda: transformers.GPTNeoConfig(
        vocab_size=260, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]]), "be replaced"),
    "T5ForConditionalGeneration": (lambda: transformers.T5Config(
        vocab_size=260, d_model=32, num_layers=2, num_heads=4), "encoder-decoder"),
    "RecurrentGemmaForCausalLM": (lambda: transformers.RecurrentGemmaConfig(
        **GQA, lru_width=32, attention_window_size=13), "(attention is not called|its)"),
    "Llama4ForCausalLM": (lambda: transformers.Llama4TextConfig(
        **GQA, head_dim=8, num_local_experts=2, attention_chunk_size=16, intermediate_size_mlp=48),
        "attend within chunks"),
    "Kosmos2_5ForConditionalGeneration": (lambda: transformers.Kosmos2_5Config(
        text_config=dict(vocab_size=260, embed_dim=32, layers=2, ffn_dim=48, attention_heads=4,
                         max_position_embeddings=128),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
                           num_attention_heads=2, patch_embed_hidden_size=16)),
        "positions do not begin at 0"),
    "BertLMHeadModel": (lambda: transformers.BertConfig(**SIZES), "(looks ahead|neither causal)"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_would_be_wrong_is_refused_by_name_with_the_reason(tmp_path, architecture):
    config, words = REFUSED[architecture]
    said = refused(tmp_path, config(), architecture=architecture)
    assert re.search(f"{architecture}.*{words}.*docs/models.md", said), said


def test_layers_that_count_positions_themselves_are_refused(tmp_path):
    """Llama 4 makes queries behind 8,191 tokens larger in layers without RoPE, and counts from the
    first token of a batch. Four tokens, in a trial, are too few to see it."""
    config = transformers.Llama4TextConfig(
        **GQA, head_dim=8, num_local_experts=2, attention_chunk_size=None, intermediate_size_mlp=48,
        no_rope_layers=[1, 0])
    assert config.attn_temperature_tuning
    said = refused(tmp_path, config, architecture="Llama4ForCausalLM")
    assert "positions that they count" in said


def test_several_ranks_are_refused_in_words(made):
    with pytest.raises(ValueError, match="OPTForCausalLM.*tensor_parallel_size=2"):
        start(made["opt"], tensor_parallel_size=2)


@pytest.mark.parametrize("change, words", [
    (dict(model_type="nothing"), "model_type='nothing'"),
    (dict(architectures=["OPTForSomething"]), "'opt'"),
    (dict(model_type="nothing", transformers_version="99.1.0.dev0"),
     "transformers 5.*model_type='nothing'.*99.1.0.dev0"),
    (dict(max_position_embeddings=None),  # the class has a default, and the table is shorter
     r"mismatched tensors .*embed_positions.weight \[\d+, 32\], not \[2050, 32\]"),
    (dict(num_attention_heads="x"), "config.json"),
    (dict(quantization={"bits": 4}), "MLX"),
    (dict(quantization_config={"quant_method": "hqq"}), "quant_method='hqq'"),
], ids=str)
def test_a_config_that_can_not_be_served_is_explained(tmp_path, change, words):
    folder = make(ARCHITECTURES["opt"](), tmp_path / "opt")
    write_json(folder / "config.json", **change)
    with pytest.raises(ValueError, match=words):
        start(folder)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="model_impl.*auto, nanoserve, transformers"):
        LLM(model_impl="vllm")


# ------------------------------------------------------------ attend, the probe


class Layer:
    layer_idx, is_causal = 0, True


class Answer:
    """In the place of a cache: notes what it is asked."""

    looks_ahead = False

    def attend(self, *asked):
        self.asked = asked
        return asked[1]


def call(**options):
    q = torch.zeros(1, 4, 3, 8)
    return attend(Layer(), q, q, q, None, **dict(nanoserve=Answer()) | options)


def test_who_multiplies_with_a_packed_weight_elsewhere_is_told_so(made):
    """A tensor without numbers took part in silence, and the product had none either."""
    with start(made["opt"]) as llm:
        weight = llm.runner.model.layers.model.decoder.layers[0].fc1.weight
        assert weight.shape == (64, 32) and weight.dtype == torch.float32
        for product in (lambda: torch.zeros(2, 32) @ weight.T, lambda: weight * 2,
                        lambda: torch.nn.functional.linear(torch.zeros(2, 32), weight)):
            with pytest.raises(ValueError, match="a weight takes part in .* outside of its own"):
                product()


def test_attend_names_its_arguments_and_raises_on_any_other():
    """A trial that swallowed gpt-oss's attention sinks wrote wrong text in silence."""
    call(scaling=0.5, dropout=0.0, output_attentions=False, position_ids=torch.zeros(1), s_aux=None)
    for name, value in dict(position_bias=torch.zeros(1), sinks=1.0, cross_attention=True).items():
        with pytest.raises(ValueError, match=f"given {name}, which we don't compute"):
            call(**{name: value})
    call(s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match=r"s_aux of \(1, 4, 3, 1\).*4 heads"):
        call(s_aux=torch.zeros(1, 4, 3, 1))  # a sink for each token, as Inkling 2 has them
    with pytest.raises(ValueError, match="keyword arguments don't reach"):
        call(nanoserve=None)
    with pytest.raises(ValueError, match="looks ahead"):
        call(is_causal=False)


def test_without_a_word_the_scale_is_that_of_sdpa():
    call(nanoserve=(answer := Answer()))
    assert answer.asked[5] == pytest.approx(8 ** -0.5)


def test_a_window_is_read_from_the_mask_and_held_against_the_call(made):
    with start(made["exaone4"]) as llm:
        assert llm.runner.model.windows == [13, None]
        assert llm.model_config.windows == (None, None)  # which config.json says is not read
    for name, windows in dict(opt=[None, None], phimoe=[13, 13]).items():  # in the mask alone
        with start(made[name]) as llm:
            assert llm.runner.model.windows == windows


def test_a_mask_that_no_layer_gets_is_no_reason_to_refuse(tmp_path, few_prompts):
    """Qwen2-MoE without windows makes a mask for windows of 0, whose queries see nothing."""
    folder = make(transformers.Qwen2MoeConfig(**GQA, num_experts=4, num_experts_per_tok=2,
                                              moe_intermediate_size=24, use_sliding_window=False,
                                              shared_expert_intermediate_size=16), tmp_path)
    reference = Reference(folder)
    texts = [reference.generate(prompt, GREEDY.max_tokens) for prompt in few_prompts]
    with start(folder) as llm:
        assert llm.runner.model.windows == [None, None]
        assert_parity(llm, few_prompts, texts, "qwen2-moe")


def test_layers_may_differ_in_their_keys(made):
    """Gemma 4's layers that see everything have fewer and larger KV heads; MiMo's values are
    narrower than its keys."""
    with start(made["gemma4"]) as llm:
        assert llm.runner.model.kv_shapes == [(2, 8), (1, 16)]
    with start(made["mimo2"]) as llm:
        assert {size for _, size in llm.runner.model.kv_shapes} == {12}


# --------------------------------------------------- in CUDA graphs, for which a recorder stands in


TWO_PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100]]
FIRST = SamplingParams(temperature=0, max_tokens=5)


def assert_first_tokens(made, name: str, llm) -> None:
    outputs = llm.generate(TWO_PROMPTS, FIRST, use_tqdm=False)
    for output, (tokens, gaps) in zip(outputs, texts_by(made, TWO_PROMPTS)(name), strict=True):
        assert_same_text(output.outputs[0].token_ids, tokens[:5], gaps, name)


@needs_interpreter
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


@needs_interpreter
@pytest.mark.full  # test_recurrent.py has one by default
def test_what_a_recording_would_freeze_is_found_at_the_start(made, recorded, capsys, monkeypatch):
    """A network that takes its position from the host: a replay would stay where it began."""
    run = TransformersModel.run

    def frozen(self, ids, positions, wanted, pages, **options):
        if len(ids) == 1 and isinstance(pages, Pages):
            positions = torch.full_like(positions, int(pages.batch.host["positions"][0]))
        return run(self, ids, positions, wanted, pages, **options)

    monkeypatch.setattr(TransformersModel, "run", frozen)
    with start(made["gpt2"], kernels="triton", max_num_seqs=1) as llm:
        assert "a replay differs from the step" in capsys.readouterr().err
        assert llm.runner.graphs is None
        assert_first_tokens(made, "gpt2", llm)


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2"])
def test_logits_are_not_rounded(checkpoints, name, monkeypatch):
    """As those of our own decoder (test_model.py), through what a class does behind its head."""
    llm, seen = start(checkpoints[name], dtype="bfloat16"), []
    monkeypatch.setattr(llm.runner.model, "compute_logits", lambda logits: seen.append(logits) or (
        logits))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert {logits.dtype for logits in seen} == {torch.float32}
    assert all((logits != logits.bfloat16()).any() for logits in seen)
