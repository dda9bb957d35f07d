"""Drafts against drawn texts: does a guess change what comes out?

Two tokens are written, each drawn from the four likeliest. A drafter guesses the first one, and the
model computes in one step what follows the prompt and what would follow the guess. Four ways to go
on are tried with the same 20,000 seeds:

    no drafts   draw the first token, compute, draw the second
    equal       draw the first token; if it is the guess, the second step is done already
    rejection   the drafter draws the guess, from its own q; it is accepted with min(1, p / q), or
                else a token is drawn from what p has more than q (Leviathan et al. 2023)
    likely      take the guess wherever the model gives it 20% or more
"""

import torch

from course.storyteller import Storyteller, attention
from nanoserve import LLM, SamplingParams
from nanoserve.hooks import Extra
from nanoserve.ops import uniforms

NUM_SEEDS, WIDTH = 20_000, 4
PROMPT = [3473, 676, 261, 542, 452, 312, 261]  # Once upon a time there was a
RHYME = ("Once upon a time there was a king, and once upon a time there was a queen, and once upon "
         "a time there was a king, and once upon a time there was a")


def likeliest(model: Storyteller, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The four likeliest next tokens, (WIDTH,), and all probabilities among them."""
    scores = model(ids, range(len(ids)), lambda layer, q, k, v: attention(q, k, v))[-1]
    top = scores.topk(WIDTH).indices
    return top, scores[top].double().softmax(-1)


def draw(p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Columns of p, drawn with random numbers from 0 to 1. p: (..., WIDTH)"""
    return (p.cumsum(-1) <= numbers[:, None]).sum(-1).clamp(max=WIDTH - 1)


def main(tokenizer) -> None:
    four_ways(tokenizer.decode)
    in_the_engine()


def four_ways(decode) -> None:
    model = Storyteller()
    tokens, p = likeliest(model, PROMPT)
    after = torch.stack([likeliest(model, [*PROMPT, int(token)])[1] for token in tokens])
    # The drafter has read the last three tokens of the prompt and nothing before.
    scores = model(PROMPT[-3:], range(3), lambda layer, q, k, v: attention(q, k, v))[-1]
    q = scores[tokens].double().softmax(-1)
    guess = q.argmax()

    seeds = torch.arange(NUM_SEEDS)
    first, second, third, fourth = (
        uniforms(seeds, torch.full([NUM_SEEDS], len(PROMPT) + i)) for i in range(4))
    drawn = draw(p, first)
    guessed = draw(q, third)  # for rejection sampling
    is_accepted = first < (p / q)[guessed]
    rest = (p - q).clamp(min=0)
    ways = {"no drafts": drawn, "equal": drawn,
            "rejection": torch.where(is_accepted, guessed, draw(rest / rest.sum(), fourth)),
            "likely": torch.where(p[guess] >= .2, guess, drawn)}
    saved = {"no drafts": torch.zeros(1), "equal": drawn == guess, "rejection": is_accepted,
             "likely": p[guess:guess + 1] >= .2}

    print(f"{'':24}{'model':>7}", *(f"{name:>10}" for name in ways))
    for i, token in enumerate(tokens):
        shares = [(way == i).double().mean() for way in ways.values()]
        print(f"{decode(int(token))!r:24}{p[i]:7.1%}", *(f"{share:10.1%}" for share in shares))
    texts = {name: way * WIDTH + draw(after[way], second) for name, way in ways.items()}
    expected = (p[:, None] * after).flatten()
    gaps = [(one.bincount(minlength=len(expected)) / NUM_SEEDS - expected).abs().max()
            for one in texts.values()]
    same = [(one == texts["no drafts"]).double().mean() for one in texts.values()]
    for name, figures in (("of the 16 texts, off by", gaps), ("the seed's own text", same),
                          ("a step saved", [one.double().mean() for one in saved.values()])):
        print(f"{name:31}", *(f"{share:10.1%}" for share in figures))


class CountDrafts(Extra):
    drafts = right = 0

    def updated(self, step, accepted):
        for seq, drafts in step.drafts.items():
            self.drafts += len(drafts)
            self.right += len(accepted[seq]) - 1


def in_the_engine() -> None:
    """Eight texts with seeds, with drafts and without."""
    params = [SamplingParams(temperature=0.6, top_k=4, seed=i, max_tokens=24, ignore_eos=True)
              for i in range(8)]
    texts = []
    for drafts in (None, dict(method="suffix", num_speculative_tokens=4)):
        with LLM(dtype="float32", device="cpu", kernels="torch", num_gpu_blocks_override=64,
                 speculative_config=drafts) as llm:
            counts = CountDrafts()
            llm.add(counts)
            outputs = llm.generate([RHYME] * 8, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
        print(f"the engine, {'drafts' if drafts else 'no drafts'}: {counts.drafts} drafts, "
              f"{counts.right} of them right")
    print(f"eight drawn texts, the same: {texts[0] == texts[1]}")
