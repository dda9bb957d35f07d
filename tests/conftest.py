"""Checkpoints written by transformers itself, and the reference: its own greedy text.

The weights are random but large, so that outputs vary and near-ties are rare. They are made once a
session, in a temporary folder; nothing is downloaded.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # must be said before triton is imported, as transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

VOCAB_SIZE = 260  # 256 bytes, then these:
BOS, EOS, END_OF_TURN, PAD = 256, 257, 258, 259
SIZES = dict(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             max_position_embeddings=256, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)


@pytest.fixture(autouse=True)
def audit_every_step(monkeypatch):
    """Every engine of every test audits its books after every step."""
    monkeypatch.setenv("NANOSERVE_CHECK", "1")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII needs several tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template="{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
                      "{% if add_generation_prompt %}<s>assistant:{% endif %}")


def save(model, folder: Path, **options) -> Path:
    """Randomise a transformers model so that its greedy text is lively, and write it out."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "embed" in name else 2.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale, generator=generator)
            else:  # norms around 1, biases around 0
                center = 1.0 if "norm" in name else 0.0
                parameter.normal_(center, 0.3, generator=generator)
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """One small checkpoint for each thing that differs between real ones."""
    root = tmp_path_factory.mktemp("checkpoints")
    llama, qwen3 = LlamaForCausalLM, Qwen3ForCausalLM
    gqa = dict(num_attention_heads=4, num_key_value_heads=2)
    llama3_rope = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                       high_freq_factor=4.0, original_max_position_embeddings=64)
    made = {
        "llama2": llama(LlamaConfig(**SIZES, num_attention_heads=4)),
        "llama3.1": llama(LlamaConfig(**SIZES, **gqa, rope_parameters=llama3_rope)),
        "llama3.2": llama(LlamaConfig(**SIZES, **gqa, head_dim=24, tie_word_embeddings=True,
                                      rope_parameters=llama3_rope)),
        "llama-bias": llama(LlamaConfig(**SIZES, **gqa, attention_bias=True, mlp_bias=True)),
        "qwen3": qwen3(Qwen3Config(**SIZES, **gqa, head_dim=32)),
        "qwen3-tied": qwen3(Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=1,
                                        head_dim=16, tie_word_embeddings=True)),
    }
    folders = {name: save(model, root / name) for name, model in made.items()}
    folders["qwen3-sharded"] = save(made["qwen3"], root / "qwen3-sharded", max_shard_size="100KB")
    assert (folders["qwen3-sharded"] / "model.safetensors.index.json").exists()
    return folders


@pytest.fixture(scope="session")
def qwen3(checkpoints) -> Path:
    return checkpoints["qwen3"]


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token prompts of mixed lengths around the block size, some with a common beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(256) for _ in range(40)]
    own = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 31, 32, 33, 70)]
    return own + [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 8, 8, 24)] + [shared]


class Reference:
    """transformers, one prompt at a time, greedy, fp32: token ids and the gap of each choice."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Returns the output tokens, EOS included, and top-1 minus top-2 logit at each."""
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
            return_dict_in_generate=True, output_logits=True)
        best = [logits[0].float().topk(2).values for logits in out.logits]
        return out.sequences[0, len(prompt):].tolist(), [float(b[0] - b[1]) for b in best]


@pytest.fixture(scope="session")
def references(checkpoints):
    """Reference texts by checkpoint, prompt and length; each is computed once."""
    models, texts = {}, {}

    def reference(name: str, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        key = (name, tuple(prompt), max_tokens)
        if key not in texts:
            if name not in models:
                models[name] = Reference(checkpoints[name])
            texts[key] = models[name].generate(prompt, max_tokens)
        return texts[key]

    return reference


NEAR_TIE = 1e-4


def assert_same_text(got: list[int], expected: list[int], gaps: list[float], where: str) -> None:
    """Token for token equal; past a near-tie of the reference's top two logits all bets are off."""
    for i, (ours, theirs) in enumerate(zip(got, expected)):
        if ours != theirs:
            if gaps[i] < NEAR_TIE:
                print(f"{where}: near-tie at token {i} (gap {gaps[i]:.1e}), {ours} for {theirs}")
                return
            raise AssertionError(f"{where}: token {i} is {ours}, transformers says {theirs} "
                                 f"(gap {gaps[i]:.4f})")
    assert len(got) == len(expected), f"{where}: {len(got)} tokens for {len(expected)}"


def write_json(path: Path, **changes) -> None:
    """Change entries of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
