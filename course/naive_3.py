"""3. A static batch. Each call reads all weights, so let one call serve several texts.

The difference from program 2: the texts lie in a rectangle. Short prompts are padded on the left,
and who is done writes padding until the longest is done.
"""

import torch

from course.storyteller import PADDING, ROWS, attention


def generate(model, requests):
    return [answer for at in range(0, len(requests), ROWS)
            for answer in generate_batch(model, requests[at:at + ROWS])]


def generate_batch(model, requests):
    width, most = max(len(prompt) for prompt, _ in requests), max(n for _, n in requests)
    pads = torch.tensor([width - len(prompt) for prompt, _ in requests])[:, None, None, None]
    texts = [[PADDING] * (width - len(prompt)) + prompt for prompt, _ in requests]
    cache = model.new_kv(len(requests), width + most)
    model.hold(len(requests) * (width + most))
    start, end = 0, width

    def attend(layer, q, k, v):
        q, k, v = (x.unflatten(0, (len(requests), -1)) for x in (q, k, v))
        keys, values = (x[:, :end] for x in cache[layer])
        keys[:, start:], values[:, start:] = k, v
        at, key = torch.arange(start, end)[:, None], torch.arange(end)
        visible = (key <= at) & (key >= pads) | (key == at)
        return attention(q, keys, values, visible).flatten(0, 1)

    for step in range(most):
        ids = [token for text in texts for token in text[start:end]]
        positions = [max(at - int(pad), 0) for pad in pads for at in range(start, end)]
        best = model(ids, positions, attend).argmax(-1).view(len(requests), -1)[:, -1].tolist()
        for text, token, (_, num_tokens) in zip(texts, best, requests, strict=True):
            text.append(token if step < num_tokens else PADDING)
        start, end = end, end + 1
    return [text[width:width + n] for text, (_, n) in zip(texts, requests, strict=True)]
