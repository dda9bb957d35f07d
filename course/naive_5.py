"""5. Paged, with a shared beginning. KV memory is cut into blocks, and anybody may hold one.

The difference from program 4: a text has no row. It takes a block when it needs one, and its table
says which. Who begins like another text holds that text's blocks, and has less to compute.
"""

from collections import Counter, deque

import torch

from course.naive_4 import step
from course.storyteller import ROWS, Answer, attention

SIZE = 16  # tokens in a block


def generate(model, requests):
    answers = [Answer(list(prompt), len(prompt) + n) for prompt, n in requests]
    waiting, running = deque(answers), {}  # and each one's table
    free, owners, found = list(range(99)), Counter(), {}  # found: a block by all text up to its end
    cache = model.new_kv(99 * SIZE)

    def attend(layer, q, k, v):
        (keys, values), out, start = cache[layer], [], 0
        slots = {one: [block * SIZE + i for block in table for i in range(SIZE)][:len(one.ids)]
                 for one, table in running.items()}
        new = [slot for one in running for slot in slots[one][one.computed:]]
        keys[new], values[new] = k, v  # all texts write before any of them reads
        for one in running:
            mine, start = slice(start, start + one.gap), start + one.gap
            out.append(attention(q[mine], keys[slots[one]], values[slots[one]]))
        return torch.cat(out)

    def grow(one, table):
        start, end = len(table) * SIZE, len(table) * SIZE + SIZE
        beginning = tuple(one.ids[:end])
        if one.computed == start and end < len(one.ids) and beginning in found:
            one.computed = end
        elif end <= len(one.ids):
            found[beginning] = free.pop()
        table.append(found[beginning] if end <= len(one.ids) else free.pop())
        owners[table[-1]] += 1

    while waiting or running:
        while waiting and len(running) < ROWS:
            running[waiting.popleft()] = []
        for one, table in running.items():
            while len(table) * SIZE < len(one.ids):
                grow(one, table)
        model.hold(SIZE * len(+owners))
        for one in step(model, running, attend):
            owners.subtract(table := running.pop(one))
            free += [block for block in table if not owners[block]]
            found = {text: block for text, block in found.items() if owners[block]}
    return [one.ids[-n:] for one, (_, n) in zip(answers, requests, strict=True)]
