"""1. No cache. For one more token, the whole text is computed again.

A model reads all tokens so far and scores every token that could come next. We take the best one,
append it, and ask again.
"""

from course.storyteller import attention


def generate(model, requests):
    """requests: (ids of a prompt, how many tokens to write). Returns the tokens of each."""
    answers = []
    for prompt, num_tokens in requests:
        ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(ids, range(len(ids)), attend)
            ids.append(int(logits[-1].argmax()))
        answers.append(ids[len(prompt):])
    return answers


def attend(layer, q, k, v):
    """Each token sees itself and those before it. Then its keys and values are thrown away."""
    return attention(q, k, v)
