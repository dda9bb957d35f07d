"""A recording of a step, as a CUDA graph makes one: what it keeps, and which changes break it.

The stand-in writes down each *launch*, an operator with the very tensors that it read and wrote,
and runs the same list again. On a GPU the list is run by the device itself, so the host has one
thing to do for a step. Here it saves nothing; what can go wrong is the same.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.storyteller import Storyteller, attention

ROWS, LENGTH = 4, 32  # texts, and places for each one's KV


class Recording(TorchDispatchMode):
    def __init__(self, function):
        super().__init__()
        self.launches = []
        with torch.inference_mode(), self:
            self.output = function()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op._schema.is_mutable or not memory(out) <= memory(args):  # other views launch nothing
            self.launches.append((op, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> torch.Tensor:
        for op, args, kwargs, out in self.launches:
            new = op(*args, **kwargs)
            if not memory(new) <= memory(args):
                out.copy_(new)  # into the memory that the next launch reads
        return self.output


def memory(tensors) -> set[int]:
    """The addresses of the memory in which these tensors lie."""
    return {one.untyped_storage().data_ptr() for one in tree_leaves(tensors)
            if isinstance(one, torch.Tensor)}


class Texts:
    """A batch of texts that are written side by side. A row's KV has its own line of the cache."""

    def __init__(self, model: Storyteller, prompts: list[list[int]]):
        self.model, self.cache = model, model.new_kv(ROWS, LENGTH)
        # The inputs of a step, always in the same memory. A row without a text is padding: it
        # writes its KV to the last place, where no text ever reads it.
        self.ids = torch.zeros(ROWS, dtype=torch.int64)
        self.positions = torch.full([ROWS], LENGTH - 1)
        self.texts = [self.start(row, prompt) for row, prompt in enumerate(prompts)]

    def start(self, row: int, prompt: list[int]) -> list[int]:
        """Compute a prompt, and write its first token."""
        def attend(layer, q, k, v):
            keys, values = self.cache[layer]
            keys[row, :len(k)], values[row, :len(k)] = k, v
            return attention(q, k, v)

        logits = self.model(prompt, range(len(prompt)), attend)
        return [*prompt, int(logits[-1].argmax())]

    def attend(self, layer, q, k, v):
        """How many keys a row has is read from memory, when the step runs."""
        keys, values = self.cache[layer]
        keys[torch.arange(ROWS), self.positions] = k
        values[torch.arange(ROWS), self.positions] = v
        is_seen = torch.arange(LENGTH) <= self.positions[:, None]
        return attention(q[:, None], keys, values, is_seen[:, None, None])[:, 0]

    def attend_to_a_number(self, layer, q, k, v):
        """The same, but the host says how many keys there are: all texts are equally long."""
        (keys, values), last = self.cache[layer], len(self.texts[0]) - 1
        keys[:, last], values[:, last] = k, v
        return attention(q[:, None], keys[:, :last + 1], values[:, :last + 1],
                         torch.ones(ROWS, 1, 1, last + 1, dtype=torch.bool))[:, 0]

    def decode(self, attend) -> torch.Tensor:
        """The next token of each row."""
        return self.model.forward(self.ids, self.positions, attend).argmax(-1)

    def write(self, step, count: int) -> list[list[int]]:
        """`count` tokens more for each text. step: gives the next token of each row."""
        for _ in range(count):
            rows = len(self.texts)
            self.ids[:rows].copy_(torch.tensor([text[-1] for text in self.texts]))
            self.positions[:rows].copy_(torch.tensor([len(text) - 1 for text in self.texts]))
            for text, token in zip(self.texts, step().tolist(), strict=False):
                text.append(token)
        return self.texts


def main(tokenizer) -> None:
    model = Storyteller()
    prompts = [tokenizer.encode(f"There was a {one}")
               for one in ("king", "man", "cat", "bird", "fish")]

    def first_of(written: list[list[int]]) -> str:
        return repr(tokenizer.decode(written[0][len(prompts[0]):]))

    plain = Texts(model, prompts[:4])
    right = plain.write(lambda: plain.decode(plain.attend), 8)

    texts = Texts(model, prompts[:4])
    recording = Recording(lambda: texts.decode(texts.attend))
    print(f"a step by hand: {len(recording.launches)} launches; a replay: 1")
    same = texts.write(recording.replay, 8) == right
    print(f"four texts, the same as by hand: {same}")
    print(f"    {first_of(right)}")

    frozen = Texts(model, prompts[:4])
    recording = Recording(lambda: frozen.decode(frozen.attend_to_a_number))
    written = frozen.write(recording.replay, 8)
    print(f"recorded with the number of keys, {len(prompts[0]) + 1}, in it:")
    print(f"    {first_of(written)}")

    padded = Texts(model, prompts[:3])
    recording = Recording(lambda: padded.decode(padded.attend))
    same = padded.write(recording.replay, 8) == right[:3]
    print(f"three texts and a row of padding, the same: {same}")
    padded.texts = [*right, [*prompts[4], 0]]
    try:
        padded.write(recording.replay, 1)
    except RuntimeError as error:
        print(f"five texts: {error}")
