"""The bundled model as one function, for the five programs of from_naive.md.

    logits = model(ids, positions, attend)

Everything that a program can't change is here. What it decides is which tokens to hand over, and
`attend`: where a layer's keys and values (its KV) are kept, and which of them a query sees.
"""

import json
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nanoserve.llm import BUNDLED_MODEL
from nanoserve.ops import rms_norm

PADDING = -1  # in place of a token id: computed for nothing
ROWS = 4  # how many texts the later programs write at the same time
BEGINNING = ("Once upon a time there was an old king who lived in a castle by the sea, and he had "
             "a daughter who was so clever that she could talk with the birds and the fishes. ")
REQUESTS = [("One day the king said to her,", 24), ("But she was sad, for", 5),  # tokens to write
            ("In the castle lived a cat, which", 8), ("Every morning she went", 4),
            ("Now it happened that a wolf", 6), ("One night", 20),
            ("The birds told her of a poor fisherman, who", 5), ("She had a ring of gold, and", 8)]


@dataclass(eq=False)
class Answer:
    """A request on its way: a list of tokens, and how many of them have their KV in the cache."""

    ids: list[int]
    end: int  # so long it will be
    computed: int = 0

    @property
    def gap(self) -> int:
        return len(self.ids) - self.computed


class Storyteller:
    """The weights. It counts what it is asked for, and the tokens whose KV a program holds."""
    def __init__(self):
        config = json.loads((BUNDLED_MODEL / "config.json").read_text())
        self.eps, self.num_layers = config["rms_norm_eps"], config["num_hidden_layers"]
        self.kv_shape = config["num_key_value_heads"], config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]
        self.weights = {name.removesuffix(".weight").removeprefix("model."): tensor.float()
                        for name, tensor in load_file(BUNDLED_MODEL / "model.safetensors").items()}
        self.counts = Counter()

    def hold(self, num_tokens: int) -> None:
        self.counts["held"] = max(self.counts["held"], num_tokens)

    def new_kv(self, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Empty keys and values of each layer, both (*shape, KV heads, size of a head)."""
        return [(torch.zeros(*shape, *self.kv_shape), torch.zeros(*shape, *self.kv_shape))
                for _ in range(self.num_layers)]

    def __call__(self, ids, positions, attend) -> torch.Tensor:
        """Scores for what follows each token: (num_tokens, vocabulary). attend: (layer, q, k, v),
        each (num_tokens, heads, size), to q's shape."""
        self.counts.update(steps=1, tokens=len(ids), padding=list(ids).count(PADDING))
        self.counts["largest"] = max(self.counts["largest"], len(ids))
        return self.forward(torch.tensor(ids), torch.tensor(positions), attend)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Here there is one: see two_ranks.py."""
        return x

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        size = self.kv_shape[1]
        angles = positions[:, None] / self.theta ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rope(x):  # position becomes an angle
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        hidden = self.weights["embed_tokens"][ids.clamp(min=0)]
        for layer in range(self.num_layers):
            w = {name.removeprefix(f"layers.{layer}."): one for name, one in self.weights.items()}
            x = rms_norm(hidden, w["input_layernorm"], self.eps)
            q, k, v = (F.linear(x, w[f"self_attn.{name}_proj"]).unflatten(-1, (-1, size))
                       for name in "qkv")
            q = rope(rms_norm(q, w["self_attn.q_norm"], self.eps))
            k = rope(rms_norm(k, w["self_attn.k_norm"], self.eps))
            attended = F.linear(attend(layer, q, k, v).flatten(1), w["self_attn.o_proj"])
            hidden = hidden + self.all_reduce(attended)
            x = rms_norm(hidden, w["post_attention_layernorm"], self.eps)
            x = F.silu(F.linear(x, w["mlp.gate_proj"])) * F.linear(x, w["mlp.up_proj"])
            hidden = hidden + self.all_reduce(F.linear(x, w["mlp.down_proj"]))
        return F.linear(rms_norm(hidden, self.weights["norm"], self.eps),
                        self.weights["embed_tokens"])


def attention(q, k, v, visible=None) -> torch.Tensor:
    """softmax(q k^T) v. (queries, heads, size) and (keys, KV heads, size), or a batch of such.
    visible: (batch, 1, queries, keys); without it the queries are the last of the keys, and each
    sees itself and all keys before it."""
    if visible is None:
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(-3, -2)
