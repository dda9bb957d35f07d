"""The logprobs of one request's tokens, in the form in which its caller gets them.

For each token a step gives its id, logprob and rank, and those of the likeliest tokens at that
position. Here these become vLLM's `dict[token_id, Logprob]`, one for each token, the token itself
first. A request that wants 2 gets 2, even if its batch has looked up more:

    chosen 7    likeliest 3 7 9 (of which it wants 2)    ->    {7: rank 2, 3: rank 1}
    chosen 9    likeliest 3 7 9                          ->    {9: rank 3, 3: rank 1, 7: rank 2}

In a prompt, position i gives the logprob of token i + 1; the first token has no logprob, hence the
`None` in front.

Invariant: there is one dict for each token, even after an error. So a dict is stored first, and the
texts of its tokens are added afterwards, because a tokenizer may fail.
"""

from math import isnan

from nanoserve.checkpoint.tokenizers import Tokenizer
from nanoserve.config import SamplingParams
from nanoserve.frontend.outputs import Logprob

Entry = tuple[int, float, int]  # token id, logprob, rank


class LogprobHistory:
    """All logprobs of one request. tokenizer: None leaves the tokens' texts out."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None):
        self.params = params
        self.tokenizer = tokenizer
        self.samples: list[list[dict[int, Logprob]]] = [[] for _ in range(params.n)]
        self.cumulative = [0.0] * params.n  # the sum over a sample's tokens
        self.prompt: list[dict[int, Logprob] | None] = [None]
        self.undecoded: list[dict[int, Logprob]] = []
        self.texts: dict[int, str] = {}  # by token: the likely ones come again and again

    def add(self, index: int, entries: list[Entry]) -> None:
        """One more token of a sample. entries: the token, then the likeliest."""
        self.samples[index].append(self._as_dict(entries, self.params.logprobs))
        self.cumulative[index] += entries[0][1]

    def add_prompt(self, positions: range, entries: list[list[Entry]]) -> None:
        """Entries of the prompt positions of a step. After a preemption positions are computed
        again: those already known are skipped. Raises `FloatingPointError` at one that is NaN."""
        for position, one in zip(positions, entries, strict=True):
            if isnan(one[0][1]):
                raise FloatingPointError(f"the logits of prompt position {position}")
            if position + 1 == len(self.prompt):
                self.prompt.append(self._as_dict(one, self.params.prompt_logprobs))

    def decode(self) -> None:
        """Add to all new dicts the texts of their tokens, each token decoded alone."""
        if self.tokenizer is None:
            return
        for logprobs in self.undecoded:
            for token_id, logprob in logprobs.items():
                if token_id not in self.texts:
                    self.texts[token_id] = self.tokenizer.decode(
                        [token_id], clean_up_tokenization_spaces=False)
                logprob.decoded_token = self.texts[token_id]
        self.undecoded.clear()

    def _as_dict(self, entries: list[Entry], num_top: int) -> dict[int, Logprob]:
        logprobs = {token_id: Logprob(value, rank)
                    for token_id, value, rank in entries[:num_top + 1]}
        if self.tokenizer is not None:
            self.undecoded.append(logprobs)
        return logprobs
