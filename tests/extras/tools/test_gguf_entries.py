"""Metadata of GGUF files, against transformers' networks whose configs are typed in here.

The files are tiny and written by llama.cpp's own package, as llama.cpp's converter names things.
"""

import json
import math
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoserve import LLM, SamplingParams
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
    "nemotron": ATTENTION | GATED,
    "phi3": {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    "glm4": ATTENTION | {"post_attention_norm": "post_self_attn_layernorm",
                         "post_ffw_norm": "post_mlp_layernorm",
                         "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}}
PAIRS = ("llama", "mistral3", "granite", "smollm3")  # llama.cpp turns neighbours
LAYERS |= dict.fromkeys(PAIRS, ATTENTION | GATED)
LAYERS["olmo2"] = {name: ours for name, ours in (ATTENTION | GATED | NORMS).items()
                   if name not in ("attn_norm", "ffn_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm"}
LAYERS["qwen35"] = ATTENTION | GATED | NORMS | {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}
del LAYERS["qwen35"]["ffn_norm"]
LAYERS["qwen35moe"] = LAYERS["qwen35"] | {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj"} | {
    f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")}
LAYERS["lfm2"] = {name: ours for name, ours in ATTENTION.items()} | {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj"}
LAYERS["lfm2moe"] = LAYERS["lfm2"] | {
    "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias",
    "ffn_down_exps": "feed_forward.experts.down_proj",
    "ffn_gate_exps": "feed_forward.experts.gate_up_proj",
    "ffn_up_exps": "feed_forward.experts.gate_up_proj"}
ENDS = {"ssm_a": "", "ssm_dt": ".bias", "exp_probs_b": ".bias"}  # else .weight
LAYERS["gemma2"] = {name: ours for name, ours in LAYERS["gemma3"].items() if name not in NORMS}
LAYERS["qwen3moe"] = ATTENTION | NORMS | {
    "ffn_gate_inp": "mlp.gate", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
       "token_embd_norm": "model.embedding_norm"}
TOKENS = sorted(ByteLevel.alphabet()) + ["<s>", "</s>", "<|im_end|>", "<pad>", "ab"]


def network(kind: str, **options) -> torch.nn.Module:
    """transformers' own, of a config as the entries mean it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if (p.dim() == 1 and "inv_freq" not in name) or "experts" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model


def stored(arch: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """As llama.cpp stores it: RoPE's pairs of Llama are neighbours, norms of 1 + w are whole; the
    value heads of Qwen 3.5 (4, two for each key) stand by turns."""
    if arch in PAIRS and name in ("attn_q", "attn_k"):
        heads = SAID["attention.head_count" + "_kv" * (name == "attn_k")]
        return weight.view(heads, 2, -1, 32).transpose(1, 2).reshape(weight.shape)
    if name in ("ffn_gate_exps", "ffn_up_exps"):
        return weight.chunk(2, dim=1)[name == "ffn_up_exps"]
    if name in ("ssm_conv1d", "conv", "ffn_gate_inp_shexp"):
        weight = weight.squeeze(0 if name == "ffn_gate_inp_shexp" else 1)
    weight = -weight.exp() if name == "ssm_a" else weight
    if name == "ssm_out":
        return turned(weight.T).T
    if name in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta", "attn_gate"):
        return turned(weight)
    if name in ("attn_qkv", "ssm_conv1d") and arch.startswith("qwen35"):
        return torch.cat([weight[:32], turned(weight[32:])])
    raised = arch in ("gemma2", "gemma3", "qwen35", "qwen35moe")
    return weight + 1 if raised and "norm" in name and name != "ssm_norm" else weight


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Those of value heads 0 and 1 of key 0, and of key 1: 0, 2, 1, 3."""
    a, b, c, d = rows.chunk(4)
    return torch.cat([a, c, b, d])


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
                kind = name.split(".")[-1]
                weight = stored(arch, kind, state[ours + end])
                writer.add_tensor(name + (end or ENDS.get(kind, ".weight")),
                                  weight.contiguous().numpy())
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
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
STATES = HEADS | {
    "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 32, "rope.freq_base": 1e7,
    "rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8}
QWEN35 = rope(1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
QWEN35 |= dict(
    head_dim=16, full_attention_interval=2, linear_conv_kernel_dim=4, linear_key_head_dim=8,
    linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
CONVOLVED = {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}
LFM2 = rope(1e4) | dict(layer_types=["conv", "full_attention"], conv_L_cache=3, norm_eps=1e-3,
                        tie_word_embeddings=True)
MISTRAL3 = YARN | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
                   "rope.scaling.original_context_length": 16}
ROWS = {
    "mistral3": ("mistral3", "ministral3", MISTRAL3 | HEADS, rope(
        1e6, "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1) | dict(head_dim=16)),
    "mistral3 without a temperature": ("mistral3", "llama", HEADS, rope(1e4) | dict(
        head_dim=16)),
    "granite": ("granite", "granite", {
        "attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0},
        rope(1e4) | dict(attention_multiplier=0.2, embedding_multiplier=3.0,
                         residual_multiplier=0.5, logits_scaling=4.0)),
    "smollm3, whose every fourth layer has no RoPE": (
        "smollm3", "smollm3", {"block_count": 4}, rope(1e4) | dict(num_hidden_layers=4)),
    "glm4": ("glm4", "glm4", {"rope.dimension_count": 4}, rope(
        1e4, partial_rotary_factor=0.5) | dict(head_dim=8, attention_bias=True)),
    "olmo2": ("olmo2", "olmo2", {}, rope(1e4)),
    "qwen35, with a layer that drafts": (
        "qwen35", "qwen3_5_text", STATES | {"block_count": 3, "nextn_predict_layers": 1}, QWEN35),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", STATES | EXPERTS | {
        "expert_shared_feed_forward_length": 40, "feed_forward_length": None}, QWEN35 | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=40)),
    "lfm2": ("lfm2", "lfm2", CONVOLVED, LFM2 | dict(block_auto_adjust_ff_dim=False)),
    "lfm2moe": ("lfm2moe", "lfm2_moe", CONVOLVED | EXPERTS | {
        "leading_dense_block_count": 1, "expert_gating_func": 2}, LFM2 | dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1)),
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
    drafts = {"blk.2.nextn.eh_proj.weight": [[1.0] * 64] * 32} if "drafts" in row else {}
    folder = converted(tmp_path, arch, model, said, drafts)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        if arch in ("qwen35", "qwen35moe", "lfm2"):  # whether `stored` is right
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path, gguf_file="a.gguf", dtype=torch.float32, config=model.config,
                quantization_config=transformers.GgufConfig(dequantize=True))
            torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
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
    """27B's are others, and no entry says so. Without one of a window Gemma 2 has its usual, and
    Gemma 3 none: all layers see the whole context."""
    said = SAID | HEADS | {
        "block_count": layers, "embedding_length": hidden, "attention.head_count": heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim}
    fields = fields_of(kind, kind + "_text" * (kind == "gemma3"), said)
    assert fields["query_pre_attn_scalar"] == scalar
    assert fields["sliding_window"] == (4096 if kind == "gemma2" else 256)
    assert ("layer_types" in fields) == (kind == "gemma3")


def fields_of(arch: str, kind: str, said: dict) -> dict:
    usual = transformers.AutoConfig.for_model(kind)
    return read_network({f"{arch}.{name}": value for name, value in said.items()} | {
        "general.architecture": arch, "tokenizer.ggml.tokens": TOKENS}, {}, usual, {})


def test_granites_scale_is_the_usual_one_unless_said():
    assert fields_of("granite", "granite", SAID)["attention_multiplier"] == 8 ** -0.5


def test_experts_in_four_bits_are_those_that_the_engine_would_round(tmp_path):
    arch, kind, said, options = ROWS["experts"]
    texts = {}
    for bits in ([], ["--quantization", "int4"]):
        (tmp_path / str(len(bits))).mkdir()
        file, folder = tmp_path / str(len(bits)) / "a.gguf", tmp_path / str(len(bits)) / "made"
        write(file, arch, network(kind, **options | dict(moe_intermediate_size=32)),
              said | {"expert_feed_forward_length": 32})
        assert main([str(file), str(folder), "--dtype", "float32", *bits]) == 0
        with LLM(folder, quantization="int4", num_gpu_blocks_override=8, dtype="float32") as llm:
            (output,) = llm.generate([[5, 99, 20]], SamplingParams(
                temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        texts[len(bits)] = output.outputs[0].token_ids
    assert texts[0] == texts[2]
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.uint8


REFUSED = {
    "unknown": ("llama", "llama", {"router.new": 3}, "llama.router.new=3.*LlamaConfig has no"),
    "a window": ("llama", "llama", WINDOW, "llama.attention.sliding_window=8"),
    "yarn's other number": ("llama", "llama", YARN | {"rope.scaling.yarn_ext_factor": 0.5},
                            "yarn_ext_factor=0.5"),
    "a recipe": ("llama", "llama", {"rope.scaling.type": "new"}, "rope.scaling.type='new'"),
    "not causal": ("llama", "llama", {"attention.causal": False}, "attention.causal=False"),
    "another gate": ("llama", "llama", {"expert_gating_func": 2}, "expert_gating_func=2"),
    "values": ("qwen2", "qwen2", {"attention.value_length": 4}, "length=.*says head_dim=[48]"),
    "by layer": ("llama", "llama", {"feed_forward_length": [48, 40]}, "layers differ in it"),
    "half of RoPE": ("starcoder2", "starcoder2", LAYERNORM | {"rope.dimension_count": 4},
                     "rope.dimension_count=4, but the class turns 8"),
    "no epsilon": ("llama", "llama", {"attention.layer_norm_rms_epsilon": None}, "epsilon=None"),
    "sizes": ("llama", "llama", {"feed_forward_length": 40}, r"has \[\d+, \d+\] numbers, and \["),
    "an architecture": ("nemotron", "llama", {}, "nemotron is not supported, but .*olmo2.*; use"),
    "no RoPE": ("granite", "granite", {"rope.scaling.finetuned": False}, "finetuned=False"),
    "tokens": ("llama", "llama", {"tokenizer.ggml.new": 3}, "tokenizer.ggml.new=3 is not known"),
    "a part": ("llama", "llama", {"general.type": "mmproj"}, "general.type='mmproj'"),
    "a tower": ("llama", "llama", {"general.architecture": "clip"}, "mmproj.*the model's own file"),
    "a layer more": ("llama", "llama", {}, "no place for blk.2.attn_q.weight"),
    "blocks": ("llama", "llama", {"block_count": 3}, "Dequantization for I64 is not.*; use"),
    "factors": ("llama", "llama", {}, r"rope_freqs.weight: no recipe makes \[1.0, 3.0")}


@pytest.mark.parametrize("row", REFUSED)
def test_what_has_no_place_is_named_and_nothing_is_written(tmp_path, capsys, row):
    arch, kind, said, words = REFUSED[row]
    tensors = {"factors": {"rope_freqs.weight": [1.0, 3.0, 2.0, 9.0]},
               "a layer more": {"blk.2.attn_q.weight": [[1.0] * 32] * 32},
               "blocks": {"blk.2.attn_norm.weight": [1] * 32}}.get(row, {})
    assert converted(tmp_path, arch, network(kind), said, tensors=tensors) is None
    said = capsys.readouterr().err
    assert "ignore_mismatched_sizes" not in said
    assert re.search(f"convert: error: .*{words}", said), said


@pytest.mark.parametrize("special, named, ends", [
    (["<s>", "</s>", "<x>", "<y>"], dict(eos=257, eot=258, eom=259), [257, 258, 259]),
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<y>"], dict(eos=256), [256, 258]),
    (["<|start|>", "<|return|>", "<|call|>", "<|end|>"], dict(eos=257), [257, 258]),
    (["<|flush|>", "<|call|>", "<|end|>", "<y>"], dict(eos=258), [256, 257]),
    (["<|tool_response>", "<turn|>", "</s>", "<eos>"], dict(eos=258), [256, 257, 259]),
    (["<|x|>", "<|y|>", "<|z|>", "<|end|>"], dict(eos=10 ** 6), [259]),
    (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "[PAD]"], {}, [256, 257, 258]),
    (["<fim-pad>", "<REPO>", "<x>", "<y>"], dict(fim_pad=258, fim_sep=259), [257, 258, 259]),
    # The ends that llama.cpp prints (b11549) of SmolLM2's file, Gemma 3's and Qwen 2.5 Coder's
    (["<|endoftext|>", "<|im_end|>", "<reponame>", "<file_sep>"], dict(eos=257), [256, 257, 258]),
    (["<eos>", "<end_of_turn>", "</s>", "<pad>"], dict(eos=256), [256, 257, 258]),
    (["</s>", "<|im_end|>", "<|fim_pad|>", "<|file_sep|>"], dict(eos=257), [256, 257, 258, 259])])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_that_end_a_text(special, named, ends, kind):
    """By name or by spelling, whatever type the file gives them: of two of these three files </s>
    is a text. `<|end|>` of gpt-oss ends a message only."""
    entries = {"tokenizer.ggml.tokens": [*TOKENS[:256], *special],
               "tokenizer.ggml.token_type": [1] * 256 + [kind] * 4}
    assert sorted(read_generation(entries | {
        f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()})["eos_token_id"]) == ends


def test_the_folder_has_all_ends_and_bos_as_llama_cpp_puts_it(tmp_path, capsys):
    folder = converted(tmp_path, "llama", network("llama"), {
        "tokenizer.ggml.eot_token_id": 259, "general.sampling.temp": 0.5, "other.tool": "it",
        "general.sampling.top_k": 7, "general.sampling.mirostat": 2,
        "tokenizer.ggml.suppress_tokens": [5, 9]}, bos_token_id=256,
        tokenizer_pre="llama-bpe", token_types=[1] * 256 + [3, 3, 4, 3, 1])
    assert "Passed over: other.tool, general.sampling.mirostat\n" in capsys.readouterr().out
    written = json.loads((folder / "generation_config.json").read_text())
    assert (written["temperature"], written["top_k"]) == (0.5, 7)
    assert written["eos_token_id"] == [257, 259, 258] and written["suppress_tokens"] == [5, 9]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab<|im_end|>").input_ids == [256, 260, 258]  # Llama 3's need no flag for it
    assert tokenizer.decode([260, 258], skip_special_tokens=True) == "ab"  # a user's by its type


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
