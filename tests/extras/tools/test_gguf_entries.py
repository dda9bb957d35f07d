"""Metadata of GGUF files, against transformers' networks whose configs are typed in here.

The files are tiny and written by llama.cpp's own package, as llama.cpp's converter names things.
"""

import json
import math
import re

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoserve_extras.tools.convert import main
from nanoserve_extras.tools.gguf_entries import mend_tokenizer, read_generation, read_network

SIZES = dict(vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             initializer_range=0.3, tie_word_embeddings=False, pad_token_id=None,
             rms_norm_eps=1e-3)
SAID = {"context_length": 256, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-3}
ATTENTION = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LAYERS = {
    "llama": ATTENTION | GATED, "qwen2": ATTENTION | GATED, "gemma3": ATTENTION | GATED | NORMS | {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm"},
    "starcoder2": ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "phi3": {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    "nemotron": ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}}
LAYERS["gemma2"] = {name: ours for name, ours in LAYERS["gemma3"].items() if name not in NORMS}
LAYERS["qwen3moe"] = ATTENTION | NORMS | {
    "ffn_gate_inp": "mlp.gate", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TOKENS = sorted(ByteLevel.alphabet()) + ["<s>", "</s>", "<|im_end|>", "<pad>", "ab"]


def network(kind: str, **options) -> torch.nn.Module:
    """transformers' own, of a config as the entries mean it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in model.named_parameters():
        if p.dim() == 1 or "experts" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model


def stored(arch: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """As llama.cpp stores it: RoPE's pairs of Llama are neighbours, norms of 1 + w are whole."""
    if arch == "llama" and name in ("attn_q", "attn_k"):
        heads = SAID["attention.head_count" + "_kv" * (name == "attn_k")]
        return weight.view(heads, 2, -1, 32).transpose(1, 2).reshape(weight.shape)
    if name in ("ffn_gate_exps", "ffn_up_exps"):
        return weight.chunk(2, dim=1)[name == "ffn_up_exps"]
    return weight + 1 if arch in ("gemma2", "gemma3", "nemotron") and "norm" in name else weight


def write(path, arch: str, model, said: dict, tensors=(), **tokenizer) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    writer, state = gguf.GGUFWriter(str(path), arch), model.state_dict()
    tokenizer = dict(tokenizer_model="gpt2", tokenizer_pre="qwen2", token_list=TOKENS,
                     token_merges=["a b"], token_types=[1] * 256 + [3] * 4 + [1],
                     eos_token_id=257) | tokenizer
    for name, value in tokenizer.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (SAID | said).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               str: writer.add_string, list: writer.add_array}.get(type(value))
        if add is not None:
            whole = name.startswith(("general.", "tokenizer.", "other."))
            add(name if whole else f"{arch}.{name}", value)
    names = TOP | {f"blk.{i}.{name}": f"model.layers.{i}.{ours}"
              for i in range(model.config.num_hidden_layers) for name, ours in LAYERS[arch].items()}
    for name, ours in names.items():
        for end in ("", ".weight", ".bias"):
            if ours + end in state and not (
                    name == "output" and model.config.tie_word_embeddings):
                weight = stored(arch, name.split(".")[-1], state[ours + end])
                writer.add_tensor(name + (end or ".weight"), weight.contiguous().numpy())
    for name, tensor in dict(tensors).items():
        writer.add_tensor(name, torch.tensor(tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(tmp_path, *args, **options):
    """The folder, or None where it was refused."""
    write(tmp_path / "a.gguf", *args, **options)
    code = main([str(tmp_path / "a.gguf"), str(tmp_path / "made"), "--dtype", "float32"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.gguf"] + ["made"] * (code == 0)
    return tmp_path / "made" if code == 0 else None


def rope(theta: float, kind: str = "default", **more) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64}
WINDOW = {"attention.sliding_window": 8}
HEADS = {"attention.key_length": 16, "attention.value_length": 16}
GEMMA = dict(head_dim=16, sliding_window=8, tie_word_embeddings=True)
LAYERNORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-3}
ROWS = {
    "llama's own base": ("llama", "llama", {}, rope(1e4)),
    "linear": ("llama", "llama", LINEAR, rope(1e4, "linear", factor=8.0)),
    "an old linear": ("llama", "llama", {"rope.scale_linear": 8.0},
                      rope(1e4, "linear", factor=8.0)),
    "yarn": ("qwen2", "qwen2", YARN, rope(
        1e6, "yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn, sharper": ("llama", "llama", YARN | {
        "rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0}, rope(
        1e6, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0,
        attention_factor=0.5 * (0.1 * math.log(4) + 1))),
    "a window": ("qwen2", "qwen2", WINDOW, rope(1e4) | dict(
        use_sliding_window=True, sliding_window=8, max_window_layers=0)),
    "starcoder2": ("starcoder2", "starcoder2", WINDOW | LAYERNORM | {"rope.freq_base": 1e5},
                   rope(1e5) | dict(sliding_window=8, norm_epsilon=1e-3, use_bias=True)),
    "phi3": ("phi3", "phi3", WINDOW | {"rope.dimension_count": 4}, rope(
        1e4, partial_rotary_factor=0.5) | dict(sliding_window=8)),
    "experts": ("qwen3moe", "qwen3_moe", HEADS | {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24,
        "expert_gating_func": 1}, rope(1e4) | dict(
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True)),
    "soft caps": ("gemma2", "gemma2", HEADS | WINDOW | {
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, GEMMA | dict(
        query_pre_attn_scalar=16, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "two bases": ("gemma3", "gemma3_text", HEADS | WINDOW | LINEAR | {
        "rope.freq_base": 1e6, "rope.freq_base_swa": 5e3}, GEMMA | dict(
        query_pre_attn_scalar=16, layer_types=["sliding_attention"] * 2, rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=5e3),
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0))))}


@pytest.mark.parametrize("row", ROWS)
def test_the_network_is_the_one_that_the_entries_mean(tmp_path, row):
    arch, kind, said, options = ROWS[row]
    model, ids = network(kind, **options), torch.arange(40)[None] * 7 % 250
    folder = converted(tmp_path, arch, model, said)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    for name in options.keys() & {"query_pre_attn_scalar", "sliding_window"}:
        assert getattr(made.config, name) == options[name]


@pytest.mark.parametrize("factor, low, high, trained, theta", [
    (8.0, 1.0, 4.0, 8192, 5e5), (32.0, 1.0, 4.0, 8192, 5e5), (4.0, 2.0, 8.0, 64, 1e4)])
def test_llama3s_factors_become_its_recipe(tmp_path, factor, low, high, trained, theta):
    recipe = dict(factor=factor, low_freq_factor=low, high_freq_factor=high,
                  original_max_position_embeddings=trained)
    model = network("llama", **rope(theta, "llama3", **recipe))
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    factors = theta ** (-torch.arange(0, 8, 2) / 8) / stretched
    folder = converted(tmp_path, "llama", model, {"rope.freq_base": theta},
                       tensors={"rope_freqs.weight": factors.tolist()})
    made = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(made.model.rotary_emb.inv_freq, stretched, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind, layers, hidden, heads, head_dim, scalar", [
    ("gemma2", 42, 3584, 16, 256, 256), ("gemma2", 46, 4608, 32, 128, 144),
    ("gemma3", 48, 3840, 16, 256, 256), ("gemma3", 62, 5376, 32, 128, 168)])
def test_attention_scales_of_published_gemmas(kind, layers, hidden, heads, head_dim, scalar):
    """27B's are others, and no entry says so."""
    said = SAID | HEADS | WINDOW | {
        "block_count": layers, "embedding_length": hidden, "attention.head_count": heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim}
    usual = transformers.AutoConfig.for_model(kind + "_text" * (kind == "gemma3"))
    fields = read_network({f"{kind}.{name}": value for name, value in said.items()} | {
        "general.architecture": kind}, {}, usual, {})
    assert fields["query_pre_attn_scalar"] == scalar


def test_hybrids_are_as_transformers_reads_them_but_for_layers_that_draft():
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_config_mapping")
    said = SAID | HEADS | {
        "block_count": 5, "nextn_predict_layers": 1, "full_attention_interval": 2,
        "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4,
        "ssm.inner_size": 32, "rope.freq_base": 1e7, "rope.dimension_sections": [3, 1, 0, 0],
        "rope.dimension_count": 8}
    entries = {f"qwen35.{name}": value for name, value in said.items()} | {
        "general.architecture": "qwen35", "tokenizer.ggml.tokens": 261}
    base, kind = mapping.get_gguf_config(entries, ()), transformers.CONFIG_MAPPING["qwen3_5_text"]
    made = kind(**read_network(entries, base, kind(), {})).to_dict()
    assert made == kind(**base).to_dict() and made["num_hidden_layers"] == 4


REFUSED = {
    "unknown": ("llama", "llama", {"router.new": 3}, "llama.router.new=3.*LlamaConfig has no"),
    "a window": ("llama", "llama", WINDOW, "llama.attention.sliding_window=8"),
    "yarn's other number": ("llama", "llama", YARN | {"rope.scaling.yarn_ext_factor": 0.5},
                            "yarn_ext_factor=0.5"),
    "a recipe": ("llama", "llama", {"rope.scaling.type": "new"}, "rope.scaling.type='new'"),
    "not causal": ("llama", "llama", {"attention.causal": False}, "attention.causal=False"),
    "another gate": ("llama", "llama", {"expert_gating_func": 2}, "expert_gating_func=2"),
    "values": ("llama", "llama", {"attention.value_length": 4}, "value_length=4.*head_dim=8|has"),
    "by layer": ("llama", "llama", {"feed_forward_length": [48, 40]}, "layers differ in it"),
    "half of RoPE": ("starcoder2", "starcoder2", LAYERNORM | {"rope.dimension_count": 4},
                     "rope.dimension_count=4, but the class turns 8"),
    "no epsilon": ("llama", "llama", {"attention.layer_norm_rms_epsilon": None}, "epsilon=None"),
    "sizes": ("llama", "llama", {"feed_forward_length": 40}, r"has \[\d+, \d+\] numbers, and \["),
    "the engine": ("nemotron", "nemotron", LAYERNORM | {"rope.dimension_count": 4},
                   "NemotronForCausalLM is not supported"),
    "tokens": ("llama", "llama", {"tokenizer.ggml.new": 3}, "tokenizer.ggml.new=3 is not known"),
    "a part": ("llama", "llama", {"general.type": "mmproj"}, "general.type='mmproj'"),
    "a tower": ("llama", "llama", {"general.architecture": "clip"}, "mmproj.*the model's own file"),
    "factors": ("llama", "llama", {}, r"rope_freqs.weight: no recipe makes \[1.0, 3.0")}


@pytest.mark.parametrize("row", REFUSED)
def test_what_has_no_place_is_named_and_nothing_is_written(tmp_path, capsys, row):
    arch, kind, said, words = REFUSED[row]
    tensors = {"rope_freqs.weight": [1.0, 3.0, 2.0, 9.0]} if row == "factors" else {}
    assert converted(tmp_path, arch, network(kind), said, tensors=tensors) is None
    said = capsys.readouterr().err
    assert "ignore_mismatched_sizes" not in said
    assert re.search(f"convert: error: .*{words}", said), said


@pytest.mark.parametrize("special, named, ends", [
    (["<s>", "</s>", "<x>", "<y>"], dict(eos=257, eot=258, eom=259), [257, 258, 259]),
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<y>"], dict(eos=256), [256, 258]),
    (["<|start|>", "<|return|>", "<|call|>", "<|end|>"], dict(eos=257), [257, 258]),
    (["<|x|>", "<|y|>", "<|z|>", "<|end|>"], {}, [259])])
def test_tokens_that_end_a_text(special, named, ends):
    """By name or by spelling; `<|end|>` of gpt-oss ends a message only, and a text is no token."""
    entries = {"tokenizer.ggml.tokens": [*TOKENS[:256], *special, "<EOT>"],
               "tokenizer.ggml.token_type": [1] * 256 + [3] * 4 + [1]}
    assert read_generation(entries | {
        f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()})["eos_token_id"] == ends


def test_the_folder_has_all_ends_and_bos_as_llama_cpp_puts_it(tmp_path, capsys):
    folder = converted(tmp_path, "llama", network("llama"), {
        "tokenizer.ggml.eot_token_id": 259, "general.sampling.temp": 0.5, "other.tool": "it",
        "general.sampling.top_k": 7, "general.sampling.mirostat": 2}, bos_token_id=256,
        tokenizer_pre="llama-bpe")
    assert "Passed over: other.tool, general.sampling.mirostat\n" in capsys.readouterr().out
    written = json.loads((folder / "generation_config.json").read_text())
    assert (written["temperature"], written["top_k"]) == (0.5, 7)
    assert written["eos_token_id"] == [257, 259, 258]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab<|im_end|>").input_ids == [256, 260, 258]  # Llama 3's need no flag for it


def words(pieces: list[str]) -> transformers.PreTrainedTokenizerBase:
    """Sentencepiece's kind, as transformers makes it of a GGUF file: "\u2581" for a space."""
    vocab = {piece: i for i, piece in enumerate(["<s>", "</s>", "\u2581", *pieces])}
    return transformers.LlamaTokenizer(vocab=vocab, merges=[])


def test_tokenizers_are_mended():
    """Digits of StarCoder stand alone; Llama 3's words need no merges; and no space in front."""
    said = {"tokenizer.ggml.model": "gpt2"}
    for pre, text, pieces in [("starcoder", "b12", ["b", "1", "2"]), ("gpt-2", "b12", ["b", "12"]),
                              ("llama-bpe", "12", ["12"]), ("qwen2", "12", ["1", "2"])]:
        merges = [("1", "2")] if pre in ("starcoder", "gpt-2") else []
        tokenizer = transformers.GPT2Tokenizer(
            vocab={piece: i for i, piece in enumerate(["b", "1", "2", "12"])}, merges=merges)
        mend_tokenizer(tokenizer, said | {"tokenizer.ggml.pre": pre})
        assert tokenizer.tokenize(text) == pieces, pre
    with pytest.raises(ValueError, match="tokenizer.ggml.pre='falcon'"):
        mend_tokenizer(tokenizer, said | {"tokenizer.ggml.pre": "falcon"})
    said = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}
    tokenizer = words(["a", "b"])
    assert tokenizer.tokenize("a b") == ["\u2581", "a", "\u2581", "b"]
    mend_tokenizer(tokenizer, said)
    ids = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "\u2581", "b"]
    assert tokenizer.decode(ids) == "a b" and tokenizer.decode(ids[1:]) == " b"
