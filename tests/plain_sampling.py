"""Sampling written as its formulas say, a row and a token at a time; and a test of draws."""

import math
from collections import Counter

import numpy as np
import torch

from nanoserve import SamplingParams

# Degrees of freedom -> the value that chi-square exceeds once in 1,000 times.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12,
            9: 27.88, 10: 29.59, 11: 31.26, 15: 37.70, 63: 103.44}


def assert_distributed(tokens: np.ndarray, probs: list[float]) -> None:
    """Pearson's test: counts of `tokens` against n * p; a token without probability never comes."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs)
    expected = len(tokens) * np.array(probs)
    possible = expected > 0
    assert not counts[~possible].any(), f"impossible tokens {np.nonzero(counts[~possible])}"
    assert expected[possible].min() >= 5, "too few draws for the test to mean anything"
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CRITICAL[possible.sum() - 1], f"chi-square {chi_square:.1f}"


def reference_probs(logits: list[float], temperature: float = 1.0, top_k: int = 0,
                    top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """One row, one rule after the other: temperature, min-p, top-k, top-p."""
    def softmax(values):
        exps = [math.exp(v - max(values)) for v in values]
        return [e / sum(exps) for e in exps]

    scaled = [value / temperature for value in logits]
    p = softmax(scaled)
    keep = [i for i in range(len(p)) if p[i] >= min_p * max(p)]
    if top_k > 0:
        kth = sorted((scaled[i] for i in keep), reverse=True)[min(top_k, len(keep)) - 1]
        keep = [i for i in keep if scaled[i] >= kth]  # equal ones at the edge all stay
    p = dict(zip(keep, softmax([scaled[i] for i in keep]), strict=True))
    mass, chosen = 0.0, []
    for i in sorted(keep, key=lambda i: -p[i]):
        if mass >= top_p:
            break
        chosen.append(i)  # the token that crosses top_p is among them
        mass += p[i]
    kept = softmax([scaled[i] for i in chosen])
    result = [0.0] * len(logits)
    for i, probability in zip(chosen, kept, strict=True):
        result[i] = probability
    return result


def plain_edits(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int],
                late: list[int] = (), bad_words: list[list[int]] = ()) -> np.ndarray:
    """One row, one rule and one token after the other. logits: (vocab_size,) float32."""
    one = np.float32
    for function in params.logits_processors or ():
        function = getattr(function, "pure", function)  # a class says here what its objects do
        logits = function(output, torch.tensor(logits)).numpy()
    row = [one(x) for x in logits]
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = one(-np.inf)
    for word in bad_words:
        if (output + [word[-1]])[-len(word):] == word:
            row[word[-1]] = one(-np.inf)
    if len(output) < params.min_tokens:
        for token in late:
            row[token] = one(-np.inf)
    for token, bias in (params.logit_bias or {}).items():
        row[token] += one(bias)
    repetition = one(params.repetition_penalty)
    for token in set(prompt + output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(output).items():
        row[token] -= one(params.frequency_penalty) * one(count)
        row[token] -= one(params.presence_penalty)
    return np.array(row, dtype=np.float32)
