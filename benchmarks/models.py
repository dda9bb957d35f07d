"""Which of today's checkpoints run, and by whom: writes the table of docs/models.md.

    python -m benchmarks.models                        a minute on a CPU
    python -m benchmarks.models --only gemma-4

No published weights are tried. For each checkpoint of the list a tiny random network of its class
is made by transformers, with what is peculiar to it (windows, experts, shared keys, towers), and
served as `LLM` would serve the real one. What runs is compared with transformers, token for token
in float32 and in every mode of `tools.verify`; the oracle is its dense forward, with all towers, on
one prompt at a time. What does not run is in the table with the refusal's own words.
Checkpoints of one class with one answer share a row, and equality is not said again in each.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.tables import table, write
from nanoserve import LLM
from nanoserve_extras.tools import verify

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN = "<!-- written by benchmarks/models.py -->\n"
MAX_TOKENS, NUM_PROMPTS = 8, 6

# -------------------------------------------------------------- tiny networks

TOKENS = dict(vocab_size=260, bos_token_id=256, eos_token_id=257, pad_token_id=259)
PLAIN = dict(TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             intermediate_size=48, max_position_embeddings=128)
GQA = dict(PLAIN, num_key_value_heads=2)
KINDS = ["sliding_attention", "full_attention"]
WINDOWS = dict(GQA, head_dim=8, sliding_window=13, layer_types=KINDS)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)
GEMMA4_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=14,
                     position_embedding_size=16)
QWEN_VISION = dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, out_hidden_size=32,
                   intermediate_size=16, patch_size=14, spatial_merge_size=1)
QWEN3_VISION = dict(QWEN_VISION, deepstack_visual_indexes=[0], num_position_embeddings=16)
PIXTRAL = dict(VISION, model_type="pixtral", head_dim=8)
M_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
IMAGE = dict(image_token_id=250)
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
              qk_nope_head_dim=8, v_head_dim=10, n_routed_experts=4, n_group=1, topk_group=1,
              num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1)


def plain(kind: str, **entries) -> Callable[[], transformers.PreTrainedConfig]:
    return lambda: transformers.AutoConfig.for_model(kind, **GQA | entries)


def wrap(kind: str, text: dict, vision: dict, **outer) -> Callable:
    """A wrapping's config; text and vision: entries of its parts."""
    return lambda: transformers.AutoConfig.for_model(kind, **dict(
        bos_token_id=256, eos_token_id=257, text_config=text, vision_config=vision) | outer)


# Text networks with towers, by a short name.
WRAPPINGS: dict[str, Callable] = {
    "gemma3": wrap("gemma3", dict(WINDOWS, query_pre_attn_scalar=24), VISION,
                   mm_tokens_per_image=4),
    # The last layers share the keys of those before them; each layer has an embedding of its own.
    "gemma4": wrap("gemma4", dict(
        WINDOWS, num_hidden_layers=4, layer_types=2 * KINDS, num_kv_shared_layers=2,
        global_head_dim=16, num_global_key_value_heads=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=260, final_logit_softcapping=5.0, use_double_wide_mlp=True),
        GEMMA4_VISION),
    "gemma4-experts": wrap("gemma4", dict(
        WINDOWS, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24,
        hidden_size_per_layer_input=0, global_head_dim=16), GEMMA4_VISION),
    # In images, tokens would see each other.
    "gemma4-unified": wrap("gemma4_unified", dict(
        WINDOWS, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
        dict(mm_embed_dim=16, patch_size=14)),
    "mistral3": wrap("mistral3", dict(GQA, model_type="mistral", head_dim=8, sliding_window=None),
                     PIXTRAL),
    "ministral3": wrap("mistral3", dict(
        GQA, model_type="ministral3", head_dim=8, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
            llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0)), PIXTRAL),
    "qwen2-vl": wrap("qwen2_vl", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "qwen2.5-vl": wrap("qwen2_5_vl", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "qwen3-vl": wrap("qwen3_vl", dict(GQA, head_dim=8, **M_ROPE), QWEN3_VISION, **IMAGE),
    "qwen3-vl-moe": wrap("qwen3_vl_moe", dict(GQA, **MOE, head_dim=8, **M_ROPE), QWEN3_VISION,
                         **IMAGE),
    "glm4v": wrap("glm4v", dict(GQA, **M_ROPE), QWEN_VISION, **IMAGE),
    "smolvlm": wrap("smolvlm", dict(GQA, model_type="llama"), VISION, **IMAGE),
    "idefics3": wrap("idefics3", dict(GQA, model_type="llama"), VISION, **IMAGE),
    "internvl": wrap("internvl", dict(GQA, model_type="qwen2"), dict(
        VISION, image_size=[28, 28], patch_size=[14, 14]), **IMAGE),
    "llava": wrap("llava", dict(GQA, model_type="llama"), dict(
        VISION, model_type="clip_vision_model", projection_dim=16), image_token_index=250),
    # Its class makes the logits of all tokens, asked or not.
    "videollama3": wrap("video_llama_3", dict(GQA, model_type="qwen2"), VISION, **IMAGE),
    "qwen3.5": wrap("qwen3_5", dict(GQA, num_hidden_layers=4, head_dim=8), QWEN_VISION, **IMAGE),
    "qwen3.5-moe": wrap("qwen3_5_moe", dict(
        GQA, **MOE, num_hidden_layers=4, head_dim=8, shared_expert_intermediate_size=24),
        QWEN_VISION, **IMAGE),
    # Every fourth layer reads all keys and turns nothing; its heads are scaled behind their norm.
    "muse-glimmer": wrap("muse_glimmer", dict(
        GQA, num_hidden_layers=4, head_dim=8, sliding_window=13), dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2), **IMAGE),
    "llama4": wrap("llama4", dict(GQA, head_dim=8, num_local_experts=2, attention_chunk_size=16,
                                  intermediate_size_mlp=48), dict(
        VISION, vision_output_dim=32, projector_input_dim=16, projector_output_dim=16)),
}
OTHERS: dict[str, Callable] = {
    "llama": plain("llama"), "mistral": plain("mistral", sliding_window=13),
    "qwen2": plain("qwen2"), "qwen3": plain("qwen3", head_dim=8),
    "qwen3-moe": plain("qwen3_moe", head_dim=8, **MOE),
    "mixtral": plain("mixtral", num_local_experts=4),
    "gemma2": plain("gemma2", head_dim=8, sliding_window=13), "gemma3-text": lambda: (
        transformers.Gemma3TextConfig(**WINDOWS)),
    "gpt-oss": plain("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                     sliding_window=13),
    "phi3": plain("phi3", sliding_window=13), "smollm3": plain("smollm3", no_rope_layers=[1, 0]),
    "olmo3": plain("olmo3", sliding_window=13),
    "exaone4": lambda: transformers.Exaone4Config(**WINDOWS),
    "glm4-moe-lite": plain("glm4_moe_lite", **LATENT),
    "glm4-moe": plain("glm4_moe", head_dim=8, n_routed_experts=4, n_group=1, topk_group=1,
                      num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
    "deepseek-v3.2": plain("deepseek_v32", **LATENT),
    "seed-oss": plain("seed_oss", head_dim=8), "apertus": plain("apertus"),
    "ernie4.5": plain("ernie4_5", head_dim=8), "hunyuan": plain("hunyuan_v1_dense", head_dim=8),
    "qwen3-next": plain("qwen3_next", num_hidden_layers=4, head_dim=8, **MOE),
    "lfm2": plain("lfm2", layer_types=["conv", "full_attention"]),
    "lfm2-moe": plain("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1,
                      **MOE),
    "lfm3": plain("lfm3", head_dim=8, sliding_window=13, num_hidden_layers=3,
                  layer_types=["conv", "sliding_attention", "full_attention"]),
    "granite4-h": plain("granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=4,
                        mamba_d_head=16),
    "nemotron-h": plain("nemotron_h", hybrid_override_pattern="M*", mamba_num_heads=4, n_groups=2,
                        mamba_head_dim=16),
    "falcon-h1": plain("falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=2),
    "bloom": lambda: transformers.BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4),
    "embeddinggemma": lambda: transformers.Gemma3TextConfig(
        **WINDOWS, use_bidirectional_attention=True),
    "bert": lambda: transformers.BertConfig(**PLAIN),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**PLAIN | dict(pad_token_id=1)),
    "modernbert": lambda: transformers.ModernBertConfig(**PLAIN),
    "mpnet": lambda: transformers.MPNetConfig(**PLAIN),
    "t5": lambda: transformers.T5Config(vocab_size=260, d_model=32, num_layers=2, num_heads=4),
}
POOLED = ("embeddinggemma", "bert", "xlm-roberta", "modernbert", "mpnet", "qwen3-embedding")
# As people type it, with the network that stands for it.
CHECKPOINTS: dict[str, str] = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama", "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "qwen2", "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen3-8B": "qwen3", "Qwen/Qwen3-30B-A3B": "qwen3-moe",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral", "mistralai/Mixtral-8x7B-Instruct-v0.1":
    "mixtral", "google/gemma-2-9b-it": "gemma2", "google/gemma-3-1b-it": "gemma3-text",
    "google/gemma-3-4b-it": "gemma3", "google/gemma-3n-E4B-it": "gemma3n",
    "google/gemma-4-E2B-it": "gemma4", "google/gemma-4-26B-A4B-it": "gemma4-experts",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "mistral3",
    "mistralai/Ministral-3-8B-Base-2512": "ministral3",
    "mistralai/Ministral-3-8B-Instruct-2512": "ministral3",
    "Qwen/Qwen2-VL-7B-Instruct": "qwen2-vl", "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3-vl", "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3-vl-moe",
    "zai-org/GLM-4.1V-9B-Thinking": "glm4v", "HuggingFaceTB/SmolVLM2-2.2B-Instruct": "smolvlm",
    "HuggingFaceM4/Idefics3-8B-Llama3": "idefics3", "OpenGVLab/InternVL3-1B-hf": "internvl",
    "llava-hf/llava-1.5-7b-hf": "llava", "openai/gpt-oss-20b": "gpt-oss",
    "microsoft/Phi-4-mini-instruct": "phi3", "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "allenai/Olmo-3-7B-Instruct": "olmo3", "LGAI-EXAONE/EXAONE-4.0-32B": "exaone4",
    "zai-org/GLM-4.7-Flash": "glm4-moe-lite", "zai-org/GLM-4.5-Air": "glm4-moe",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "seed-oss",
    "swiss-ai/Apertus-8B-Instruct-2509": "apertus", "baidu/ERNIE-4.5-0.3B-PT": "ernie4.5",
    "tencent/Hunyuan-7B-Instruct": "hunyuan", "Qwen/Qwen3.5-0.8B": "qwen3.5",
    "Qwen/Qwen3.5-27B": "qwen3.5", "Qwen/Qwen3.8-27B": "qwen3.5",
    "Qwen/Qwen3.6-35B-A3B": "qwen3.5-moe", "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next",
    "meta-models/Muse-Glimmer-30B": "muse-glimmer",
    "LiquidAI/LFM2-1.2B": "lfm2", "LiquidAI/LFM2.5-8B-A1B": "lfm2-moe",
    "LiquidAI/LFM3-1.7B": "lfm3", "ibm-granite/granite-4.0-h-tiny": "granite4-h",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-h",
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": "falcon-h1",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2", "state-spaces/mamba-130m-hf": "mamba",
    "bigscience/bloom-560m": "bloom", "google-t5/t5-small": "t5",
    "Qwen/Qwen3-Embedding-0.6B": "qwen3-embedding", "google/embeddinggemma-300m": "embeddinggemma",
    "BAAI/bge-m3": "xlm-roberta", "sentence-transformers/all-MiniLM-L6-v2": "bert",
    "answerdotai/ModernBERT-base": "modernbert",
    "sentence-transformers/all-mpnet-base-v2": "mpnet"}
# What is not the network's.
NOTES = {"openai/gpt-oss-20b": "; its own files (MXFP4) become bfloat16",
         "mistralai/Ministral-3-8B-Instruct-2512": "; its own files (FP8) become bfloat16, the "
         "fixed scales of activations are passed over"}


def make(name: str, folder: Path) -> Path:
    """A folder with a tiny random network; `name`: of the tables above."""
    if name == "gemma3n":
        return make_gemma3n(folder)
    if name == "qwen3-embedding":  # as published: a generator's class, and sentence-transformers'
        make("qwen3", folder)
        (folder / "modules.json").write_text("[]")
        return folder
    config = (WRAPPINGS | OTHERS)[name]()
    auto = (transformers.AutoModel if name in POOLED else transformers.AutoModelForSeq2SeqLM
            if name == "t5" else transformers.AutoModelForImageTextToText if name in WRAPPINGS
            else transformers.AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def make_gemma3n(folder: Path) -> Path:
    """Its tower is another package's (timm), so that only the text can be made here: then the
    files are written as the whole one's. Text alone is in `folder / "text"`, and is the oracle."""
    config = transformers.Gemma3nTextConfig(**dict(
        WINDOWS, num_hidden_layers=4, layer_types=2 * KINDS, num_kv_shared_layers=2,
        intermediate_size=[48] * 4, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=260, laurel_rank=4,
        altup_num_inputs=2))
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder / "text")
    tensors = load_file(folder / "text" / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor
             for name, tensor in tensors.items()}
    named["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(4, 3, 3, 3)
    named["model.embed_vision.embedding.weight"] = torch.zeros(4, 16)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "text" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["Gemma3nForConditionalGeneration"], model_type="gemma3n", eos_token_id=257,
        text_config=text, vision_config=dict(hidden_size=16, vocab_size=4),
        audio_config=dict(hidden_size=16))))
    return folder


@torch.no_grad()
def randomise(model) -> None:
    """Weights so large that texts vary. The embedding is small beside what layers add: where it is
    the head as well, every text would be the prompt's last token, for ever."""
    generator = torch.Generator().manual_seed(1)
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(0, 0.1, generator=generator)
        elif parameter.dim() > 1:
            parameter.normal_(0, 2.5 * parameter.shape[-1] ** -0.5, generator=generator)
        else:  # norms around 1, biases around 0
            center = float("norm" in name.lower() and name.endswith("weight"))
            parameter.normal_(center, 0.3, generator=generator)


# ------------------------------------------------------------------- verdicts


def try_network(name: str, folder: Path) -> tuple[str, str]:
    """The class of a network in `folder`; who runs it and what differed, or why nobody does."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    options = dict(dtype="float32", device="cpu", skip_tokenizer_init=True)
    try:
        with LLM(folder, **options, num_gpu_blocks_override=16, max_model_len=64) as llm:
            who = "our decoder" if llm.runner.parts.make_network is None else "transformers"
            config = llm.model_config
    except ValueError as error:
        reason = re.search(r"is not supported: (.*)\. Use a checkpoint", str(error))
        why = re.sub(r"^\d+ of its \d+ layers", "some of its layers",  # those of the tiny one
                     reason[1].split("; such layers are not")[0] if reason else str(error))
        return architecture, f"refused: {why}"
    if name in POOLED:
        return architecture, who + compare_vectors(folder, options)
    model = verify.load_reference(folder / "text" if name == "gemma3n" else folder)
    prompts = verify.read_prompts(verify.PROMPTS, None, NUM_PROMPTS, 80)
    texts = [verify.write_reference(model, prompt, config.eos_token_ids, MAX_TOKENS,
                                    verify.NEAR_TIE, True) for prompt in prompts]
    rows = [verify.run_mode(folder, mode, texts, MAX_TOKENS, tensor_parallel_size=1)
            for mode in verify.modes_for(config)]
    wrong = sum(bool(row.differ) for row in rows)
    near = sum(len(row.near_ties) for row in rows)
    return architecture, (who + f"; **{wrong} of {len(rows)} modes differ**" * bool(wrong)
                          + f"; {near} near-ties" * bool(near))


def compare_vectors(folder: Path, options: dict) -> str:
    prompts = verify.read_prompts(verify.PROMPTS, None, NUM_PROMPTS, 80)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in prompts]
    with LLM(folder, **options, runner="pooling", max_model_len=100, num_gpu_blocks_override=64,
             pooler_config={"pooling_type": "MEAN"}) as llm:
        got = [torch.tensor(output.outputs.embedding) for output in llm.embed(prompts)]
    worst = max(float((one - torch.nn.functional.normalize(other, dim=-1)).abs().max())
                for one, other in zip(got, expected, strict=True))
    return "" if worst < 1e-5 else f"; **vectors differ by {worst:.1e}**"


def rows_of(checkpoints: dict[str, str]) -> list[list[str]]:
    """A row for each class and answer; networks that stand for several are tried once."""
    known: dict[str, tuple[str, str]] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for checkpoint, name in checkpoints.items():
        if name not in known:
            with tempfile.TemporaryDirectory() as folder:
                known[name] = try_network(name, make(name, Path(folder) / name))
            print(checkpoint, *known[name], sep=" | ", flush=True)
        architecture, who = known[name]
        rows.setdefault((architecture, who + NOTES.get(checkpoint, "")), []).append(
            f"`{checkpoint}`")
    return [[", ".join(names), f"`{architecture}`", who]
            for (architecture, who), names in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the names; then nothing is written")
    args = parser.parse_args()
    chosen = {checkpoint: name for checkpoint, name in CHECKPOINTS.items()
              if args.only in checkpoint}
    rows = rows_of(chosen)
    if not args.only:
        head = [["checkpoints", "class", "runs by"], ["---"] * 3]
        write(PAGE, table(head + rows), BEGIN)


if __name__ == "__main__":
    main()
