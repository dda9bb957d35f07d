"""Train an EAGLE-3 head for the bundled story model: `storyteller-eagle3` (docs/extras.md).

    python -m benchmarks.train_eagle3 --corpus childrens_books.txt --out storyteller-eagle3

The head learns what the model would say, not what the books say: its target is the model's own
distribution (Li et al. 2025, "EAGLE-3"). It is trained as it is used, "test-time training": the
first pass over a window reads the model's states, and the second and third read the head's own.
In pass j the head guesses from position t for the token j places further on:

    pass 0   at t      states of the model at t    token t + 1   ──► own state, guess of t + 2
    pass 1   at t + 1  own state of pass 0         token t + 2   ──► own state, guess of t + 3

Pass j attends to the model's part up to t and to its own j entries behind it, as the engine does.
A head must be small, so it knows the frequent tokens alone; what its vocabulary lacks it can't
guess. Road not taken: texts that the model writes itself, which suit a head better and take
longer to make than the training.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.train import encode, make_batch, split_corpus
from nanoserve.loader import BUNDLED

MODEL = BUNDLED / "storyteller"
WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 256, 96, 4, 2, 32
LAYERS = [2, 5]  # in front of which the model's states are read
DRAFT_VOCAB = 640
PASSES = 3
WINDOW = 256


class Layer(nn.Module):
    """The head's one layer. Names are the checkpoints'."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(WIDTH, 1e-6) for _ in range(3))
        self.self_attn = nn.ModuleDict({
            f"{name}_proj": nn.Linear(2 * WIDTH, heads * HEAD_DIM, bias=False)
            for name, heads in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)})
        self.self_attn["o_proj"] = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(WIDTH, MLP, bias=False),
                                  "up_proj": nn.Linear(WIDTH, MLP, bias=False),
                                  "down_proj": nn.Linear(MLP, WIDTH, bias=False)})

    def forward(self, embedded: Tensor, states: Tensor,
                past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """past: keys and values of the passes before, to which this pass adds its own."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        states = states + self.self_attn["o_proj"](self.attend(both, past))
        x = self.post_attention_layernorm(states)
        return states + self.mlp["down_proj"](
            F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))

    def attend(self, both: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = (self.self_attn[f"{name}_proj"](both).unflatten(-1, (-1, HEAD_DIM))
                   .transpose(1, 2) for name in "qkv")  # (batch, heads, window, head_dim)
        q, k = turn(q, len(past)), turn(k, len(past))
        past.append(tuple(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)))
        window = q.shape[2]
        later = torch.ones(window, window, dtype=torch.bool).triu(1)
        scores = [(q @ past[0][0].mT).masked_fill(later, -torch.inf)]
        scores += [(q * own).sum(-1, keepdim=True) for own, _ in past[1:]]
        weights = (torch.cat(scores, -1) * HEAD_DIM ** -0.5).softmax(-1)
        out = weights[..., :window] @ past[0][1]
        for i, (_, own) in enumerate(past[1:]):
            out = out + weights[..., window + i, None] * own
        return out.transpose(1, 2).flatten(2)


def turn(x: Tensor, shift: int) -> Tensor:
    """RoPE at base 10,000; the first position is `shift`."""
    rates = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(shift, shift + x.shape[2]), rates)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Head(nn.Module):
    """It begins as the model's state in front of the last layer, read by the model's own rows."""

    def __init__(self, embedding: Tensor, frequent: Tensor):
        super().__init__()
        self.fc = nn.Linear(len(LAYERS) * WIDTH, WIDTH, bias=False)
        self.midlayer, self.norm = Layer(), nn.RMSNorm(WIDTH, 1e-6)
        self.lm_head = nn.Linear(WIDTH, len(frequent), bias=False)
        with torch.no_grad():
            self.fc.weight.zero_()[:, -WIDTH:].fill_diagonal_(1)
            self.lm_head.weight.copy_(embedding[frequent])
            for name in ("self_attn", "mlp"):
                last = "o_proj" if name == "self_attn" else "down_proj"
                getattr(self.midlayer, name)[last].weight.zero_()

    def forward(self, taps: Tensor, embedded: Tensor) -> list[Tensor]:
        """Logits of each pass: those of pass j at t are for the token at t + 2 + j.
        embedded: of tokens 1 to window + PASSES - 1."""
        states, past, logits, window = self.fc(taps), [], [], taps.shape[1]
        for j in range(PASSES):
            states = self.midlayer(embedded[:, j:j + window], states, past)
            logits.append(self.lm_head(self.norm(states)))
        return logits


def passes(model: nn.Module, head: Head, frequent: Tensor, batch: Tensor) -> list[tuple]:
    """(the head's logits, the model's probabilities of the tokens that the head knows, whether the
    model's best token is the head's) of each pass. batch: (rows, window + PASSES) tokens."""
    with torch.no_grad():
        out = model(batch, output_hidden_states=True)
        window = batch.shape[1] - PASSES
        taps = torch.cat([out.hidden_states[i][:, :window] for i in LAYERS], -1)
        embedded = model.get_input_embeddings()(batch[:, 1:])
        wanted = out.logits.float().softmax(-1)
        best = wanted.argmax(-1)
    return [(guess, wanted[:, j + 1:j + 1 + window][..., frequent],
             frequent[guess.argmax(-1)] == best[:, j + 1:j + 1 + window])
            for j, guess in enumerate(head(taps, embedded))]


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    documents, held_out = split_corpus(options.corpus)
    stream, unseen = encode(tokenizer, documents), encode(tokenizer, held_out)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    counts = torch.bincount(stream, minlength=model.config.vocab_size)
    frequent = counts.topk(DRAFT_VOCAB).indices.sort().values
    print(f"{DRAFT_VOCAB} tokens are {counts[frequent].sum() / counts.sum():.1%} of the text")
    head = Head(model.get_input_embeddings().weight.detach(), frequent)
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name]
    others = [p for p in head.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=options.rate, weight_decay=0.0,
                                   adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=options.rate, weight_decay=0.0)]
    for step in tqdm(range(options.steps), disable=None):
        # A quarter of a batch of the model's own training, in windows of WINDOW + PASSES tokens.
        batch = make_batch(stream, step // 4, WINDOW + PASSES - 1, options.seed).chunk(4)[step % 4]
        with torch.autocast("cpu", torch.bfloat16):
            results = passes(model, head, frequent, batch)
        loss = sum(-(wanted * guess.float().log_softmax(-1)).sum(-1).mean()
                   for guess, wanted, _ in results)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1, 2 * (1 - step / options.steps))
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print(step, f"{loss / PASSES:.3f}",
                  [f"{hit.float().mean():.3f}" for *_, hit in results], flush=True)
    write(options.out, head.bfloat16(), frequent, model.config)
    evaluate(model, head.float(), frequent, unseen)


@torch.no_grad()
def evaluate(model: nn.Module, head: Head, frequent: Tensor, unseen: Tensor) -> None:
    """How often the head's guess is the model's best token, on text that neither has seen."""
    size = WINDOW + PASSES
    rows = unseen[:len(unseen) // size * size].view(-1, size)[:128]
    for j, (*_, hit) in enumerate(passes(model, head, frequent, rows)):
        print(f"guess {j + 1}: {hit.float().mean():.1%} are the model's best token")


def write(folder: Path, head: Head, frequent: Tensor, model) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().contiguous() for name, p in head.named_parameters()}
    tensors["d2t"] = frequent - torch.arange(len(frequent))  # how much larger the model's id is
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=WIDTH,
        intermediate_size=MLP, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, num_hidden_layers=1, vocab_size=model.vocab_size,
        draft_vocab_size=len(frequent), hidden_act="silu", rms_norm_eps=1e-6,
        rope_theta=10000.0, max_position_embeddings=model.max_position_embeddings,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=LAYERS), dtype="bfloat16"),
        indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head for the bundled model.")
    parser.add_argument("--corpus", type=Path, required=True, help="the books, see train.py")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
