"""What tests of structured output share: an oracle that knows no grammar library, and checkpoints.

`regex` says with its partial matching whether a text can still become a match. Asked for each token
of the vocabulary in turn, it says which may come next. A token of the small checkpoints is a byte.
"""

import json
import random

import numpy as np
import regex
import torch
from checkpoints import EOS, SIZES, Reference, byte_tokenizer, save
from helpers import poisoned
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoserve import LLM, SamplingParams

TOKENIZER = byte_tokenizer()
END_OF_TURN, PADDED = 258, 291  # tokens 260 to 290 are padding
ENDS = {EOS, END_OF_TURN}
TEXTS = [TOKENIZER.decode([i]) for i in range(256)]  # of a byte that is ASCII: the character


def padded_checkpoint(folder):
    """A vocabulary with room behind the tokenizer's, and two tokens that end a text."""
    config = Qwen3Config(**SIZES | dict(vocab_size=PADDED), num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32)
    save(Qwen3ForCausalLM(config), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ENDS]}))
    return folder


def allowed_next(pattern: str, text: str) -> set[int]:
    """Which tokens may come behind `text`, if the whole is to match an ASCII pattern."""
    found = {i for i, more in enumerate(TEXTS)
             if more.isascii() and regex.fullmatch(pattern, text + more, partial=True)}
    return found | (ENDS if regex.fullmatch(pattern, text) else set())


class Naive:
    """Greedy text by transformers' whole forward pass for each token, and `allowed_next`."""

    def __init__(self, folder):
        self.model = Reference(folder).model

    @torch.no_grad()
    def text(self, prompt: list[int], pattern: str, max_tokens: int) -> tuple[list[int], str]:
        """The output's tokens, and why it ends. Fails at a near-tie: choose another prompt then."""
        output: list[int] = []
        while len(output) < max_tokens:
            logits = self.model(torch.tensor([prompt + output])).logits[0, -1].numpy()
            allowed = sorted(allowed_next(pattern, TOKENIZER.decode(output)))
            best = np.sort(logits[allowed])[::-1]
            assert len(best) == 1 or best[0] - best[1] > 1e-4, "a near-tie"
            output.append(allowed[int(logits[allowed].argmax())])
            if output[-1] in ENDS:
                return output, "stop"
        return output, "length"


def requests() -> list[tuple[list[int], str]]:
    """Prompts of mixed lengths, some with a common beginning, each with a pattern."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(20)]
    patterns = [r"[ab]{3}x?", r"[0-9]{4}-[0-9]{2}-[01][0-9]", r"yes|no|maybe", r"(ab|cd)*e",
                r"[a-z]{30,}", r'\{"name": "[a-z]{2,5}", "age": [1-9][0-9]?\}', r"abcdefghijklmnop",
                r"[!-/z]{2,9}"]
    return [(shared[:rng.randrange(1, 20)] + [rng.randrange(256) for _ in range(9)], pattern)
            for pattern in patterns]


def params_of(pattern: str, max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(**dict(temperature=0, max_tokens=max_tokens,
                                 structured_outputs={"regex": pattern}) | fields)


def start(folder, **options) -> LLM:
    llm = LLM(folder, **dict(dtype="float32", device="cpu", num_gpu_blocks_override=64) | options)
    return poisoned(llm, len(llm.runner.model.layers))
