"""How fast texts become vectors: ours without padding, beside padded batches.

    python -m benchmarks.pooling --num-texts 256
    python -m benchmarks.pooling --model ENCODER --texts some_book.txt

The first command compares with transformers on tokens, 4 to 256 a text. A padded batch computes its
longest text's length for all of them, so transformers runs twice: in the order of arrival, and
sorted by length, which pads little but needs all texts beforehand. The second command compares with
sentence-transformers (to be installed), which sorts texts itself, on passages of 4 to 128 words,
tokenizers included. All take turns, because others use the machine, too; medians count.

Before any time is taken the vectors are compared: a fast wrong answer is no result.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModel

from nanoserve import LLM
from nanoserve.llm import BUNDLED_MODEL


def bench(model: str | Path, num_texts: int = 256, batch_size: int = 32,
          rounds: int = 5) -> dict[str, float]:
    """Seconds to embed texts of 4 to 256 tokens, on the CPU and in float32: ours, and those of
    transformers with padded batches, in the order of arrival and sorted by length. They take turns,
    because others use the machine, too; the medians count."""
    rng = random.Random(0)
    theirs = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    prompts = [[rng.randrange(theirs.config.vocab_size) for _ in range(int(2 ** rng.uniform(2, 8)))]
               for _ in range(num_texts)]
    llm = LLM(model, runner="pooling", dtype="float32", device="cpu", enable_prefix_caching=False)

    def padded(prompts: list[list[int]]) -> list[torch.Tensor]:
        vectors = []
        for i in range(0, len(prompts), batch_size):
            batch = [torch.tensor(ids) for ids in prompts[i:i + batch_size]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            lengths = torch.tensor([len(ids) for ids in batch])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            with torch.inference_mode():
                hidden = theirs(ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
            vectors += F.normalize(hidden[torch.arange(len(batch)), lengths - 1], dim=-1)
        return vectors

    runs = {"nanoserve": lambda: llm.embed(prompts, use_tqdm=False),
            "transformers, padded": lambda: padded(prompts),
            "transformers, padded, sorted": lambda: padded(sorted(prompts, key=len))}
    for ours, vector in zip(runs["nanoserve"](), padded(prompts), strict=True):  # and to warm up
        assert torch.allclose(torch.tensor(ours.outputs.embedding), vector, atol=1e-5)
    return in_turns(runs, rounds)


def bench_texts(model: str | Path, file: Path, num_texts: int = 256, batch_size: int = 32,
                rounds: int = 5) -> dict[str, float]:
    """Seconds to embed passages of a file, tokenizers included: ours and sentence-transformers'."""
    from sentence_transformers import SentenceTransformer  # not among the packages of the tests
    rng, words = random.Random(0), file.read_text(encoding="utf-8").split()
    texts = []
    for _ in range(num_texts):
        length = int(2 ** rng.uniform(2, 7))
        start = rng.randrange(len(words) - length)
        texts.append(" ".join(words[start:start + length]))
    theirs = SentenceTransformer(str(model), device="cpu").float()
    llm = LLM(model, runner="pooling", dtype="float32", device="cpu")
    runs = {"nanoserve": lambda: llm.embed(texts, use_tqdm=False),
            "sentence-transformers": lambda: theirs.encode(texts, batch_size=batch_size)}
    for ours, vector in zip(runs["nanoserve"](), runs["sentence-transformers"](), strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.embedding), torch.tensor(vector), atol=1e-5)
    return in_turns(runs, rounds)


def in_turns(runs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Each one's median of seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed texts of mixed lengths, and take the time.")
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--texts", type=Path, metavar="FILE",
                        help="passages of this file, against sentence-transformers")
    parser.add_argument("--num-texts", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32, help="of the padded batches")
    args = parser.parse_args()
    taken = (bench(args.model, args.num_texts, args.batch_size) if args.texts is None
             else bench_texts(args.model, args.texts, args.num_texts, args.batch_size))
    for name, seconds in taken.items():
        print(f"{name:30} {seconds:7.2f} s  {args.num_texts / seconds:8.1f} texts/s")


if __name__ == "__main__":
    main()
