"""Layers on disk: how much memory is held, and tokens a second beside the disk's own speed.

    python -m benchmarks.layers_on_disk [--rows 1 8 32 128 256]

A model of 1 GB of random weights in bfloat16 runs with all of its layers on disk. Behind each layer
the benchmark has the system forget the file's pages, so that each step reads all of them from the
disk itself, as a model would that is larger than the memory. Anonymous memory is looked at from the
start on, a hundred times a second, in /proc/self/status.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from nanoserve import LLM, SamplingParams
from nanoserve_extras.layer_plan.layer_disk import Shelf, unnamed_file

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048,
              intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
              num_key_value_heads=4, vocab_size=8000, max_position_embeddings=2048,
              rms_norm_eps=1e-5, tie_word_embeddings=True, torch_dtype="bfloat16", eos_token_id=0)
OPTIONS = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", max_num_seqs=512,
               num_gpu_blocks_override=512)
NUM_TOKENS = 4


class Memory(threading.Thread):
    """The most that this process has held, in MB, by kind."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = dict(RssAnon=0.0, RssFile=0.0)

    def run(self) -> None:
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in self.most:
                    self.most[name] = max(self.most[name], int(value.split()[0]) / 1024)
            time.sleep(0.01)


def disk_speed(size: int = 2 ** 30) -> float:
    """Bytes a second of one large read, of a file that no memory has."""
    with unnamed_file() as file:
        for _ in range(size // 2 ** 24):
            file.write(os.urandom(2 ** 20) * 16)
        file.flush()
        forget(file)
        began, buffer = time.perf_counter(), bytearray(2 ** 22)
        file.seek(0)
        while file.readinto(buffer):
            pass
        return size / (time.perf_counter() - began)


def forget(file) -> None:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forgetful(give_back):
    def give_back_and_forget(shelf: Shelf) -> None:
        give_back(shelf)
        forget(shelf.file)  # pages that are mapped, of the layer read ahead, stay
    return give_back_and_forget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    rows = parser.parse_args().rows
    Shelf.give_back = forgetful(Shelf.give_back)
    speed = disk_speed()
    print(f"the disk alone: {speed / 1e6:.0f} MB/s")
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        memory.start()
        with LLM(folder, **OPTIONS, layer_plan={"disk": CONFIG["num_hidden_layers"]}) as llm:
            print(f"loading held {memory.most['RssAnon']:.0f} MB of anonymous memory at most")
            size = sum(shelf.num_bytes for shelf in llm.runner.model.disk.shelves)
            print(f"{size / 1e6:.0f} MB of weights on disk: {speed / size:.2f} steps a second can "
                  "be read")
            for count in rows:
                memory.most = dict.fromkeys(memory.most, 0.0)
                seconds = step_seconds(llm, count)
                print(f"{count:3} rows: {1 / seconds:.2f} steps and {count / seconds:.1f} tokens a "
                      f"second, {size / seconds / speed:.0%} of the disk's speed; "
                      f"{memory.most['RssAnon']:.0f} MB anonymous, "
                      f"{memory.most['RssFile']:.0f} MB mapped at most")
        with LLM(folder, **OPTIONS) as llm:
            row = step_seconds(llm, rows[-1]) / rows[-1]
            print(f"{1e3 * row:.2f} ms of arithmetic a row, in memory: reading takes as long as "
                  f"{size / speed / row:.0f} rows")


def step_seconds(llm: LLM, count: int) -> float:
    """Of steps of one token for each of `count` rows."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([[i + 1] for i in range(count)], params, use_tqdm=False)
    return (time.perf_counter() - began) / NUM_TOKENS


if __name__ == "__main__":
    main()
