"""What loading takes: anonymous memory at its peak, beside what the engine holds when it is ready.

    python -m benchmarks.loading                                checkpoints of about 0.6B
    python -m benchmarks.loading Qwen/Qwen3-8B --kind int4      one of benchmarks/fits.py

A checkpoint here is a file of holes: names and shapes are those that transformers would save, each
number is a zero that the disk does not store. It is loaded in a process of its own, whose memory is
read meanwhile from /proc (Linux): pages of mapped files don't count, since the system drops them
when others need memory. Bound: what the engine holds when it is ready, the two largest tensors of
the file, and 10%.
"""

import argparse
import json
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from benchmarks.fits import KINDS, PUBLISHED
from benchmarks.tables import table

MB = 1e6
LIMIT = 16e9  # bytes; more, and the load is stopped
SMALL = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
             vocab_size=32_000, tie_word_embeddings=False)
EXPERTS = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512)
CHECKPOINTS: dict[str, dict] = {  # of about 0.6B
    "dense": SMALL | dict(model_type="qwen3", intermediate_size=3072, num_hidden_layers=28),
    "mixture": SMALL | EXPERTS | dict(model_type="qwen3_moe", num_hidden_layers=10),
    "dense, transformers'": SMALL | dict(model_type="olmo2", intermediate_size=3072,
                                         num_hidden_layers=28),
    "hybrid": SMALL | dict(model_type="qwen3_5_text", intermediate_size=3072, num_hidden_layers=28),
    "hybrid mixture": SMALL | EXPERTS | dict(
        model_type="qwen3_5_moe_text", num_hidden_layers=10, shared_expert_intermediate_size=512)}
LOAD = """
import json, sys
from nanoserve import LLM
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
          max_num_seqs=4, num_gpu_blocks_override=32, **json.loads(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


class Taken(NamedTuple):
    """Bytes of anonymous memory."""

    ready: float
    peak: float
    two_tensors: float  # of the file, the largest

    @property
    def bound(self) -> float:
        return self.ready + self.two_tensors + self.ready / 10


def write_holes(folder: Path, entries: dict) -> float:
    """A checkpoint of zeros, for entries of config.json. Returns the bytes of the two largest
    tensors."""
    config = transformers.AutoConfig.for_model(**entries)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"), no_init_weights():
        network = transformers.AutoModelForCausalLM.from_config(config)
    tensors = revert_weight_conversion(network, network.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    header, end = {}, 0
    for name, tensor in sorted(tensors.items()):
        start, end = end, end + 2 * tensor.numel()
        header[name] = dict(dtype="BF16", shape=[*tensor.shape], data_offsets=[start, end])
    words = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    return sum(sorted(2.0 * tensor.numel() for tensor in tensors.values())[-2:])


def load(folder: Path, two_tensors: float, **options) -> Taken:
    """Load it in a process of its own. Raises `RuntimeError` beyond `LIMIT`, or if that fails."""
    peak = 0.0
    command = [sys.executable, "-c", LOAD, folder, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            while not select.select([process.stdout], [], [], 0.002)[0]:
                peak = max(peak, anonymous(process.pid))
                if peak > LIMIT:
                    raise RuntimeError(f"{peak / MB:,.0f} MB of anonymous memory")
            if not process.stdout.readline():
                raise RuntimeError("the engine could not be made")
            return Taken(anonymous(process.pid), peak, two_tensors)
        finally:
            process.kill()


def anonymous(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024.0 * int(found[1]) if found else 0.0


def measure(entries: dict, kind: str) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        two_tensors = write_holes(Path(folder), entries)
        return load(Path(folder), two_tensors, **({} if kind == "bfloat16" else
                                                  {"quantization": kind}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", default=[*CHECKPOINTS],
                        help=f"some of {', '.join(CHECKPOINTS)}, or of benchmarks/fits.py")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    rows = [["checkpoint, MB", "kind", "when ready", "at most while loading", "bound"], ["---"] * 5]
    for name in args.name:
        for kind in args.kind:
            taken = measure((CHECKPOINTS | PUBLISHED)[name], kind)
            rows.append([name, kind, *(f"{number / MB:,.0f}" for number in (
                taken.ready, taken.peak, taken.bound))])
            print(*rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
