"""4. Continuous batching. The batch is made anew for every step: who is done makes room at once.

The difference from program 3: no rectangle of tokens. Each text adds its own gap, a whole prompt or
one token, and all of them lie one behind the other. Only the cache is still a rectangle: a row for
each text, as long as the longest may become.
"""

from collections import deque

import torch

from course.storyteller import ROWS, Answer, attention


def generate(model, requests):
    answers = [Answer(list(prompt), len(prompt) + n) for prompt, n in requests]
    waiting, running, rows = deque(answers), {}, list(range(ROWS))
    longest = max(one.end for one in answers)
    cache = model.new_kv(ROWS, longest)
    model.hold(ROWS * longest)

    def attend(layer, q, k, v):
        (keys, values), out, start = cache[layer], [], 0
        for one, row in running.items():
            mine, start = slice(start, start + one.gap), start + one.gap
            keys[row, one.computed:len(one.ids)] = k[mine]
            values[row, one.computed:len(one.ids)] = v[mine]
            out.append(attention(q[mine], keys[row, :len(one.ids)], values[row, :len(one.ids)]))
        return torch.cat(out)

    while waiting or running:
        while waiting and rows:
            running[waiting.popleft()] = rows.pop()
        for one in step(model, running, attend):
            rows.append(running.pop(one))
    return [one.ids[-n:] for one, (_, n) in zip(answers, requests, strict=True)]


def step(model, running, attend):
    """Close all gaps, and write one token behind each text. Returns those that are done."""
    ids = [token for one in running for token in one.ids[one.computed:]]
    positions = [at for one in running for at in range(one.computed, len(one.ids))]
    logits, last = model(ids, positions, attend), -1
    for one in running:
        last += one.gap
        one.computed = len(one.ids)
        one.ids.append(int(logits[last].argmax()))
    return [one for one in running if len(one.ids) == one.end]
