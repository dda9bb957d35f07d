"""What adapters cost a decoding step: an engine that may have some beside one that may not.

    python -m benchmarks.lora --model Qwen3-0.6B --rows 1 16 --max-loras 4 --rounds 5

Both have random weights of a model's shapes. The engine with adapters runs twice: for the bare
model alone, where a step multiplies nothing more, and with an adapter in every row. An adapter's
product is computed for `max_loras` adapters, so how many there are makes no difference; what counts
is `max_loras * max_lora_rank`, the columns. The adapter is made here: zeros of all shapes, which
take as long as other numbers. The three take turns step by step, because others use the machine,
too; medians count, and the median of the pairs' ratios.

Not known here: what an adapter does (lora/lora.py).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import roofline
from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve_extras.lora.lora import LoRARequest

STEPS = 12  # of a round
PROMPT = [1, 2, 3, 4]


def write_adapter(llm: LLM, folder: Path, rank: int) -> LoRARequest:
    """One that changes every matrix that can be changed, by nothing."""
    tensors = {}
    for path, (products, name) in llm.runner.adapters.products.items():
        tensors[f"base_model.model.model.{path}.lora_A.weight"] = torch.zeros(
            rank, products.inputs.total)
        tensors[f"base_model.model.model.{path}.lora_B.weight"] = torch.zeros(
            products.matrices[name].total, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    entries = dict(peft_type="LORA", r=rank, lora_alpha=rank)
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    return LoRARequest("zeros", 1, str(folder))


def seconds_a_step(llm: LLM, rows: int, adapter: LoRARequest | None) -> float:
    """The median of a round's steps, each of which decodes one token for every row."""
    params = SamplingParams(temperature=0, max_tokens=STEPS + 2, ignore_eos=True, detokenize=False)
    for row in range(rows):
        llm.add_request(str(row), {"prompt_token_ids": PROMPT}, params, lora_request=adapter)
    llm.step()
    times = []
    while llm.has_unfinished_requests():
        start = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(folder: Path, rows: int, rounds: int, **options) -> list[tuple[str, float, float]]:
    """For each engine its name, milliseconds a step, and how often as long as without adapters."""
    common = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=64,
                  max_num_seqs=rows, num_gpu_blocks_override=4 * rows)
    with (LLM(folder, **common) as plain, LLM(folder, **common, enable_lora=True, **options) as llm,
          tempfile.TemporaryDirectory() as adapter):
        asked = write_adapter(llm, Path(adapter), options["max_lora_rank"])
        runs = {"without adapters": (plain, None), "may have adapters, none asked": (llm, None),
                "an adapter in every row": (llm, asked)}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(rounds + 1):
            for name, (engine, request) in runs.items():
                taken = seconds_a_step(engine, rows, request)
                if i:  # the first round warms up
                    times[name].append(taken)
    first = times["without adapters"]
    return [(name, 1000 * statistics.median(each), statistics.median(
        a / b for a, b in zip(each, first, strict=True))) for name, each in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the time of steps with adapters.")
    parser.add_argument("--model", default="Qwen3-0.6B", help="shapes: "
                        f"{', '.join(roofline.MODELS)}")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| rows | engine | ms a step | times as long |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(roofline.MODELS[args.model]))
        for rows in args.rows:
            for name, milliseconds, ratio in measure(
                    Path(folder), rows, args.rounds, max_loras=args.max_loras,
                    max_lora_rank=args.max_lora_rank):
                print(f"| {rows} | {name} | {milliseconds:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
