"""Memory of this process around `update_weights` and in a sleep (docs/training.md).

    python -m benchmarks.new_weights [--model Qwen3-0.6B] [--model-impl transformers]

The weights are random. An iterator makes one new tensor after the other; a thread reads RssAnon in
/proc/self/status each millisecond, so this runs on Linux alone.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from benchmarks import roofline
from nanoserve import LLM


def held() -> int:
    """Anonymous memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon"))


def new_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in network.named_parameters():
        yield name, torch.full(parameter.shape, 0.01, dtype=torch.bfloat16)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen3-0.6B", help=", ".join(roofline.MODELS))
    parser.add_argument("--model-impl", default="auto", choices=("auto", "transformers"))
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = roofline.write_config(args.model, Path(place))
        llm = LLM(folder, dtype="bfloat16", load_format="dummy", device="cpu",
                  model_impl=args.model_impl, skip_tokenizer_init=True, num_gpu_blocks_override=64)
        before, most, done = held(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, held())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        llm.update_weights(new_tensors(folder))
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        print(f"{before:,} MB before, {most:,} at most, {held():,} behind; {seconds:.1f} s")
        for level in (1, 2):
            llm.sleep(level)
            asleep, slept = held(), time.perf_counter()
            if level == 2:
                llm.update_weights(new_tensors(folder))
            llm.wake_up()
            print(f"sleep({level}): {asleep:,} MB asleep, {held():,} awake; "
                  f"{time.perf_counter() - slept:.1f} s to wake up")


if __name__ == "__main__":
    main()
