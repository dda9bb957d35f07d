"""Train the two bundled models: `storyteller` and its small draft model, `storyteller-draft`.

An engine is only fun to read when it can be run, so nanoserve brings a language model that is small
enough to ship (5.8 M parameters, 11.5 MB) and still writes legible English. It was trained on 27
children's books, read two and a half times, on two CPU cores:

    python -m benchmarks.train --corpus childrens_books.txt --out storyteller
    python -m benchmarks.train --corpus childrens_books.txt --out storyteller-draft --draft
    python -m benchmarks.train --corpus childrens_books.txt --evaluate storyteller

- The network is transformers' own `Qwen3ForCausalLM`, so the engine loads the folder like any
  other checkpoint, and tests compare with transformers on the very same files.
- 4,096 tokens: more would put most of the parameters into the embedding, and a small corpus can't
  teach thousands of rare tokens.
- Muon for the layers' matrices, AdamW for the rest: tokens and minutes are both scarce, and Muon is
  known for reaching the same loss in fewer steps.
- The learning rate is constant until the last quarter and falls linearly to zero there. Nothing
  before that decay depends on `--steps`, so a resumed run may be given another `--steps`.
- Sequences are short (512) before the decay, where attention is cheap. The decay teaches long ones:
  2,048 tokens, all that the models accept, to the draft; 1,024 to the larger model, which has to
  extrapolate beyond (and does, its card has the figures).
- Held out is every 50th piece of about 8 KB, cut between paragraphs. Neither model nor tokenizer
  sees those. A batch is a pure function of step and seed, so a run can be repeated (up to the
  rounding of another CPU or another number of threads).

On a machine that has other work too, set `OMP_WAIT_POLICY=PASSIVE`: threads that spin while they
wait make training many times slower there.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END, IM_START, IM_END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
VOCAB_SIZE = 4096
BATCH_TOKENS = 8192  # a step, whatever the sequence length
SHORT = 512  # the sequence length before the decay; in it, see --long
POSITIONS = 2048  # what the models declare as their longest sequence
WARMUP_STEPS, DECAY_SHARE = 100, 0.25

# In words: a contraction's ending; a word with the space before it; one digit; punctuation with
# the space before it; line breaks; other white space, of which the last is left to the next word.
SPLIT = (r"'(?:[stmd]|re|ve|ll)(?!\p{L})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TOKENIZER_CONFIG = {  # written by hand: transformers 4 and 5 read these words alike
    "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, "bos_token": END,
    "eos_token": END, "pad_token": END, "additional_special_tokens": [IM_START, IM_END],
    "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}


def split_corpus(path: Path, piece_chars: int = 8192) -> tuple[list[str], list[str]]:
    """Training documents and held-out pieces. Two empty lines part the books, one the paragraphs;
    a training document ends where its book ends or where a held-out piece was cut out."""
    training, held_out, pieces = [], [], 0
    for book in path.read_text(encoding="utf-8").split("\n\n\n"):
        document, piece = [], []
        paragraphs = book.strip().split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            piece.append(paragraph)
            if sum(map(len, piece)) + 2 * len(piece) < piece_chars and i + 1 < len(paragraphs):
                continue
            if pieces % 50 == 25:
                held_out.append("\n\n".join(piece))
                training.append("\n\n".join(document))
                document = []
            else:
                document += piece
            piece, pieces = [], pieces + 1
        training.append("\n\n".join(document))
    return [document for document in training if document], held_out


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the alphabet, so any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """One stream of token ids: <|endoftext|> before every document and after the last."""
    end = tokenizer.token_to_id(END)
    stream = [end]
    for encoding in tokenizer.encode_batch(documents):
        stream += encoding.ids + [end]
    return torch.tensor(stream)


def make_batch(stream: Tensor, step: int, context: int, seed: int) -> Tensor:
    """The batch of this step. Each epoch cuts windows at another offset, in another order."""
    batch_size = BATCH_TOKENS // context
    windows = (len(stream) - 1) // context - 1  # one less, to leave room for the offset
    rows = []
    for sample in range(step * batch_size, (step + 1) * batch_size):
        epoch, index = divmod(sample, windows)
        random = torch.Generator().manual_seed(seed * 1000 + epoch)
        offset = int(torch.randint(context, (), generator=random))
        start = offset + context * int(torch.randperm(windows, generator=random)[index])
        rows.append(stream[start:start + context + 1])
    return torch.stack(rows)  # [batch_size, context + 1]


def make_model(tokenizer: Tokenizer, draft: bool) -> Qwen3ForCausalLM:
    """Random weights: 5.8 M parameters, or 0.6 M for the draft model."""
    shape = (dict(hidden_size=96, intermediate_size=288, num_hidden_layers=2,
                  num_attention_heads=3, num_key_value_heads=3) if draft else
             dict(hidden_size=256, intermediate_size=768, num_hidden_layers=6,
                  num_attention_heads=8, num_key_value_heads=4))
    end = tokenizer.token_to_id(END)
    model = Qwen3ForCausalLM(Qwen3Config(
        **shape, vocab_size=tokenizer.get_vocab_size(), head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=POSITIONS, bos_token_id=end, eos_token_id=end,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.95, bos_token_id=end, eos_token_id=end)
    return model


def make_optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """`match_rms_adamw` gives Muon's updates the size of AdamW's, so one rate suits both."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, momentum=0.95,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def batch_loss(model: Qwen3ForCausalLM, batch: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats of a batch [n, context + 1]: each token predicts the next one."""
    hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)  # [n, context, vocab]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(),
                           reduction=reduction)


@torch.inference_mode()
def evaluate(model: Qwen3ForCausalLM, tokenizer: Tokenizer, pieces: list[str],
             context: int) -> str:
    """Predict every token once, in windows that don't overlap. The separators cost bits and aren't
    counted as bytes, so the figure is a cautious one."""
    stream = encode(tokenizer, pieces)
    nats = sum(float(batch_loss(model, stream[None, i:i + context + 1], "sum"))
               for i in range(0, len(stream) - 1, context))
    bits_per_byte = nats / math.log(2) / sum(len(piece.encode()) for piece in pieces)
    return (f"held out: {nats / (len(stream) - 1):.4f} nats/token, {bits_per_byte:.4f} bits/byte "
            f"at context {context}")


def train(options: argparse.Namespace) -> None:
    documents, held_out = split_corpus(options.corpus)
    tokenizer = train_tokenizer(documents)
    stream = encode(tokenizer, documents)
    torch.manual_seed(options.seed)
    model = make_model(tokenizer, options.draft)
    optimizers = make_optimizers(model, options.rate)
    compiled_loss = torch.compile(batch_loss, dynamic=False)
    print(f"{model.num_parameters():,} parameters, {len(stream):,} tokens to train on")

    checkpoint = options.out.with_name(options.out.name + ".checkpoint.pt")
    first, seconds = 0, 0.0
    if options.resume:
        state = torch.load(checkpoint)
        first, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    start = time.monotonic() - seconds
    bar = tqdm(range(first, options.steps), initial=first, total=options.steps, mininterval=5,
               disable=None)
    for step in bar:
        to_go = (options.steps - step) / (options.steps * DECAY_SHARE)  # below 1 in the decay
        rate = options.rate * min(1.0, (step + 1) / WARMUP_STEPS, to_go)
        batch = make_batch(stream, step, options.long if to_go <= 1 else SHORT, options.seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if (step + 1) % options.checkpoint_every and step + 1 < options.steps:
            continue
        seconds = time.monotonic() - start
        partial = checkpoint.with_suffix(".partial")
        torch.save({"step": step + 1, "seconds": seconds, "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers]}, partial)
        partial.replace(checkpoint)  # a crash while writing must not cost the old one
        with torch.autocast("cpu", torch.bfloat16):
            bar.write(f"step {step + 1} after {seconds / 60:.0f} minutes: "
                      + evaluate(model, tokenizer, held_out, options.context))

    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    words = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
    (options.out / "tokenizer_config.json").write_text(words, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train or measure a bundled model.")
    parser.add_argument("--corpus", type=Path, required=True, help="the books, see split_corpus")
    parser.add_argument("--out", type=Path, help="the folder to write")
    parser.add_argument("--draft", action="store_true", help="train the small draft model")
    parser.add_argument("--steps", type=int, help="default: 940, draft: 1500")
    parser.add_argument("--long", type=int, help="sequence length in the decay: 1024, draft: 2048")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint.pt")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="measure a saved model")
    parser.add_argument("--context", type=int, default=1024, help="tokens a window, to measure")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (1500 if chosen.draft else 940)
    chosen.long = chosen.long or (2048 if chosen.draft else 1024)
    if chosen.out:
        train(chosen)
    elif chosen.evaluate:  # as it will be used: its own tokenizer, its bfloat16 weights
        print(evaluate(AutoModelForCausalLM.from_pretrained(chosen.evaluate),
                       Tokenizer.from_file(str(chosen.evaluate / "tokenizer.json")),
                       split_corpus(chosen.corpus)[1], chosen.context))
    else:
        parser.error("say --out FOLDER to train or --evaluate FOLDER to measure")
