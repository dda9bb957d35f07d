"""Two ranks write one text. Each has half of the matrices; twice a layer they add their results.

A rank has half of the query, key and value heads, and half of the MLP's width. So the product that
follows, by `o_proj` or `down_proj`, has only half of its inputs here, and gives half of the sum.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from course.storyteller import Storyteller, attention

OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # a rank has half of the outputs
INPUTS = ("o_proj", "down_proj")  # and here half of the inputs
PROMPT = [3473, 676, 261, 542, 452, 312, 261]  # Once upon a time there was a


class Wire:
    """What connects two ranks, which are threads here."""

    def __init__(self):
        self.parts, self.sent, self.barrier = [None, None], [], Barrier(2)

    def all_reduce(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = part
        self.barrier.wait(60)  # until the other's part is there
        total = self.parts[0] + self.parts[1]
        self.barrier.wait(60)  # until the other has read mine
        if rank == 0:
            self.sent.append(part.nbytes)
        return total


class Rank(Storyteller):
    def __init__(self, rank: int, wire: Wire | None):
        super().__init__()
        self.rank, self.wire = rank, wire
        for name, weight in self.weights.items():
            if name.endswith(OUTPUTS):
                self.weights[name] = weight.chunk(2, dim=0)[rank]
            elif name.endswith(INPUTS):
                self.weights[name] = weight.chunk(2, dim=1)[rank]

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.wire is None else self.wire.all_reduce(self.rank, part)


def write(model: Storyteller, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """A greedy text, and the scores of its first token. Each step computes the whole text."""
    ids, first = list(PROMPT), None
    for _ in range(num_tokens):
        scores = model(ids, range(len(ids)), lambda layer, q, k, v: attention(q, k, v))[-1]
        first = scores if first is None else first
        ids.append(int(scores.argmax()))
    return ids[len(PROMPT):], first


def write_on_two(wire: Wire | None, num_tokens: int) -> list[tuple[list[int], torch.Tensor]]:
    ranks = [Rank(rank, wire) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(write, ranks, [num_tokens] * 2)]


def main(tokenizer) -> None:
    decode = tokenizer.decode
    whole, wire = Storyteller(), Wire()
    text, scores = write(whole, 8)
    [(text_0, scores_0), (text_1, _)] = write_on_two(wire, 8)
    count = sum(weight.numel() for weight in whole.weights.values())
    half = sum(weight.numel() for weight in Rank(0, None).weights.values())
    print(f"weights: {count:,}, on each of two ranks {half:,}")
    per_step = 2 * whole.num_layers
    for step in range(2):
        sent = wire.sent[step * per_step:][:per_step]
        print(f"a step of {len(PROMPT) + step} tokens: {len(sent)} all-reduces of "
              f"{sent[0]:,} bytes, {sum(sent):,} in all")
    same = torch.allclose(scores, scores_0, atol=1e-3)
    print(f"the same scores as on one rank: {same}, bit for bit: {torch.equal(scores, scores_0)}")
    print(f"one rank:                {decode(text)!r}")
    print(f"rank 0, rank 1:          {decode(text_0)!r}, {decode(text_1)!r}")
    alone = " and ".join(repr(decode(text)) for text, _ in write_on_two(None, 8))
    print(f"without the all-reduces: {alone}")
