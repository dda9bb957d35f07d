"""What runs on 8, 12, 16 and 24 GB, with which command: writes the table of docs/models.md.

    python -m benchmarks.fits                 from the numbers of published config.json files, typed
    python -m benchmarks.fits --measure Qwen/Qwen3-4B int4 --layers 36    what a load really takes

transformers makes each text network on "meta", where tensors have shapes and no numbers. What an
engine holds of it in int8 or int4, by the rules of docs/extras.md:

    a matrix of a layer     1 byte a number, and 4 a row        half a byte, and 4 for 32 of a row
    an LM head, q, k, v     1 byte, and 4 a row                 the same
    experts                 as other matrices
    all else                2 bytes

Embeddings of transformers' networks stay in the mapped file, from which rows are read when they are
looked up: those pages are no part of this. Loading takes more for a while: our own decoder an
embedding in 16 bits, transformers' networks at most a layer. Beside the weights: keys and values of
8,192 tokens in 16 bits, the states of 4 sequences and as many snapshots (`max_num_seqs=4`), and
1 GB for Python and its libraries. A machine of 16 GB has 15 for all of it.

What is measured is a checkpoint of the right shapes, in a file of holes, which read as zeros from
no disk: the processor's time, and anonymous memory (pages of mapped files don't count).
"""

import argparse
import json
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from benchmarks.tables import table, write
from nanoserve import LLM
from nanoserve_extras.quantization.quantized_linear import IN_8_BITS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN = "<!-- written by benchmarks/fits.py -->\n"
GB, TOKENS, SEQUENCES, LIBRARIES, SYSTEM = 1e9, 8192, 4, 1e9, 1e9
MACHINES = (8, 12, 16, 24)  # GB
KINDS = ("bfloat16", "int8", "int4")
OURS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mixtral")
# Where nothing is typed, the class's default is that checkpoint's number.
QWEN35 = dict(model_type="qwen3_5_text", num_attention_heads=16, num_key_value_heads=4)
GEMMA4 = dict(model_type="gemma4_text", global_head_dim=512, tie_word_embeddings=True)
PUBLISHED: dict[str, dict] = {
    "LiquidAI/LFM3-1.7B": dict(model_type="lfm3"),
    "Qwen/Qwen3-4B": dict(
        model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151_936,
        tie_word_embeddings=True),
    "Qwen/Qwen3.5-4B": QWEN35 | dict(hidden_size=2560, intermediate_size=9216,
                                     tie_word_embeddings=True),
    "google/gemma-4-E4B-it": GEMMA4 | dict(
        hidden_size=2560, intermediate_size=10_240, num_hidden_layers=42, num_key_value_heads=2,
        num_kv_shared_layers=18),
    "Qwen/Qwen3-8B": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151_936),
    "meta-llama/Llama-3.1-8B-Instruct": dict(
        model_type="llama", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256),
    "LiquidAI/LFM2.5-8B-A1B": dict(
        model_type="lfm2_moe", num_hidden_layers=24, vocab_size=128_000, layer_types=[
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]),
    "mistralai/Ministral-3-8B-Instruct-2512": dict(model_type="ministral3"),
    "Qwen/Qwen3.5-9B": QWEN35,
    "google/gemma-4-12B-it": GEMMA4 | dict(
        hidden_size=3840, intermediate_size=15_360, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=0),
    "openai/gpt-oss-20b": dict(model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32),
    "google/gemma-4-26B-A4B-it": GEMMA4 | dict(
        hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        hidden_size_per_layer_input=0),
    "Qwen/Qwen3.8-27B": QWEN35 | dict(
        hidden_size=5120, intermediate_size=17_408, num_hidden_layers=64, num_attention_heads=24,
        linear_num_value_heads=48),
    "meta-models/Muse-Glimmer-30B": dict(model_type="muse_glimmer_text"),
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, vocab_size=151_936, tie_word_embeddings=False),
    "Qwen/Qwen3.6-35B-A3B": dict(model_type="qwen3_5_moe_text")}


class Size(NamedTuple):
    """Bytes of a checkpoint in one kind."""

    held: float
    loading: float
    cache: float  # keys and values of `TOKENS`, and states
    mapped: float  # pages of the file, beside what is held

    @property
    def needed(self) -> float:
        return max(self.loading, self.held + self.cache) + LIBRARIES


def sizes_of(entries: dict) -> dict[str, Size]:
    """By kind. entries: of config.json, the text's."""
    config = transformers.AutoConfig.for_model(**entries)
    with torch.device("meta"), no_init_weights():
        network = transformers.AutoModel.from_config(config)
    ours, tied = config.model_type in OURS, config.tie_word_embeddings
    head = config.vocab_size * config.hidden_size
    cache = cache_of(config, entries) * TOKENS + states_of(config) * 2 * SEQUENCES
    plain = sum(p.numel() for p in network.parameters()) * 2.0 + 2.0 * head * (not tied)
    matrices = [one.weight for one in network.modules() if type(one) is nn.Linear]
    for one in network.modules():
        if hasattr(one, "is_transposed"):  # experts
            matrices += [p.mT if one.is_transposed else p for p in one.parameters() if p.dim() == 3]
    mapped = 0.0 if ours else sum(2.0 * one.weight.numel() for one in network.modules()
                                  if isinstance(one, nn.Embedding))
    waits = 2.0 * head if ours else max(
        sum(2.0 * p.numel() for p in layer.parameters()) for layer in network.layers)
    numbers = sum(p.numel() for p in matrices)
    lines = sum(p.numel() // p.shape[-1] for p in matrices)
    in_8_bits = [one.weight for name, one in network.named_modules()
                 if type(one) is nn.Linear and name.rpartition(".")[2] in IN_8_BITS]
    wider = sum(0.375 * p.numel() + 4 * len(p) for p in in_8_bits)  # than 5 bits each
    # The embedding that is the head has both forms where transformers looks rows up.
    wide = plain - 2.0 * numbers - 2.0 * head * (ours or not tied) + head + 4 * config.vocab_size
    held = {"int8": wide - mapped + numbers + 4 * lines,
            "int4": wide - mapped + 0.625 * numbers + wider}
    return {"bfloat16": Size(plain, plain, cache, 0.0)} | {
        kind: Size(size, size + waits, cache, mapped) for kind, size in held.items()}


def states_of(config: transformers.PreTrainedConfig) -> float:
    """Bytes of what Qwen 3.5's linear layers keep for a sequence. Convolutions keep little."""
    layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if not layers:
        return 0.0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return layers * (4.0 * values * config.linear_key_head_dim
                     + 2.0 * (2 * keys + values) * (config.linear_conv_kernel_dim - 1))


def cache_of(config: transformers.PreTrainedConfig, entries: dict) -> float:
    """Bytes of a token's keys and values. Layers with windows keep those of all tokens beside
    layers without; layers that share keys, convolve or keep a state have none."""
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = (getattr(config, "layer_types", None) or ["full_attention"] * layers)[:layers]
    known = config.to_dict() | entries  # Gemma 4's layers differ, and its config refuses to say
    size = known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]
    heads = known["num_key_value_heads"]
    sizes = {"sliding_attention": size * heads, "full_attention": entries.get(
        "global_head_dim", size) * entries.get("num_global_key_value_heads", heads)}
    return sum(2 * 2.0 * sizes.get(kind, 0) for kind in kinds)


def rows(checkpoints: dict[str, dict]) -> list[list[str]]:
    """For each checkpoint what is held and, where that is more, the peak; and for each machine the
    widest kind that fits."""
    lines = []
    for name, entries in checkpoints.items():
        sizes = sizes_of(entries)
        widest = [next((kind for kind, size in sizes.items()
                        if size.needed <= machine * GB - SYSTEM), "-") for machine in MACHINES]
        lines.append([f"`{name}`", *(f"{size.held / GB:.1f}" for size in sizes.values()),
                      *(f"{getattr(sizes['int4'], part) / GB:.1f}"
                        for part in ("loading", "mapped", "cache")),
                      *widest])
    return sorted(lines, key=lambda line: float(line[1]))


def measure(name: str, kind: str, layers: int | None) -> None:
    """Time and anonymous memory of one load. layers: of so many alone."""
    entries = PUBLISHED[name] | ({} if layers is None else dict(num_hidden_layers=layers))
    if layers is not None and "layer_types" in entries:
        entries["layer_types"] = entries["layer_types"][:layers]
    with tempfile.TemporaryDirectory() as folder:
        write_holes(transformers.AutoConfig.for_model(**entries), Path(folder))
        before, most, is_ready = anonymous(), [0.0], threading.Event()

        def watch() -> None:
            while not is_ready.wait(0.02):
                most.append(max(most.pop(), anonymous()))

        threading.Thread(target=watch, daemon=True).start()
        began = time.process_time()
        llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
                  num_gpu_blocks_override=32, max_num_seqs=SEQUENCES,
                  quantization=None if kind == "bfloat16" else kind)
        with llm:
            seconds, held = time.process_time() - began, anonymous() - before
            is_ready.set()
        size = sizes_of(entries)[kind]
        print(f"{name}, {kind}, {entries.get('num_hidden_layers', 'all')} layers: {seconds:.0f} s, "
              f"at most {(most[0] - before) / GB:.2f} GB (computed {size.loading / GB:.2f}), "
              f"{held / GB:.2f} when ready (computed {size.held / GB:.2f})")


def write_holes(config: transformers.PreTrainedConfig, folder: Path) -> None:
    """A checkpoint whose one file has a header and a hole."""
    with torch.device("meta"), no_init_weights():
        network = transformers.AutoModelForCausalLM.from_config(config)
    tied, header, end = network.get_expanded_tied_weights_keys(all_submodels=True), {}, 0
    for name, tensor in network.state_dict().items():
        if name not in tied:
            begin, end = end, end + 2 * tensor.numel()
            header[name] = dict(dtype="BF16", shape=[*tensor.shape], data_offsets=[begin, end])
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    text = json.dumps(header).encode()
    with Path(folder, "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def anonymous() -> float:
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024.0 * int(kilobytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", nargs=2, metavar=("CHECKPOINT", "KIND"))
    parser.add_argument("--layers", type=int, help="measure the first ones alone")
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure, args.layers)
        return
    head = ["checkpoint, GB of", *KINDS, "int4 while loading", "left in the file",
            "keys, values, states",
            *(f"on {machine} GB" for machine in MACHINES)]
    write(PAGE, table([head, ["---"] * len(head), *rows(PUBLISHED)]), BEGIN)


if __name__ == "__main__":
    main()
