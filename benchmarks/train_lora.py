"""Train an adapter: the bundled story model in the voice of one book (docs/extras.md).

    python -m benchmarks.train_lora --corpus childrens_books.txt --book "Sherlock Holmes" \\
        --out detective

LoRA (Hu et al. 2021): the model stays as it is, and beside each matrix W of its layers two thin
ones are trained, so that it computes x W^T + scaling * (x A^T) B^T. A begins at random and B with
zeros: the first step's model is the bare one. What is written is a folder in PEFT's format, in
bfloat16, some 230 KB; PEFT itself is not needed.

One piece in fifty of the book is held out from the adapter, and the loss is printed for it. The
model itself may have read that piece: the figure says what the adapter adds, not how well the two
know the language. Road not taken: adapters for some matrices only, which would be smaller; the
engine's tests have such adapters.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.train import batch_loss, encode, evaluate, make_batch, split_corpus
from nanoserve.loader import BUNDLED

MODEL = BUNDLED / "storyteller"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONTEXT = 2048


class Adapted(nn.Module):
    """A Linear that stays as it is, and what is learnt beside it."""

    def __init__(self, linear: nn.Linear, rank: int, scaling: float):
        super().__init__()
        self.linear, self.scaling = linear, scaling
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)"""
        return self.linear(x) + self.scaling * (x @ self.a.T) @ self.b.T


def adapt(model: nn.Module, rank: int, alpha: float) -> dict[str, Adapted]:
    """Put an `Adapted` in the place of each target, and return them by name."""
    model.requires_grad_(False)
    found = {name: module for name, module in model.named_modules()
             if name.rpartition(".")[2] in TARGETS}
    adapted = {}
    for name, linear in found.items():
        path, _, last = name.rpartition(".")
        adapted[name] = Adapted(linear, rank, alpha / rank)
        setattr(model.get_submodule(path), last, adapted[name])
    return adapted


def one_book(corpus: Path, words: str) -> str:
    """The book with these words in it most often."""
    books = corpus.read_text(encoding="utf-8").split("\n\n\n")
    best = max(books, key=lambda book: book.count(words))
    if not best.count(words):
        raise SystemExit(f"--book {words!r}: no book of {corpus} has these words")
    return best


def train(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    book = options.out / "book.txt"
    book.write_text(one_book(options.corpus, options.book), encoding="utf-8")
    documents, held_out = split_corpus(book)
    book.unlink()
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    stream = encode(tokenizer, documents)
    print("bare model,", evaluate(model, tokenizer, held_out, 512))
    adapted = adapt(model, options.rank, options.alpha)
    learnt = [p for module in adapted.values() for p in (module.a, module.b)]
    optimizer = torch.optim.AdamW(learnt, lr=options.rate, weight_decay=0.0)
    for step in tqdm(range(options.steps), disable=None):
        for group in optimizer.param_groups:  # falls linearly to zero
            group["lr"] = options.rate * (1 - step / options.steps)
        # A quarter of a batch of the model's own training, in as many more steps.
        batch = make_batch(stream, step // 4, CONTEXT // 4, options.seed).chunk(4)[step % 4]
        loss = batch_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("with the adapter,", evaluate(model, tokenizer, held_out, 512))
    write(options.out, adapted, options)


def write(folder: Path, adapted: dict[str, Adapted], options: argparse.Namespace) -> None:
    tensors = {}
    for name, module in adapted.items():
        for kind, tensor in (("A", module.a), ("B", module.b)):
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = tensor.detach().bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = dict(peft_type="LORA", task_type="CAUSAL_LM", r=options.rank, bias="none",
                    lora_alpha=options.alpha, target_modules=TARGETS,
                    base_model_name_or_path="storyteller")
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train an adapter of the bundled model.")
    parser.add_argument("--corpus", type=Path, required=True, help="the books, see train.py")
    parser.add_argument("--book", required=True, help="words that one of the books is full of")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=8)
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
