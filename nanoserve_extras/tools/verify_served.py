"""The effect of fewer bits on a served model: flipped tokens and the perplexity of a text.

    nanoserve verify MODEL                     on verify's own prompts, behind the table of modes
    nanoserve verify MODEL --text book.txt     on a text of yours, this table alone

The text is given (*teacher forcing*), so each position asks one question: which token comes next?
transformers answers it in float32, and an engine with each kind of weights answers it through the
logprobs of a prompt. Generated texts can't be compared like this: after the first difference they
go on differently.

    flips        the share of positions whose likeliest token is another one
    moved        how much probability goes to other tokens: half the sum of its changes (total
                 variation distance), on average. Behind a position's 20 likeliest tokens all count
                 as impossible
    perplexity   exp of the mean of -log p of the text's tokens (Jelinek et al. 1977)

A flip alone is no error: if two tokens are almost equally likely, rounding decides. An error moves
probability, so a kind fails by `moved`: if it is more than twice what correct engines showed on
real models (docs/models.md). `flips` and the perplexity are for the reader.

Known limits: only the tokens of one text are compared, so this is no benchmark of answers. A
prompt's products have many rows, so this tests the arithmetic of prompts, not that of decoding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from pathlib import Path

import torch

from nanoserve.config import SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve_extras.base.llm import LLM

WINDOW = 512  # tokens that are read at a time, at most
NUM_LIKELY = 20  # tokens whose probabilities are compared at each position
LETTERS = 16  # that a token has, at most: so much of a long text is read


@dataclass(frozen=True)
class Kind:
    """A way to serve a model: a row of the table. normal: the most that `moved` may be."""

    name: str
    normal: float
    options: dict = field(default_factory=dict)


KINDS = [Kind("float32", 0.001, dict(dtype="float32")),
         Kind("auto", 0.02),
         Kind("int8", 0.07, dict(quantization="int8")),
         Kind("int4", 0.1, dict(quantization="int4")),
         Kind("KV int8", 0.06, dict(kv_cache_dtype="int8"))]


REFERENCE = Kind("transformers, float32", 0.0)


@dataclass
class Answers:
    """What comes next, for each position of all windows but their last ones."""

    logprobs: list[float] = field(default_factory=list)  # of the text's own token
    likely: list[dict[int, float]] = field(default_factory=list)  # probabilities, highest first

    @property
    def perplexity(self) -> float:
        return exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class Served:
    """One kind beside the reference. error: the reason why the engine refuses this kind."""

    kind: Kind
    num_tokens: int = 0
    flips: float = 0.0
    moved: float = 0.0
    perplexity: float = 0.0
    change: float = 0.0  # of the perplexity, relative
    error: str = ""

    COLUMNS = "{:24}{:>9}{:>9}{:>9}{:>13}{:>10}{:>16}"
    HEADER = COLUMNS.format("served as", "tokens", "flips", "moved", "perplexity", "change",
                            "moved normally")

    @classmethod
    def beside(cls, kind: Kind, ours: Answers, theirs: Answers) -> "Served":
        both = list(zip(ours.likely, theirs.likely, strict=True))
        flips = sum(next(iter(p)) != next(iter(q)) for p, q in both)
        moved = sum(abs(p.get(token, 0) - q.get(token, 0)) for p, q in both for token in p | q) / 2
        return cls(kind, len(both), flips / len(both), moved / len(both), ours.perplexity,
                   ours.perplexity / theirs.perplexity - 1)

    @property
    def is_wrong(self) -> bool:
        return not self.moved <= self.kind.normal  # a NaN is wrong, too

    def __str__(self) -> str:
        if self.error:
            return f"{self.kind.name:24}not served: {self.error:.64}"
        line = self.COLUMNS.format(
            self.kind.name, self.num_tokens, f"{self.flips:.2%}", f"{self.moved:.2%}",
            f"{self.perplexity:,.3f}", f"{round(self.change, 4) + 0.0:+.2%}",
            "" if self.kind is REFERENCE else f"up to {self.kind.normal:.1%}").rstrip()
        return line + " WRONG" * self.is_wrong


def read_windows(path: Path, tokenizer: Tokenizer | None, count: int, size: int) -> list[list[int]]:
    """The first tokens of a text, in windows of `size` tokens at most. Each begins as a prompt of
    the tokenizer does, with BOS if it has one. Raises `ValueError` for less than two tokens."""
    text = read_text(path)[:count * size * LETTERS]
    if tokenizer is None:  # bytes, as read_prompts has them
        first, ids = [], list(text.encode())
    else:
        first = tokenizer.encode("")[:1]
        ids = tokenizer.encode(text, add_special_tokens=False)
    step = size - len(first)
    windows = [first + ids[start:start + step] for start in range(0, len(ids), step)][:count]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError(f"{path} is too short: it needs at least two tokens")
    return windows


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from None


@torch.inference_mode()
def reference_answers(model, windows: list[list[int]]) -> Answers:
    """Those of transformers' network."""
    answers = Answers()
    for window in windows:
        ids = torch.tensor(window, device=model.device)
        logits = model(ids[None, :-1], use_cache=False).logits[0].float()  # (window - 1, vocab)
        logprobs = logits.log_softmax(-1)
        likely = logprobs.topk(min(NUM_LIKELY, logprobs.shape[-1]))
        answers.logprobs += logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
        answers.likely += [dict(zip(*row, strict=True)) for row in zip(
            likely.indices.tolist(), likely.values.exp().tolist(), strict=True)]
    return answers


def engine_answers(model: str, windows: list[list[int]], **options) -> Answers:
    """Those of an engine. Raises `ValueError` for options that don't fit the model."""
    answers, longest = Answers(), max(map(len, windows)) + 1  # one token is generated
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_LIKELY,
                            detokenize=False)
    with LLM(model, skip_tokenizer_init=True, max_model_len=longest, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params,
                               use_tqdm=False)
    for window, output in zip(windows, outputs, strict=True):
        for token, entries in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            answers.logprobs.append(entries[token].logprob)
            ranked = sorted(entries.items(), key=lambda item: item[1].rank)
            answers.likely.append({one: exp(found.logprob) for one, found in ranked[:NUM_LIKELY]})
    return answers


def compare_kinds(model: str, windows: list[list[int]], theirs: Answers,
                  **options) -> Iterator[Served]:
    """A row for the reference, and for each kind when it has run."""
    yield Served.beside(REFERENCE, theirs, theirs)
    for kind in KINDS:
        try:
            ours = engine_answers(model, windows, **options | kind.options)
        except ValueError as error:  # rounded weights that are to be rounded again, say
            yield Served(kind, error=str(error))
        else:
            yield Served.beside(kind, ours, theirs)
