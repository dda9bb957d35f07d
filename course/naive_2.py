"""2. A cache. What a token's keys and values are never changes, so we keep them.

The difference from program 1: each call is handed only the tokens behind `computed`. That is the
whole prompt once, and then one token at a time.
"""

import torch

from course.storyteller import attention


def generate(model, requests):
    return [generate_one(model, prompt, num_tokens) for prompt, num_tokens in requests]


def generate_one(model, prompt, num_tokens):
    ids, computed, cache = list(prompt), 0, model.new_kv(0)

    def attend(layer, q, k, v):
        keys, values = cache[layer]
        cache[layer] = torch.cat((keys, k)), torch.cat((values, v))
        return attention(q, *cache[layer])

    for _ in range(num_tokens):
        logits = model(ids[computed:], range(computed, len(ids)), attend)
        computed = len(ids)
        model.hold(computed)
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt):]
